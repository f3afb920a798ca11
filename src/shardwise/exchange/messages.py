"""One rank's part of plans as messages: what goes to and comes from every peer, in rounds, as views of tensors."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass, replace
from enum import IntEnum
from functools import cached_property, lru_cache
from itertools import pairwise
from typing import NamedTuple

import numpy as np
import torch

from shardwise.exchange.reduce import Rule, sum_dtype
from shardwise.geometry import Boxes, Ints, Places, Strides, Window, heads, ints, row_major, running
from shardwise.layout import local_shapes, places_of
from shardwise.planning import Copies, Plan

Tensors = list[torch.Tensor]
FIRST = (0, 0)  # the step and round whose small messages travel with the agreement


class Pair(NamedTuple):
    """The same cells in our tensors, and in a message (or in other tensors of ours, to where they are copied)."""

    here: Window
    there: Window


def view_of(window: Window, tensors: Sequence[torch.Tensor]) -> torch.Tensor:
    """The elements of a window, as a view of one of these tensors."""
    tensor, shape, strides, offset = window
    whole = tensors[tensor]
    return whole.as_strided(shape, strides, int(whole.storage_offset()) + offset)


class PeerCells(NamedTuple):
    """What a message to or from `peer` has of one tensor: its cells one after the other, and where they lie here.

    `whole` is set where they lie here one after the other too, so that no packing is needed. `runs`: in how many
    stretches of consecutive elements they lie here.
    """

    peer: int
    volume: int
    pairs: tuple[Pair, ...]
    whole: Window | None
    runs: int


class Term(NamedTuple):
    """A contribution to cells: in the message from `peer`, or in our own tensors where that is None."""

    peer: int | None
    window: Window


class Reduction(NamedTuple):
    """Terms, in their order, whose reduction is the value of the cells at `target`."""

    target: Window
    terms: tuple[Term, ...]


class Memory(IntEnum):
    """Where cells are read or written: this rank's tensors of the source, of the target, or of the sums in between."""

    SOURCE = 0
    TARGET = 1
    SUMS = 2


@dataclass(frozen=True)
class Stage:
    """One round of one step. Later steps read what earlier ones wrote."""

    sends: tuple[PeerCells, ...]
    receives: tuple[PeerCells, ...]
    local: tuple[Pair, ...]
    reductions: tuple[Reduction, ...]
    rule: Rule | None = None  # by which terms are reduced
    reads: Memory = Memory.SOURCE
    writes: Memory = Memory.TARGET

    def dtype(self, dtype: torch.dtype) -> torch.dtype:
        """What travels in place of elements of this dtype: sums of some of the terms are wider."""
        return sum_dtype(dtype) if self.rule is not None and self.rule.sizes is not None else dtype


@dataclass(frozen=True, eq=False)
class Program:
    """The stages by (step, round), and what the target's tensors start with."""

    stages: dict[tuple[int, int], Stage]
    fill: int | None

    def sums(self, dtype: torch.dtype) -> set[torch.dtype]:
        """What travels in place of elements of this dtype."""
        return {stage.dtype(dtype) for stage in self.stages.values()}


@lru_cache(maxsize=4096)
def program(plan: Plan, owner: int, source: tuple[Strides, ...], target: tuple[Strides, ...]) -> Program:
    """What `owner` does, with tensors of these strides. Kept by value: the same moves come back step after step."""
    if owner not in plan.source and owner not in plan.target:
        return Program({}, None)
    *first, last = plan.legs
    between = tuple(map(row_major, sums_of(plan, owner)))
    stages = dict[tuple[int, int], Stage]()
    for leg in first:
        stages |= _stages(leg, owner, source, between, (Memory.SOURCE, Memory.SUMS), 0)
    reads = (between, Memory.SUMS) if first else (source, Memory.SOURCE)
    stages |= _stages(last, owner, reads[0], target, (reads[1], Memory.TARGET), len(first))
    return Program(stages, plan.for_owner(owner).fill)


def sums_of(plan: Plan, owner: int) -> tuple[tuple[int, ...], ...]:
    """The shapes of what an owner has between two legs."""
    return tuple(shape for leg in plan.legs[:-1] for shape in local_shapes(leg.target, owner))


