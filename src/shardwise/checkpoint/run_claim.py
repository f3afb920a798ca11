"""The right of one job to write to the folder of a run.

A lock keeps other jobs out as long as this process lives. Object stores have no locks, and those of some network file
systems are not shared between hosts. So there is also an entry with a random token, which every job replaces when it
starts, and reads before it saves: the job that started last goes on, and the others stop. That is proven only for saves
that begin after the entry of the other job can be seen.
"""

from __future__ import annotations

import os
from contextlib import suppress
from weakref import WeakSet, finalize

from shardwise.checkpoint.step_folders import remove_partial
from shardwise.errors import CheckpointError
from shardwise.storage.folders import OutputFolder
from shardwise.storage.locks import FileLock, WriterRecord

RUN_LOCK, ENTRY = ".run.lock", ".run.entry"
LONGEST_ENTRY = 4096
TRIES = 1000


class RunClaim:
    """Held until `release`, or until this process ends."""

    def __init__(self, folder: OutputFolder) -> None:
        self._folder, self._mine = folder, WriterRecord.mine(folder.run, folder.run, [])
        self._lock = None if folder.local is None else _locked(folder)
        self._release = finalize(self, _release, self._lock, os.getpid())
        _claims.add(self)
        try:
            remove_partial(folder, ENTRY)
            with folder.write(ENTRY, sums=False) as file:
                file.write(self._mine.line().encode())
        except BaseException:
            self.release()
            raise

    def check(self) -> None:
        """Refuse to write if another job has started here since."""
        data = self._folder.tail(ENTRY, LONGEST_ENTRY)
        if not data:
            raise CheckpointError(
                f"{self._folder.path_of(ENTRY)} was removed: it shows that no other job writes there. "
                f"Make a new Run, and leave the files alone whose names begin with a dot"
            )
        with suppress(ValueError, TypeError):
            entry = WriterRecord.read(data)
            if entry.run == self._mine.run:
                return
            raise CheckpointError(
                f"another job has taken over the run {self._folder.path} ({entry}): end this job, or the other one, "
                f"and give each a folder of its own"
            )
        raise CheckpointError(f"{self._folder.path_of(ENTRY)} is not an entry of a run: remove it, and make a new Run")

    def release(self) -> None:
        """Let another job write."""
        self._release()

    def forget(self) -> None:
        """In a process that was forked: the lock ends with the parent."""
        if self._lock is not None and self._release.detach() is not None:
            self._lock.forget()


def _locked(folder: OutputFolder) -> FileLock:
    assert folder.local is not None
    for _ in range(TRIES):
        folder.make()
        lock = FileLock.acquire(folder.local / RUN_LOCK, folder.path, "another job has the run")
        if lock.current:
            lock.write([WriterRecord.mine(folder.run, folder.run, [])])
            return lock
        lock.release(keep=True)  # its holder had just removed it
    raise CheckpointError(f"{folder.path_of(RUN_LOCK)} cannot be locked: other jobs keep removing it")


def _release(lock: FileLock | None, process: int) -> None:
    if lock is not None and process == os.getpid():
        lock.release(keep=False)


_claims = WeakSet[RunClaim]()


def _forget_all() -> None:
    for claim in list(_claims):
        claim.forget()


os.register_at_fork(after_in_child=_forget_all)
