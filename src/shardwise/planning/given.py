"""Who gets a reduced part from whom: its reducer's neighbours from it, other hosts once, by one of their takers."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from shardwise.geometry import Ints, cut, heads, ints, spread, starts
from shardwise.layout import Holders
from shardwise.planning import choose
from shardwise.planning.choose import Among
from shardwise.planning.copies import Copies
from shardwise.planning.hosts import Hosts
from shardwise.planning.reducers import Parts
from shardwise.planning.regions import Regions
from shardwise.planning.relays import Relays, Shares, handed


def given(regions: Regions, parts: Parts, takers: Holders, among: Among) -> list[Copies]:
    """Every part goes to the other takers of its region in the second step; with hosts some are handed on in the third.

    With `among.only` what that owner sends and receives. It knows all parts of the regions that it takes.
    """
    if among.only is not None:
        parts = parts.take(parts.given & np.isin(regions.target[parts.region], takers.rows_with(among.only)))
    else:
        parts = parts.take(parts.given)
    if not len(parts.region):
        return []
    if among.hosts is None:
        return [_direct(regions, parts, *_pairs(regions, parts, takers, among.only))]
    return _between(regions, parts, Neighbours.of(takers, among.hosts), among)


def _pairs(regions: Regions, parts: Parts, takers: Holders, only: int | None) -> tuple[Ints, Ints]:
    """Every part with every taker; or with the only one, but its own parts with all."""
    rows = np.arange(len(parts.region)) if only is None else np.flatnonzero(parts.owner == only)
    part, to = takers.expand(regions.target[parts.region[rows]])
    if only is None:
        return part, to
    others = np.flatnonzero(parts.owner != only)
    return np.concatenate([rows[part], others]), np.concatenate([to, np.full(len(others), only)])


def _direct(regions: Regions, parts: Parts, part: Ints, to: Ints) -> Copies:
    """Parts go from their reducers to others."""
    other = to != parts.owner[part]
    part, to = part[other], to[other]
    item, boxes = parts.take(part).cut(regions)
    return Copies.of(boxes, parts.owner[part[item]], to[item], step=1)


class Neighbours(NamedTuple):
    """The takers of a row that are on one host: a group of them for every row and host that has some, rising."""

    row: Ints
    host: Ints
    takers: Holders
    hosts: Hosts

    @staticmethod
    def of(takers: Holders, hosts: Hosts) -> Neighbours:
        """All groups."""
        key = np.repeat(np.arange(len(takers.counts)), takers.counts) * hosts.count + hosts.host(takers.owners)
        order = np.argsort(key, kind="stable")
        first = np.flatnonzero(heads(key[order]))
        row, host = np.divmod(key[order[first]], hosts.count)
        return Neighbours(row, host, Holders(np.append(first, len(key)), takers.owners[order]), hosts)

    def number(self, row: Ints, host: Ints) -> Ints:
        """The group of each row and host, or where it would be."""
        return (self.row * self.hosts.count + self.host).searchsorted(row * self.hosts.count + host)

    def of_rows(self, row: Ints) -> tuple[Ints, Ints]:
        """All groups of each row: the index into `row`, and the group."""
        first, last = (ints(self.row.searchsorted(row, side)) for side in ("left", "right"))
        index, nth = spread(last - first)
        return index, first[index] + nth


def _between(regions: Regions, parts: Parts, groups: Neighbours, among: Among) -> list[Copies]:
    """The parts with hosts: direct to takers on the reducer's host, and by relays to those on others."""
    taken = regions.target[parts.region]
    own = groups.number(taken, groups.hosts.host(parts.owner))
    part, group = _with_groups(parts, taken, groups, among.only)
    near = group == own[part]
    index, to = groups.takers.expand(group[near])
    direct = part[near][index]
    if among.only is not None:
        wanted = (parts.owner[direct] == among.only) | (to == among.only)
        direct, to = direct[wanted], to[wanted]
    copies = _direct(regions, parts, direct, to)
    return [copies, *_relayed(regions, parts, groups, part[~near], group[~near], among.only)]


