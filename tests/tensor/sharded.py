"""Sharded torch tensors from numpy arrays, and back: what the tests of real ranks share."""

import numpy as np
import torch

import shardwise as sw


def held(values, layout, rank, group=None):
    """This rank's part of an array, or None where it holds nothing."""
    if rank not in layout:
        return None
    shards = sw.testing.scatter(values, layout)[rank]
    return sw.ShardedTensor(
        [torch.from_numpy(shard.copy()).to(torch.get_default_device()) for shard in shards], layout, group
    )


def expect(found, values, layout, rank):
    """This rank has exactly its part of the array."""
    if rank not in layout:
        assert found is None
        return
    assert found.layout == layout
    shards = sw.testing.scatter(values, layout)[rank]
    assert len(found.shards) == len(shards)
    for tensor, array in zip(found.shards, shards, strict=True):
        np.testing.assert_array_equal(tensor.detach().numpy(), array, strict=True)
