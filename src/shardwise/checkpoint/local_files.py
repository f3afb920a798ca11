"""Files of this machine, mapped."""

from __future__ import annotations

import mmap
import os
import stat
from collections.abc import Iterable, Iterator, Sequence
from math import inf
from pathlib import Path
from threading import Lock
from time import monotonic, time_ns
from typing import Any, NamedTuple

import numpy as np
import torch

from shardwise.checkpoint.files import WORDS, Bytes, Descriptor, Files, Span, elements, readable
from shardwise.errors import CheckpointError

LATELY = 0.01  # seconds: what was seen to be whole then is taken to be
MAPPED, OPEN = 384, 64  # files that stay mapped, and those that stay open: each takes a descriptor


class Seen(NamedTuple):
    """What tells a file from another one at its place."""

    size: int
    written: int
    changed: int
    links: int
    device: int
    number: int

    @staticmethod
    def of(status: os.stat_result) -> Seen:
        """By its status. That a file was written to can be hidden, that it changed cannot."""
        return Seen(
            status.st_size, status.st_mtime_ns, status.st_ctime_ns, status.st_nlink, status.st_dev, status.st_ino
        )

    def since(self) -> int:
        """Since when it is as it is, or was put there. Of a file with several names a new one tells nothing."""
        return self.changed if self.links == 1 else self.written


class Mapped(NamedTuple):
    """A file in memory: its bytes, and all of it as tensors of some dtypes, without so many bytes at its start."""

    data: Bytes
    tensors: dict[tuple[torch.dtype, int], torch.Tensor]


