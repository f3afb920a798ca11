"""A part of a sharded tensor as a sharded tensor of its own: the same memory, seen through strides."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from itertools import permutations, product
from typing import NamedTuple

import numpy as np
import torch

from shardwise.errors import LayoutError
from shardwise.exchange import view_of
from shardwise.geometry import Box, Boxes, Ints, Places, cut, ints, tiles
from shardwise.geometry.nests import Nest, Pair, Run, cells_before, common
from shardwise.layout import Layout, places_of


class ViewDim(NamedTuple):
    """A dim of a part: `size` cells along dim `of` of the whole, `step` apart."""

    of: int
    size: int
    step: int = 1


@dataclass(frozen=True)
class Subtensor:
    """Cells of a tensor: the first one, and the dims of the part. Several dims may go along one dim of the whole.

    A dim of the whole that no dim of the part goes along has one cell there.
    """

    start: tuple[int, ...]
    dims: tuple[ViewDim, ...]

    @cached_property
    def _hash(self) -> int:
        return hash((self.start, self.dims))

    def __hash__(self) -> int:
        return self._hash

    def __str__(self) -> str:
        """Ranges as in slices, then how many cells there are by which steps, where that is not one by one."""
        return f"[{', '.join(map(self._range, range(len(self.start))))}]"

    def _range(self, of: int) -> str:
        runs, (lo, hi) = self._nest(of).runs, (self.region.lo[of], self.region.hi[of])
        if len(runs) <= 1:
            return f"{lo}:{hi}" + (f":{runs[0].step}" if runs and runs[0].step > 1 else "")
        return f"{lo}:{hi} as {' x '.join(f'{run.size} by {run.step}' for run in runs)}"

    @staticmethod
    def whole(shape: Sequence[int]) -> Subtensor:
        """All cells, as they are."""
        return _whole(tuple(shape))

    @staticmethod
    def of_box(box: Box, order: Sequence[int]) -> Subtensor:
        """The cells of a box, with these of its dims. Others must have one cell."""
        return Subtensor(box.lo, tuple(ViewDim(of, box.hi[of] - box.lo[of]) for of in order))

    @cached_property
    def shape(self) -> tuple[int, ...]:
        """Of the part."""
        return tuple(dim.size for dim in self.dims)

    @cached_property
    def region(self) -> Box:
        """The smallest box around its cells."""
        reach = [1] * len(self.start)
        for dim in self.dims:
            reach[dim.of] = reach[dim.of] + (dim.size - 1) * dim.step if dim.size and reach[dim.of] else 0
        return Box(self.start, tuple(first + size for first, size in zip(self.start, reach, strict=True)))

    @cached_property
    def order(self) -> tuple[int, ...]:
        """The dim of the whole that each dim goes along."""
        return tuple(dim.of for dim in self.dims)

    @cached_property
    def is_box(self) -> bool:
        """True where it has all cells of its region."""
        return len(set(self.order)) == len(self.order) and all(dim.step == 1 for dim in self.dims)

    @cached_property
    def is_straight(self) -> bool:
        """True where it is a box whose dims are those of the whole."""
        return self.order == tuple(range(len(self.start))) and self.is_box

    def narrow(self, dim: int, start: int, length: int) -> Subtensor:
        """Some of the cells along a dim of the part.

        >>> Subtensor.whole((6, 4)).narrow(0, 2, 3).region
        Box(lo=(2, 0), hi=(5, 4))
        """
        of, _, step = self.dims[dim]
        return Subtensor(
            (*self.start[:of], self.start[of] + start * step, *self.start[of + 1 :]),
            (*self.dims[:dim], _view_dim(of, length, step), *self.dims[dim + 1 :]),
        )

    def select(self, dim: int, at: int) -> Subtensor:
        """One cell along a dim, which is dropped."""
        one = self.narrow(dim, at, 1)
        return Subtensor(one.start, one.dims[:dim] + one.dims[dim + 1 :])

    def nothing(self) -> Subtensor:
        """None of the cells."""
        return Subtensor(self.start, (ViewDim(0, 0),))

    def unflatten(self, dim: int, sizes: Sequence[int]) -> Subtensor:
        """A dim as several, the last of which moves by one cell of it. Cells beyond them are left out.

        >>> Subtensor.whole((12, 4)).unflatten(0, [4, 3]).narrow(1, 1, 2).dims[:2]
        (ViewDim(of=0, size=4, step=3), ViewDim(of=0, size=2, step=1))
        """
        of, _, step = self.dims[dim]
        split = list[ViewDim]()
        for size in reversed(sizes):
            split.insert(0, _view_dim(of, size, step))
            step *= max(size, 1)
        return Subtensor(self.start, (*self.dims[:dim], *split, *self.dims[dim + 1 :]))

    def permute(self, order: Sequence[int]) -> Subtensor:
        """The dims in another order."""
        return Subtensor(self.start, tuple(self.dims[dim] for dim in order))

    def part(self, inner: Subtensor) -> Subtensor:
        """A part of this part.

        >>> Subtensor.whole((6, 4)).narrow(0, 2, 3).part(Subtensor.whole((3, 4)).select(0, 1)).region
        Box(lo=(3, 0), hi=(4, 4))
        """
        if inner is Subtensor.whole(self.shape) or self is Subtensor.whole(self.shape):
            return self if inner is Subtensor.whole(self.shape) else inner
        start = list(self.start)
        for dim, at in zip(self.dims, inner.start, strict=True):
            start[dim.of] += at * dim.step
        outer = [(self.dims[dim.of], dim) for dim in inner.dims]
        return Subtensor(tuple(start), tuple(_view_dim(a.of, b.size, a.step * b.step) for a, b in outer))

    def common(self, other: Subtensor) -> list[tuple[Subtensor, Subtensor]]:
        """The cells of both parts of a tensor: as parts of this one, and as the same parts of the other one.

        >>> rows, columns = Subtensor.whole((6, 4)).narrow(0, 2, 4), Subtensor.whole((6, 4)).select(1, 3)
        >>> [part.region for part in rows.common(columns)[0]]
        [Box(lo=(0, 3), hi=(4, 4)), Box(lo=(2,), hi=(6,))]
        """
        if 0 in self.shape or 0 in other.shape:
            return []
        if self._holds(other):  # as usual, and quick
            return [(other._from(self.start), Subtensor.whole(other.shape))]
        if other._holds(self):
            return [(Subtensor.whole(self.shape), self._from(other.start))]
        along = [common(self._nest(dim), other._nest(dim)) for dim in range(len(self.start))]
        return [_selected(self.shape, other.shape, pairs) for pairs in product(*along)]

    def _holds(self, other: Subtensor) -> bool:
        """True for a box with all cells of the other part, its dims as in the whole."""
        return self.is_straight and other.region in self.region

    def _from(self, origin: Sequence[int]) -> Subtensor:
        """The same cells, counted from another first cell."""
        return Subtensor(tuple(at - first for at, first in zip(self.start, origin, strict=True)), self.dims)

    def _nest(self, of: int) -> Nest:
        """Its cells along one dim of the whole."""
        runs = [Run(dim.size, dim.step, at) for at, dim in enumerate(self.dims) if dim.of == of]
        return Nest.of(self.start[of], runs)

    def is_whole(self, shape: Sequence[int]) -> bool:
        """True where it changes nothing."""
        return self == Subtensor.whole(shape)

    def of_places(self, places: Places) -> Places:
        """What is seen of boxes in memory, in the coordinates of the part: box by box, each perhaps in several."""
        if self._sees_all(places.boxes):
            return places
        return self.inside(places, *self.seen(places.boxes))

    def _sees_all(self, boxes: Boxes) -> bool:
        """True where nothing of these is outside, and coordinates stay what they are."""
        return self.is_straight and not any(self.start) and bool((boxes.hi <= ints(self.shape)).all())

    def seen(self, boxes: Boxes) -> tuple[Ints, Boxes]:
        """What is seen of boxes of the whole, as boxes of the part: the row of each, and the boxes. By row."""
        if self.is_box:
            return self._seen_by_box(boxes)
        rows = np.arange(boxes.count)
        lo, hi = (np.full((boxes.count, len(self.dims)), corner, np.int64) for corner in (0, 1))
        for of, first in enumerate(self.start):
            runs = self._nest(of).runs
            start, stop = (cells_before(runs, corner[rows, of] - first) for corner in boxes)
            whole = np.repeat(ints([[run.size for run in runs]]), len(rows), axis=0)
            row, part = cut(Boxes(np.zeros_like(whole), whole), start, stop)  # cells of a nest that follow one another
            rows, lo, hi, axes = rows[row], lo[row], hi[row], [run.axis for run in runs]
            lo[:, axes], hi[:, axes] = part
        return ints(rows), Boxes(lo, hi)

    def _seen_by_box(self, boxes: Boxes) -> tuple[Ints, Boxes]:
        lo, hi = (np.clip(corner, self.region.lo, self.region.hi) - ints(self.start) for corner in boxes)
        rows = np.flatnonzero((lo < hi).all(axis=1))
        return ints(rows), Boxes(*(corner[rows][:, list(self.order)] for corner in (lo, hi)))

    def inside(self, places: Places, rows: Ints, boxes: Boxes) -> Places:
        """The places of boxes of the part, each of which lies inside its row of `places`, which are of the whole."""
        strides = places.strides[rows]
        offset = places.offset[rows] + ((self._cells(boxes.lo) - places.boxes.lo[rows]) * strides).sum(axis=1)
        return Places(boxes, places.tensor[rows], ints(offset), strides[:, list(self.order)] * self._steps)

    def back(self, boxes: Boxes) -> Boxes:
        """The smallest boxes of the whole around boxes of the part, none of which is empty."""
        if self._sees_all(boxes):
            return boxes
        return Boxes(self._cells(boxes.lo), self._cells(boxes.hi - 1) + 1)

    def cells_along(self, of: int) -> Ints:
        """The indices of its cells along a dim of the whole."""
        cells = ints([self.start[of]])
        for dim in (dim for dim in self.dims if dim.of == of):
            cells = (cells[:, None] + np.arange(dim.size) * dim.step).reshape(-1)
        return cells

    @cached_property
    def _steps(self) -> Ints:
        return ints([dim.step for dim in self.dims])

    def _cells(self, points: Ints) -> Ints:
        """Points of the part, in the coordinates of the whole."""
        cells = np.repeat(ints([self.start]), len(points), axis=0)
        for at, dim in enumerate(self.dims):
            cells[:, dim.of] += points[:, at] * dim.step
        return cells


def _view_dim(of: int, size: int, step: int) -> ViewDim:
    return ViewDim(of, size, step if size > 1 else 1)  # the step to nowhere: equal parts are equal values


@lru_cache(maxsize=4096)
def _whole(shape: tuple[int, ...]) -> Subtensor:
    return Subtensor((0,) * len(shape), tuple(ViewDim(at, size) for at, size in enumerate(shape)))


def _selected(shape: Sequence[int], other: Sequence[int], pairs: Sequence[Pair]) -> tuple[Subtensor, Subtensor]:
    """The cells that pairs of nests, one for each dim of a common whole, choose in tensors of these two shapes."""
    runs = [both for one, two in pairs for both in zip(one.runs, two.runs, strict=True)]
    runs.sort(key=lambda both: (both[1].axis, -both[1].stride))
    ours, theirs = zip(*runs, strict=True) if runs else ((), ())
    return _chosen(shape, [one for one, _ in pairs], ours), _chosen(other, [two for _, two in pairs], theirs)


def _chosen(shape: Sequence[int], nests: Sequence[Nest], runs: Sequence[Run]) -> Subtensor:
    start = [0] * len(shape)
    for axis, at in (moved for nest in nests for moved in nest.at):
        start[axis] += at
    return Subtensor(tuple(start), tuple(_view_dim(run.axis, run.size, run.stride) for run in runs))


def simplify(one: Subtensor, other: Subtensor) -> tuple[Subtensor, Subtensor]:
    """The same cells of two tensors with fewer dims: two that are one run of cells in both become one.

    >>> heads = Subtensor.whole((12, 4)).unflatten(0, [4, 3])
    >>> simplify(heads, heads)[0].shape
    (12, 4)
    """
    pairs = list(zip(one.dims, other.dims, strict=True))
    while (joined := None if one.is_box and other.is_box else _joined(pairs)) is not None:
        pairs = joined
        one, other = (
            Subtensor(view.start, dims) for view, dims in zip((one, other), zip(*pairs, strict=True), strict=True)
        )
    return one, other


Dims = list[tuple[ViewDim, ViewDim]]


def _joined(pairs: Dims) -> Dims | None:
    """With one dim less; None where that cannot be."""
    for outer, inner in permutations(range(len(pairs)), 2):
        wide, narrow = pairs[outer], pairs[inner]
        along = all(a.of == b.of for a, b in zip(wide, narrow, strict=True))
        if along and all(a.step == b.step * b.size or b.size == 1 for a, b in zip(wide, narrow, strict=True)):
            both = wide if narrow[0].size == 1 else (_both(wide[0], narrow[0]), _both(wide[1], narrow[1]))
            return [both if at == outer else pair for at, pair in enumerate(pairs) if at != inner]
    return None


def _both(outer: ViewDim, inner: ViewDim) -> ViewDim:
    return inner._replace(size=outer.size * inner.size)


def uncovered(views: Collection[Subtensor], shape: Sequence[int]) -> Box | None:
    """Cells of a tensor that are in none of its parts; None where there are none."""
    whole = Subtensor.whole(shape)
    if whole in views or 0 in shape:
        return None
    if all(view.is_box for view in views):
        return _outside([view.region for view in views], whole.region)
    return _unmarked(list(views), shape)


def _outside(boxes: Sequence[Box], whole: Box) -> Box | None:
    if tiles(Boxes.of(boxes, len(whole.lo)), whole.shape):
        return None
    return next(iter(whole.without(boxes)), None)


def _unmarked(views: Sequence[Subtensor], shape: Sequence[int]) -> Box | None:
    """Cells along a dim that all views see alike are looked at once: few are left where views are regular."""
    seen = [[view.cells_along(of) for view in views] for of in range(len(shape))]
    kinds = [_kinds(cells, size) for cells, size in zip(seen, shape, strict=True)]
    covered = np.zeros([int(kind.max()) + 1 for kind in kinds], np.bool_)
    for along in zip(*seen, strict=True):
        covered[np.ix_(*(np.unique(kind[cells]) for kind, cells in zip(kinds, along, strict=True)))] = True
    where = np.argwhere(~covered)
    if not len(where):
        return None
    cell = tuple(int(np.argmax(kind == number)) for kind, number in zip(kinds, where[0], strict=True))
    return Box(cell, tuple(at + 1 for at in cell))


def _kinds(sets: Sequence[Ints], size: int) -> Ints:
    """A number for every index of a dim: equal for those that are in the same sets."""
    kind, members = np.zeros(size, np.int64), [size]
    for cells in {one.tobytes(): one for one in sets}.values():
        here, at = np.unique(kind[cells], return_inverse=True)
        inside = np.bincount(at)
        for row, number in enumerate(here.tolist()):
            if inside[row] < members[number]:  # some are in this set, some are not: those in it become another kind
                members[number] -= int(inside[row])
                here[row] = len(members)
                members.append(int(inside[row]))
        kind[cells] = here[at]
    return kind


def subtensor_layout(layout: Layout, view: Subtensor) -> Layout:
    """Where the cells of the part live; each piece that is seen is a buffer of its own."""
    return layout if view.is_whole(layout.shape) else _part_layout(layout, view)


@lru_cache(maxsize=4096)
def _part_layout(layout: Layout, view: Subtensor) -> Layout:
    if layout.op is not None:
        raise LayoutError(f"a part of {layout!r} cannot be taken while it is partial: reduce it first")
    pieces = [(owner, piece.box) for owner in layout.owners() for piece in layout.pieces(owner)]
    rows, boxes = view.seen(Boxes.of([box for _, box in pieces], layout.ndim))
    owners = [pieces[row][0] for row in rows.tolist()]
    seen = zip(owners, boxes.lo.tolist(), boxes.hi.tolist(), strict=True)
    return Layout.boxes(view.shape, list(seen), overlap="replicas").shortest()


def subtensor_views(tensors: Sequence[torch.Tensor], layout: Layout, view: Subtensor, owner: int) -> list[torch.Tensor]:
    """An owner's tensors of the part: views of those of the whole, in the order of the layout."""
    if view.is_whole(layout.shape):
        return list(tensors)
    places = places_of(layout, owner, [tensor.stride() for tensor in tensors])
    return [view_of(window, tensors) for window in view.of_places(places).windows()]
