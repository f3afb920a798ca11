"""The container of a ShardedTensor under torch's names: its layout by a spec, with the metadata of all shards."""

from __future__ import annotations

from collections.abc import Sequence
from copy import copy
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache
from typing import TYPE_CHECKING, Any, Self

import torch
import torch.distributed as dist

from shardwise.containers.torch_sharded import (
    MetadataLike,
    RemoteDevice,
    ShardMetadataLike,
    SpecLike,
    TorchShardedContainer,
    device_of,
    owner_of,
    shards_of,
)
from shardwise.exchange.messages import Tensors
from shardwise.sharded_tensor.metadata import ShardedTensorMetadata, ShardMetadata, TensorProperties
from shardwise.sharded_tensor.sharding_spec import _infer_sharding_spec_from_shards_metadata
from shardwise.transports.members import owner_here

if TYPE_CHECKING:
    from shardwise.sharded_tensor.api import ShardedTensor

Group = dist.ProcessGroup | None


@dataclass(frozen=True)
class SpecContainer(TorchShardedContainer):
    """The container of ShardedTensors under torch's names. The properties of the tensor are in its metadata."""

    metadata: ShardedTensorMetadata
    everywhere: bool = False  # ranks that hold nothing get a container, too
    own: tuple[ShardMetadata, ...] | None = None  # what this process holds, where no process group says its rank

    @classmethod
    def by(
        cls, spec: SpecLike, shape: Sequence[int], group: Group = None, properties: TensorProperties | None = None
    ) -> Self:
        """The container of a tensor of that shape by a spec, ours or torch's."""
        if not hasattr(spec, "build_metadata"):
            raise ValueError(f"Expecting ShardingSpec but got: {type(spec)}")
        metadata = spec.build_metadata(torch.Size(shape), properties or TensorProperties())
        return cls.by_metadata(metadata, spec, group)

    @classmethod
    def by_metadata(cls, metadata: MetadataLike, spec: SpecLike, group: Group) -> Self:
        """The container of a tensor with that metadata, ours or torch's."""
        container = super().by_metadata(ShardedTensorMetadata.of(metadata), spec, group)
        devices = dict[int, torch.device]()
        for shard in container.metadata.shards_metadata:
            device = devices.setdefault(owner_of(shard), device_of(shard))
            if device != device_of(shard):
                raise ValueError(
                    f"the shards of a rank must be on one device, but those of rank {owner_of(shard)} are on {device} "
                    f"and {device_of(shard)}"
                )
        return container

    @property
    def properties(self) -> TensorProperties:
        """What the tensor is beside its shape."""
        return self.metadata.tensor_properties

    @cached_property
    def mine(self) -> list[ShardMetadata]:
        """The metadata of this process's shards."""
        if self.own is not None:
            return list(self.own)
        return shards_of(self.metadata.shards_metadata, owner_here(self.group))

    @cached_property
    def devices(self) -> list[torch.device]:
        """The devices of all shards."""
        return [device_of(shard) for shard in self.metadata.shards_metadata]

    def with_properties(self, **properties: Any) -> Self:
        """The same for a tensor with other properties."""
        changed = replace(self.properties, **properties)
        return self.with_fields(metadata=replace(self.metadata, tensor_properties=changed))

    def with_fields(self, **fields: Any) -> Self:
        """The same with other fields, for the same shards: those of the rank that made it."""
        container = replace(self, **fields)
        vars(container)["mine"] = self.mine
        return container

    def on(self, device: torch.device) -> Self:
        """The same on other devices. Other ranks are known to use the same type of device."""
        here = set(map(owner_of, self.mine))
        shards = [_at_device(m, device if owner_of(m) in here else device.type) for m in self.metadata.shards_metadata]
        spec = _infer_sharding_spec_from_shards_metadata(shards)
        own = None if self.own is None else tuple(_at_device(m, device) for m in self.own)
        return replace(self, metadata=replace(self.metadata, shards_metadata=shards), spec=spec, own=own)

    def by_rank(self) -> Self:
        """The same with the shards listed by rank, empty ones at the end of their dim: as torch does after a reshard.

        Shards of one rank keep their order.
        """
        size = self.metadata.size
        shards = [inside(m, size) for m in sorted(self.metadata.shards_metadata, key=owner_of)]
        return replace(self, metadata=replace(self.metadata, shards_metadata=shards))

    def assemble(self, tensors: Tensors) -> ShardedTensor | None:
        """A ShardedTensor; None on a rank that holds nothing, except where it is to be everywhere."""
        return self.holding(tensors) if tensors or self.everywhere else None

    def __deepcopy__(self, memo: dict[int, object]) -> Self:
        """Itself: it is frozen, and a process group cannot be copied."""
        return self

    def holding(self, tensors: Tensors) -> ShardedTensor:
        """A ShardedTensor, also on a rank that holds nothing."""
        from shardwise.sharded_tensor.api import ShardedTensor  # which imports this

        return ShardedTensor.holding(self, tensors)


@dataclass(frozen=True)
class SpecTarget:
    """A spec, ours or torch's, as a target: a ShardedTensor of ours on every rank of the group."""

    spec: SpecLike
    properties: TensorProperties

    def container_for(self, shape: Sequence[int], group: Group) -> SpecContainer:
        """The container of a result of that shape."""
        return replace(SpecContainer.by(self.spec, shape, group, self.properties), everywhere=True)


def _at_device(shard: ShardMetadata, device: torch.device | str) -> ShardMetadata:
    moved = copy(shard)
    moved.placement = _remote(shard.placement, str(device)) if shard.placement else None
    return moved


def inside(shard: ShardMetadataLike, size: Sequence[int]) -> ShardMetadata:
    """The shard at the end of its dim, where it is empty and lies past that."""
    offsets = [min(lo, most) for lo, most in zip(shard.shard_offsets, size, strict=True)]
    return ShardMetadata(offsets, shard.shard_sizes, shard.placement)


@lru_cache(maxsize=2**15)
def _remote(placement: RemoteDevice, device: str) -> RemoteDevice:
    name = placement.worker_name() or f"rank:{placement.rank()}"
    return RemoteDevice(f"{name}/{device}")
