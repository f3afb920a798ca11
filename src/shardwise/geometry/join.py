"""Which boxes of two lists share cells, and which cells no box holds."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from shardwise.errors import LayoutError
from shardwise.geometry.boxes import Box, Boxes, merge
from shardwise.geometry.ragged import Bools, Ints, ints, spread, starts

MOST_TILES = 8  # tiles that a box may be entered into, on average
LEAF = 128  # pairs worth trying one by one: about where another cut of the space costs as much as it saves
STEPS = 1024  # parts of a box that are looked at for gaps, beside some for every box
FEW = 4096  # pairs of two whole lists that are tried without any cut


def join(left: Boxes, right: Boxes) -> tuple[Ints, Ints]:
    """The pairs (row of left, row of right) that share a cell, in no promised order. No box may be empty.

    Space is cut into tiles of about twice the size of a box; tiles that are still crowded are halved again and again,
    each time along the axis that leaves the fewest pairs to try, all halves of one depth together. Near-linear for
    boxes that tile; never more than all pairs. Strips are sorted along the axis that cuts them.

    >>> a = Boxes(ints([[0, 0], [4, 0]]), ints([[4, 6], [8, 6]])); b = Boxes(ints([[2, 0]]), ints([[3, 9]]))
    >>> [x.tolist() for x in join(a, b)]
    [[0], [0]]
    """
    if not left.count or not right.count:
        return ints([]), ints([])
    if left.count * right.count <= FEW:  # to try all pairs at once is faster than to sort them
        low, high = np.maximum(left.lo[:, None], right.lo), np.minimum(left.hi[:, None], right.hi)
        row, column = np.nonzero((low < high).all(axis=2))
        return ints(row), ints(column)
    if not left.ndim:
        return ints(np.repeat(np.arange(left.count), right.count)), ints(np.tile(np.arange(right.count), left.count))
    for axis in range(left.ndim):
        orders = _behind_each_other(left, axis), _behind_each_other(right, axis)
        if orders[0] is not None and orders[1] is not None:
            return _along(axis, left, orders[0], right, orders[1])
    lo, hi = Boxes.concat([left, right])
    both = Boxes(np.asfortranarray(lo), np.asfortranarray(hi))  # whole columns are read
    active = _Buckets.tiled(left.count, both)
    pairs = list[tuple[Ints, Ints]]()
    while active.count:
        active, done = active.halved(both)
        pairs.append(done.pairs(both))
    return ints(np.concatenate([f[0] for f in pairs])), ints(np.concatenate([f[1] for f in pairs]) - left.count)


def _behind_each_other(boxes: Boxes, axis: int) -> Ints | None:
    """The order of boxes along an axis, if no two share a place on it, as strips; otherwise None."""
    lo, hi = boxes.lo[:, axis], boxes.hi[:, axis]
    if int((hi - lo).sum()) > int(hi.max() - lo.min()):  # as of most lists: seen without sorting
        return None
    order = np.argsort(lo, kind="stable")
    return order if (hi[order][:-1] <= lo[order][1:]).all() else None


def _along(axis: int, left: Boxes, left_order: Ints, right: Boxes, right_order: Ints) -> tuple[Ints, Ints]:
    """The pairs that share a cell, of boxes that stand behind each other on this axis."""
    first = right.hi[right_order, axis].searchsorted(left.lo[left_order, axis], "right")
    last = right.lo[right_order, axis].searchsorted(left.hi[left_order, axis], "left")
    row, nth = spread(last - first)
    i, j = left_order[row], right_order[first[row] + nth]
    for other in range(left.ndim):
        if other != axis:
            meet = (left.lo[i, other] < right.hi[j, other]) & (right.lo[j, other] < left.hi[i, other])
            i, j = i[meet], j[meet]
    return i, j


class _Buckets(NamedTuple):
    """Regions of space, and the boxes that reach into each: entry e says that box `box[e]` meets region `bucket[e]`."""

    region: Boxes
    bucket: Ints
    box: Ints
    left: int  # boxes below this number are of the left list

    @staticmethod
    def tiled(left: int, boxes: Boxes) -> _Buckets:
        """Tiles of about twice the size of a box; a box is entered into every tile that it meets."""
        end = boxes.hi.max(axis=0)
        width = np.minimum(np.maximum(2 * (boxes.hi - boxes.lo).mean(axis=0).astype(np.int64), 1), end)
        first, last = boxes.lo // width, (boxes.hi - 1) // width
        while np.prod(last - first + 1.0, axis=1).sum() > MOST_TILES * boxes.count:  # a few boxes are very large
            width = np.minimum(2 * width, end)
            first, last = boxes.lo // width, (boxes.hi - 1) // width
        grid = -(-end // width)
        box, nth = spread(np.prod(last - first + 1, axis=1))
        bucket = np.zeros(len(box), dtype=np.int64)
        for axis in range(boxes.ndim - 1, -1, -1):
            across = (last[:, axis] - first[:, axis] + 1)[box]
            bucket += (first[:, axis][box] + nth % across) * int(np.prod(grid[axis + 1 :]))
            nth //= across
        used, bucket = np.unique(bucket, return_inverse=True)
        lo = np.stack(np.unravel_index(used, grid), axis=1) * width
        return _Buckets(Boxes(lo, lo + width), ints(bucket), box, left)

    @property
    def count(self) -> int:  # type: ignore[override]  # regions are counted, not the fields
        return self.region.count

    def _work(self, keep: Bools | None = None) -> Ints:
        """Pairs to try in each region (of the entries kept)."""
        is_left = self.box < self.left
        sides = [is_left, ~is_left] if keep is None else [is_left & keep, ~is_left & keep]
        a, b = (np.bincount(self.bucket[side], minlength=self.count) for side in sides)
        return ints(a * b)

    def halved(self, boxes: Boxes) -> tuple[_Buckets, _Buckets]:
        """The regions worth halving, halved; and those that are done."""
        middle = (self.region.lo + self.region.hi) // 2
        work = self._work()
        best, axis = work.copy(), np.full(self.count, -1)
        for a in range(boxes.ndim):
            at = middle[self.bucket, a]
            halves = self._work(boxes.lo[self.box, a] < at) + self._work(boxes.hi[self.box, a] > at)
            better = (halves < best) & (work > LEAF)
            best, axis = np.where(better, halves, best), np.where(better, a, axis)
        split = (axis >= 0) & (best < work * 0.95)
        return self._split(boxes, middle, np.where(split, axis, -1)), self._only(~split & (work > 0))

    def _only(self, keep: Bools) -> _Buckets:
        entries = keep[self.bucket]
        number = np.cumsum(keep) - 1
        return self._replace(
            region=self.region.take(keep), bucket=ints(number[self.bucket[entries]]), box=self.box[entries]
        )

    def _split(self, boxes: Boxes, middle: Ints, axis: Ints) -> _Buckets:
        part = self._only(axis >= 0)
        middle, axis = middle[axis >= 0], axis[axis >= 0]
        row = np.arange(part.count)
        at = middle[row, axis]
        low_hi, high_lo = part.region.hi.copy(), part.region.lo.copy()
        low_hi[row, axis] = high_lo[row, axis] = at
        entry_axis, entry_at = axis[part.bucket], at[part.bucket]
        low = boxes.lo[part.box, entry_axis] < entry_at
        high = boxes.hi[part.box, entry_axis] > entry_at
        return _Buckets(
            Boxes.concat([Boxes(part.region.lo, low_hi), Boxes(high_lo, part.region.hi)]),
            np.concatenate([part.bucket[low], part.bucket[high] + part.count]),
            np.concatenate([part.box[low], part.box[high]]),
            self.left,
        )

    def pairs(self, boxes: Boxes) -> tuple[Ints, Ints]:
        """The pairs that meet; each is reported by the one region that holds the first cell of what they share."""
        is_left = self.box < self.left
        right = np.flatnonzero(~is_left)
        right = right[np.argsort(self.bucket[right], kind="stable")]
        count = np.bincount(self.bucket[right], minlength=self.count)
        mine, nth = spread(ints(count[self.bucket[is_left]]))
        region = self.bucket[is_left][mine]
        i, j = self.box[is_left][mine], self.box[right][starts(ints(count))[region] + nth]
        for a in range(boxes.ndim):
            lo, hi = boxes.lo[:, a], boxes.hi[:, a]
            first = np.maximum(lo[i], lo[j])
            meet = (first < np.minimum(hi[i], hi[j])) & (first >= self.region.lo[:, a][region])
            meet &= first < self.region.hi[:, a][region]
            i, j, region = i[meet], j[meet], region[meet]
        return i, j


def gaps(boxes: Boxes, whole: Box, clean: Bools) -> list[Box]:
    """The cells of `whole` that no box holds, as few boxes as merging gives. `clean` boxes overlap no other.

    Refused where boxes cut each other into very many parts: in n dims there can be as many as (boxes)**n.

    >>> [str(b) for b in gaps(Boxes(ints([[0, 0]]), ints([[2, 5]])), Box((0, 0), (4, 6)), np.array([True]))]
    ['[0:2, 5:6]', '[2:4, 0:6]']
    """
    holes, todo, steps = list[Box](), [(whole, np.arange(boxes.count))], 0
    while todo:
        region, rows = todo.pop()
        steps += 1
        if steps > STEPS + 8 * boxes.count:
            raise LayoutError(
                f"cannot list what {boxes.count} boxes leave out of {whole}: they overlap in too many ways. "
                f"Make them disjoint, or equal (replicas)"
            )
        inside = boxes.take(rows).overlap(Boxes.of([region], boxes.ndim))
        meets = np.flatnonzero((inside.lo < inside.hi).all(axis=1))
        rows, inside = rows[meets], inside.take(meets)
        volumes = inside.volumes()
        if not len(rows):
            holes.append(region)
        elif volumes.max() < region.volume and not (clean[rows].all() and int(volumes.sum()) == region.volume):
            todo.extend((half, rows) for half in _halves(region, inside))
    merged, _ = merge(Boxes.of(holes, boxes.ndim), np.zeros(len(holes), dtype=np.int64))
    return sorted((merged.box(i) for i in range(merged.count)), key=lambda b: (b.lo, b.hi))


def _halves(region: Box, inside: Boxes) -> tuple[Box, Box]:
    """The region cut in two at the middle one of the faces inside it, along the axis with the most."""
    faces = [np.concatenate([inside.lo[:, a], inside.hi[:, a]]) for a in range(inside.ndim)]
    inner = [np.sort(f[(f > lo) & (f < hi)]) for f, lo, hi in zip(faces, region.lo, region.hi, strict=True)]
    axis = max(range(len(inner)), key=lambda a: len(inner[a]))
    at = int(inner[axis][len(inner[axis]) // 2])
    below, above = list(region.hi), list(region.lo)
    below[axis] = above[axis] = at
    return Box(region.lo, tuple(below)), Box(tuple(above), region.hi)
