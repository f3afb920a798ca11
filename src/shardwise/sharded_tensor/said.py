"""What every rank says of its local shards, and what follows for the whole tensor."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist

from shardwise.sharded_tensor.kind import BySpec, Group
from shardwise.sharded_tensor.metadata import ShardedTensorMetadata
from shardwise.sharded_tensor.sharding_spec import (
    _infer_sharding_spec_from_shards_metadata,
    check_tensor,
    validate_non_overlapping_shards_metadata,
)
from shardwise.sharded_tensor.utils import (
    _flatten_tensor_size,
    _raise_if_mismatch,
    build_global_metadata,
    build_metadata_from_local_shards,
)
from shardwise.transports.members import owner_here

Size = tuple[int | None, ...]
Said = tuple[Size, ShardedTensorMetadata | None]


def said(local_shards: Any, global_size: Sequence[Any], group: Group, init_rrefs: bool) -> Said:
    """The size, None where it is to be computed, and the metadata of this rank's shards if it has any."""
    refuse(init_rrefs)
    if not isinstance(local_shards, list | tuple | None):
        raise TypeError(f"local_shards must be a list of Shards, not {type(local_shards)}")
    shards = local_shards or ()
    for shard in shards:
        if not hasattr(shard, "metadata") or not hasattr(shard, "tensor"):
            raise TypeError(f"local_shards must be Shards, each with tensor and metadata, not {type(shard)}")
    one = len(global_size) == 1 and isinstance(global_size[0], Sequence)
    dims = list(global_size[0] if one else global_size)
    size = _flatten_tensor_size([0 if dim is None else dim for dim in dims])
    known = tuple(None if dim is None else length for dim, length in zip(dims, size, strict=True))
    for shard in shards:
        if len(shard.metadata.shard_sizes) != len(size):
            raise ValueError(f"{shard.metadata} is no shard of a tensor with {len(size)} dims: the size is {known}")
    if not shards:
        return known, None
    return known, build_metadata_from_local_shards(shards, size, owner_here(group), group or dist.group.WORLD)


def concluded(told: dict[int, Said], group: Group) -> BySpec:
    """How the tensor lies, from what every rank said."""
    first, (size, _) = next(iter(told.items()))
    for rank, (other, _) in told.items():
        _raise_if_mismatch(size, other, "global_size", (first, rank), is_local=False)
    gathered = [told[rank][1] if rank in told else None for rank in range(max(told) + 1)]
    computed = size.index(None) if None in size else None  # further ones are as long as the shards
    _check_offsets(gathered, computed)
    metadata = build_global_metadata(gathered, computed is not None, computed or 0)
    if any(said not in (None, found) for said, found in zip(size, metadata.size, strict=True)):
        raise ValueError(f"the shards make a tensor of size {tuple(metadata.size)}, but the size was said to be {size}")
    return BySpec.by_metadata(metadata, _infer_sharding_spec_from_shards_metadata(metadata.shards_metadata), group)


def _check_offsets(gathered: Sequence[ShardedTensorMetadata | None], computed: int | None) -> None:
    """Many shards that all begin at the first cell have offsets that nobody thought of."""
    shards = [shard for metadata in gathered if metadata is not None for shard in metadata.shards_metadata]
    filled = [shard for shard in shards if 0 not in shard.shard_sizes]
    if computed is None and len(filled) > 1 and not any(any(shard.shard_offsets) for shard in filled):
        raise ValueError(
            f"all {len(filled)} shards overlap at the first cell: give each its shard_offsets, or a None in the size "
            f"for the dim along which they lie one after the other"
        )


def checked_metadata(metadata: Any) -> ShardedTensorMetadata:
    """Metadata of all shards, ours or torch's, if they are those of a whole tensor."""
    found = ShardedTensorMetadata.of(metadata)
    if not found.shards_metadata:
        raise ValueError("shards_metadata must not be empty!")
    refuse(init_rrefs=False, layout=found.tensor_properties.layout)
    validate_non_overlapping_shards_metadata(found.shards_metadata)
    check_tensor(found.shards_metadata, found.size)
    return found


def refuse(init_rrefs: bool, layout: torch.layout = torch.strided) -> None:
    """Refuse what torch can be asked for and cannot be had here."""
    if init_rrefs:
        raise NotImplementedError(
            "init_rrefs=True: references to remote shards are not kept; gather or reshard brings what is needed"
        )
    if layout != torch.strided:
        raise ValueError(f"Only torch.strided layout is currently supported, not {layout}")
