"""Fingerprints of values, the same under every sharding; and by them, what was sent against what arrived.

The bits of every element are multiplied by pseudo-random weights of its position, one for each axis, and added up
modulo 2**64. Sums can be made in any order and in any parts, so every rank adds up what it holds, and one small
reduction brings the parts together. Elements count as words of at most 32 bits: every one of their bits then reaches
33 bits of the sum or more. Two such sums with weights of their own make the fingerprint.

The weights follow from a key. The fingerprint that people see has a fixed key, so that it can be compared with that of
another day: who knows the weights can make other values with the same sums. A comparison within one run draws a key for
itself: nobody who made the values knew it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from hashlib import blake2b
from secrets import randbits
from typing import NamedTuple

import torch

from shardwise.errors import ExchangeError
from shardwise.exchange import Exchange, Move, Proposal, Transport, view_of
from shardwise.exchange.buffers import fresh
from shardwise.exchange.messages import Tensors
from shardwise.exchange.overflow import Loss, Lost
from shardwise.exchange.reduce import blocks
from shardwise.exchange.reduce import check as check_reduction
from shardwise.geometry import Boxes
from shardwise.layout import Layout, local_shapes, places_of
from shardwise.planning import plan

LANES = 2
STABLE = ""  # the key of fingerprints that are the same everywhere and always
WORD = {1: torch.uint8, 2: torch.int16, 4: torch.int32}
MASK = {1: 2**8 - 1, 2: 2**16 - 1, 4: 2**32 - 1}


def sums(
    boxes: Boxes,
    layout: Layout,
    me: int,
    local: Sequence[torch.Tensor],
    dtype: torch.dtype | None = None,
    *,
    key: str = STABLE,
) -> torch.Tensor:
    """Over the cells of boxes, as they lie in our tensors of a layout; as if they were cast to `dtype`."""
    totals = torch.zeros(LANES, dtype=torch.int64, device=local[0].device if local else None)
    if not boxes.count:
        return totals.cpu()
    _, places = places_of(layout, me, [t.stride() for t in local]).once(boxes)
    for cut, lo in zip(places.windows(), places.boxes.lo.tolist(), strict=True):
        cells = view_of(cut, local)
        for at in blocks(cells.shape):
            some = cells[at]
            corner = [a + s.start for a, s in zip(lo, at, strict=False)] + lo[len(at) :]
            totals += block_sums(some if dtype is None else some.to(dtype), corner, key)
    return totals.cpu()


def block_sums(cells: torch.Tensor, lo: list[int], key: str = STABLE) -> torch.Tensor:
    """The sums of one block of cells that begins at `lo`."""
    words = _words(cells)
    sums_of_lanes = list[torch.Tensor]()
    for lane in range(LANES):
        rest = words
        for axis in range(words.ndim - 1, -1, -1):
            start = lo[axis] if axis < len(lo) else 0
            seed = number(f"axis {axis - len(lo)} lane {lane}{key}")
            rest = (rest * _weights(seed, start, words.shape[axis], words.device)).sum(dim=-1)
        sums_of_lanes.append(rest)
    return torch.stack(sums_of_lanes)


def _words(cells: torch.Tensor) -> torch.Tensor:
    """The bits of every element as numbers below 2**32, one axis more than the cells."""
    size = cells.element_size()
    word = min(size, 4)
    flat = cells.contiguous().as_strided((cells.numel(),), (1,))  # dims of size 1 may have had any stride
    bits = flat.view(WORD[word]).reshape(*cells.shape, size // word)
    return bits.to(torch.int64) & MASK[word]


def _weights(seed: int, start: int, count: int, device: torch.device) -> torch.Tensor:
    """Odd pseudo-random numbers for the positions of an axis; the last axis is that of the words of an element."""
    x = torch.arange(start + 1, start + 1 + count, dtype=torch.int64, device=device) * -7046029254386353131
    x += seed
    for shift, factor in (30, -4658895280553007687), (27, -7723592293110705685):
        x = (x ^ ((x >> shift) & ((1 << (64 - shift)) - 1))) * factor
    return (x ^ ((x >> 31) & ((1 << 33) - 1))) | 1


def number(text: str) -> int:
    return int.from_bytes(blake2b(text.encode(), digest_size=8).digest(), "big", signed=True)


class PartialTensor(NamedTuple):
    """This rank's terms of a partial tensor."""

    layout: Layout
    tensors: Tensors
    dtype: torch.dtype
    device: torch.device


