"""Sharded tensors in pickles: DTensors, and ShardedTensors of torch, as boxes of plain tensors. Nothing is imported.

Other objects of torch.distributed are not values: `SHARDING` has the names that these two kinds are made of.
"""

from __future__ import annotations

import pickle
from collections.abc import Mapping, Sequence
from itertools import pairwise
from math import prod
from typing import Any, cast

import numpy as np
import torch

from shardwise.checkpoint.unpickle_stubs import (
    FunctionStub,
    NameStub,
    RecordStub,
    Stub,
    TensorStub,
    sizes,
    tensor_of_type,
)
from shardwise.containers.torch_private import (
    MESH_LAYOUT_MODULE,
    OLD_SHARD_MODULE,
    REBUILD_MODULE,
    SHARD_MODULE,
    SPEC_MODULE,
    TENSOR_MODULE,
)
from shardwise.errors import LayoutError
from shardwise.layout import Layout, Mesh, Partial, Replicate, Shard
from shardwise.quoting import brief


class ShardStub(Stub):
    """The boxes of a tensor that a file has: each begins at a cell, and is a plain tensor."""

    __slots__ = ("boxes", "dtype", "shape")
    shards = ()  # tells traverse_state_dict that it is a tensor, in lists, too

    def __init__(
        self, dtype: torch.dtype, shape: tuple[int, ...], boxes: Sequence[tuple[tuple[int, ...], TensorStub]]
    ) -> None:
        self.dtype, self.shape, self.boxes = dtype, shape, tuple(boxes)
        for lo, tensor in self.boxes:
            if tensor.dtype != dtype or not len(lo) == len(tensor.shape) == len(shape):
                raise pickle.UnpicklingError("a shard has another dtype or other dims than its tensor")
            if any(first + size > whole for first, size, whole in zip(lo, tensor.shape, shape, strict=True)):
                raise pickle.UnpicklingError(f"a shard of shape {tensor.shape} from {lo} on is not inside {shape}")


class DistributedStub(RecordStub):
    """An object that says how a tensor is sharded: its arguments and its state."""

    args: tuple[object, ...]

    def __new__(cls, *args: object) -> DistributedStub:
        made = super().__new__(cls)
        made.args = args
        return made

    def __init__(self, *args: object) -> None:
        pass

    def field(self, name: str) -> Any:
        """Of its state, or of what its slots have."""
        return _field(getattr(self, "state", None), name)


def _field(state: object, name: str) -> Any:
    """Of a dict of attributes, or of that and a dict of slots."""
    parts = state if isinstance(state, tuple) else (state,)
    return next((part[name] for part in parts if isinstance(part, dict) and name in part), None)


def _kinds(module: str, *names: str) -> dict[tuple[str, str], type[DistributedStub]]:
    return {(module, name): type(name, (DistributedStub,), {}) for name in names}


_TENSOR = "torch.distributed.tensor"
CLASSES = {
    **_kinds(f"{SHARD_MODULE}.sharded_tensor.api", "ShardedTensor"),
    **_kinds(f"{SHARD_MODULE}.sharded_tensor.shard", "Shard"),
    **_kinds(f"{SHARD_MODULE}.metadata", "ShardMetadata"),
    **_kinds(OLD_SHARD_MODULE, "ShardedTensorMetadata", "TensorProperties"),
    **_kinds(f"{SHARD_MODULE}.sharding_spec.chunk_sharding_spec", "ChunkShardingSpec"),
    **_kinds(f"{SHARD_MODULE}.sharding_spec.api", "EnumerableShardingSpec"),
    **_kinds("torch.distributed.remote_device", "_remote_device"),
    **_kinds(_TENSOR, "DTensor"),
    **_kinds(SPEC_MODULE, "DTensorSpec", "TensorMeta", "ShardOrderEntry"),
    **_kinds(f"{_TENSOR}.placement_types", "Shard", "Replicate", "Partial", "_StridedShard"),
    **_kinds("torch.distributed.device_mesh", "DeviceMesh"),
    **_kinds(MESH_LAYOUT_MODULE, "_MeshLayout", "_FlatLayout"),
}
SHARDED_TENSOR, DTENSOR = CLASSES[f"{SHARD_MODULE}.sharded_tensor.api", "ShardedTensor"], CLASSES[_TENSOR, "DTensor"]
PLACEMENTS = {CLASSES[f"{_TENSOR}.placement_types", name]: name for name in ("Shard", "Replicate")}


def _sizes(values: object) -> tuple[int, ...]:
    """A number, or several in any kind of tuple or list."""
    return sizes(tuple(values) if isinstance(values, tuple | list) else (values,))


