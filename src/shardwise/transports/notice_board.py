"""What ranks tell each other in the store of their group once messages fail: who lives, and why something broke.

The store lies on one host, which may be out of reach: then questions stay without an answer, and nobody waits for one.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Sequence
from queue import Empty, SimpleQueue
from threading import Thread
from typing import TypeVar
from weakref import ref

import torch.distributed as dist
from torch.distributed import Store  # type: ignore[attr-defined]

T = TypeVar("T")
GRACE = 1.0  # seconds in which live ranks answer: all hear of a broken connection at once
LIMIT = 3.0  # seconds in which a store answers that can be reached


class NoticeBoard:
    """The store of a group, for notices of its ranks."""

    def __init__(self, group: dist.ProcessGroup) -> None:
        self._group = ref(group)
        self._late: Thread | None = None  # waits for an answer that did not come in time
        self.answers = True  # False if the store did not answer the last question

    def publish(self, transport: str, cause: str) -> None:
        """Write the cause down, unless there is one: what breaks later follows from the first."""
        self._ask(lambda store: store.compare_set(cause_key(transport), "", cause), None)

    def cause(self, transports: Iterable[str]) -> str | None:
        """The cause that a rank has published for one of these transports, if any."""
        return self._ask(lambda store: _cause(store, transports), None)

    def say_alive(self, rank: int) -> None:
        """That this rank lives: one that closed its connections without that has ended."""
        self._ask(lambda store: store.set(_answer_key(rank), "here"), None)

    def silent_ranks(self, rank: int, ranks: Sequence[int], transports: Sequence[str]) -> list[int]:
        """The ranks among these that do not answer after connections broke. Stops once a cause is published.

        If all answer, one of them is about to publish the cause. If the store does not, nobody can.
        """
        missing = [other for other in ranks if other != rank]
        self._ask(lambda store: _wait_for_answers(store, rank, missing, transports), None, takes=2 * GRACE)
        return list(missing)

    def _ask(self, question: Callable[[Store], T], otherwise: T, *, takes: float = 0.0) -> T:
        """The store's answer, which may take for ever: a thread waits for it. Meanwhile there are no more questions."""
        group, given = self._group(), SimpleQueue[tuple[bool, T]]()
        if group is None or (self._late is not None and self._late.is_alive()):
            return otherwise

        def ask() -> None:
            try:
                given.put((True, question(group.get_group_store())))
            except Exception:  # the store may be gone, too
                given.put((False, otherwise))

        thread = Thread(target=ask, name="shardwise store", daemon=True)
        thread.start()
        try:
            self.answers, answer = given.get(timeout=LIMIT + takes)
        except Empty:
            self.answers, self._late, answer = False, thread, otherwise
        return answer


def _cause(store: Store, transports: Iterable[str]) -> str | None:
    for key in map(cause_key, transports):
        if store.check([key]):
            return str(store.get(key).decode(errors="replace"))
    return None


def _wait_for_answers(store: Store, rank: int, missing: list[int], transports: Sequence[str]) -> None:
    """Take the ranks that answer out of those that are missing."""
    store.set(_answer_key(rank), "here")
    end = time.monotonic() + GRACE
    while _cause(store, transports) is None and time.monotonic() < (end if missing else end + GRACE):
        time.sleep(0.01)
        missing[:] = [other for other in missing if not store.check([_answer_key(other)])]


def _answer_key(rank: int) -> str:
    return f"shardwise/answers/{rank}"


def cause_key(transport: str) -> str:
    """Where the cause of a failure lies in the store of a group."""
    return f"shardwise/broken/{transport}"
