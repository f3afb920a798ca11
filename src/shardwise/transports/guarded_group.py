"""A process group whose waits end: by one timeout for a whole call, or when a rank reports why the transport broke."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from contextvars import ContextVar
from datetime import timedelta
from queue import Empty, SimpleQueue
from threading import Thread
from weakref import ref
from zlib import crc32

import torch
import torch.distributed as dist

from shardwise.errors import ExchangeError
from shardwise.exchange import in_words
from shardwise.transports.endpoint import Endpoint
from shardwise.transports.notice_board import NoticeBoard
from shardwise.transports.torch_groups import backend_names, timeout_of

CONNECTION_LOST, TIMED_OUT = "gloo/transport", "imed out"  # in the messages of gloo's errors
BRIEFLY = timedelta(milliseconds=1)
NEVER = timedelta(days=365)
MANY = 256  # ranks; in larger groups nobody asks them one by one


class CauseError(RuntimeError):
    """Why a transport broke, in words that name the rank. Other ranks report it unchanged."""


def late_ranks(board: NoticeBoard, group: dist.ProcessGroup, transports: Sequence[str], tag: int) -> list[int]:
    """The ranks of a group that do not answer after a wait for all of them timed out. Other waits end with this one.

    Empty if nothing can be said: nobody answers, the store is gone, or the group is large.
    """
    close_connections(board, group, tag)
    others = group.size() - 1
    missing = board.silent_ranks(group.rank(), range(group.size()), transports) if others < MANY else []
    return missing if len(missing) < others or others == 1 else []


def ended_ranks(
    board: NoticeBoard, group: dist.ProcessGroup, ranks: Sequence[int], transports: Sequence[str], tag: int
) -> list[int]:
    """The ranks among these that closed their connection to this process and do not answer."""
    closed = closed_ranks(group, ranks, tag)
    return board.silent_ranks(group.rank(), closed, transports) if closed else []


def closed_ranks(group: dist.ProcessGroup, ranks: Sequence[int], tag: int) -> list[int]:
    """The ranks among these that closed their connection to this process: gloo refuses to post a receive from them.

    Nobody sends the messages of these receives. Connections that this process has closed itself do not count.
    """
    closed = list[int]()
    for rank in ranks:
        try:
            if rank != group.rank():
                group.recv([torch.empty(1, dtype=torch.uint8, device="cpu")], rank, tag)
        except RuntimeError as error:
            closed += [rank] if CONNECTION_LOST in str(error) else []
    return closed


def close_connections(board: NoticeBoard, group: dist.ProcessGroup, tag: int) -> None:
    """Close the connections of this process in a group over gloo, so that nobody waits for it.

    gloo closes them when a wait times out, and offers no other way. First this process writes into the store that it
    lives: a process that closed its connections without that has ended.
    """
    board.say_alive(group.rank())
    for peer in range(group.size()):  # a wait for a rank that is gone would not time out
        if peer != group.rank():
            with suppress(RuntimeError):
                work = group.recv([torch.empty(1, dtype=torch.uint8, device="cpu")], peer, tag)
                with suppress(RuntimeError):
                    work.wait(BRIEFLY)
                return


class MessageWatcher:
    """A thread that waits for messages of gloo, one after the other, so that the caller can look around meanwhile.

    gloo cannot end a wait early without closing all connections of this process in the group. Others may use those.
    """

    def __init__(self, works: Sequence[dist.Work]) -> None:
        self._done = SimpleQueue[Exception | None]()
        Thread(target=self._wait, args=(works,), name="shardwise messages", daemon=True).start()

    def _wait(self, works: Sequence[dist.Work]) -> None:
        for work in works:
            try:
                work.wait(NEVER)
            except Exception as error:
                self._done.put(error)
                return
            self._done.put(None)

    def next(self, seconds: float) -> bool:
        """True once the next message has arrived or is sent; False if it has not after so many seconds."""
        try:
            error = self._done.get(timeout=seconds)
        except Empty:
            return False
        if error is not None:
            raise error
        return True


POLL = 1.0  # seconds between looks at the store
HINT = (
    "Most often a rank did not call (a branch, an error before, no backward: handle.backward() of a Handle, or "
    "backward() of a ShardedTensor, on ranks without a result), called with another group=, or died"
)


class GuardedGroup(Endpoint):
    """`ranks` of a process group, with what happens when one of them fails. Owners are assigned later.

    `name` is the same on all these ranks. A failure of the transport over the whole group ends this one too.
    `remedy`: what to do once it has failed.
    """

    remedy = "destroy the process group and make a new one"

    def __init__(self, group: dist.ProcessGroup, ranks: Sequence[int], owners: Sequence[int]) -> None:
        self.ranks = tuple(ranks)  # in the group, row by row
        everybody = range(group.size())
        self._whole_group = set(self.ranks) == set(everybody)
        self._group = ref(group)  # the group keeps the transport, which must not keep the group
        self._backends = backend_names(group)
        self.tagged = set(self._backends.values()) <= {"gloo", "mpi"}  # others may know only the order of messages
        self._gloo = set(self._backends.values()) == {"gloo"}
        self.name, self._board = transport_name(self.ranks), NoticeBoard(group)
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
        cause = self._board.cause(self._notices)
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
            self._board.publish(self.name, cause)
            if self._whole_group:
                close_connections(self._board, group, self.collective_tag("close"))

    @contextmanager
    def guard(self, doing: str) -> Iterator[None]:
        """Turn errors of torch.distributed into an ExchangeError that names the cause, and fail the transport."""
        if self._failure is not None:
            raise ExchangeError(
                f"an earlier exchange of this group broke on rank {self.me} ({self._failure}): {self.remedy}"
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
                ranks = late_ranks(self._board, self.group, self._notices, self.collective_tag("close"))
        elif CONNECTION_LOST in str(error):
            ranks = ended_ranks(self._board, self.group, self.ranks, self._notices, self.collective_tag("closed"))
        cause = self._board.cause(self._notices)
        if cause is not None or (not ranks and self._board.answers):
            return cause
        if not ranks:
            return self._out_of_reach()
        has = "has" if len(ranks) == 1 else "have"
        owners = [self.owners[self.ranks.index(rank)] for rank in ranks]
        far = alternative == "not called" and not all(map(self.shares_memory, owners))
        return f"{in_words(owners)} {has} ended, or {has} {alternative}" + ", or cannot be reached" * far

    def _out_of_reach(self) -> str | None:
        """What can be said where the store of the group does not answer, which tells dead ranks from late ones."""
        far = [owner for owner in self.owners if owner != self.me and not self.shares_memory(owner)]
        return f"neither {in_words(far)} on other hosts nor the store of the group can be reached" if far else None


def transport_name(ranks: Sequence[int]) -> str:
    """The name of the transport over these ranks of a group."""
    return str(crc32(str(tuple(ranks)).encode()))


def _first_line(error: Exception) -> str:
    return str(error).partition("\n")[0]
