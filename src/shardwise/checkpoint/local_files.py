"""Local files, read or memory-mapped; and whichever files are at a path or URL."""

from __future__ import annotations

import mmap
import os
import stat
from collections.abc import Iterable, Iterator, Sequence
from itertools import chain
from math import inf
from pathlib import Path
from threading import Lock
from time import monotonic, time_ns
from typing import TYPE_CHECKING, NamedTuple, NoReturn

import numpy as np
import torch

from shardwise.checkpoint.files import WORDS, ByteRange, Bytes, Files, RemoteFiles, elements
from shardwise.errors import CheckpointError
from shardwise.exchange.messages import Tensors
from shardwise.geometry import Window
from shardwise.storage.appending import PIPE, AppendOnlyFile, Descriptor, OutputFile
from shardwise.storage.paths import PathLike, file_system, readable, unreadable

if TYPE_CHECKING:
    from fsspec import AbstractFileSystem  # type: ignore[import-untyped]

RECHECK_SECONDS = 0.01  # a file that was checked within this time is not checked again
MAX_MAPPED, MAX_OPEN = 256, 256  # files that stay mapped or open: each takes a descriptor
NOWAIT = getattr(os, "RWF_NOWAIT", None)  # of Linux
MOST_WARMED = 2**29  # bytes of one window that are read ahead of its page faults
SAMPLE = 2**22  # bytes of a file, of which the first tells whether they are cached


class FileStatus(NamedTuple):
    """What tells a file from another one at the same path."""

    size: int
    modified: int
    changed: int
    links: int
    device: int
    inode: int

    @staticmethod
    def of(status: os.stat_result) -> FileStatus:
        """From what the system says. Programs can reset the time of modification, but not that of change."""
        return FileStatus(
            status.st_size, status.st_mtime_ns, status.st_ctime_ns, status.st_nlink, status.st_dev, status.st_ino
        )

    def time(self) -> int:
        """When it got its contents or its place. For a hard link the time of change says nothing: links change it."""
        return self.changed if self.links == 1 else self.modified


class MappedFile(NamedTuple):
    """A file in memory: its bytes, and all of it as one tensor per dtype and number of bytes skipped at the start."""

    data: Bytes
    tensors: dict[tuple[torch.dtype, int], torch.Tensor]