def _stages(
    leg: Plan,
    owner: int,
    source: tuple[Strides, ...],
    target: tuple[Strides, ...],
    memory: tuple[Memory, Memory],
    after: int,
) -> dict[tuple[int, int], Stage]:
    """The stages of a leg that begins after so many steps. Its later steps read what its first one wrote."""
    here, there = places_of(leg.source, owner, source), places_of(leg.target, owner, target)
    stages, rule = dict[tuple[int, int], Stage](), _rule(leg)
    for step, round_, copies in leg.part(owner).copies.stages():
        read, reads = (here, memory[0]) if step == 0 else (there, memory[1])
        stage = _stage(copies, owner, read, there, reducing=leg.reducing and step == 0)
        stages[step + after, round_] = replace(stage, rule=rule if step == 0 else None, reads=reads, writes=memory[1])
    return stages


def _rule(leg: Plan) -> Rule | None:
    """How a leg reduces terms."""
    if not leg.reducing:
        return None
    sizes = leg.sums.sizes if leg.sums is not None and leg.takes_sums else None
    return Rule(leg.source.op or "sum", sizes, partial=leg.makes_sums)


def _stage(copies: Copies, owner: int, source: Places, target: Places, *, reducing: bool) -> Stage:
    remote = copies.source != copies.target
    received = np.flatnonzero(remote & (copies.target == owner))
    sends = _peer_cells(copies.boxes, copies.target, np.flatnonzero(remote & (copies.source == owner)), source)
    receives = _peer_cells(copies.boxes, copies.source, received, None if reducing else target)
    if reducing:
        return Stage(sends, receives, (), _reductions(copies.take(received), copies.take(~remote), source, target))
    return Stage(sends, receives, _local(copies.boxes.take(~remote), source, target), ())


def _peer_cells(boxes: Boxes, peer: Ints, rows: Ints, places: Places | None) -> tuple[PeerCells, ...]:
    """Some boxes, for each peer: in a message of its own, and where they lie here (terms do not yet)."""
    rows = rows[np.argsort(peer[rows], kind="stable")]
    peer, boxes = peer[rows], boxes.take(rows)
    volumes, starts = boxes.volumes(), np.flatnonzero(heads(peer))
    totals = np.add.reduceat(volumes, starts).tolist() if len(starts) else []
    peers = peer[starts].tolist()
    if places is None:
        return tuple(PeerCells(one, total, (), None, 0) for one, total in zip(peers, totals, strict=True))
    number, parts = places.within(boxes)
    packed = Places.packed(boxes)
    message = replace(packed, offset=running(volumes, peer)).inside(number, parts.boxes)
    pairs = list(map(Pair, parts.windows(), message.windows()))
    edges = [*np.searchsorted(number, starts).tolist(), len(pairs)]
    runs = np.add.reduceat(parts.runs(), edges[:-1]).tolist() if len(starts) else []
    cells = list[PeerCells]()
    for one, total, several, (first, last) in zip(peers, totals, runs, pairwise(edges), strict=True):
        whole = pairs[first].here if several == 1 else None
        cells.append(PeerCells(one, total, tuple(pairs[first:last]), whole, several))
    return tuple(cells)


@lru_cache(maxsize=4096)
def across(
    plan: Plan, key: tuple[int, int], ends: tuple[int, int], theirs: tuple[Strides, ...], ours: tuple[Strides, ...]
) -> tuple[Pair, ...]:
    """What the first of two owners sends the other in a stage: its cells there, in tensors of these strides, and here.

    Where nothing is said of ours, that is the message.
    """
    peer, owner = ends
    copies = plan.for_owner(owner).copies
    step, round_ = key
    rows = (copies.step == step) & (copies.round == round_) & (copies.source == peer) & (copies.target == owner)
    there = places_of(plan.source if step == 0 else plan.target, peer, theirs)
    if not ours:
        cells = _peer_cells(copies.boxes, copies.source, np.flatnonzero(rows), there)
        return tuple(pair for one in cells for pair in one.pairs)
    return _local(copies.boxes.take(rows), there, places_of(plan.target, owner, ours))


