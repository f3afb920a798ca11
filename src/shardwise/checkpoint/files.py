"""Bytes of files: those of this machine are mapped, others are fetched in ranges through fsspec."""

from __future__ import annotations

import mmap
import os
from abc import ABC, abstractmethod
from bisect import bisect_right
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path, PurePosixPath
from threading import Lock
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch

from shardwise.errors import CheckpointError

Bytes = npt.NDArray[np.uint8]
WORDS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64, 16: torch.complex128}
MAPPED, OPEN = 512, 64  # files that stay mapped, and those that stay open: each takes a descriptor
PIECE = 2**22  # bytes of a range that are fetched at a time where they are only passed on
SMALL, GAP = 2**12, 2**18  # bytes between two ranges that are fetched along with them, where another request costs more


class Span(NamedTuple):
    """Bytes `start` to `stop` of a file."""

    file: str
    start: int
    stop: int


class Descriptor:
    """An open file of the system, which is closed when nobody uses it any more."""

    def __init__(self, number: int) -> None:
        self.number = number

    def __del__(self) -> None:
        os.close(self.number)


class Files(ABC):
    """The files of a checkpoint, by names relative to `root`, with / between their parts."""

    root: str

    @abstractmethod
    def names(self) -> list[str]:
        """All of them, sorted."""

    @abstractmethod
    def has(self, name: str) -> bool:
        """True for a file that is there."""

    @abstractmethod
    def size(self, name: str) -> int:
        """In bytes; a CheckpointError where there is no such file."""

    @abstractmethod
    def stamp(self, name: str) -> str:
        """Changes when the file does."""

    @abstractmethod
    def fetch(self, spans: Sequence[Span]) -> list[Bytes]:
        """The bytes of each, not to be written."""

    def copy(self, span: Span, file: Any) -> None:
        """Append the bytes to a file that is being written, a little at a time."""
        for start in range(span.start, span.stop, PIECE):
            file.write(self.fetch([Span(span.file, start, min(start + PIECE, span.stop))])[0].data)

    def read(self, name: str, start: int = 0, stop: int | None = None) -> bytes:
        """Some bytes, copied: for headers and the like."""
        return self.fetch([Span(name, start, self.size(name) if stop is None else stop)])[0].tobytes()

    def shown(self, name: str) -> str:
        """The file, as people know it."""
        return f"{self.root.rstrip('/')}/{name}"

    def check(self, span: Span) -> None:
        """Refuse bytes that the file does not have."""
        size = self.size(span.file)
        if not 0 <= span.start <= span.stop <= size:
            raise CheckpointError(
                f"{self.shown(span.file)} has {size} bytes, but bytes {span.start} to {span.stop} are needed: "
                f"it is truncated, or belongs to another checkpoint"
            )


class Seen(NamedTuple):
    """What tells a file from another one at its place."""

    size: int
    written: int
    device: int
    number: int


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
        self._lock = Lock()

    def names(self) -> list[str]:
        """All files below, sorted."""
        found = [Path(at, name) for at, _, names in os.walk(self._path) for name in names]
        return sorted(path.relative_to(self._path).as_posix() for path in found)

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

    def read(self, name: str, start: int = 0, stop: int | None = None) -> bytes:
        """Without mapping it: headers of very many files may be read."""
        span = Span(name, start, self.size(name) if stop is None else stop)
        self.check(span)
        with readable(self.shown(name)):
            return os.pread(self._opened(name).number, span.stop - span.start, start)

    def _opened(self, name: str) -> Descriptor:
        """A file; refused where it is not the one that was looked at before."""
        file = self._open.pop(name, None)
        if file is None:
            with readable(self.shown(name)):
                file = Descriptor(os.open(self._path / name, os.O_RDONLY))
        status = os.fstat(file.number)
        now = Seen(status.st_size, status.st_mtime_ns, status.st_dev, status.st_ino)
        if self._seen.setdefault(name, now) != now:
            raise CheckpointError(f"{self.shown(name)} was replaced or changed since it was opened: open it again")
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


