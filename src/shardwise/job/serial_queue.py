"""Work of one transport, done in the order in which it was asked for, beside the thread that asked."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from contextlib import nullcontext
from contextvars import copy_context
from threading import Condition, Thread
from typing import Any, TypeVar

import torch

from shardwise.exchange import Transport

T = TypeVar("T")
Task = tuple[Callable[[], Any], Future[Any]]


class SerialQueue:
    """Runs tasks one after the other. All that a task waits for is within one timeout of the transport.

    Every task that is submitted brings a thread, which does those before it too; or, where the order of messages is all
    that tells them apart, who waits does them, so that calls reach the transport in the order of the program.
    """

    def __init__(self, transport: Transport) -> None:
        self._threaded, self._budget = transport.tagged, transport.budget
        self._tasks = deque[Task]()
        self._turn = Condition()
        self._busy = False  # a task is being done

    @staticmethod
    def of(transport: Transport) -> SerialQueue:
        """The queue of a transport."""
        return transport.resource(SerialQueue, lambda: SerialQueue(transport))

    @property
    def idle(self) -> bool:
        """True where nothing is under way."""
        return not self._busy and not self._tasks

    def submit(self, work: Callable[[], T]) -> Future[T]:
        """Do it after all that was submitted before."""
        future = Pending[T](self)
        with self._turn:
            self._tasks.append((_as_here(lambda: self._limited(work)), future))
        if self._threaded:
            Thread(target=self._drain, args=(future,), name="shardwise", daemon=True).start()
        return future

    def run(self, work: Callable[[], T]) -> T:
        """Do it after all that was submitted before, and wait for it; right here where nothing is under way."""
        if not self.idle:
            return self.submit(work).result()
        with self._turn:
            self._busy = True
        try:
            return self._limited(work)
        finally:
            with self._turn:
                self._busy = False
                self._turn.notify_all()

    def _limited(self, work: Callable[[], T]) -> T:
        with self._budget():
            return work()

    def _drain(self, until: Future[Any]) -> None:
        """Do tasks in their order until this one is done."""
        while not until.done():
            with self._turn:
                self._turn.wait_for(lambda: not self._busy)
                if until.done():
                    return
                work, future = self._tasks.popleft()
                self._busy = True
            try:
                future.set_result(work())
            except BaseException as error:
                future.set_exception(error)
            finally:
                with self._turn:
                    self._busy = False
                    self._turn.notify_all()


class Pending(Future[T]):
    """A future of a lane. Where the lane has no thread of its own, who waits does the work."""

    def __init__(self, lane: SerialQueue) -> None:
        super().__init__()
        self._lane = lane

    def result(self, timeout: float | None = None) -> T:
        """The result, or the error."""
        if not self._lane._threaded:
            self._lane._drain(self)
        return super().result(timeout)


def _as_here(work: Callable[[], T]) -> Callable[[], T]:
    """Inference mode, stream and budget belong to a thread: take those of the caller along."""
    context = copy_context()
    inference = torch.is_inference_mode_enabled()
    stream = torch.cuda.current_stream() if torch.cuda.is_initialized() else None  # type: ignore[no-untyped-call]

    def run() -> T:
        with torch.inference_mode(inference), torch.cuda.stream(stream) if stream else nullcontext():
            return context.run(work)

    return run
