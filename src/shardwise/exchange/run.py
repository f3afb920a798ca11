"""Carries plans out over a wire: agree, pack, swap, reduce, unpack; many tensors in one exchange."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import torch

from shardwise.exchange.agreement import WORDS, Terms, Verdict, judge, refusal, weigh
from shardwise.exchange.program import Pair, Program, Segment, Stage, program
from shardwise.exchange.reduce import reduce
from shardwise.exchange.wire import Message, Wire
from shardwise.planning import Plan

Tensors = Sequence[torch.Tensor]

HEADER = 8 * WORDS
SLOTS = 2**16  # bytes of all slots of a rank: what small messages may take beside the headers
MOST_SLOTS = 256  # in larger groups nobody writes to everybody; headers are reduced instead
FIRST = (0, 0)  # the stage whose small messages travel in the slots


@dataclass(frozen=True)
class Move:
    """One tensor of an exchange: its plan, and this owner's tensors on both sides; `dtype` is that of the messages."""

    plan: Plan
    source: Tensors
    target: Tensors
    dtype: torch.dtype
    program: Program

    @staticmethod
    def of(plan: Plan, owner: int, source: Tensors, target: Tensors, dtype: torch.dtype) -> Move:
        """With the views that carry it out; those are kept by the strides of the tensors."""
        strides = (tuple(t.stride() for t in side) for side in (source, target))
        return Move(plan, source, target, dtype, program(plan, owner, *strides))

    def read(self, step: int) -> Tensors:
        """The tensors that a step sends from."""
        return self.source if step == 0 else self.target

    def reduces(self, step: int) -> bool:
        """True where a step brings terms."""
        return self.plan.reducing and step == 0


class Part(NamedTuple):
    """What a message has of one tensor."""

    move: Move
    segment: Segment

    @property
    def bytes(self) -> int:
        return self.segment.cells * self.move.dtype.itemsize


class Parcel(NamedTuple):
    """A message to or from a peer: parts of several tensors, one after the other."""

    peer: int
    parts: list[Part]

    @property
    def bytes(self) -> int:
        return sum(part.bytes for part in self.parts)

    def place(self, step: int, device: torch.device, *, sending: bool) -> torch.Tensor | None:
        """Its bytes in our own tensors, where they lie there as in the message."""
        (move, segment), *others = self.parts
        if others or segment.whole is None or (not sending and move.reduces(step)):
            return None
        tensor = segment.whole.of(move.read(step) if sending else move.target)
        return _bytes(tensor) if tensor.dtype == move.dtype and tensor.device == device else None

    def typed(self, room: torch.Tensor) -> Iterator[tuple[Move, Segment, torch.Tensor]]:
        """Every part with its cells in the message."""
        start = 0
        for part in self.parts:
            yield *part, room[start : start + part.bytes].view(part.move.dtype)
            start += part.bytes

    def pack(self, room: torch.Tensor, step: int) -> None:
        """Copy our cells into the message."""
        for move, segment, cells in self.typed(room):
            tensors = move.read(step)
            for here, there in segment.pairs:
                there.of([cells]).copy_(here.of(tensors))

    def unpack(self, room: torch.Tensor) -> None:
        """Copy the cells of the message to where they belong."""
        for move, segment, cells in self.typed(room):
            for here, there in segment.pairs:
                here.of(move.target).copy_(there.of([cells]))


