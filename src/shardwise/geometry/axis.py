"""One dimension, cut into parts. A part is one interval or several; a grid is a product of axes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from math import prod
from typing import NamedTuple

import numpy as np

from shardwise.geometry.boxes import Boxes, row_major
from shardwise.geometry.ragged import Ints, heads, ints, running, spread, starts, totals


class Spans(NamedTuple):
    """Intervals `start:stop` with the part that each belongs to, in increasing order. Parts may share cells."""

    start: Ints
    stop: Ints
    part: Ints

    @staticmethod
    def whole(size: int) -> Spans:
        """The one part that holds all of the dimension."""
        return Spans(ints([0]), ints([size]), ints([0]))

    @staticmethod
    def pieces(sizes: Ints, part: Ints) -> Spans:
        """Neighbouring intervals of these sizes."""
        edges = starts(sizes)
        return Spans(edges[:-1], edges[1:], part)

    def chunk(self, count: int) -> Spans:
        """Every part cut into `count` by torch.chunk's rule: chunk i of part p becomes part p * count + i.

        >>> Spans.whole(10).chunk(4).stop.tolist()
        [3, 6, 9, 10]
        """
        if len(self.part) == 1:  # as most are, and in a few steps
            low, high, only = (int(values[0]) for values in self)
            edges = _edges(low, high, -(-(high - low) // count))
            return Spans(edges[:-1], edges[1:], np.arange(only * count, only * count + len(edges) - 1))
        first, length = self._offsets()
        size = -(-length // count)  # the ceil rule: trailing chunks are smaller or empty
        start, stop, part, chunk = self._cut(first, size)
        return Spans(start, stop, part * count + chunk)

    def strided(self, factor: int, count: int) -> Spans:
        """Every part cut into `factor` chunks, these into `count`; chunk i of each together is one part.

        >>> s = Spans.whole(9).strided(2, count=4)
        >>> [(int(a), int(b), int(p)) for a, b, p in zip(*s)]
        [(0, 2, 0), (2, 4, 1), (4, 5, 2), (5, 6, 0), (6, 7, 1), (7, 8, 2), (8, 9, 3)]
        """
        start, stop, part = self.chunk(factor).chunk(count)
        return Spans(start, stop, part // (factor * count) * count + part % count)

    def zigzag(self, count: int) -> Spans:
        """Every part cut into 2 * `count` chunks; chunk i and the i-th from the end together are one part.

        >>> Spans.whole(8).zigzag(2).part.tolist()
        [0, 1, 1, 0]
        """
        start, stop, part = self.chunk(2 * count)
        chunk = part % (2 * count)
        return Spans(start, stop, part // (2 * count) * count + np.minimum(chunk, 2 * count - 1 - chunk))

    def cyclic(self, block: int, count: int) -> Spans:
        """Every part cut into blocks, which are dealt out to `count` parts in turn.

        >>> Spans.whole(10).cyclic(2, count=2).part.tolist()
        [0, 1, 0, 1, 0]
        """
        if len(self.part) == 1:
            low, high, only = (int(values[0]) for values in self)
            edges = _edges(low, high, block)
            return Spans(edges[:-1], edges[1:], only * count + np.arange(len(edges) - 1) % count)
        first, length = self._offsets()
        start, stop, part, nth = self._cut(first, np.full_like(length, block))
        return Spans(start, stop, part * count + nth % count)

    def shared(self, units: Ints, count: int) -> Spans:
        """Every part cut into `count` equal ones; where it has fewer `units`, each goes to count / units in a row.

        >>> Spans.pieces(ints([8, 2]), ints([0, 1])).shared(ints([4, 1]), count=2).start.tolist()
        [0, 4, 8, 8]
        """
        first, length = self._offsets()
        chunks = np.clip(units[: len(length)], 1, count)
        start, stop, part, nth = self._cut(first, length // chunks)
        copies = count // chunks[part]
        row, copy = spread(copies)
        return Spans(start[row], stop[row], (part * count + nth * copies)[row] + copy)

    def fused(self, count: int) -> Spans:
        """Part i of each run of `count` parts together is one part: segments that were all cut into `count`."""
        return Spans(self.start, self.stop, self.part % count)

    def _cut(self, first: Ints, size: Ints) -> tuple[Ints, Ints, Ints, Ints]:
        """Every part cut into blocks of its size: start, stop, the part, and which of its blocks."""
        size = np.maximum(size, 1)[self.part]
        last = first + self.stop - self.start - 1
        row, nth = spread(np.where(last >= first, last // size - first // size + 1, 0))
        block, shift, size = first[row] // size[row] + nth, self.start[row] - first[row], size[row]
        start = np.maximum(self.start[row], block * size + shift)
        stop = np.minimum(self.stop[row], (block + 1) * size + shift)
        return start, stop, self.part[row], block

    def _offsets(self) -> tuple[Ints, Ints]:
        """Where each interval lies in its part, and the length of every part."""
        size = self.stop - self.start
        order = np.argsort(self.part, kind="stable")
        offset = np.empty_like(size)
        offset[order] = running(size[order], self.part[order])
        return offset, totals(size, self.part, int(self.part.max(initial=-1)) + 1)


def _edges(start: int, stop: int, size: int) -> Ints:
    """Where blocks of a size begin and end in an interval."""
    size = max(size, 1)
    return np.minimum(np.arange(start, stop + size, size), stop)


@dataclass(frozen=True, eq=False)
class Axis:
    """A dimension of `size` cells: interval i is `cuts[i]:cuts[i + 1]` and belongs to part `part[i]`.

    No interval is empty, neighbours belong to different parts, and parts are numbered as they first appear:
    axes that mean the same are the same arrays.
    """

    cuts: Ints
    part: Ints

    @staticmethod
    def of(spans: Spans) -> tuple[Axis, Ints]:
        """The axis of spans that cover it, and which of their parts each part was (empty ones are gone).

        >>> axis, kept = Axis.of(Spans(ints([0, 4, 6]), ints([4, 6, 8]), ints([3, 1, 1])))
        >>> axis.cuts.tolist(), axis.part.tolist(), kept.tolist()
        ([0, 4, 8], [0, 1], [3, 1])
        """
        full = spans.stop > spans.start
        start, part = spans.start[full], spans.part[full]
        size = int(spans.stop.max(initial=0))
        if (part[1:] > part[:-1]).all():  # as most are: nothing to put together, nothing to number anew
            return Axis(np.append(start, size), np.arange(len(part))), part
        first = heads(part)
        kept, place, number = np.unique(part[first], return_index=True, return_inverse=True)
        order = np.argsort(place, kind="stable")
        rank = np.empty_like(order)
        rank[order] = np.arange(len(order))
        return Axis(np.append(start[first], size), ints(rank[number])), ints(kept[order])

    @property
    def size(self) -> int:
        """How many cells."""
        return int(self.cuts[-1])

    @cached_property
    def parts(self) -> int:
        """How many parts."""
        return int(self.part.max(initial=-1)) + 1

    @property
    def simple(self) -> bool:
        """True where every part is one interval, and so has its number."""
        return self.parts == len(self.part)

    def part_of(self, intervals: Ints) -> Ints:
        """The parts of these intervals."""
        return intervals if self.simple else self.part[intervals]

    @cached_property
    def lengths(self) -> Ints:
        """How many cells each part has."""
        sizes = np.diff(self.cuts)
        return sizes if self.simple else totals(sizes, self.part, self.parts)

    @cached_property
    def _order(self) -> Ints:
        """The intervals, part after part."""
        return ints(np.argsort(self.part, kind="stable"))

    @cached_property
    def _edges(self) -> Ints:
        return starts(ints(np.bincount(self.part, minlength=self.parts)))

    def intervals(self, part: int) -> Ints:
        """The numbers of a part's intervals."""
        if self.simple:
            return ints([part])
        return self._order[self._edges[part] : self._edges[part + 1]]

    def cross(self, other: Axis, only: Ints | None = None) -> Crossing:
        """Where the intervals of two axes meet; `only` keeps these intervals of the first.

        >>> a, _ = Axis.of(Spans.whole(6).chunk(2)); b, _ = Axis.of(Spans.whole(6).chunk(3))
        >>> [(int(lo), int(hi)) for lo, hi in zip(*a.cross(b)[:2])]
        [(0, 2), (2, 3), (3, 4), (4, 6)]
        """
        if only is None:
            return self._cross_all(other)
        if len(only) == 1:
            return self._cross_one(other, int(only[0]))
        mine = only
        lo, hi = self.cuts[mine], self.cuts[mine + 1]
        first = np.searchsorted(other.cuts, lo, "right") - 1
        last = np.searchsorted(other.cuts, hi, "left")
        row, nth = spread(last - first)
        theirs = first[row] + nth
        return Crossing(
            np.maximum(lo[row], other.cuts[theirs]), np.minimum(hi[row], other.cuts[theirs + 1]), mine[row], theirs
        )

    def _cross_all(self, other: Axis) -> Crossing:
        """The same for all intervals: the cuts of both in one sort, the last bit telling whose they are."""
        cuts = np.sort(np.concatenate([2 * self.cuts, 2 * other.cuts + 1]), kind="stable")  # which merges sorted runs
        others = np.cumsum(cuts & 1)
        cuts >>= 1
        last = np.flatnonzero(cuts[1:] > cuts[:-1])  # of equal cuts the last knows both
        theirs = others[last]
        return Crossing(cuts[last], cuts[last + 1], last - theirs, theirs - 1)

    def _cross_one(self, other: Axis, mine: int) -> Crossing:
        """The same for one interval: what a single owner asks, in a few microseconds."""
        lo, hi = self.cuts[mine], self.cuts[mine + 1]
        first, last = other.cuts.searchsorted(lo, "right") - 1, other.cuts.searchsorted(hi, "left")
        edges = other.cuts[first : last + 1].copy()
        edges[0], edges[-1] = lo, hi
        return Crossing(edges[:-1], edges[1:], np.full(last - first, mine), np.arange(first, last))


