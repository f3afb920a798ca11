"""What was sent against what is held: the sums of fingerprints on both sides of a move."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from secrets import randbits
from typing import TYPE_CHECKING

import torch

from shardwise.errors import ExchangeError
from shardwise.exchange import Exchange, Move
from shardwise.exchange.overflow import Loss, Lost
from shardwise.job.checksum import LANES, sums
from shardwise.layout import Layout
from shardwise.planning import Plan, plan
from shardwise.transports import GroupTransport

if TYPE_CHECKING:
    from shardwise.job.collective_call import Call


def verify(call: Call, exchange: Exchange) -> None:
    """Compare what was sent with what is held now, cell by cell and bit by bit, as sums over all ranks."""
    source, target, me = call.work.plan.source, call.work.plan.target, call.transport.me
    read: Sequence[torch.Tensor] = call.work.move.source
    held, dtype, made = call.work.move.target, call.work.dtype, call.work.plan
    if made.reducing:  # the terms say nothing of the value: reduce them in another way, and compare with that
        source = spread(made.source)
        read = call.value(call.transport, call.held, call.work.facts, source, exchange)
        made = plan(source, target)
    found = _both(made, me, read, held, dtype, _drawn(call.transport, exchange.number))
    total = call.transport.reduced(found.reshape(-1), "sum", apart=exchange.number)().reshape(2, LANES).tolist()
    if total[0] != total[1]:
        raise ExchangeError(
            f"verify: a tensor of shape {target.shape} that went from {call.work.plan.source!r} to {target!r} is not "
            f"what it was: the sums of its cells were {_shown(total[0])} and became {_shown(total[1])}. Do not use it"
        )


def compared(
    transport: GroupTransport, moves: Sequence[Move], names: Sequence[str], dtypes: Sequence[torch.dtype]
) -> None:
    """Compare what was sent with what is held now, for many tensors at once; all ranks raise what any of them finds."""
    if not moves:
        return
    key = _drawn(transport)
    parts = [
        _both(move.plan, transport.me, move.source, move.target, dtype, key)
        for move, dtype in zip(moves, dtypes, strict=True)
    ]
    total = transport.reduced(torch.stack(parts).reshape(-1), "sum")().reshape(-1, 2, LANES).tolist()
    wrong = [name for name, (sent, got) in zip(names, total, strict=True) if sent != got]
    if wrong:
        raise ExchangeError(f"verify: {', '.join(map(repr, wrong[:8]))} did not arrive as sent: nothing was written")


def _drawn(transport: GroupTransport, apart: int | None = None) -> str:
    """A key for this comparison alone, to which every rank adds: sums that were made to be equal are not."""
    mine = torch.tensor([randbits(62), randbits(62)])
    return str(transport.reduced(mine, "sum", apart=apart)().tolist())


def worst_of_all(transport: GroupTransport, lost: Sequence[Lost], *, apart: int | None = None) -> list[Lost]:
    """The largest losses of any rank, the same on all: ranks may have counted the same values."""
    found = [(one.loss.count, *_bits(one.loss.largest)) for one in lost]
    most = transport.reduced(torch.tensor(found, dtype=torch.int64), "max", apart=apart)().tolist()
    worst = [replace(one, loss=Loss(count, _number(bits))) for one, (count, bits) in zip(lost, most, strict=True)]
    return [one for one in worst if one.loss.count]


def _bits(number: float) -> list[int]:
    """Of a number that is not negative: they are in the same order as the numbers."""
    bits: list[int] = torch.tensor([number], dtype=torch.float64).view(torch.int64).tolist()
    return bits


def _number(bits: int) -> float:
    return torch.tensor([bits], dtype=torch.int64).view(torch.float64).item()


def _both(
    made: Plan,
    me: int,
    read: Sequence[torch.Tensor],
    held: Sequence[torch.Tensor],
    dtype: torch.dtype,
    key: str,
) -> torch.Tensor:
    """The sums of this rank: of what it sent, and of what it got."""
    found, source, target = torch.zeros(2, LANES, dtype=torch.int64), made.source, made.target
    if me in source or me in target:
        copies = made.for_owner(me).copies
        first, sent, got = copies.step == 0, copies.source == me, copies.target == me
        found[0] += sums(copies.boxes.take(sent & first), source, me, read, dtype, key=key)
        found[0] += sums(copies.boxes.take(sent & ~first), target, me, held, key=key)
        found[1] += sums(copies.boxes.take(got), target, me, held, key=key)
    return found


def spread(layout: Layout) -> Layout:
    """A value that is partial there, in equal parts over the same owners."""
    dim = max(range(layout.ndim), key=layout.shape.__getitem__, default=None)
    owners = list(layout.owners())
    return Layout.replicated((), owners) if dim is None else Layout.chunk(layout.shape, dim, owners)


def _shown(numbers: list[int]) -> str:
    return "".join(f"{number & (2**64 - 1):016x}" for number in numbers)
