"""torch's ShardedTensor as a container: taken apart into local tensors, and made again without messages."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from functools import cached_property
from typing import TYPE_CHECKING, Self, TypeGuard

import torch
import torch.distributed as dist

from shardwise.errors import LayoutError
from shardwise.layout import Layout
from shardwise.torch_internals.shard_metadata import (
    MetadataLike,
    ShardedLike,
    ShardMetadataLike,
    SpecLike,
    clipped,
    device_of,
    in_order,
    metadata_layout,
    shards_of,
)
from shardwise.transports.members import of_job, owner_here

if TYPE_CHECKING:  # importing them is slow
    from torch.distributed._shard.metadata import ShardMetadata
    from torch.distributed._shard.sharded_tensor.api import ShardedTensor
    from torch.distributed._shard.sharded_tensor.metadata import ShardedTensorMetadata
    from torch.distributed._shard.sharding_spec.api import ShardingSpec

    TorchShardedTensor = ShardedTensor
    TorchMetadata = ShardedTensorMetadata

Tensors = Sequence[torch.Tensor]
TensorMetaclass = torch._C._TensorMeta
PACKAGE = "torch.distributed._shard"  # of torch's ShardedTensor, its specs and metadata


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

    def disassemble(self, x: ShardedLike) -> list[torch.Tensor]:
        """The local shards, in the order of the metadata."""
        return in_order(x.local_shards(), self.mine, self.layout.shape)

    def local(self, tensors: Tensors) -> list[torch.Tensor]:
        """They are plain tensors."""
        return [t.detach() for t in tensors]

    def from_local(self, local: Tensors) -> list[torch.Tensor]:
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
