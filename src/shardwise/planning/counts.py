"""What one owner of a plan between two grids has to know of the others, in numbers and not in lists."""

from __future__ import annotations

from functools import cached_property

import numpy as np

from shardwise.geometry import Boxes, Ints, Overlaps, cross_grids, different, ints, spread
from shardwise.layout import Grid, Holders
from shardwise.planning.choose import Asked, Need, serve
from shardwise.planning.copies import Copies
from shardwise.planning.hosts import Hosts


class Counts:
    """Rows are blocks of one term: those that the owner has and gets, and the cells that rows share."""

    def __init__(self, source: Grid, target: Grid, takers: Holders, owner: int) -> None:
        self.source, self.target, self.owner = source, target, owner
        self.holders, self.takers = source.holders, takers
        self.overlaps = Overlaps(source.axes, target.axes)

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

    def wanted(self) -> tuple[Boxes, Ints, int]:
        """The boxes of the row that the owner is to get, by the rows of the source that have them; and its term."""
        block, term = divmod(self.taken, self.holders.terms)
        boxes, _, row = cross_grids(self.target.axes, self.source.axes, parts=_parts(self.target, block))
        order = np.argsort(row, kind="stable")
        return boxes.take(order), row[order] * self.holders.terms + term, term

    def offered(self) -> tuple[Boxes, Ints, Need]:
        """The boxes of the row that the owner has, the rows that take them, and who needs them and lacks them."""
        block, term = divmod(self.held, self.holders.terms)
        boxes, _, team = cross_grids(self.source.axes, self.target.axes, parts=_parts(self.source, block))
        team = team * self.holders.terms + term
        need = Need(*self.takers.expand(team))
        return boxes, team, need.take(self.holders.row_of(need.target) != self.held)

    def kept(self, boxes: Boxes) -> Copies:
        """Boxes that the owner has already."""
        same = np.full(boxes.count, self.owner)
        return Copies.of(boxes, same, same)

    def given(self, boxes: Boxes, need: Need, sharing: Ints) -> Copies:
        """What the owner sends of what is needed of its row, where these holders of the row share the work."""
        row, most = np.full(len(need.region), self.held), self.most_of_held(len(need.region))
        asked = Asked.listed(row, need.target, boxes.volumes()[need.region], most)
        sharers = Holders.of(ints([len(sharing)]), sharing)
        copies = serve(boxes, need, np.zeros_like(row), sharers, asked, turn=row, only=self.owner)
        return copies.take(copies.source == self.owner)

    def most_of_held(self, count: int) -> Ints:
        """The most cells of the row that one taker can ask for, so many times."""
        return np.repeat(self.overlaps.most(ints([self.held // self.holders.terms])), count)


def _parts(grid: Grid, block: int) -> tuple[int, ...]:
    return tuple(map(int, np.unravel_index(block, grid.table.shape[:-2])))


class HostCounts(Counts):
    """With hosts: also who is where."""

    def __init__(self, source: Grid, target: Grid, takers: Holders, hosts: Hosts, owner: int) -> None:
        super().__init__(source, target, takers, owner)
        self.hosts, self.host = hosts, int(hosts.host(ints([owner]))[0])

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
