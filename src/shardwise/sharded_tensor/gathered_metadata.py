"""The metadata of a ShardedTensor from the shards of all ranks: each rank describes its own, and all are combined."""

from __future__ import annotations

from collections.abc import Sequence
from typing import cast

import torch
import torch.distributed as dist

from shardwise.containers.torch_sharded import MetadataLike, ShardLike
from shardwise.sharded_tensor.metadata import ShardedTensorMetadata
from shardwise.sharded_tensor.sharding_spec import (
    _infer_sharding_spec_from_shards_metadata,
    check_shards,
)
from shardwise.sharded_tensor.spec_container import Group, SpecContainer
from shardwise.sharded_tensor.utils import (
    _flatten_tensor_size,
    _raise_if_mismatch,
    build_global_metadata,
    build_metadata_from_local_shards,
)
from shardwise.transports.members import owner_here

Dim = int | None  # None: to be computed
Size = tuple[Dim, ...]
LocalMetadata = tuple[Size, ShardedTensorMetadata | None]


def local_metadata(
    local_shards: Sequence[ShardLike] | None, global_size: Sequence[Dim | Sequence[Dim]], group: Group, init_rrefs: bool
) -> LocalMetadata:
    """The size, with None for dims to be computed, and the metadata of this rank's shards if it has any."""
    refuse(init_rrefs)
    if not isinstance(local_shards, list | tuple | None):
        raise TypeError(f"local_shards must be a list of Shards, not {type(local_shards)}")
    shards = local_shards or ()
    for shard in shards:
        if not hasattr(shard, "metadata") or not hasattr(shard, "tensor"):
            raise TypeError(f"local_shards must be Shards, each with tensor and metadata, not {type(shard)}")
    dims = _dims(global_size)
    size = _flatten_tensor_size([0 if dim is None else dim for dim in dims])
    known = tuple(None if dim is None else length for dim, length in zip(dims, size, strict=True))
    for shard in shards:
        if len(shard.metadata.shard_sizes) != len(size):
            raise ValueError(f"{shard.metadata} does not fit a tensor with {len(size)} dims: the size is {known}")
    if not shards:
        return known, None
    return known, build_metadata_from_local_shards(shards, size, owner_here(group), group or dist.group.WORLD)


def container_from(by_rank: dict[int, LocalMetadata], group: Group) -> SpecContainer:
    """The container of the tensor, from the metadata of every rank."""
    first, (size, _) = next(iter(by_rank.items()))
    for rank, (other, _) in by_rank.items():
        _raise_if_mismatch(size, other, "global_size", (first, rank), is_local=False)
    gathered = [by_rank[rank][1] if rank in by_rank else None for rank in range(max(by_rank) + 1)]
    computed = size.index(None) if None in size else None  # further ones are as long as the shards
    _check_offsets(gathered, computed)
    metadata = build_global_metadata(gathered, computed is not None, computed or 0)
    if any(given not in (None, length) for given, length in zip(size, metadata.size, strict=True)):
        raise ValueError(f"the shards make a tensor of size {tuple(metadata.size)}, but the given size is {size}")
    return SpecContainer.by_metadata(
        metadata, _infer_sharding_spec_from_shards_metadata(metadata.shards_metadata), group
    )


def _dims(size: Sequence[Dim | Sequence[Dim]]) -> list[Dim]:
    """The dims of a size that was given as numbers or as one sequence."""
    flat = size[0] if len(size) == 1 and isinstance(size[0], Sequence) else size
    return list(cast(Sequence[Dim], flat))


def _check_offsets(gathered: Sequence[ShardedTensorMetadata | None], computed: int | None) -> None:
    """Refuse shards that all begin at the first cell: the offsets were forgotten."""
    shards = [shard for metadata in gathered if metadata is not None for shard in metadata.shards_metadata]
    filled = [shard for shard in shards if 0 not in shard.shard_sizes]
    if computed is None and len(filled) > 1 and not any(any(shard.shard_offsets) for shard in filled):
        raise ValueError(
            f"all {len(filled)} shards overlap at the first cell: give each its shard_offsets, or a None in the size "
            f"for the dim along which they lie one after the other"
        )


def checked_metadata(metadata: MetadataLike) -> ShardedTensorMetadata:
    """Metadata of all shards, ours or torch's, if they are those of a whole tensor."""
    checked = ShardedTensorMetadata.of(metadata)
    if not checked.shards_metadata:
        raise ValueError("shards_metadata must not be empty!")
    refuse(init_rrefs=False, layout=checked.tensor_properties.layout)
    check_shards(checked.shards_metadata, checked.size)
    return checked


def refuse(init_rrefs: bool, layout: torch.layout = torch.strided) -> None:
    """Refuse options of torch that are not supported."""
    if init_rrefs:
        raise NotImplementedError(
            "init_rrefs=True: references to remote shards are not kept; gather or reshard brings what is needed"
        )
    if layout != torch.strided:
        raise ValueError(f"Only torch.strided layout is currently supported, not {layout}")
