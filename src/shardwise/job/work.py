"""The work of one rank in one reshard, once it is known what the source is: plan, tensors on both sides, views."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from shardwise.containers.container import Kind
from shardwise.containers.local_parts import local_shapes
from shardwise.containers.memory import check_memory
from shardwise.errors import ExchangeError, RefusedValueError
from shardwise.exchange import Move
from shardwise.exchange.agreement import in_words
from shardwise.exchange.overflow import Losses, Overflow, check_overflow, may_overflow, refuse_loss
from shardwise.job.casting import travels_as
from shardwise.job.output import room
from shardwise.job.source import Held, SourceFacts
from shardwise.layout import Layout
from shardwise.planning import Plan, plan
from shardwise.transports import GroupTransport

NAME = "the tensor"  # which has no other name in a reshard


@dataclass(frozen=True)
class Options:
    """How to move."""

    dtype: torch.dtype | None = None
    max_bytes: int | None = None
    hosts: Any = None
    verify: bool = False
    transport: Any = "auto"
    overflow: Overflow = "refuse"


@dataclass(frozen=True)
class Work:
    """All that an exchange takes, and what its result is made of."""

    facts: SourceFacts
    target: Kind
    move: Move
    dtype: torch.dtype  # of the result
    followed: bool  # by autograd
    losses: Losses | None = None  # of what terms come to: known once they are reduced

    @property
    def plan(self) -> Plan:
        """Between the two layouts."""
        return self.move.plan

    @staticmethod
    def of(transport: GroupTransport, held: Held, facts: SourceFacts, target: Kind, options: Options, out: Any) -> Work:
        """Checked as far as one rank can; room for the result is there."""
        transport.check_choice(options.transport)
        check_overflow(options.overflow)
        becomes = options.dtype or facts.dtype
        for side, layout in ("source", facts.source), ("target", target.layout):
            check_owners(transport, f"the {side}", layout)
        travels = travels_as(facts.source, target.layout, facts.dtype, becomes)
        how = {"max_bytes": options.max_bytes, "hosts": options.hosts}
        made = plan(facts.source, target.layout, itemsize=travels.itemsize, **how)
        source = _local(held, facts, transport.me)
        watched = options.overflow == "refuse" and may_overflow(facts.dtype, becomes)
        losses = Losses() if watched else None
        if losses is not None and not made.reducing:
            losses.look(NAME, source, becomes)
            refuse_loss(losses.listed())
        followed = facts.gradient and (becomes.is_floating_point or becomes.is_complex)
        device = target.device or (source[0].device if source else torch.device(facts.device))
        tensors = room(out, target, transport, becomes, source=source, device=device, followed=followed)
        look = losses.looking(NAME, facts.dtype, becomes) if losses is not None else None
        move = Move.of(made, transport.me, source, tensors, travels, look)
        return Work(facts, target, move, becomes, followed, losses if made.reducing else None)


def _local(held: Held, facts: SourceFacts, me: int) -> list[torch.Tensor]:
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


def check_owners(transport: GroupTransport, side: str, layout: Layout) -> None:
    """Refuse owners that do not call."""
    missing = transport.lacks(layout)
    if missing:
        raise RefusedValueError(
            f"{side} {layout!r} names {in_words(missing)}, but those who call are {in_words(transport.owners)}: "
            f"use a group that has all of them, or other owners"
        )
