"""Tells ranks that packets do not reach why a transport broke: by the store of their group and closed connections."""

from __future__ import annotations

import time
from collections.abc import Iterable, Sequence
from contextlib import suppress
from datetime import timedelta
from queue import Empty, SimpleQueue
from threading import Thread

import torch
import torch.distributed as dist

CONNECTION_LOST, TIMED_OUT = "gloo/transport", "imed out"  # in the messages of gloo's errors
BRIEFLY = timedelta(milliseconds=1)
NEVER = timedelta(days=365)
GRACE = 1.0  # seconds in which live ranks answer: all hear of a broken connection at once
MANY = 256  # ranks; in larger groups nobody asks them one by one


class CauseError(RuntimeError):
    """Why a transport broke, in words that name the rank. Other ranks report it unchanged."""


def publish(group: dist.ProcessGroup, transport: str, cause: str) -> None:
    """Write the cause into the store, unless there is one: what breaks later follows from the first."""
    with suppress(Exception):  # the store may be gone too
        group.get_group_store().compare_set(_cause_key(transport), "", cause)


def published_cause(group: dist.ProcessGroup, transports: Iterable[str]) -> str | None:
    """The cause that a rank has published for one of these transports, if any."""
    with suppress(Exception):
        store = group.get_group_store()
        for key in map(_cause_key, transports):
            if store.check([key]):
                return store.get(key).decode(errors="replace")
    return None


def silent_ranks(group: dist.ProcessGroup, ranks: Sequence[int], transports: Sequence[str]) -> list[int]:
    """The ranks among these that do not answer after connections broke. Stops once a cause is published.

    If all answer, one of them is about to publish the cause.
    """
    end, missing = time.monotonic() + GRACE, [rank for rank in ranks if rank != group.rank()]
    with suppress(Exception):
        store = group.get_group_store()
        store.set(_answer_key(group.rank()), "here")
        while published_cause(group, transports) is None and time.monotonic() < (end if missing else end + GRACE):
            time.sleep(0.01)
            missing = [rank for rank in missing if not store.check([_answer_key(rank)])]
    return missing


def late_ranks(group: dist.ProcessGroup, transports: Sequence[str], tag: int) -> list[int]:
    """The ranks of a group that do not answer after a wait for all of them timed out. Other waits end with this one.

    Empty if nothing can be said: nobody answers, the store is gone, or the group is large.
    """
    close_connections(group, tag)
    others = group.size() - 1
    missing = silent_ranks(group, range(group.size()), transports) if others < MANY else []
    return missing if len(missing) < others or others == 1 else []


def ended_ranks(group: dist.ProcessGroup, ranks: Sequence[int], transports: Sequence[str], tag: int) -> list[int]:
    """The ranks among these that closed their connection to this process and do not answer."""
    closed = closed_ranks(group, ranks, tag)
    return silent_ranks(group, closed, transports) if closed else []


def closed_ranks(group: dist.ProcessGroup, ranks: Sequence[int], tag: int) -> list[int]:
    """The ranks among these that closed their connection to this process: gloo refuses to post a receive from them.

    Nobody sends the messages of these receives. Connections that this process has closed itself do not count.
    """
    closed = list[int]()
    for rank in ranks:
        try:
            if rank != group.rank():
                group.recv([torch.empty(1, dtype=torch.uint8)], rank, tag)
        except RuntimeError as error:
            closed += [rank] if CONNECTION_LOST in str(error) else []
    return closed


def close_connections(group: dist.ProcessGroup, tag: int) -> None:
    """Close the connections of this process in a group over gloo, so that nobody waits for it.

    gloo closes them when a wait times out, and offers no other way. First this process writes into the store that it
    lives: a process that closed its connections without that has ended.
    """
    with suppress(Exception):
        group.get_group_store().set(_answer_key(group.rank()), "here")
    for peer in range(group.size()):  # a wait for a rank that is gone would not time out
        if peer != group.rank():
            with suppress(RuntimeError):
                work = group.recv([torch.empty(1, dtype=torch.uint8)], peer, tag)
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


def _answer_key(rank: int) -> str:
    return f"shardwise/answers/{rank}"


def _cause_key(transport: str) -> str:
    return f"shardwise/broken/{transport}"
