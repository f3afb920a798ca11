"""torch's own ShardedTensor and its specs, both as source and as target."""

import numpy as np
import pytest
import torch
from ranks import ranks  # noqa: F401
from sharded import held

import shardwise as sw

pytestmark = pytest.mark.filterwarnings("ignore:Please use DTensor:FutureWarning")  # torch's own word on them

VALUES = np.arange(70.0).reshape(10, 7)


def placements(order):
    return [f"rank:{rank}/cpu" for rank in order]


def test_there_and_back_by_every_spec(ranks):  # noqa: F811
    def run(rank):
        from torch.distributed._shard import sharded_tensor, sharding_spec
        from torch.distributed._shard.metadata import ShardMetadata

        boxes = [((0, 0), (10, 2), 2), ((0, 2), (4, 5), 0), ((4, 2), (6, 5), 1)]
        specs = [
            sharding_spec.ChunkShardingSpec(0, placements([0, 1, 2])),
            sharding_spec.ChunkShardingSpec(1, placements([2, 0, 1])),
            sharding_spec.ChunkShardingSpec(0, placements([1, 2])),
            sharding_spec.ChunkShardingSpec(1, placements([0, 1, 2, 2, 1, 0, 0, 1])),  # empty ones, several of a rank
            sharding_spec.EnumerableShardingSpec(
                [ShardMetadata(list(lo), list(size), f"rank:{owner}/cpu") for lo, size, owner in boxes]
            ),
        ]
        found = held(VALUES, sw.parse("10x7/S0@3"), rank)
        for spec in [*specs, *reversed(specs)]:
            found = sw.reshard(found, spec, verify=True)
            if found is None:
                continue
            assert isinstance(found, sharded_tensor.ShardedTensor)
            assert tuple(found.size()) == (10, 7)
            for shard in found.local_shards():
                (r, c), (h, w) = shard.metadata.shard_offsets, shard.metadata.shard_sizes
                np.testing.assert_array_equal(shard.tensor.numpy(), VALUES[r : r + h, c : c + w])
            whole = sw.reshard(found, "10x7/R@3") if len(sw.layout_of(found).owners()) == 3 else None
            assert whole is None or np.array_equal(whole.local_tensor().numpy(), VALUES)
        return True

    assert all(ranks(3, run))


def test_a_tensor_of_torchs_own_making_and_one_to_look_like(ranks):  # noqa: F811
    def run(rank):
        from torch.distributed._shard import shard_parameter, sharded_tensor, sharding_spec

        rows = sharding_spec.ChunkShardingSpec(0, placements([0, 1]))
        columns = sharding_spec.ChunkShardingSpec(1, placements([1, 0]))
        module = torch.nn.Linear(6, 8)
        with torch.no_grad():
            module.weight.copy_(torch.arange(48.0).reshape(8, 6))
        whole = module.weight.detach().clone()
        shard_parameter(module, "weight", rows)
        like = sharded_tensor.zeros(columns, 8, 6)
        assert sw.layout_of(module.weight) == sw.Layout.chunk((8, 6), 0, owners=2)
        assert sw.layout_of(columns, (8, 6)) == sw.Layout.chunk((8, 6), 1, owners=[1, 0])
        found = sw.reshard(module.weight, like)
        start = 0 if rank == 1 else 3
        assert torch.equal(found.local_shards()[0].tensor, whole[:, start : start + 3])
        with torch.no_grad():
            assert sw.reshard(module.weight, out=like) is like
        assert torch.equal(like.local_shards()[0].tensor, whole[:, start : start + 3])
        return sw.fingerprint(like) == sw.fingerprint(module.weight)

    assert ranks(2, run) == [True, True]


def test_autograd_goes_through_torchs_shards(ranks):  # noqa: F811
    def run(rank):
        from torch.distributed._shard import sharding_spec

        x = sw.ShardedTensor(torch.ones(2, 6) * (rank + 1), "4x6/S0@2").requires_grad_()
        y = sw.reshard(x, sharding_spec.ChunkShardingSpec(1, placements([0, 1])))
        (y.local_shards()[0].tensor ** 2).sum().backward()
        return torch.equal(x.grad.local_tensor(), 2 * x.local_tensor().detach())

    assert ranks(2, run) == [True, True]
