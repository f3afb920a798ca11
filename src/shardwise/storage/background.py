"""Write orders that are carried out beside this process: by a process of its own, or by a thread."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
from collections.abc import Callable
from concurrent.futures import Future
from functools import partial
from itertools import count
from threading import Lock, Thread
from typing import Protocol
from weakref import finalize

from shardwise.errors import CheckpointError
from shardwise.storage.appending import Descriptor
from shardwise.storage.increments import Written
from shardwise.storage.locks import FileLock, WriteClaim
from shardwise.storage.orders import WriteOrder, carry_out

MAX_STDERR = 2**16  # bytes of what a writer that has ended said
NOTHING = Written(0, 0)


class Pending(Protocol):
    """An order that is carried out."""

    @property
    def lost(self) -> bool:
        """True if who carried it out has ended, and could not tell the other writers that it failed."""
        ...

    def done(self) -> bool:
        """True if `error` would return immediately."""
        ...

    def error(self) -> str | None:
        """Wait; why it failed, None if it did not."""
        ...

    def written(self) -> Written:
        """Wait; how much was written. Zero if it failed."""
        ...


class WriterProcess:
    """A process that writes for this one. It ends when it has done its work and this process has ended."""

    def __init__(self) -> None:
        self._numbers, self._lock = count(), Lock()
        self._answers = dict[int, str | None]()
        self._written = dict[int, Written]()
        self._lost: str | None = None
        try:
            self._stderr = Descriptor.of_memory("shardwise writer")
            self._socket, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
            finalize(self, self._socket.close)  # the writer ends when it has done its work
            with theirs:
                number = theirs.fileno()
                words = "-P", "-m", "shardwise.storage.writer_process", str(number)
                self._process = start_python(*words, socket=number, stderr=self._stderr.number, kind=OutlivingProcess)
        except OSError as error:
            raise CheckpointError(
                f"the process that writes checkpoints cannot be started with {sys.executable!r}: {error}. "
                f"Save without async_op=True, or set sys.executable to a Python interpreter"
            ) from error

    @property
    def usable(self) -> bool:
        """False if it has ended."""
        return self._lost is None and self._process.poll() is None

    def submit(self, order: WriteOrder, memory: int, index: bytes, lock: FileLock | None) -> Pending:
        """Let it carry out an order. `memory`: the descriptor of the file's contents. The lock goes to it."""
        number, text = next(self._numbers), order.to_json().encode()
        try:
            packet = {"number": number, "order": len(text), "lock": lock and str(lock.path), "umask": _umask()}
            whole = Descriptor.of_memory("shardwise order", text + index)
            files = [memory, whole.number, *([] if lock is None else [lock.number])]
            socket.send_fds(self._socket, [json.dumps(packet).encode()], files)
        except OSError as error:
            raise CheckpointError(f"the process that writes checkpoints takes no order: {error}") from error
        if lock is not None:
            lock.forget()
        return _Submitted(self, number)

    def answered(self, number: int, *, wait: bool) -> bool:
        """True if the order was carried out, or never will be."""
        if not self._lock.acquire(blocking=wait):  # another thread waits for an answer
            return number in self._answers
        try:
            while number not in self._answers and self._lost is None:
                if not self._receive(wait=wait):
                    return False
            return True
        finally:
            self._lock.release()

    def _receive(self, *, wait: bool) -> bool:
        try:
            packet = self._socket.recv(2**16, 0 if wait else socket.MSG_DONTWAIT)
        except BlockingIOError:
            return False
        except ConnectionError:
            packet = b""
        if packet:
            answer = json.loads(packet)
            self._written[answer["number"]] = Written(*answer["written"])
            self._answers[answer["number"]] = answer["error"]
        else:
            code, said = self._process.wait(), os.pread(self._stderr.number, MAX_STDERR, 0).decode(errors="replace")
            last = "".join(f": {line}" for line in said.splitlines()[-1:])
            self._lost = f"the process that writes checkpoints has ended: exit code {code}{last}"
        return True

    def error(self, number: int) -> str | None:
        """Why an order failed, None if it did not. Waits until that is known."""
        self.answered(number, wait=True)
        return self._answers.get(number, self._lost)

    def written(self, number: int) -> Written:
        """How much an order has written."""
        self.answered(number, wait=True)
        return self._written.get(number, NOTHING)

    def lost(self, number: int) -> bool:
        """True if it will never be known what became of an order."""
        return self._lost is not None and number not in self._answers


class OutlivingProcess(subprocess.Popen[bytes]):
    """May go on when this process ends: that is no reason for a warning."""

    def __del__(self) -> None:
        """Leave it alone."""


def start_python(
    *words: str, socket: int, stderr: int = subprocess.DEVNULL, kind: type[subprocess.Popen[bytes]] = subprocess.Popen
) -> subprocess.Popen[bytes]:
    """Run Python in a process of its own, which inherits a socket.

    It imports what this process would. Ctrl-C is not for it, and readers of our output do not wait for it.
    """
    return kind(
        [sys.executable, *words],
        env=os.environ | {"PYTHONPATH": os.pathsep.join(map(os.path.abspath, sys.path))},
        pass_fds=[socket],
        start_new_session=True,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=stderr,
    )


def _umask() -> int:
    """Of this process. (Only to set it tells it otherwise, and other threads may create files meanwhile.)"""
    with open("/proc/self/status") as lines:
        return int(next(line for line in lines if line.startswith("Umask:")).split()[1], 8)


class _Submitted:
    def __init__(self, process: WriterProcess, number: int) -> None:
        self._process, self._number = process, number

    @property
    def lost(self) -> bool:
        """True if the process has ended before."""
        return self._process.lost(self._number)

    def done(self) -> bool:
        """True if `error` would return immediately."""
        return self._process.answered(self._number, wait=False)

    def error(self) -> str | None:
        """Wait; why it failed, None if it did not."""
        return self._process.error(self._number)

    def written(self) -> Written:
        """Wait; how much was written."""
        return self._process.written(self._number)


class NotSubmitted:
    """An order that nobody carries out."""

    lost = True

    def __init__(self, why: str) -> None:
        self._why = why

    def done(self) -> bool:
        """It is over."""
        return True

    def error(self) -> str:
        """Why nobody could be asked to."""
        return self._why

    def written(self) -> Written:
        """Nothing."""
        return NOTHING


class WriterThread:
    """Carries out one order in a thread of this process: for object stores, whose drivers live here.

    It begins when the one `before` it has ended, as a process does: the steps of a run become whole in order.
    """

    lost = False  # it ends with this process

    def __init__(
        self,
        order: WriteOrder,
        memory: memoryview,
        index: bytes,
        lock: FileLock | None,
        before: Pending | None = None,
    ) -> None:
        self._future = Future[Written]()
        claim = WriteClaim() if lock is None else WriteClaim(lock, unfinished=True)
        work = partial(carry_out, order, memory, index, claim)
        Thread(target=self._run, args=(work, before), name="shardwise save").start()

    def _run(self, work: Callable[[], Written], before: Pending | None) -> None:
        try:
            if before is not None:
                before.error()
            self._future.set_result(work())
        except BaseException as error:
            self._future.set_exception(error)

    def done(self) -> bool:
        """True if `error` would return immediately."""
        return self._future.done()

    def error(self) -> str | None:
        """Wait; why it failed, None if it did not."""
        error = self._future.exception()
        return None if error is None else str(error) or type(error).__name__

    def written(self) -> Written:
        """Wait; how much was written."""
        return NOTHING if self._future.exception() is not None else self._future.result()
