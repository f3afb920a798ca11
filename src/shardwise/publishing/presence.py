"""Who lives: every process raises a counter at the meeting point once a second. No clock is compared with another's."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Iterable
from contextlib import suppress
from itertools import count

from shardwise.errors import ExchangeError, RefusedValueError
from shardwise.publishing.meeting import MeetingLostError, MeetingPoint

BEAT = 1.0  # seconds
log = logging.getLogger("shardwise")


def check_patience(patience: object) -> None:
    """Refuse to give a job up between two of its beats."""
    if not isinstance(patience, int | float) or not 3 * BEAT <= patience < float("inf"):
        raise RefusedValueError(
            f"patience={patience!r}: give seconds, at least {3 * BEAT:g}: jobs give a sign of life every {BEAT:g} s"
        )


class EverySecond:
    """A thread that does its work once a second, `at_once` or a second later for the first time.

    An error is logged: the next time may be better.
    """

    def __init__(
        self, work: Callable[[], None], name: str, at_end: Callable[[], None] = lambda: None, *, at_once: bool = True
    ) -> None:
        self._work, self._at_end, self._at_once, self._stop = work, at_end, at_once, threading.Event()
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    def _run(self) -> None:
        stopped = not self._at_once and self._stop.wait(BEAT)
        while not stopped:
            try:
                self._work()
            except MeetingLostError:
                pass  # it may come back
            except Exception:
                log.exception("shardwise: a periodic task failed, and is tried again")
            stopped = self._stop.wait(BEAT)
        with suppress(MeetingLostError):
            self._at_end()

    def stop(self) -> None:
        """End the thread. It may call this itself."""
        self._stop.set()
        if self._thread is not threading.current_thread():
            self._thread.join(timeout=2 * BEAT)


class Beat(EverySecond):
    """Raises a counter, beside which stands the address of the process. It does nothing else that could take long."""

    def __init__(self, meeting: MeetingPoint, path: str, address: str) -> None:
        numbers = count(1)
        super().__init__(
            lambda: meeting.put(path, [next(numbers), address]), "shardwise beat", lambda: meeting.delete(path)
        )


class Watch:
    """For how long counters have stood still, since this process first looked."""

    def __init__(self, meeting: MeetingPoint) -> None:
        self._meeting = meeting
        self._seen = dict[str, tuple[object, float]]()  # by path: the last value, and when it became that
        self._lock = threading.Lock()

    def still(self, path: str) -> float:
        """For how many seconds a counter has stood still. What cannot be read stands still."""
        value: object = None
        with suppress(MeetingLostError):
            value = self._meeting.get(path)
        now = time.monotonic()
        with self._lock:
            before, since = self._seen.get(path, (object(), now))
            if value is not None and value != before:
                since = now
            self._seen[path] = (before if value is None else value), since
        return now - since

    def check(self, paths: Iterable[str], patience: float, who: str) -> None:
        """Raise an error if one of them stood still for longer than `patience`."""
        for path in paths:
            if self.still(path) > patience:
                raise ExchangeError(f"{who} gave no sign of life for {patience:g} s")

    def forget(self, paths: Iterable[str]) -> None:
        """Stop watching these counters."""
        with self._lock:
            for path in paths:
                self._seen.pop(path, None)
