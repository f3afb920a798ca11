"""torch's own sharded tensors as layouts, and back: DTensor, DeviceMesh, ShardedTensor and its specs.

The only package that knows torch's private names. Each container has the same methods: its layout, the tensors that
autograd sees, this rank's local tensors, and how to put the container together again.
"""

from shardwise.torch_internals.dtensor import DTensorContainer, is_dtensor, mesh_of, on_mesh, replicated_along
from shardwise.torch_internals.meshes import default_group, home_of, is_mesh, is_placement
from shardwise.torch_internals.shard_metadata import (
    MetadataLike,
    PropertiesLike,
    RemoteDevice,
    ShardedLike,
    ShardLike,
    ShardMetadataLike,
    SpecLike,
    device_of,
    in_order,
    metadata_layout,
    owner_of,
    shards_of,
    worker_rank,
)
from shardwise.torch_internals.torch_sharded import (
    PACKAGE,
    TensorMetaclass,
    TorchShardedContainer,
    is_spec,
    is_torch_sharded,
    torchs_loading,
    torchs_metadata,
    torchs_sharded,
)

__all__ = [
    "DTensorContainer",
    "MetadataLike",
    "PACKAGE",
    "PropertiesLike",
    "RemoteDevice",
    "ShardLike",
    "ShardMetadataLike",
    "ShardedLike",
    "SpecLike",
    "TensorMetaclass",
    "TorchShardedContainer",
    "default_group",
    "device_of",
    "home_of",
    "in_order",
    "is_dtensor",
    "is_mesh",
    "is_placement",
    "is_spec",
    "is_torch_sharded",
    "mesh_of",
    "metadata_layout",
    "on_mesh",
    "owner_of",
    "replicated_along",
    "shards_of",
    "torchs_loading",
    "torchs_metadata",
    "torchs_sharded",
    "worker_rank",
]
