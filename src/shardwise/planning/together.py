"""One owner's part of many plans between grids, planned in one go: the same copies as one by one.

A part is a few dozen calls of numpy on short arrays, and what costs is their number. So the arrays of all tensors are
laid end to end. This is for plans without a choice: one holder of every cell, no hosts, nothing reduced, no rounds.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence
from itertools import pairwise
from typing import NamedTuple

import numpy as np

from shardwise.geometry import Boxes, Ints, StackedAxes, cross_stacked, ints, spread, stacked, starts
from shardwise.layout import Grid
from shardwise.planning.copies import Copies

Pair = tuple[Grid, Grid]
MOST = 2**20  # intervals and owners that are laid end to end at a time


class StackedGrids(NamedTuple):
    """Many grids: the owners of each begin at one of `first`, in so many terms and replicas."""

    axes: list[StackedAxes]
    owners: Ints
    first: Ints
    terms: Ints
    replicas: Ints

    @staticmethod
    def of(grids: Sequence[Grid]) -> StackedGrids:
        """In their order."""
        tables = [grid.table for grid in grids]
        terms, replicas = ints([table.shape[-2:] for table in tables]).T
        first, owners = starts(ints([table.size for table in tables])), [table.reshape(-1) for table in tables]
        return StackedGrids(stacked([grid.axes for grid in grids]), np.concatenate(owners), first, terms, replicas)

    def row_of(self, owner: int) -> Ints:
        """The row of an owner in each, -1 where it has no cells."""
        at, row = np.flatnonzero(self.owners == owner), np.full(len(self.terms), -1)
        grid = self.first.searchsorted(at, "right") - 1
        row[grid] = (at - self.first[grid]) // self.replicas[grid]
        return row

    def expand(self, grid: Ints, row: Ints) -> tuple[Ints, Ints]:
        """All owners of these rows: the index into `row`, and the owner."""
        count = self.replicas[grid]
        if (count == 1).all():
            return np.arange(len(row)), self.owners[self.first[grid] + row]
        index, nth = spread(count)
        return index, self.owners[(self.first[grid] + row * count)[index] + nth]


class Met(NamedTuple):
    """Boxes of plan number `plan` that an owner shares with an owner of the other side."""

    plan: Ints
    boxes: Boxes
    other: Ints

    @staticmethod
    def of(here: StackedGrids, there: StackedGrids, owner: int) -> Met:
        """Plan after plan, by place."""
        block, term = np.divmod(here.row_of(owner), here.terms)
        plan, boxes, theirs = cross_stacked(here.axes, block, there.axes)
        index, other = there.expand(plan, theirs * there.terms[plan] + term[plan])
        return Met(plan[index], boxes if len(index) == len(plan) else boxes.take(index), other)

    def take(self, rows: Ints) -> Met:
        """Some of them."""
        return Met(self.plan[rows], self.boxes.take(rows), self.other[rows])


def copies_together(pairs: Sequence[Pair], owner: int) -> list[Copies]:
    """The copies of one owner, by place, for each of these pairs of grids."""
    found = [Copies.none(len(source.axes)) for source, _ in pairs]
    for numbers in _batches(pairs):
        some = [pairs[number] for number in numbers]
        for number, copies in zip(numbers, _copies(some, owner), strict=True):
            found[number] = copies
    return found


def _batches(pairs: Sequence[Pair]) -> Iterator[list[int]]:
    """Pairs with cells and of as many dims, as many at a time as take little memory."""
    by_ndim = defaultdict[int, list[int]](list)
    for number, (source, _) in enumerate(pairs):
        if source.table.size:
            by_ndim[len(source.axes)].append(number)
    for numbers in by_ndim.values():
        batch = starts(ints([_weight(*pairs[number]) for number in numbers]))[1:] // MOST
        edges = [0, *(np.flatnonzero(np.diff(batch)) + 1).tolist(), len(numbers)]
        yield from (numbers[first:last] for first, last in pairwise(edges))


def _weight(source: Grid, target: Grid) -> int:
    """What a pair adds to a batch; huge axes more, since places on all axes must be numbers that do not overflow."""
    weight = source.table.size + target.table.size
    for mine, theirs in zip(source.axes, target.axes, strict=True):
        weight += len(mine.cuts) + len(theirs.cuts) + (mine.size >> 41)
    return weight


def _copies(pairs: Sequence[Pair], owner: int) -> Iterator[Copies]:
    source, target = (StackedGrids.of(grids) for grids in zip(*pairs, strict=True))
    received, sent = Met.of(target, source, owner), Met.of(source, target, owner)
    sent = sent.take(np.flatnonzero(sent.other != owner))
    plan, boxes = np.concatenate([received.plan, sent.plan]), Boxes.concat([received.boxes, sent.boxes])
    by = np.concatenate([received.other, np.full(len(sent.other), owner)])
    to = np.concatenate([np.full(len(received.other), owner), sent.other])
    if len(sent.plan) and len(received.plan):
        order = np.lexsort((to, *boxes.lo.T[::-1], plan))
        plan, boxes, by, to = plan[order], boxes.take(order), by[order], to[order]
    zeros = np.zeros(len(plan), dtype=np.int64)
    for first, last in pairwise(plan.searchsorted(np.arange(len(pairs) + 1)).tolist()):
        rows = slice(first, last)
        same = zeros[rows]
        yield Copies(Boxes(boxes.lo[rows], boxes.hi[rows]), by[rows], to[rows], same, same, same)
