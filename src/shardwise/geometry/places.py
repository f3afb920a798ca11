"""Where boxes of cells lie in buffers, whether these are tensors, messages or files; found for many boxes at once."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from math import prod
from operator import mul
from typing import NamedTuple

import numpy as np

from shardwise.geometry.boxes import Box, Boxes
from shardwise.geometry.join import join
from shardwise.geometry.ragged import Ints, ints

Strides = tuple[int, ...]


@lru_cache(maxsize=4096)
def _contiguous(shape: tuple[int, ...], strides: Strides) -> bool:
    step = 1
    for size, stride in zip(reversed(shape), reversed(strides), strict=True):
        if size != 1 and stride != step:
            return False
        step *= size
    return True


@lru_cache(maxsize=4096)
def _reach(shape: tuple[int, ...], strides: Strides) -> int:
    return 1 + sum(map(mul, strides, shape)) - sum(strides)


class Window(NamedTuple):
    """A block of elements of tensor number `tensor`, counted from its first element."""

    tensor: int
    shape: tuple[int, ...]
    strides: Strides
    offset: int

    @property
    def reach(self) -> int:
        """How many elements lie from its first to its last one."""
        return _reach(self.shape, self.strides)

    def elements(self, dims: int | None = None) -> Ints:
        """The numbers of its elements, or of the first ones along these dims."""
        numbers = ints([self.offset])
        for size, stride in zip(self.shape[:dims], self.strides[:dims], strict=True):
            numbers = (numbers[:, None] + np.arange(size) * stride).reshape(-1)
        return numbers

    @property
    def contiguous(self) -> bool:
        """True where the elements lie one after the other."""
        return _contiguous(self.shape, self.strides)

    @property
    def volume(self) -> int:
        """The number of its elements."""
        return prod(self.shape)


@dataclass(frozen=True)
class Places:
    """Boxes of cells, and for each where it lies: in which tensor, its first element, its strides."""

    boxes: Boxes
    tensor: Ints
    offset: Ints
    strides: Ints  # a row per box

    @staticmethod
    def empty(ndim: int) -> Places:
        """None, of boxes with so many dims."""
        nothing = np.zeros((0, ndim), np.int64)
        return Places(Boxes(nothing, nothing), np.zeros(0, np.int64), np.zeros(0, np.int64), nothing)

    @staticmethod
    def packed(boxes: Boxes) -> Places:
        """Boxes one after the other in one tensor, each row-major."""
        sizes = np.maximum(boxes.hi - boxes.lo, 1)
        strides = np.ones_like(sizes)
        strides[:, :-1] = np.cumprod(sizes[:, :0:-1], axis=1)[:, ::-1]
        ends = np.cumsum(boxes.volumes())
        return Places(boxes, np.zeros(boxes.count, np.int64), ends - boxes.volumes(), strides)

    @staticmethod
    def concat(parts: Sequence[Places]) -> Places:
        """All of them, one after the other."""
        columns = [(p.tensor, p.offset, p.strides) for p in parts]
        return Places(Boxes.concat([p.boxes for p in parts]), *map(np.concatenate, zip(*columns, strict=True)))

    def take(self, rows: Ints) -> Places:
        """Some of them."""
        return Places(self.boxes.take(rows), self.tensor[rows], self.offset[rows], self.strides[rows])

    def within(self, boxes: Boxes) -> tuple[Ints, Places]:
        """What these places hold of the boxes: for each part the number of its box, and its place. By box."""
        box, place = join(boxes, self.boxes)
        order = np.lexsort((place, box))
        box, place = box[order], place[order]
        return box, self.inside(place, boxes.take(box).overlap(self.boxes.take(place)))

    def once(self, boxes: Boxes) -> tuple[Ints, Places]:
        """The same, no cell of a box twice: an owner may hold overlapping pieces."""
        box, places = self.within(boxes)
        if places.boxes.volumes().sum() == boxes.volumes().sum():
            return box, places
        rows, rest = list[int](), list[Box]()
        seen = dict[int, list[Box]]()
        for row, number in enumerate(box.tolist()):
            left = [places.boxes.box(row)]
            for other in seen.setdefault(number, []):
                left = [part for piece in left for part in piece.minus(other)]
            seen[number].append(places.boxes.box(row))
            rows += [row] * len(left)
            rest += left
        return box[rows], places.inside(ints(rows), Boxes.of(rest, boxes.ndim))

    def common(self, other: Places) -> tuple[Places, Places]:
        """The cells that both have, part by part: where they lie here, and where there."""
        row, there = other.within(self.boxes)
        return self.inside(row, there.boxes), there

    def inside(self, rows: Ints, boxes: Boxes) -> Places:
        """The places of boxes that lie inside these rows, each in its own."""
        strides = self.strides[rows]
        offset = self.offset[rows] + ((boxes.lo - self.boxes.lo[rows]) * strides).sum(axis=1)
        return Places(boxes, self.tensor[rows], ints(offset), strides)

    def runs(self) -> Ints:
        """How many stretches of consecutive elements each has."""
        sizes = np.concatenate([np.ones_like(self.offset)[:, None], self.boxes.hi - self.boxes.lo], axis=1)
        dense = np.cumprod(sizes[:, :0:-1], axis=1)[:, ::-1] // sizes[:, 1:]  # the strides that leave no gap
        broken = (sizes[:, 1:] != 1) & (self.strides != dense)
        inner = np.argmax(np.insert(broken, 0, True, axis=1)[:, ::-1], axis=1)
        return np.cumprod(sizes, axis=1)[np.arange(len(sizes)), sizes.shape[1] - 1 - inner]

    def windows(self) -> list[Window]:
        """As views to be taken."""
        shapes = map(tuple, (self.boxes.hi - self.boxes.lo).tolist())
        strides = map(tuple, self.strides.tolist())
        return list(map(Window, self.tensor.tolist(), shapes, strides, self.offset.tolist()))
