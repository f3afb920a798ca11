"""A message in blocks of cells that fit the cache: which cells each has, and reading and writing them in our tensors.

Both ends cut a message into the same blocks, from its parts alone. Where the cells of a block lie one after the other
in one tensor, they are worked on there; otherwise they are copied into scratch memory, and back.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from functools import lru_cache
from itertools import groupby, pairwise
from typing import NamedTuple

import numpy as np
import torch

from shardwise.exchange.buffers import bytes_at, copy_all
from shardwise.exchange.deltas import BLOCK, WORDS, Bytes, Changes, Words, most_bytes
from shardwise.exchange.messages import Message, MessagePart, Pair, Tensors, view_of
from shardwise.geometry import Bools, Window

SEGMENT = 2**22  # bytes of the cells that are sent at a time: every wave has a price on all ranks
Masks = Sequence[Tensors | None]  # of every move; None where nothing is known, so that all cells count as changed


class BlockPart(NamedTuple):
    """Cells of a move: where they lie in our tensors, and in the block; `dtype` is that of the message."""

    move: int
    dtype: torch.dtype
    here: Window
    there: Window


class Block(NamedTuple):
    """Consecutive cells of a message, all of one size."""

    cells: int
    itemsize: int
    parts: tuple[BlockPart, ...]

    @property
    def bytes(self) -> int:
        """Of all cells."""
        return self.cells * self.itemsize

    @property
    def in_one_run(self) -> bool:
        """True if the cells lie one after the other in one of our tensors."""
        return len(self.parts) == 1 and self.parts[0].here.contiguous and self.parts[0].there.contiguous


@lru_cache(maxsize=4096)
def segments_of(message: Message) -> tuple[tuple[Block, ...], ...]:
    """The blocks of a message, in groups that are sent at a time."""
    segments, size = list[list[Block]](), SEGMENT
    for itemsize, parts in groupby(message.parts, key=lambda part: part.dtype.itemsize):
        for block in _blocks(itemsize, list(parts)):
            if size + block.bytes > SEGMENT:
                segments.append([])
                size = 0
            segments[-1].append(block)
            size += block.bytes
    return tuple(map(tuple, segments))


def most_segment_bytes(segment: Sequence[Block]) -> int:
    """No encoded segment has more."""
    return sum(most_bytes(block.cells, block.itemsize) for block in segment)


def _blocks(itemsize: int, parts: Sequence[MessagePart]) -> Iterator[Block]:
    first, last = parts[0].start, parts[-1].stop
    total = (last - first) // itemsize
    by_block = [list[BlockPart]() for _ in range(-(-total // BLOCK))]
    for part in parts:
        start = (part.start - first) // itemsize
        for here, there in part.cells.pairs:
            whole = Pair(here, there._replace(tensor=0, offset=there.offset + start))
            for number in range(whole.there.offset // BLOCK, -(-(whole.there.offset + there.reach) // BLOCK)):
                for ours, theirs in _between(whole, number * BLOCK, (number + 1) * BLOCK):
                    inside = theirs._replace(offset=theirs.offset - number * BLOCK)
                    by_block[number].append(BlockPart(part.move, part.dtype, ours, inside))
    for number, some in enumerate(by_block):
        yield Block(min(BLOCK, total - number * BLOCK), itemsize, tuple(some))


def _between(pair: Pair, start: int, stop: int) -> Iterator[Pair]:
    """The cells that lie in `start:stop` of the message, as few windows. (Messages are row-major: strides fall.)"""
    here, there = pair
    first, last = there.offset, there.offset + there.reach
    if start <= first and last <= stop:
        yield pair
    elif first < stop and start < last:
        dim = next(dim for dim, size in enumerate(there.shape) if size > 1)
        size, step = there.shape[dim], there.strides[dim]
        tail = there.reach - (size - 1) * step  # from the first to the last cell at one index
        whole = max(0, -(-(start - first) // step)), min(size, (stop - first - tail) // step + 1)
        cuts = sorted({0, size, *(min(max(at, 0), size) for at in (whole[0] - 1, *whole, whole[1] + 1))})
        for low, high in pairwise(cuts):
            inner = Pair(_along(here, dim, low, high), _along(there, dim, low, high))
            if high - low > 1 and not (start <= inner.there.offset and inner.there.offset + inner.there.reach <= stop):
                continue  # nothing of these indices lies between
            yield from _between(inner, start, stop)


def _along(window: Window, dim: int, low: int, high: int) -> Window:
    shape = (*window.shape[:dim], high - low, *window.shape[dim + 1 :])
    return window._replace(shape=shape, offset=window.offset + low * window.strides[dim])


class BlockMemory:
    """Reads and writes the cells of blocks, with scratch memory for one block at a time."""

    def __init__(self, cells: torch.Tensor, mask: torch.Tensor) -> None:
        self._cells, self._mask = cells, mask

    @staticmethod
    def scratch(blocks: Iterable[Block], widest: int) -> list[int]:
        """The bytes that it needs for the cells of such blocks in tensors of up to that itemsize, and for masks."""
        sizes = [(block.cells * max(block.itemsize, widest), block.cells) for block in blocks]
        return [max(column) for column in zip(*sizes, strict=True)] or [0, 0]

    def read(self, block: Block, tensors: Sequence[Tensors]) -> Words:
        """The cells, cast to the dtype of the message."""
        direct = _direct(block, tensors)
        if direct is not None:
            return direct
        copy_all(
            [_scratch_view(self._cells, part.dtype, part.there) for part in block.parts],
            [view_of(part.here, tensors[part.move]) for part in block.parts],
        )
        return _bytes_of(self._cells)[: block.bytes].view(WORDS[block.itemsize])

    def changed(self, block: Block, masks: Masks) -> Bools:
        """Which cells have changed. `block` is of the message that the masks would be sent in."""
        ours = [masks[part.move] for part in block.parts]
        known = [(part, mask) for part, mask in zip(block.parts, ours, strict=True) if mask is not None]
        if block.in_one_run and known:
            view = view_of(known[0][0].here, known[0][1])
            if view.dtype == torch.bool and view.device.type == "cpu":
                return bytes_at(view.data_ptr(), block.cells).view(np.bool_)
        mask = self._mask[: block.cells].view(torch.bool)
        if len(known) < len(ours):
            mask.fill_(True)
        copy_all(
            [_scratch_view(self._mask, torch.bool, part.there) for part, _ in known],
            [view_of(part.here, tensors) for part, tensors in known],
        )
        return _bytes_of(mask.view(torch.uint8)).view(np.bool_)

    def write(self, block: Block, changes: Changes, tensors: Sequence[Tensors]) -> None:
        """Write the cells that have changed, cast to the dtype of our tensors; leave the others."""
        if not len(changes.values):
            return
        direct = _direct(block, tensors)
        if direct is not None:
            direct[changes.cells] = changes.values
            return
        casts = {(part.dtype, tensors[part.move][part.here.tensor].dtype) for part in block.parts}
        for dtype, becomes in sorted(casts, key=str):
            parts = [
                part
                for part in block.parts
                if (part.dtype, tensors[part.move][part.here.tensor].dtype) == (dtype, becomes)
            ]
            ours = [view_of(part.here, tensors[part.move]) for part in parts]
            room = [_scratch_view(self._cells, becomes, part.there) for part in parts]
            if not isinstance(changes.cells, slice):  # what did not change, in its own dtype: not one bit is lost
                copy_all(room, ours)
            values = torch.from_numpy(changes.values.view(np.uint8)).view(dtype).to(becomes)
            words = _bytes_of(self._cells)[: block.cells * becomes.itemsize].view(WORDS[becomes.itemsize])
            words[changes.cells] = _bytes_of(values.view(torch.uint8)).view(WORDS[becomes.itemsize])
            copy_all(ours, room)


def _direct(block: Block, tensors: Sequence[Tensors]) -> Words | None:
    """The cells where they lie in our tensors, if they lie there as in the message."""
    if not block.in_one_run:
        return None
    part = block.parts[0]
    tensor = tensors[part.move][part.here.tensor]
    if tensor.dtype != part.dtype or tensor.device.type != "cpu":
        return None
    start = tensor.data_ptr() + part.here.offset * block.itemsize
    return bytes_at(start, block.bytes).view(WORDS[block.itemsize])


def _scratch_view(scratch: torch.Tensor, dtype: torch.dtype, window: Window) -> torch.Tensor:
    room = scratch[: scratch.numel() // dtype.itemsize * dtype.itemsize].view(dtype)
    return view_of(window, [room])


def _bytes_of(tensor: torch.Tensor) -> Bytes:
    return bytes_at(tensor.data_ptr(), tensor.nbytes)
