"""torch's ShardedTensor as a container: taken apart into local tensors, and made again without messages.

Metadata, shards and specs are recognized by their attributes: torch's, or ours of `shardwise.sharded_tensor`.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache
from typing import TYPE_CHECKING, Any, Protocol, Self, TypeGuard, TypeVar

import torch
import torch.distributed as dist
from torch.distributed.remote_device import _remote_device

from shardwise.errors import LayoutError
from shardwise.exchange.messages import Tensors
from shardwise.layout import Layout
from shardwise.transports.members import of_job, owner_here

if TYPE_CHECKING:  # importing them is slow
    from torch.distributed._shard.metadata import ShardMetadata
    from torch.distributed._shard.sharded_tensor.api import ShardedTensor
    from torch.distributed._shard.sharded_tensor.metadata import ShardedTensorMetadata
    from torch.distributed._shard.sharding_spec.api import ShardingSpec

    TorchShardedTensor = ShardedTensor
    TorchMetadata = ShardedTensorMetadata

TensorMetaclass = torch._C._TensorMeta
PACKAGE = "torch.distributed._shard"  # of torch's ShardedTensor, its specs and metadata
RemoteDevice = _remote_device  # "rank:1/cpu": torch's class, so that placements compare equal and print alike
Corner = tuple[int, ...]


class ShardMetadataLike(Protocol):
    """The metadata of one shard: torch's ShardMetadata or ours."""

    @property
    def shard_offsets(self) -> Sequence[int]:
        """The first cell of the shard in the whole tensor."""
        ...

    @property
    def shard_sizes(self) -> Sequence[int]:
        """The shape of the shard."""
        ...

    @property
    def placement(self) -> RemoteDevice | None:
        """The rank or worker, and the device."""
        ...


class ShardLike(Protocol):
    """A local tensor with its metadata: torch's Shard or ours."""

    @property
    def tensor(self) -> torch.Tensor:
        """The values."""
        ...

    @property
    def metadata(self) -> ShardMetadataLike:
        """Where they belong."""
        ...


class PropertiesLike(Protocol):
    """What a tensor is beside its shape: torch's TensorProperties or ours."""

    @property
    def dtype(self) -> torch.dtype:
        """The dtype."""
        ...

    @property
    def layout(self) -> torch.layout:
        """torch.strided, for all that is supported."""
        ...

    @property
    def requires_grad(self) -> bool:
        """True where autograd follows it."""
        ...

    @property
    def memory_format(self) -> torch.memory_format:
        """torch.contiguous_format, for all that is supported."""
        ...

    @property
    def pin_memory(self) -> bool:
        """True where the shards are in pinned memory."""
        ...


class MetadataLike(Protocol):
    """The metadata of all shards of a tensor: torch's ShardedTensorMetadata or ours."""

    @property
    def shards_metadata(self) -> Sequence[ShardMetadataLike]:
        """One entry per shard."""
        ...

    @property
    def size(self) -> torch.Size:
        """The shape of the whole tensor."""
        ...

    @property
    def tensor_properties(self) -> PropertiesLike:
        """What the tensor is beside its shape."""
        ...


class SpecLike(Protocol):
    """A sharding spec: torch's ShardingSpec or ours."""

    def build_metadata(self, tensor_sizes: torch.Size, tensor_properties: Any) -> MetadataLike:
        """The shards of a tensor of that size."""
        ...

    def shard(self, tensor: Any, src_rank: int = 0, process_group: Any = None) -> Any:
        """The tensor of one rank as a ShardedTensor."""
        ...


class ShardedLike(Protocol):
    """A sharded tensor: torch's ShardedTensor, or ours of `shardwise.sharded_tensor`."""

    def local_shards(self) -> Sequence[ShardLike]:
        """This rank's shards."""
        ...

    def metadata(self) -> MetadataLike:
        """The metadata of all shards."""
        ...

    def sharding_spec(self) -> SpecLike:
        """The spec by which it is sharded."""
        ...


AnyShardMetadata = TypeVar("AnyShardMetadata", bound=ShardMetadataLike)