def _local(boxes: Boxes, source: Places, target: Places) -> tuple[Pair, ...]:
    read, written = source.within(boxes)[1].common(target)
    return tuple(map(Pair, read.windows(), written.windows()))


def _reductions(received: Copies, local: Copies, source: Places, target: Places) -> tuple[Reduction, ...]:
    """For every box its terms in order, those that come and the one that is here; cut where it spans several pieces."""
    if not len(received) + len(local):
        return ()
    box = _numbers(Boxes.concat([received.boxes, local.boxes]))
    received_box, local_box = box[: len(received)], box[len(received) :]
    least = int(min(received.term.min(initial=2**62), local.term.min(initial=2**62)))
    terms = int(max(received.term.max(initial=0), local.term.max(initial=0))) + 1 - least
    arrived, ours = np.full((int(box.max()) + 1, terms), -1), np.full(int(box.max()) + 1, -1)
    arrived[received_box, received.term - least], ours[local_box] = np.arange(len(received)), local.term - least
    messages = _in_messages(received)
    apart = np.unique(received_box, return_index=True)[1]
    apart = apart[ours[received_box[apart]] < 0]  # a copy of every box with no term of our own
    part_of, own = source.within(local.boxes)
    read = Places.concat([own, messages.take(ints(apart))])
    read_box = np.concatenate([local_box[part_of], received_box[apart]])
    number, written = target.within(read.boxes)
    found = list[list[Term]]([] for _ in written.boxes.lo)
    for term in range(terms):
        row = arrived[read_box[number], term]
        came, here = np.flatnonzero(row >= 0), np.flatnonzero((row < 0) & (ours[read_box[number]] == term))
        there = messages.inside(row[came], written.boxes.take(came)).windows()
        for at, peer, window in zip(came.tolist(), received.source[row[came]].tolist(), there, strict=True):
            found[at].append(Term(peer, window))
        mine = read.inside(number[here], written.boxes.take(here)).windows()
        for at, window in zip(here.tolist(), mine, strict=True):
            found[at].append(Term(None, window))
    return tuple(Reduction(window, tuple(several)) for window, several in zip(written.windows(), found, strict=True))


def _numbers(boxes: Boxes) -> Ints:
    """A number for every box that differs."""
    return np.unique(np.concatenate(boxes, axis=1), axis=0, return_inverse=True)[1].reshape(-1)


def _in_messages(received: Copies) -> Places:
    """Where each copy lies in the message of its sender."""
    order = np.argsort(received.source, kind="stable")
    packed = Places.packed(received.boxes.take(order))
    back = np.argsort(order)
    offset = running(received.volumes[order], received.source[order])
    return replace(packed, offset=offset).take(back)


class MessagePart(NamedTuple):
    """What a message has of tensor number `move`: bytes `start` to `stop`."""

    move: int
    cells: PeerCells
    dtype: torch.dtype
    start: int
    stop: int

    def elements(self, buffer: torch.Tensor) -> torch.Tensor:
        """Its cells in the bytes of the message."""
        return buffer[self.start : self.stop].view(self.dtype)


