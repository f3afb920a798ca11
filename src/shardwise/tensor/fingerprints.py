"""Fingerprints of values: the same under every sharding, different where any two elements are swapped.

The bits of every element are multiplied by pseudo-random weights of its position, one for each axis, and added up
modulo 2**64. Sums can be made in any order and in any parts, so every rank adds up what it holds, and one small
reduction brings the parts together. Elements count as words of at most 32 bits: every one of their bits then reaches
33 bits of the sum or more. Two such sums with weights of their own make the fingerprint.
"""

from __future__ import annotations

from dataclasses import replace
from hashlib import blake2b
from typing import Any

import torch
import torch.distributed as dist

from shardwise.errors import ExchangeError
from shardwise.exchange import Exchange, Terms
from shardwise.exchange.cuts import Places
from shardwise.exchange.reduce import blocks
from shardwise.layout import Layout
from shardwise.planning import Copies, plan
from shardwise.tensor.call import Call, Held, Options
from shardwise.tensor.kinds import Kind, Tensors
from shardwise.tensor.sharded import Own
from shardwise.tensor.wiring import wire_for
from shardwise.wires import GroupWire

LANES = 2
WORD = {1: torch.uint8, 2: torch.int16, 4: torch.int32}
MASK = {1: 2**8 - 1, 2: 2**16 - 1, 4: 2**32 - 1}


def fingerprint(x: Any, *, group: dist.ProcessGroup | None = None) -> str:
    """32 hex digits of the values of a sharded tensor: positions, bits, shape and dtype. Every rank of its group calls.

    The same under every sharding and number of ranks. The terms of a partial tensor are reduced first. A rank that
    holds nothing still says how the tensor lies: it passes its container without shards.
    """
    held = Held.of(x)
    kind = held.kind
    wire = wire_for(group, kind, lambda _: kind or Own(Layout.replicated((), [0])))
    if wire is None:
        raise ExchangeError(
            "this rank is not in the mesh of the tensor: only those that are may ask for its fingerprint"
        )
    error = held.error or (None if kind else ExchangeError("fingerprint needs a sharded tensor, not None"))
    fields = {"operation": "fingerprint", "source": kind and kind.layout}
    Exchange(wire, Terms(fields, error=error)).start().finish()
    assert kind is not None, "agreed"
    sums = _once(*_reduced(wire, held, kind), wire.me)
    if wire.me == kind.layout.owners()[0]:
        sums[0] += _number(f"dtype {held.dtype}")
    total = wire.reduced(sums, "sum")()
    head = f"shardwise values 1 {kind.layout.shape} ".encode()
    return blake2b(head + total.cpu().numpy().tobytes(), digest_size=16).hexdigest()


def verify(call: Call) -> None:
    """Compare what was sent with what is held now, cell by cell and bit by bit, as sums over all ranks."""
    source, target, me = call.plan.source, call.plan.target, call.wire.me
    local: Tensors = call.source
    dtype = call.options.dtype or call.facts["dtype"]
    made = call.plan
    if made.reducing:  # the terms say nothing of the value: reduce them by another way, and compare with that
        held = Held(Own(source), tuple(local), call.facts["dtype"], False)
        source, local = _reduced(call.wire, held, Own(source))
        made = plan(source, target)
    sums = torch.zeros(2, LANES, dtype=torch.int64)
    if me in source or me in target:
        copies = made.for_owner(me).copies
        first, sent, got = copies.step == 0, copies.source == me, copies.target == me
        sums[0] += _sums(copies.take(sent & first), source, me, local, dtype)
        sums[0] += _sums(copies.take(sent & ~first), target, me, call.tensors, dtype)
        sums[1] += _sums(copies.take(got), target, me, call.tensors, dtype)
    sent_total, got_total = call.wire.reduced(sums.reshape(-1), "sum")().reshape(2, LANES).tolist()
    if sent_total != got_total:
        raise ExchangeError(
            f"verify: a tensor of shape {target.shape} that went from {source!r} to {target!r} is not what it was: "
            f"the fingerprint of its cells was {_shown(sent_total)} and became {_shown(got_total)}. Do not use it"
        )


