"""Strided windows of memory as boxes: which cells of a row-major tensor a view sees, and where it puts them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import islice
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
        return StridedPair(self.here + index * step.here, self.there + index * step.there, self._others(step))

    def split(self, step: Step, index: int) -> tuple[StridedPair, StridedPair]:
        """The cells before an index of a dim, and those from it on."""
        rest = self.at(step, index)
        first = self._replace(steps=(*rest.steps, step._replace(size=index)))
        return first, rest._replace(steps=(*rest.steps, step._replace(size=step.size - index)))

    def unflatten(self, step: Step, inner: int) -> StridedPair:
        """A dim as two, of which the inner one has the given size: a divisor of the size of the dim."""
        outer = Step(step.size // inner, step.here * inner, step.there * inner)
        return self._replace(steps=(*self._others(step), outer, step._replace(size=inner)))

    def _others(self, step: Step) -> tuple[Step, ...]:
        return tuple(one for one in self.steps if one is not step)


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
    if _is_whole(pair, whole, strides):  # the usual case, kept fast
        return [StridedBox(Box.whole(whole), pair.there, tuple(step.there for step in pair.steps))]
    steps = tuple(step for step in pair.steps if step.size != 1)
    if any(step.size == 0 for step in steps):
        return []
    boxes = list(islice(_boxes(pair._replace(steps=_joined(steps)), whole, strides), MOST_BOXES + 1))
    if len(boxes) > MOST_BOXES:
        raise LayoutError(f"a window of shape {tuple(s.size for s in pair.steps)} needs over {MOST_BOXES} boxes")
    return boxes


def _is_whole(pair: StridedPair, shape: tuple[int, ...], strides: tuple[int, ...]) -> bool:
    """True for a window of all cells of a tensor, dim by dim."""
    if pair.here != 0 or len(pair.steps) != len(shape) or 0 in shape:
        return False
    return all(step[:2] == dim for step, dim in zip(pair.steps, zip(shape, strides, strict=True), strict=True))


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
    """Split the window until each of its dims goes along one dim of the tensor, and no two along the same."""
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