def metadata_layout(metadata: MetadataLike) -> Layout:
    """Where the cells of a tensor with that metadata are."""
    return _boxes_layout(
        tuple(metadata.size),
        tuple((owner_of(m), tuple(m.shard_offsets), tuple(m.shard_sizes)) for m in metadata.shards_metadata),
    )


def owner_of(shard: ShardMetadataLike) -> int:
    """The global rank where a shard lives, by its metadata."""
    placement = shard.placement
    rank = None if placement is None else placement.rank()
    name = None if placement is None else placement.worker_name()
    if rank is None and name is not None:
        rank = worker_rank(name)
    if rank is None:
        raise ValueError(f"{shard} does not say where it lives: place it as in 'rank:0/cpu'")
    return int(rank)


def device_of(shard: ShardMetadataLike) -> torch.device:
    """The device of a shard, by its metadata."""
    if shard.placement is None:
        raise ValueError(f"{shard} does not say where it lives: place it as in 'rank:0/cpu'")
    return torch.device(shard.placement.device())


def shards_of(shards: Iterable[AnyShardMetadata], rank: int) -> list[AnyShardMetadata]:
    """The metadata of those shards that live on a rank."""
    return [shard for shard in shards if owner_of(shard) == rank]


def in_order(local_shards: Sequence[ShardLike], metadata: Sequence[ShardMetadataLike], size: Sequence[int]) -> Tensors:
    """The tensors of local shards in the order of their metadata, each once."""
    left = defaultdict[tuple[Corner, Corner], Tensors](list)  # empty shards may share a place
    for shard in reversed(local_shards):
        left[_corner(shard.metadata, size)].append(shard.tensor)
    for wanted in metadata:
        if not left[_corner(wanted, size)]:
            raise ValueError(f"no local shard is {wanted}: there are {[shard.metadata for shard in local_shards]}")
    return [left[_corner(wanted, size)].pop() for wanted in metadata]


def _corner(shard: ShardMetadataLike, size: Sequence[int]) -> tuple[Corner, Corner]:
    return clipped(shard.shard_offsets, tuple(size)), tuple(shard.shard_sizes)


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
def _boxes_layout(shape: Corner, shards: tuple[tuple[int, Corner, Corner], ...]) -> Layout:
    pieces = [(r, clipped(lo, shape), clipped(map(sum, zip(lo, size, strict=True)), shape)) for r, lo, size in shards]
    boxes = Layout.boxes(shape, pieces).validate()
    for dim in range(len(shape)):  # chunks of a dim have a shorter name
        owners = [r for r, _, _ in sorted(shards, key=lambda shard: shard[1][dim])]
        if len(set(owners)) == len(owners) and (chunks := Layout.chunk(shape, dim, owners)) == boxes:
            return chunks
    return boxes


def clipped(corner: Iterable[int], shape: Corner) -> Corner:
    """A corner inside the tensor: torch places empty shards past the end."""
    return tuple(min(at, size) for at, size in zip(corner, shape, strict=True))


