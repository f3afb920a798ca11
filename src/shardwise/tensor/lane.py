"""Work of one wire, done in the order in which it was asked for, beside the thread that asked."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from threading import Lock, Thread
from typing import Any

import torch

from shardwise.exchange import Wire

Task = tuple[Callable[[], Any], Future[Any]]


class Lane:
    """Runs tasks one after the other, in a thread that lives as long as there are any."""

    def __init__(self) -> None:
        self._tasks = deque[Task]()
        self._lock = Lock()
        self._busy = False

    def submit(self, work: Callable[[], Any]) -> Future[Any]:
        """Do it after all that was submitted before."""
        future = Future[Any]()
        with self._lock:
            self._tasks.append((_on_same_device(work), future))
            if not self._busy:
                self._busy = True
                Thread(target=self._run, name="shardwise", daemon=True).start()
        return future

    def run(self, work: Callable[[], Any]) -> Any:
        """Do it and wait; right here where nothing else is under way."""
        return work() if self.idle else self.submit(work).result()

    @property
    def idle(self) -> bool:
        """True where nothing is under way."""
        return not self._busy

    def _run(self) -> None:
        while True:
            with self._lock:
                if not self._tasks:
                    self._busy = False
                    return
                work, future = self._tasks.popleft()
            try:
                future.set_result(work())
            except BaseException as error:
                future.set_exception(error)


def _on_same_device(work: Callable[[], Any]) -> Callable[[], Any]:
    """The current device and stream belong to a thread: take those of the caller along."""
    if not torch.cuda.is_available():
        return work
    stream = torch.cuda.current_stream()

    def run() -> Any:
        with torch.cuda.stream(stream):
            return work()

    return run


def lane_of(wire: Wire) -> Lane:
    """The order of a wire's exchanges."""
    lane: Lane = wire.memory.setdefault("lane", Lane())
    return lane
