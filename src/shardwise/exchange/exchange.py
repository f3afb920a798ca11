"""Carries plans out over a transport: agree, pack, swap, reduce, unpack; many tensors in one exchange."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
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
from shardwise.exchange.messages import Message, Pair, Round, Tensors, schedule, view_of
from shardwise.exchange.moves import Delta, Move, crosses_link, keeps
from shardwise.exchange.peer_reads import read_from_peer
from shardwise.exchange.reduce import reduce
from shardwise.exchange.transport import PostedRound, Receive, Send, Transport

HEADER = 8 * WORDS
INLINE, SLOTS = 2**14, 2**17  # the largest message beside a header, and the bytes of all slots of a rank
CPU = torch.device("cpu")
MOST_AGREED = 2**14  # proposals that a transport remembers
MOST_SLOTS = 256  # in larger groups nobody writes to everybody; headers are reduced instead


class Exchange:
    """One exchange of this rank with all others: `start` agrees and sends what is small, `finish` does the rest.

    Every rank starts exchanges in the same order, and finishes them in that order. Messages lie on `device`, the same
    kind on every rank, or where the transport can reach them. `fresh`: nobody sees the target's tensors before the
    exchange is done. `views`: those of the last time, where it is repeated with the same moves. `part_of`: the exchange
    that runs now, of which this is a part. `direct`: other ways than messages of the group may be used. `delta`, the
    same on every rank: the targets hold what an exchange with these plans brought, so that only what changed need be
    sent; "always" also between ranks that share memory. `traffic` tells how many bytes that took.
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
    ) -> None:
        self.transport, self.proposal, self.moves, self.fresh = transport, proposal, moves, fresh
        self.delta, self.traffic = delta, DeltaTraffic()
        self.views, self.direct = views or ViewCache(), direct
        if views is not None:
            transport.views.add(views)
        self._device = device or CPU  # of the tensors
        self.sources: list[Tensors] = [move.source for move in moves]
        self.targets: list[Tensors] = [move.target for move in moves]
        self.inline = inline_bytes(len(transport.owners))
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
        # other exchanges may have started since: a part of one must not come between their collective calls
        in_order = not self.nested
        with self._unbroken():  # also an interrupt: some may have heard from us, and others not
            if self._many:
                weights = torch.from_numpy(weigh(self.header[None])[0])
                self._agreement = self.transport.all_reduce(weights, "max", self.number, in_order=in_order)
            else:
                self._agreement = self.transport.all_to_all(*self._slots(), self.number, in_order=in_order)
        first = self.schedule.rounds[0]
        before = alone and not self.delta and self.header.tobytes() in self.transport.agreed
        if before and first.bytes <= self.transport.early_limit(self.device, direct=self.direct):
            with self._unbroken():
                self._ahead = self._post(first, hidden=not self.fresh)
        return self

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
    def _many(self) -> bool:
        """True where nobody writes to everybody: headers are reduced."""
        return len(self.transport.owners) > MOST_SLOTS

    # --- agreement ---------------------------------------------------------------------------------------------------

    def _slots(self) -> tuple[npt.NDArray[np.uint8], list[int]]:
        """A row for every rank: our header, and what is small; and how many bytes of each row matter."""
        rows = np.empty((len(self.transport.owners), HEADER + self.inline), np.uint8)
        sizes = [HEADER] * len(rows)
        try:
            picked = ElementGather(self.sources)
            for message in self.schedule.rounds[0].small_sends:
                at = self.transport.rows[message.peer]
                sizes[at] += message.bytes
                room = rows[at, HEADER : sizes[at]]
                if not picked.take(message, room):
                    self.views.pack(message, self.views.room(message), self.sources)
                    room[:] = self.views.room(message).numpy()
        except Exception as error:  # not too late to tell the others
            self.proposal = replace(self.proposal, error=error)
            self.header = self.proposal.header()
        rows[:, :HEADER] = self.header.view(np.uint8)
        return rows, sizes

    def _agreed(self) -> Any:
        """The slots of the others, once all agree; None where ranks have to learn."""
        assert self._agreement is not None, "start first"
        slots = self._agreement()
        verdict = self._verdict(slots)
        if verdict is Verdict.GO:
            if not self.nested:
                self._remember()
            return slots
        if self._ahead is not None:  # what was posted will not be met, but may not be reused either
            self.transport.abandon(self._ahead)
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
        for message in round_.small_receives:
            buffer = slots[self.transport.rows[message.peer]][HEADER : HEADER + message.bytes]
            if not picked.put(message, buffer):
                room = self.views.room(message)
                room.numpy()[:] = np.frombuffer(buffer, np.uint8)
                messages.append((message, room))
                self.views.unpack(message, room, self.targets)
        for at, arrived in posted.arrivals() if posted else ():
            if isinstance(arrived, torch.Tensor):
                messages.append((round_.receives[at], arrived))
                self.views.unpack(round_.receives[at], arrived, self.targets)
            elif arrived is not None:
                message = round_.receives[at]
                read_from_peer(round_.key, message, arrived, self.moves, self.transport.me, self.views)
        self._reduce(round_, messages)
        if posted:
            posted.finish()
        if isinstance(posted, DeltaRound):
            self.traffic += posted.traffic

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
            if round_.key[0] == 0 and self.moves[part.move].program.reducing:
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
            for target, terms in stage.reductions if stage else ():
                cells = [
                    view_of(window, move.source if peer is None else arrived[number, peer]) for peer, window in terms
                ]
                reduce(view_of(target, move.target), cells, move.plan.source.op or "sum", move.look)

    def _read(self, round_: Round) -> list[Tensors]:
        """The tensors that a round sends from: later steps send what earlier ones brought."""
        return self.sources if round_.key[0] == 0 else self.targets


def inline_bytes(owners: int) -> int:
    """What a message may have to travel beside the header. It depends on the group alone, so that everybody agrees.

    >>> inline_bytes(4), inline_bytes(64), inline_bytes(10_000)
    (16384, 1920, 0)
    """
    return min(INLINE, SLOTS // owners // 64 * 64 - HEADER) if owners <= MOST_SLOTS else 0
