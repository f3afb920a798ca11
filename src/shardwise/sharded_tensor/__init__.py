"""The familiar names of torch.distributed._shard, on top of layouts and plans."""

from shardwise.sharded_tensor.metadata import Shard, ShardedTensorMetadata, ShardMetadata, TensorProperties
from shardwise.sharded_tensor.reshard import (
    build_reshard_metadata,
    get_idx_from_placements,
    reshard_local_shard,
    reshuffle_local_shard,
)
from shardwise.sharded_tensor.sharding_spec import (
    ChunkShardingSpec,
    DevicePlacementSpec,
    EnumerableShardingSpec,
    PlacementSpec,
    ShardingSpec,
    _infer_sharding_spec_from_shards_metadata,
    check_tensor,
    get_chunk_sharding_params,
    get_chunked_dim_size,
    get_split_size,
    narrow_tensor,
    validate_non_overlapping_shards_metadata,
)
from shardwise.sharded_tensor.utils import (
    _flatten_tensor_size,
    _parse_and_validate_remote_device,
    _raise_if_mismatch,
    _validate_output_tensor_for_gather,
    build_global_metadata,
    build_metadata_from_local_shards,
    recalc_global_sharded_tensor_metadata,
)

__all__ = [
    "ChunkShardingSpec",
    "DevicePlacementSpec",
    "EnumerableShardingSpec",
    "PlacementSpec",
    "Shard",
    "ShardMetadata",
    "ShardedTensorMetadata",
    "ShardingSpec",
    "TensorProperties",
    "_flatten_tensor_size",
    "_infer_sharding_spec_from_shards_metadata",
    "_parse_and_validate_remote_device",
    "_raise_if_mismatch",
    "_validate_output_tensor_for_gather",
    "build_global_metadata",
    "build_metadata_from_local_shards",
    "build_reshard_metadata",
    "check_tensor",
    "get_chunk_sharding_params",
    "get_chunked_dim_size",
    "get_idx_from_placements",
    "get_split_size",
    "narrow_tensor",
    "recalc_global_sharded_tensor_metadata",
    "reshard_local_shard",
    "reshuffle_local_shard",
    "validate_non_overlapping_shards_metadata",
]
