"""A lock that allows one writer at a time in a directory.

The lock file is freed by the system when its holder dies. It records what is being written, so that the next writer
knows by name what a dead one left behind.
"""

from __future__ import annotations

import errno
import fcntl
import json
import os
import re
import stat
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, field
from os import geteuid
from pathlib import Path
from platform import node
from time import time

from shardwise.errors import CheckpointError
from shardwise.quoting import brief
from shardwise.storage.appending import Descriptor
from shardwise.storage.folders import (
    ASIDE,
    FLAGS,
    INDEXES,
    OutputFolder,
    indexed_files,
    sidecar_name,
    token_of,
    writable,
)
from shardwise.storage.sums import data_name

NO_LOCKS = (errno.ENOSYS, errno.EOPNOTSUPP, errno.ENOLCK, errno.EINVAL, errno.EBADF)  # the file system has none
PARTIAL = re.compile(r"\..+\.([0-9a-f]{16})\.part", re.DOTALL)  # a file that is being written, or was interrupted
MARK = re.compile(r"\.([0-9a-f]{16})\.[0-9]+\.(?:done|failed)")  # by which a writer tells what became of its file
MAX_RECORDS = 2**26  # bytes of records in a lock file
LOCK, TRIES = ".shardwise.lock", 1000
TOKEN = re.compile(r"[0-9a-f]{16}")
DAY = 86_400  # seconds after which a record of another host counts as abandoned: that host may not share locks


@dataclass(frozen=True)
class WriterRecord:
    """A writer: its host, process and start time, the tokens of its run and of its files, and the files it replaces."""

    host: str
    process: int
    since: float
    run: str
    token: str
    old: list[str]

    @staticmethod
    def mine(run: str, token: str, old: list[str]) -> WriterRecord:
        """The record of this process."""
        return WriterRecord(node(), os.getpid(), time(), run, token, old)

    @staticmethod
    def read(line: bytes) -> WriterRecord:
        """A record from its line; ValueError or TypeError if it is not one."""
        record = WriterRecord(**json.loads(line))
        strings = (record.host, record.run, record.token, *record.old)
        typed = type(record.old) is list and type(record.since) in (int, float)
        if not typed or not all(isinstance(one, str) for one in strings):
            raise TypeError("a field has the wrong type")
        if not TOKEN.fullmatch(record.run) or not TOKEN.fullmatch(record.token):
            raise ValueError("a token has 16 hexadecimal digits")
        return record

    def line(self) -> str:
        """The line in the lock file."""
        return f"{json.dumps(asdict(self))}\n"

    def __str__(self) -> str:
        return f"process {brief(self.process)} on host {brief(self.host)}"


class FileLock:
    """A lock file that this process holds until `release`, or as long as it has this. `records`: of dead writers."""

    def __init__(self, path: Path, file: Descriptor) -> None:
        self.path, self._file = path.absolute(), file
        self.records, self.owner = _records(file.number), os.fstat(file.number).st_uid

    @staticmethod
    def acquire(path: Path, what: str, busy: str = "another save or conversion is writing to") -> FileLock:
        """Create the file if need be, and lock it; refused while another process holds it, which is `busy`."""
        file = _open(path)
        _acquire(file.number, what, busy)
        return FileLock(path, file)

    @property
    def number(self) -> int:
        """The descriptor. Whoever has a copy of it holds the lock."""
        return self._file.number

    def forget(self) -> None:
        """Close the file, without unlocking it for others that have the descriptor."""
        del self._file

    @property
    def current(self) -> bool:
        """False if the file was removed before it was locked: its holder had just ended."""
        with suppress(FileNotFoundError, NotADirectoryError):
            return os.path.samestat(os.lstat(self.path), os.fstat(self.number))
        return False

    def write(self, records: list[WriterRecord]) -> None:
        """Write these records; skipped if the file belongs to another user."""
        text = "".join(record.line() for record in records).encode()
        with suppress(OSError):  # they are needed only if this process dies
            os.ftruncate(self.number, 0)
            os.pwrite(self.number, text, 0)

    def release(self, *, keep: bool) -> None:
        """Let others write; `keep` the file with its records."""
        if not keep and self.current:
            with suppress(OSError):
                os.unlink(self.path)
        with suppress(OSError):
            fcntl.flock(self.number, fcntl.LOCK_UN)  # also for processes that were forked meanwhile
        self.forget()


def _acquire(file: int, what: str, busy: str) -> None:
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        by = "".join(f" ({record})" for record in _records(file)[-1:])
        raise CheckpointError(f"{busy} {what}{by}: wait until it ends, or give another path") from None
    except OSError as error:
        if error.errno not in NO_LOCKS:
            raise