class RemoteFiles(Files):
    """Files that fsspec reaches: s3://, gs://, memory://, and whatever has a driver."""

    def __init__(self, system: Any, root: str) -> None:
        self._system, self.root = system, root
        self._sizes = dict[str, int]()

    def names(self) -> list[str]:
        """All files below, sorted."""
        with readable(self.root):
            found = self._system.find(self.root)
        start = self._system._strip_protocol(self.root).rstrip("/")
        return sorted(str(path)[len(start) :].lstrip("/") for path in found)

    def has(self, name: str) -> bool:
        """As the driver says."""
        with readable(self.shown(name)):
            return bool(self._system.isfile(self.shown(name)))

    def size(self, name: str) -> int:
        """Asked for once."""
        if name not in self._sizes:
            with readable(self.shown(name)):
                self._sizes[name] = int(self._system.size(self.shown(name)))
        return self._sizes[name]

    def stamp(self, name: str) -> str:
        """What the driver calls the state of the file."""
        with readable(self.shown(name)):
            return str(self._system.checksum(self.shown(name)))

    def fetch(self, spans: Sequence[Span]) -> list[Bytes]:
        """Near ones together, all of them at once where the driver can."""
        for span in spans:
            self.check(span)
        joined, whole = list(_joined(spans)), list[Bytes]()
        paths, starts, stops = [self.shown(s.file) for s in joined], [s.start for s in joined], [s.stop for s in joined]
        with readable(self.root):
            found = self._system.cat_ranges(paths, starts, stops, on_error="raise") if joined else []
        for span, text in zip(joined, found, strict=True):
            if len(text) != span.stop - span.start:
                raise CheckpointError(f"{self.shown(span.file)}: {len(text)} bytes came where {span} was asked for")
            whole.append(np.frombuffer(bytearray(text), dtype=np.uint8))  # torch warns of what cannot be written
        return [_part(joined, whole, span) for span in spans]


def _joined(spans: Sequence[Span]) -> Iterator[Span]:
    """As few as there can be without fetching much that nobody asked for."""
    before: Span | None = None
    for span in sorted(span for span in spans if span.stop > span.start):
        if (
            before is not None
            and span.file == before.file
            and worth_it(span.start - before.stop, span.stop - span.start)
        ):
            before = before._replace(stop=max(before.stop, span.stop))
        else:
            if before is not None:
                yield before
            before = span
    if before is not None:
        yield before


def worth_it(gap: int, size: int) -> bool:
    """True where bytes that nobody asked for are fetched along, to have the next range with the one before.

    They are few, or no more than what is asked for: no more than twice as much is fetched.
    """
    return gap <= SMALL or gap <= min(size, GAP)


def _part(joined: Sequence[Span], whole: Sequence[Bytes], span: Span) -> Bytes:
    if span.stop == span.start:
        return np.empty(0, np.uint8)
    at = bisect_right(joined, (span.file, span.start, float("inf"))) - 1
    return whole[at][span.start - joined[at].start : span.stop - joined[at].start]


def files_at(path: Any) -> tuple[Files, str | None]:
    """The files at a path or URL; and the name of the file, where it is one and no directory."""
    text = os.fspath(path)
    if "://" in text:
        return _remote(text)
    local = Path(text)
    with readable(text):
        if local.is_dir():
            return LocalFiles(local), None
        if local.exists():
            return LocalFiles(local.parent), local.name
    raise CheckpointError(f"there is nothing at {text}")


def remote_system(url: str) -> tuple[Any, str | None]:
    """The driver for a URL; or the path, where it is a file of this machine."""
    import fsspec  # type: ignore[import-untyped]

    try:
        system, path = fsspec.core.url_to_fs(url)
    except (ImportError, ValueError) as error:
        raise CheckpointError(f"{url}: {error}") from error
    protocols = system.protocol if isinstance(system.protocol, tuple) else (system.protocol,)
    return (None, path) if "local" in protocols else (system, None)


def _remote(url: str) -> tuple[Files, str | None]:
    system, local = remote_system(url)
    if local is not None:
        return files_at(local)
    with readable(url):
        if system.isdir(url):
            return RemoteFiles(system, url), None
        if system.isfile(url):
            folder, _, name = url.rpartition("/")
            return RemoteFiles(system, folder), name
    raise CheckpointError(f"there is nothing at {url}")


def same_place(a: str, b: str) -> bool:
    """True where two paths or URLs lead to one file."""
    if "://" in a or "://" in b:
        return a == b
    return os.path.realpath(a) == os.path.realpath(b)


def inside(name: Any, where: str) -> str:
    """A file's name that an index gives; refused where it would lead out of the checkpoint."""
    text = str(name)
    parts = PurePosixPath(text).parts
    odd = "\\" in text or not text.isprintable()
    if not isinstance(name, str) or not parts or text.startswith("/") or ".." in parts or odd:
        raise CheckpointError(f"{where} names the file {name!r}, which is not inside of the checkpoint")
    return str(PurePosixPath(*parts))


@contextmanager
def readable(what: str) -> Iterator[None]:
    """Errors of the system as CheckpointErrors that name the file."""
    try:
        yield
    except FileNotFoundError as error:
        raise CheckpointError(f"{what} is missing") from error
    except OSError as error:
        raise CheckpointError(f"{what} cannot be read: {error.strerror or error}") from error