def _reduced(wire: GroupWire, held: Held, kind: Kind) -> tuple[Layout, Tensors]:
    """This rank's local tensors of the value itself: where it is partial, reduced into equal parts."""
    layout = kind.layout
    if layout.op is None:
        return layout, kind.local(held.tensors)
    dim = max(range(layout.ndim), key=layout.shape.__getitem__, default=None)
    owners = list(layout.owners())
    whole = Layout.replicated((), owners) if dim is None else Layout.chunk(layout.shape, dim, owners)
    apart = replace(held, gradient=False)
    return whole, Call(wire, apart, lambda _: Own(whole), Options()).start().run().tensors


def _once(layout: Layout, local: Tensors, me: int) -> torch.Tensor:
    """The sums of the cells for which this rank speaks: every cell has one such rank, also where there are replicas."""
    if me not in layout:
        return torch.zeros(LANES, dtype=torch.int64)
    copies = plan(layout, Layout.replicated(layout.shape, [layout.owners()[0]])).for_owner(me).copies
    return _sums(copies.take(copies.source == me), layout, me, local, None)


def _sums(copies: Copies, layout: Layout, me: int, local: Tensors, dtype: torch.dtype | None) -> torch.Tensor:
    """Over the cells of these copies, as they lie in our tensors of a layout."""
    found = torch.zeros(LANES, dtype=torch.int64)
    if not len(copies):
        return found
    places = Places.of_owner(layout, me, [t.stride() for t in local]).once(copies.boxes)
    for cut, lo in zip(places.cuts(), places.boxes.lo.tolist(), strict=True):
        cells = cut.of(local)
        for at in blocks(cells.shape):
            some = cells[at]
            corner = [a + s.start for a, s in zip(lo, at, strict=False)] + lo[len(at) :]
            found += _block(some if dtype is None else some.to(dtype), corner)
    return found


def _block(cells: torch.Tensor, lo: list[int]) -> torch.Tensor:
    """The sums of one block of cells that begins at `lo`."""
    words = _words(cells)
    found = torch.zeros(LANES, dtype=torch.int64)
    for lane in range(LANES):
        rest = words
        for axis in range(words.ndim - 1, -1, -1):
            start = lo[axis] if axis < len(lo) else 0
            rest = (rest * _weights(lane, axis - len(lo), start, words.shape[axis], words.device)).sum(dim=-1)
        found[lane] = rest
    return found


def _words(cells: torch.Tensor) -> torch.Tensor:
    """The bits of every element as numbers below 2**32, one axis more than the cells."""
    size = cells.element_size()
    word = min(size, 4)
    bits = cells.contiguous().reshape(*cells.shape, 1).view(WORD[word])
    return bits.to(torch.int64) & MASK[word]


def _weights(lane: int, axis: int, start: int, count: int, device: torch.device) -> torch.Tensor:
    """Odd pseudo-random numbers for the positions of an axis; the last axis is that of the words of an element."""
    x = torch.arange(start + 1, start + 1 + count, dtype=torch.int64, device=device) * -7046029254386353131
    x += _number(f"axis {axis} lane {lane}")
    for shift, factor in (30, -4658895280553007687), (27, -7723592293110705685):
        x = (x ^ ((x >> shift) & ((1 << (64 - shift)) - 1))) * factor
    return (x ^ ((x >> 31) & ((1 << 33) - 1))) | 1


def _number(text: str) -> int:
    return int.from_bytes(blake2b(text.encode(), digest_size=8).digest(), "big", signed=True)


def _shown(sums: list[int]) -> str:
    return "".join(f"{number & (2**64 - 1):016x}" for number in sums)