@dataclass(frozen=True)
class TorchShardedContainer:
    """torch's ShardedTensor: boxes, each a tensor of its own."""

    layout: Layout
    metadata: MetadataLike
    spec: SpecLike
    group: dist.ProcessGroup | None = None

    @classmethod
    def of(cls, x: ShardedLike) -> Self:
        """The container of a ShardedTensor."""
        return cls.by_metadata(x.metadata(), x.sharding_spec(), getattr(x, "_process_group", None))

    @classmethod
    def by_metadata(cls, metadata: MetadataLike, spec: SpecLike, group: dist.ProcessGroup | None) -> Self:
        """The container of a tensor with that metadata."""
        return cls(metadata_layout(metadata), metadata, spec, group)

    @classmethod
    def by(cls, spec: SpecLike, shape: Sequence[int], group: dist.ProcessGroup | None = None) -> Self:
        """The container of a tensor of that shape by a sharding spec."""
        from torch.distributed._shard.sharded_tensor.metadata import TensorProperties

        return cls.by_metadata(spec.build_metadata(torch.Size(shape), TensorProperties()), spec, group)

    @property
    def device(self) -> torch.device | None:
        """The device of this rank's shards."""
        return device_of(self.mine[0]) if self.mine else None

    def disassemble(self, x: ShardedLike) -> Tensors:
        """The local shards, in the order of the metadata."""
        return in_order(x.local_shards(), self.mine, self.layout.shape)

    def local(self, tensors: Tensors) -> Tensors:
        """They are plain tensors."""
        return [t.detach() for t in tensors]

    def from_local(self, local: Tensors) -> Tensors:
        """They are plain tensors."""
        return list(local)

    def assemble(self, tensors: Tensors) -> torch.Tensor | None:
        """A ShardedTensor of torch; None on a rank that holds nothing."""
        return torchs_sharded(tensors, self.metadata, self.spec, self.group) if tensors else None

    def gradient(self, arrived: object = None) -> Self:
        """As the value: such tensors are never partial."""
        return self

    def gradient_of(self, grads: Tensors) -> Self:
        """As the value."""
        return self

    @cached_property
    def mine(self) -> Sequence[ShardMetadataLike]:
        """The metadata of this rank's shards."""
        return shards_of(self.metadata.shards_metadata, owner_here(self.group))


def torchs_metadata(metadata: MetadataLike) -> ShardedTensorMetadata:
    """torch's ShardedTensorMetadata from one that looks like it."""
    from torch.distributed._shard.sharded_tensor.metadata import ShardedTensorMetadata, TensorProperties

    known, size = metadata.tensor_properties, torch.Size(metadata.size)
    properties = TensorProperties(known.dtype, known.layout, known.requires_grad, known.memory_format, known.pin_memory)
    return ShardedTensorMetadata([_torchs_shard(m, size) for m in metadata.shards_metadata], size, properties)


def _torchs_shard(shard: ShardMetadataLike, size: Sequence[int]) -> ShardMetadata:
    """Empty shards are brought back to the end: torch's specs put them past it, and its tensors refuse that."""
    from torch.distributed._shard.metadata import ShardMetadata

    return ShardMetadata(list(clipped(shard.shard_offsets, tuple(size))), list(shard.shard_sizes), shard.placement)


def _torchs_spec(spec: SpecLike, metadata: ShardedTensorMetadata) -> ShardingSpec:
    """A spec of torch from one that looks like it."""
    from torch.distributed._shard.sharding_spec.api import EnumerableShardingSpec, ShardingSpec
    from torch.distributed._shard.sharding_spec.chunk_sharding_spec import ChunkShardingSpec

    if isinstance(spec, ShardingSpec):
        return spec
    if hasattr(spec, "placements") and hasattr(spec, "dim"):
        return ChunkShardingSpec(spec.dim, list(spec.placements))
    return EnumerableShardingSpec(metadata.shards_metadata)


def torchs_sharded(
    tensors: Tensors, metadata: MetadataLike, spec: SpecLike, group: dist.ProcessGroup | None
) -> ShardedTensor:
    """A ShardedTensor of torch with these local tensors, made without messages to the other ranks."""
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
    mine = shards_of(made.shards_metadata, dist.get_rank())
    return ShardedTensor._init_from_local_shards_and_global_metadata(
        [Shard(tensor, m) for tensor, m in zip(tensors, mine, strict=True)],
        made,
        process_group=group,
        sharding_spec=_torchs_spec(spec, made),
    )


def torchs_loading(group: dist.ProcessGroup | None) -> AbstractContextManager[object]:
    """torch's ShardedTensors that are loaded inside this context live in this group."""
    from torch.distributed._shard.api import load_with_process_group

    return load_with_process_group(group)


def is_torch_sharded(x: object) -> TypeGuard[ShardedLike]:
    """True for torch's ShardedTensor, recognized by its methods: importing the class is slow."""
    return hasattr(x, "local_shards") and hasattr(x, "metadata") and hasattr(x, "sharding_spec")


def is_spec(x: object) -> TypeGuard[SpecLike]:
    """True for sharding specs, torch's and ours, recognized by their methods."""
    return hasattr(x, "build_metadata") and hasattr(x, "shard")