@dataclass(frozen=True, eq=False)
class Message:
    """A message to or from a peer: parts of several tensors, one after the other."""

    peer: int
    bytes: int
    parts: tuple[MessagePart, ...]

    def views(self, buffer: torch.Tensor, tensors: Sequence[Tensors]) -> tuple[Tensors, Tensors]:
        """Its cells in our tensors, and in the message. (Terms have no place among our own.)"""
        ours, theirs = list[torch.Tensor](), list[torch.Tensor]()
        for part in self.parts:
            cells = [part.elements(buffer)]
            for here, there in part.cells.pairs:
                ours.append(view_of(here, tensors[part.move]))
                theirs.append(view_of(there, cells))
        return ours, theirs

    @cached_property
    def picks(self) -> tuple[int, Ints]:
        """Where it is of one of our tensors: which of those of its part, and the numbers of its elements in memory."""
        pairs = self.parts[0].cells.pairs
        if len(self.parts) > 1 or len({pair.here.tensor for pair in pairs}) != 1:
            return 0, ints([])
        elements = np.empty(self.parts[0].cells.volume, dtype=np.int64)
        for here, there in pairs:
            elements[there.elements()] = here.elements()
        return pairs[0].here.tensor, elements

    @cached_property
    def run(self) -> float:
        """How many bytes of it lie one after the other among our own tensors, on average."""
        runs = sum(part.cells.runs for part in self.parts)
        return self.bytes / runs if runs else 0.0

    @cached_property
    def pieces(self) -> int:
        """How many copies it takes to pack."""
        return sum(len(part.cells.pairs) for part in self.parts)

    def device_of(self, tensors: Sequence[Tensors]) -> torch.device | None:
        """Where our own tensors are that it is of; None if it is of none."""
        return next((tensor.device for part in self.parts for tensor in tensors[part.move]), None)

    def in_place(self, tensors: Sequence[Tensors], device: torch.device) -> torch.Tensor | None:
        """Its bytes among our own tensors, where they lie there as in the message."""
        part, *others = self.parts
        whole = part.cells.whole
        if others or whole is None:
            return None
        cells = view_of(whole, tensors[part.move])
        if cells.dtype != part.dtype or cells.device != device:
            return None
        return cells.as_strided((cells.numel(),), (1,)).view(torch.uint8)  # dims of size 1 may have had any stride


@dataclass(frozen=True)
class Round:
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
        return _firsts(self.sends)

    @cached_property
    def small_same(self) -> list[int]:
        """As `same`, of small sends."""
        return _firsts(self.small_sends)


def _firsts(messages: Sequence[Message]) -> list[int]:
    first = dict[Hashable, int]()
    cells = [tuple((part.move, part.cells.pairs) for part in message.parts) for message in messages]
    return [first.setdefault(key, number) for number, key in enumerate(cells)]


@dataclass(frozen=True)
class Schedule:
    """All rounds, in order."""

    rounds: tuple[Round, ...]
    align: int  # where every dtype of the exchange may start


@lru_cache(maxsize=1024)
def schedule(programs: tuple[tuple[Program, torch.dtype], ...], me: int, inline: int) -> Schedule:
    """What an owner does for these programs; messages of up to `inline` bytes travel with the agreement."""
    keys = sorted({FIRST, *(key for program, _ in programs for key in program.stages)})
    return Schedule(
        tuple(_round(key, programs, me, inline if key == FIRST else 0) for key in keys),
        max((travels.itemsize for one, dtype in programs for travels in (dtype, *one.sums(dtype))), default=1),
    )


def _round(key: tuple[int, int], programs: tuple[tuple[Program, torch.dtype], ...], me: int, inline: int) -> Round:
    receives, sends = _messages(key, programs, "receives"), _messages(key, programs, "sends")
    sends.sort(key=lambda p: (p.peer < me, p.peer))  # in an order in which nobody is sent to by all others at a time
    receives.sort(key=lambda p: (p.peer > me, -p.peer))
    small = [tuple(p for p in side if p.bytes <= inline) for side in (receives, sends)]
    large = [tuple(p for p in side if p.bytes > inline) for side in (receives, sends)]
    return Round(key, *large, *small)


def _messages(key: tuple[int, int], programs: tuple[tuple[Program, torch.dtype], ...], side: str) -> list[Message]:
    stages = [
        (number, stage, stage.dtype(dtype))
        for number, (program, dtype) in enumerate(programs)
        if (stage := program.stages.get(key)) is not None
    ]
    stages.sort(key=lambda entry: -entry[2].itemsize)  # every part of a message starts at a multiple of its own
    by_peer = dict[int, list[MessagePart]]()
    for number, stage, dtype in stages:
        for cells in getattr(stage, side):
            parts = by_peer.setdefault(cells.peer, [])
            start = parts[-1].stop if parts else 0
            parts.append(MessagePart(number, cells, dtype, start, start + cells.volume * dtype.itemsize))
    return [Message(peer, parts[-1].stop, tuple(parts)) for peer, parts in by_peer.items()]