def _with_groups(parts: Parts, taken: Ints, groups: Neighbours, only: int | None) -> tuple[Ints, Ints]:
    """Every part with every group of takers; or with that of the only owner, but its own parts with all."""
    if only is None:
        return groups.of_rows(taken)
    others = np.flatnonzero(parts.owner != only)
    mine = np.flatnonzero(parts.owner == only)
    index, group = groups.of_rows(taken[mine])
    here = groups.number(taken[others], groups.hosts.host(np.full(len(others), only)))
    return np.concatenate([mine[index], others]), np.concatenate([group, here])


def _relayed(
    regions: Regions, parts: Parts, groups: Neighbours, part: Ints, group: Ints, only: int | None
) -> list[Copies]:
    """What is not reduced on a host is fetched by its takers in equal lengths, and handed on there."""
    order = np.lexsort((part, group))
    part, group = part[order], group[order]
    volume = (parts.stop - parts.start)[part]
    relays = Relays(
        part,
        groups.host[group],
        groups.row[group],
        groups.takers.edges[group],
        groups.takers.counts[group],
        groups.takers.owners,
    )
    least = np.full(len(part), choose.LEAST_SHARE)
    shares = Shares.of(relays, volume, _laid(regions, parts, groups, part, group), least, relays.team)
    begin, source = parts.start[part[shares.relay]], parts.owner[part[shares.relay]]
    shares = shares._replace(start=shares.start + begin, stop=shares.stop + begin)
    relays = relays._replace(region=parts.region[part])
    if only is None:
        fetching, handing = np.arange(len(source)), np.arange(len(source))
    else:
        here = relays.host[shares.relay] == groups.hosts.host(ints([only]))
        fetching, handing = np.flatnonzero((shares.by == only) | (source == only)), np.flatnonzero(here)
    some = shares.take(fetching)
    item, boxes = cut(regions.boxes.take(relays.region[some.relay]), some.start, some.stop)
    fetched = Copies.of(boxes, source[fetching[item]], some.by[item], step=1)
    together = _together(relays, group, shares.take(handing))
    return [fetched, handed(regions.boxes, relays, together, only=only, step=2)]


def _laid(regions: Regions, parts: Parts, groups: Neighbours, part: Ints, group: Ints) -> tuple[Ints, Ints]:
    """Where parts lie in all that a group lacks, laid end to end: the cells before each, and all of them.

    That is all parts of the group's row, without those that are reduced on its host.
    """
    volume, taken = parts.stop - parts.start, regions.target[parts.region]
    order = np.argsort(taken, kind="stable")
    every = starts(volume[order])
    rank = np.empty_like(order)
    rank[order] = np.arange(len(order))
    first, last = (taken[order].searchsorted(groups.row[group], side) for side in ("left", "right"))
    where = groups.number(taken, groups.hosts.host(parts.owner))
    placed = np.lexsort((rank, where))
    key, mine = where[placed] * len(order) + rank[placed], starts(volume[placed])
    low, high = (key.searchsorted(edge) for edge in (group * len(order), (group + 1) * len(order)))
    before = key.searchsorted(group * len(order) + rank[part])
    inside = every[rank[part]] - every[first] - (mine[before] - mine[low])
    return inside, every[last] - every[first] - (mine[high] - mine[low])


def _together(relays: Relays, group: Ints, shares: Shares) -> Shares:
    """Shares of one taker that follow each other in a region are handed on as one."""
    region, team = relays.region[shares.relay], group[shares.relay]
    new = heads(region, team, shares.by)
    new[1:] |= shares.start[1:] != shares.stop[:-1]
    last = np.append(new[1:], True)[: len(new)]
    return Shares(shares.relay[new], shares.by[new], shares.start[new], shares.stop[last])
