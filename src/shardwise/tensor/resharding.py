"""reshard: any sharded tensor to any other sharding."""

from __future__ import annotations

from collections.abc import Hashable, Mapping
from concurrent.futures import Future
from dataclasses import replace
from functools import cache
from typing import Any

import torch
import torch.distributed as dist

from shardwise.errors import ExchangeError
from shardwise.layout import Layout, Mesh
from shardwise.tensor.call import Call
from shardwise.tensor.gradient import linked
from shardwise.tensor.held import Held
from shardwise.tensor.kinds import Kind, is_sharded, target_kind
from shardwise.tensor.sharded import Own, ShardedTensor
from shardwise.tensor.wiring import wire_for
from shardwise.tensor.work import Options


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

    `group`: the ranks that call; else the group of a ShardedTensor that has one, the mesh of a DTensor that stays on
    it, or the default group. `out`: write the result there. `dtype`: cast on the way. `max_bytes`: stage no more than
    this at a time. `hosts`: as in `plan`. `verify`: compare fingerprints of both sides. `async_op`: return a Handle.
    """
    asked, held = out if to is None else to, Held.of(x)
    wire = wire_for(group, held, asked)
    if wire is None:
        return Handle(None) if async_op else None

    @cache
    def target(shape: tuple[int, ...]) -> Kind:
        return target_kind(asked, shape, group)

    call = Call(wire, held, target, Options(dtype, max_bytes, hosts, verify), out=out, key=_key(asked))
    call.start(alone=not async_op)
    return Handle(call.submit(), out) if async_op else _result(call.run(), out)[0]


class Handle:
    """A reshard under way. Until `wait` returns, leave the source as it is and do not read what was given as out=."""

    def __init__(self, future: Future[Call] | None, out: Any = None) -> None:
        self._future, self._out = future, out
        self._result: tuple[Any, torch.Tensor | None] | None = (None, None) if future is None else None

    def wait(self) -> Any:
        """The result, once it is there; the error, if there was one."""
        if self._result is None:
            assert self._future is not None, "of a rank with a part in it"
            self._result = _result(self._future.result(), self._out)
        return self._result[0]

    def done(self) -> bool:
        """True once `wait` would return at once."""
        return self._future is None or self._future.done()

    def backward(self) -> None:
        """Take part in the backward pass on a rank that holds nothing of the result, and so has nothing to call it on.

        The others call backward on what they computed from the result; this rank calls this instead.
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
    error: Exception | None = None,
) -> torch.Tensor | None:
    """The whole tensor on one rank, or on all ranks of the group, in any dtype that `out` has.

    `error` is what this rank already knows to be wrong: all will raise it.
    """
    held = replace(Held.of(x), error=error)
    wire = wire_for(x.group, held, None)
    assert wire is not None, "there is no mesh"
    layout = Layout.replicated(x.layout.shape, wire.owners if dst is None else [dst])
    room = out if out is not None and wire.me in layout else None
    cast = room is not None and room.dtype != (dtype or x.dtype or room.dtype)
    call = Call(wire, held, lambda _: Own(layout), Options(dtype), out=None if cast else room, key=layout)
    found, _ = linked(call.start().run())
    if room is not None and cast:
        return room.copy_(found[0])
    return found[0] if found else None


def _result(call: Call, out: Any) -> tuple[Any, torch.Tensor | None]:
    """What the user gets, and a stand-in for backward on a rank that gets nothing."""
    tensors, stand_in = linked(call)
    return (out if is_sharded(out) else call.work.target.closed(tensors)), stand_in


def _key(to: Any) -> Hashable:
    """What tells calls apart for a rank that has to guess: a wrong guess only costs a round."""
    if isinstance(to, str | Layout):
        return to
    return str(to[1]) if isinstance(to, tuple) and len(to) == 2 else type(to).__name__
