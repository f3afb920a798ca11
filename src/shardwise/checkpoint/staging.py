"""Files that are put together in memory: a save copies this rank's tensors there, and another process writes them.

The memory is that of snapshots: shared, allocated once, and used again by later saves.
"""

from __future__ import annotations

import mmap
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from threading import Lock
from typing import TYPE_CHECKING, NamedTuple, cast

import torch

from shardwise.checkpoint.files import WORDS
from shardwise.checkpoint.segments import Data, Segment, SegmentList, TensorSink, size_of
from shardwise.exchange.buffers import bytes_at, copy_all
from shardwise.job.snapshot import shared_memory
from shardwise.storage.appending import OutputFile
from shardwise.storage.folders import OutputFolder
from shardwise.storage.orders import Crc
from shardwise.storage.sums import Parts

if TYPE_CHECKING:
    from typing_extensions import Buffer


class StagedFolder(OutputFolder):
    """A folder whose one file is described, not written: `segments` has its contents, `name` its name."""

    name, segments = "", list[Segment]()

    @contextmanager
    def write(self, name: str, *, sums: bool = True, parts: Parts | None = None) -> Iterator[OutputFile]:
        """Take the contents of the file. Who writes it makes its checksums."""
        file = SegmentList()
        yield cast("OutputFile", file)
        self.name, self.segments = name, file.segments

    def has(self, name: str, start: bytes, size: int) -> bool:
        """Nothing of an earlier try is used again."""
        return False

    def tail(self, name: str, count: int) -> bytes:
        """No file exists yet."""
        return b""


class StagedFile(NamedTuple):
    """A file in memory, complete but for its checksums. `memory` has whole pages. `kept`: also when it is written."""

    name: str
    size: int
    memory: torch.Tensor
    checksums: tuple[Crc, ...]
    kept: bool = False

    @property
    def view(self) -> memoryview:
        """Of all pages. The memory stays as long as the view."""
        return self.memory.numpy().data


Views = dict[int, torch.Tensor]  # by the byte at which they begin


class SaveMemory:
    """Memory for staged files: as much as saves needed at a time. It is allocated when first needed."""

    def __init__(self) -> None:
        self._spare, self._lock = list[torch.Tensor](), Lock()
        self._views = dict[int, Views]()  # by the address of the memory

    def take(self, size: int) -> torch.Tensor:
        """At least so many bytes, in whole pages."""
        pages = -(-max(size, 1) // mmap.PAGESIZE) * mmap.PAGESIZE
        with self._lock:  # no two threads get the same
            fitting = sorted((one for one in self._spare if one.numel() >= pages), key=torch.Tensor.numel)
            self._spare = [one for one in self._spare if not fitting or one is not fitting[0]]
            if fitting:
                return fitting[0]
            for small in self._spare[:1]:  # given back before more is asked for
                self._views.pop(small.data_ptr(), None)
            self._spare = self._spare[1:]
        return shared_memory(pages)

    def views(self, room: torch.Tensor) -> Views:
        """Of the tensors of files that were in this memory: most later files have the same ones in the same places."""
        return self._views.setdefault(room.data_ptr(), {})

    def give_back(self, memory: torch.Tensor) -> None:
        """For the next save."""
        self._spare.append(memory)

    @property
    def spare(self) -> int:
        """Bytes that no save uses."""
        return sum(one.numel() for one in self._spare)

    def release(self) -> int:
        """Free what no save uses; the number of bytes."""
        size = self.spare
        self._spare.clear()
        self._views.clear()
        return size


def stage(name: str, segments: Sequence[Segment], memory: SaveMemory) -> StagedFile:
    """Put a file together. All its tensors are copied at once."""
    size = size_of(segments)
    room = memory.take(size)
    try:
        return StagedFile(name, size, room, _fill(room, memory.views(room), segments))
    except BaseException:
        memory.give_back(room)
        raise


class Vacancy:
    """Room for the elements of a tensor in a staged file, in place of the tensor: `stage` leaves it open."""

    def __init__(self, shape: Sequence[int], dtype: torch.dtype) -> None:
        self._like = torch.empty(tuple(shape), dtype=dtype, device="meta")
        self.room: torch.Tensor | None = None

    def write(self, file: OutputFile) -> None:
        """Take the room where the file is now."""
        assert isinstance(file, _Room), "only staged files have room"
        self.room = file.leave_open(self._like)


def _fill(room: torch.Tensor, views: Views, segments: Sequence[Segment]) -> tuple[Crc, ...]:
    writing = _Room(room, views)
    starts, places = dict[int, tuple[int, int]](), dict[int, list[int]]()
    for one in segments:
        if isinstance(one, bytes):
            writing.write(one)
        elif isinstance(one, Data):
            starts[id(one)] = writing.at, writing.at + one.bytes
            _write(one, writing)
        else:
            places.setdefault(id(one.of), []).append(writing.at)
            writing.at += one.bytes
    with torch.no_grad():
        copy_all(writing.rooms, writing.tensors)
    return tuple(Crc(*starts[data], tuple(several)) for data, several in places.items())


def _write(data: Data, writing: _Room) -> None:
    end = writing.at + data.bytes
    data.write(cast("OutputFile", writing))
    if writing.at != end:
        raise AssertionError(f"{data.bytes} bytes were promised, but {writing.at - end + data.bytes} were written")


class _Room(TensorSink):
    """Memory that is written to like a file, from `at` on. Tensors are copied later."""

    def __init__(self, memory: torch.Tensor, views: Views) -> None:
        super().__init__()
        self._bytes, self._views, self.at = bytes_at(memory.data_ptr(), memory.numel()), views, 0
        self.rooms = list[torch.Tensor]()

    def write(self, data: Buffer) -> int:
        """Copy it."""
        view = memoryview(data).cast("B")
        self._bytes.data[self.at : self.at + len(view)] = view
        self.at += len(view)
        return len(view)

    def take(self, tensor: torch.Tensor) -> None:
        """Its values follow, row-major. They may begin anywhere: files have no gaps between tensors."""
        if tensor.is_complex():  # processors read pairs of numbers from aligned memory only
            tensor = torch.view_as_real(tensor.detach())
        room = self.leave_open(tensor)
        if tensor.nbytes:
            self.rooms.append(room)
            self.tensors.append(tensor)

    def leave_open(self, like: torch.Tensor) -> torch.Tensor:
        """Room for such a tensor, which somebody else fills."""
        size = like.numel() * like.element_size()
        room = self._view(like) if size else torch.empty(like.shape, dtype=like.dtype, device="cpu")
        self.at += size
        return room

    def _view(self, values: torch.Tensor) -> torch.Tensor:
        """Room for them. To make views of thousands of tensors takes as long as to copy some of them."""
        view = self._views.get(self.at)
        if view is None or view.dtype != values.dtype or view.shape != values.shape:
            words = WORDS[values.element_size()]
            flat = torch.frombuffer(self._bytes, dtype=words, count=values.numel(), offset=self.at)
            view = self._views[self.at] = flat.view(values.dtype).view(values.shape)
        return view
