"""The transport over a process group of torch.distributed: gloo, nccl, mpi, by the same public calls."""

from __future__ import annotations

import pickle
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from datetime import timedelta
from functools import cached_property
from typing import Any, Literal, get_args
from weakref import ref
from zlib import crc32

import numpy as np
import numpy.typing as npt
import torch
import torch.distributed as dist

from shardwise.errors import ExchangeError, RefusedValueError
from shardwise.exchange import PeerBuffer, in_words
from shardwise.exchange.transport import Endpoint, combined
from shardwise.layout import Layout
from shardwise.transports.failure_notices import (
    LATE,
    LOST,
    CauseError,
    Watched,
    closed,
    cut,
    ended,
    late,
    publish,
    published,
)
from shardwise.transports.members import Member, Members, registered_ranks, remember

TransportChoice = Literal["auto", "group", "shared"]  # through shared memory where it can be, never, or not without
MOST_LAYOUTS = 4096  # whose owners a transport remembers to have
LOOK = 1.0  # seconds
HINT = (
    "Most often a rank did not call (a branch, an error before, no backward: handle.backward() of a Handle, or "
    "backward() of a ShardedTensor, on ranks without a result), called with another group=, or died"
)


class GroupTransport(Endpoint):
    """A process group, or some ranks of one. Messages are addressed by ranks in the group.

    Owners are ranks in the job, where the group is of one job; else they are ranks in the group (see `members`).
    """

    def __init__(self, group: dist.ProcessGroup, owners: Sequence[int] | None = None) -> None:
        everybody = tuple(range(group.size()))
        self.ranks = everybody if owners is None else _ranks_of(group, owners)  # in the group, row by row
        self._whole = set(self.ranks) == set(everybody)
        self._group = ref(group)  # the transport is kept by its group, and must not keep it
        members = Members(everybody if owners is None else tuple(owners))  # until they have met
        super().__init__(members.owners[self.ranks.index(group.rank())], members.owners)
        self._number(members)
        self._backends = _backends(group)
        self.tagged = set(self._backends.values()) <= {"gloo", "mpi"}  # others may know only the order of messages
        self.name = _name(self.ranks)
        self._transports = (self.name, _name(everybody))  # whose end is also the end of this one
        self._gloo = set(self._backends.values()) == {"gloo"}
        self.seconds = _timeout(group)
        self._end = ContextVar[float | None]("end", default=None)  # until when this call may wait
        self._broken: str | None = None
        self._met = False  # True once everybody is known to have called
        self._abandoned = list[Any]()
        self._lacking = dict[Layout, tuple[int, ...]]()

    def _number(self, members: Members) -> None:
        """Give everybody on the transport a number."""
        self.members = members
        self.number(members.owners[self.ranks.index(self.group.rank())], members.owners)
        others = [owner for owner in self.owners if owner != self.me]
        self._meeting = f"waiting for {in_words(others) if others else 'itself'} to call too"

    def _tag(self, what: str, number: int | None = None) -> int:
        """Of messages outside of turns: they meet only those of the same ranks, of the same kind."""
        return crc32(f"{self.name} {what} {number}".encode()) >> 1

    @property
    def broken(self) -> bool:
        """True once an exchange broke in the middle: who else knows of it cannot be told."""
        return self._broken is not None

    @property
    def group(self) -> dist.ProcessGroup:
        """The process group, as long as it lives."""
        group = self._group()
        if group is None:
            raise ExchangeError("the process group of this exchange is gone: it was destroyed")
        return group

    @contextmanager
    def budget(self) -> Iterator[None]:
        """All waits inside end within the timeout of the group, also those of a lane that this call waits for."""
        before = self._end.set(self._end.get() or time.monotonic() + self.seconds)
        try:
            yield
        finally:
            self._end.reset(before)

    @property
    def left(self) -> float:
        """Seconds that a wait may take."""
        end = self._end.get()
        return self.seconds if end is None else max(end - time.monotonic(), 1e-3)

    def wait(self, work: Any) -> None:
        """For a message, or a collective call. (On nccl a limit would make it block; mpi has none.)"""
        if self._gloo:
            work.wait(timedelta(seconds=self.left))
        else:
            work.wait()

    def _wait_for_all(self, work: Any) -> None:
        """For a collective call. gloo may miss that a connection was cut: look from time to time who has told."""
        while self._gloo and self._whole and self.left > LOOK:
            try:
                work.wait(timedelta(seconds=LOOK))
                return
            except RuntimeError:
                if work.is_completed():
                    raise
            self._check_untold()
        self.wait(work)

    def _check_untold(self) -> None:
        cause = published(self.group, self._transports)
        if cause is not None:
            raise CauseError(cause)

    def each(self, works: Sequence[Any]) -> Callable[[int], None]:
        """What waits for these messages, one after the other, by number.

        Where others of the group have no part in the transport, nobody cuts connections: this looks who has told. So it does
        before ranks have met, when the only one that waits for a rank that has ended may be late itself.
        """
        if not self._gloo or (self._whole and self._met):
            return lambda at: self.wait(works[at])
        watched = Watched(works)
        return lambda at: self._watch(watched)

    def _watch(self, messages: Watched) -> None:
        """Wait for the next of these messages. Who has ended is asked less and less often: gloo keeps each question.

        Once all have met, one that has ended may have sent all that it had to.
        """
        begun = now = time.monotonic()
        end, ask = begun + self.left, begun + LOOK
        while not messages.next(min(LOOK, max(end - now, 0.0))):
            self._check_untold()
            now = time.monotonic()
            if now >= ask and not self._met:
                ask = begun + 2 * (now - begun)
                if closed(self.group, self.ranks, self._tag("closed")):
                    raise RuntimeError(f"{LOST}: a rank closed its connection before all had met")
            if now >= end:
                raise RuntimeError(f"timed out: nothing came within {self.seconds:g} s")

    def meet(self) -> None:
        """Everybody on the transport calls, before anything else: find out whether the group is of one job."""
        told = self.tell(Member.here(self.group) if self._whole else None)
        self._met = True
        if self._whole:
            self._number(Members.of(told, self.group.rank()))
            remember(self.group, self.members)

    def release(self) -> int:
        """Give back the memory that is kept for the next exchange; how many bytes it was."""
        kept = self.staging.bytes
        self.staging.release()
        for views in list(self.views):
            views.release()
        return kept

    def check_choice(self, way: Any) -> None:
        """Refuse a transport= that is none, or that this transport has not."""
        if way not in get_args(TransportChoice):
            raise RefusedValueError(f'transport= must be "auto", "group" or "shared", not {way!r}')
        if way == "shared" and len(self.owners) > 1:
            raise RefusedValueError(f'transport="shared": {self._not_shared()}; transport="auto" uses what there is')

    def _not_shared(self) -> str:
        return "this system has no shared memory for it"

    def lacks(self, layout: Layout) -> tuple[int, ...]:
        """The owners of a layout that are not on this transport."""
        if layout not in self._lacking:
            if len(self._lacking) > MOST_LAYOUTS:
                self._lacking.clear()
            self._lacking[layout] = tuple(owner for owner in layout.owners() if owner not in self.rows)
        return self._lacking[layout]

    def serves(self, device: torch.device) -> torch.device:
        """The device itself where the group has a backend for it that moves its memory; else the transport's own."""
        backend = self._backends.get(device.type)
        usable = backend is not None and (backend != "gloo" or device.type == "cpu")
        return device if usable else self._own

    @cached_property
    def _own(self) -> torch.device:
        """Where small things lie."""
        if "cpu" in self._backends and self._backends["cpu"] != "nccl":
            return torch.device("cpu")
        kind = next(iter(self._backends))
        return torch.device(kind, torch.get_device_module(kind).current_device())

    def slots(
        self, mine: npt.NDArray[np.uint8], sizes: Sequence[int], *, apart: int | None = None
    ) -> Callable[[], Sequence[memoryview]]:
        """One all-to-all of the whole group; among some of its ranks, or apart, messages between each two."""
        ours = torch.from_numpy(mine).to(self._own)
        wait = self._slots(ours, torch.empty_like(ours), apart)
        return lambda: [memoryview(row) for row in wait().cpu().numpy()]

    def _slots(self, mine: torch.Tensor, theirs: torch.Tensor, apart: int | None) -> Callable[[], torch.Tensor]:
        if not self._whole or apart is not None:
            return self._slots_by_messages(mine, theirs, self._tag("slots", apart))
        with self._guarded("starting to agree"):
            work = self.group.alltoall_base(theirs, mine, [], [], _async(dist.AllToAllOptions()))
        return self._awaited(work, theirs, mine)

    def _slots_by_messages(self, mine: torch.Tensor, theirs: torch.Tensor, tag: int) -> Callable[[], torch.Tensor]:
        at = self.rows[self.me]
        theirs[at] = mine[at]
        rows = [row for row in range(len(self.owners)) if row != at]
        receives = [(self.owners[row], theirs[row]) for row in rows]
        swap = self.swap(receives, [(self.owners[row], mine[row]) for row in rows], tag)

        def wait() -> torch.Tensor:
            self._all(swap)
            return theirs

        return wait

    def reduced(
        self, numbers: torch.Tensor, op: Literal["max", "sum"], *, apart: int | None = None
    ) -> Callable[[], torch.Tensor]:
        """One all-reduce; among some ranks of the group, or apart, by messages."""
        found = numbers.to(self._own, copy=True)
        if not self._whole or apart is not None:
            return lambda: self._reduced_by_messages(found, op, self._tag("reduced", apart))
        with self._guarded("starting to agree"):
            options = _async(dist.AllreduceOptions())
            options.reduceOp = dist.ReduceOp.MAX if op == "max" else dist.ReduceOp.SUM
            work = self.group.allreduce([found], options)
        return self._awaited(work, found)

    def _reduced_by_messages(self, mine: torch.Tensor, op: str, tag: int) -> torch.Tensor:
        """By doubling: after step k everybody has the result of 2**k ranks. Those past a power of two join in first."""
        me, count = self.rows[self.me], len(self.owners)
        most = 1 << (count.bit_length() - 1)
        if me >= most:
            self._to_and_fro(me - most, tag, send=mine)
            return self._to_and_fro(me - most, tag, like=mine)
        if me + most < count:
            mine = combined(mine, self._to_and_fro(me + most, tag, like=mine), op)
        for step in (1 << k for k in range(most.bit_length() - 1)):
            mine = combined(mine, self._to_and_fro(me ^ step, tag, send=mine, like=mine), op)
        if me + most < count:
            self._to_and_fro(me + most, tag, send=mine)
        return mine

    def _to_and_fro(
        self, row: int, tag: int, *, send: torch.Tensor | None = None, like: torch.Tensor | None = None
    ) -> torch.Tensor:
        """Send numbers to an owner, and get as many as `like` has."""
        peer, found = self.owners[row], torch.empty(0) if like is None else torch.empty_like(like)
        receives = [] if like is None else [(peer, found.view(torch.uint8))]
        sends = [] if send is None else [(peer, send.view(torch.uint8))]
        self._all(self.swap(receives, sends, tag))
        return found

    def _awaited(self, work: Any, found: torch.Tensor, *kept: torch.Tensor) -> Callable[[], torch.Tensor]:
        """Wait for a collective call; what it reads is `kept` until then."""
        held = list(kept)

        def wait() -> torch.Tensor:
            with self._guarded(self._meeting):
                self._wait_for_all(work)
            held.clear()
            return found

        return wait

    @staticmethod
    def _all(swap: GroupMessages) -> None:
        for _ in swap.arrivals():
            pass

    def swap(self, receives: Sequence[PeerBuffer], sends: Iterable[PeerBuffer], tag: int) -> GroupMessages:
        """Receives first. Where the backend runs messages in the order of one queue, all are posted as one batch."""
        with self._guarded("posting messages"):
            works = (
                self._posted(receives, sends, tag) if self.tagged else self._posted_as_one(receives, list(sends), tag)
            )
        return GroupMessages(self, receives, works)

    def _posted(self, receives: Sequence[PeerBuffer], sends: Iterable[PeerBuffer], tag: int) -> list[Any]:
        works: list[Any] = [self.group.recv([room], self._rank_of(peer), tag) for peer, room in receives]
        return works + [self.group.send([message], self._rank_of(peer), tag) for peer, message in sends]

    def _posted_as_one(self, receives: Sequence[PeerBuffer], sends: Sequence[PeerBuffer], tag: int) -> list[Any]:
        """The work of the batch stands for each of its messages."""
        device = next((tensor.device for _, tensor in (*receives, *sends)), None)
        if device is None or not _coalesces(self.group, device):
            return self._posted(receives, sends, tag)
        self.group._start_coalescing(device)
        works = self._posted(receives, sends, tag)
        return [self.group._end_coalescing(device)] * len(works)

    def _rank_of(self, owner: int) -> int:
        """In the group."""
        return self.ranks[self.rows[owner]]

    def tell(self, value: Any) -> list[Any]:
        """As messages, apart from the collective calls of others. Not to be changed: equal values are one object.

        Everybody knows the values of the next 2**k owners after step k, so that few messages do in large groups too.
        """
        me, count = self.rows[self.me], len(self.owners)
        known = [pickle.dumps(value)]  # of this owner and the next ones, in a circle
        while len(known) < count:
            step = len(known)
            known += self._passed_on(known[: count - step], self.owners[me - step], self.owners[(me + step) % count])
        values = {text: pickle.loads(text) for text in set(known)}  # equal ones are one
        return [values[known[(row - me) % count]] for row in range(count)]

    def _passed_on(self, values: list[bytes], target: int, source: int) -> list[bytes]:
        """Send values to one owner and get those of another: the size first, as it is not known there."""
        once = {value: value for value in values}  # equal ones travel once: pickle writes an object only once
        values = [once[value] for value in values]
        mine = torch.frombuffer(bytearray(pickle.dumps(values)), dtype=torch.uint8).to(self._own)
        size = torch.tensor([len(mine)], device=self._own)
        theirs = torch.empty_like(size)
        tag = self._tag("tell")
        self._all(self.swap([(source, theirs)], [(target, size)], tag))
        room = mine.new_empty(int(theirs))
        self._all(self.swap([(source, room)], [(target, mine)], tag))
        found: list[bytes] = pickle.loads(room.cpu().numpy().tobytes())
        return found

    def abandon(self, posted: Any) -> None:
        """Keep what messages may still be written into for as long as the group lives."""
        self._abandoned.append(posted)
        self.staging.release()

    def fail(self, reason: str, cause: str | None = None) -> None:
        """Messages of a broken exchange may still be under way: nothing more can be told apart from them.

        The others hear of it at once. `cause` is what to tell them, where it happened elsewhere.
        """
        if self._broken is not None:
            return
        self._broken = reason
        self.staging.release()  # they may still be written into it
        self._tell_of(cause or f"an exchange broke on rank {self.me} ({reason})")

    def _tell_of(self, cause: str) -> None:
        """Those who may wait for a message of this rank. No connections are cut that others of the group may use."""
        group = self._group()
        if group is not None and self._gloo and len(self.ranks) > 1:
            publish(group, self.name, cause)
            if self._whole:
                cut(group, self._tag("cut"))

    @contextmanager
    def _guarded(self, doing: str) -> Iterator[None]:
        if self._broken is not None:
            raise ExchangeError(
                f"an earlier exchange of this group broke on rank {self.me} ({self._broken}): "
                f"destroy the process group and make a new one"
            )
        try:
            yield
        except RuntimeError as error:  # what all of torch.distributed raises, also for lost connections and timeouts
            cause = self._cause_of(error)
            why = cause or _first_line(error)
            self.fail(f"{doing}: {why}", cause)
            hint = f". {HINT}" if doing == self._meeting and cause is None else ""
            raise ExchangeError(f"rank {self.me} was {doing} when the transport broke: {why}{hint}") from error

    def _cause_of(self, error: RuntimeError) -> str | None:
        """What happened elsewhere, where that is known: it says more than what this rank sees of it."""
        if isinstance(error, CauseError):
            return str(error)
        if not self._gloo:
            return None
        lost, or_else = list[int](), "closed the connection"
        if LATE in str(error):
            lost, or_else = late(self.group, self._transports, self._tag("cut")) if self._whole else [], "not called"
        elif LOST in str(error):
            lost = ended(self.group, self.ranks, self._transports, self._tag("closed"))
        found = published(self.group, self._transports)
        if found is not None or not lost:
            return found
        has = "has" if len(lost) == 1 else "have"
        owners = [self.owners[self.ranks.index(rank)] for rank in lost]
        return f"{in_words(owners)} {has} ended, or {has} {or_else}"