class Crossing(NamedTuple):
    """Intervals `lo:hi` with the interval of the one and of the other axis that they lie in."""

    lo: Ints
    hi: Ints
    mine: Ints
    theirs: Ints


class CrossedGrids(NamedTuple):
    """Where the boxes of two grids meet, in row-major order, with the block of the one and of the other grid."""

    boxes: Boxes
    mine: Ints
    theirs: Ints


def cross_grids(
    axes: Sequence[Axis],
    others: Sequence[Axis],
    *,
    parts: Sequence[int] | None = None,
    only: Sequence[Ints] | None = None,
) -> CrossedGrids:
    """Two grids, axis by axis; of the first one block, by its part on every axis, or `only` these intervals.

    >>> rows, columns = (Axis.of(Spans.whole(4).chunk(n))[0] for n in (2, 1))
    >>> cross_grids([rows, columns], [columns, rows], parts=[1, 0]).boxes.lo.tolist()
    [[2, 0], [2, 2]]
    """
    if parts is not None:
        only = [axis.intervals(part) for axis, part in zip(axes, parts, strict=True)]
    chosen: Sequence[Ints | None] = [None] * len(axes) if only is None else only
    crossings = [a.cross(b, mine) for a, b, mine in zip(axes, others, chosen, strict=True)]
    boxes = Boxes(outer([c.lo for c in crossings]), outer([c.hi for c in crossings]))
    mine, theirs = [c.mine for c in crossings], [c.theirs for c in crossings]
    return CrossedGrids(boxes, block_numbers(axes, mine), block_numbers(others, theirs))


