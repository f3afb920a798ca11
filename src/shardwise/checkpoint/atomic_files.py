"""Files that appear complete or not at all, and a lock that allows one writer at a time.

A file is written under a random hidden name, flushed to the disk, then renamed. It is always created anew: links and
pipes are never written to. The lock file is freed by the system when its holder dies. It records what is being written,
so that the next writer knows by name what a dead one left behind.
"""

from __future__ import annotations

import errno
import fcntl
import json
import os
import re
import stat
from collections.abc import Collection, Iterable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from hashlib import blake2b
from os import geteuid
from pathlib import Path
from platform import node
from secrets import token_hex
from time import time
from typing import cast

import torch

from shardwise.checkpoint.files import AppendOnlyFile, OutputFile, PathLike, file_system, join_path, readable
from shardwise.errors import CheckpointError
from shardwise.exchange.buffers import bytes_at
from shardwise.quoting import brief

CHUNK = 2**23  # bytes that are packed at a time when they are not contiguous
NO_LOCKS = (errno.ENOSYS, errno.EOPNOTSUPP, errno.ENOLCK, errno.EINVAL, errno.EBADF)  # the file system has none
FLAGS = os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC  # links are not followed, pipes do not block
PARTIAL = re.compile(r"\..+\.([0-9a-f]{16})\.part", re.DOTALL)  # a file that is being written, or was interrupted
LONGEST_NAME = 200  # bytes of a name that become part of a sidecar's name: systems allow 255
MAX_RECORDS = 2**26  # bytes of records in a lock file
LOCK, TRIES = ".shardwise.lock", 1000
# indexes of all formats, and the files of ours that they list
INDEXES = ("shardwise.json", ".metadata", "model.safetensors.index.json", "pytorch_model.bin.index.json")
NAMES = r"(?:shard-[0-9]+-of-[0-9]+-([0-9a-f]{16})\.safetensors|__[0-9]+_([0-9a-f]{16})\.distcp)"
OURS, OURS_IN_BYTES = re.compile(NAMES), re.compile(NAMES.encode())
TOKEN = re.compile(r"[0-9a-f]{16}")
DAY = 86_400  # seconds after which a record of another host counts as abandoned: that host may not share locks


def sidecar_name(name: str, ending: str) -> str:
    """The name of a hidden file that belongs to another one in the same directory.

    >>> sidecar_name("m.safetensors", "0123456789abcdef.part")
    '.m.safetensors.0123456789abcdef.part'
    """
    stem = name if len(os.fsencode(name)) <= LONGEST_NAME else blake2b(os.fsencode(name), digest_size=16).hexdigest()
    return f".{stem}.{ending}"


