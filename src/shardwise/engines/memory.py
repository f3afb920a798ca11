"""What recorded memory holds: cells of the checkpoint, values of the loader itself, and what cannot be followed."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from math import prod
from typing import NamedTuple

import torch

from shardwise.geometry import Box, Boxes, Step, StridedBox, StridedPair, join, row_major, strided_boxes
from shardwise.job.casts import PLAIN


@dataclass(frozen=True)
class Stored:
    """Cells of a tensor of the checkpoint. `rounded`: the dtype that they were rounded to on the way."""

    name: str
    dtype: torch.dtype
    rounded: torch.dtype | None = None

    def cast(self, dtype: torch.dtype) -> Origin:
        """After a cast. Values that are rounded twice are lost: no single cast gives the same."""
        now = self.rounded or self.dtype
        if now == dtype:
            return self
        if now not in PLAIN or dtype not in PLAIN:
            return Lost((self.name,), f"it is cast from {now} to {dtype}")
        if torch.promote_types(now, dtype) == dtype:
            return self
        if self.rounded is not None:
            return Lost((self.name,), f"it is rounded to {now}, and then to {dtype}")
        return replace(self, rounded=dtype)


@dataclass(frozen=True, eq=False)
class Own:
    """Elements of a tensor that the loader has without the checkpoint: constants, padding. `values` is flat."""

    values: torch.Tensor

    def cast(self, dtype: torch.dtype) -> Origin:
        """The elements in the other dtype."""
        return self if self.values.dtype == dtype else Own(self.values.to(dtype))


@dataclass(frozen=True)
class Lost:
    """Values that cannot be followed: the names of the checkpoint that they may come from, and the reason."""

    names: tuple[str, ...]
    reason: str

    def cast(self, dtype: torch.dtype) -> Origin:
        """They stay lost."""
        return self


Origin = Stored | Own | Lost


class Piece(NamedTuple):
    """A box of some memory, and where its values lie in the memory of their origin."""

    cells: StridedBox
    origin: Origin

    def names(self) -> tuple[str, ...]:
        """The names of the checkpoint whose values may be in it."""
        if isinstance(self.origin, Own):
            return ()
        return (self.origin.name,) if isinstance(self.origin, Stored) else self.origin.names


class Overwrite(NamedTuple):
    """Cells of the checkpoint that were overwritten by those of another name."""

    name: str
    by: str
    box: Box


@dataclass(eq=False)
class Memory:
    """The storage of a tensor that is recorded, as a row-major tensor of `shape`, and what its cells hold.

    Cells without a piece hold `initial`.
    """

    shape: tuple[int, ...]
    dtype: torch.dtype
    tensor: torch.Tensor = field(repr=False)  # while it lives, no other memory has its number
    initial: Origin = field(repr=False)
    overwrites: list[Overwrite] = field(default_factory=list)
    _written: list[Piece] = field(default_factory=list, repr=False)
    _disjoint: bool = True

    def __bool__(self) -> bool:
        """True once something was written."""
        return bool(self._written)

    def write(self, pair: StridedPair, origin: Origin) -> None:
        """The cells of a window (`here`) come from an origin (`there`)."""
        self._written += [Piece(cells, origin) for cells in strided_boxes(pair, self.shape)]
        self._disjoint = len(self._written) < 2

    def lose(self, window: StridedPair, origin: Lost) -> None:
        """The cells of a window cannot be followed from here on."""
        self.write(StridedPair(window.here, 0, tuple(step._replace(there=0) for step in window.steps)), origin)

    def pieces(self) -> list[Piece]:
        """What the cells hold that were written. Later writes win."""
        if not self._disjoint:
            self._written = list(self._last_written())
            self._disjoint = True
        return self._written

    def _last_written(self) -> Iterator[Piece]:
        """Overlaps are looked for once, over all writes: parameters of experts have very many."""
        boxes = Boxes.of([piece.cells.box for piece in self._written], len(self.shape))
        first, second = join(boxes, boxes)
        later: dict[int, list[int]] = {}
        for one, other in zip(first.tolist(), second.tolist(), strict=True):
            if one < other:
                later.setdefault(one, []).append(other)
        for number, piece in enumerate(self._written):
            parts = [piece.cells.box]
            for other in sorted(later.get(number, ())):
                self._note_overwrite(piece, self._written[other])
                parts = [rest for part in parts for rest in part.minus(self._written[other].cells.box)]
            yield from (piece._replace(cells=piece.cells.inside(part)) for part in parts)

    def _note_overwrite(self, piece: Piece, other: Piece) -> None:
        before, after = piece.origin, other.origin
        shared = piece.cells.box & other.cells.box
        if isinstance(before, Stored) and isinstance(after, Stored) and shared and before.name != after.name:
            self.overwrites.append(Overwrite(before.name, after.name, shared))

    def read(self, pair: StridedPair) -> Iterator[tuple[StridedPair, Origin]]:
        """What the cells of a window (`here`) hold: the memory of the origin beside the other memory of the window."""
        for window in strided_boxes(pair, self.shape):
            left = [window.box]
            for piece in self.pieces():
                if piece.cells.box == window.box:  # mostly: a short way
                    yield piece.cells.paired(window), piece.origin
                    left = []
                    break
                shared = piece.cells.box & window.box
                if shared is not None:
                    yield piece.cells.inside(shared).paired(window.inside(shared)), piece.origin
                    left = [part for box in left for part in box.minus(shared)]
            for box in left:
                start = sum(a * stride for a, stride in zip(box.lo, row_major(self.shape), strict=True))
                yield StridedBox(box, start, row_major(self.shape)).paired(window.inside(box)), self.initial

    def names(self) -> list[str]:
        """The names of the checkpoint whose values may be in it."""
        return list(dict.fromkeys(name for piece in self.pieces() for name in piece.names()))

    def whole(self) -> torch.Tensor:
        """All of it: the tensor by which it was found may be a part."""
        if self.tensor.numel() == prod(self.shape):
            return self.tensor
        return self.tensor.as_strided(self.shape, row_major(self.shape), 0)


def memory_shape(tensor: torch.Tensor) -> tuple[int, ...]:
    """The shape in which all memory of a tensor's storage is row-major; flat where no order of its dims is."""
    elements = tensor.untyped_storage().nbytes() // tensor.element_size()
    steps = sorted(zip(tensor.stride(), tensor.shape, strict=True), reverse=True)
    strides, shape = tuple(stride for stride, _ in steps), tuple(size for _, size in steps)
    dense = all(size == 1 or a == b for size, a, b in zip(shape, strides, row_major(shape), strict=True))
    return shape if dense and tensor.numel() == elements and tensor.storage_offset() == 0 else (elements,)


def window_of(tensor: torch.Tensor, there: int = 0, strides: Sequence[int] | None = None) -> StridedPair:
    """A view as a window of its storage, beside another memory: by default a row-major one of its own shape."""
    other = row_major(tuple(tensor.shape)) if strides is None else strides
    return StridedPair(int(tensor.storage_offset()), there, tuple(map(Step, tensor.shape, tensor.stride(), other)))


def turned(pair: StridedPair) -> StridedPair:
    """The same pair, with the other memory as the first."""
    steps = tuple(step._replace(here=step.there, there=step.here) for step in pair.steps)
    return StridedPair(pair.there, pair.here, steps)
