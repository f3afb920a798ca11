"""What a file will contain: bytes, values of tensors, and checksums of them, one after the other.

Formats describe their files in this way. They are then written from start to end, or put together in memory first.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Iterable, Sequence
from io import RawIOBase
from typing import TYPE_CHECKING, NamedTuple, cast

import torch

from shardwise.exchange.buffers import bytes_at
from shardwise.storage.appending import OutputFile

if TYPE_CHECKING:
    from typing_extensions import Buffer

CHUNK = 2**23  # bytes that are packed at a time when they are not contiguous


class Data(NamedTuple):
    """Bytes that are not made before they are needed: `write` writes them to a file."""

    bytes: int
    write: Callable[[OutputFile], None]


class Checksum(NamedTuple):
    """Four bytes: the CRC-32 of data that comes earlier in the file, as zip archives have it."""

    of: Data

    @property
    def bytes(self) -> int:
        """Its size."""
        return 4


Segment = bytes | Data | Checksum


def size_of(segments: Iterable[Segment]) -> int:
    """The number of bytes."""
    return sum(len(one) if isinstance(one, bytes) else one.bytes for one in segments)


def write_segments(file: OutputFile, segments: Sequence[Segment]) -> None:
    """Write them one after the other."""
    if isinstance(file, SegmentList):
        file.segments += segments
        return
    wanted = {id(one.of) for one in segments if isinstance(one, Checksum)}
    sums = dict[int, int]()
    for one in segments:
        if isinstance(one, bytes):
            file.write(one)
        elif isinstance(one, Checksum):
            file.write(sums[id(one.of)].to_bytes(4, "little"))
        elif id(one) in wanted:
            summed = _SummedFile(file)
            one.write(cast("OutputFile", summed))
            sums[id(one)] = summed.checksum
        else:
            one.write(file)


class _SummedFile(RawIOBase):
    """Passes bytes on to a file, and computes their checksum."""

    def __init__(self, file: OutputFile) -> None:
        self._file, self.checksum = file, 0

    def write(self, data: Buffer) -> int:
        """Pass them on."""
        self.checksum = zlib.crc32(data, self.checksum)
        return self._file.write(data)


def write_tensor(tensor: torch.Tensor, file: OutputFile) -> None:
    """Write the elements of a tensor, row-major; packed a little at a time if they are strided or on another device."""
    if isinstance(file, TensorSink):
        file.take(tensor)
        return
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


class SegmentList(RawIOBase):
    """In place of a file: remembers what was to be written."""

    def __init__(self) -> None:
        self.segments = list[Segment]()


class TensorSink(RawIOBase):
    """Takes whole tensors, which are copied later, many at a time."""

    def __init__(self) -> None:
        self.tensors = list[torch.Tensor]()

    def take(self, tensor: torch.Tensor) -> None:
        """Remember it."""
        self.tensors.append(tensor)
