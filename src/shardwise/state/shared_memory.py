"""Tensors in shared memory: ranks on the same host read them in place, with one copy and no staging."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, TypeVar

import torch
import torch.distributed as dist
from torch import nn

from shardwise.containers.container import Target, target_container
from shardwise.containers.description import is_tensor, memory_of
from shardwise.errors import ExchangeError, LayoutError
from shardwise.exchange.buffers import fresh
from shardwise.exchange.messages import Tensors
from shardwise.layout import Layout, local_shapes, parse
from shardwise.transports.members import owner_here

if TYPE_CHECKING:
    from shardwise.transports.segments import SharedTensors

T = TypeVar("T")


def empty(
    to: Target,
    shape: Sequence[int] | None = None,
    *,
    dtype: torch.dtype | None = None,
    device: torch.device | str = "cpu",
    group: dist.ProcessGroup | None = None,
    shared: bool = False,
) -> Any:
    """An uninitialized sharded tensor of the kind of the target; None on ranks that hold nothing of it.

    `to` is a Layout or its notation (the result is a ShardedTensor), (DeviceMesh, placements) (a DTensor), or a
    sharding spec; the latter fit tensors of any shape, so give the `shape`. `shared`: in shared memory of this host.
    Nothing is sent: a rank may call it alone.
    """
    to = parse(to) if isinstance(to, str) else to
    if shape is None and not isinstance(to, Layout):
        raise LayoutError(f"{to!r} fits tensors of any shape: give the shape, empty(to, shape)")
    if isinstance(to, Layout) and shape is not None and tuple(shape) != to.shape:
        raise LayoutError(f"{to!r} is not a layout of a tensor of shape {tuple(shape)}")
    container = target_container(to, shape or (), group)
    becomes, at = dtype or torch.get_default_dtype(), torch.device(device)
    if shared and at.type != "cpu":
        raise ExchangeError(f"shared=True: only CPU tensors can be in shared memory, not {at}")
    shapes = local_shapes(container.layout, owner_here(container.group))
    local = [_shared(one, becomes) if shared else fresh(one, becomes, at) for one in shapes]
    return container.assemble(container.from_local(local))


def share_(x: T) -> T:
    """Move tensors to shared memory, in place: a tensor of any kind, a module, or all tensors of a state dict.

    All tensors of the same storage follow: parameters, their views, FSDP's own references. All of them together take
    one descriptor. Their storages can no longer be resized. A rank may call it alone. Before torch 2.13 each storage
    takes a descriptor, and its memory from /dev/shm.
    """
    if not (x is None or isinstance(x, nn.Module | Mapping | list | tuple) or is_tensor(x)):
        raise TypeError(f"share_ takes a tensor, a module, or a dict or list of tensors, not a {type(x).__name__}")
    tensors = _tensors(x)
    for tensor in tensors:
        if tensor.device.type != "cpu":
            raise ExchangeError(f"share_: only CPU tensors can be in shared memory, not {tensor.device}")
        if tensor.layout != torch.strided:
            raise ExchangeError(f"share_: only dense tensors can be in shared memory, not {tensor.layout}")
    if tensors:
        _memory().move(tensor.untyped_storage() for tensor in tensors)
    return x


def _tensors(x: object) -> Tensors:
    if isinstance(x, nn.Module):
        return [local for one in (*x.parameters(), *x.buffers()) for local in memory_of(one)]
    if isinstance(x, Mapping):
        return [local for one in x.values() for local in _tensors(one)]
    if isinstance(x, list | tuple):
        return [local for one in x for local in _tensors(one)]
    return memory_of(x) if is_tensor(x) else []


def _shared(shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
    size = dtype.itemsize * torch.Size(shape).numel()
    return _memory().new(max(size, 1))[:size].view(dtype).view(tuple(shape))


def _memory() -> SharedTensors:
    if sys.platform != "linux":
        raise ExchangeError("shared memory between ranks needs Linux")
    from shardwise.transports.segments import this_process

    return this_process.shared_tensors
