"""Many boxes at once, as rows of two arrays `lo` and `hi`: volumes, tiling, merging, cutting."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import product
from typing import NamedTuple

import numpy as np

from shardwise.geometry.box import Box
from shardwise.geometry.ragged import Bools, Ints, heads, ints


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

    How often cells are covered is a function on the grid, and its mixed difference along all axes is one signed point
    per corner of a box. A function that ends somewhere is determined by its mixed difference; so the coverage is one
    everywhere exactly where the signed corners of the boxes cancel to those of the whole.

    >>> tiles(Boxes(ints([[0, 0], [0, 2]]), ints([[2, 2], [2, 3]])), (2, 3))
    True
    >>> tiles(Boxes(ints([[0, 0], [0, 1]]), ints([[2, 2], [2, 3]])), (2, 3))
    False
    """
    whole = Boxes(np.zeros((1, len(shape)), dtype=np.int64), ints(shape).reshape(1, -1))
    if int(boxes.volumes().sum()) != int(whole.volumes()[0]):
        return False
    if not whole.volumes()[0]:
        return True
    cut = [a for a, size in enumerate(shape) if boxes.lo[:, a].any() or (boxes.hi[:, a] != size).any()]
    lo, hi, sizes = boxes.lo[:, cut], boxes.hi[:, cut], [shape[a] for a in cut]
    signed: tuple[list[Ints], list[Ints]] = [], []
    for corner in product((False, True), repeat=len(cut)):
        odd = sum(corner) % 2
        signed[odd].append(positions(np.where(corner, hi, lo), sizes))
        signed[1 - odd].append(positions(np.where(corner, whole.hi[:, cut], whole.lo[:, cut]), sizes))
    plus, minus = (np.sort(np.concatenate(side)) for side in signed)
    return bool(np.array_equal(plus, minus))


def distinct(boxes: Boxes, shape: Sequence[int]) -> tuple[Ints, Ints]:
    """One row of each different box (sorted), and for every row the number of its box in that list."""
    order = np.lexsort((positions(boxes.hi, shape), positions(boxes.lo, shape)))
    lo, hi = boxes.lo[order], boxes.hi[order]
    new = np.ones(len(order), dtype=np.bool_)
    new[1:] = (lo[1:] != lo[:-1]).any(axis=1) | (hi[1:] != hi[:-1]).any(axis=1)
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
    new = heads(key)
    new[1:] |= lo[1:, axis] != hi[:-1, axis]
    for a in others:
        new[1:] |= (lo[1:, a] != lo[:-1, a]) | (hi[1:, a] != hi[:-1, a])
    last = np.append(new[1:], True)[: len(new)]
    return Boxes(lo[new], hi[last]), key[new]


def cut(boxes: Boxes, start: Ints, stop: Ints) -> tuple[Ints, Boxes]:
    """The cells `start:stop` of each box, counted in row-major order inside it, as boxes: at most 2 * ndim - 1 each.

    Returns the row of every resulting box, and the boxes in the order of their cells.

    >>> row, part = cut(Boxes(ints([[0, 0]]), ints([[4, 5]])), ints([3]), ints([17]))
    >>> [str(part.box(i)) for i in range(part.count)]
    ['[0:1, 3:5]', '[1:3, 0:5]', '[3:4, 0:2]']
    """
    size = boxes.hi - boxes.lo
    unit = np.ones((boxes.count, boxes.ndim + 1), dtype=np.int64)  # unit[:, a]: the cells in one step along axis a - 1
    unit[:, :-1] = np.cumprod(size[:, ::-1], axis=1)[:, ::-1]
    unit = np.maximum(unit, 1)
    cursor, found = start.copy(), list[tuple[Ints, Ints, Boxes]]()

    def take(axis: int, limit: Ints) -> None:
        """Whole steps along `axis` from the cursor to the limit."""
        rows = np.flatnonzero(limit > cursor)
        at = cursor[rows, None] // unit[rows, 1:] % np.maximum(size[rows], 1)
        lo, hi = boxes.lo[rows] + at, boxes.lo[rows] + at + 1
        hi[:, axis] += (limit[rows] - cursor[rows]) // unit[rows, axis + 1] - 1
        lo[:, axis + 1 :], hi[:, axis + 1 :] = boxes.lo[rows, axis + 1 :], boxes.hi[rows, axis + 1 :]
        found.append((rows, cursor[rows], Boxes(lo, hi)))
        cursor[rows] = limit[rows]

    if not boxes.ndim:
        rows = np.flatnonzero(stop > start)
        return rows, boxes.take(rows)
    for axis in range(boxes.ndim - 1, 0, -1):  # up to the first whole slab of the axis outside
        up, down = -(-cursor // unit[:, axis]) * unit[:, axis], stop // unit[:, axis + 1] * unit[:, axis + 1]
        take(axis, np.minimum(up, down))
    for axis in range(boxes.ndim):  # whole slabs, then what is left over
        take(axis, stop // unit[:, axis + 1] * unit[:, axis + 1])
    rows = np.concatenate([f[0] for f in found])
    order = np.lexsort((np.concatenate([f[1] for f in found]), rows))
    return ints(rows[order]), Boxes.concat([f[2] for f in found]).take(ints(order))
