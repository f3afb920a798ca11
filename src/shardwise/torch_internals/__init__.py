"""torch's own sharded tensors as layouts, and back: DTensor, DeviceMesh, ShardedTensor and its specs.

The only package that knows the private names of torch's containers. Each kind of container answers the same questions:
its layout, the tensors that autograd sees, this rank's local tensors, and how to put the container together again.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache
from typing import Any, Self, get_args

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.remote_device import _remote_device
from torch.distributed.tensor import DTensor, Partial, Placement, Replicate, Shard
from torch.distributed.tensor._dtensor_spec import DTensorSpec, TensorMeta
from torch.distributed.tensor.placement_types import _StridedShard

import shardwise.layout.mesh as ours
from shardwise.errors import LayoutError
from shardwise.layout import Layout, Mesh
from shardwise.layout.checks import checked_dim
from shardwise.torch_internals.group_order import check_sizes, in_group_order, line, rises, unsorted_axes
from shardwise.transports.members import of_job, owner_here

Tensors = Sequence[torch.Tensor]
RemoteDevice = _remote_device  # "rank:1/cpu": torch's own, so that they are equal and print alike


@dataclass(frozen=True)
class OnMesh:
    """DTensors of one shape on a device mesh."""

    mesh: DeviceMesh
    placements: tuple[Any, ...]
    shape: tuple[int, ...]
    order: Any = None  # in which mesh dims split a tensor dim, where torch keeps that apart from the placements

    @staticmethod
    def of(x: DTensor) -> OnMesh:
        """How a DTensor lies."""
        return OnMesh(x.device_mesh, x.placements, tuple(x.shape), getattr(x._spec, "shard_order", None))

    @cached_property
    def layout(self) -> Layout:
        """Kept by value: making one takes longer than moving a small tensor."""
        return _mesh_layout(self, () if rises(self.mesh) else unsorted_axes(self.mesh))

    @property
    def group(self) -> None:
        """A mesh has groups of its own: see `home_of`."""

    @property
    def device(self) -> torch.device | None:
        """Where its local tensors are."""
        return torch.device(self.mesh.device_type)

    def taken(self, x: DTensor) -> list[torch.Tensor]:
        """A DTensor is itself what autograd sees."""
        return [x]

    def local(self, tensors: Tensors) -> list[torch.Tensor]:
        """This rank's part, where it is in the mesh. Detached: `from_local` keeps tensors that autograd follows."""
        with torch.no_grad():
            return [x.to_local().detach() for x in tensors if isinstance(x, DTensor) and self._here]

    def dressed(self, local: Tensors) -> list[torch.Tensor]:
        """The DTensor with this local tensor. The shape is given: torch cannot know it where shards are uneven."""
        if not self._here:
            return []
        # as DTensor.from_local, which takes ten times as long
        return [DTensor(local[0], _spec(self, local[0].dtype), requires_grad=False)]  # type: ignore[no-untyped-call]

    def closed(self, tensors: Tensors) -> DTensor | None:
        """What the user gets: None outside the mesh."""
        return tensors[0] if tensors else None  # type: ignore[return-value]

    def gradient(self, arrived: object = None) -> OnMesh:
        """How the gradient lies: torch's rule, whole where the value was partial, unless it arrived as such terms."""
        same = arrived if isinstance(arrived, OnMesh) and arrived.mesh == self.mesh else None
        terms = same.placements if same else (None,) * len(self.placements)
        pairs = zip(self.placements, terms, strict=True)
        return replace(self, placements=tuple(Replicate() if p.is_partial() and p != term else p for p, term in pairs))

    def gradient_of(self, grads: Tensors) -> OnMesh | None:
        """A DTensor says itself: operations may have left other placements."""
        return OnMesh.of(grads[0]) if grads else None  # type: ignore[arg-type]

    @property
    def _here(self) -> bool:
        return self.mesh.get_coordinate() is not None


def torchs_metadata(metadata: Any) -> Any:
    """torch's ShardedTensorMetadata from one that looks like it."""
    from torch.distributed._shard.sharded_tensor.metadata import ShardedTensorMetadata, TensorProperties

    known, size = metadata.tensor_properties, torch.Size(metadata.size)
    properties = TensorProperties(known.dtype, known.layout, known.requires_grad, known.memory_format, known.pin_memory)
    return ShardedTensorMetadata([_torchs_shard(m, size) for m in metadata.shards_metadata], size, properties)


