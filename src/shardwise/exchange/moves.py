"""Moves: the tensors of an exchange, and which of them may go as deltas."""

from __future__ import annotations

from typing import Literal, NamedTuple

import torch

from shardwise.exchange.messages import Memory, Program, Tensors, program, sums_of
from shardwise.exchange.reduce import Look, sum_dtype
from shardwise.exchange.transport import Transport
from shardwise.planning import Plan

NONE: Tensors = []  # never changed
Delta = Literal[False, "between hosts", "always"]  # which messages go as deltas, if their moves know what changed


class Move(NamedTuple):
    """One tensor of an exchange: its plan, and this owner's tensors on both sides; `dtype` is that of the messages.

    `look` sees what terms come to, before that is cast. `changed` has a bool or uint8 tensor of the shape of every
    source: not 0 where the element, as it is sent, may differ from what the targets hold. Without it all may. `sums` is
    memory for what hosts add up before anything crosses.
    """

    plan: Plan
    program: Program
    source: Tensors
    target: Tensors
    dtype: torch.dtype
    look: Look | None = None
    changed: Tensors | None = None
    sums: Tensors = NONE

    @staticmethod
    def of(
        plan: Plan, owner: int, source: Tensors, target: Tensors, dtype: torch.dtype, look: Look | None = None
    ) -> Move:
        """With the views that carry it out; those are kept by the strides of the tensors."""
        strides = (tuple(t.stride() for t in side) for side in (source, target))
        device = next((tensor.device for tensor in (*source, *target)), None)
        wide = sum_dtype(dtype) if any(leg.makes_sums for leg in plan.legs) else dtype
        sums = [torch.empty(shape, dtype=wide, device=device) for shape in sums_of(plan, owner)]
        return Move(plan, program(plan, owner, *strides), source, target, dtype, look, sums=sums)

    def read(self, key: tuple[int, int]) -> Tensors:
        """The tensors that are read in a round of a step."""
        stage = self.program.stages.get(key)
        return self._memory(stage.reads) if stage else []

    def written(self, key: tuple[int, int]) -> Tensors:
        """The tensors that are written in a round of a step."""
        return self._memory(self.program.stages[key].writes)

    def _memory(self, which: Memory) -> Tensors:
        return {Memory.SOURCE: self.source, Memory.TARGET: self.target, Memory.SUMS: self.sums}[which]

    def program_of_masks(self, owner: int) -> Program:
        """The program as it would be if the masks were sent, which have strides of their own."""
        if self.changed is None:
            return self.program
        strides = (tuple(t.stride() for t in side) for side in (self.changed, self.target))
        return program(self.plan, owner, *strides)


def crosses_link(transport: Transport, peer: int, delta: Delta, *, direct: bool) -> bool:
    """True if messages to and from a peer may be deltas."""
    return delta == "always" or (delta == "between hosts" and not (direct and transport.shares_memory(peer)))


def keeps(plan: Plan) -> bool:
    """True if the targets still hold what was received: not terms, which are reduced, nor targets filled anew."""
    return not plan.reducing and plan.target.op is None
