"""Sharded tensors between real processes: reshard with gradients, fingerprints, the container."""

from shardwise.tensor.fingerprints import fingerprint
from shardwise.tensor.kinds import layout_of
from shardwise.tensor.resharding import Handle, reshard
from shardwise.tensor.sharded import ShardedTensor
from shardwise.tensor.wiring import release_staging

__all__ = ["Handle", "ShardedTensor", "fingerprint", "layout_of", "release_staging", "reshard"]
