"""Saves that are written beside the training: their handles, and who writes them."""

from __future__ import annotations

import atexit
import logging
import os
import time
from collections import deque
from dataclasses import dataclass
from threading import Lock
from weakref import WeakSet

from shardwise.checkpoint.staging import SaveMemory, StagedFile
from shardwise.errors import CheckpointError
from shardwise.job.agree import Callers
from shardwise.job.session import resource_of
from shardwise.job.snapshot import segment_of
from shardwise.planning import size
from shardwise.quoting import in_line
from shardwise.storage.background import NotSubmitted, Pending, WriterProcess, WriterThread
from shardwise.storage.locks import FileLock
from shardwise.storage.orders import WriteOrder, abandon

log = logging.getLogger("shardwise")


@dataclass(frozen=True)
class SaveReport:
    """What all ranks of a save have written, and what they have not because an earlier checkpoint has it, in bytes.

    >>> SaveReport(written=4096, referenced=2**20)
    SaveReport(4.00 KiB written, 1.00 MiB in earlier checkpoints)
    """

    written: int
    referenced: int

    def __repr__(self) -> str:
        return f"SaveReport({size(self.written)} written, {size(self.referenced)} in earlier checkpoints)"


class SaveHandle:
    """An asynchronous save. The state may be changed. The checkpoint is complete after `wait` has returned.

    >>> import shardwise as sw
    >>> import torch
    >>> state = {"w": torch.ones(4)}
    >>> handle = sw.checkpoint.save(state, "memory://step-1", async_op=True)
    >>> _ = state["w"].zero_()  # trains on
    >>> handle.wait()
    >>> sw.checkpoint.open("memory://step-1")["w"].read()
    tensor([1., 1., 1., 1.])
    """

    def __init__(self, saves: RunningSaves, save: Submitted) -> None:
        self._saves, self.save = saves, save
        self._error: CheckpointError | None = None
        self._report: SaveReport | None = None
        self._lock = Lock()
        self._stall = self._waited = 0.0

    @property
    def stall(self) -> float:
        """Seconds that the caller waited for `save`."""
        return self._stall

    @property
    def waited(self) -> float:
        """Of these, seconds in which it waited for an earlier save."""
        return self._waited

    def stalled(self, seconds: float, waited: float) -> None:
        """How long `save` took."""
        self._stall, self._waited = seconds, waited

    def done(self) -> bool:
        """True if `wait` would not have to wait for the disk: the checkpoint is complete, or the save has failed."""
        return self not in self._saves.running or self.save.pending.done()

    @property
    def error(self) -> CheckpointError | None:
        """Why it failed on any rank. None if it did not, or if nobody has waited for it yet."""
        return self._error

    @property
    def report(self) -> SaveReport | None:
        """How much was written. None if nobody has waited for it yet, or if it failed."""
        return self._report

    def wait(self) -> None:
        """Wait until the checkpoint is complete. Every rank calls. An error of one is raised on all."""
        with self._lock:  # several threads may wait
            if self in self._saves.running:
                self._error, self._report = self._saves.collect(self, self.save)
        if self._error is not None:
            raise self._error

    def forget(self) -> None:
        """In a process that was forked: the save belongs to the parent."""
        self._lock = Lock()
        self._error = CheckpointError(
            f"the asynchronous save to {in_line(self.save.order.folder)} was started by the process that this one was "
            f"forked from: wait for it there"
        )

    def __repr__(self) -> str:
        state = "running" if self in self._saves.running else "failed" if self._error else "complete"
        return f"SaveHandle({in_line(self.save.order.folder)!r}, {state})"


@dataclass(frozen=True)
class Submitted:
    """A save of this rank that somebody writes. The file is in memory until then."""

    callers: Callers
    order: WriteOrder
    file: StagedFile
    pending: Pending


class RunningSaves:
    """The asynchronous saves of a group that nobody has waited for yet, and who writes for this rank."""

    def __init__(self) -> None:
        self.memory, self.running = SaveMemory(), deque[SaveHandle]()
        self._process: WriterProcess | None = None
        _all.add(self)

    @staticmethod
    def of(callers: Callers) -> RunningSaves:
        """Those of the callers."""
        return resource_of(callers.transport, RunningSaves, RunningSaves)

    def make_room(self, most: int) -> float:
        """Wait for the oldest ones, until less than `most` run; the seconds that took. All ranks call.

        If one has failed, that is raised.
        """
        begin = time.monotonic()
        while len(self.running) >= most:
            self.running[0].wait()
        return time.monotonic() - begin

    def process(self) -> WriterProcess:
        """The one that writes for this rank. It is started once."""
        if self._process is None or not self._process.usable:
            self._process = WriterProcess()
        return self._process

    def submit(
        self, callers: Callers, order: WriteOrder, file: StagedFile, index: bytes, lock: FileLock | None
    ) -> SaveHandle:
        """Let it be written. The lock goes to who writes."""
        try:
            pending = self._submit(order, file, index, lock)
        except CheckpointError as error:  # of this rank only: `wait` raises it on all
            pending = NotSubmitted(str(error))
            if lock is not None:
                lock.release(keep=True)  # its record tells the next save what this one leaves
        handle = SaveHandle(self, Submitted(callers, order, file, pending))
        self.running.append(handle)
        return handle

    def _submit(self, order: WriteOrder, file: StagedFile, index: bytes, lock: FileLock | None) -> Pending:
        segment = segment_of(file.memory)
        if segment is None or order.out.local is None:  # drivers of object stores live in this process
            before = self.running[-1].save.pending if self.running else None
            return WriterThread(order, file.view, index, lock, before)
        return self.process().submit(order, segment.file, index, lock)

    def collect(self, handle: SaveHandle, save: Submitted) -> tuple[CheckpointError | None, SaveReport | None]:
        """Wait for a save; why it failed on any rank, or how much all have written. All ranks call."""
        why = save.pending.error()
        if why is not None and save.pending.lost:
            abandon(save.order, why)
        _, by_rank = save.callers.tell(
            lambda: (None, (why, save.pending.written()))
        )  # until then it is not known to have ended well
        self.running.remove(handle)
        if not save.file.kept:
            self.memory.give_back(save.file.memory)
        failed = {rank: why for rank, (why, _) in by_rank.items() if why is not None}
        if not failed:
            written, referenced = zip(*(amounts for _, amounts in by_rank.values()), strict=True)
            return None, SaveReport(sum(written), sum(referenced))
        rank, why = next(reversed(failed.items()))  # the first one may only have heard of another's failure
        where = "" if save.callers.alone else f"on rank {rank}, "
        return CheckpointError(f"the asynchronous save to {in_line(save.order.folder)} failed: {where}{why}"), None

    def release(self) -> int:
        """Free the memory that no save uses; the number of bytes."""
        return self.memory.release()

    def forget(self) -> None:
        """In a process that was forked: all of it belongs to the parent."""
        for handle in self.running:
            handle.forget()
        self.memory, self._process = SaveMemory(), None
        self.running.clear()

    def report(self) -> None:
        """Log the errors that nobody has seen."""
        for handle in self.running:
            save = handle.save
            if save.pending.done() and (why := save.pending.error()) is not None:
                log.error("an asynchronous save to %s failed, and wait() was not called: %s", save.order.folder, why)


_all = WeakSet[RunningSaves]()


def _forget_all() -> None:
    for saves in list(_all):
        saves.forget()


os.register_at_fork(after_in_child=_forget_all)


@atexit.register
def _report_all() -> None:
    for saves in list(_all):
        saves.report()
