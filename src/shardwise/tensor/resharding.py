"""reshard: any sharded tensor to any other sharding. Backward is the same walk with the layouts turned round."""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import Future
from dataclasses import replace
from typing import Any, Literal, TypedDict, Unpack, overload

import torch
import torch.distributed as dist
from torch.autograd.graph import increment_version
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from shardwise.containers.container import Container, Sharded, Target, on_transport, target_container
from shardwise.containers.own_container import OwnContainer
from shardwise.containers.sharded import ShardedTensor, is_sharded
from shardwise.errors import ExchangeError
from shardwise.exchange.messages import Tensors
from shardwise.exchange.overflow import Losses, Overflow, refuse_loss
from shardwise.job.plan import SINGLE, HostsOption
from shardwise.job.session import accepts_wire, group_transport, transport_for
from shardwise.layout import Layout
from shardwise.tensor.call import Call, Options, Source
from shardwise.tensor.output import check_whole
from shardwise.transports import TransportChoice

Output = Sharded | Sequence[torch.Tensor] | None


class ReshardOptions(TypedDict, total=False):
    """The keywords of `reshard` that do not change the type of its result."""

    group: dist.ProcessGroup | None
    dtype: torch.dtype | None
    max_bytes: int | None
    hosts: HostsOption
    verify: bool
    transport: TransportChoice
    overflow: Overflow


@overload
def reshard(
    x: Sharded | None,
    to: Target | None = None,
    *,
    out: Output = None,
    async_op: Literal[True],
    **options: Unpack[ReshardOptions],
) -> Handle: ...
@overload
def reshard(
    x: Sharded | None, to: Layout | str, *, async_op: Literal[False] = False, **options: Unpack[ReshardOptions]
) -> ShardedTensor | None: ...
@overload
def reshard(
    x: Sharded | None,
    to: tuple[DeviceMesh, object],
    *,
    async_op: Literal[False] = False,
    **options: Unpack[ReshardOptions],
) -> DTensor | None: ...
@overload
def reshard(
    x: Sharded | None,
    to: Target | None = None,
    *,
    out: Output = None,
    async_op: Literal[False] = False,
    **options: Unpack[ReshardOptions],
) -> torch.Tensor | None: ...
@overload
def reshard(
    x: Sharded | None,
    to: Target | None = None,
    *,
    out: Output = None,
    async_op: bool,
    **options: Unpack[ReshardOptions],
) -> Handle | torch.Tensor | None: ...


@accepts_wire
def reshard(
    x: Sharded | None,
    to: Target | None = None,
    *,
    group: dist.ProcessGroup | None = None,
    out: Output = None,
    dtype: torch.dtype | None = None,
    max_bytes: int | None = None,
    hosts: HostsOption = "auto",
    verify: bool = False,
    async_op: bool = False,
    transport: TransportChoice = "auto",
    overflow: Overflow = "refuse",
) -> Handle | torch.Tensor | None:
    """Move a sharded tensor to another sharding. Every rank of the group calls it; autograd follows.

    `x` is a DTensor or a ShardedTensor (ours or torch's), and None on ranks that hold nothing of it. `to` is a Layout,
    its notation, (DeviceMesh, placements), a sharding spec, or a tensor to look like. The result is of the target's
    kind, and None on ranks that hold nothing of it.

    `group`: the ranks that call; by default the group of a ShardedTensor that has one, the mesh of a DTensor that stays
    on it, or the default group. `out`: write the result there. `dtype`: cast while moving. `overflow="refuse"`: move
    nothing if a value is out of range for that dtype; "allow" casts it. `max_bytes`: stage at most this much at a time.
    `hosts`: "auto" asks the group, so that values cross between hosts once; a `Network` says what the network can do;
    else as in `plan`. `verify`: compare fingerprints of both sides. `async_op`: return a Handle. `transport`:
    "auto" uses shared memory between ranks on one host, "group" only the group, "shared" requires that all ranks can
    share memory.
    """
    options = Options(dtype, max_bytes, hosts, verify, transport, overflow)
    target = out if to is None else to
    call = start_call(Source.of(lambda: x), target, options, group=group, out=out, alone=not async_op)
    if call is None:
        return Handle(None) if async_op else None
    return Handle(call.submit(), out) if async_op else result_of(call.run(), out)[0]


def start_call(
    source: Source,
    to: object,
    options: Options,
    *,
    group: dist.ProcessGroup | None,
    out: Output = None,
    alone: bool = True,
) -> Call | None:
    """A call for a target, started; None on a rank that has no part in it."""
    transport = transport_for(group, source.container, to, failed=source.error is not None)
    if transport is None:
        return None
    home = transport.group if transport.members.joined else group  # whose ranks the owners of a layout are

    def target(shape: tuple[int, ...]) -> Container:
        return on_transport(target_container(to, shape, home), transport)

    return Call(transport, source.on(transport), target, options, out=out).start(alone=alone)


