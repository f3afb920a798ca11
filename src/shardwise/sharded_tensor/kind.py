"""How a ShardedTensor with torch's names lies: by a spec, with metadata of all shards."""

from __future__ import annotations

from collections.abc import Sequence
from copy import copy
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache
from typing import TYPE_CHECKING, Any, Self

import torch
import torch.distributed as dist

from shardwise.sharded_tensor.metadata import ShardedTensorMetadata, ShardMetadata, TensorProperties
from shardwise.sharded_tensor.sharding_spec import _infer_sharding_spec_from_shards_metadata
from shardwise.torch_internals import RemoteDevice, Shards, owner_of, shards_of
from shardwise.transports.members import owner_here

if TYPE_CHECKING:
    from shardwise.sharded_tensor.api import ShardedTensor

Group = dist.ProcessGroup | None
Tensors = Sequence[torch.Tensor]


@dataclass(frozen=True)
class BySpec(Shards):
    """The kind of such ShardedTensors. The properties of the tensor are in its metadata."""

    everywhere: bool = False  # ranks that hold nothing get a container, too
    own: tuple[ShardMetadata, ...] | None = None  # what this process holds, where no process group says its rank

    @classmethod
    def by(
        cls, spec: Any, shape: Sequence[int], group: Group = None, properties: TensorProperties | None = None
    ) -> Self:
        """How a tensor of that shape lies by a spec, ours or torch's."""
        if not hasattr(spec, "build_metadata"):
            raise ValueError(f"Expecting ShardingSpec but got: {type(spec)}")
        metadata = spec.build_metadata(torch.Size(shape), properties or TensorProperties())
        return cls.by_metadata(metadata, spec, group)

    @classmethod
    def by_metadata(cls, metadata: Any, spec: Any, group: Group) -> Self:
        """How a tensor with that metadata lies, ours or torch's."""
        kind = super().by_metadata(ShardedTensorMetadata.of(metadata), spec, group)
        devices = dict[int, torch.device]()
        for shard in kind.metadata.shards_metadata:
            device = devices.setdefault(owner_of(shard), shard.placement.device())
            if device != shard.placement.device():
                raise ValueError(
                    f"the shards of a rank must be on one device, but those of rank {owner_of(shard)} are on {device} "
                    f"and {shard.placement.device()}"
                )
        return kind

    @property
    def properties(self) -> TensorProperties:
        """What the tensor is beside its shape."""
        properties: TensorProperties = self.metadata.tensor_properties
        return properties

    @cached_property
    def mine(self) -> list[Any]:
        """The metadata of this process's shards."""
        return shards_of(self.metadata, owner_here(self.group)) if self.own is None else list(self.own)

    @cached_property
    def devices(self) -> list[torch.device]:
        """Of all shards."""
        return [shard.placement.device() for shard in self.metadata.shards_metadata]

    def having(self, **properties: Any) -> Self:
        """The same for a tensor with other properties."""
        changed = replace(self.properties, **properties)
        return self.with_fields(metadata=replace(self.metadata, tensor_properties=changed))

    def with_fields(self, **fields: Any) -> Self:
        """The same with other fields, for the same shards: those of the rank that it was then."""
        kind = replace(self, **fields)
        vars(kind)["mine"] = self.mine
        return kind

    def on(self, device: torch.device) -> Self:
        """The same on other devices. Of those of other ranks only the kind is known."""
        here = set(map(owner_of, self.mine))
        shards = [_placed(m, device if owner_of(m) in here else device.type) for m in self.metadata.shards_metadata]
        spec = _infer_sharding_spec_from_shards_metadata(shards)
        own = None if self.own is None else tuple(_placed(m, device) for m in self.own)
        return replace(self, metadata=replace(self.metadata, shards_metadata=shards), spec=spec, own=own)

    def by_rank(self) -> Self:
        """The same with the shards listed by rank, empty ones at the end of their dim: as torch does after a reshard.

        Shards of one rank keep their order.
        """
        size = self.metadata.size
        shards = [inside(m, size) for m in sorted(self.metadata.shards_metadata, key=owner_of)]
        return replace(self, metadata=replace(self.metadata, shards_metadata=shards))

    def closed(self, tensors: Tensors) -> ShardedTensor | None:
        """A ShardedTensor; None on a rank that holds nothing, unless it is to be everywhere."""
        return self.holding(tensors) if tensors or self.everywhere else None

    def __deepcopy__(self, memo: dict[int, Any]) -> Self:
        """Itself: it is frozen, and a process group cannot be copied."""
        return self

    def holding(self, tensors: Tensors) -> ShardedTensor:
        """A ShardedTensor, also on a rank that holds nothing."""
        from shardwise.sharded_tensor.api import ShardedTensor  # which knows its kind

        return ShardedTensor.holding(self, tensors)


@dataclass(frozen=True)
class Target:
    """A spec, ours or torch's, asked for as a ShardedTensor of ours on every rank of the group."""

    spec: Any
    properties: TensorProperties

    def kind_for(self, shape: Sequence[int], group: Group) -> BySpec:
        """How it lies."""
        return replace(BySpec.by(self.spec, shape, group, self.properties), everywhere=True)


def _placed(shard: ShardMetadata, device: torch.device | str) -> ShardMetadata:
    placed = copy(shard)
    placed.placement = _at(shard.placement, str(device))
    return placed


def inside(shard: Any, size: Sequence[int]) -> ShardMetadata:
    """The shard at the end of its dim, where it is empty and lies past that."""
    offsets = [min(lo, most) for lo, most in zip(shard.shard_offsets, size, strict=True)]
    return ShardMetadata(offsets, shard.shard_sizes, shard.placement)


@lru_cache(maxsize=2**15)
def _at(placement: Any, device: str) -> RemoteDevice:
    name = placement.worker_name() or f"rank:{placement.rank()}"
    return RemoteDevice(f"{name}/{device}")
