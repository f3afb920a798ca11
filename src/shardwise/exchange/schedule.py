"""The messages of an exchange: what the programs of several tensors send to and receive from every peer, in turns."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from typing import NamedTuple

import numpy as np
import torch

from shardwise.exchange.program import Program, Segment
from shardwise.geometry import Ints, ints

Tensors = Sequence[torch.Tensor]
FIRST = (0, 0)  # the step and round whose small messages travel with the agreement


class Share(NamedTuple):
    """What a message has of tensor number `move`: bytes `start` to `stop`."""

    move: int
    segment: Segment
    dtype: torch.dtype
    start: int
    stop: int

    def cells(self, message: torch.Tensor) -> torch.Tensor:
        """Its cells in the message."""
        return message[self.start : self.stop].view(self.dtype)


@dataclass(frozen=True, eq=False)
class Message:
    """A message to or from a peer: parts of several tensors, one after the other."""

    peer: int
    bytes: int
    parts: tuple[Share, ...]

    def views(self, message: torch.Tensor, tensors: Sequence[Tensors]) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
        """Its cells in our tensors, and in the message. (Terms have no place among our own.)"""
        ours, theirs = list[torch.Tensor](), list[torch.Tensor]()
        for part in self.parts:
            cells = [part.cells(message)]
            for here, there in part.segment.pairs:
                ours.append(here.of(tensors[part.move]))
                theirs.append(there.of(cells))
        return ours, theirs

    @cached_property
    def picks(self) -> tuple[int, Ints]:
        """Where it is of one of our tensors: which of those of its part, and the numbers of its elements in memory."""
        pairs = self.parts[0].segment.pairs
        if len(self.parts) > 1 or len({pair.here.tensor for pair in pairs}) != 1:
            return 0, ints([])
        found = np.empty(self.parts[0].segment.cells, dtype=np.int64)
        for here, there in pairs:
            found[there.elements()] = here.elements()
        return pairs[0].here.tensor, found

    @cached_property
    def run(self) -> float:
        """How many bytes of it lie one after the other among our own tensors, on average."""
        runs = sum(pair.here.runs for part in self.parts for pair in part.segment.pairs)
        return self.bytes / runs if runs else 0.0

    def in_place(self, tensors: Sequence[Tensors], device: torch.device) -> torch.Tensor | None:
        """Its bytes among our own tensors, where they lie there as in the message."""
        part, *others = self.parts
        whole = part.segment.whole
        if others or whole is None:
            return None
        cells = whole.of(tensors[part.move])
        if cells.dtype != part.dtype or cells.device != device:
            return None
        return cells.as_strided((cells.numel(),), (1,)).view(torch.uint8)  # dims of size 1 may have had any stride


@dataclass(frozen=True)
class Turn:
    """One round of one step: messages of their own, and those that are small enough to travel with the agreement."""

    key: tuple[int, int]
    receives: tuple[Message, ...]
    sends: tuple[Message, ...]
    small_receives: tuple[Message, ...]
    small_sends: tuple[Message, ...]

    @cached_property
    def bytes(self) -> int:
        """Of the messages of their own, both ways."""
        return sum(p.bytes for p in (*self.receives, *self.sends))

    @cached_property
    def same(self) -> list[int]:
        """For every send the number of the first that has the same cells: what is copied to many is packed once."""
        first = dict[Hashable, int]()
        cells = [tuple((part.move, part.segment.pairs) for part in parcel.parts) for parcel in self.sends]
        return [first.setdefault(key, number) for number, key in enumerate(cells)]


@dataclass(frozen=True)
class Schedule:
    """All turns, in order."""

    turns: tuple[Turn, ...]
    align: int  # where every dtype of the exchange may start


@lru_cache(maxsize=1024)
def schedule(programs: tuple[tuple[Program, torch.dtype], ...], me: int, inline: int) -> Schedule:
    """What an owner does for these programs; messages of up to `inline` bytes travel with the agreement."""
    keys = sorted({FIRST, *(key for program, _ in programs for key in program.stages)})
    return Schedule(
        tuple(_turn(key, programs, me, inline if key == FIRST else 0) for key in keys),
        max((dtype.itemsize for _, dtype in programs), default=1),
    )


def _turn(key: tuple[int, int], programs: tuple[tuple[Program, torch.dtype], ...], me: int, inline: int) -> Turn:
    receives, sends = _parcels(key, programs, "receives"), _parcels(key, programs, "sends")
    sends.sort(key=lambda p: (p.peer < me, p.peer))  # in an order in which nobody is sent to by all others at a time
    receives.sort(key=lambda p: (p.peer > me, -p.peer))
    small = [tuple(p for p in side if p.bytes <= inline) for side in (receives, sends)]
    large = [tuple(p for p in side if p.bytes > inline) for side in (receives, sends)]
    return Turn(key, *large, *small)


def _parcels(key: tuple[int, int], programs: tuple[tuple[Program, torch.dtype], ...], side: str) -> list[Message]:
    # by falling itemsize every part of a message starts at a multiple of its own
    order = sorted(range(len(programs)), key=lambda number: -programs[number][1].itemsize)
    found = dict[int, list[Share]]()
    for number in order:
        program, dtype = programs[number]
        for segment in getattr(program.stages.get(key), side, ()):
            parts = found.setdefault(segment.peer, [])
            start = parts[-1].stop if parts else 0
            parts.append(Share(number, segment, dtype, start, start + segment.cells * dtype.itemsize))
    return [Message(peer, parts[-1].stop, tuple(parts)) for peer, parts in found.items()]
