"""Who reduces which cells: those of the takers that hold terms of a cell share it, or all takers where none does."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from shardwise.geometry import Bools, Boxes, Ints, counted, cut, different, ints, spread
from shardwise.layout import Holders
from shardwise.planning import choose
from shardwise.planning.hosts import Hosts
from shardwise.planning.lengths import begin
from shardwise.planning.regions import Regions


class Pairs(NamedTuple):
    """Blocks and rows of takers: the cells of both, and how many takers have a term of the block."""

    block: Ints
    row: Ints
    cells: Ints
    having: Ints


class Parts(NamedTuple):
    """Owner `owner` reduces the cells `start:stop` of a region, counted in row-major order.

    If `given`, the other takers of the region get them from it.
    """

    region: Ints
    owner: Ints
    start: Ints
    stop: Ints
    given: Bools

    @staticmethod
    def of(regions: Regions, takers: Holders, holders: Holders, hosts: Hosts | None) -> Parts:
        """All parts of these regions, in the order of their cells.

        Where several takers need a region, some of them reduce a share each and give the result to the others, if that
        moves fewer cells than reducing everything everywhere. The shares are equal, where they are not too small; else
        fewer owners get one, beginning with the one whose turn it is.
        """
        volume, every = regions.boxes.volumes(), takers.counts[regions.target]
        having = _having(regions, takers, holders)
        each = alone(Pairs(regions.source, regions.target, volume, having.counts), takers, holders, hosts)
        inside = (having.counts > 0) & ~each
        owners = np.concatenate([takers.owners, having.owners])
        first = np.where(inside, len(takers.owners) + having.edges[:-1], takers.edges[regions.target])
        count = np.where(inside, having.counts, every)
        crowd = inside & (holders.terms == 2) & (having.counts == every)
        shares = np.where(each, 1, sharing(volume, count, crowd))
        region, nth = spread(np.where(each, count, shares))
        owner = owners[first[region] + (nth + regions.source[region]) % count[region]]
        nth, size, extra = np.where(each[region], 0, nth), *(side[region] for side in np.divmod(volume, shares))
        return Parts(region, owner, begin(nth, size, extra), begin(nth + 1, size, extra), ~each[region])

    def take(self, rows: Ints | Bools) -> Parts:
        """Some of them."""
        return Parts(self.region[rows], self.owner[rows], self.start[rows], self.stop[rows], self.given[rows])

    def cut(self, regions: Regions) -> tuple[Ints, Boxes]:
        """Their boxes, and the part of each."""
        return cut(regions.boxes.take(self.region), self.start, self.stop)


def _having(regions: Regions, takers: Holders, holders: Holders) -> Holders:
    """For each region those of its takers that hold a term of it, rising; nobody where there is one taker only.

    Of the two lists of owners the shorter one is looked through: so they are never many more than there are owners.
    """
    of_block = Holders(holders.edges[:: holders.terms], holders.owners)
    several = takers.counts[regions.target] > 1
    fewer = of_block.counts[regions.source] < takers.counts[regions.target]
    found = list[tuple[Ints, Ints]]()
    for where, listed, row, others, other in (
        (several & fewer, of_block, regions.source, takers, regions.target),
        (several & ~fewer, takers, regions.target, of_block, regions.source),
    ):
        rows = np.flatnonzero(where)
        entry, owner = listed.expand(row[rows])
        both = others.hold(other[rows[entry]], owner)
        found.append((rows[entry[both]], owner[both]))
    region, owner = (np.concatenate(side) for side in zip(*found, strict=True))
    counts = ints(np.bincount(region, minlength=regions.boxes.count))
    return Holders.of(counts, owner[np.lexsort((owner, region))])


def alone(pairs: Pairs, takers: Holders, holders: Holders, hosts: Hosts | None) -> Bools:
    """The pairs that every taker reduces for itself: it is the only one, or has one of two terms as all others have.

    With hosts not where several takers on one host would each have a term cross to it.
    """
    every = takers.counts[pairs.row]
    found = every == 1
    rows = np.flatnonzero((holders.terms == 2) & (pairs.having == every) & ~found)
    if hosts is not None and len(rows):
        rows = rows[~_crowded(pairs.block[rows], pairs.row[rows], takers, holders, hosts)]
    found[rows] = True
    return found


def sharing(cells: Ints, members: Ints, crowd: Bools) -> Ints:
    """How many of a team share the work on so many cells: fewer than all, where their shares would be too small.

    In a crowd each member could have done all the work for little more: there one of four takes part at least.
    """
    return np.clip(cells // choose.LEAST_SHARE, np.where(crowd, -(-members // 4), 1), members)


def _crowded(block: Ints, row: Ints, takers: Holders, holders: Holders, hosts: Hosts) -> Bools:
    """True where fewer hosts than takers need something, and a term of it is not there."""
    index, owner = takers.expand(row)
    index, at = np.divmod(different(index * hosts.count + hosts.host(owner)), hosts.count)
    lacks = ~np.isin(block[index] * hosts.count + at, complete(holders, hosts))
    return (np.bincount(index, lacks, len(row)) > 0) & (np.bincount(index, minlength=len(row)) < takers.counts[row])


def complete(holders: Holders, hosts: Hosts) -> Ints:
    """The pairs (block * hosts + host) of which that host has all terms of that block."""
    row = np.repeat(np.arange(len(holders.counts)), holders.counts)
    row, host = np.divmod(different(row * hosts.count + hosts.host(holders.owners)), hosts.count)
    pair, terms = counted(row // holders.terms * hosts.count + host)
    return pair[terms == holders.terms]