class LocalFiles(Files):
    """Local files. They are read into memory, or mapped where elements are to be seen without a copy."""

    near = True

    def __init__(self, root: Path) -> None:
        self.root, self._path = str(root), root
        self._mapped = dict[str, MappedFile]()
        self._open = dict[str, Descriptor]()
        self._status = dict[str, FileStatus]()  # when they were first opened
        self._created, self._latest = time_ns(), inf  # the latest allowed time of a file that was not opened yet
        self._checked = dict[str, float]()  # when they were last seen unchanged
        self._cached = set[ByteRange]()  # what was just found in the page cache, and is about to be mapped
        self._lock = Lock()

    def names(self, *, recursive: bool = False) -> list[str]:
        """Without pipes, sockets and devices."""
        with readable(self.root):
            return sorted(_local_names(self.root, "", recursive))

    def folders(self) -> list[str]:
        """As the system lists them."""
        with readable(self.root):
            return sorted(one.name for one in os.scandir(self.root) if one.is_dir())

    def has(self, name: str) -> bool:
        """By its status."""
        return (self._path / name).is_file()

    def size(self, name: str) -> int:
        """When it was first opened."""
        if name not in self._status:
            self._descriptor(name)
        return self._status[name].size

    def stamp(self, name: str) -> str:
        """Size and time of modification."""
        return f"{self.size(name)} {self._status[name].modified}"

    def fetch(self, ranges: Sequence[ByteRange]) -> list[Bytes]:
        """Each in memory of its own."""
        for one in ranges:
            self.check(one)
        parts = [np.empty(one.stop - one.start, np.uint8) for one in ranges]
        for one, part in zip(ranges, parts, strict=True):
            self.read_into(one.file, one.start, part)
        self.check_unchanged({one.file for one in ranges}, within=RECHECK_SECONDS)
        return parts

    def read_into(self, name: str, start: int, memory: Bytes) -> None:
        """By as few calls of the system as it takes. The caller checks afterwards that the file is unchanged."""
        file, done = self._opened(name), 0
        while done < len(memory):
            try:
                count = os.preadv(file.number, [memory[done:].data], start + done)
            except OSError as error:
                self.check(ByteRange(name, start, start + len(memory)))
                raise unreadable(file.name, error) from error
            if not count:
                self._refuse_short(file, ByteRange(name, start, start + len(memory)))
            done += count

    def cached(self, bytes: ByteRange) -> bool:
        """By samples: a byte that is not in the page cache cannot be read without waiting."""
        file, room = self._opened(bytes.file).number, [bytearray(1)]
        samples = chain(range(bytes.start, bytes.stop, SAMPLE), (bytes.stop - 1,))
        try:
            if NOWAIT is None or not all(os.preadv(file, room, at, NOWAIT) for at in samples):
                return False
        except (OSError, OverflowError):  # also of file systems that cannot tell
            return False
        self._cached.add(bytes)
        return True

    def _refuse_short(self, file: Descriptor, wanted: ByteRange) -> NoReturn:
        """The file ends before these bytes do: it is damaged, or was cut off after it was opened."""
        self.check(wanted)
        self._check_same(wanted.file, os.fstat(file.number))
        raise CheckpointError(f"{self.range_label(wanted)} cannot be read: the file ends before")

    def elements(self, windows: Sequence[tuple[str, Window]], dtype: torch.dtype) -> Tensors:
        """As views of the mapped files. What is not in the page cache is read before: page faults read little each."""
        for file, window in windows:
            self._warm(ByteRange.of(file, window, dtype.itemsize))
        stops = [window.offset + window.reach * dtype.itemsize for _, window in windows]
        return [
            self._element_view(file, window, stop, dtype) for (file, window), stop in zip(windows, stops, strict=True)
        ]

    def _warm(self, bytes: ByteRange) -> None:
        """Have bytes in the page cache: no more than it may be expected to hold."""
        few = 0 < bytes.stop - bytes.start <= MOST_WARMED
        if bytes in self._cached or not few or self.cached(bytes):
            self._cached.discard(bytes)
            return
        room = np.empty(PIPE, np.uint8)
        for start in range(bytes.start, min(bytes.stop, self.size(bytes.file)), PIPE):
            self.read_into(bytes.file, start, room[: min(bytes.stop, self.size(bytes.file)) - start])

    def _element_view(self, file: str, window: Window, stop: int, dtype: torch.dtype) -> torch.Tensor:
        """The elements up to byte `stop`."""
        data, tensors = self._map(file)
        if window.offset < 0 or stop > len(data):
            self.check(ByteRange(file, window.offset, stop))
        first, skip = divmod(window.offset, dtype.itemsize)
        if skip and dtype.itemsize == 16:
            return elements(data, window.offset, dtype, window.shape, window.strides)
        whole = tensors.get((dtype, skip))
        if whole is None:
            count = (len(data) - skip) // dtype.itemsize
            words = torch.frombuffer(data, dtype=WORDS[dtype.itemsize], count=count, offset=skip)
            whole = tensors[dtype, skip] = words.view(dtype)
        return whole.as_strided(window.shape, window.strides, first)

    def copy(self, source: ByteRange, file: OutputFile) -> None:
        """Inside the kernel where possible: the bytes never enter the memory of this process."""
        self.check(source)
        opened = self._opened(source.file)
        try:
            if isinstance(file, AppendOnlyFile):
                file.copy_from(opened, source.start, source.stop - source.start)
            else:
                self._copy(source, file)
        finally:  # a file that changed meanwhile is the reason for any other error
            self._check_same(source.file, os.fstat(opened.number))

    def _copy(self, source: ByteRange, file: OutputFile) -> None:
        buffer = np.empty(min(PIPE, source.stop - source.start), np.uint8)
        for start in range(source.start, source.stop, PIPE):
            part = buffer[: source.stop - start]
            self.read_into(source.file, start, part)
            file.write(part.data)

    def read(self, name: str, start: int = 0, stop: int | None = None) -> bytes:
        """Without mapping the file: a checkpoint may have very many headers."""
        file = self._opened(name)
        wanted = ByteRange(name, start, self._status[name].size if stop is None else stop)
        self.check(wanted)
        data = np.empty(wanted.stop - start, np.uint8)
        self.read_into(name, start, data)
        self._check_same(name, os.fstat(file.number))
        return data.tobytes()

    def mark_opened(self) -> None:
        """Files that are opened later must not be newer than the index, even if a file server's clock is ahead."""
        self._latest = max([self._created, *(status.changed for status in self._status.values())])

    def check_unchanged(self, names: Iterable[str], *, within: float = 0) -> None:
        """Refuse files that were modified after they were first opened: they would mix two checkpoints.

        Replaced or removed files are fine: the descriptor still leads to the old one. A file that was checked `within`
        so many seconds is not checked again: otherwise a load of many small tensors would do little else.
        """
        now = monotonic()
        for name in names:
            before = self._status.get(name)
            if before is None or now - self._checked.get(name, 0) < within:
                continue
            try:
                status = os.stat(f"{self.root}/{name}")
            except OSError:
                continue
            self._checked[name] = now
            if status.st_ctime_ns != before.changed and status.st_ino == before.inode:
                self._check_same(name, status)

    def _check_same(self, name: str, status: os.stat_result) -> None:
        now = FileStatus.of(status)
        before = self._status.get(name)
        if before is None and now.time() <= self._latest:
            before = self._status.setdefault(name, now)
        if before is not None and now.links != before.links:  # a new hard link changes the file, but not its contents
            now = now._replace(links=before.links, changed=before.changed)
        if now != before:
            raise CheckpointError(
                f"{self.label(name)} was replaced or changed since the checkpoint was opened: open it again"
            )

    def _opened(self, name: str) -> Descriptor:
        """The open file. The caller checks its status after reading. Other threads may close theirs meanwhile."""
        return self._open.get(name) or self._descriptor(name)

    def _descriptor(self, name: str) -> Descriptor:
        """The open file; refused if it is not the one that was opened first."""
        with self._lock:
            file = self._open.pop(name, None)
        if file is None:
            try:
                number = os.open(self._path / name, os.O_RDONLY | os.O_NONBLOCK)  # opening a pipe would block
            except OSError as error:
                raise unreadable(self.label(name), error) from error
            file = Descriptor(number, self.label(name))
        status = os.fstat(file.number)
        if not stat.S_ISREG(status.st_mode):
            raise CheckpointError(f"{self.label(name)} is not a regular file")
        self._check_same(name, status)
        with self._lock:
            while len(self._open) >= MAX_OPEN:
                self._open.pop(next(iter(self._open)))
            self._open[name] = file
        return file

    def _map(self, name: str) -> MappedFile:
        mapped = self._mapped.get(name)
        if mapped is not None:
            return mapped
        file = self._descriptor(name)
        with self._lock, readable(self.label(name)):
            while len(self._mapped) >= MAX_MAPPED:  # tensors of a dropped one keep it alive
                self._mapped.pop(next(iter(self._mapped)))
            data = np.frombuffer(map_privately(file.number) if self._status[name].size else b"", dtype=np.uint8)
            mapped = self._mapped[name] = MappedFile(data, {})
            return mapped


