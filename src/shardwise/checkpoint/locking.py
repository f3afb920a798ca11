"""One writer at a time: a lock file that the system frees when its holder dies, with a record of what is written.

The next writer reads the record of one that died, and knows by name what it left.
"""

from __future__ import annotations

import errno
import fcntl
import json
import os
import re
import stat
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from platform import node
from time import time

from shardwise.errors import CheckpointError
from shardwise.quoting import brief

NO_LOCKS = (errno.ENOSYS, errno.EOPNOTSUPP, errno.ENOLCK, errno.EINVAL, errno.EBADF)  # the file system has none
FLAGS = os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC  # links are not followed, pipes are not waited for
MOST = 2**26  # bytes of a record
TOKEN = re.compile(r"[0-9a-f]{16}")
DAY = 86_400  # seconds after which a record of another host counts as abandoned, though that host may not share locks


@dataclass(frozen=True)
class Record:
    """A writer: where and since when it runs, the token of its run, that of its files, and the files to be replaced."""

    host: str
    process: int
    since: float
    run: str
    token: str
    old: list[str]

    @staticmethod
    def mine(run: str, token: str, old: list[str]) -> Record:
        """Of this process."""
        return Record(node(), os.getpid(), time(), run, token, old)

    @staticmethod
    def read(line: bytes) -> Record:
        """Of a line; a ValueError or TypeError where it is none."""
        found = Record(**json.loads(line))
        texts = (found.host, found.run, found.token, *found.old)
        kinds = isinstance(found.old, list), isinstance(found.since, int | float)
        if not all(kinds) or not all(isinstance(text, str) for text in texts):
            raise TypeError("a field has another type")
        if not TOKEN.fullmatch(found.run) or not TOKEN.fullmatch(found.token):
            raise ValueError("a token has 16 hexadecimal digits")
        return found

    def line(self) -> str:
        """In the file."""
        return f"{json.dumps(asdict(self))}\n"

    def __str__(self) -> str:
        return f"process {brief(self.process)} on host {brief(self.host)}"


class Lock:
    """A lock file, which this process holds until `release`. `records` are those of writers that died."""

    def __init__(self, path: Path, what: str) -> None:
        self._path = path
        self._file = _open(path)
        try:
            self._hold(what)
        except BaseException:
            os.close(self._file)
            raise
        self.records, self.owner = _records(self._file), os.fstat(self._file).st_uid

    def _hold(self, what: str) -> None:
        try:
            fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            by = "".join(f" ({record})" for record in _records(self._file)[-1:])
            raise CheckpointError(
                f"another save or conversion is writing to {what}{by}: wait until it ends, or give another path"
            ) from None
        except OSError as error:
            if error.errno not in NO_LOCKS:
                raise

    @property
    def current(self) -> bool:
        """False where the file was removed before it was locked: its holder had just ended."""
        with suppress(FileNotFoundError):
            return os.path.samestat(os.lstat(self._path), os.fstat(self._file))
        return False

    def write(self, records: list[Record]) -> None:
        """Record these; not where the file is another user's."""
        text = "".join(record.line() for record in records).encode()
        with suppress(OSError):  # it is needed only if this process dies
            os.ftruncate(self._file, 0)
            os.pwrite(self._file, text, 0)

    def release(self, *, keep: bool) -> None:
        """Let others write; `keep` the record of what is left."""
        if not keep and self.current:
            with suppress(OSError):
                os.unlink(self._path)
        with suppress(OSError):
            fcntl.flock(self._file, fcntl.LOCK_UN)  # also for processes that were forked meanwhile
        os.close(self._file)


def _open(path: Path) -> int:
    """The lock file, made where there is none; refused where it is anything but a plain file under one name."""
    try:
        file = os.open(path, os.O_RDWR | os.O_CREAT | FLAGS, 0o666)
    except PermissionError:
        file = os.open(path, os.O_RDONLY | FLAGS)  # another user's, which can be locked all the same
    except OSError as error:
        if error.errno not in (errno.ELOOP, errno.EISDIR, errno.ENXIO):
            raise
        raise CheckpointError(f"{path} is not a lock file of shardwise: remove it, or give another path") from error
    status = os.fstat(file)
    if not stat.S_ISREG(status.st_mode) or status.st_nlink > 1:
        os.close(file)
        raise CheckpointError(f"{path} is not a lock file of shardwise: remove it, or give another path")
    return file


def _records(file: int) -> list[Record]:
    """As far as they can be read: a line may have been cut off."""
    found = list[Record]()
    for line in os.pread(file, MOST, 0).splitlines():
        with suppress(ValueError, TypeError, RecursionError):
            found.append(Record.read(line))
    return found
