"""How many cells the blocks of two grids share: counted axis by axis, so that no pair of blocks has to be listed."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property
from math import prod

import numpy as np

from shardwise.geometry.axis import Axis
from shardwise.geometry.ragged import Ints, different, ints, starts, totals


class AxisOverlaps:
    """What the parts of one axis share with the parts of another."""

    def __init__(self, mine: Axis, theirs: Axis) -> None:
        self.mine, self.theirs = mine, theirs

    @cached_property
    def _simple(self) -> bool:
        """True where parts are intervals: then the cuts say it all."""
        return self.mine.simple and self.theirs.simple

    @cached_property
    def _sorted(self) -> tuple[Ints, Ints]:
        """The pairs that share cells, as numbers that rise part by part of theirs, and the cells before each."""
        crossing = self.mine.cross(self.theirs)
        pair = self.theirs.part_of(crossing.theirs) * self.mine.parts + self.mine.part_of(crossing.mine)
        pairs = different(pair)
        return pairs, starts(totals(crossing.hi - crossing.lo, pairs.searchsorted(pair), len(pairs)))

    def upto(self, mine: Ints, theirs: Ints) -> Ints:
        """The cells that a part of theirs shares with those parts of mine that come before one."""
        if self._simple:
            low = self.theirs.cuts[theirs]
            return np.clip(self.mine.cuts[mine] - low, 0, self.theirs.cuts[theirs + 1] - low)
        pairs, before = self._sorted
        first = theirs * self.mine.parts
        return before[pairs.searchsorted(first + mine)] - before[pairs.searchsorted(first)]

    def shared(self, mine: Ints, theirs: Ints) -> Ints:
        """The cells of both parts, pair by pair."""
        if self._simple:
            high = np.minimum(self.mine.cuts[mine + 1], self.theirs.cuts[theirs + 1])
            return np.maximum(high - np.maximum(self.mine.cuts[mine], self.theirs.cuts[theirs]), 0)
        return self.upto(mine + 1, theirs) - self.upto(mine, theirs)

    def listed(self, parts: Ints) -> tuple[Ints, Ints, Ints]:
        """For each of these parts of mine: where its pairs begin, their parts of theirs, and the cells of both."""
        if self.mine.simple:
            crossing = self.mine.cross(self.theirs, only=parts)
        else:
            crossing = self.mine.cross(self.theirs, only=np.flatnonzero(np.isin(self.mine.part, parts)))
        place, theirs = parts.searchsorted(self.mine.part_of(crossing.mine)), self.theirs.part_of(crossing.theirs)
        order = np.argsort(place, kind="stable")
        counts = np.bincount(place, minlength=len(parts))
        return starts(ints(counts))[:-1], theirs[order], (crossing.hi - crossing.lo)[order]

    def most(self, parts: Ints) -> Ints:
        """For each of these parts of mine: the most cells that it shares with one of theirs."""
        if self._simple:
            first, _, cells = self.listed(parts)
            return np.maximum.reduceat(cells, first)
        pairs, before = self._sorted
        cells = np.zeros(self.mine.parts, dtype=np.int64)
        np.maximum.at(cells, pairs % self.mine.parts, np.diff(before))
        return cells[parts]

    def largest(self) -> int:
        """The most cells that a part of mine shares with one of theirs."""
        if self.mine.parts == 1 or self.theirs.parts == 1:  # as most axes are: not cut on one side
            return int((self.mine if self.theirs.parts == 1 else self.theirs).lengths.max())
        return int(self.most(np.arange(self.mine.parts)).max())


class Overlaps:
    """What the blocks of one grid share with the blocks of another; blocks are numbered in row-major order.

    >>> from shardwise.geometry import Spans
    >>> rows, columns, whole = (Axis.of(Spans.whole(6).chunk(n))[0] for n in (3, 2, 1))
    >>> both = Overlaps([rows, whole], [whole, columns])
    >>> both.shared(ints([0, 2]), ints([1, 1])).tolist()
    [6, 6]
    """

    def __init__(self, mine: Sequence[Axis], theirs: Sequence[Axis]) -> None:
        self._axes = [AxisOverlaps(a, b) for a, b in zip(mine, theirs, strict=True)]
        self._shapes = tuple(a.parts for a in mine), tuple(b.parts for b in theirs)

    def _parts(self, mine: Ints, theirs: Ints) -> list[tuple[AxisOverlaps, Ints, Ints]]:
        here, there = (
            np.unravel_index(blocks, shape) if shape else ()
            for blocks, shape in zip((mine, theirs), self._shapes, strict=True)
        )
        return [(axis, ints(a), ints(b)) for axis, a, b in zip(self._axes, here, there, strict=True)]

    def shared(self, mine: Ints, theirs: Ints) -> Ints:
        """The cells of both blocks, pair by pair."""
        cells = np.ones(len(mine), dtype=np.int64)
        for axis, a, b in self._parts(mine, theirs):
            cells *= axis.shared(a, b)
        return cells

    def before(self, mine: Ints, theirs: Ints) -> Ints:
        """The cells that a block of theirs shares with the blocks of mine that come before one, pair by pair."""
        cells, inside = np.zeros(len(mine), dtype=np.int64), np.ones(len(mine), dtype=np.int64)
        for axis, a, b in self._parts(mine, theirs):
            cells = cells * axis.theirs.lengths[b] + inside * axis.upto(a, b)
            inside = inside * axis.shared(a, b)
        return cells

    def weighed(self, mine: Ints, weights: Sequence[Ints]) -> list[Ints]:
        """For each of these blocks of mine: its cells, each as often as the weight of the block of theirs it lies in.

        Axis by axis, those first that leave the fewest numbers: so there are never many more than blocks of a grid.
        """
        here, there = self._shapes
        places = np.unravel_index(mine, here) if here else ()
        parts = [different(place) for place in places]
        tables = [weight.reshape(there) for weight in weights]
        for at in sorted(range(len(parts)), key=lambda axis: len(parts[axis]) / there[axis]):
            first, theirs, cells = self._axes[at].listed(parts[at])
            cells = cells.reshape([-1 if axis == at else 1 for axis in range(len(parts))])
            tables = [np.add.reduceat(table.take(theirs, axis=at) * cells, first, axis=at) for table in tables]
        found = tuple(mine_parts.searchsorted(place) for mine_parts, place in zip(parts, places, strict=True))
        return [table[found] if found else np.full(len(mine), table) for table in tables]

    def most(self, mine: Ints) -> Ints:
        """For each of these blocks of mine: the most cells that it shares with one of theirs."""
        cells = np.ones(len(mine), dtype=np.int64)
        for axis, place in zip(self._axes, np.unravel_index(mine, self._shapes[0]) if self._axes else (), strict=True):
            parts = different(place)
            cells *= axis.most(parts)[parts.searchsorted(place)]
        return cells

    def largest(self) -> int:
        """The most cells that a block of mine shares with one of theirs."""
        return prod(axis.largest() for axis in self._axes)
