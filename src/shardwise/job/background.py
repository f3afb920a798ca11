"""Work beside the caller: in a thread of its own and, with CUDA, on a stream of its own."""

from __future__ import annotations

import atexit
import logging
import os
from collections.abc import Callable
from concurrent.futures import Future, wait
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from queue import SimpleQueue
from threading import Thread
from typing import Any
from weakref import WeakSet

import torch

from shardwise.transports import GroupTransport
from shardwise.transports.endpoint import as_here

AT_EXIT, BROKEN_OFF = 5.0, 3.0  # seconds that a process which ends waits for a run, and for its thread to give up

log = logging.getLogger("shardwise")


class OwnStream:
    """A stream beside the caller's. Without CUDA there is none, and nothing to wait for."""

    def __init__(self) -> None:
        self._stream: torch.cuda.Stream | None = None

    def after_caller(self) -> AbstractContextManager[Any]:
        """Use it, in another thread, after all that the caller's stream does until now."""
        if torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
            self._stream = self._stream or torch.cuda.Stream()  # type: ignore[no-untyped-call]
            self._stream.wait_stream(torch.cuda.current_stream())
        return nullcontext() if self._stream is None else torch.cuda.stream(self._stream)

    def before_caller(self) -> None:
        """What the caller's stream does from now on comes after all that was done here."""
        if self._stream is not None:
            torch.cuda.current_stream().wait_stream(self._stream)


class OwnThread:
    """A thread that waits for work. Who gives it some does not wait for a thread to start, nor for its first lines."""

    def __init__(self) -> None:
        self._work, self._process = None, None

    _work: SimpleQueue[Callable[[], None] | None] | None
    _process: int | None

    def run(self, work: Callable[[], None]) -> None:
        """After all that it was given before. A RuntimeError says that the system has no thread left."""
        if self._work is None or self._process != os.getpid():  # a fork has no thread of it
            queue = SimpleQueue[Callable[[], None] | None]()
            Thread(target=_work_off, args=(queue,), name="shardwise run", daemon=True).start()
            self._work, self._process = queue, os.getpid()
        self._work.put(work)

    def __del__(self) -> None:
        if self._work is not None:
            self._work.put(None)


def _work_off(queue: SimpleQueue[Callable[[], None] | None]) -> None:
    while (work := queue.get()) is not None:
        work()
        del work  # or what it holds would be kept until the next


class BackgroundRun:
    """Work that uses a transport of its own, in a thread. An error that nobody has seen is logged in the end."""

    def __init__(
        self, work: Callable[[], None], transport: GroupTransport, thread: OwnThread, stream: OwnStream
    ) -> None:
        self._transport, self._thread, self._stream, self._process = transport, thread, stream, os.getpid()
        self.future, self._seen = Future[None](), False
        self._work: Callable[[], None] | None = work
        _runs.add(self)

    def start(self) -> None:
        """Start the work, once. (Who starts it keeps the run first: an interrupt must not lose a thread.)"""
        work, self._work, on_stream = self._work, None, self._stream.after_caller()
        assert work is not None, "not started before"

        def run() -> None:
            with on_stream:
                work()

        try:
            self._thread.run(partial(self._run, as_here(run)))
        except RuntimeError:  # no thread is left: the others must not wait for this rank
            self._run(run)

    def _run(self, work: Callable[[], None]) -> None:
        try:
            work()
            self.future.set_result(None)
        except BaseException as error:
            self.future.set_exception(error)

    def error(self) -> BaseException | None:
        """Wait; why the work failed, if it did. From now on that is seen."""
        if self._work is not None:  # an interrupt came before it was started
            return None
        error = self.future.exception()
        self._seen = True
        self._stream.before_caller()
        return error

    def unseen_error(self) -> BaseException | None:
        """Wait; why the work failed, if nobody has seen that yet."""
        seen = self._seen
        error = self.error()
        return None if seen else error

    def end(self) -> None:
        """As its process ends: a thread that runs on while the interpreter is taken down could crash."""
        if self._process != os.getpid() or self._work is not None:  # a fork has no thread of it
            return
        wait([self.future], AT_EXIT)
        if not self.future.done():
            self._transport.fail("its process ended during an asynchronous run")
            wait([self.future], BROKEN_OFF)
        self._report()

    def _report(self) -> None:
        if self.future.done() and not self._seen and (error := self.future.exception()) is not None:
            self._seen = True
            log.error("an asynchronous run failed, and wait() was not called: %s: %s", type(error).__name__, error)

    def __del__(self) -> None:
        self._report()


_runs = WeakSet[BackgroundRun]()


@atexit.register
def _end_all() -> None:
    for run in list(_runs):
        run.end()


class RunHandle:
    """An asynchronous run of a `Resharder`. Until `wait` has returned, do not read or write the target.

    >>> import shardwise as sw
    >>> from shardwise.testing import on_ranks
    >>> def work(rank):
    ...     source, target = sw.ShardedTensor(torch.ones(2, 2), "4x2/S0@2"), sw.empty("4x2/S1@2")
    ...     handle = sw.Resharder({"w": source}, {"w": target}).run(async_op=True)
    ...     source.local_tensor().fill_(2)  # trains on
    ...     handle.wait()
    ...     return target.local_tensor().flatten().tolist()
    >>> on_ranks(2, work)
    [[1.0, 1.0, 1.0, 1.0], [1.0, 1.0, 1.0, 1.0]]

    A process that ends waits 5 seconds for its runs, then breaks them off. Errors that nobody saw are logged.
    """

    def __init__(self, run: BackgroundRun) -> None:
        self._run = run

    def wait(self) -> None:
        """Wait until all values are in the target; raise the error if the run failed."""
        error = self._run.error()
        if error is not None:
            raise error

    def done(self) -> bool:
        """True if `wait` would return immediately."""
        return self._run.future.done()
