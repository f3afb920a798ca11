"""One owner's part of a plan between two grids, where replicas or hosts give a choice: counted, not listed.

Who serves an owner depends on what others ask before it. How much that is follows from how many cells blocks share
along each axis (`Overlaps`), how often a block is asked for, and what those who ask hold already. So an owner looks at
its own regions, at the holders and takers of these, and at nothing else; the result is what `deliver` makes of a list
of everybody's needs.
"""

from __future__ import annotations

from functools import cached_property

import numpy as np

from shardwise.geometry import Boxes, Ints, Overlaps, cross_grids, different, either, ints, running, spread, totals
from shardwise.layout import Grid, Holders
from shardwise.planning.choose import Asked, Need, fetched, least_share, serve
from shardwise.planning.copies import Copies
from shardwise.planning.hosts import Hosts
from shardwise.planning.relays import Relays, Shares, handed


class Counts:
    """What one owner has to know of the others. Without hosts everybody is on a host of its own."""

    def __init__(self, source: Grid, target: Grid, takers: Holders, hosts: Hosts | None, owner: int) -> None:
        self.source, self.target, self.owner = source, target, owner
        self.holders, self.takers = source.holders, takers
        self.overlaps = Overlaps(source.axes, target.axes)
        self.hosts = hosts or Hosts.apart(either(source.owners, target.owners))
        self.host = int(self.hosts.host(ints([owner]))[0])

    # --- rows: blocks of one term -----------------------------------------------------------------------------------

    @cached_property
    def held(self) -> int:
        """The row that the owner holds, or -1."""
        return int(self.holders.row_of(ints([self.owner]))[0])

    @cached_property
    def taken(self) -> int:
        """The row that the owner is to get, or -1."""
        return int(self.takers.row_of(ints([self.owner]))[0])

    def cells(self, source: Ints, target: Ints) -> Ints:
        """The cells that rows of the source share with rows of the target, pair by pair."""
        terms = self.holders.terms
        return self.overlaps.shared(source // terms, target // terms)

    # --- who is where -----------------------------------------------------------------------------------------------

    @cached_property
    def here(self) -> Ints:
        """All owners on this owner's host."""
        return self.hosts.on(self.host)

    def rows_by_host(self, rows: Holders, term: int) -> tuple[Ints, Ints]:
        """Every host with every row of that term that somebody there has: hosts rising, rows rising at each."""
        row = np.repeat(np.arange(len(rows.counts)), rows.counts)
        some = slice(None) if rows.terms == 1 else row % rows.terms == term
        key = different(self.hosts.host(rows.owners[some]) * len(rows.counts) + row[some])
        host, row = np.divmod(key, len(rows.counts))
        return host, row

    def at(self, hosts: Ints, known: tuple[Ints, Ints]) -> tuple[Ints, Ints]:
        """All rows that `known` has for each of these hosts: the index into `hosts`, and the row."""
        first, last = (known[0].searchsorted(hosts, side) for side in ("left", "right"))
        index, nth = spread(last - first)
        return index, known[1][first[index] + nth]


def received(counts: Counts) -> list[Copies]:
    """What an owner keeps, receives, and hands on."""
    if counts.taken < 0:
        return []
    source, target, terms, owner = counts.source, counts.target, counts.holders.terms, counts.owner
    block, term = divmod(counts.taken, terms)
    boxes, _, row = cross_grids(target.axes, source.axes, parts=_parts(target, block))
    order = np.argsort(row, kind="stable")
    boxes, row = boxes.take(order), row[order] * terms + term
    rows_here = counts.holders.row_of(counts.here)
    held = row == counts.holders.row_of(ints([owner]))[0]
    near = np.isin(row, rows_here) & ~held
    copies = [_kept(boxes.take(held), owner)]
    if near.any():
        copies.append(_from_host(counts, boxes.take(near), row[near], term))
    if not (near | held).all():
        far = ~(near | held)
        copies += _from_afar(counts, boxes.take(far), row[far], term)
    return copies


def _parts(grid: Grid, block: int) -> tuple[int, ...]:
    return tuple(map(int, np.unravel_index(block, grid.table.shape[:-2])))


def _kept(boxes: Boxes, owner: int) -> Copies:
    same = np.full(boxes.count, owner)
    return Copies.of(boxes, same, same)


def _from_host(counts: Counts, boxes: Boxes, row: Ints, term: int) -> Copies:
    """From holders on the owner's host, who share what is asked of them there."""
    holders, takers, owner = counts.holders, counts.takers, counts.owner
    rows, here = different(row), counts.here
    mine = takers.row_of(here)
    asking = here[(mine >= 0) & (mine % holders.terms == term)] if takers.terms > 1 else here[mine >= 0]
    pair, by = (side.reshape(-1) for side in np.meshgrid(rows, asking, indexing="ij"))
    cells = counts.cells(pair, takers.row_of(by)) * (holders.row_of(by) != pair)
    table, at = cells.reshape(len(rows), len(asking)), rows.searchsorted(row)
    before = table[:, asking < owner].sum(axis=1)[at] + running(boxes.volumes(), row)
    asked = Asked(before, table.sum(axis=1)[at], counts.overlaps.most(row // holders.terms))
    where = holders.row_of(here)
    order = np.lexsort((here, where))
    order = order[np.isin(where[order], rows)]
    near = Holders.of(ints(np.bincount(rows.searchsorted(where[order]), minlength=len(rows))), here[order])
    return serve(boxes, Need(np.arange(len(row)), np.full(len(row), owner)), at, near, asked, turn=row)


def _from_afar(counts: Counts, boxes: Boxes, row: Ints, term: int) -> list[Copies]:
    """The owner's share of what its host lacks, and what it gets from the other takers there and hands on to them."""
    takers, holders, owner = counts.takers, counts.holders, counts.owner
    team = counts.here[takers.row_of(counts.here) == counts.taken]
    every = np.full(len(row), counts.taken)
    relays = Relays(
        np.arange(len(row)), np.full(len(row), counts.host), every, np.zeros_like(row), len(team) + 0 * row, team
    )
    volume = boxes.volumes()
    least = least_share(holders.counts[row], relays.several, takers.counts[every])
    shares = Shares.of(relays, volume, relays.laid(volume), least, every)
    mine = shares.take(shares.by == owner)
    asked = _asked_from_afar(counts, row[mine.relay], running(volume, row)[mine.relay], term)
    copies = fetched(boxes, row, relays, mine, holders, asked, only=None)
    return [copies, handed(boxes, relays, shares, only=owner, step=1)]


def _asked_from_afar(counts: Counts, row: Ints, inside: Ints, term: int) -> Asked:
    """What hosts without a holder ask of rows, in the order of hosts; at one host in the order of its takers' rows."""
    holders, terms = counts.holders, counts.holders.terms
    rows = different(row)
    if not len(rows):
        return Asked(inside, inside, inside)
    host, taking = taken = counts.rows_by_host(counts.takers, term)
    blocks = len(counts.takers.counts) // terms
    weights = [np.bincount(taking[which] // terms, minlength=blocks) for which in (host >= 0, host < counts.host)]
    total, before = counts.overlaps.weighed(rows // terms, weights)
    entry, holder = holders.expand(rows)
    key = different(entry * counts.hosts.count + counts.hosts.host(holder))
    entry, having = np.divmod(key, counts.hosts.count)
    index, took = counts.at(having, taken)
    entry, having = entry[index], having[index]
    cells = counts.cells(rows[entry], took)
    total = total - totals(cells, entry, len(rows))
    before = before - totals(cells * (having < counts.host), entry, len(rows))
    own = taking[host == counts.host]
    own = own[own < counts.taken]
    entry, took = (side.reshape(-1) for side in np.meshgrid(np.arange(len(rows)), own, indexing="ij"))
    before = before + totals(counts.cells(rows[entry], took), entry, len(rows))
    at = rows.searchsorted(row)
    return Asked(before[at] + inside, total[at], counts.overlaps.most(row // terms))


def sent(counts: Counts) -> list[Copies]:
    """What an owner sends of its own block, in the first step."""
    if counts.held < 0:
        return []
    source, target, holders, takers = counts.source, counts.target, counts.holders, counts.takers
    block, term = divmod(counts.held, holders.terms)
    boxes, _, team = cross_grids(source.axes, target.axes, parts=_parts(source, block))
    team = team * holders.terms + term
    need = Need(*takers.expand(team))
    need = need.take(holders.row_of(need.target) != counts.held)
    host = counts.hosts.host(need.target)
    there = counts.hosts.host(holders.expand(ints([counts.held]))[1])
    near = host == counts.host
    return [
        *_to_host(counts, boxes, team, need.take(near)),
        *_to_afar(counts, boxes, team, need.take(~np.isin(host, there))),
    ]


def _to_host(counts: Counts, boxes: Boxes, team: Ints, need: Need) -> list[Copies]:
    """To takers on the owner's host."""
    if not len(need.region):
        return []
    here = counts.here[counts.holders.row_of(counts.here) == counts.held]
    row, most = np.full(boxes.count, counts.held), _most(counts, boxes.count)
    asked = Asked.listed(row[need.region], need.target, boxes.volumes()[need.region], most[need.region])
    near = Holders.of(ints([len(here)]), here)
    group = np.zeros_like(need.region)
    copies = serve(boxes, need, group, near, asked, turn=row[need.region], only=counts.owner)
    return [copies.take(copies.source == counts.owner)]


def _most(counts: Counts, count: int) -> Ints:
    return np.repeat(counts.overlaps.most(ints([counts.held // counts.holders.terms])), count)


def _to_afar(counts: Counts, boxes: Boxes, team: Ints, need: Need) -> list[Copies]:
    """To takers on hosts that hold nothing of the owner's block."""
    if not len(need.region):
        return []
    row, volume = np.full(boxes.count, counts.held), boxes.volumes()
    relays = Relays.listed(need.region, need.target, counts.hosts, row, team)
    region, replicas = relays.region, counts.holders.counts[row[relays.region]]
    least = least_share(replicas, relays.several, counts.takers.counts[relays.team])
    shares = Shares.of(relays, volume[region], _laid(counts, relays, volume[region]), least, relays.team)
    asked = Asked.listed(row[region], relays.host, volume[region], _most(counts, len(region))).take(shares.relay)
    copies = fetched(boxes, row, relays, shares, counts.holders, asked, only=counts.owner)
    return [copies.take(copies.source == counts.owner)]


def _laid(counts: Counts, relays: Relays, volume: Ints) -> tuple[Ints, Ints]:
    """Where these relays lie in all that their hosts lack of their teams' rows, and how much that is."""
    inside, alone = relays.laid(volume)
    some = np.flatnonzero(relays.several > 1)
    if not len(some):
        return inside, alone
    terms, width = counts.holders.terms, len(counts.takers.counts)
    key = relays.host[some] * width + relays.team[some]
    keys = different(key)
    host, team = np.divmod(keys, width)
    held = np.full(len(keys), counts.held)
    entry, other = counts.at(host, counts.rows_by_host(counts.holders, counts.held % terms))
    cells = counts.cells(other, team[entry])
    whole = counts.target.volumes(team // terms) - totals(cells, entry, len(keys))
    ahead = counts.overlaps.before(held // terms, team // terms)
    ahead = ahead - totals(cells * (other < counts.held), entry, len(keys))
    at = keys.searchsorted(key)
    inside[some] += ahead[at]
    alone[some] = whole[at]
    return inside, alone
