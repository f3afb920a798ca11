"""What was sent against what arrived, by sums of both.

Every rank sums what it holds, and one small reduction brings the sums together. The fingerprint that people see has a
fixed key, so that it can be compared with that of another day: who knows the weights can make other values with the
same sums. A comparison within one run draws a key for itself: nobody who made the values knew it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from secrets import randbits
from typing import NamedTuple

import torch

from shardwise.errors import ExchangeError
from shardwise.exchange import Exchange, Move, Proposal, Transport
from shardwise.exchange.buffers import fresh
from shardwise.exchange.messages import Tensors
from shardwise.exchange.overflow import Loss, Lost
from shardwise.exchange.reduce import check as check_reduction
from shardwise.job.sums import LANES, sums
from shardwise.layout import Layout, local_shapes
from shardwise.planning import Hosts, plan


class PartialTensor(NamedTuple):
    """This rank's terms of a partial tensor, and the hosts that a plan of them heeds."""

    layout: Layout
    tensors: Tensors
    dtype: torch.dtype
    device: torch.device
    hosts: Hosts | None

    def reduced(self, me: int) -> Move:
        """To its values, spread evenly over their owners, in memory of their own."""
        check_reduction(self.layout.op or "", self.dtype)
        even = plan(self.layout, spread_evenly(self.layout), itemsize=self.dtype.itemsize, hosts=self.hosts)
        memory = [fresh(shape, self.dtype, self.device) for shape in local_shapes(even.target, me)]
        return Move.of(even, me, self.tensors, memory, self.dtype)


def key_part() -> tuple[int, int]:
    """What a rank adds to the key of a comparison: the note of the exchange before it."""
    return randbits(62), randbits(62)


def verify(
    transport: Transport,
    moves: Sequence[Move],
    labels: Sequence[str],
    dtypes: Sequence[torch.dtype],
    within: Exchange,
    written: str,
) -> None:
    """Compare what was sent with what arrived, cell by cell, as sums over all ranks; all raise what any of them finds.

    `dtypes` are those of the targets. The exchange that runs now is `within`, to whose key every rank has added: sums
    that were made to be equal are not. `written` says what to expect of the targets.
    """
    if not moves:
        return
    number, key = within.number, str(within.noted().tolist())
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
        PartialTensor(move.plan.source, move.source, move.dtype, within.device, move.plan.hosts)
        for move in (moves[at] for at in reducing)
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
    moves = [partial.reduced(transport.me) for partial in partials]
    proposal = Proposal({"operation": "reduction of partial tensors"})
    Exchange(transport, proposal, moves, device=within.device, part_of=within).start().finish()
    return [move.target for move in moves]


def worst_of_all(transport: Transport, lost: Sequence[Lost], number: int) -> list[Lost]:
    """The largest losses of any rank, the same on all: ranks may have counted the same values."""
    counts = [(one.loss.count, *_bits(one.loss.largest)) for one in lost]
    most = transport.all_reduce(
        torch.tensor(counts, dtype=torch.int64, device="cpu"), "max", number, in_order=False
    )().tolist()
    worst = [replace(one, loss=Loss(count, _number(bits))) for one, (count, bits) in zip(lost, most, strict=True)]
    return [one for one in worst if one.loss.count]


def _bits(number: float) -> list[int]:
    """Of a number that is not negative: they are in the same order as the numbers."""
    bits: list[int] = torch.tensor([number], dtype=torch.float64, device="cpu").view(torch.int64).tolist()
    return bits


def _number(bits: int) -> float:
    return torch.tensor([bits], dtype=torch.int64, device="cpu").view(torch.float64).item()


def _both(move: Move, me: int, dtype: torch.dtype, key: str) -> torch.Tensor:
    """The sums of this rank: of what it sent, and of what it got."""
    both, source, target = torch.zeros(2, LANES, dtype=torch.int64, device="cpu"), move.plan.source, move.plan.target
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
