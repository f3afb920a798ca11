"""`out=`: the user's tensors that a result is written to, and what is refused there."""

from __future__ import annotations

from typing import Any

import torch

from shardwise.containers.container import Container, container_of, on_transport
from shardwise.containers.memory import check_memory, check_written, shared
from shardwise.containers.sharded import is_sharded
from shardwise.errors import ExchangeError, RefusedTypeError, RefusedValueError
from shardwise.exchange.buffers import fresh
from shardwise.exchange.messages import Tensors
from shardwise.job.casts import ONLY_PLAIN, PLAIN, check_cast
from shardwise.transports import GroupTransport

Shapes = tuple[tuple[int, ...], ...]


def memory_for(
    out: Any,
    target: Container,
    shapes: Shapes,
    transport: GroupTransport,
    dtype: torch.dtype,
    *,
    device: torch.device,
    source: Tensors,
    followed: bool,
) -> Tensors:
    """This rank's local tensors of the target, of these shapes, to be written: those of `out`, or new ones."""
    me = transport.me
    if out is None:
        return [fresh(shape, dtype, device) for shape in shapes]
    if followed:
        raise ExchangeError(
            "out= cannot be written while autograd follows the source: on the ranks that hold it, "
            "call under torch.no_grad() or pass x.detach()"
        )
    tensors = _tensors_of(out, target, transport)
    kinds = [(tuple(t.shape), t.dtype) for t in tensors]
    if tensors and not shapes:
        raise ExchangeError(f"rank {me} holds nothing of the target: pass out=None there")
    if kinds != [(shape, dtype) for shape in shapes]:
        raise ExchangeError(
            f"out= must have tensors of shapes {list(shapes)} and {dtype} on rank {me}, but has {kinds}"
        )
    _check_out(tensors, source)
    return tensors


def _tensors_of(out: Any, target: Container, transport: GroupTransport) -> Tensors:
    if is_sharded(out):
        container = on_transport(container_of(out), transport)
        if container.layout != target.layout:
            raise ExchangeError(f"out= lies as {container.layout!r}, but the target is {target.layout!r}")
        parts = container.disassemble(out)
        for tensor in parts:
            _check_leaf(tensor)
        tensors = container.local(parts)
    else:
        tensors = list(out) if isinstance(out, list | tuple) else [out]
    for tensor in tensors:
        if not isinstance(tensor, torch.Tensor):
            raise RefusedTypeError(f"out= must be a tensor, tensors or a sharded tensor, not {tensor!r}")
        _check_leaf(tensor)
    return [tensor.detach() for tensor in tensors]


def _check_leaf(tensor: torch.Tensor) -> None:
    if tensor.requires_grad and tensor.is_leaf and torch.is_grad_enabled():
        raise ExchangeError("out= is a leaf that autograd follows: write into it under torch.no_grad()")


def check_whole(out: Any, shape: tuple[int, ...], dtype: torch.dtype | None, *, here: bool) -> None:
    """Refuse what a whole tensor of that shape and dtype cannot be copied to, on a rank that gets it or not."""
    if not here:
        raise RefusedValueError("out= must only be given on the rank that gets the tensor")
    if not isinstance(out, torch.Tensor):
        raise RefusedTypeError(f"out= must be a tensor, not {out!r}")
    if tuple(out.shape) != shape:
        raise RefusedValueError(f"out= has size {tuple(out.shape)}, but should be {shape}")
    if dtype is not None and dtype != out.dtype:
        check_cast(dtype, out.dtype)
        if dtype not in PLAIN or out.dtype not in PLAIN:
            raise RefusedValueError(
                f"out= is {out.dtype}, but the tensor is {dtype}: {ONLY_PLAIN}; dtype={out.dtype} on all ranks names it"
            )
    _check_leaf(out)
    _check_out([out], [])


def _check_out(out: Tensors, source: Tensors) -> None:
    """Refuse what would be read after it was written, what would be written twice, and what must not be written."""
    for tensor in out:
        check_memory(tensor, "out=")
        check_written(tensor, "out=")
    if next(shared(out, source), None):
        raise ExchangeError("out= shares memory with the source or with itself: give tensors of their own")
