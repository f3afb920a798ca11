"""Nested runs of cells along one dim of a tensor: every third row, heads inside groups, pairs that alternate.

A nest is a first cell and some runs, by falling steps. Its cells are `first + i * step + j * next_step + ...`. All
cells of the inner runs lie inside one step of the outer run. So every cell is there once, in the order of the indices.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import islice
from typing import NamedTuple

import numpy as np

from shardwise.errors import LayoutError
from shardwise.geometry.ragged import Ints

MOST_PAIRS = 2**14  # parts of two nests: beyond that, they are not worth taking apart


class Run(NamedTuple):
    """`size` cells, `step` apart. They are `stride` apart along dim `axis` of the part that the nest belongs to."""

    size: int
    step: int
    axis: int
    stride: int = 1


class Nest(NamedTuple):
    """Cells of a dim. `at`: for each axis the index of the first cell, as pairs."""

    first: int
    runs: tuple[Run, ...]
    at: tuple[tuple[int, int], ...] = ()

    @staticmethod
    def of(first: int, runs: Sequence[Run]) -> Nest:
        """From runs in any order; those of one cell are left out."""
        return Nest(first, tuple(sorted((run for run in runs if run.size != 1), key=lambda run: -run.step)))

    @property
    def reach(self) -> int:
        """From the first cell to behind the last one."""
        return 1 + sum((run.size - 1) * run.step for run in self.runs)

    def within(self, start: int, stop: int) -> Nest:
        """Some indices of the outermost run."""
        outer, *inner = self.runs
        some = [outer._replace(size=stop - start)] if stop - start != 1 else []
        moved = (outer.axis, start * outer.stride)
        return Nest(self.first + start * outer.step, (*some, *inner), (*self.at, moved))

    def blocks(self, count: int) -> tuple[Nest, Nest | None]:
        """The outermost run in two or more blocks of `count` steps; and what is left over."""
        outer, *inner = self.runs
        full = outer.size // count
        blocks = outer._replace(size=full, step=outer.step * count, stride=outer.stride * count)
        whole = self._replace(runs=(blocks, outer._replace(size=count), *inner))
        return whole, self.within(full * count, outer.size) if outer.size % count else None


Pair = tuple[Nest, Nest]


def common(one: Nest, other: Nest) -> list[Pair]:
    """The cells of both, as pairs of nests with equal runs.

    >>> thirds, rows = Nest.of(1, [Run(4, 3, 0)]), Nest.of(0, [Run(9, 1, 0)])
    >>> [(ours.first, [run[:2] for run in ours.runs], theirs.runs) for ours, theirs in common(thirds, rows)]
    [(1, [(3, 3)], (Run(size=3, step=3, axis=0, stride=3),))]
    """
    if any(run.size == 0 for run in (*one.runs, *other.runs)):
        return []
    pairs = list(islice(_common(one, other), MOST_PAIRS + 1))
    if len(pairs) > MOST_PAIRS:
        raise LayoutError(f"runs of {_shown(one)} and {_shown(other)} cells have over {MOST_PAIRS} parts in common")
    return [_joined(pair) for pair in pairs]


def _shown(nest: Nest) -> str:
    return " x ".join(f"{run.size} (step {run.step})" for run in nest.runs)


def _common(one: Nest, other: Nest) -> Iterator[Pair]:
    """Each step makes the nests smaller: until both have the same outermost step, or one has no run left."""
    if one.first >= other.first + other.reach or other.first >= one.first + one.reach:
        return
    if not one.runs and not other.runs:
        yield one, other
        return
    ours, theirs = (nest.runs[0].step if nest.runs else 0 for nest in (one, other))
    if ours == theirs:
        yield from _in_step(one, other)
    elif ours < theirs:
        yield from ((b, a) for a, b in _common(other, one))
    elif theirs and ours % theirs == 0 and other.runs[0].size * theirs >= 2 * ours:
        for part in other.blocks(ours // theirs):
            yield from _common(one, part) if part is not None else ()
    else:
        yield from _one_by_one(one, other)


def _in_step(one: Nest, other: Nest) -> Iterator[Pair]:
    """Both have the same outermost step: index i of one meets index i + shift of the other."""
    (ours, *inner), (theirs, *within) = one.runs, other.runs
    step, ahead = ours.step, one.first - other.first
    width, room = (Nest(0, tuple(runs)).reach for runs in (inner, within))
    for shift in range(-((room - 1 - ahead) // step), (ahead + width - 1) // step + 1):
        start, stop = max(0, -shift), min(ours.size, theirs.size - shift)
        if start < stop:
            yield from _nested(one.within(start, stop), other.within(start + shift, stop + shift), stop - start)


def _nested(one: Nest, other: Nest, count: int) -> Iterator[Pair]:
    """Nests whose outermost runs, of `count` steps, go side by side: what is inside of them may meet or not."""
    if count == 1:
        yield from _common(one, other)
        return
    (ours, *inner), (theirs, *within) = one.runs, other.runs
    for a, b in _common(one._replace(runs=tuple(inner)), other._replace(runs=tuple(within))):
        yield a._replace(runs=(ours, *a.runs)), b._replace(runs=(theirs, *b.runs))


def _one_by_one(one: Nest, other: Nest) -> Iterator[Pair]:
    """The outermost steps of `one` that reach the other nest, each by itself."""
    outer, width = one.runs[0], Nest(0, one.runs[1:]).reach
    start = max(0, -((one.first + width - 1 - other.first) // outer.step))
    stop = min(outer.size, (other.first + other.reach - 1 - one.first) // outer.step + 1)
    for at in range(start, stop):
        yield from _common(one.within(at, at + 1), other)


def _joined(pair: Pair) -> Pair:
    """Neighbouring runs as one, where they are one for both."""
    ours, theirs = list[Run](), list[Run]()
    for a, b in zip(pair[0].runs, pair[1].runs, strict=True):
        if ours and all(_follows(runs[-1], run) for runs, run in ((ours, a), (theirs, b))):
            ours[-1], theirs[-1] = (
                run._replace(size=run.size * runs[-1].size) for runs, run in ((ours, a), (theirs, b))
            )
        else:
            ours.append(a)
            theirs.append(b)
    return pair[0]._replace(runs=tuple(ours)), pair[1]._replace(runs=tuple(theirs))


def _follows(outer: Run, run: Run) -> bool:
    sides = ((outer.step, run.step), (outer.stride, run.stride))
    return outer.axis == run.axis and all(wide == narrow * run.size for wide, narrow in sides)


def cells_before(runs: Sequence[Run], cells: Ints) -> Ints:
    """How many cells of a nest that begins at 0 lie before each of these.

    >>> cells_before([Run(4, 3, 0), Run(2, 1, 1)], np.array([-5, 0, 1, 2, 3, 4, 11, 99])).tolist()
    [0, 0, 1, 2, 2, 3, 8, 8]
    """
    count, rest, inside = np.zeros_like(cells), cells, np.ones(len(cells), np.bool_)
    inner = 1
    for run in runs:
        inner *= run.size
    for run in runs:
        inner //= max(run.size, 1)
        steps = np.clip(rest // run.step, 0, run.size)
        count = count + np.where(inside, steps * inner, 0)
        inside = inside & (steps < run.size)
        rest = rest - steps * run.step
    return count + (inside & (rest > 0) if inner else 0)
