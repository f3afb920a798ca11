"""Flatten sharded tensors whose shards are sharded themselves: FSDP over TP, a DTensor inside a ShardedTensor."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from math import prod
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from shardwise.containers.container import container_of
from shardwise.containers.sharded import ShardedTensor, is_sharded
from shardwise.containers.torch_sharded import is_torch_sharded
from shardwise.exchange.messages import Tensors
from shardwise.geometry import Box
from shardwise.job.agree import together_or_alone
from shardwise.layout import Layout
from shardwise.sharded_tensor.metadata import ShardedTensorMetadata, ShardMetadata, TensorProperties
from shardwise.sharded_tensor.sharding_spec import _infer_sharding_spec_from_shards_metadata
from shardwise.sharded_tensor.spec_container import SpecContainer
from shardwise.state.traverse import OBJ_PATH, StateDict, dotted, set_element, traverse_state_dict
from shardwise.transports.members import has_default_group, owner_here


class PlainShard(NamedTuple):
    """A plain tensor inside nested shards, and its box of the whole tensor."""

    box: Box
    tensor: torch.Tensor


class NestedDescription(NamedTuple):
    """A rank's part of a nested tensor: the shape of the whole, and the dtype, device and boxes of the plain shards."""

    shape: tuple[int, ...]
    dtype: torch.dtype | None
    device: str
    boxes: tuple[tuple[tuple[int, ...], tuple[int, ...]], ...]


def flatten_sharded_tensors(state_dict: StateDict, *, group: dist.ProcessGroup | None = None) -> dict[Any, Any]:
    """The state dict with nested sharded tensors flattened to one level, with their true owners. All ranks call.

    Shards may be sharded to any depth, by ShardedTensors (ours or torch's) and DTensors, and each rank may have any
    number of them. The flat tensors can be gathered, resharded and saved like any other. Other values are kept.
    Without a process group, this process is the only rank.
    """
    flattened, values = dict[Any, Any](), dict[OBJ_PATH, object]()
    operation = "flatten_sharded_tensors"

    def look() -> list[OBJ_PATH]:
        traverse_state_dict(state_dict, lambda path, value: values.__setitem__(path, value))
        return [path for path in values if _is_nested(values[path])]

    nested = together_or_alone(operation, look, _union, group=group)
    parts = dict[OBJ_PATH, list[PlainShard]]()

    def say() -> dict[OBJ_PATH, NestedDescription]:
        parts.update({path: list(_parts(value)) for path in nested if is_sharded(value := values.get(path))})
        return {path: _describe(values[path], parts[path]) for path in parts}

    whole = together_or_alone(operation, say, _whole, group=group) if nested else {}
    for path, value in values.items():
        set_element(flattened, path, _flat(whole[path], parts[path], group) if path in parts else value)
    return flattened


_flatten_sharded_tensors = flatten_sharded_tensors


def _union(paths_by_rank: Mapping[int, list[OBJ_PATH]]) -> list[OBJ_PATH]:
    return sorted({path for paths in paths_by_rank.values() for path in paths}, key=repr)


def _is_nested(value: object) -> bool:
    return is_sharded(value) and _holds_shards(value) and any(map(is_sharded, _tensors(value)))


def _tensors(value: object) -> Tensors:
    """The tensors of a container, in any order; this works without a process group."""
    if isinstance(value, ShardedTensor):
        return list(value.shards)
    return [shard.tensor for shard in value.local_shards()] if is_torch_sharded(value) else []


def _parts(value: torch.Tensor) -> Iterator[PlainShard]:
    """This rank's plain tensors, with their boxes in the coordinates of `value`."""
    container = container_of(value)
    me = owner_here(container.group)
    if container.layout.op is not None:
        raise ValueError(f"{container.layout!r} is partial: its terms are not shards; reduce it first")
    if me not in container.layout:
        return
    shards = container.disassemble(value)
    tensors = shards if _holds_shards(value) else container.local(shards)
    pieces = container.layout.pieces(me)
    if len({piece.buffer for piece in pieces}) < len(pieces):
        raise ValueError(f"{container.layout!r} has several pieces in one tensor: only boxes can be nested")
    for piece in pieces:
        tensor = tensors[piece.buffer]
        if is_sharded(tensor):
            yield from (PlainShard(_shifted(inner.box, piece.box.lo), inner.tensor) for inner in _parts(tensor))
        else:
            yield PlainShard(piece.box, tensor)


