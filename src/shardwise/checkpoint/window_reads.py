"""Reads windows of files straight into memory, by calls of the system that read: no page is faulted in.

A mapped file that is not in the page cache is read page by page, which is much slower. Where it is, runs of bytes are
read as fast as memory is copied, but strided elements are copied faster from the mapped file.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from mmap import mmap

import torch

from shardwise.checkpoint.checking import current_check
from shardwise.checkpoint.files import ByteRange, Bytes, Files
from shardwise.exchange import view_of
from shardwise.exchange.buffers import bytes_at
from shardwise.exchange.reduce import Look
from shardwise.geometry import Window

CHUNK = 2**20  # bytes of the buffer: it stays in the cache
LONG = 2**16  # bytes of a run that is worth a read of its own
GAP = 2**18  # unneeded bytes between two runs that are not read


class WindowReader:
    """Reads into CPU tensors. Short runs and casts go through a small buffer, with the unneeded bytes in between."""

    def __init__(self, files: Files) -> None:
        self.files = files
        self._buffer: torch.Tensor | None = None

    def read(
        self,
        file: str,
        source: Window,
        dtype: torch.dtype,
        target: Window,
        memory: Sequence[torch.Tensor],
        look: Look | None,
    ) -> bool:
        """The elements of a window, whose offset is counted in bytes, to a window of memory.

        False, and nothing is read, where a copy from the mapped file is faster.
        """
        whole = memory[target.tensor]
        straight = look is None and whole.dtype == dtype
        if straight and source.contiguous and target.contiguous:
            size = dtype.itemsize
            start = whole.data_ptr() + target.offset * size
            self._fill(file, source.offset, bytes_at(start, target.volume * size))
            return True
        if self.files.cached(ByteRange.of(file, source, dtype.itemsize)):
            return False
        for part, cells in _parts(*_descending(source, view_of(target, memory)), dtype.itemsize, straight=straight):
            if straight and part.contiguous and cells.is_contiguous():
                self._fill(file, part.offset, bytes_at(cells.data_ptr(), cells.nbytes))
            else:
                self._copy(file, part, dtype, cells, look)
        return True

    def _copy(self, file: str, part: Window, dtype: torch.dtype, cells: torch.Tensor, look: Look | None) -> None:
        room = self._room(part.reach * dtype.itemsize)
        self._fill(file, part.offset, _bytes_of(room))
        values = room.view(dtype).as_strided(part.shape, part.strides)
        if look is not None:
            look([values])
        cells.copy_(values)

    def _fill(self, file: str, start: int, memory: Bytes) -> None:
        """Read bytes; the check of the load sees them while they are in the cache."""
        check = current_check()
        if check is None:
            self.files.read_into(file, start, memory)
        else:
            check.read_into(self.files, file, start, memory)

    def _room(self, size: int) -> torch.Tensor:
        if self._buffer is None:
            self._buffer = torch.frombuffer(mmap(-1, CHUNK), dtype=torch.uint8)  # which goes back to the system at once
        return self._buffer[:size]


def _bytes_of(room: torch.Tensor) -> Bytes:
    return bytes_at(room.data_ptr(), room.nbytes)


def _descending(source: Window, cells: torch.Tensor) -> tuple[Window, torch.Tensor]:
    """The dims in the order in which they lie in the file."""
    order = sorted(range(len(source.shape)), key=lambda dim: -source.strides[dim])
    if order == list(range(len(order))):
        return source, cells
    shape, strides = (tuple(side[dim] for dim in order) for side in (source.shape, source.strides))
    return source._replace(shape=shape, strides=strides), cells.permute(order)


def _parts(
    source: Window, cells: torch.Tensor, itemsize: int, *, straight: bool
) -> Iterator[tuple[Window, torch.Tensor]]:
    """Parts that are one run on both sides, if the bytes go `straight` into the target, or that fit into the buffer."""
    dim = next((dim for dim, size in enumerate(source.shape) if size > 1), None)
    if dim is None or (straight and source.contiguous and cells.is_contiguous()):
        yield source, cells
        return
    stride, size = source.strides[dim], source.shape[dim]
    inner = source.reach - (size - 1) * stride
    apart = (stride - inner) * itemsize > GAP or (straight and inner * itemsize >= LONG)
    rows = 1 if apart else max(1, (CHUNK // itemsize - inner) // max(stride, 1) + 1)
    if rows >= size:
        yield source, cells
        return
    for at in range(0, size, rows):
        count = min(rows, size - at)
        shape = (*source.shape[:dim], count, *source.shape[dim + 1 :])
        part = source._replace(shape=shape, offset=source.offset + at * stride * itemsize)
        yield from _parts(part, cells.narrow(dim, at, count), itemsize, straight=straight)