class Exchange:
    """One exchange of this rank with all others of the wire. `start` agrees and sends what is small, `finish` the rest.

    Everybody starts exchanges in the same order, and finishes them in that order.
    """

    def __init__(self, wire: Wire, terms: Terms, moves: Sequence[Move] = ()) -> None:
        self.wire, self.terms = wire, terms
        # by falling itemsize every part of a message starts at a multiple of its own
        self.moves = sorted(moves, key=lambda move: -move.dtype.itemsize)
        self.stages = sorted({key for move in moves for key in move.program.stages})
        self.room = inline_bytes(len(wire.owners))
        self._small = dict[int, Parcel]()  # what arrives in the slots
        self._waiting: Callable[[], torch.Tensor] | None = None

    def start(self) -> Exchange:
        """Send the header to everybody, and with it the messages that fit."""
        header = self.terms.header()
        if len(self.wire.owners) > MOST_SLOTS:
            self._waiting = self.wire.reduced(torch.from_numpy(weigh(header[None])[0]), "max")
            return self
        rows = torch.zeros(len(self.wire.owners), HEADER + self.room, dtype=torch.uint8)
        rows[:, :HEADER] = torch.from_numpy(header.view(np.uint8))
        index = {owner: row for row, owner in enumerate(self.wire.owners)}
        for parcel in self._parcels(FIRST, "sends"):
            if parcel.bytes <= self.room:
                parcel.pack(rows[index[parcel.peer], HEADER:], 0)
        self._waiting = self.wire.slots(rows)
        return self

    def finish(self) -> list[Any] | None:
        """Carry it out. None once all is in its place; where ranks guessed wrong, what those who know told."""
        slots = self._agreed()
        if slots is None:
            return self._told()
        try:
            for move in self.moves:
                if move.program.fill is not None:
                    for tensor in move.target:
                        tensor.fill_(move.program.fill)
            for key in self.stages:
                self._run(key, slots)
        except BaseException as error:
            self.wire.fail(f"{type(error).__name__}: {error}")
            raise
        return None

    # --- agreement ---------------------------------------------------------------------------------------------------

    def _agreed(self) -> torch.Tensor | None:
        """The slots of the others, once all agree; None where ranks have to learn."""
        assert self._waiting is not None, "start first"
        found = self._waiting()
        if len(self.wire.owners) > MOST_SLOTS:
            weights = found.cpu().numpy()
        else:
            weights = weigh(found[:, :HEADER].cpu().numpy().view(np.int64)).max(axis=0)
        verdict = judge(weights)
        if verdict is Verdict.REFUSE:
            raise refusal(self.wire.tell(self.terms.told()), self.wire.owners) from self.terms.error
        return found if verdict is Verdict.GO else None

    def _told(self) -> list[Any]:
        sure = not self.terms.guessed
        return self.wire.tell(dict(self.terms.fields) if sure else None)

    # --- stages ------------------------------------------------------------------------------------------------------

    def _run(self, key: tuple[int, int], slots: torch.Tensor) -> None:
        step, device = key[0], self._device()
        receives, sends = self._parcels(key, "receives"), self._parcels(key, "sends")
        small = [p for p in receives if self._inline(key, p)]
        receives = [p for p in receives if not self._inline(key, p)]
        sends = [p for p in sends if not self._inline(key, p)]
        into = [p.place(step, device, sending=False) for p in receives]
        outof = [p.place(step, device, sending=True) for p in sends]
        missing = [p.bytes for p, place in zip([*receives, *sends], [*into, *outof], strict=True) if place is None]
        align = max((move.dtype.itemsize for move in self.moves), default=1)
        staged = iter(self.wire.staging.take(missing, device, align=align))
        rooms = [next(staged) if place is None else place for place in into]
        swap = self.wire.swap(
            [(p.peer, room) for p, room in zip(receives, rooms, strict=True)],
            self._packed(list(zip(sends, outof, strict=True)), staged, step),
        )
        for move in self.moves:  # while the wire is busy
            _copy(move.program.stages.get(key), move, step)
        index = {owner: row for row, owner in enumerate(self.wire.owners)}
        messages = dict[tuple[int, int], torch.Tensor]()
        for parcel in small:
            self._take(parcel, slots[index[parcel.peer], HEADER:], messages, step)
        for at in swap.arrivals():
            if into[at] is None:
                self._take(receives[at], rooms[at], messages, step)
        for number, move in enumerate(self.moves):
            if move.reduces(step):
                _reduce(move.program.stages.get(key), move, {p: m for (n, p), m in messages.items() if n == number})

    def _take(
        self, parcel: Parcel, room: torch.Tensor, messages: dict[tuple[int, int], torch.Tensor], step: int
    ) -> None:
        """Unpack a message; terms stay in it until all have come."""
        parcel.unpack(room)
        for move, _, cells in parcel.typed(room):
            if move.reduces(step):
                messages[self.moves.index(move), parcel.peer] = cells

    def _packed(
        self, sends: list[tuple[Parcel, torch.Tensor | None]], staged: Iterator[torch.Tensor], step: int
    ) -> Iterator[Message]:
        for parcel, room in sends:
            if room is None:
                room = next(staged)
                parcel.pack(room, step)
            yield parcel.peer, room

    def _inline(self, key: tuple[int, int], parcel: Parcel) -> bool:
        return key == FIRST and parcel.bytes <= self.room

    def _parcels(self, key: tuple[int, int], side: str) -> list[Parcel]:
        """The messages of a stage, in an order in which nobody is sent to by all others at a time."""
        found = dict[int, Parcel]()
        for move in self.moves:
            stage = move.program.stages.get(key)
            for segment in getattr(stage, side, ()):
                found.setdefault(segment.peer, Parcel(segment.peer, [])).parts.append(Part(move, segment))
        me = self.wire.me
        if side == "sends":
            return sorted(found.values(), key=lambda p: (p.peer < me, p.peer))
        return sorted(found.values(), key=lambda p: (p.peer > me, -p.peer))

    def _device(self) -> torch.device:
        """Where messages lie: where the tensors are, if all are on one device that the wire serves."""
        devices = {tensor.device for move in self.moves for tensor in (*move.source, *move.target)}
        return self.wire.serves(devices.pop() if len(devices) == 1 else torch.device("cpu"))


def inline_bytes(owners: int) -> int:
    """What a message may have to travel beside the header. It depends on the group alone, so that everybody agrees.

    >>> inline_bytes(4), inline_bytes(64), inline_bytes(10_000)
    (16256, 896, 0)
    """
    return max(0, SLOTS // owners - HEADER) // 64 * 64 if owners <= MOST_SLOTS else 0


def _copy(stage: Stage | None, move: Move, step: int) -> None:
    """What stays with its owner."""
    pairs: Sequence[Pair] = () if stage is None else stage.local
    source = move.read(step)
    for here, there in pairs:
        there.of(move.target).copy_(here.of(source))


def _reduce(stage: Stage | None, move: Move, messages: dict[int, torch.Tensor]) -> None:
    for target, terms in () if stage is None else stage.reductions:
        cells = [t.cut.of(move.source if t.peer is None else [messages[t.peer]]) for t in terms]
        reduce(target.of(move.target), cells, move.plan.source.op or "sum")


def _bytes(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.reshape(-1).view(torch.uint8)