def _open(path: Path) -> Descriptor:
    """Open or create the lock file; refused unless it is a regular file with a single name."""
    try:
        file = Descriptor(os.open(path, os.O_RDWR | os.O_CREAT | FLAGS, 0o666))
    except PermissionError:
        file = Descriptor(os.open(path, os.O_RDONLY | FLAGS))  # it belongs to another user, but can be locked
    except OSError as error:
        if error.errno not in (errno.ELOOP, errno.EISDIR, errno.ENXIO):
            raise
        raise CheckpointError(f"{path} is not a lock file of shardwise: remove it, or give another path") from error
    status = os.fstat(file.number)
    if not stat.S_ISREG(status.st_mode) or status.st_nlink > 1:
        raise CheckpointError(f"{path} is not a lock file of shardwise: remove it, or give another path")
    return file


def _records(file: int) -> list[WriterRecord]:
    """The records that can be read: a line may be truncated."""
    records = list[WriterRecord]()
    for line in os.pread(file, MAX_RECORDS, 0).splitlines():
        with suppress(ValueError, TypeError, RecursionError):
            records.append(WriterRecord.read(line))
    return records


# --- the right to write -----------------------------------------------------------------------------------------------


@dataclass(eq=False)
class WriteClaim:
    """The right to write to a directory or a file, of the process that has the lock.

    `unfinished`: keep a record of the files for the next writer. `others`: records of writers on other hosts.
    """

    lock: FileLock | None = None
    others: list[WriterRecord] = field(default_factory=list)
    unfinished: bool = False

    @staticmethod
    def taken_over(path: Path, file: int, run: str) -> WriteClaim:
        """That of a run, which another process gave away with the descriptor of the lock."""
        lock = FileLock(path, Descriptor(file))
        return WriteClaim(lock, [record for record in lock.records if record.run != run], unfinished=True)

    def give_away(self) -> FileLock | None:
        """The lock, for another process that goes on writing. It is held as long as anybody has the descriptor."""
        lock, self.lock = self.lock, None
        return lock

    def end(self) -> None:
        """Let others write."""
        if self.lock is None:
            return
        if self.others and not self.unfinished:
            self.lock.write(self.others)
        self.lock.release(keep=self.unfinished or bool(self.others))
        self.lock = None


@contextmanager
def claim_folder(folder: OutputFolder, token: str, name: str | None = None) -> Iterator[WriteClaim]:
    """No other save or conversion writes to the directory, or to the file `name`, until this ends.

    Partial files of dead writers are removed, and so are their other files, unless they have this `token` and can be
    reused. Object stores have no locks: concurrent writers are not detected there.
    """
    if folder.local is None:
        yield WriteClaim()
        return
    lock, made = _lock(folder, folder.local, LOCK if name is None else sidecar_name(name, "lock"))
    claim = WriteClaim(lock, lock.records)
    try:
        claim.others = _clean_up(folder, lock, token)
        old = sorted(indexed_files(folder, INDEXES[:2])) if name is None else []
        lock.write([*claim.others, WriterRecord.mine(folder.run, token, old)])
        claim.unfinished = True
        yield claim
        claim.unfinished, made = False, []
    finally:
        claim.end()
        for one in made:
            with suppress(OSError):
                one.rmdir()


def _lock(folder: OutputFolder, path: Path, name: str) -> tuple[FileLock, list[Path]]:
    """The lock, and the directories that were made for it."""
    made = list[Path]()
    for _ in range(TRIES):
        made += folder.make()
        with (
            writable(folder.path_of(name)),
            suppress(FileNotFoundError),
        ):  # another writer failed, and removed the directory
            what = folder.path if name == LOCK else folder.path_of(name[1 : -len(".lock")])
            lock = FileLock.acquire(path / name, what)
            if lock.current:
                return lock, made
            lock.release(keep=True)
    raise CheckpointError(f"{folder.path_of(name)} cannot be locked: other writers keep removing it")


def _clean_up(folder: OutputFolder, lock: FileLock, token: str) -> list[WriterRecord]:
    """Remove the files of dead writers; returns the records of writers that may still run on another host."""
    mine = WriterRecord.mine(folder.run, token, [])
    dead = [one for one in lock.records if one.host == mine.host or mine.since - one.since > DAY]
    dead = dead if lock.owner == geteuid() else []
    runs, tokens = {one.run for one in dead}, {one.token for one in dead} - {token}
    old = {name for one in dead for name in one.old}
    needed = indexed_files(folder, [*INDEXES[:2], *ASIDE.values()]) if dead else set[str]()
    for name in folder.names() if dead else ():
        partial, mark, data = PARTIAL.fullmatch(name), token_of(name), data_name(name)
        unneeded = mark is not None and data not in needed and (mark in tokens or data in old)
        told = MARK.fullmatch(name)
        if unneeded or (partial and partial[1] in runs) or (told and told[1] in tokens):
            folder.discard(name, lock.owner)
    return [one for one in lock.records if one not in dead]