class OutputFolder:
    """A directory that is written to, local or through fsspec. `run` marks the partial files of one writer."""

    def __init__(self, path: PathLike, *, durable: bool = True, run: str | None = None) -> None:
        (self._system, self._place), self._durable = file_system(path), durable
        self.path = self._place if self._system is None else self._system.unstrip_protocol(self._place)
        self.run = run or token_hex(8)
        self.reused = list[str]()  # complete files of an earlier try

    @property
    def local(self) -> Path | None:
        """The local path; None if it is remote."""
        return Path(self._place) if self._system is None else None

    def path_of(self, name: str) -> str:
        """The path or URL of a file."""
        return join_path(self.path, name)

    def _at(self, name: str) -> str:
        """The path that the driver knows."""
        return join_path(self._place, name)

    def make(self) -> list[Path]:
        """Create the directory and its parents; returns the new ones, innermost first."""
        folder = Path(self._place)
        with writable(self.path):
            made = [one for one in (folder, *folder.parents) if not one.exists()]
            folder.mkdir(parents=True, exist_ok=True)
            for one in made:
                self._sync(one.parent)
        return made

    @contextmanager
    def write(self, name: str) -> Iterator[OutputFile]:
        """Write a file. It gets its name when it is complete; until then, and after an error, the old one stays."""
        target = self.path_of(name)
        if self._system is not None:  # a driver of its own: its transaction has all files that it opens
            own = type(self._system)(**self._system.storage_options, skip_instance_cache=True)
            with writable(target), own.transaction, own.open(self._at(name), "wb") as file:
                yield file
            return
        self.make()
        partial = Path(self._place, sidecar_name(name, f"{self.run}.part"))
        with writable(target):
            number = os.open(partial, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, 0o666)
        try:
            with writable(target):
                with open(number, "wb", buffering=0) as raw:
                    yield cast("OutputFile", AppendOnlyFile(raw))
                    if self._durable:
                        os.fsync(raw.fileno())
                os.replace(partial, target)
        except BaseException:
            with suppress(OSError):
                partial.unlink()
            raise
        try:
            self._sync(partial.parent)
        except OSError as error:
            raise CheckpointError(
                f"{partial.parent} was written, but could not be flushed to the disk: {error.strerror or error}"
            ) from error

    def _sync(self, folder: Path) -> None:
        """Flush the names in a directory to the disk."""
        if not self._durable:
            return
        at = os.open(folder, os.O_RDONLY)
        try:
            os.fsync(at)
        finally:
            os.close(at)

    def has(self, name: str, start: bytes, size: int) -> bool:
        """True if the file exists with this start and size. Then it is complete: files appear only when they are."""
        if self._system is not None:
            self._system.invalidate_cache(self._place)
            same = self._system.exists(self._at(name)) and self._system.size(self._at(name)) == size
            return bool(same) and self._system.cat_file(self._at(name), 0, len(start)) == start
        with readable(self.path), self._plain(name) as file:
            return file is not None and os.fstat(file).st_size == size and os.pread(file, len(start), 0) == start

    @contextmanager
    def _plain(self, name: str) -> Iterator[int | None]:
        """An open regular file with a single name; None for links, pipes and so on, and if it does not exist."""
        try:
            file = os.open(Path(self._place, name), os.O_RDONLY | FLAGS)
        except OSError:
            yield None
            return
        try:
            status = os.fstat(file)
            yield file if stat.S_ISREG(status.st_mode) and status.st_nlink == 1 else None
        finally:
            os.close(file)

    def read(self, name: str, limit: int | None = None) -> bytes:
        """A small file, or its first `limit` bytes."""
        with readable(self.path_of(name)):
            if self._system is not None:
                return bytes(self._system.cat_file(self._at(name), 0, limit))
            with Path(self.path_of(name)).open("rb") as file:
                return file.read(-1 if limit is None else limit)

    def tail(self, name: str, count: int) -> bytes:
        """The last bytes of a file; none if it does not exist."""
        with readable(self.path_of(name)), suppress(FileNotFoundError, NotADirectoryError):
            if self._system is not None:
                return bytes(self._system.cat_file(self._at(name), start=-count))
            with self._plain(name) as file:
                size = 0 if file is None else os.fstat(file).st_size
                return b"" if file is None else os.pread(file, min(count, size), max(0, size - count))
        return b""

    def names(self) -> list[str]:
        """The names of its files."""
        with readable(self.path), suppress(FileNotFoundError, NotADirectoryError):  # writing will report it
            if self._system is None:
                return sorted(entry.name for entry in os.scandir(self.path) if entry.is_file())
            self._system.invalidate_cache(self._place)  # other writers change it, too
            return sorted(str(path).rpartition("/")[2] for path in self._system.ls(self._place, detail=False))
        return []

    def missing(self, files: Iterable[str]) -> list[str]:
        """The files that are known not to exist."""
        with suppress(CheckpointError):
            return sorted(set(files) - set(self.names()))
        return []

    def remove(self, name: str) -> None:
        """Remove a file, if it exists."""
        with suppress(OSError):
            if self._system is None:
                os.unlink(self.path_of(name))
            else:
                self._system.rm_file(self._at(name))

    def discard(self, name: str, owner: int) -> None:
        """Remove a regular file of that user, if it exists."""
        with suppress(OSError):
            status = os.lstat(self.path_of(name))
            if stat.S_ISREG(status.st_mode) and status.st_uid == owner:
                os.unlink(self.path_of(name))


@contextmanager
def writable(what: str) -> Iterator[None]:
    """Turn errors of the system into CheckpointErrors that name the file."""
    try:
        yield
    except OSError as error:
        raise CheckpointError(f"{what} cannot be written: {error.strerror or error}") from error