def _torchs_shard(shard: Any, size: Sequence[int]) -> Any:
    """Empty shards are brought back to the end: torch's specs put them past it, and its tensors refuse that."""
    from torch.distributed._shard.metadata import ShardMetadata

    return ShardMetadata(list(_clipped(shard.shard_offsets, tuple(size))), list(shard.shard_sizes), shard.placement)


def _torchs_spec(spec: Any, metadata: Any) -> Any:
    """A spec of torch from one that looks like it."""
    from torch.distributed._shard.sharding_spec.api import EnumerableShardingSpec, ShardingSpec
    from torch.distributed._shard.sharding_spec.chunk_sharding_spec import ChunkShardingSpec

    if isinstance(spec, ShardingSpec):
        return spec
    if hasattr(spec, "placements") and hasattr(spec, "dim"):
        return ChunkShardingSpec(spec.dim, list(spec.placements))
    return EnumerableShardingSpec(metadata.shards_metadata)


def torchs_sharded(tensors: Tensors, metadata: Any, spec: Any, group: dist.ProcessGroup | None) -> Any:
    """A ShardedTensor of torch with these local tensors, made without a word to the other ranks."""
    from torch.distributed._shard.sharded_tensor.api import ShardedTensor
    from torch.distributed._shard.sharded_tensor.metadata import TensorProperties
    from torch.distributed._shard.sharded_tensor.shard import Shard

    if not of_job(group):
        raise LayoutError(
            "torch's ShardedTensor knows ranks of one job alone, but owners of this group are ranks of the group: "
            "keep the container of shardwise.sharded_tensor"
        )
    made = torchs_metadata(metadata)
    if tensors:
        made = replace(made, tensor_properties=TensorProperties.create_from_tensor(tensors[0]))
    shards = [Shard(tensor, m) for tensor, m in zip(tensors, shards_of(made, dist.get_rank()), strict=True)]
    return ShardedTensor._init_from_local_shards_and_global_metadata(
        shards, made, process_group=group, sharding_spec=_torchs_spec(spec, made)
    )


def torchs_loading(group: dist.ProcessGroup | None) -> AbstractContextManager[Any]:
    """torch's own ShardedTensors that are loaded inside live in this group."""
    from torch.distributed._shard.api import load_with_process_group

    return load_with_process_group(group)


@dataclass(frozen=True)
class Shards:
    """torch's ShardedTensor: boxes, each a tensor of its own."""

    layout: Layout
    metadata: Any
    spec: Any
    group: dist.ProcessGroup | None = None

    @classmethod
    def of(cls, x: Any) -> Self:
        """How a ShardedTensor lies."""
        return cls.by_metadata(x.metadata(), x.sharding_spec(), getattr(x, "_process_group", None))

    @classmethod
    def by_metadata(cls, metadata: Any, spec: Any, group: dist.ProcessGroup | None) -> Self:
        """How a tensor with that metadata lies."""
        return cls(metadata_layout(metadata), metadata, spec, group)

    @classmethod
    def by(cls, spec: Any, shape: Sequence[int], group: dist.ProcessGroup | None = None) -> Self:
        """How a tensor of that shape lies by a sharding spec."""
        from torch.distributed._shard.sharded_tensor.metadata import TensorProperties

        return cls.by_metadata(spec.build_metadata(torch.Size(shape), TensorProperties()), spec, group)

    @property
    def device(self) -> torch.device | None:
        """Where this rank's shards are."""
        return torch.device(self.mine[0].placement.device()) if self.mine else None

    def taken(self, x: Any) -> list[torch.Tensor]:
        """The local shards, in the order of the metadata."""
        return in_order(x.local_shards(), self.mine, self.layout.shape)

    def local(self, tensors: Tensors) -> list[torch.Tensor]:
        """They are plain tensors."""
        return [t.detach() for t in tensors]

    def dressed(self, local: Tensors) -> list[torch.Tensor]:
        """They are plain tensors."""
        return list(local)

    def closed(self, tensors: Tensors) -> Any:
        """A ShardedTensor of torch; None on a rank that holds nothing."""
        return torchs_sharded(tensors, self.metadata, self.spec, self.group) if tensors else None

    def gradient(self, arrived: object = None) -> Shards:
        """As the value: such tensors are never partial."""
        return self

    def gradient_of(self, grads: Tensors) -> Shards:
        """As they are to lie."""
        return self

    @cached_property
    def mine(self) -> list[Any]:
        """The metadata of this rank's shards."""
        return shards_of(self.metadata, owner_here(self.group))


def default_group() -> dist.ProcessGroup:
    """The group of all ranks."""
    group = dist.group.WORLD
    assert group is not None, "torch.distributed is initialised"
    return group