def _refused(*_: object) -> object:
    raise pickle.UnpicklingError("a tensor wraps others")


WRAPPER = FunctionStub(_refused)


def _rebuilt(rebuild: object, kind: object, args: object, *state: object) -> object:
    """What torch makes of a tensor that is not a plain one."""
    if rebuild is not WRAPPER:
        return tensor_of_type(rebuild, kind, args, *state)
    if kind not in (SHARDED_TENSOR, DTENSOR) or type(args) is not tuple or len(args) < 3 or len(state) != 1:
        raise pickle.UnpicklingError(
            f"a tensor of the kind {brief(getattr(kind, 'qualname', kind))} wraps others, and only DTensors and "
            f"ShardedTensors are read. Remedy: save plain tensors, or save it with torch.distributed.checkpoint"
        )
    dtype, shape = args[1], _sizes(args[2])
    if not isinstance(dtype, torch.dtype):
        raise pickle.UnpicklingError("a sharded tensor has no dtype")
    try:
        boxes = _of_sharded_tensor(state[0]) if kind is SHARDED_TENSOR else _of_dtensor(state[0], shape)
        return ShardStub(dtype, shape, list(boxes))
    except (TypeError, ValueError, AttributeError, LookupError, LayoutError) as error:
        raise pickle.UnpicklingError(f"a sharded tensor is not described as torch does it: {error}") from error


Boxes_ = Sequence[tuple[tuple[int, ...], TensorStub]]


def _of_sharded_tensor(state: object) -> Boxes_:
    """Every shard says where it begins."""
    shards = cast("tuple[list[DistributedStub]]", state)[0]
    return [(_sizes(one.field("metadata").field("shard_offsets")), _plain(one.field("tensor"))) for one in shards]


def _plain(tensor: object) -> TensorStub:
    if not isinstance(tensor, TensorStub):
        raise pickle.UnpicklingError("a shard is not a plain tensor")
    return tensor


def _of_dtensor(state: object, shape: tuple[int, ...]) -> Boxes_:
    """By its placements, and this rank's coordinate in the mesh."""
    spec, local = _field(state, "_spec"), _plain(_field(state, "_local_tensor"))
    mesh, coordinate = _mesh(spec.field("mesh"))
    layout = Layout.on_mesh(shape, mesh, [_placement(one) for one in spec.field("placements")])
    owner = int(np.ravel_multi_index(coordinate, mesh.shape))
    if layout.local_shape(owner) != local.shape:
        raise ValueError(f"its local tensor has shape {local.shape} instead of {layout.local_shape(owner)}")
    pieces = layout.pieces(owner)
    places = [tuple(map(int, np.unravel_index(piece.offset, local.shape))) for piece in pieces]
    return [(piece.box.lo, _part(local, lo, piece.box.shape)) for piece, lo in zip(pieces, places, strict=True)]


def _part(tensor: TensorStub, lo: tuple[int, ...], shape: tuple[int, ...]) -> TensorStub:
    offset = tensor.offset + sum(first * step for first, step in zip(lo, tensor.strides, strict=True))
    return TensorStub(tensor.storage, tensor.dtype, offset, shape, tensor.strides)


def _mesh(mesh: DistributedStub) -> tuple[Mesh, tuple[int, ...]]:
    """A mesh whose ranks rise, and the coordinate of the rank that saved."""
    ranks, coordinate = mesh.field("_flatten_rank_map"), mesh.field("_coordinate_on_dim")
    if ranks is None or coordinate is None or mesh.field("_layout") is None:
        raise ValueError("its mesh does not say where the rank is: torch 2.13 saves that")
    shape = [prod(_sizes(axis.field("shape"))) for axis in mesh.field("_layout").field("axes")]
    if prod(shape) != len(ranks) or not all(a < b for a, b in pairwise(ranks)):
        raise ValueError(f"the ranks {brief(ranks)} of its mesh of shape {shape} do not rise")
    return Mesh.of(shape), _sizes(coordinate)


def _placement(one: DistributedStub) -> Shard | Replicate | Partial:
    kind = PLACEMENTS.get(type(one))
    if kind is None:
        raise ValueError(f"its placement {type(one).__name__} is not Shard or Replicate")
    return Replicate() if kind == "Replicate" else Shard(one.field("dim"))


SHARDING: Mapping[tuple[str, str], object] = {
    **CLASSES,
    (OLD_SHARD_MODULE, "MEM_FORMAT_ENCODING"): FunctionStub(NameStub),
    (REBUILD_MODULE, "_rebuild_wrapper_subclass"): WRAPPER,
    (TENSOR_MODULE, "_rebuild_from_type_v2"): FunctionStub(_rebuilt),
}
