"""Half-open boxes of cells, one at a time; and many at once, as rows of two arrays `lo` and `hi`."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import product
from math import prod
from operator import index, sub
from typing import NamedTuple

import numpy as np

from shardwise.errors import LayoutError
from shardwise.geometry.ragged import Bools, Ints, different, exact_sum, heads, ints


@dataclass(frozen=True, slots=True)
class Box:
    """The cells from `lo` (included) to `hi` (excluded) on every axis.

    >>> Box((0, 2), (4, 6)).volume
    16
    >>> print(Box((0, 2), (4, 6)))
    [0:4, 2:6]
    """

    lo: tuple[int, ...]
    hi: tuple[int, ...]

    def __post_init__(self) -> None:
        for side in "lo", "hi":
            object.__setattr__(self, side, _whole(getattr(self, side)))
        if len(self.lo) != len(self.hi):
            raise LayoutError(f"a box needs lo and hi of one length, not {self.lo} and {self.hi}")
        if any(a > b for a, b in zip(self.lo, self.hi, strict=True)):
            raise LayoutError(f"a box needs lo <= hi on every axis, not lo={self.lo}, hi={self.hi}")

    @staticmethod
    def whole(shape: Sequence[int]) -> Box:
        """All cells of a tensor.

        >>> print(Box.whole((4, 6)))
        [0:4, 0:6]
        """
        return Box((0,) * len(shape), tuple(shape))

    @property
    def shape(self) -> tuple[int, ...]:
        """How many cells on each axis."""
        return tuple(map(sub, self.hi, self.lo))

    @property
    def volume(self) -> int:
        """How many cells in all; a 0-d box has one."""
        return prod(self.shape)

    @property
    def slices(self) -> tuple[slice, ...]:
        """The box as an index of the whole tensor."""
        return tuple(slice(a, b) for a, b in zip(self.lo, self.hi, strict=True))

    def __and__(self, other: Box) -> Box | None:
        """The cells of both, or None.

        >>> Box((0, 0), (4, 6)) & Box((2, 4), (8, 8))
        Box(lo=(2, 4), hi=(4, 6))
        """
        self._like(other)
        lo = tuple(map(max, self.lo, other.lo))
        hi = tuple(map(min, self.hi, other.hi))
        return Box(lo, hi) if all(a < b for a, b in zip(lo, hi, strict=True)) else None

    def minus(self, other: Box) -> list[Box]:
        """The cells without those of the other, as at most two boxes per axis.

        >>> [str(b) for b in Box((0, 0), (4, 6)).minus(Box((1, 2), (4, 6)))]
        ['[0:1, 0:6]', '[1:4, 0:2]']
        """
        hole, rest, lo, hi = self & other, list[Box](), self.lo, self.hi
        if hole is None:
            return [self]
        for axis in range(len(lo)):
            below, above = (*hi[:axis], hole.lo[axis], *hi[axis + 1 :]), (*lo[:axis], hole.hi[axis], *lo[axis + 1 :])
            rest += [Box(lo, below)] * (hole.lo[axis] > lo[axis]) + [Box(above, hi)] * (hole.hi[axis] < hi[axis])
            lo, hi = (*lo[:axis], hole.lo[axis], *lo[axis + 1 :]), (*hi[:axis], hole.hi[axis], *hi[axis + 1 :])
        return rest

    def without(self, others: Iterable[Box]) -> list[Box]:
        """The cells that are in none of the others.

        >>> [str(b) for b in Box((0, 0), (4, 6)).without([Box((0, 0), (2, 6)), Box((3, 0), (4, 6))])]
        ['[2:3, 0:6]']
        """
        left = [self]
        for other in others:
            left = [rest for one in left for rest in one.minus(other)]
        return left

    def __contains__(self, other: Box) -> bool:
        """True where every cell of `other` is in this box."""
        self._like(other)
        return all(a <= c and d <= b for a, b, c, d in zip(self.lo, self.hi, other.lo, other.hi, strict=True))

    def _like(self, other: Box) -> None:
        if len(self.lo) != len(other.lo):
            raise LayoutError(f"{self} and {other} have different numbers of dims")

    def within(self, outer: Box) -> Box:
        """The same cells counted from the corner of `outer`.

        >>> Box((4, 6), (5, 8)).within(Box((4, 4), (8, 8)))
        Box(lo=(0, 2), hi=(1, 4))
        """
        return Box(
            tuple(a - o for a, o in zip(self.lo, outer.lo, strict=True)),
            tuple(b - o for b, o in zip(self.hi, outer.lo, strict=True)),
        )

    def __str__(self) -> str:
        return "[" + ", ".join(f"{a}:{b}" for a, b in zip(self.lo, self.hi, strict=True)) + "]"


def _whole(corner: Iterable[int]) -> tuple[int, ...]:
    """A corner of whole numbers."""
    try:
        numbers = tuple(corner)
        if bool in map(type, numbers):
            raise TypeError
        return tuple(map(index, numbers))
    except TypeError:
        raise LayoutError(f"a corner of a box needs whole numbers, not {corner!r}") from None


def row_major(shape: tuple[int, ...]) -> tuple[int, ...]:
    """The strides of a contiguous buffer.

    >>> row_major((4, 6, 2))
    (12, 2, 1)
    """
    strides = [1] * len(shape)
    for axis in range(len(shape) - 1, 0, -1):
        strides[axis - 1] = strides[axis] * max(shape[axis], 1)
    return tuple(strides)


CORNERS, MANY = 2**20, 8  # of boxes that are proven to cover: all corners, and the dims in which there may be more


class Boxes(NamedTuple):
    """Box i is `lo[i]:hi[i]`; both arrays have a row per box and a column per axis."""

    lo: Ints
    hi: Ints

    @staticmethod
    def of(boxes: Sequence[Box], ndim: int) -> Boxes:
        """The boxes as arrays."""
        lo = ints([b.lo for b in boxes]).reshape(len(boxes), ndim)
        return Boxes(lo, ints([b.hi for b in boxes]).reshape(len(boxes), ndim))

    @property
    def count(self) -> int:  # type: ignore[override]  # boxes are counted, not the two arrays
        """How many boxes."""
        return len(self.lo)

    @property
    def ndim(self) -> int:
        """How many axes."""
        return self.lo.shape[1]

    def volumes(self) -> Ints:
        """The cells of each."""
        return np.prod(self.hi - self.lo, axis=1, dtype=np.int64)

    def take(self, rows: Ints | Bools) -> Boxes:
        """Some of the boxes."""
        if not self.ndim:  # np.take refuses arrays without elements
            return Boxes(self.lo[rows], self.hi[rows])
        rows = np.flatnonzero(rows) if rows.dtype == np.bool_ else rows
        return Boxes(self.lo.take(rows, axis=0), self.hi.take(rows, axis=0))

    def box(self, row: int) -> Box:
        """One of them."""
        return Box(tuple(self.lo[row].tolist()), tuple(self.hi[row].tolist()))

    def overlap(self, other: Boxes) -> Boxes:
        """Row by row the cells of both (lo may pass hi where there are none)."""
        return Boxes(np.maximum(self.lo, other.lo), np.minimum(self.hi, other.hi))

    @staticmethod
    def concat(parts: Sequence[Boxes]) -> Boxes:
        """All of them, one after the other."""
        return Boxes(np.concatenate([p.lo for p in parts]), np.concatenate([p.hi for p in parts]))


def positions(points: Ints, shape: Sequence[int]) -> Ints:
    """The row-major number of each point in a tensor of that shape (hi corners count too: one more per axis).

    >>> positions(ints([[0, 2], [1, 0]]), (2, 3)).tolist()
    [2, 4]
    """
    key = np.zeros(len(points), dtype=np.int64)
    for axis, size in enumerate(shape):
        key *= size + 1
        key += points[:, axis]
    return key


def tiles(boxes: Boxes, shape: Sequence[int]) -> bool:
    """True where the boxes cover every cell of the shape exactly once. Takes n log n, whatever their form.

    >>> tiles(Boxes(ints([[0, 0], [0, 2]]), ints([[2, 2], [2, 3]])), (2, 3))
    True
    >>> tiles(Boxes(ints([[0, 0], [0, 1]]), ints([[2, 2], [2, 3]])), (2, 3))
    False
    """
    whole = Boxes.of([Box.whole(shape)], len(shape))
    if exact_sum(boxes.volumes()) != int(whole.volumes()[0]):
        return False
    return not whole.volumes()[0] or uncancelled(boxes, None, whole, None) is None


def uncancelled(boxes: Boxes, group: Ints | None, other: Boxes, other_group: Ints | None) -> int | None:
    """A group whose cells the two lists do not cover equally often, or None where there is none.

    How often cells are covered is a function on the grid, and its mixed difference along all axes is one signed point
    per corner of a box. A function that ends somewhere is determined by its mixed difference; so two lists cover all
    cells equally often exactly where their signed corners cancel. Without groups all is one group, number 0.
    """
    both, count = Boxes.concat([boxes, other]), boxes.count
    cut = [a for a in range(both.ndim) if len(different(both.lo[:, a])) > 1 or len(different(both.hi[:, a])) > 1]
    if both.count * 2 ** len(cut) > max(CORNERS, 2**MANY * both.count):
        raise LayoutError(
            f"cannot check that {boxes.count} boxes cut along {len(cut)} dims cover their tensor: too many corners. "
            f"Use fewer boxes, or cut along fewer dims"
        )
    lo, hi = both.lo[:, cut], both.hi[:, cut]
    extent = hi.max(axis=0, initial=0).tolist()
    corners = list(product((False, True), repeat=len(cut)))
    place = [positions(np.where(corner, hi, lo), extent) for corner in corners]
    plus = [p[:count] if sum(c) % 2 == 0 else p[count:] for c, p in zip(corners, place, strict=True)]
    minus = [p[count:] if sum(c) % 2 == 0 else p[:count] for c, p in zip(corners, place, strict=True)]
    if group is None or other_group is None:
        same = np.array_equal(np.sort(np.concatenate(plus)), np.sort(np.concatenate(minus)))
        return None if same else 0
    return _unpaired(
        (np.concatenate(plus), np.concatenate([(group, other_group)[sum(c) % 2] for c in corners])),
        (np.concatenate(minus), np.concatenate([(other_group, group)[sum(c) % 2] for c in corners])),
    )


def _unpaired(first: tuple[Ints, Ints], second: tuple[Ints, Ints]) -> int | None:
    """The smallest group in which two lists of (place, group) differ as multisets."""
    (place, group), (other_place, other_group) = (
        (p[order], g[order]) for p, g in (first, second) for order in [np.lexsort((p, g))]
    )
    length = min(len(group), len(other_group))
    differs = (place[:length] != other_place[:length]) | (group[:length] != other_group[:length])
    if differs.any():
        at = int(differs.argmax())
        return int(min(group[at], other_group[at]))
    rest = np.concatenate([group[length:], other_group[length:]])
    return int(rest[0]) if len(rest) else None


def distinct(boxes: Boxes, shape: Sequence[int]) -> tuple[Ints, Ints]:
    """One row of each different box (sorted), and for every row the number of its box in that list."""
    lo, hi = positions(boxes.lo, shape), positions(boxes.hi, shape)
    order = np.lexsort((hi, lo))
    new = heads(lo[order], hi[order])
    number = np.empty(len(order), dtype=np.int64)
    number[order] = np.cumsum(new) - 1
    return ints(order[new]), number


def merge(boxes: Boxes, key: Ints) -> tuple[Boxes, Ints]:
    """Boxes of one key that touch along a whole side become one; again until nothing touches.

    >>> merged, _ = merge(Boxes(ints([[0], [2], [4]]), ints([[2], [4], [9]])), ints([7, 7, 8]))
    >>> merged.lo.tolist(), merged.hi.tolist()
    ([[0], [4]], [[4], [9]])
    """
    count = -1
    while boxes.count != count:
        count = boxes.count
        for axis in range(boxes.ndim):
            boxes, key = _merge_along(boxes, key, axis)
    return boxes, key


def _merge_along(boxes: Boxes, key: Ints, axis: int) -> tuple[Boxes, Ints]:
    others = [a for a in range(boxes.ndim) if a != axis]
    columns = [boxes.lo[:, axis], *(side[:, a] for a in others for side in boxes), key]
    order = np.lexsort(columns)
    lo, hi, key = boxes.lo[order], boxes.hi[order], key[order]
    new = heads(key, *(side[:, a] for a in others for side in (lo, hi)))
    new[1:] |= lo[1:, axis] != hi[:-1, axis]
    last = np.append(new[1:], True)[: len(new)]
    return Boxes(lo[new], hi[last]), key[new]


def cut(boxes: Boxes, start: Ints, stop: Ints) -> tuple[Ints, Boxes]:
    """The cells `start:stop` of each box, counted in row-major order inside it, as boxes: at most 2 * ndim - 1 each.

    Returns the row of every resulting box, and the boxes in the order of their cells.

    >>> row, part = cut(Boxes(ints([[0, 0]]), ints([[4, 5]])), ints([3]), ints([17]))
    >>> [str(part.box(i)) for i in range(part.count)]
    ['[0:1, 3:5]', '[1:3, 0:5]', '[3:4, 0:2]']
    """
    if not boxes.ndim:
        rows = np.flatnonzero(stop > start)
        return rows, boxes.take(rows)
    whole = (start == 0) & (stop > 0) & (stop == boxes.volumes())
    if whole.all():
        return np.arange(boxes.count), boxes
    rest = np.flatnonzero(~whole)
    row, parts = _cut(boxes.take(rest), start[rest], stop[rest])
    rows, both = np.append(np.flatnonzero(whole), rest[row]), Boxes.concat([boxes.take(whole), parts])
    order = np.argsort(rows, kind="stable")
    return ints(rows[order]), both.take(order)


def _cut(boxes: Boxes, start: Ints, stop: Ints) -> tuple[Ints, Boxes]:
    """The same, for boxes that have axes."""
    size = np.maximum(boxes.hi - boxes.lo, 1)
    slab = np.cumprod(size[:, ::-1], axis=1)[
        :, ::-1
    ]  # the cells of the box from an axis on: one step of the axis outside
    step = slab // size  # the cells in one step along an axis
    cursor, slabs = start, list[tuple[Ints, Ints, Boxes]]()
    for axis in range(boxes.ndim - 1, 0, -1):  # up to the first whole slab
        up, down = -(-cursor // slab[:, axis]) * slab[:, axis], stop // step[:, axis] * step[:, axis]
        slabs.append(_steps(boxes, size, step, axis, cursor, np.minimum(up, down)))
        cursor = np.maximum(cursor, np.minimum(up, down))
    for axis in range(boxes.ndim):  # whole slabs, then what is left over
        limit = stop // step[:, axis] * step[:, axis]
        slabs.append(_steps(boxes, size, step, axis, cursor, limit))
        cursor = np.maximum(cursor, limit)
    rows = np.concatenate([f[0] for f in slabs])
    order = np.lexsort((np.concatenate([f[1] for f in slabs]), rows))
    return ints(rows[order]), Boxes.concat([f[2] for f in slabs]).take(ints(order))


def _steps(boxes: Boxes, size: Ints, step: Ints, axis: int, start: Ints, stop: Ints) -> tuple[Ints, Ints, Boxes]:
    """Whole steps along an axis from start to stop, where that is ahead: rows, starts and boxes."""
    rows = np.flatnonzero(stop > start)
    at = boxes.lo[rows] + start[rows, None] // step[rows] % size[rows]
    lo, hi = at, at + 1
    hi[:, axis] += (stop[rows] - start[rows]) // step[rows, axis] - 1
    lo[:, axis + 1 :], hi[:, axis + 1 :] = boxes.lo[rows, axis + 1 :], boxes.hi[rows, axis + 1 :]
    return rows, start[rows], Boxes(lo, hi)
