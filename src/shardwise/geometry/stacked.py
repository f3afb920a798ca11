"""Many grids crossed with as many others in one go: the arrays of all of them are laid end to end."""

from __future__ import annotations

from collections.abc import Sequence
from math import prod
from typing import NamedTuple

import numpy as np

from shardwise.geometry.axis import Axis
from shardwise.geometry.boxes import Boxes
from shardwise.geometry.ragged import Ints, ints, spread, starts, totals


class StackedRegions(NamedTuple):
    """Where block i of many meets the blocks of grid i of as many others: i, the box, and the number of that block."""

    item: Ints
    boxes: Boxes
    theirs: Ints


class StackedAxes(NamedTuple):
    """One axis each of many grids, all with cells: interval n is `lo[n]:hi[n]`, and belongs to `part[n]`.

    Those of axis i begin at `first[i]`; it has `parts[i]` parts.
    """

    first: Ints
    lo: Ints
    hi: Ints
    part: Ints
    parts: Ints

    @staticmethod
    def of(axes: Sequence[Axis]) -> StackedAxes:
        """In their order."""
        cuts, part = np.concatenate([axis.cuts for axis in axes]), np.concatenate([axis.part for axis in axes])
        first = starts(ints([len(axis.part) for axis in axes]))
        inner = np.ones((2, len(cuts)), dtype=np.bool_)
        inner[0, first[1:] + np.arange(len(axes))] = inner[1, first[:-1] + np.arange(len(axes))] = False
        return StackedAxes(first, cuts[inner[0]], cuts[inner[1]], part, np.maximum.reduceat(part, first[:-1]) + 1)

    def cross(self, parts: Ints, others: StackedAxes) -> tuple[Ints, Ints, Ints, Ints]:
        """One part of each axis (-1 for none) with axes of the same sizes: how many intervals meet, their ends and
        parts."""
        axis = np.repeat(np.arange(len(parts)), np.diff(self.first))
        mine = np.flatnonzero(self.part == parts[axis])
        axis = axis[mine]
        before = starts(self.hi[self.first[1:] - 1])[:-1]  # all axes as one line: the cells of those before
        lo, hi, edges = before[axis] + self.lo[mine], before[axis] + self.hi[mine], others.on_a_line(before)
        begin, end = edges.searchsorted(lo, "right") - 1, edges.searchsorted(hi, "left")
        counts = end - begin
        row, nth = spread(counts)
        at, shift = begin[row] + nth, before[axis][row]
        low, high = np.maximum(lo[row] - shift, others.lo[at]), np.minimum(hi[row] - shift, others.hi[at])
        return totals(counts, axis, len(parts)), low, high, others.part[at]

    def on_a_line(self, before: Ints) -> Ints:
        """Where intervals begin, if so many cells come before each axis."""
        return self.lo + np.repeat(before, np.diff(self.first))


def stacked(grids: Sequence[Sequence[Axis]]) -> list[StackedAxes]:
    """Of grids of as many dims each, dim by dim."""
    return [StackedAxes.of(axes) for axes in zip(*grids, strict=True)]


def cross_stacked(mine: Sequence[StackedAxes], blocks: Ints, others: Sequence[StackedAxes]) -> StackedRegions:
    """One block of each of many grids (-1 for none) with as many others, in row-major order: see `cross_grids`.

    >>> from shardwise.geometry import Spans
    >>> rows, columns = (Axis.of(Spans.whole(4).chunk(n))[0] for n in (2, 1))
    >>> found = cross_stacked(stacked([[rows, columns], [columns, rows]]), ints([1, 0]), stacked([[columns, rows]] * 2))
    >>> found.item.tolist(), found.boxes.lo.tolist()
    ([0, 0, 1], [[2, 0], [2, 2], [0, 0]])
    """
    none, crossed = blocks < 0, list[tuple[Ints, Ints, Ints, Ints]]()
    for here, there in zip(reversed(mine), reversed(others), strict=True):
        blocks, parts = np.divmod(blocks, here.parts)
        crossed.append(here.cross(np.where(none, -1, parts), there))
    item, nth = spread(prod((counts for counts, *_ in crossed), start=ints(~none)))
    lo, hi = np.empty((len(item), len(mine)), dtype=np.int64), np.empty((len(item), len(mine)), dtype=np.int64)
    number, step = np.zeros(len(item), dtype=np.int64), np.ones(len(blocks), dtype=np.int64)
    for dim, (counts, low, high, part) in zip(reversed(range(len(mine))), crossed, strict=True):
        nth, at = np.divmod(nth, counts[item])
        at += starts(counts)[item]
        lo[:, dim], hi[:, dim] = low[at], high[at]
        number += part[at] * step[item]
        step = step * others[dim].parts
    return StackedRegions(item, Boxes(lo, hi), number)
