"""A process group whose waits end: by one timeout for a whole call, or when a rank reports why the transport broke."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from datetime import timedelta
from weakref import ref
from zlib import crc32

import torch.distributed as dist

from shardwise.errors import ExchangeError
from shardwise.exchange import in_words
from shardwise.transports.endpoint import Endpoint
from shardwise.transports.failure_notices import (
    CONNECTION_LOST,
    TIMED_OUT,
    CauseError,
    MessageWatcher,
    close_connections,
    closed_ranks,
    ended_ranks,
    late_ranks,
    publish,
    published_cause,
)
from shardwise.transports.torch_groups import backend_names, timeout_of

POLL = 1.0  # seconds between looks at the store
HINT = (
    "Most often a rank did not call (a branch, an error before, no backward: handle.backward() of a Handle, or "
    "backward() of a ShardedTensor, on ranks without a result), called with another group=, or died"
)


class GuardedGroup(Endpoint):
    """`ranks` of a process group, with what happens when one of them fails. Owners are assigned later.

    `name` is the same on all these ranks. A failure of the transport over the whole group ends this one too.
    """

    def __init__(self, group: dist.ProcessGroup, ranks: Sequence[int], owners: Sequence[int]) -> None:
        self.ranks = tuple(ranks)  # in the group, row by row
        everybody = range(group.size())
        self._whole_group = set(self.ranks) == set(everybody)
        self._group = ref(group)  # the group keeps the transport, which must not keep the group
        self._backends = backend_names(group)
        self.tagged = set(self._backends.values()) <= {"gloo", "mpi"}  # others may know only the order of messages
        self._gloo = set(self._backends.values()) == {"gloo"}
        self.name = transport_name(self.ranks)
        self._notices = (self.name, transport_name(everybody))
        self.seconds = timeout_of(group)
        self._end = ContextVar[float | None]("end", default=None)  # until when the current call may wait
        self._failure: str | None = None
        self._rendezvous_done = False
        super().__init__(owners[self.ranks.index(group.rank())], owners)

    def assign_owners(self, me: int, owners: Sequence[int]) -> None:
        """Set who is on this transport, and the words for waiting for them."""
        super().assign_owners(me, owners)
        others = [owner for owner in self.owners if owner != self.me]
        self._waiting_for_all = f"waiting for {in_words(others) if others else 'itself'} to call too"

    @property
    def group(self) -> dist.ProcessGroup:
        """The process group, while it lives."""
        group = self._group()
        if group is None:
            raise ExchangeError("the process group of this exchange is gone: it was destroyed")
        return group

    # --- waits -------------------------------------------------------------------------------------------------------

    @contextmanager
    def budget(self) -> Iterator[None]:
        """All waits inside share the timeout of the group, also those of a queue that this call waits for."""
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

    def wait(self, work: dist.Work) -> None:
        """For a message, or a collective call. (With a limit, nccl would block the CPU; mpi knows no limit.)"""
        if self._gloo:
            work.wait(timedelta(seconds=self.left))
        else:
            work.wait()

    def wait_for_collective(self, work: dist.Work) -> None:
        """For a collective call. gloo may miss that a connection was closed: look into the store once a second."""
        while self._gloo and self._whole_group and self.left > POLL:
            try:
                work.wait(timedelta(seconds=POLL))
                return
            except RuntimeError:
                if work.is_completed():
                    raise
            self._check_store()
        self.wait(work)

    def wait_in_order(self, works: Sequence[dist.Work]) -> Callable[[int], None]:
        """A function that waits for message number i of these; call it for one after the other.

        If the transport is over some ranks of the group, nobody closes connections, so it looks into the store for
        notices. So it does before the rendezvous is done: the only rank that waits for an ended one may be late itself.
        """
        if not self._gloo or (self._whole_group and self._rendezvous_done):
            return lambda at: self.wait(works[at])
        watcher = MessageWatcher(works)
        return lambda _: self._watch(watcher)

    def _watch(self, watcher: MessageWatcher) -> None:
        """Wait for the next message. Ask for closed connections less and less often: gloo keeps a receive of each.

        After the rendezvous it does not ask: a rank that has ended may have sent everything before.
        """
        start = now = time.monotonic()
        end, ask = start + self.left, start + POLL
        while not watcher.next(min(POLL, max(end - now, 0.0))):
            self._check_store()
            now = time.monotonic()
            if now >= ask and not self._rendezvous_done:
                ask = start + 2 * (now - start)
                if closed_ranks(self.group, self.ranks, self.collective_tag("closed")):
                    raise RuntimeError(f"{CONNECTION_LOST}: a rank closed its connection before all had called")
            if now >= end:
                raise RuntimeError(f"timed out: nothing came within {self.seconds:g} s")

    def _check_store(self) -> None:
        cause = published_cause(self.group, self._notices)
        if cause is not None:
            raise CauseError(cause)

    # --- failures ----------------------------------------------------------------------------------------------------

    @property
    def broken(self) -> bool:
        """True once an exchange broke in the middle: no rank can be told anything over this transport any more."""
        return self._failure is not None

    def fail(self, reason: str, cause: str | None = None) -> None:
        """Messages of a broken exchange may still be in flight: later ones could not be told apart from them.

        The other ranks hear of it at once. `cause` is what to tell them, if it happened on another rank.
        """
        if self._failure is not None:
            return
        self._failure = reason
        self.staging.release()  # messages may still be written into it
        self._announce_failure(cause or f"an exchange broke on rank {self.me} ({reason})")

    def _announce_failure(self, cause: str) -> None:
        """To ranks that may wait for a message of this one. Connections that other transports may use stay open."""
        group = self._group()
        if group is not None and self._gloo and len(self.ranks) > 1:
            publish(group, self.name, cause)
            if self._whole_group:
                close_connections(group, self.collective_tag("close"))

    @contextmanager
    def guard(self, doing: str) -> Iterator[None]:
        """Turn errors of torch.distributed into an ExchangeError that names the cause, and fail the transport."""
        if self._failure is not None:
            raise ExchangeError(
                f"an earlier exchange of this group broke on rank {self.me} ({self._failure}): "
                f"destroy the process group and make a new one"
            )
        try:
            yield
        except RuntimeError as error:  # what all of torch.distributed raises, also for lost connections and timeouts
            cause = self._cause_of(error)
            why = cause or _first_line(error)
            self.fail(f"{doing}: {why}", cause)
            hint = f". {HINT}" if doing == self._waiting_for_all and cause is None else ""
            raise ExchangeError(f"rank {self.me} was {doing} when the transport broke: {why}{hint}") from error

    def _cause_of(self, error: RuntimeError) -> str | None:
        """What happened on another rank, if that is known: it says more than what this rank sees of it."""
        if isinstance(error, CauseError):
            return str(error)
        if not self._gloo:
            return None
        ranks, alternative = list[int](), "closed the connection"
        if TIMED_OUT in str(error):
            alternative = "not called"
            if self._whole_group:
                ranks = late_ranks(self.group, self._notices, self.collective_tag("close"))
        elif CONNECTION_LOST in str(error):
            ranks = ended_ranks(self.group, self.ranks, self._notices, self.collective_tag("closed"))
        cause = published_cause(self.group, self._notices)
        if cause is not None or not ranks:
            return cause
        has = "has" if len(ranks) == 1 else "have"
        owners = [self.owners[self.ranks.index(rank)] for rank in ranks]
        return f"{in_words(owners)} {has} ended, or {has} {alternative}"


def transport_name(ranks: Sequence[int]) -> str:
    """The name of the transport over these ranks of a group."""
    return str(crc32(str(tuple(ranks)).encode()))


def _first_line(error: Exception) -> str:
    return str(error).partition("\n")[0]