def write_tensor(tensor: torch.Tensor, file: OutputFile) -> None:
    """Write the elements of a tensor, row-major; packed a little at a time if they are strided or on another device."""
    if tensor.numel() == 0:
        return
    size = tensor.numel() * tensor.element_size()
    if (tensor.is_contiguous() and tensor.device.type == "cpu") or size <= CHUNK:
        flat = tensor.detach().cpu().contiguous()
        file.write(bytes_at(flat.data_ptr(), size).data)
        return
    rows = max(1, CHUNK * tensor.shape[0] // size)
    for part in torch.split(tensor, rows):
        write_tensor(part if rows > 1 else part[0], file)


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
    """A lock file that this process holds until `release`. `records` are those of dead writers."""

    def __init__(self, path: Path, what: str) -> None:
        self._path = path
        self._file = _open(path)
        try:
            self._acquire(what)
        except BaseException:
            os.close(self._file)
            raise
        self.records, self.owner = _records(self._file), os.fstat(self._file).st_uid

    def _acquire(self, what: str) -> None:
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
        """False if the file was removed before it was locked: its holder had just ended."""
        with suppress(FileNotFoundError):
            return os.path.samestat(os.lstat(self._path), os.fstat(self._file))
        return False

    def write(self, records: list[WriterRecord]) -> None:
        """Write these records; skipped if the file belongs to another user."""
        text = "".join(record.line() for record in records).encode()
        with suppress(OSError):  # they are needed only if this process dies
            os.ftruncate(self._file, 0)
            os.pwrite(self._file, text, 0)

    def release(self, *, keep: bool) -> None:
        """Let others write; `keep` the file with its records."""
        if not keep and self.current:
            with suppress(OSError):
                os.unlink(self._path)
        with suppress(OSError):
            fcntl.flock(self._file, fcntl.LOCK_UN)  # also for processes that were forked meanwhile
        os.close(self._file)


def _open(path: Path) -> int:
    """Open or create the lock file; refused unless it is a regular file with a single name."""
    try:
        file = os.open(path, os.O_RDWR | os.O_CREAT | FLAGS, 0o666)
    except PermissionError:
        file = os.open(path, os.O_RDONLY | FLAGS)  # it belongs to another user, but can be locked
    except OSError as error:
        if error.errno not in (errno.ELOOP, errno.EISDIR, errno.ENXIO):
            raise
        raise CheckpointError(f"{path} is not a lock file of shardwise: remove it, or give another path") from error
    status = os.fstat(file)
    if not stat.S_ISREG(status.st_mode) or status.st_nlink > 1:
        os.close(file)
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


def token_of(name: str) -> str | None:
    """The token in the name of a file that shardwise wrote; None for other files.

    >>> token_of("__0_0123456789abcdef.distcp"), token_of("__0_0.distcp")
    ('0123456789abcdef', None)
    """
    match = OURS.fullmatch(name)
    return match and (match[1] or match[2])


def indexed_files(folder: OutputFolder, indexes: Collection[str]) -> set[str]:
    """The files of ours that the indexes in a directory list."""
    files = set[str]()
    for index in set(indexes) & set(folder.names()):
        files |= {match[0].decode() for match in OURS_IN_BYTES.finditer(folder.read(index))}
    return files


class WriteClaim:
    """The right to write to a directory or a file. `unfinished`: keep a record of the files for the next writer."""

    unfinished = False


@contextmanager
def claim_folder(folder: OutputFolder, token: str, name: str | None = None) -> Iterator[WriteClaim]:
    """No other save or conversion writes to the directory, or to the file `name`, until this ends.

    Partial files of dead writers are removed, and so are their other files, unless they have this `token` and can be
    reused. Object stores have no locks: concurrent writers are not detected there.
    """
    claim = WriteClaim()
    if folder.local is None:
        yield claim
        return
    lock, made = _lock(folder, folder.local, LOCK if name is None else sidecar_name(name, "lock"))
    others = lock.records
    try:
        others = _clean_up(folder, lock, token)
        old = sorted(indexed_files(folder, INDEXES[:2])) if name is None else []
        lock.write([*others, WriterRecord.mine(folder.run, token, old)])
        claim.unfinished = True
        yield claim
        claim.unfinished, made = False, []
    finally:
        if others and not claim.unfinished:
            lock.write(others)
        lock.release(keep=claim.unfinished or bool(others))
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
            lock = FileLock(path / name, folder.path if name == LOCK else folder.path_of(name[1 : -len(".lock")]))
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
    needed = indexed_files(folder, INDEXES[:2]) if dead else set[str]()
    for name in folder.names() if dead else ():
        partial, mark = PARTIAL.fullmatch(name), token_of(name)
        unneeded = mark is not None and name not in needed and (mark in tokens or name in old)
        if unneeded or (partial and partial[1] in runs):
            folder.discard(name, lock.owner)
    return [one for one in lock.records if one not in dead]