def block_numbers(axes: Sequence[Axis], intervals: Sequence[Ints]) -> Ints:
    """The number of the block (a part on every axis) of every combination of these intervals, in row-major order."""
    total = np.zeros(1, dtype=np.int64)
    steps = row_major(tuple(axis.parts for axis in axes))
    for axis, mine, step in zip(axes, intervals, steps, strict=True):
        total = (total[:, None] + axis.part_of(mine) * step).reshape(-1)
    return total


def boxes_of_block(axes: Sequence[Axis], parts: Sequence[int]) -> tuple[Boxes, Ints]:
    """The boxes of one block, and the first cell of each in a buffer that holds the block without gaps."""
    intervals = [axis.intervals(part) for axis, part in zip(axes, parts, strict=True)]
    lo = [axis.cuts[mine] for axis, mine in zip(axes, intervals, strict=True)]
    hi = [axis.cuts[mine + 1] for axis, mine in zip(axes, intervals, strict=True)]
    return Boxes(outer(lo), outer(hi)), outer([starts(b - a)[:-1] for a, b in zip(lo, hi, strict=True)])


def block_shape(axes: Sequence[Axis], parts: Sequence[int]) -> tuple[int, ...]:
    """How many cells a block has along every axis."""
    return tuple(int(axis.lengths[part]) for axis, part in zip(axes, parts, strict=True))


def part_lengths(spans: Sequence[Spans], parts: Sequence[int]) -> list[Ints]:
    """For every dim the length of each part, empty ones too."""
    return [totals(s.stop - s.start, s.part, count) for s, count in zip(spans, parts, strict=True)]


def outer(columns: Sequence[Ints]) -> Ints:
    """Every combination of one entry per column, as rows in row-major order."""
    shape = [len(c) for c in columns]
    rows = np.empty((len(columns), *shape), dtype=np.int64)
    for axis, column in enumerate(columns):
        rows[axis] = column.reshape([-1] + [1] * (len(columns) - 1 - axis))
    return rows.reshape(len(columns), prod(shape)).T
