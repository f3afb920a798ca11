"""Copies cells straight from the tensors of a peer into those of this owner, where it can read them: nobody packs."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from math import prod
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import torch

from shardwise.exchange.buffers import Sides, ViewCache, copy_all
from shardwise.exchange.messages import Message, MessagePart, Pair, across, view_of
from shardwise.exchange.transport import PeerTensors
from shardwise.geometry import Ints, Window, ints

if TYPE_CHECKING:
    from shardwise.exchange.moves import Move

SHORT = 1024  # bytes of an average run; shorter ones are read into a message, and unpacked
StageKey = tuple[int, int]  # step and round
# the number of the peer's first tensor of a part, the part, and its cells there and here
PartCells = tuple[int, MessagePart, tuple[Pair, ...]]


class Runs(NamedTuple):
    """Ranges of bytes to read: their place here, and the numbers of a peer's tensors and the offsets there.

    A place here is an address; or, if `packed`, an offset in a message that is unpacked afterwards.
    """

    here: Ints
    tensor: Ints
    offset: Ints
    sizes: Ints
    packed: bool


def read_from_peer(
    key: StageKey, message: Message, theirs: PeerTensors, moves: Sequence[Move], owner: int, views: ViewCache
) -> None:
    """Copy what the message would have held. `key` is that of the stage."""

    def cells(*, packed: bool) -> Iterator[PartCells]:
        return _cells(key, message, theirs, moves, owner, packed=packed)

    if theirs.mapped:
        copy_all(
            *views.get_or_make(message, theirs.key, lambda: _views(cells(packed=False), theirs.bytes_of_each(), moves))
        )
        return
    runs = views.get_or_make(message, theirs.key, lambda: _runs(cells, message, moves))
    if not runs.packed:
        theirs.read(*runs[:4])
        return
    room = views.spare(message.bytes)
    theirs.read(runs.here + room.data_ptr(), *runs[1:4])
    views.unpack(message, room, [move.target for move in moves])


def _cells(
    key: StageKey, message: Message, theirs: PeerTensors, moves: Sequence[Move], owner: int, *, packed: bool
) -> Iterator[PartCells]:
    first = 0
    for part in message.parts:
        plan, target = moves[part.move].plan, moves[part.move].target
        count = len((plan.source if key[0] == 0 else plan.target).local_shapes(message.peer))
        strides = tuple(theirs.strides[first : first + count])
        ours = () if packed else tuple(t.stride() for t in target)
        yield first, part, across(plan, key, (message.peer, owner), strides, ours)
        first += count


def _views(cells: Iterable[PartCells], mapped: Sequence[torch.Tensor], moves: Sequence[Move]) -> Sides:
    here, there = list[torch.Tensor](), list[torch.Tensor]()
    for first, part, pairs in cells:
        for theirs, ours in pairs:
            here.append(view_of(ours, moves[part.move].target))
            there.append(_typed(mapped[first + theirs.tensor], part.dtype, theirs))
    return here, there


def _typed(data: torch.Tensor, dtype: torch.dtype, window: Window) -> torch.Tensor:
    start = window.offset * dtype.itemsize
    words = data[start : start + window.reach * dtype.itemsize].view(dtype)
    return words.as_strided(window.shape, window.strides)


def _runs(cells: Callable[..., Iterator[PartCells]], message: Message, moves: Sequence[Move]) -> Runs:
    """Straight into the targets, if they are CPU memory of the same dtype and runs are long; else into a message."""
    targets = [(part.dtype, tensor) for part in message.parts for tensor in moves[part.move].target]
    if all(tensor.dtype == dtype and tensor.device.type == "cpu" for dtype, tensor in targets):
        parts = list(cells(packed=False))
        count = sum(prod(pair.here.shape[: _outer(pair)]) for *_, pairs in parts for pair in pairs)
        if message.bytes >= SHORT * count:
            return _concatenate(
                (_ranges(moves[part.move].target[ours.tensor].data_ptr(), first, part, Pair(theirs, ours))
                for first, part, pairs in parts
                for theirs, ours in pairs),
                packed=False,
            )  # fmt: skip
    ranges = (_ranges(part.start, first, part, pair) for first, part, pairs in cells(packed=True) for pair in pairs)
    return _concatenate(ranges, packed=True)


def _outer(pair: Pair) -> int:
    """The number of leading dims that separate runs: along the others, cells are contiguous on both sides."""
    (_, shape, there, _), (_, _, here, _) = pair
    cells, dim = 1, len(shape)
    while dim and (shape[dim - 1] == 1 or there[dim - 1] == here[dim - 1] == cells):
        dim -= 1
        cells *= shape[dim]
    return dim


def _ranges(base: int, first: int, part: MessagePart, pair: Pair) -> tuple[Ints, Ints, Ints, Ints]:
    """The runs of a pair of places, which begins at byte `base` here."""
    size, dims, (there, here) = part.dtype.itemsize, _outer(pair), pair
    ours, theirs = size * here.elements(dims), size * there.elements(dims)
    length = size * prod(there.shape[dims:])
    return base + ours, np.full(len(ours), first + there.tensor), theirs, np.full(len(ours), length)


def _concatenate(ranges: Iterable[tuple[Ints, Ints, Ints, Ints]], *, packed: bool) -> Runs:
    here, tensor, offset, sizes = (ints(np.concatenate(column)) for column in zip(*ranges, strict=True))
    return Runs(here, tensor, offset, sizes, packed)
