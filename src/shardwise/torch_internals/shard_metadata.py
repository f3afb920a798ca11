"""Metadata of shards, torch's and ours: which rank holds which box."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence
from functools import lru_cache
from typing import Any, Protocol, TypeVar

import torch
from torch.distributed.remote_device import _remote_device

from shardwise.layout import Layout

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


def in_order(
    local_shards: Sequence[ShardLike], metadata: Sequence[ShardMetadataLike], size: Sequence[int]
) -> list[torch.Tensor]:
    """The tensors of local shards in the order of their metadata, each once."""
    left = defaultdict[tuple[Corner, Corner], list[torch.Tensor]](list)  # empty shards may share a place
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
