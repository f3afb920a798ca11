"""The work of one rank in one reshard, once it is known what the source is: plan, tensors on both sides, views."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import torch

from shardwise.errors import ExchangeError, RefusedValueError
from shardwise.exchange import Move
from shardwise.exchange.agreement import in_words
from shardwise.exchange.reduce import check as check_reduction
from shardwise.layout import Layout
from shardwise.planning import Plan, plan
from shardwise.tensor.held import Facts, Held
from shardwise.tensor.kinds import Kind
from shardwise.tensor.output import check_memory, local_shapes, room
from shardwise.wires import GroupWire


@dataclass(frozen=True)
class Options:
    """How to move."""

    dtype: torch.dtype | None = None
    max_bytes: int | None = None
    hosts: Any = None
    verify: bool = False


@dataclass(frozen=True)
class Work:
    """All that an exchange takes, and what its result is made of."""

    facts: Facts
    target: Kind
    move: Move
    dtype: torch.dtype  # of the result
    followed: bool  # by autograd

    @property
    def plan(self) -> Plan:
        """Between the two layouts."""
        return self.move.plan

    @staticmethod
    def of(wire: GroupWire, held: Held, facts: Facts, target: Kind, options: Options, out: Any) -> Work:
        """Checked as far as one rank can; room for the result is there."""
        becomes = options.dtype or facts.dtype
        for side, layout in ("source", facts.source), ("target", target.layout):
            _check_owners(wire, side, layout)
        _check_cast(facts.dtype, becomes)
        made, travels = _plan(facts, target.layout, becomes, options)
        source = _local(held, facts, wire.me)
        followed = facts.gradient and (becomes.is_floating_point or becomes.is_complex)
        device = target.device or (source[0].device if source else torch.device(facts.device))
        tensors = room(out, target, wire.me, becomes, source=source, device=device, followed=followed)
        return Work(facts, target, Move.of(made, wire.me, source, tensors, travels), becomes, followed)


def _plan(facts: Facts, target: Layout, becomes: torch.dtype, options: Options) -> tuple[Plan, torch.dtype]:
    """The plan, and the dtype of its messages: cast before they travel where that is shorter, unless they are terms."""
    reducing = plan(facts.source, target).reducing
    if reducing:
        check_reduction(facts.source.op or "", facts.dtype)
    travels = becomes if becomes.itemsize < facts.dtype.itemsize and not reducing else facts.dtype
    how = {"max_bytes": options.max_bytes, "hosts": options.hosts}
    return plan(facts.source, target, itemsize=travels.itemsize, **how), travels


def _local(held: Held, facts: Facts, me: int) -> list[torch.Tensor]:
    """This rank's local tensors of the source, which must be those of the layout."""
    tensors = [] if held.kind is None else held.kind.local(held.tensors)
    expected, found = local_shapes(facts.source, me), tuple(tuple(t.shape) for t in tensors)
    if not tensors and all(0 in shape for shape in expected):
        return [torch.empty(shape, dtype=facts.dtype, device=facts.device) for shape in expected]
    if found != expected:
        brought = f"tensors of shapes {list(found)}" if tensors else "None"
        raise ExchangeError(
            f"the source {facts.source!r} gives rank {me} tensors of shapes {list(expected)}, not {brought}"
            + ("" if tensors else ": pass None only on ranks that it does not name")
        )
    for tensor in tensors:
        check_memory(tensor, "the source")
    return [t.resolve_conj().resolve_neg() for t in tensors]


def _check_owners(wire: GroupWire, side: str, layout: Layout) -> None:
    missing = wire.lacks(layout)
    if missing:
        raise RefusedValueError(
            f"the {side} {layout!r} names {in_words(missing)}, but those who call are {in_words(wire.owners)}: "
            f"use a group that has all of them, or other owners"
        )


@lru_cache(maxsize=1024)
def _check_cast(dtype: torch.dtype, becomes: torch.dtype) -> None:
    if not isinstance(becomes, torch.dtype):
        raise ExchangeError(f"dtype= must be a torch.dtype, not {becomes!r}")
    if dtype.is_complex and not becomes.is_complex:
        raise ExchangeError(f"{dtype} cannot be cast to {becomes}: the imaginary part would be lost")
    try:
        torch.zeros(1, dtype=becomes).copy_(torch.zeros(1, dtype=dtype))
    except RuntimeError as error:
        raise ExchangeError(f"{dtype} cannot be cast to {becomes}: {error}") from None
