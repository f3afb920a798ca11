"""Strided windows of memory as boxes: which cells of a row-major tensor a view sees, and where it puts them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

from shardwise.errors import LayoutError
from shardwise.geometry.boxes import Box, row_major

MOST_BOXES = 2**14  # boxes of one window: beyond that, a window is not worth taking apart


class Step(NamedTuple):
    """A dim of two windows over the same cells: its size, and its stride in the memory of each."""

    size: int
    here: int
    there: int


class StridedPair(NamedTuple):
    """The same cells in two memories: the first element in each, and the dims, in any order."""

    here: int
    there: int
    steps: tuple[Step, ...]

    def at(self, step: Step, index: int) -> StridedPair:
        """The cells at one index of a dim, which is dropped."""
        others = tuple(one for one in self.steps if one is not step)
        return StridedPair(self.here + index * step.here, self.there + index * step.there, others)

    def split(self, step: Step, index: int) -> tuple[StridedPair, StridedPair]:
        """The cells before an index of a dim, and those from it on."""
        others = tuple(one for one in self.steps if one is not step)
        first = StridedPair(self.here, self.there, (*others, step._replace(size=index)))
        start = self.here + index * step.here, self.there + index * step.there
        return first, StridedPair(*start, (*others, step._replace(size=step.size - index)))

    def unflatten(self, step: Step, inner: int) -> StridedPair:
        """A dim as two: the inner one has that size, which divides its own."""
        outer = Step(step.size // inner, step.here * inner, step.there * inner)
        others = tuple(one for one in self.steps if one is not step)
        return StridedPair(self.here, self.there, (*others, outer, step._replace(size=inner)))


class StridedBox(NamedTuple):
    """A box of a row-major tensor, and where its cells lie in the other memory: first element, stride for every dim."""

    box: Box
    offset: int
    strides: tuple[int, ...]

    def inside(self, part: Box) -> StridedBox:
        """The cells of a box inside it."""
        if part == self.box:
            return self
        moved = sum((a - b) * stride for a, b, stride in zip(part.lo, self.box.lo, self.strides, strict=True))
        return StridedBox(part, self.offset + moved, self.strides)

    def paired(self, other: StridedBox) -> StridedPair:
        """The same cells in the other memories of two equal boxes."""
        steps = zip(self.box.shape, self.strides, other.strides, strict=True)
        return StridedPair(self.offset, other.offset, tuple(Step(*step) for step in steps))


def strided_boxes(pair: StridedPair, shape: Sequence[int]) -> list[StridedBox]:
    """The window as boxes of the row-major tensor of that shape in the memory `here`, and where they lie `there`.

    >>> columns = StridedPair(2, 0, (Step(4, 6, 2), Step(2, 1, 1)))
    >>> [(str(one.box), one.offset, one.strides) for one in strided_boxes(columns, (4, 6))]
    [('[0:4, 2:4]', 0, (2, 1))]
    """
    whole, strides = tuple(shape), row_major(tuple(shape))
    if pair.here == 0 and len(pair.steps) == len(whole) and 0 not in whole:  # mostly all of it: a short way
        sizes, here, there = zip(*pair.steps, strict=True) if whole else ((), (), ())
        if sizes == whole and here == strides:
            return [StridedBox(Box((0,) * len(whole), whole), pair.there, there)]
    steps = tuple(step for step in pair.steps if step.size != 1)
    if any(step.size == 0 for step in steps):
        return []
    boxes = list[StridedBox]()
    for box in _boxes(StridedPair(pair.here, pair.there, _joined(steps)), whole, strides):
        boxes.append(box)
        if len(boxes) > MOST_BOXES:
            raise LayoutError(f"a window of shape {tuple(s.size for s in pair.steps)} needs over {MOST_BOXES} boxes")
    return boxes


def _joined(steps: Sequence[Step]) -> tuple[Step, ...]:
    """Neighbouring dims as one where both memories allow it."""
    joined = list[Step]()
    for step in sorted(steps, key=lambda step: (-step.here, -step.there)):
        outer = joined[-1] if joined else None
        if outer and (outer.here, outer.there) == (step.here * step.size, step.there * step.size):
            joined[-1] = Step(outer.size * step.size, step.here, step.there)
        else:
            joined.append(step)
    return tuple(joined)


def _boxes(pair: StridedPair, shape: tuple[int, ...], strides: tuple[int, ...]) -> Iterator[StridedBox]:
    """Take apart the first dim of the window that does not go along one dim of the tensor; until none is left."""
    moves = dict[int, Step]()
    for step in pair.steps:  # strides fall: the outermost first
        dim = _dim_of(step, shape, strides)
        if dim is None or dim in moves:  # across dims, or a second one along this dim: one index at a time
            slow = step if dim is None or moves[dim].here < step.here else moves[dim]
            for index in range(slow.size):
                yield from _boxes(pair.at(slow, index), shape, strides)
            return
        moves[dim] = step
    for dim, step in moves.items():
        first = pair.here // strides[dim] % shape[dim]
        if first + step.size > shape[dim]:
            yield from _across_edges(pair, step, first, shape, strides, dim)
            return
    yield _box(pair, moves, shape, strides)


def _dim_of(step: Step, shape: tuple[int, ...], strides: tuple[int, ...]) -> int | None:
    """The dim of the tensor along which a dim of the window goes cell by cell."""
    return next((d for d, size in enumerate(shape) if size > 1 and strides[d] == step.here), None)


def _across_edges(
    pair: StridedPair, step: Step, first: int, shape: tuple[int, ...], strides: tuple[int, ...], dim: int
) -> Iterator[StridedBox]:
    """A dim of the window that goes beyond the end of the tensor's dim: the rest of a row, whole rows, the rest."""
    parts: tuple[StridedPair, ...]
    if first:
        parts = pair.split(step, shape[dim] - first)
    elif step.size % shape[dim]:
        parts = pair.split(step, step.size // shape[dim] * shape[dim])
    else:
        parts = (pair.unflatten(step, shape[dim]),)
    for part in parts:
        steps = sorted((one for one in part.steps if one.size != 1), key=lambda one: -one.here)
        yield from _boxes(part._replace(steps=tuple(steps)), shape, strides)


def _box(pair: StridedPair, moves: dict[int, Step], shape: tuple[int, ...], strides: tuple[int, ...]) -> StridedBox:
    lo = tuple(pair.here // stride % size for stride, size in zip(strides, shape, strict=True))
    hi = tuple(a + (moves[d].size if d in moves else 1) for d, a in enumerate(lo))
    return StridedBox(Box(lo, hi), pair.there, tuple(moves[d].there if d in moves else 0 for d in range(len(shape))))