class LocalFiles(Files):
    """Files of this machine. They are mapped when they are first looked at; nothing is read before it is needed."""

    def __init__(self, root: Path) -> None:
        self.root, self._path = str(root), root
        self._mapped = dict[str, Mapped]()
        self._open = dict[str, Descriptor]()
        self._seen = dict[str, Seen]()
        self._begun, self._latest = time_ns(), inf  # the latest change of a file that was not looked at yet
        self._checked = dict[str, float]()  # when they were last seen to be the same
        self._lock = Lock()

    def names(self, *, below: bool = False) -> list[str]:
        """Without pipes, sockets and devices."""
        with readable(self.root):
            return sorted(_names(self.root, "", below))

    def has(self, name: str) -> bool:
        """By its status."""
        return (self._path / name).is_file()

    def size(self, name: str) -> int:
        """When it was first looked at."""
        if name not in self._seen:
            self._opened(name)
        return self._seen[name].size

    def stamp(self, name: str) -> str:
        """By its size, and when it was written."""
        return f"{self.size(name)} {self._seen[name].written}"

    def fetch(self, spans: Sequence[Span]) -> list[Bytes]:
        """Parts of the mapped files."""
        self.check_unchanged({span.file for span in spans}, within=LATELY)
        found = [self._map(span.file).data[span.start : span.stop] for span in spans]
        for span, part in zip(spans, found, strict=True):
            if len(part) != span.stop - span.start or span.start < 0:
                self.check(span)
        return found

    def elements(self, span: Span, dtype: torch.dtype, shape: Sequence[int], strides: Sequence[int]) -> torch.Tensor:
        """The elements in some bytes, as a part of the mapped file."""
        data, tensors = self._map(span.file)
        if span.start < 0 or span.stop > len(data):
            self.check(span)
        first, skip = divmod(span.start, dtype.itemsize)
        if skip and dtype.itemsize == 16:
            return elements(data, span.start, dtype, shape, strides)
        whole = tensors.get((dtype, skip))
        if whole is None:
            count = (len(data) - skip) // dtype.itemsize
            words = torch.frombuffer(data, dtype=WORDS[dtype.itemsize], count=count, offset=skip)
            whole = tensors[dtype, skip] = words.view(dtype)
        return whole.as_strided(shape, strides, first)

    def copy(self, span: Span, file: Any) -> None:
        """Inside of the system where it can: the bytes are never in our memory."""
        self.check(span)
        if not hasattr(file, "take"):
            return super().copy(span, file)
        file.take(self._opened(span.file), span.start, span.stop - span.start)
        self.check_unchanged([span.file])

    def read(self, name: str, start: int = 0, stop: int | None = None) -> bytes:
        """Without mapping it: headers of very many files may be read."""
        span = Span(name, start, self.size(name) if stop is None else stop)
        self.check(span)
        file = self._opened(name)  # held until all is read: others may close it meanwhile
        with readable(self.shown(name)):
            found = os.pread(file.number, span.stop - span.start, start)
        if len(found) < span.stop - span.start:
            raise CheckpointError(f"{self.shown(name)}: {len(found)} bytes came where {span} was asked for")
        self._check_same(name, os.fstat(file.number))
        return found

    def opened(self) -> None:
        """Files that were not looked at yet are no later than an index, by the clock of a server that is ahead, too."""
        self._latest = max([self._begun, *(seen.changed for seen in self._seen.values())])

    def check_unchanged(self, names: Iterable[str], *, within: float = 0) -> None:
        """Refuse files that were written to after they were first looked at, which are then of two checkpoints.

        What was replaced or removed is not meant: that which was looked at is still there, for us. A file that was
        checked `within` so many seconds is not checked again: a load of many small tensors would do little else.
        """
        at = monotonic()
        for name in names:
            was = self._seen.get(name)
            if was is None or at - self._checked.get(name, 0) < within:
                continue
            try:
                now = os.stat(f"{self.root}/{name}")
            except OSError:
                continue
            self._checked[name] = at
            if now.st_ctime_ns != was.changed and now.st_ino == was.number:
                self._check_same(name, now)

    def _check_same(self, name: str, status: os.stat_result) -> None:
        now = Seen.of(status)
        if name not in self._seen and now.since() > self._latest:
            raise self._changed(name)
        was = self._seen.setdefault(name, now)
        if now.links != was.links:  # a name more or less changes the file, too, but not what is in it
            now = now._replace(links=was.links, changed=was.changed)
        if now != was:
            raise self._changed(name)

    def _changed(self, name: str) -> CheckpointError:
        return CheckpointError(
            f"{self.shown(name)} was replaced or changed since the checkpoint was opened: open it again"
        )

    def _opened(self, name: str) -> Descriptor:
        """A file; refused where it is not the one that was looked at before."""
        with self._lock:
            file = self._open.pop(name, None)
        if file is None:
            with readable(self.shown(name)):
                number = os.open(self._path / name, os.O_RDONLY | os.O_NONBLOCK)  # pipes would wait
            file = Descriptor(number, self.shown(name))
        status = os.fstat(file.number)
        if not stat.S_ISREG(status.st_mode):
            raise CheckpointError(f"{self.shown(name)} is no file that could be read in parts")
        self._check_same(name, status)
        with self._lock:
            while len(self._open) >= OPEN:  # it is closed when the last one who uses it lets go of it
                self._open.pop(next(iter(self._open)))
            self._open[name] = file
        return file

    def _map(self, name: str) -> Mapped:
        found = self._mapped.get(name)
        if found is not None:
            return found
        file = self._opened(name)
        with self._lock, readable(self.shown(name)):
            while len(self._mapped) >= MAPPED:  # those that are still looked at live on with what looks at them
                self._mapped.pop(next(iter(self._mapped)))
            data = np.frombuffer(_mapping(file.number) if self._seen[name].size else b"", dtype=np.uint8)
            found = self._mapped[name] = Mapped(data, {})
            return found


def _mapping(file: int) -> mmap.mmap:
    """Private, so that it can never write to the file; without swap set aside for it."""
    flags = mmap.MAP_PRIVATE | getattr(mmap, "MAP_NORESERVE", 0)
    return mmap.mmap(file, 0, flags=flags, prot=mmap.PROT_READ | mmap.PROT_WRITE)


def _names(folder: str, before: str, below: bool) -> Iterator[str]:
    with os.scandir(folder) as entries:
        for entry in entries:
            if entry.is_file():
                yield before + entry.name
            elif below and entry.is_dir(follow_symlinks=False):
                yield from _names(entry.path, f"{before}{entry.name}/", below)