def result_of(call: Call, out: Output = None) -> tuple[Any, torch.Tensor | None]:
    """The user's result, and a stand-in for backward on a rank that gets nothing."""
    tensors, stand_in = with_autograd(call)
    if out is None:
        return call.target.assemble(tensors), stand_in
    for tensor in call.move.target:  # autograd does not see what is received
        increment_version(tensor)
    return (out if is_sharded(out) else call.target.assemble(tensors)), stand_in


class Handle:
    """A reshard in progress. Until `wait` returns, do not change the source and do not read `out`."""

    def __init__(self, future: Future[Call] | None, out: Output = None) -> None:
        self._future, self._out = future, out
        self._result: tuple[torch.Tensor | None, torch.Tensor | None] | None = (None, None) if future is None else None

    def wait(self) -> torch.Tensor | None:
        """Wait for the result; raise the error if it failed."""
        if self._result is None:
            assert self._future is not None, "of a rank with a part in it"
            self._result = result_of(self._future.result(), self._out)
        return self._result[0]

    def done(self) -> bool:
        """True if `wait` would return immediately."""
        return self._future is None or self._future.done()

    def backward(self) -> None:
        """Take part in the backward pass on a rank that holds nothing of the result.

        Other ranks call `backward` on what they computed from the result. This rank has no such tensor, and calls this.
        """
        self.wait()
        stand_in = self._result and self._result[1]
        if stand_in is None:
            raise ExchangeError(
                "this rank has nothing to take part in: it holds a part of the result, on which backward is called, "
                "or autograd does not follow the source"
            )
        torch.autograd.backward(stand_in, torch.empty_like(stand_in))


def gather(
    x: ShardedTensor,
    dst: int | None,
    out: torch.Tensor | None,
    dtype: torch.dtype | None = None,
    *,
    overflow: Overflow = "refuse",
    apart: bool = False,
) -> torch.Tensor | None:
    """The whole tensor on one rank, or on all ranks of the group. `apart` from autograd.

    `out` may have any plain floating point dtype; another one has to be that of the tensor, or `dtype`.
    """
    transport = group_transport(x.group)
    fits = isinstance(out, torch.Tensor) and out.dtype == (dtype or x.dtype)

    def target(shape: tuple[int, ...]) -> OwnContainer:
        layout = Layout.replicated(shape, transport.owners if dst is None else [dst])
        if out is not None:
            check_whole(out, shape, dtype or x.dtype, here=transport.me in layout)
        return OwnContainer(layout, x.group)

    source = Source.of(x.detach if apart else lambda: x)
    direct = out if fits else None
    call = Call(transport, source, target, Options(dtype, overflow=overflow), out=direct, operation="gather")
    result, _ = result_of(call.start().run(), direct)
    if result is None or out is None:
        return None if result is None else result.local_tensor()
    whole = result.local_tensor()
    if not fits and overflow == "refuse":
        losses = Losses()
        losses.look(SINGLE, [whole], out.dtype)
        refuse_loss(losses.per_tensor())
    return out if fits else out.copy_(whole)


def with_autograd(call: Call) -> tuple[Tensors, torch.Tensor | None]:
    """The finished call's tensors as autograd sees them.

    A rank that holds nothing of the target has none; it gets a stand-in, on which backward can be called.
    """
    outputs = call.target.from_local(call.move.target)
    if not call.followed:
        return outputs, None
    inputs = call.source.tensors or (call.source.stand_in,)
    with torch.enable_grad():  # as it was when the call was made, wherever it is waited for
        if inputs == (None,):
            inputs = (torch.empty(0, requires_grad=True, device="cpu"),)  # so that backward comes by here too
        results = Reshard.apply(call, outputs, *inputs)  # type: ignore[no-untyped-call]
    return (list(results), None) if outputs else ([], results[0])


class Reshard(torch.autograd.Function):
    """Ties tensors that an exchange has filled to those that it read."""

    @staticmethod
    def forward(ctx: Any, call: Call, outputs: Tensors, *inputs: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """Nothing is left to do."""
        ctx.source, ctx.target, ctx.holds = call.source.container, call.target, bool(outputs)
        ctx.transport, ctx.facts, ctx.options = call.transport, call.facts, call.options
        return tuple(outputs) or (torch.empty(0, device="cpu"),)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[Any, ...]:
        """Gradients of the target, moved to where those of the source belong."""
        dtype, mine = ctx.facts.dtype, grads if ctx.holds else ()
        becomes = ctx.options.dtype or dtype
        gradient = Source.by(ctx.target.gradient_of(mine), mine, becomes)
        source = ctx.source or OwnContainer(ctx.facts.source)
        # gradients that overflow are inf, as torch's own are: those who scale losses look for it
        options = replace(ctx.options, dtype=None if dtype == becomes else dtype, overflow="allow")
        # a rank that holds nothing of the source cannot know what arrives at the others
        arrived = gradient.container if all(owner in source.layout for owner in ctx.transport.owners) else None
        operation = "backward of a reshard"
        call = Call(ctx.transport, gradient, lambda _: source.gradient(arrived), options, operation=operation)
        moved, _ = with_autograd(call.start().run())
        return (None, None, *moved) if moved else (None, None, torch.zeros(0, device="cpu"))  # of a stand-in
