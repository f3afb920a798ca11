"""Sharded tensors between real processes: reshard with gradients, fingerprints, the container."""

from shardwise.containers.container import layout_of
from shardwise.containers.sharded import ShardedTensor
from shardwise.job.session import release_staging
from shardwise.tensor.fingerprints import fingerprint
from shardwise.tensor.resharding import Handle, reshard

__all__ = ["Handle", "ShardedTensor", "fingerprint", "layout_of", "release_staging", "reshard"]