def map_privately(file: int) -> mmap.mmap:
    """Private, so that it can never write to the file; without reserving swap."""
    flags = mmap.MAP_PRIVATE | getattr(mmap, "MAP_NORESERVE", 0)
    return mmap.mmap(file, 0, flags=flags, prot=mmap.PROT_READ | mmap.PROT_WRITE)


def _local_names(folder: str, prefix: str, recursive: bool) -> Iterator[str]:
    with os.scandir(folder) as entries:
        for entry in entries:
            if entry.is_file():
                yield prefix + entry.name
            elif recursive and entry.is_dir(follow_symlinks=False):
                yield from _local_names(entry.path, f"{prefix}{entry.name}/", recursive)


def files_at(path: PathLike) -> tuple[Files, str | None]:
    """The files at a path or URL; and the name of the file, if it is a file and not a directory."""
    system, place = file_system(path)
    if system is not None:
        return _remote_files(system, place, os.fspath(path))
    local = Path(place)
    with readable(place):
        if local.is_dir():
            return LocalFiles(local), None
        if local.exists():
            return LocalFiles(local.parent), local.name
    raise CheckpointError(f"no such file or directory: {place}")


def _remote_files(system: AbstractFileSystem, place: str, url: str) -> tuple[Files, str | None]:
    with readable(url):
        system.invalidate_cache()  # the listing may be out of date
        if system.isdir(place):
            return RemoteFiles(system, place, url), None
        if system.isfile(place):
            folder, _, name = place.rpartition("/")
            return RemoteFiles(system, folder, system.unstrip_protocol(folder)), name
    raise CheckpointError(f"no such file or directory: {url}")
