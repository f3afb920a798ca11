"""Carries plans out over a transport: agree, pack, swap, reduce, unpack; many tensors in one exchange."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple
from zlib import crc32

import numpy as np
import numpy.typing as npt
import torch

from shardwise.errors import ShardwiseError
from shardwise.exchange.agreement import WORDS, Terms, Verdict, judge, refusal, weigh
from shardwise.exchange.element_gather import ElementGather
from shardwise.exchange.peer_reads import fetch
from shardwise.exchange.program import Pair, Program, program
from shardwise.exchange.reduce import Look, reduce
from shardwise.exchange.schedule import Message, Tensors, Turn, schedule
from shardwise.exchange.transport import PostedRound, Receive, Send, Transport
from shardwise.exchange.view_cache import ViewCache
from shardwise.planning import Plan

HEADER = 8 * WORDS
INLINE, SLOTS = 2**14, 2**17  # the largest message beside a header, and the bytes of all slots of a rank
MOST_AGREED = 2**14  # terms that a transport remembers
MOST_SLOTS = 256  # in larger groups nobody writes to everybody; headers are reduced instead


class Move(NamedTuple):
    """One tensor of an exchange: its plan, and this owner's tensors on both sides; `dtype` is that of the messages.

    `look` sees what terms come to, before that is cast.
    """

    plan: Plan
    program: Program
    source: Tensors
    target: Tensors
    dtype: torch.dtype
    look: Look | None = None

    @staticmethod
    def of(
        plan: Plan, owner: int, source: Tensors, target: Tensors, dtype: torch.dtype, look: Look | None = None
    ) -> Move:
        """With the views that carry it out; those are kept by the strides of the tensors."""
        strides = (tuple(t.stride() for t in side) for side in (source, target))
        return Move(plan, program(plan, owner, *strides), source, target, dtype, look)


class Exchange:
    """One exchange of this rank with all others: `start` agrees and sends what is small, `finish` does the rest.

    Every rank starts exchanges in the same order, and finishes them in that order. Messages lie on `device`, the same
    kind on every rank, or where the transport can reach them. `fresh`: nobody sees the target's tensors before the
    exchange is done. `views`: those of the last time, where it is repeated with the same moves. `part_of`: the exchange
    that runs now, of which this is a part. `direct`: other ways than messages of the group may be used.
    """

    def __init__(
        self,
        transport: Transport,
        terms: Terms,
        moves: Sequence[Move] = (),
        *,
        device: torch.device | None = None,
        fresh: bool = True,
        views: ViewCache | None = None,
        part_of: Exchange | None = None,
        direct: bool = True,
    ) -> None:
        self.transport, self.terms, self.moves, self.fresh = transport, terms, moves, fresh
        self.views, self.direct = views or ViewCache(), direct
        if views is not None:
            transport.views.add(views)
        self.device = transport.message_device(device or torch.device("cpu"))
        self.sources: list[Tensors] = [move.source for move in moves]
        self.targets: list[Tensors] = [move.target for move in moves]
        self.inline = inline_bytes(len(transport.owners))
        self.schedule = schedule(tuple((m.program, m.dtype) for m in moves), transport.me, self.inline)
        self.header = terms.header()
        # numbers count what the program starts, in the same order everywhere; parts of it start in their own time
        self.nested = part_of is not None
        self.number: int = next(transport.numbers) if part_of is None else part_of.number
        # a message can only meet one of the same exchange of the same ranks, on the same terms (but for one in 2**31)
        names = f"{transport.name} {self.number} {self.nested}".encode()
        self.tag = crc32(self.header[1:].tobytes(), crc32(names)) >> 1
        self.writing = False  # into the target's tensors: from when all have agreed
        self._agreement: Callable[[], Any] | None = None
        self._ahead: PostedRound | None = None

    def start(self, *, alone: bool = False) -> Exchange:
        """Send the header to everybody, and with it the messages that fit.

        `alone` says that no other exchange of this transport is under way. Then, where all have agreed on these terms
        before, the messages of the first turn leave at once too, unless they are so large that it saves nothing.
        """
        # other exchanges may have started since: a part of one must not come between their collective calls
        in_order = not self.nested
        with self._unbroken():  # also an interrupt: some may have heard from us, and others not
            if self._many:
                weights = torch.from_numpy(weigh(self.header[None])[0])
                self._agreement = self.transport.all_reduce(weights, "max", self.number, in_order=in_order)
            else:
                self._agreement = self.transport.all_to_all(*self._slots(), self.number, in_order=in_order)
        first = self.schedule.turns[0]
        most = self.transport.early_limit(self.device, direct=self.direct)
        if alone and first.bytes <= most and self.header.tobytes() in self.transport.agreed:
            with self._unbroken():
                self._ahead = self._post(first, hidden=not self.fresh)
        return self

    def finish(self) -> list[Any] | None:
        """Carry it out. None once all is in its place; where some ranks lack knowledge, what all of them know."""
        first = self.schedule.turns[0]
        waiting = self._ahead is None and first.bytes > 0  # for the others to agree, before it is posted
        early = self.fresh and not waiting and self.terms.error is None
        if early:
            with self._unbroken():
                self._copy_local(first)
        with self._unbroken(but=ShardwiseError):
            slots = self._agreed()
        if slots is None:
            return self.transport.all_gather(None if self.terms.unknown else dict(self.terms.fields))
        with self._unbroken():
            self.writing = True
            for move in self.moves:
                if move.program.fill is not None:
                    for tensor in move.target:
                        tensor.fill_(move.program.fill)
            for turn in self.schedule.turns:
                self._run(turn, slots, copied=early and turn is first)
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
            for parcel in self.schedule.turns[0].small_sends:
                at = self.transport.rows[parcel.peer]
                sizes[at] += parcel.bytes
                room = rows[at, HEADER : sizes[at]]
                if not picked.take(parcel, room):
                    self.views.pack(parcel, self.views.room(parcel), self.sources)
                    room[:] = self.views.room(parcel).numpy()
        except Exception as error:  # not too late to tell the others
            self.terms = replace(self.terms, error=error)
            self.header = self.terms.header()
        rows[:, :HEADER] = self.header.view(np.uint8)
        return rows, sizes

    def _agreed(self) -> Any:
        """The slots of the others, once all agree; None where ranks have to learn."""
        assert self._agreement is not None, "start first"
        found = self._agreement()
        verdict = self._verdict(found)
        if verdict is Verdict.GO:
            if not self.nested:
                self._remember()
            return found
        if self._ahead is not None:  # what was posted will not be met, but may not be reused either
            self.transport.abandon(self._ahead)
        if verdict is Verdict.REFUSE:
            raise refusal(self.transport.all_gather(self.terms.told()), self.transport.owners) from self.terms.error
        return None

    def _remember(self) -> None:
        """All agree on these terms. (Not where some had to learn first: they will have to the next time, too.)"""
        if len(self.transport.agreed) > MOST_AGREED:
            self.transport.agreed.clear()
        self.transport.agreed.add(self.header.tobytes())

    def _verdict(self, found: Any) -> Verdict:
        if self._many:
            return judge(found.cpu().numpy())
        mine = self.header.tobytes()
        if not self.header[0] and all(row[:HEADER] == mine for row in found):
            return Verdict.GO  # nobody failed or lacks anything, and all say the same
        headers = np.frombuffer(b"".join(row[:HEADER] for row in found), np.int64)
        return judge(weigh(headers.reshape(len(found), -1)).max(axis=0))

    # --- turns -------------------------------------------------------------------------------------------------------

    def _run(self, turn: Turn, slots: Any, *, copied: bool) -> None:
        posted, self._ahead = self._ahead or self._post(turn, hidden=False), None
        if not copied:  # while the transport is busy
            self._copy_local(turn)
        messages, picked = list[tuple[Message, torch.Tensor]](), ElementGather(self.targets)
        for parcel in turn.small_receives:
            message = slots[self.transport.rows[parcel.peer]][HEADER : HEADER + parcel.bytes]
            if not picked.put(parcel, message):
                room = self.views.room(parcel)
                room.numpy()[:] = np.frombuffer(message, np.uint8)
                messages.append((parcel, room))
                self.views.unpack(parcel, room, self.targets)
        for at, found in posted.arrivals() if posted else ():
            if isinstance(found, torch.Tensor):
                messages.append((turn.receives[at], found))
                self.views.unpack(turn.receives[at], found, self.targets)
            elif found is not None:
                fetch(turn.key, turn.receives[at], found, self.moves, self.transport.me, self.views)
        self._reduce(turn, messages)
        if posted:
            posted.finish()

    def _copy_local(self, turn: Turn) -> None:
        """What stays with its owner."""

        def pairs() -> Iterator[tuple[Pair, Tensors, Tensors]]:
            for move, source in zip(self.moves, self._read(turn), strict=True):
                stage = move.program.stages.get(turn.key)
                yield from ((pair, source, move.target) for pair in (stage.local if stage else ()))

        self.views.copy(turn.key, pairs())

    def _post(self, turn: Turn, *, hidden: bool) -> PostedRound | None:
        """Post the messages of a turn. `hidden`: receive nothing into the target's tensors yet."""
        if not turn.bytes:
            return None
        source, device = self._read(turn), self.device
        receives = [
            Receive(p.peer, p.bytes, None if hidden else p.in_place(self.targets, device)) for p in turn.receives
        ]
        sends = [
            Send(
                parcel.peer,
                parcel.bytes,
                parcel.in_place(source, device),
                partial(self.views.pack, parcel, tensors=source),
                self._readable(turn, parcel, source),
                parcel.run,
                turn.same[number],
            )
            for number, parcel in enumerate(turn.sends)
        ]
        return self.transport.post_round(receives, sends, self.tag, device, self.schedule.align, direct=self.direct)

    def _readable(self, turn: Turn, parcel: Message, source: Sequence[Tensors]) -> list[torch.Tensor]:
        """The tensors that a peer could read a message from.

        Not where it is terms, is cast on the way, or lies where messages do not: on a GPU that the transport cannot reach.
        """
        found = list[torch.Tensor]()
        for part in parcel.parts:
            if turn.key[0] == 0 and self.moves[part.move].plan.reducing:
                return []
            found += source[part.move]
        kind = self.device.type
        alike = all(t.dtype == part.dtype and t.device.type == kind for part in parcel.parts for t in source[part.move])
        return found if alike else []

    def _reduce(self, turn: Turn, messages: Sequence[tuple[Message, torch.Tensor]]) -> None:
        """Terms to values, once all have come."""
        stages = [move.program.stages.get(turn.key) for move in self.moves]
        if not any(stage and stage.reductions for stage in stages):
            return
        arrived = {(part.move, p.peer): [part.cells(room)] for p, room in messages for part in p.parts}
        for number, (move, stage) in enumerate(zip(self.moves, stages, strict=True)):
            for target, terms in stage.reductions if stage else ():
                cells = [cut.of(move.source if peer is None else arrived[number, peer]) for peer, cut in terms]
                reduce(target.of(move.target), cells, move.plan.source.op or "sum", move.look)

    def _read(self, turn: Turn) -> list[Tensors]:
        """The tensors that a turn sends from: later steps send what earlier ones brought."""
        return self.sources if turn.key[0] == 0 else self.targets


def inline_bytes(owners: int) -> int:
    """What a message may have to travel beside the header. It depends on the group alone, so that everybody agrees.

    >>> inline_bytes(4), inline_bytes(64), inline_bytes(10_000)
    (16384, 1920, 0)
    """
    return min(INLINE, SLOTS // owners // 64 * 64 - HEADER) if owners <= MOST_SLOTS else 0
