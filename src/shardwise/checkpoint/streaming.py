"""A tensor of the target, assembled from entries of a checkpoint and read in chunks."""

from __future__ import annotations

from collections.abc import Hashable, Iterator
from dataclasses import dataclass
from math import prod
from mmap import MAP_PRIVATE, mmap
from typing import IO

import numpy as np
import torch

from shardwise.checkpoint.entry import Entry, Reading, read_into
from shardwise.checkpoint.files import WORDS
from shardwise.checkpoint.matching import Packed, match
from shardwise.exchange import view_of
from shardwise.exchange.overflow import Losses, may_overflow
from shardwise.geometry import Box, Boxes, Places, Window, cut, ints
from shardwise.job.remap import Link

CHUNK, APART = 2**23, 2**20


@dataclass(frozen=True)
class Stream:
    """A tensor whose cells come from entries, by links; cast to `dtype`."""

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    sources: tuple[tuple[Link, Entry], ...]

    @property
    def size(self) -> int:
        """The bytes of all cells."""
        return prod(self.shape) * self.dtype.itemsize

    def same_bytes(self, other: Stream) -> bool:
        """True where the same bytes of files are known to become the same tensor: tied weights that are stored once."""
        return self.origin is not None and self.origin == other.origin

    @property
    def origin(self) -> Hashable:
        """The bytes that it comes from, and what becomes of them; None where it shares none of them with another."""
        if not self.sources or any(entry.shared is None for _, entry in self.sources):
            return None
        parts = [(link.source_view, link.target_view, entry.dtype, entry.shared) for link, entry in self.sources]
        return self.shape, self.dtype, tuple(parts)

    def check(self) -> None:
        """Refuse cells that are stored nowhere."""
        for link, entry in self.sources:
            entry.check(Boxes.of([link.source_view.region], len(entry.shape)))

    def fill(self, boxes: Boxes, buffer: torch.Tensor) -> None:
        """The cells of boxes, one after the other, into a flat tensor."""
        cuts = self._cuts(Places.packed(boxes))
        read_into(Reading(entry, here, [view_of(one, [buffer]) for one in there]) for entry, here, there in cuts)

    @property
    def may_overflow(self) -> bool:
        """True where a value may be beyond the range of the new dtype."""
        return any(may_overflow(entry.dtype, self.dtype) for _, entry in self.sources)

    def losses(self, chunk: int = CHUNK) -> Losses:
        """What the cast loses of all cells; nothing is read where it can lose nothing."""
        losses, whole = Losses(), Box((0,) * len(self.shape), self.shape)
        for part in self._parts(whole, chunk) if self.may_overflow else ():
            for entry, here, _ in self._cuts(Places.packed(part)):
                if may_overflow(entry.dtype, self.dtype):
                    losses.look(repr(self.name), entry.views(here), self.dtype)
        return losses

    def _cuts(self, packed: Places) -> Iterator[tuple[Entry, list[Window], list[Window]]]:
        for link, entry in self.sources:
            there = link.target_view.of_places(packed)
            if there.boxes.count:
                found = entry.within(link.source_view.back(there.boxes))
                here, to = link.source_view.of_places(found).common(there)
                yield entry, entry.cuts(here), to.windows()

    def write(self, box: Box, file: IO[bytes], chunk: int = CHUNK) -> None:
        """The cells of a box, row-major, to a file: copied as stored if possible, otherwise packed in chunks."""
        runs = self._runs(box)
        for entry, run in runs or ():
            entry.copy(run, file)
        for part, buffer in self.chunks(box, chunk) if runs is None else ():
            self.fill(part, buffer)
            file.write(buffer.view(WORDS[self.dtype.itemsize]).numpy().data)

    def _runs(self, box: Box) -> list[tuple[Entry, Window]] | None:
        """The box as bytes of files one after the other; None where it has to be packed or cast."""
        if not box.volume:
            return []
        runs = list[tuple[int, Entry, Window]]()
        for link, entry in self.sources:
            if entry.dtype != self.dtype:
                return None
            matched = match(link, entry, Packed(box))
            sources = matched.sources(entry, link.source_view)
            if not all(cut.contiguous for cut in (*sources, *matched.there)):
                return None
            runs += [(to.offset, entry, run) for run, to in zip(sources, matched.there, strict=True)]
        return [(entry, run) for _, entry, run in sorted(runs, key=lambda run: run[0])]

    def chunks(self, box: Box, chunk: int) -> Iterator[tuple[Boxes, torch.Tensor]]:
        """A box in parts of so many bytes, row-major, each with the same buffer for its cells."""
        buffer = _buffer(min(self._cells(chunk), box.volume), self.dtype)
        for part in self._parts(box, chunk):
            yield part, buffer[: int(part.volumes().sum())]

    def _parts(self, box: Box, chunk: int) -> Iterator[Boxes]:
        cells = self._cells(chunk)
        for start in range(0, box.volume, cells):
            stop = min(start + cells, box.volume)
            yield cut(Boxes.of([box], len(self.shape)), ints([start]), ints([stop]))[1]

    def _cells(self, chunk: int) -> int:
        return max(1, chunk // self.dtype.itemsize)


def _buffer(count: int, dtype: torch.dtype) -> torch.Tensor:
    """Memory for so many elements. What is large goes back to the system at once: allocators may keep it for later."""
    if count * dtype.itemsize < APART:
        return torch.empty(count, dtype=dtype, device="cpu")
    return torch.frombuffer(mmap(-1, count * dtype.itemsize, flags=MAP_PRIVATE), dtype=torch.uint8).view(dtype)


def differing(a: torch.Tensor, b: torch.Tensor) -> np.ndarray[tuple[int], np.dtype[np.int64]]:
    """The numbers of elements whose bits differ."""
    bits = [
        np.frombuffer(t.view(WORDS[t.element_size()]).numpy(), dtype=f"u{min(t.element_size(), 8)}") for t in (a, b)
    ]
    wrong = bits[0] != bits[1]
    return np.flatnonzero(wrong.reshape(a.numel(), -1).any(axis=1) if a.element_size() > 8 else wrong)