class GroupMessages:
    """Messages that were posted to a group."""

    def __init__(self, transport: GroupTransport, receives: Sequence[PeerBuffer], works: Sequence[Any]) -> None:
        self._transport, self._receives, self._works = transport, receives, works

    def arrivals(self) -> Iterator[int]:
        """In the order of the receives."""
        wait = self._transport.each(self._works)
        for at, (peer, room) in enumerate(self._receives):
            with self._transport._guarded(f"waiting for {room.numel()} bytes from rank {peer}"):
                wait(at)
            yield at
        with self._transport._guarded("waiting for its messages to be taken"):
            for at in range(len(self._receives), len(self._works)):
                wait(at)


def _ranks_of(group: dist.ProcessGroup, owners: Sequence[int]) -> tuple[int, ...]:
    """The ranks in a group of some ranks of its job."""
    known = {rank: at for at, rank in enumerate(registered_ranks(group) or ())}
    strange = [owner for owner in owners if owner not in known]
    if strange:
        raise ExchangeError(f"{in_words(strange)} cannot be reached: the group has {in_words(list(known))} of this job")
    return tuple(known[owner] for owner in owners)


def _name(ranks: Sequence[int]) -> str:
    """Of the transport of these ranks: the same on all of them."""
    return str(crc32(str(tuple(ranks)).encode()))


def _backends(group: dist.ProcessGroup) -> dict[str, str]:
    """The name of the backend that a group has for every kind of device, as in {"cpu": "gloo", "cuda": "nccl"}."""
    found = {device.type: group._get_backend(device).name() for device in group._device_types}
    return found or {"cpu": group.name()}


def _timeout(group: dist.ProcessGroup) -> float:
    """How long the group waits, in seconds."""
    try:
        kind = torch.device("cpu")
        return float(group._get_backend(kind).options._timeout.total_seconds())
    except Exception:  # not every backend says so
        return float(dist.constants.default_pg_timeout.total_seconds())


def _coalesces(group: dist.ProcessGroup, device: torch.device) -> bool:
    return type(group) is dist.ProcessGroup and bool(group._get_backend(device).supports_coalescing)


def _async(options: Any) -> Any:
    """Options of a collective call that is waited for later, as torch's own functions make them."""
    if hasattr(options, "asyncOp"):
        options.asyncOp = True
    return options


def _first_line(error: Exception) -> str:
    return str(error).partition("\n")[0]
