"""Carries plans out over a transport: agree, pack, swap, reduce, unpack; many tensors in one exchange."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from functools import cached_property, partial
from typing import Any
from zlib import crc32

import numpy as np
import numpy.typing as npt
import torch

from shardwise.errors import ShardwiseError
from shardwise.exchange.agreement import WORDS, Proposal, Verdict, judge, refusal, weigh
from shardwise.exchange.buffers import ElementGather, ViewCache
from shardwise.exchange.delta_round import SMALLEST, DeltaReceive, DeltaRound, DeltaSend, DeltaTraffic
from shardwise.exchange.messages import Memory, Message, Pair, Round, Tensors, schedule, view_of
from shardwise.exchange.moves import Delta, Move, crosses_link, keeps
from shardwise.exchange.peer_reads import read_from_peer
from shardwise.exchange.reduce import reduce
from shardwise.exchange.transport import PostedRound, Receive, Send, Transport
from shardwise.geometry import Ints

HEADER, NOTE = 8 * WORDS, 64  # bytes of a slot: a header, numbers that a rank tells all others, and a message
START = HEADER + NOTE
INLINE, SLOTS = 2**14, 2**17  # the largest message in a slot, and the bytes of all slots of a rank
CPU = torch.device("cpu")
MOST_AGREED = 2**14  # proposals that a transport remembers


class Exchange:
    """One exchange of this rank with all others: `start` agrees and sends what is small, `finish` does the rest.

    Every rank starts exchanges in the same order, and finishes them in that order. Messages lie on `device`, the same
    kind on every rank, or where the transport can reach them. `fresh`: nobody sees the target's tensors before the
    exchange is done. `views`: those of the last time, where it is repeated with the same moves. `part_of`: the exchange
    that runs now, of which this is a part. `direct`: other ways than messages of the group may be used. `delta`, the
    same on every rank: the targets hold what an exchange with these plans brought, so that only what changed need be
    sent; "always" also between ranks that share memory. `traffic` tells how many bytes that took. `note`: up to 8
    numbers that travel with the header, as many on every rank; `noted` adds them up.
    """

    def __init__(
        self,
        transport: Transport,
        proposal: Proposal,
        moves: Sequence[Move] = (),
        *,
        device: torch.device | None = None,
        fresh: bool = True,
        views: ViewCache | None = None,
        part_of: Exchange | None = None,
        direct: bool = True,
        delta: Delta = False,
        note: Sequence[int] = (),
    ) -> None:
        self.transport, self.proposal, self.moves, self.fresh = transport, proposal, moves, fresh
        self.delta, self.traffic = delta, DeltaTraffic()
        self._note, self._notes = np.array(note, np.int64), list[memoryview]()
        assert self._note.nbytes <= NOTE, "or it would run into a message"
        self.views, self.direct = views or ViewCache(), direct
        if views is not None:
            transport.views.add(views)
        self._device = device or CPU  # of the tensors
        self.sources: list[Tensors] = [move.source for move in moves]
        self.targets: list[Tensors] = [move.target for move in moves]
        # room beside every header, whatever a rank knows of the messages
        self.slot = min(inline_bytes(len(transport.owners)), transport.most_in_slot)
        # a message of a device that the transport reaches goes from there: the host need not wait for it
        small = transport.most_unasked if self._many else self.slot
        self.inline = small if self.device.type == "cpu" else 0
        self.schedule = schedule(tuple((m.program, m.dtype) for m in moves), transport.me, self.inline)
        self.header = proposal.header()
        # numbers count what the program starts, in the same order everywhere; parts of it start in their own time
        self.nested = part_of is not None
        self.number: int = next(transport.numbers) if part_of is None else part_of.number
        # a message can only meet one of the same exchange of the same ranks and proposal (but for one in 2**31)
        names = f"{transport.name} {self.number} {self.nested}".encode()
        self.tag = crc32(self.header[1:].tobytes(), crc32(names)) >> 1
        self.writing = False  # into the target's tensors: from when all have agreed
        self._agreement: Callable[[], Any] | None = None
        self._ahead: PostedRound | None = None

    def start(self, *, alone: bool = False) -> Exchange:
        """Send the header to everybody, and with it the messages that fit.

        `alone` says that no other exchange of this transport is under way. Then, where all have agreed on this proposal
        before, the messages of the first round leave at once too, unless they are so large that it saves nothing.
        """
        first = self.schedule.rounds[0]
        known = alone and not self.delta and self.header.tobytes() in self.transport.agreed
        early = known and first.bytes <= self.transport.early_limit(self.device, direct=self.direct)
        together = self.transport.together() if early else nullcontext()
        with self._unbroken(), together:  # also an interrupt: some may have heard from us, and others not
            self._tell()
            if early:
                self._ahead = self._post(first, hidden=not self.fresh)
        return self

    def _tell(self) -> None:
        """Send the header to everybody, and with it the messages that fit."""
        # other exchanges may have started since: a part of one must not come between their collective calls
        in_order = not self.nested
        if self._many:
            self._send_small()
            weights = torch.from_numpy(weigh(self.header[None])[0])
            self._agreement = self.transport.all_reduce(weights, "max", self.number, in_order=in_order)
        else:
            self._agreement = self.transport.all_to_all(*self._slots(), self.number, in_order=in_order)

    def finish(self) -> list[Any] | None:
        """Carry it out. None once all is in its place; where some ranks lack knowledge, what all of them know."""
        first = self.schedule.rounds[0]
        waiting = self._ahead is None and first.bytes > 0  # for the others to agree, before it is posted
        early = self.fresh and not waiting and self.proposal.error is None
        if early:
            with self._unbroken():
                self._copy_local(first)
        with self._unbroken(but=ShardwiseError):
            slots = self._agreed()
        if slots is None:
            return self.transport.all_gather(None if self.proposal.unknown else dict(self.proposal.fields))
        with self._unbroken():
            self.writing = True
            for move in self.moves:
                if move.program.fill is not None:
                    for tensor in move.target:
                        tensor.fill_(move.program.fill)
            for round_ in self.schedule.rounds:
                self._run(round_, slots, copied=early and round_ is first)
        return None

    def noted(self) -> Ints:
        """What the notes of all ranks come to, number by number, modulo 2**64. Every rank asks after `finish`."""
        if self._many:
            own = torch.from_numpy(self._note)
            return self.transport.all_reduce(own, "sum", self.number, in_order=False)().cpu().numpy()
        total: Ints = np.frombuffer(b"".join(self._notes), np.int64).reshape(len(self._notes), -1).sum(axis=0)
        return total[: len(self._note)]

    @contextmanager
    def _unbroken(self, *, but: type[BaseException] | tuple[()] = ()) -> Iterator[None]:
        """What goes wrong here leaves others waiting: the transport is of no more use."""
        try:
            yield
        except but:
            raise
        except BaseException as error:
            self.transport.fail(f"{type(error).__name__}: {error}")
            raise

    @cached_property
    def device(self) -> torch.device:
        """Where messages lie."""
        return self.transport.message_device(self._device)

    @property
    def _unasked(self) -> int:
        """The tag of small messages that leave before all have agreed: not 0 above the bits of other tags."""
        return (self.number + 1) << 31 | self.tag

    @property
    def _many(self) -> bool:
        """True where nobody writes to everybody: headers are reduced."""
        return len(self.transport.owners) > self.transport.most_slots

    # --- agreement ---------------------------------------------------------------------------------------------------

    def _slots(self) -> tuple[npt.NDArray[np.uint8], list[int]]:
        """A row for every rank: our header, and what is small; and how many bytes of each row matter."""
        rows = np.empty((len(self.transport.owners), START + self.slot), np.uint8)
        sizes = [START] * len(rows)
        for message, cells in self._packed_small():
            at = self.transport.rows[message.peer]
            sizes[at] += message.bytes
            rows[at, START : sizes[at]] = cells
        rows[:, :HEADER] = self.header.view(np.uint8)
        rows[:, HEADER:START] = 0
        rows[:, HEADER : HEADER + self._note.nbytes] = self._note.view(np.uint8)
        return rows, sizes

    def _send_small(self) -> None:
        """What is small, to those who get it: it is met where all agree."""
        sends = [(message.peer, torch.from_numpy(cells)) for message, cells in self._packed_small()]
        self.transport.post_small([], sends, self._unasked)

    def _packed_small(self) -> Iterator[tuple[Message, npt.NDArray[np.uint8]]]:
        """Small messages; equal ones are packed once."""
        round_, picked = self.schedule.rounds[0], ElementGather(self.sources)
        packed = dict[int, npt.NDArray[np.uint8]]()
        try:
            for message, same in zip(round_.small_sends, round_.small_same, strict=True):
                if same not in packed:
                    room = self.views.room(message)
                    if not picked.take(message, room.numpy()):
                        self.views.pack(message, room, self.sources)
                    packed[same] = room.numpy()
                yield message, packed[same]
        except Exception as error:  # not too late to tell the others
            self.proposal = replace(self.proposal, error=error)
            self.header = self.proposal.header()

    def _agreed(self) -> Any:
        """The slots of the others, once all agree; None where ranks have to learn."""
        assert self._agreement is not None, "start first"
        slots = self._agreement()
        verdict = self._verdict(slots)
        if len(self._note) and not self._many:
            self._notes = [row[HEADER:START] for row in slots]
        if verdict is Verdict.GO:
            if not self.nested:
                self._remember()
            return slots
        if self._ahead is not None:  # what was posted will not be met, but may not be reused either
            self.transport.abandon(self._ahead)
        self.transport.discard_unasked(self._unasked >> 31)
        if verdict is Verdict.REFUSE:
            raise refusal(
                self.transport.all_gather(self.proposal.explanation()), self.transport.owners
            ) from self.proposal.error
        return None

    def _remember(self) -> None:
        """All agree on this proposal. (Not where some had to learn first: they will have to the next time, too.)"""
        if len(self.transport.agreed) > MOST_AGREED:
            self.transport.agreed.clear()
        self.transport.agreed.add(self.header.tobytes())

    def _verdict(self, slots: Any) -> Verdict:
        if self._many:
            return judge(slots.cpu().numpy())
        mine = self.header.tobytes()
        if not self.header[0] and all(row[:HEADER] == mine for row in slots):
            return Verdict.GO  # nobody failed or lacks anything, and all say the same
        headers = np.frombuffer(b"".join(row[:HEADER] for row in slots), np.int64)
        return judge(weigh(headers.reshape(len(slots), -1)).max(axis=0))

    # --- rounds ------------------------------------------------------------------------------------------------------

    def _run(self, round_: Round, slots: Any, *, copied: bool) -> None:
        posted, self._ahead = self._ahead or self._post(round_, hidden=False), None
        if not copied:  # while the transport is busy
            self._copy_local(round_)
        messages, picked = list[tuple[Message, torch.Tensor]](), ElementGather(self.targets)
        for message, cells in self._small_arrivals(round_, slots):
            if not picked.put(message, cells):
                room = self.views.room(message)
                room.numpy()[:] = np.frombuffer(cells, np.uint8)
                messages.append((message, self._near(message, room)))
                self.views.unpack(message, room, self.targets)
        for at, arrived in posted.arrivals() if posted else ():
            if isinstance(arrived, torch.Tensor):
                messages.append((round_.receives[at], self._near(round_.receives[at], arrived)))
                self.views.unpack(round_.receives[at], arrived, self.targets)
            elif arrived is not None:
                message = round_.receives[at]
                read_from_peer(round_.key, message, arrived, self.moves, self.transport.me, self.views)
        self._reduce(round_, messages)
        if posted:
            posted.finish()
        if isinstance(posted, DeltaRound):
            self.traffic += posted.traffic

    def _near(self, message: Message, room: torch.Tensor) -> torch.Tensor:
        """A message of terms on the device of the targets, by one copy: they are reduced there, block by block."""
        device = None if message.pieces else message.device_of(self.targets)
        return room if device is None else room.to(device)

    def _small_arrivals(self, round_: Round, slots: Any) -> Iterator[tuple[Message, memoryview]]:
        """Small messages, from the slots or from packets of their own."""
        small = round_.small_receives
        if not self._many:
            for message in small:
                yield message, slots[self.transport.rows[message.peer]][START : START + message.bytes]
        elif small:
            rooms = [(message.peer, self.views.room(message)) for message in small]
            for at in self.transport.post_small(rooms, [], self._unasked).arrivals():
                data: Any = rooms[at][1].numpy()
                yield small[at], memoryview(data)

    def _copy_local(self, round_: Round) -> None:
        """What stays with its owner."""

        def pairs() -> Iterator[tuple[Pair, Tensors, Tensors]]:
            for move, source in zip(self.moves, self._read(round_), strict=True):
                stage = move.program.stages.get(round_.key)
                yield from ((pair, source, move.target) for pair in (stage.local if stage else ()))

        self.views.copy(round_.key, pairs())

    def _post(self, round_: Round, *, hidden: bool) -> PostedRound | None:
        """Post the messages of a round. `hidden`: receive nothing into the target's tensors yet."""
        if not round_.bytes:
            return None
        source, device = self._read(round_), self.device
        receives = [
            Receive(p.peer, p.bytes, None if hidden else p.in_place(self.targets, device)) for p in round_.receives
        ]
        sends = [
            Send(
                message.peer,
                message.bytes,
                message.in_place(source, device),
                partial(self.views.pack, message, tensors=source),
                self._readable(round_, message, source),
                message.run,
                round_.same[number],
            )
            for number, message in enumerate(round_.sends)
        ]
        post = partial(
            self.transport.post_round, tag=self.tag, device=device, align=self.schedule.align, direct=self.direct
        )
        if not any(self._may_be_delta(round_, message) for message in (*round_.receives, *round_.sends)):
            return post(receives, sends)
        deltas = self._delta_receives(round_), self._delta_sends(round_)
        return DeltaRound(self.transport, post, (receives, deltas[0]), (sends, deltas[1]), self.tag, device)

    def _may_be_delta(self, round_: Round, message: Message) -> bool:
        """Both ends come to the same: not what is relayed, what is small, and what needs no link."""
        if not self.delta or round_.key[0] or message.bytes < SMALLEST:
            return False
        plans = [self.moves[part.move].plan for part in message.parts]
        return crosses_link(self.transport, message.peer, self.delta, direct=self.direct) and all(map(keeps, plans))

    def _delta_receives(self, round_: Round) -> list[DeltaReceive]:
        return [
            DeltaReceive(number, message, self.targets)
            for number, message in enumerate(round_.receives)
            if self._may_be_delta(round_, message)
        ]

    def _delta_sends(self, round_: Round) -> list[DeltaSend]:
        """With their masks, which may have other strides than the sources."""
        me, masks = self.transport.me, [move.changed for move in self.moves]
        programs = tuple((move.program_of_masks(me), move.dtype) for move in self.moves)
        masked = schedule(programs, me, self.inline).rounds[self.schedule.rounds.index(round_)]
        return [
            DeltaSend(number, message, self.sources, mask_message, masks)
            for number, (message, mask_message) in enumerate(zip(round_.sends, masked.sends, strict=True))
            if self._may_be_delta(round_, message)
        ]

    def _readable(self, round_: Round, message: Message, source: Sequence[Tensors]) -> Tensors:
        """The tensors that a peer could read a message from.

        Not where it is terms, is cast on the way, or lies on a device that the transport cannot reach.
        """
        tensors = list[torch.Tensor]()
        for part in message.parts:
            stage = self.moves[part.move].program.stages[round_.key]
            if stage.rule is not None or stage.reads is Memory.SUMS:
                return []
            tensors += source[part.move]
        kind = self.device.type
        readable = all(
            t.dtype == part.dtype and t.device.type == kind for part in message.parts for t in source[part.move]
        )
        return tensors if readable else []

    def _reduce(self, round_: Round, messages: Sequence[tuple[Message, torch.Tensor]]) -> None:
        """Terms to values, once all have come."""
        stages = [move.program.stages.get(round_.key) for move in self.moves]
        if not any(stage and stage.reductions for stage in stages):
            return
        arrived = {(part.move, p.peer): [part.elements(room)] for p, room in messages for part in p.parts}
        for number, (move, stage) in enumerate(zip(self.moves, stages, strict=True)):
            if stage is None or stage.rule is None:
                continue
            ours, results = move.read(round_.key), move.written(round_.key)
            for target, terms in stage.reductions:
                cells = [view_of(window, ours if peer is None else arrived[number, peer]) for peer, window in terms]
                reduce(view_of(target, results), cells, stage.rule, move.dtype, move.look)

    def _read(self, round_: Round) -> list[Tensors]:
        """The tensors that a round sends from: later steps send what earlier ones brought."""
        return [move.read(round_.key) for move in self.moves]


def inline_bytes(owners: int) -> int:
    """What a message may have to travel beside the header. It depends on the group alone, so that everybody agrees.

    >>> inline_bytes(4), inline_bytes(64)
    (16384, 1856)
    """
    return min(INLINE, SLOTS // owners // 64 * 64 - START)
