"""reshard: any sharded tensor to any other sharding."""

from __future__ import annotations

from collections.abc import Hashable, Mapping
from concurrent.futures import Future
from typing import Any

import torch
import torch.distributed as dist

from shardwise.errors import ExchangeError
from shardwise.layout import Layout, Mesh
from shardwise.tensor.call import Call, Held, Options
from shardwise.tensor.fingerprints import verify
from shardwise.tensor.gradient import linked
from shardwise.tensor.kinds import Kind, target_kind
from shardwise.tensor.output import is_container
from shardwise.tensor.sharded import ShardedTensor
from shardwise.tensor.wiring import wire_for


def reshard(
    x: Any,
    to: Any = None,
    *,
    group: dist.ProcessGroup | None = None,
    out: Any = None,
    dtype: torch.dtype | None = None,
    max_bytes: int | None = None,
    hosts: int | Mapping[int, Hashable] | Mesh | None = None,
    verify: bool = False,
    async_op: bool = False,
) -> Any:
    """Move a sharded tensor to another sharding. Every rank of the group calls it; autograd follows.

    `x` is a DTensor or a ShardedTensor (ours or torch's), and None on ranks that hold nothing of it. `to` is a Layout,
    its notation, (DeviceMesh, placements), a sharding spec, or a tensor to look like. The result is of the kind that
    was asked for, and None on ranks that hold nothing of it.

    `group`: the ranks that call; those of `x` where the target lies among them, else the default group. `out`: write
    the result there. `dtype`: cast on the way. `max_bytes`: stage no more than this at a time. `hosts`: as in `plan`.
    `verify`: compare fingerprints of both sides. `async_op`: return a Handle at once.
    """
    asked, held = out if to is None else to, Held.of(x)

    def target(shape: tuple[int, ...]) -> Kind:
        return target_kind(asked, shape, group)

    wire = wire_for(group, held.kind, target)
    if wire is None:  # a DTensor whose mesh does not have this rank, and which stays in its mesh
        return Handle.of_nothing() if async_op else None
    options = Options(dtype, max_bytes, hosts, verify)
    call = Call(wire, held, target, options, out=out, key=_key(asked)).start(alone=not async_op)
    return Handle(call.submit(), out) if async_op else _result(call.run(), out)[0]


class Handle:
    """A reshard under way. Until `wait` returns, leave the source as it is and do not read what was given as out=."""

    def __init__(self, future: Future[Call], out: Any) -> None:
        self._future, self._out = future, out
        self._done: tuple[Any, torch.Tensor | None] | None = None

    @staticmethod
    def of_nothing() -> Handle:
        """For a rank that has no part in it."""
        future = Future[Any]()
        future.set_result(None)
        handle = Handle(future, None)
        handle._done = None, None
        return handle

    def wait(self) -> Any:
        """The result, once it is there; the error, if there was one."""
        if self._done is None:
            self._done = _result(self._future.result(), self._out)
        return self._done[0]

    def done(self) -> bool:
        """True once `wait` would return at once."""
        return self._future.done()

    def backward(self) -> None:
        """Take part in the backward pass on a rank that holds nothing of the result, and so has nothing to call it on.

        The others call backward on what they computed from the result; this rank calls this instead.
        """
        self.wait()
        stand_in = self._done and self._done[1]
        if stand_in is None:
            raise ExchangeError(
                "this rank has nothing to take part in: it holds a part of the result, on which backward is called, "
                "or autograd does not follow the source"
            )
        torch.autograd.backward(stand_in, torch.empty_like(stand_in))


def gather(x: ShardedTensor, dst: int | None, out: torch.Tensor | None) -> torch.Tensor | None:
    """The whole tensor on one rank, or on all ranks of the group."""
    wire = wire_for(x.group, x.kind, lambda _: x.kind)
    owners = [dst] if dst is not None else wire.owners if wire else ()
    found = reshard(x, Layout.replicated(x.layout.shape, owners), group=x.group, out=out)
    return None if found is None else found.local_tensor()


def _result(call: Call, out: Any) -> tuple[Any, torch.Tensor | None]:
    """What the user gets, and a stand-in for backward on a rank that gets nothing."""
    if call.options.verify:
        verify(call)
    tensors, stand_in = linked(call)
    return (out if is_container(out) else call.target.closed(tensors)), stand_in


def _key(to: Any) -> Hashable:
    """What tells calls apart for a rank that has to guess: a wrong guess only costs a round."""
    if isinstance(to, str | Layout):
        return to
    return (to[0], str(to[1])) if isinstance(to, tuple) and len(to) == 2 else type(to).__name__
