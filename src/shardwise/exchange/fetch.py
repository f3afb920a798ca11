"""Cells straight from the tensors of a peer into ours, where these can be read from here: nobody packs."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from math import prod
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import torch

from shardwise.exchange.cuts import Cut
from shardwise.exchange.program import Pair, across
from shardwise.exchange.schedule import Parcel, Share, Tensors
from shardwise.exchange.views import Views
from shardwise.exchange.wire import Theirs
from shardwise.geometry import Ints, ints

if TYPE_CHECKING:
    from shardwise.exchange.run import Move

SHORT = 512  # bytes of a run from which on it is worth to read it by itself


class Runs(NamedTuple):
    """Ranges of bytes: addresses here, and the tensors and offsets of a peer's that they come from."""

    here: Ints
    tensor: Ints
    offset: Ints
    sizes: Ints


def fetch(
    key: tuple[int, int], parcel: Parcel, theirs: Theirs, moves: Sequence[Move], owner: int, views: Views
) -> None:
    """Copy what the message would have had. `key` is that of the stage."""
    if not theirs.attached:
        views.copy_known(parcel, theirs.key, lambda: _views(key, parcel, theirs, moves, owner))
        return
    room, runs = views.known(parcel, theirs.key, lambda: _runs(key, parcel, theirs, moves, owner))
    theirs.read(*runs)
    if room is not None:
        views.unpack(parcel, room, [move.target for move in moves])


def _parts(
    key: tuple[int, int], parcel: Parcel, theirs: Theirs, moves: Sequence[Move], owner: int, *, packed: bool
) -> Iterator[tuple[int, Share, tuple[Pair, ...]]]:
    """For every part the number of the peer's first tensor of it, and its cells there and here."""
    first = 0
    for part in parcel.parts:
        move = moves[part.move]
        layout = move.plan.source if key[0] == 0 else move.plan.target
        count = len(layout.local_shapes(parcel.peer))
        strides = tuple(theirs.strides[first : first + count])
        ours = () if packed else tuple(t.stride() for t in move.target)
        yield first, part, across(move.plan, key, (parcel.peer, owner), strides, ours)
        first += count


def _views(
    key: tuple[int, int], parcel: Parcel, theirs: Theirs, moves: Sequence[Move], owner: int
) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    there, here, mapped = list[torch.Tensor](), list[torch.Tensor](), theirs.mapped()
    for first, part, pairs in _parts(key, parcel, theirs, moves, owner, packed=False):
        for pair in pairs:
            there.append(_typed(mapped[first + pair.here.tensor], part.dtype, pair.here))
            here.append(pair.there.of(moves[part.move].target))
    return here, there


def _typed(data: torch.Tensor, dtype: torch.dtype, cut: Cut) -> torch.Tensor:
    start = cut.offset * dtype.itemsize
    words = data[start : start + cut.reach * dtype.itemsize].view(dtype)
    return words.as_strided(cut.shape, cut.strides)


def _runs(
    key: tuple[int, int], parcel: Parcel, theirs: Theirs, moves: Sequence[Move], owner: int
) -> tuple[torch.Tensor | None, Runs]:
    """Where they are long enough here, into our tensors; else into a message of our own."""
    castless = all(t.dtype == part.dtype for part in parcel.parts for t in moves[part.move].target)
    if castless:
        runs = _listed(
            _ranges(moves[part.move].target, first, part, pairs)
            for first, part, pairs in _parts(key, parcel, theirs, moves, owner, packed=False)
        )
        if parcel.bytes >= SHORT * len(runs.sizes):
            return None, runs
    room = torch.empty(parcel.bytes, dtype=torch.uint8)
    return room, _listed(
        _ranges([part.cells(room)], first, part, pairs)
        for first, part, pairs in _parts(key, parcel, theirs, moves, owner, packed=True)
    )


def _ranges(ours: Tensors, first: int, part: Share, pairs: Sequence[Pair]) -> list[Runs]:
    size, found = part.dtype.itemsize, list[Runs]()
    for there, here in pairs:
        cells, dim = 1, len(there.shape)
        while dim and (there.shape[dim - 1] == 1 or there.strides[dim - 1] == here.strides[dim - 1] == cells):
            dim -= 1
            cells *= there.shape[dim]
        start = ours[here.tensor].data_ptr() + here.offset * size
        count = prod(there.shape[:dim])
        found.append(
            Runs(
                start + size * _offsets(here, dim),
                np.full(count, first + there.tensor),
                size * (there.offset + _offsets(there, dim)),
                np.full(count, size * cells),
            )
        )
    return found


def _offsets(cut: Cut, dims: int) -> Ints:
    """Of all elements of the first dims."""
    found = ints([0])
    for size, stride in zip(cut.shape[:dims], cut.strides[:dims], strict=True):
        found = (found[:, None] + np.arange(size) * stride).reshape(-1)
    return found


def _listed(parts: Iterator[list[Runs]]) -> Runs:
    columns = zip(*(runs for part in parts for runs in part), strict=True)
    return Runs(*(ints(np.concatenate(column)) for column in columns))
