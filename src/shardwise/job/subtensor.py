"""A part of a sharded tensor, its dims perhaps in another order, as a sharded tensor of its own: the same memory."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache

import numpy as np
import torch

from shardwise.errors import LayoutError
from shardwise.exchange import view_of
from shardwise.geometry import Box, Boxes, Places, ints
from shardwise.layout import Layout, places_of


@dataclass(frozen=True)
class Subtensor:
    """The cells of `region`; its dims in this order. A dim that is left out has one cell there."""

    region: Box
    order: tuple[int, ...]

    @cached_property
    def _hash(self) -> int:
        return hash((self.region, self.order))

    def __hash__(self) -> int:
        return self._hash

    @staticmethod
    def whole(shape: Sequence[int]) -> Subtensor:
        """All cells, as they are."""
        return _whole(tuple(shape))

    @cached_property
    def shape(self) -> tuple[int, ...]:
        """Of the part."""
        return tuple(self.region.hi[dim] - self.region.lo[dim] for dim in self.order)

    def narrow(self, dim: int, start: int, length: int) -> Subtensor:
        """Some of the cells along a dim of the part.

        >>> Subtensor.whole((6, 4)).narrow(0, 2, 3).region
        Box(lo=(2, 0), hi=(5, 4))
        """
        lo, hi = list(self.region.lo), list(self.region.hi)
        lo[self.order[dim]] += start
        hi[self.order[dim]] = lo[self.order[dim]] + length
        return Subtensor(Box(tuple(lo), tuple(hi)), self.order)

    def select(self, dim: int, at: int) -> Subtensor:
        """One cell along a dim, which is dropped."""
        one = self.narrow(dim, at, 1)
        return Subtensor(one.region, self.order[:dim] + self.order[dim + 1 :])

    def permute(self, order: Sequence[int]) -> Subtensor:
        """The dims in another order."""
        return Subtensor(self.region, tuple(self.order[dim] for dim in order))

    def part(self, inner: Subtensor) -> Subtensor:
        """A part of this part.

        >>> Subtensor.whole((6, 4)).narrow(0, 2, 3).part(Subtensor.whole((3, 4)).select(0, 1)).region
        Box(lo=(3, 0), hi=(4, 4))
        """
        lo, hi = list(self.region.lo), list(self.region.hi)
        for dim, start, stop in zip(self.order, inner.region.lo, inner.region.hi, strict=True):
            lo[dim], hi[dim] = self.region.lo[dim] + start, self.region.lo[dim] + stop
        return Subtensor(Box(tuple(lo), tuple(hi)), tuple(self.order[dim] for dim in inner.order))

    def common(self, other: Subtensor) -> tuple[Subtensor, Subtensor] | None:
        """The cells of both parts of a tensor: as a part of this one, and as a part of the other one.

        >>> rows, columns = Subtensor.whole((6, 4)).narrow(0, 2, 4), Subtensor.whole((6, 4)).select(1, 3)
        >>> [part.region for part in rows.common(columns)]
        [Box(lo=(0, 3), hi=(4, 4)), Box(lo=(2,), hi=(6,))]
        """
        shared = self.region & other.region
        boxes = [] if shared is None else [box for box in (self.box(shared), other.box(shared)) if box is not None]
        kept = [dim for dim in other.order if dim in self.order]
        parts = [
            Subtensor(box, tuple(view.order.index(dim) for dim in kept))
            for box, view in zip(boxes, (self, other), strict=False)
        ]
        return (parts[0], parts[1]) if parts else None

    def is_whole(self, shape: Sequence[int]) -> bool:
        """True where it changes nothing."""
        return self == Subtensor.whole(shape)

    def of_places(self, places: Places) -> Places:
        """What is seen of boxes in memory, in the coordinates of the part."""
        if self._sees_all(places.boxes):
            return places
        _, inside = places.within(Boxes.of([self.region], places.boxes.ndim))
        start, order = ints(self.region.lo), list(self.order)
        boxes = Boxes(*((corner - start)[:, order] for corner in inside.boxes))
        return Places(boxes, inside.tensor, inside.offset, inside.strides[:, order])

    def _sees_all(self, boxes: Boxes) -> bool:
        """True where nothing of these is outside, and coordinates stay what they are."""
        straight = self.order == tuple(range(boxes.ndim)) and not any(self.region.lo)
        return straight and bool((boxes.hi <= ints(self.region.hi)).all())

    def back(self, boxes: Boxes) -> Boxes:
        """Boxes of the part, in the coordinates of the whole."""
        if self.order == tuple(range(len(self.region.lo))) and not any(self.region.lo):
            return boxes
        lo, hi = (np.repeat(ints([corner]), boxes.count, axis=0) for corner in (self.region.lo, self.region.hi))
        start, order = ints(self.region.lo)[list(self.order)], list(self.order)
        lo[:, order], hi[:, order] = boxes.lo + start, boxes.hi + start
        return Boxes(lo, hi)

    def box(self, box: Box) -> Box | None:
        """What is seen of a box, in the coordinates of the part."""
        shared = box & self.region
        if shared is None:
            return None
        start = self.region.lo
        lo, hi = (tuple(corner[dim] - start[dim] for dim in self.order) for corner in (shared.lo, shared.hi))
        return Box(lo, hi)


@lru_cache(maxsize=4096)
def _whole(shape: tuple[int, ...]) -> Subtensor:
    return Subtensor(Box((0,) * len(shape), shape), tuple(range(len(shape))))


def subtensor_layout(layout: Layout, view: Subtensor) -> Layout:
    """Where the cells of the part live; each piece that is seen is a buffer of its own."""
    return layout if view.is_whole(layout.shape) else _part_layout(layout, view)


@lru_cache(maxsize=4096)
def _part_layout(layout: Layout, view: Subtensor) -> Layout:
    if layout.op is not None:
        raise LayoutError(f"a part of {layout!r} cannot be taken while it is partial: reduce it first")
    pieces = list[tuple[int, Sequence[int], Sequence[int]]]()
    for owner in layout.owners():
        for piece in layout.pieces(owner):
            box = view.box(piece.box)
            if box is not None:
                pieces.append((owner, box.lo, box.hi))
    return Layout.boxes(view.shape, pieces, overlap="replicas").shortest()


def subtensor_views(tensors: Sequence[torch.Tensor], layout: Layout, view: Subtensor, owner: int) -> list[torch.Tensor]:
    """An owner's tensors of the part: views of those of the whole, in the order of the layout."""
    if view.is_whole(layout.shape):
        return list(tensors)
    places = places_of(layout, owner, [tensor.stride() for tensor in tensors])
    return [view_of(cut, tensors) for cut in view.of_places(places).windows()]
