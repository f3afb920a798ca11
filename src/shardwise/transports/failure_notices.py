"""Why a transport broke, for ranks that cannot be told by packets: in the store of their group, and by cut connections."""

from __future__ import annotations

import time
from collections.abc import Iterable, Sequence
from contextlib import suppress
from datetime import timedelta
from queue import Empty, SimpleQueue
from threading import Thread
from typing import Any

import torch
import torch.distributed as dist

LOST, LATE = "gloo/transport", "imed out"  # what gloo says of connections that others closed, of waits that ran out
AT_ONCE = timedelta(milliseconds=1)
NEVER = timedelta(days=365)
GRACE = 1.0  # seconds in which ranks that live answer: all hear of a broken connection at once
MANY = 256  # ranks that nobody asks one by one


class CauseError(RuntimeError):
    """Why a transport broke, in words that name the rank: others are told it as it is."""


def publish(group: dist.ProcessGroup, transport: str, cause: str) -> None:
    """The first cause stays: what breaks later follows from it."""
    with suppress(Exception):  # the store may be gone, too
        group.get_group_store().compare_set(_key(transport), "", cause)


def published(group: dist.ProcessGroup, transports: Iterable[str]) -> str | None:
    """The cause that a rank has published for one of these transports, if any has."""
    with suppress(Exception):
        store = group.get_group_store()
        for key in map(_key, transports):
            if store.check([key]):
                return store.get(key).decode(errors="replace")
    return None


def silent(group: dist.ProcessGroup, ranks: Sequence[int], transports: Sequence[str]) -> list[int]:
    """Those of these ranks that do not answer, after connections broke; until one of them has published a cause.

    Where all answer, one of them is about to publish it.
    """
    end, missing = time.monotonic() + GRACE, [rank for rank in ranks if rank != group.rank()]
    with suppress(Exception):
        store = group.get_group_store()
        store.set(_answer(group.rank()), "here")
        while published(group, transports) is None and time.monotonic() < (end if missing else end + GRACE):
            time.sleep(0.01)
            missing = [rank for rank in missing if not store.check([_answer(rank)])]
    return missing


def late(group: dist.ProcessGroup, transports: Sequence[str], tag: int) -> list[int]:
    """The ranks of a group that do not answer, after a wait for all of them ran out. Who waits, too, hears of that.

    None are named where that would say nothing: nobody answers, the store is gone, or the group is large.
    """
    cut(group, tag)
    others = group.size() - 1
    missing = silent(group, range(group.size()), transports) if others < MANY else []
    return missing if len(missing) < others or others == 1 else []


def ended(group: dist.ProcessGroup, ranks: Sequence[int], transports: Sequence[str], tag: int) -> list[int]:
    """Those of these ranks that closed their connection to this process and do not answer. (See `cut`.)"""
    lost = closed(group, ranks, tag)
    return silent(group, lost, transports) if lost else []


def closed(group: dist.ProcessGroup, ranks: Sequence[int], tag: int) -> list[int]:
    """Those of these ranks that have closed their connection to this process: gloo posts no message to come from them.

    Nobody sends the messages that are asked for here. Connections that this process has closed itself do not count.
    """
    found = list[int]()
    for rank in ranks:
        try:
            if rank != group.rank():
                group.recv([torch.empty(1, dtype=torch.uint8)], rank, tag)
        except RuntimeError as error:
            found += [rank] if LOST in str(error) else []
    return found


def cut(group: dist.ProcessGroup, tag: int) -> None:
    """Close the connections of this process in a group over gloo, so that nobody waits for it.

    gloo closes them when a wait runs out; nothing else that it offers does. The store says first that this process
    lives: one that closed its connections without a word has ended.
    """
    with suppress(Exception):
        group.get_group_store().set(_answer(group.rank()), "here")
    for peer in range(group.size()):  # a wait for one that is gone would not run out
        if peer != group.rank():
            with suppress(RuntimeError):
                work = group.recv([torch.empty(1, dtype=torch.uint8)], peer, tag)
                with suppress(RuntimeError):
                    work.wait(AT_ONCE)
                return


class Watched:
    """Messages of gloo that a thread waits for, one after the other: who wants them can look around meanwhile.

    gloo cannot give up a wait without closing all connections of this process in the group. Others may use those.
    """

    def __init__(self, works: Sequence[Any]) -> None:
        self._done = SimpleQueue[Exception | None]()
        Thread(target=self._wait, args=(works,), name="shardwise messages", daemon=True).start()

    def _wait(self, works: Sequence[Any]) -> None:
        for work in works:
            try:
                work.wait(NEVER)
            except Exception as error:
                self._done.put(error)
                return
            self._done.put(None)

    def next(self, seconds: float) -> bool:
        """True once the next one is there, or was taken; False where it is not after so many seconds."""
        try:
            error = self._done.get(timeout=seconds)
        except Empty:
            return False
        if error is not None:
            raise error
        return True


def _answer(rank: int) -> str:
    return f"shardwise/answers/{rank}"


def _key(transport: str) -> str:
    return f"shardwise/broken/{transport}"
