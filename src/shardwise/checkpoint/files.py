"""Bytes of files by path or URL: local files are memory-mapped, others are fetched in ranges through fsspec."""

from __future__ import annotations

from abc import ABC, abstractmethod
from bisect import bisect_right
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import product
from math import inf
from operator import mul
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import numpy.typing as npt
import torch

from shardwise.errors import CheckpointError
from shardwise.exchange.messages import Tensors
from shardwise.geometry import Window
from shardwise.quoting import in_line
from shardwise.storage.appending import OutputFile
from shardwise.storage.paths import beside, join_path, readable

if TYPE_CHECKING:
    from fsspec import AbstractFileSystem  # type: ignore[import-untyped]

    from shardwise.job.plan import ModelPlan

Bytes = npt.NDArray[np.uint8]
WORDS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64, 16: torch.complex128}
COPY_BYTES = 2**22  # bytes that are fetched at a time when they are only passed on
SMALL_GAP, LARGE_GAP = 2**12, 2**18  # unneeded bytes between two ranges: fetched, if that is cheaper than a request


class ByteRange(NamedTuple):
    """Bytes `start` to `stop` of a file."""

    file: str
    start: int
    stop: int

    @staticmethod
    def of(file: str, window: Window, itemsize: int) -> ByteRange:
        """The bytes from the first to the last element of a window, whose offset is counted in bytes."""
        return ByteRange(file, window.offset, window.offset + window.reach * itemsize)


class FileLabel(NamedTuple):
    """A file or bytes of it as messages show them. The text is composed only when printed: most labels never are."""

    root: str
    name: str
    bytes: ByteRange | None = None

    def __str__(self) -> str:
        bytes = "" if self.bytes is None else f", bytes {self.bytes.start} to {self.bytes.stop}"
        return in_line(join_path(self.root, self.name)) + bytes


class Files(ABC):
    """The files of a checkpoint, by names relative to `root`, with / as separator."""

    root: str
    near = False  # True where a read costs little more than its bytes
    readers: Mapping[str, Sequence[Sequence[int]]] = {}  # of files that only some ranks read: those, a group per host

    def planned(self, plan: ModelPlan, me: int) -> None:  # noqa: B027  # most do not count
        """All ranks fill their tensors from these files by a plan."""

    @abstractmethod
    def names(self, *, recursive: bool = False) -> list[str]:
        """The names of all files, sorted."""

    def folders(self) -> list[str]:
        """The names of the folders at the root, sorted."""
        return []

    @abstractmethod
    def has(self, name: str) -> bool:
        """True if the file exists."""

    @abstractmethod
    def size(self, name: str) -> int:
        """The size in bytes. Raises CheckpointError if the file does not exist."""

    @abstractmethod
    def stamp(self, name: str) -> str:
        """A text that changes when the file does."""

    @abstractmethod
    def fetch(self, ranges: Sequence[ByteRange]) -> list[Bytes]:
        """The bytes of each range. They must not be written to."""

    def elements(self, windows: Sequence[tuple[str, Window]], dtype: torch.dtype) -> Tensors:
        """The elements of windows of files, whose offsets are counted in bytes. All are fetched together."""
        size = dtype.itemsize
        parts = [[(file, part) for part in _parts(window, size)] for file, window in windows]
        data = iter(self.fetch([ByteRange.of(file, part, size) for some in parts for file, part in some]))
        tensors = [[elements(next(data), 0, dtype, part.shape, part.strides) for _, part in some] for some in parts]
        return [
            some[0] if len(some) == 1 else torch.stack(some).reshape(window.shape)
            for (_, window), some in zip(windows, tensors, strict=True)
        ]

    def read_into(self, name: str, start: int, memory: Bytes) -> None:
        """Fill memory with the bytes from `start` on."""
        memory[:] = self.fetch([ByteRange(name, start, start + len(memory))])[0]

    def cached(self, bytes: ByteRange) -> bool:
        """True where the bytes are in the memory of this machine already, as far as that can be told."""
        return False

    def check_unchanged(  # noqa: B027  # not every file system can tell
        self, names: Iterable[str], *, within: float = 0
    ) -> None:
        """Refuse files that were modified after they were first opened, where that can be seen."""

    def mark_opened(self) -> None:  # noqa: B027
        """From now on, refuse files that are newer than this object, even when they are opened for the first time."""

    def copy(self, source: ByteRange, file: OutputFile) -> None:
        """Append the bytes to a file that is being written, a little at a time."""
        for start in range(source.start, source.stop, COPY_BYTES):
            file.write(self.fetch([ByteRange(source.file, start, min(start + COPY_BYTES, source.stop))])[0].data)

    def read(self, name: str, start: int = 0, stop: int | None = None) -> bytes:
        """A copy of some bytes: for headers and the like."""
        return self.fetch([ByteRange(name, start, self.size(name) if stop is None else stop)])[0].tobytes()

    def path(self, name: str) -> str:
        """The path or URL of a file."""
        return join_path(self.root, name)

    def label(self, name: str) -> FileLabel:
        """The file as messages show it."""
        return FileLabel(self.root, name)

    def range_label(self, bytes: ByteRange) -> FileLabel:
        """Bytes of a file as messages show them."""
        return FileLabel(self.root, bytes.file, bytes)

    def check(self, wanted: ByteRange) -> None:
        """Refuse bytes that the file does not have."""
        size = self.size(wanted.file)
        if not 0 <= wanted.start <= wanted.stop <= size:
            raise CheckpointError(
                f"{self.label(wanted.file)} has {size} bytes, but bytes {wanted.start} to {wanted.stop} are needed: "
                f"it is truncated, or belongs to another checkpoint"
            )


