"""Autograd through a reshard: backward is the same walk with the layouts turned round."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch

from shardwise.containers.own_container import OwnContainer
from shardwise.tensor.call import Call, Source


def with_autograd(call: Call) -> tuple[list[torch.Tensor], torch.Tensor | None]:
    """The finished call's tensors as autograd sees them.

    A rank that holds nothing of the target has none; it gets a stand-in, on which backward can be called.
    """
    outputs = call.target.from_local(call.move.target)
    if not call.followed:
        return outputs, None
    inputs = call.source.tensors or (call.source.stand_in,)
    with torch.enable_grad():  # as it was when the call was made, wherever it is waited for
        if inputs == (None,):
            inputs = (torch.empty(0, requires_grad=True),)  # so that backward comes by here too
        results = Reshard.apply(call, outputs, *inputs)  # type: ignore[no-untyped-call]
    return (list(results), None) if outputs else ([], results[0])


class Reshard(torch.autograd.Function):
    """Ties tensors that an exchange has filled to those that it read."""

    @staticmethod
    def forward(ctx: Any, call: Call, outputs: list[torch.Tensor], *inputs: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """Nothing is left to do."""
        ctx.source, ctx.target, ctx.holds = call.source.container, call.target, bool(outputs)
        ctx.transport, ctx.facts, ctx.options = call.transport, call.facts, call.options
        return tuple(outputs) or (torch.empty(0),)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[Any, ...]:
        """Gradients of the target, moved to where those of the source belong."""
        dtype, mine = ctx.facts.dtype, grads if ctx.holds else ()
        becomes = ctx.options.dtype or dtype
        given = Source.by(ctx.target.gradient_of(mine), mine, becomes)
        source = ctx.source or OwnContainer(ctx.facts.source)
        # gradients that overflow are inf, as torch's own are: those who scale losses look for it
        options = replace(ctx.options, dtype=None if dtype == becomes else dtype, overflow="allow")
        # a rank that holds nothing of the source cannot know what arrives at the others
        arrived = given.container if all(owner in source.layout for owner in ctx.transport.owners) else None
        operation = "backward of a reshard"
        call = Call(ctx.transport, given, lambda _: source.gradient(arrived), options, operation=operation)
        moved, _ = with_autograd(call.start().run())
        return (None, None, *moved) if moved else (None, None, torch.zeros(0))  # of a stand-in
