"""What recorded memory holds: cells of the checkpoint, values of the loader itself, and what cannot be traced."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from math import prod
from typing import ClassVar, NamedTuple

import torch

from shardwise.geometry import Box, Boxes, Step, StridedBox, StridedPair, join, row_major, strided_boxes
from shardwise.job.casts import PLAIN


@dataclass(frozen=True)
class FromCheckpoint:
    """Cells of a tensor of the checkpoint. `rounded`: the dtype that they were rounded to on the way."""

    name: str
    dtype: torch.dtype
    rounded: torch.dtype | None = None

    @property
    def names(self) -> tuple[str, ...]:
        """The names of the checkpoint that they may come from."""
        return (self.name,)

    def cast(self, dtype: torch.dtype) -> Origin:
        """After a cast. Values that are rounded twice are untraceable: no single cast gives the same."""
        now = self.rounded or self.dtype
        if now == dtype:
            return self
        if now not in PLAIN or dtype not in PLAIN:
            return Untraceable(self.names, f"it is cast from {now} to {dtype}")
        if torch.promote_types(now, dtype) == dtype:
            return self
        if self.rounded is not None:
            return Untraceable(self.names, f"it is rounded to {now}, and then to {dtype}")
        return replace(self, rounded=dtype)


@dataclass(frozen=True, eq=False)
class FromLoader:
    """Values that the loader has without the checkpoint: constants, padding. `values` is flat."""

    names: ClassVar[tuple[str, ...]] = ()
    values: torch.Tensor

    def cast(self, dtype: torch.dtype) -> Origin:
        """The values in the other dtype."""
        return self if self.values.dtype == dtype else FromLoader(self.values.to(dtype))


@dataclass(frozen=True)
class Untraceable:
    """Values that cannot be traced: the names of the checkpoint that they may come from, and the reason."""

    names: tuple[str, ...]
    reason: str

    def cast(self, dtype: torch.dtype) -> Origin:
        """They stay untraceable."""
        return self


Origin = FromCheckpoint | FromLoader | Untraceable


class Write(NamedTuple):
    """A box of some memory, where its values lie in the memory of their origin, and the origin."""

    cells: StridedBox
    origin: Origin

    @property
    def box(self) -> Box:
        """That is written."""
        return self.cells.box

    def inside(self, part: Box) -> Write:
        """The cells of a box inside it."""
        return Write(self.cells.inside(part), self.origin)


class Overwrite(NamedTuple):
    """Cells of the checkpoint that were overwritten by those of another name."""

    name: str
    by: str
    box: Box


@dataclass(eq=False)
class Memory:
    """The storage of a tensor that is recorded, as a row-major tensor of `shape`, and what its cells hold.

    Cells that were not written hold `initial`.
    """

    shape: tuple[int, ...]
    dtype: torch.dtype
    tensor: torch.Tensor = field(repr=False)  # while it lives, no other memory has its number
    initial: Origin = field(repr=False)
    overwrites: list[Overwrite] = field(default_factory=list)
    history: dict[str, None] = field(default_factory=dict, repr=False)  # names that were ever in it, if only in part
    _writes: list[Write] = field(default_factory=list, repr=False)
    _disjoint: bool = True

    @property
    def written(self) -> bool:
        """True once something was written."""
        return bool(self._writes)

    def write(self, pair: StridedPair, origin: Origin) -> None:
        """The cells of a window (`here`) come from an origin (`there`)."""
        self.history |= dict.fromkeys(origin.names)
        self._writes += [Write(cells, origin) for cells in strided_boxes(pair, self.shape)]
        self._disjoint = len(self._writes) < 2

    def write_untraceable(self, window: StridedPair, origin: Untraceable) -> None:
        """The cells of a window cannot be traced from here on."""
        self.write(StridedPair(window.here, 0, tuple(step._replace(there=0) for step in window.steps)), origin)

    def writes(self) -> list[Write]:
        """What the written cells hold, in disjoint boxes. Later writes win."""
        if not self._disjoint:
            self._writes = list(self._last_writes())
            self._disjoint = True
        return self._writes

    def _last_writes(self) -> Iterator[Write]:
        later = self._later_writes()
        for number, write in enumerate(self._writes):
            parts = [write.box]
            for other in later.get(number, ()):
                self._note_overwrite(write, other)
                parts = [rest for part in parts for rest in part.minus(other.box)]
            yield from map(write.inside, parts)

    def _later_writes(self) -> dict[int, list[Write]]:
        """By the number of a write: later ones that overlap it. One join finds all: parameters of experts have many."""
        boxes = Boxes.of([write.box for write in self._writes], len(self.shape))
        later: dict[int, list[Write]] = {}
        for one, other in sorted(zip(*(numbers.tolist() for numbers in join(boxes, boxes)), strict=True)):
            if one < other:
                later.setdefault(one, []).append(self._writes[other])
        return later

    def _note_overwrite(self, write: Write, other: Write) -> None:
        before, after, shared = write.origin, other.origin, write.box & other.box
        if isinstance(before, FromCheckpoint) and isinstance(after, FromCheckpoint) and before.name != after.name:
            self.overwrites += [Overwrite(before.name, after.name, shared)] if shared else []

    def read(self, pair: StridedPair) -> Iterator[tuple[StridedPair, Origin]]:
        """What the cells of a window (`here`) hold: the memory of the origin beside the other memory of the window."""
        for window in strided_boxes(pair, self.shape):
            for cells, origin in self._content(window.box):
                yield cells.paired(window.inside(cells.box)), origin

    def _content(self, box: Box) -> Iterator[Write]:
        """What a box holds: parts of writes, and between them what was there before."""
        left = [box]
        for write in self.writes():
            if write.box == box:  # the usual case, kept fast
                yield write
                return
            shared = write.box & box
            if shared is not None:
                yield write.inside(shared)
                left = [rest for part in left for rest in part.minus(shared)]
        yield from map(self._before_writes().inside, left)

    def _before_writes(self) -> Write:
        whole = Box.whole(self.shape)
        return Write(StridedBox(whole, 0, row_major(self.shape)), self.initial)

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
