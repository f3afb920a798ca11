"""Tensors of any kind as all ranks must know them, and their memory on this rank: plain, sharded, or in chunks."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from operator import add
from typing import NamedTuple, TypeGuard

import torch

from shardwise.containers.container import container_of, on_transport
from shardwise.containers.delivered import DeliveredTensor
from shardwise.containers.dtensor import is_dtensor
from shardwise.containers.memory import chunks_in, is_chunked, local_of, plain_memory, whole_shape
from shardwise.containers.sharded import ShardedTensor, is_sharded
from shardwise.errors import LayoutError
from shardwise.exchange.messages import Tensors
from shardwise.layout import Layout
from shardwise.transports import GroupTransport
from shardwise.transports.members import job_rank


def memory_of(value: object, *, apart: bool = True) -> Tensors:
    """This rank's memory of a tensor of any kind, apart from autograd; none where it holds nothing."""
    tensors = plain_memory(value)
    if tensors is None:
        tensors = _memory_of_other(value)
    return [tensor.detach() for tensor in tensors] if apart else tensors


def _memory_of_other(value: object) -> Tensors:
    if not isinstance(value, torch.Tensor) and not is_tensor(value):
        return []
    if lists_chunks(value):
        return [tensor for _, tensor in chunks_in(value)]
    if is_dtensor(value) or not is_sharded(value):
        local, spec = local_of(value)
        return [local] if spec is None or spec.mesh.get_coordinate() is not None else []
    return list(container_of(value).disassemble(value))


def tensors_in(flat: Mapping[str, object]) -> dict[str, torch.Tensor | None]:
    """The tensors of a flat state dict; None for a tensor of which this rank holds nothing."""
    return {name: value for name, value in flat.items() if value is None or is_tensor(value)}


def stamp_of(values: Iterable[object]) -> object:
    """Equal to an earlier stamp while the memory of these tensors has not moved.

    Addresses, and the inference mode, which decides what may be written.
    """
    tensors = (tensor for value in values for tensor in memory_of(value, apart=False))
    return [_place(tensor) for tensor in tensors], torch.is_inference_mode_enabled()


def _place(tensor: torch.Tensor) -> object:
    if tensor.layout != torch.strided:
        return id(tensor)
    return tensor.data_ptr(), tensor.dtype, tensor.shape, tensor.stride()


class TensorDescription(NamedTuple):
    """A tensor as all ranks must know it. `layout` is None for a plain one: every rank with the state dict has it."""

    shape: tuple[int, ...]
    dtype: torch.dtype | None  # not known to a rank that has none of its shards
    layout: Layout | None
    device: str | None
    delivered: bool = False


Descriptions = Mapping[str, TensorDescription | None]


def is_tensor(value: object) -> TypeGuard[torch.Tensor]:
    """True for tensors that can be moved."""
    return is_sharded(value) or (isinstance(value, torch.Tensor) and not value.is_nested) or is_chunked(value)


def lists_chunks(value: object) -> TypeGuard[torch.Tensor]:
    """True if a rank only knows its own chunks: torch's LocalShardsWrapper, and tensors without a process group."""
    return is_chunked(value) and not (isinstance(value, ShardedTensor) and value.placed)


def describe(value: torch.Tensor, transport: GroupTransport | None) -> TensorDescription | None:
    """This rank's description of a tensor, with the owners of a transport; None if it holds nothing of it."""
    if lists_chunks(value):
        return _known_chunks(whole_shape(value), chunks_in(value), job_rank() if transport is None else transport.me)
    if not is_sharded(value):
        return TensorDescription(tuple(value.shape), value.dtype, None, value.device.type)
    container = on_transport(container_of(value), transport)
    tensors = container.disassemble(value)
    device = tensors[0].device if tensors else container.device
    kind, delivered = None if device is None else device.type, isinstance(value, DeliveredTensor)
    return TensorDescription(container.layout.shape, value.dtype, container.layout, kind, delivered)


def _known_chunks(
    shape: tuple[int, ...], chunks: Sequence[tuple[tuple[int, ...], torch.Tensor]], me: int
) -> TensorDescription | None:
    if not chunks:
        return None
    pieces = [(me, lo, tuple(map(add, lo, tensor.shape))) for lo, tensor in chunks]
    first = chunks[0][1]
    return TensorDescription(shape, first.dtype, Layout.boxes(shape, pieces, overlap="replicas"), first.device.type)


def describe_all(flat: Mapping[str, object], transport: GroupTransport | None) -> Descriptions:
    """This rank's descriptions of the tensors of a flat state dict; None for one of which it holds nothing.

    Owners are those of the transport; without one, ranks of this process's job.
    """
    descriptions = dict[str, TensorDescription | None]()
    for name, value in tensors_in(flat).items():
        try:
            descriptions[name] = None if value is None else describe(value, transport)
        except LayoutError as error:
            raise LayoutError(f"{name!r}: {error}") from error
    return descriptions