class RemoteFiles(Files):
    """Files that fsspec reaches: s3://, gs://, memory://, and whatever has a driver."""

    def __init__(self, system: AbstractFileSystem, path: str, root: str) -> None:
        self._system, self._path, self.root = system, path.rstrip("/"), root
        self._sizes = dict[str, int]()

    def names(self, *, recursive: bool = False) -> list[str]:
        """As the driver lists them."""
        with readable(self.root):
            paths = self._system.find(self._path, maxdepth=None if recursive else 1)
        return sorted(str(path)[len(self._path) :].lstrip("/") for path in paths)

    def folders(self) -> list[str]:
        """As the driver lists them."""
        with readable(self.root):
            listed = self._system.ls(self._path, detail=True)
        return sorted(one["name"].rstrip("/").rpartition("/")[2] for one in listed if one["type"] == "directory")

    def _at(self, name: str) -> str:
        """The path that the driver knows, which has no `..`."""
        if name.startswith("../"):
            return f"{self._path.rpartition('/')[0]}/{name[3:]}"
        return f"{self._path}/{name}"

    def path(self, name: str) -> str:
        """The URL of a file."""
        return beside(self.root, name[3:]) if name.startswith("../") else super().path(name)

    def has(self, name: str) -> bool:
        """As the driver says."""
        with readable(self.label(name)):
            return bool(self._system.isfile(self._at(name)))

    def size(self, name: str) -> int:
        """Requested once."""
        if name not in self._sizes:
            with readable(self.label(name)):
                self._sizes[name] = int(self._system.size(self._at(name)))
        return self._sizes[name]

    def stamp(self, name: str) -> str:
        """The driver's checksum."""
        with readable(self.label(name)):
            return str(self._system.checksum(self._at(name)))

    def fetch(self, ranges: Sequence[ByteRange]) -> list[Bytes]:
        """Ranges that are close together as one, all of them at once if the driver can."""
        for one in ranges:
            self.check(one)
        joined, whole = list(_joined(ranges)), list[Bytes]()
        paths, starts, stops = [self._at(s.file) for s in joined], [s.start for s in joined], [s.stop for s in joined]
        with readable(self.root):
            replies = self._system.cat_ranges(paths, starts, stops, on_error="raise") if joined else []
        for one, data in zip(joined, replies, strict=True):
            if len(data) != one.stop - one.start:
                raise CheckpointError(
                    f"{self.label(one.file)}: got {len(data)} bytes instead of bytes {one.start} to {one.stop}"
                )
            whole.append(np.frombuffer(bytearray(data), dtype=np.uint8))  # torch warns of read-only memory
        return [_part(joined, whole, one) for one in ranges]


def _joined(ranges: Sequence[ByteRange]) -> Iterator[ByteRange]:
    """As few ranges as possible without fetching many unneeded bytes."""
    before: ByteRange | None = None
    for one in sorted(one for one in ranges if one.stop > one.start):
        near = before is not None and worth_it(one.start - before.stop, one.stop - one.start)
        if before is not None and near and one.file == before.file:
            before = before._replace(stop=max(before.stop, one.stop))
        else:
            if before is not None:
                yield before
            before = one
    if before is not None:
        yield before


def worth_it(gap: int, size: int) -> bool:
    """True if the unneeded bytes before a range should be fetched with it, to save a request.

    They are few, or no more than the needed ones: at most twice as much is fetched.
    """
    return gap <= SMALL_GAP or gap <= min(size, LARGE_GAP)


def _parts(window: Window, itemsize: int) -> list[Window]:
    """A window of a file, one part for every step along its first dims: most of what is fetched is needed."""
    outer = 0
    for dim, (size, stride) in enumerate(zip(window.shape, window.strides, strict=True)):
        inner = window._replace(shape=window.shape[dim + 1 :], strides=window.strides[dim + 1 :]).reach
        if size > 1 and not worth_it((stride - inner) * itemsize, inner * itemsize):
            outer = dim + 1
    steps = [stride * itemsize for stride in window.strides[:outer]]
    starts = [window.offset + sum(map(mul, at, steps)) for at in product(*map(range, window.shape[:outer]))]
    return [Window(window.tensor, window.shape[outer:], window.strides[outer:], start) for start in starts]


def _part(joined: Sequence[ByteRange], whole: Sequence[Bytes], wanted: ByteRange) -> Bytes:
    if wanted.stop == wanted.start:
        return np.empty(0, np.uint8)
    at = bisect_right(joined, (wanted.file, wanted.start, inf)) - 1
    return whole[at][wanted.start - joined[at].start : wanted.stop - joined[at].start]


def elements(data: Bytes, start: int, dtype: torch.dtype, shape: Sequence[int], strides: Sequence[int]) -> torch.Tensor:
    """The elements in some bytes, from any byte on; a view if torch can read them there."""
    count = (len(data) - start) // dtype.itemsize
    if dtype.itemsize < 16 or (data.ctypes.data + start) % 16 == 0:
        words = torch.frombuffer(data, dtype=WORDS[dtype.itemsize], count=count, offset=start)
        return words.view(dtype).as_strided(shape, strides)
    # 16-byte loads need aligned memory
    halves = torch.frombuffer(data, dtype=torch.int64, count=2 * count, offset=start)
    pairs = halves.as_strided((*shape, 2), (*(2 * stride for stride in strides), 1))
    return pairs.clone(memory_format=torch.contiguous_format).view(dtype).reshape(tuple(shape))