def _holds_shards(value: object) -> bool:
    """True for ShardedTensors, whose shards may be sharded. (A DTensor's local tensor is plain.)"""
    return isinstance(value, ShardedTensor) or hasattr(value, "local_shards")


def _shifted(box: Box, by: tuple[int, ...]) -> Box:
    lo, hi = (tuple(a + b for a, b in zip(corner, by, strict=True)) for corner in (box.lo, box.hi))
    return Box(lo, hi)


def _describe(value: object, parts: list[PlainShard]) -> NestedDescription:
    first = parts[0].tensor if parts else None
    device = "cpu" if first is None else first.device.type
    boxes = tuple((part.box.lo, part.box.hi) for part in parts)
    return NestedDescription(container_of(value).layout.shape, None if first is None else first.dtype, device, boxes)


class FlatTensor(NamedTuple):
    """A nested tensor after flattening."""

    layout: Layout
    dtype: torch.dtype
    devices: dict[int, str]


def _whole(by_rank: Mapping[int, Mapping[OBJ_PATH, NestedDescription]]) -> dict[OBJ_PATH, FlatTensor]:
    """The flat tensors, from the descriptions of all ranks."""
    tensors = dict[OBJ_PATH, FlatTensor]()
    for path in sorted({path for shards in by_rank.values() for path in shards}, key=repr):
        shards = {rank: all_[path] for rank, all_ in by_rank.items() if path in all_}
        name = repr(dotted(path))
        dtypes = {str(one.dtype): one.dtype for one in shards.values() if one.dtype is not None}
        for what, several in ("shapes", {one.shape for one in shards.values()}), ("dtypes", set(dtypes)):
            if len(several) > 1:
                raise ValueError(f"{name} has different {what} on different ranks: {sorted(several)}")
        pieces = [(rank, lo, hi) for rank, one in shards.items() for lo, hi in one.boxes]
        dtype = next(iter(dtypes.values()), torch.get_default_dtype())
        shape = next(iter(shards.values())).shape
        if prod(shape):
            try:
                layout = Layout.boxes(shape, pieces, overlap="replicas").validate()
            except ValueError as error:
                raise ValueError(f"{name}: {error}") from error
        else:
            layout = Layout.replicated(shape, list(shards))  # it has no cells
        tensors[path] = FlatTensor(layout, dtype, {rank: one.device for rank, one in shards.items()})
    return tensors


def _flat(flat: FlatTensor, parts: list[PlainShard], group: dist.ProcessGroup | None) -> ShardedTensor:
    """A ShardedTensor of the familiar API where that can express it: its shards must not overlap."""
    if not prod(flat.layout.shape):
        return ShardedTensor(torch.empty(flat.layout.shape, dtype=flat.dtype, device="cpu"), flat.layout, group)
    tensors = [part.tensor for part in parts]
    if not flat.layout.form.holders.single or not has_default_group():
        return ShardedTensor(tensors, flat.layout, group)
    shards = [
        ShardMetadata(
            piece.box.lo,
            [b - a for a, b in zip(piece.box.lo, piece.box.hi, strict=True)],
            f"rank:{owner}/{flat.devices[owner]}",
        )
        for owner in flat.layout.owners()
        for piece in flat.layout.pieces(owner)
    ]
    metadata = ShardedTensorMetadata(shards, torch.Size(flat.layout.shape), TensorProperties(flat.dtype))
    spec = _infer_sharding_spec_from_shards_metadata(shards)
    return SpecContainer.by_metadata(metadata, spec, group).holding(tensors)