def verify(
    transport: Transport,
    moves: Sequence[Move],
    labels: Sequence[str],
    dtypes: Sequence[torch.dtype],
    within: Exchange,
    written: str,
) -> None:
    """Compare what was sent with what arrived, cell by cell, as sums over all ranks; all raise what any of them finds.

    `dtypes` are those of the targets. The exchange that runs now is `within`. `written` says what to expect of them.
    """
    if not moves:
        return
    number, key = within.number, _key(transport, within.number)
    parts = [
        _both(move, transport.me, dtype, key)
        for move, dtype in zip(_comparable(transport, moves, within), dtypes, strict=True)
    ]
    totals = (
        transport.all_reduce(torch.stack(parts).reshape(-1), "sum", number, in_order=False)()
        .reshape(-1, 2, LANES)
        .tolist()
    )
    wrong = [(label, *both) for label, both in zip(labels, totals, strict=True) if both[0] != both[1]]
    if wrong:
        (_, sent, arrived), names = wrong[0], ", ".join(label for label, *_ in wrong[:8])
        raise ExchangeError(
            f"verify: {names} did not arrive as sent: the sums of its cells were {_shown(sent)} and became "
            f"{_shown(arrived)}. {written}"
        )


def _comparable(transport: Transport, moves: Sequence[Move], within: Exchange) -> list[Move]:
    """Moves whose source has values. Terms say nothing of the value: they are reduced in another way to compare."""
    reducing = [at for at, move in enumerate(moves) if move.plan.reducing]
    partials = [
        PartialTensor(moves[at].plan.source, moves[at].source, moves[at].dtype, within.device) for at in reducing
    ]
    compared = list(moves)
    for at, values in zip(reducing, reduced_values(transport, partials, within), strict=True):
        move = moves[at]
        even = plan(spread_evenly(move.plan.source), move.plan.target)
        compared[at] = move._replace(plan=even, source=values)
    return compared


def reduced_values(transport: Transport, partials: Sequence[PartialTensor], within: Exchange) -> list[Tensors]:
    """What partial tensors come to, spread evenly over their owners: this rank's tensors. A part of that exchange."""
    if not partials:
        return []
    moves = list[Move]()
    for layout, tensors, dtype, device in partials:
        check_reduction(layout.op or "", dtype)
        even = plan(layout, spread_evenly(layout), itemsize=dtype.itemsize)
        memory = [fresh(shape, dtype, device) for shape in local_shapes(even.target, transport.me)]
        moves.append(Move.of(even, transport.me, tensors, memory, dtype))
    proposal = Proposal({"operation": "reduction of partial tensors"})
    Exchange(transport, proposal, moves, device=within.device, part_of=within).start().finish()
    return [move.target for move in moves]


def _key(transport: Transport, number: int) -> str:
    """A key for this comparison alone, to which every rank adds: sums that were made to be equal are not."""
    mine = torch.tensor([randbits(62), randbits(62)])
    return str(transport.all_reduce(mine, "sum", number, in_order=False)().tolist())


def worst_of_all(transport: Transport, lost: Sequence[Lost], number: int) -> list[Lost]:
    """The largest losses of any rank, the same on all: ranks may have counted the same values."""
    counts = [(one.loss.count, *_bits(one.loss.largest)) for one in lost]
    most = transport.all_reduce(torch.tensor(counts, dtype=torch.int64), "max", number, in_order=False)().tolist()
    worst = [replace(one, loss=Loss(count, _number(bits))) for one, (count, bits) in zip(lost, most, strict=True)]
    return [one for one in worst if one.loss.count]


def _bits(number: float) -> list[int]:
    """Of a number that is not negative: they are in the same order as the numbers."""
    bits: list[int] = torch.tensor([number], dtype=torch.float64).view(torch.int64).tolist()
    return bits


def _number(bits: int) -> float:
    return torch.tensor([bits], dtype=torch.int64).view(torch.float64).item()


def _both(move: Move, me: int, dtype: torch.dtype, key: str) -> torch.Tensor:
    """The sums of this rank: of what it sent, and of what it got."""
    both, source, target = torch.zeros(2, LANES, dtype=torch.int64), move.plan.source, move.plan.target
    if me in source or me in target:
        copies = move.plan.for_owner(me).copies
        first, sent, got = copies.step == 0, copies.source == me, copies.target == me
        both[0] += sums(copies.boxes.take(sent & first), source, me, move.source, dtype, key=key)
        both[0] += sums(copies.boxes.take(sent & ~first), target, me, move.target, key=key)
        both[1] += sums(copies.boxes.take(got), target, me, move.target, key=key)
    return both


def spread_evenly(layout: Layout) -> Layout:
    """A value that is partial there, in equal parts over the same owners."""
    dim = max(range(layout.ndim), key=layout.shape.__getitem__, default=None)
    owners = list(layout.owners())
    return Layout.replicated((), owners) if dim is None else Layout.chunk(layout.shape, dim, owners)


def _shown(numbers: list[int]) -> str:
    return "".join(f"{number & (2**64 - 1):016x}" for number in numbers)