def is_dtensor(x: Any) -> bool:
    """True for a DTensor."""
    return isinstance(x, DTensor)


def is_torch_sharded(x: Any) -> bool:
    """True for torch's ShardedTensor, told by what it can do: importing it is slow."""
    return hasattr(x, "local_shards") and hasattr(x, "metadata") and hasattr(x, "sharding_spec")


def is_spec(x: Any) -> bool:
    """True for torch's sharding specs, told by what they can do."""
    return hasattr(x, "build_metadata") and hasattr(x, "shard")


def home_of(mesh: DeviceMesh) -> tuple[dist.ProcessGroup, tuple[int, ...]]:
    """The process group of a mesh; for several axes the default group, and the ranks of it that are meant."""
    one = mesh.ndim == 1 and mesh.get_coordinate() is not None
    return mesh.get_group() if one else default_group(), _ranks(mesh)


def mesh_of(to: Any) -> DeviceMesh | None:
    """The mesh that is asked for: of (DeviceMesh, placements), or of a DTensor."""
    if isinstance(to, DTensor):
        return to.device_mesh
    return to[0] if isinstance(to, tuple) and to and is_mesh(to[0]) else None


def is_mesh(x: Any) -> bool:
    """True for a DeviceMesh."""
    return isinstance(x, DeviceMesh)


def is_placement(x: Any) -> bool:
    """True for one of torch's placements."""
    return isinstance(x, Placement)


def on_mesh(mesh: DeviceMesh, placements: Any, shape: Sequence[int]) -> OnMesh:
    """DTensors with these placements: words such as "S0", ours or torch's. Negative dims count from the end."""
    one = [placements] if isinstance(placements, (Placement, *get_args(ours.Placement))) else placements
    if not isinstance(one, list | tuple) or not all(type(p) in TORCHS and getattr(p, "dim", 0) >= 0 for p in one):
        one = tuple(_torchs(p, tuple(shape)) for p in _mesh(mesh).placements(one))
    return OnMesh(mesh, tuple(one), tuple(shape))


TORCHS = (Shard, _StridedShard, Replicate, Partial)  # placements that need no reading


def _torchs(placement: Any, shape: tuple[int, ...]) -> Placement:
    """One of our placements as torch's."""
    match placement:
        case ours.Shard(dim):
            return Shard(checked_dim(dim, shape))
        case ours.StridedShard(dim, factor):
            return _StridedShard(checked_dim(dim, shape), split_factor=factor)
        case ours.Partial(op):
            return Partial(op)
    return Replicate()


@lru_cache(maxsize=4096)
def _mesh_layout(kind: OnMesh, unsorted: tuple[int, ...]) -> Layout:
    placements, order = kind.placements, kind.order
    if not _default(order):
        placements = DTensorSpec._convert_shard_order_to_StridedShard(order, placements, kind.mesh)
    by_coordinate = Layout.on_mesh(kind.shape, _mesh(kind.mesh), placements)
    ranks = in_group_order(kind.mesh, placements, unsorted)
    if ranks == kind.mesh.mesh.tolist():
        return by_coordinate
    by_group = Layout.on_mesh(kind.shape, _named(kind.mesh, ranks), placements)
    for rank in _ranks(kind.mesh):
        check_sizes(kind, rank, by_group.local_shape(rank), by_coordinate.local_shape(rank))
    return by_group


def _spec(kind: OnMesh, dtype: torch.dtype) -> DTensorSpec:
    """Kept by value, but for the mesh: an equal one may belong to process groups that are gone."""
    spec = _kept_spec(kind, dtype)
    return spec if spec.mesh is kind.mesh else _kept_spec.__wrapped__(kind, dtype)


@lru_cache(maxsize=4096)
def _kept_spec(kind: OnMesh, dtype: torch.dtype) -> DTensorSpec:
    meta = TensorMeta(torch.Size(kind.shape), _contiguous(kind.shape), dtype)
    order = {} if _default(kind.order) else {"shard_order": kind.order}
    return DTensorSpec(kind.mesh, kind.placements, meta, **order)


def _default(order: Any) -> bool:
    return order is None or DTensorSpec.is_default_device_order(order)


@lru_cache(maxsize=256)
def _mesh(mesh: DeviceMesh) -> Mesh:
    return _named(mesh, mesh.mesh.tolist())


def _named(mesh: DeviceMesh, ranks: Any) -> Mesh:
    """A mesh of the same axes with these ranks."""
    try:
        return Mesh.of(tuple(mesh.mesh.shape), mesh.mesh_dim_names, ranks=ranks)
    except LayoutError:  # torch allows any text as a name
        return Mesh.of(tuple(mesh.mesh.shape), ranks=ranks)


@lru_cache(maxsize=256)
def _ranks(mesh: DeviceMesh) -> tuple[int, ...]:
    return tuple(sorted(mesh.mesh.flatten().tolist()))


def metadata_layout(metadata: Any) -> Layout:
    """Where the cells of a tensor with that metadata are: torch's, or one that looks like it."""
    return _boxes_layout(
        tuple(metadata.size),
        tuple((owner_of(m), tuple(m.shard_offsets), tuple(m.shard_sizes)) for m in metadata.shards_metadata),
    )


def owner_of(shard: Any) -> int:
    """The global rank where a shard lives, by its metadata."""
    placement = shard.placement
    rank = None if placement is None else placement.rank()
    if rank is None and placement is not None and placement.worker_name() is not None:
        rank = worker_rank(placement.worker_name())
    if rank is None:
        raise ValueError(f"{shard} does not say where it lives: place it as in 'rank:0/cpu'")
    return int(rank)


def shards_of(metadata: Any, rank: int) -> list[Any]:
    """The metadata of the shards that live on a rank."""
    return [shard for shard in metadata.shards_metadata if owner_of(shard) == rank]


def in_order(local_shards: Sequence[Any], metadata: Sequence[Any], size: Sequence[int]) -> list[torch.Tensor]:
    """The tensors of local shards in the order of their metadata, each once."""
    left = defaultdict[Any, list[Any]](list)  # empty shards may lie at one place
    for shard in reversed(local_shards):
        left[_corner(shard.metadata, size)].append(shard.tensor)
    for wanted in metadata:
        if not left[_corner(wanted, size)]:
            raise ValueError(f"no local shard is {wanted}: there are {[shard.metadata for shard in local_shards]}")
    return [left[_corner(wanted, size)].pop() for wanted in metadata]


def _corner(shard: Any, size: Sequence[int]) -> tuple[Any, ...]:
    return _clipped(shard.shard_offsets, tuple(size)), tuple(shard.shard_sizes)


def worker_rank(name: str) -> int:
    """The rank of a worker of torch's RPC."""
    from torch.distributed import rpc

    if not rpc.is_available() or not rpc._is_current_rpc_agent_set():  # type: ignore[attr-defined]
        raise RuntimeError(
            f"RPC framework needs to be initialized for using worker names: {name}. "
            f"Call torch.distributed.rpc.init_rpc, or place by ranks, as in 'rank:0/cpu'"
        )
    agent = rpc._get_current_rpc_agent()  # type: ignore[attr-defined]
    try:
        return int(agent.get_worker_info(name).id)
    except RuntimeError:
        known = sorted(worker.name for worker in agent.get_worker_infos())
        raise ValueError(f"Invalid worker name: {name}; there are {known}") from None


@lru_cache(maxsize=256)
def _boxes_layout(shape: tuple[int, ...], shards: tuple[tuple[int, tuple[int, ...], tuple[int, ...]], ...]) -> Layout:
    pieces = [(r, _clipped(lo, shape), _clipped(map(sum, zip(lo, size, strict=True)), shape)) for r, lo, size in shards]
    found = Layout.boxes(shape, pieces).validate()
    for dim in range(len(shape)):  # chunks of a dim have a shorter name
        owners = [r for r, _, _ in sorted(shards, key=lambda shard: shard[1][dim])]
        if len(set(owners)) == len(owners) and (chunks := Layout.chunk(shape, dim, owners)) == found:
            return chunks
    return found


def _contiguous(shape: tuple[int, ...]) -> tuple[int, ...]:
    """The strides of a contiguous tensor of that shape, as torch counts them."""
    strides = [1]
    for size in reversed(shape[1:]):
        strides.append(strides[-1] * max(size, 1))
    return tuple(reversed(strides)) if shape else ()


def _clipped(corner: Any, shape: tuple[int, ...]) -> tuple[int, ...]:
    """torch places empty shards past the end."""
    return tuple(min(at, size) for at, size in zip(corner, shape, strict=True))


def replicated_along(x: Any, mesh: DeviceMesh) -> bool:
    """True where the ranks along a mesh's first dim have the same local tensor: a dim of the DTensor's mesh."""
    ranks = _line(mesh, 0)
    return any(p.is_replicate() and _line(x.device_mesh, axis) == ranks for axis, p in enumerate(x.placements))


@lru_cache(maxsize=256)
def _line(mesh: DeviceMesh, axis: int) -> tuple[int, ...]:
    return tuple(sorted(line(mesh, axis)))
