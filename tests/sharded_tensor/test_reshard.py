"""Local shards from spec to spec: torch's own judge where it can, the whole tensor always."""

from itertools import permutations, product

import pytest
import torch
import torch.distributed as dist
from ranks import ranks  # noqa: F401
from torch.distributed._shard import sharding_spec as torchs_spec
from torch.distributed._shard.sharded_tensor import reshard as torchs

from shardwise import sharded_tensor as ours

SPECS = {"ours": ours.ChunkShardingSpec, "torch": torchs_spec.ChunkShardingSpec}


def chunks(dim, *order, kind="ours"):
    return SPECS[kind](dim, [f"rank:{rank}/cpu" for rank in order])


def numbers(*shape):
    return torch.arange(torch.Size(shape).numel(), dtype=torch.float64).reshape(shape)


def held(whole, spec):
    """This rank's parts of a tensor."""
    shards = spec.build_metadata(whole.size(), ours.TensorProperties()).shards_metadata
    return [ours.narrow_tensor(whole, m).clone() for m in shards if m.placement.rank() == dist.get_rank()]


def check(found, metadata, whole, spec, world):
    """These are this rank's shards of the whole by that spec."""
    expected, _ = ours.build_reshard_metadata(whole.size(), spec, world)
    assert metadata == expected
    mine = [m for m in expected if m is not None and m.placement.rank() == dist.get_rank()]
    assert [shard.metadata for shard in found] == mine
    for shard in found:
        assert torch.equal(shard.tensor, ours.narrow_tensor(whole, shard.metadata))


@pytest.mark.parametrize("api", [ours, torchs], ids=["ours", "torch"])
def test_the_place_of_a_rank_among_placements(api):
    placements = chunks(0, 2, 0, 1).placements
    assert [api.get_idx_from_placements(placements, rank) for rank in range(3)] == [1, 2, 0]
    with pytest.raises(RuntimeError, match="current_rank not in the placement"):
        api.get_idx_from_placements(placements, 3)


@pytest.mark.parametrize("kind", SPECS)
@pytest.mark.parametrize("order", list(permutations(range(3))))
def test_metadata_is_that_of_torch(kind, order):
    for size, dim in product([(6, 4), (7, 5), (2, 9)], [0, 1]):
        found, order_found = ours.build_reshard_metadata(torch.Size(size), chunks(dim, *order, kind=kind), 3)
        expected, order_expected = torchs.build_reshard_metadata(torch.Size(size), chunks(dim, *order, kind="torch"), 3)
        assert order_found == order_expected == list(order)
        for mine, theirs in zip(found, expected, strict=True):
            assert (mine.shard_offsets, mine.shard_sizes) == (theirs.shard_offsets, theirs.shard_sizes)
            assert mine.placement == theirs.placement


def test_metadata_counts_placements_and_not_the_world():
    found, order = ours.build_reshard_metadata((8, 2), chunks(0, 3, 1), 4)
    assert order == [3, 1]
    assert [m and (m.shard_offsets, m.shard_sizes) for m in found] == [None, ([4, 0], [4, 2]), None, ([0, 0], [4, 2])]
    several, order = ours.build_reshard_metadata((6,), chunks(0, 1, 0, 1), 2)
    assert [(m.placement.rank(), m.shard_offsets) for m in several] == [(0, [2]), (1, [0]), (1, [4])]


def test_every_pair_of_specs_moves_also_where_torch_aborts_or_hangs(ranks):  # noqa: F811
    orders = [(0, 1, 2), (1, 2, 0), (2, 1, 0), (1, 0), (2,), (0, 1, 2, 2, 0)]
    boxes = [((0, 0), (5, 2), 2), ((0, 2), (2, 5), 0), ((2, 2), (3, 5), 0)]
    listed = [ours.ShardMetadata(lo, size, f"rank:{owner}/cpu") for lo, size, owner in boxes]

    def run(rank):
        whole, group = numbers(5, 7), dist.group.WORLD
        specs = [chunks(dim, *order, kind=kind) for dim, order in product([0, 1], orders) for kind in SPECS]
        specs.append(ours.EnumerableShardingSpec(listed))
        for number, spec in enumerate(specs):
            other = specs[(7 * number + 5) % len(specs)]
            for move in (ours.reshard_local_shard, ours.reshuffle_local_shard):
                found, metadata = move(held(whole, spec) or None, whole.size(), spec, other, group)
                check(found, metadata, whole, other, 3)
        return len(specs)

    assert ranks(3, run) == [25] * 3


def test_results_and_gradients_are_those_of_torch(ranks):  # noqa: F811
    def run(rank):
        whole, weight = numbers(8, 4), numbers(8, 4) + 1
        rows, columns = (chunks(dim, 0, 1, 2, 3, kind="torch") for dim in (0, 1))
        results = []
        for api in (ours, torchs):
            local = held(whole, rows)[0].requires_grad_()
            shards, _ = api.reshard_local_shard(local, whole.size(), rows, columns, dist.group.WORLD)
            (shards[0].tensor * held(weight, columns)[0]).sum().backward()
            results.append((shards[0].tensor.detach(), local.grad))
        return all(torch.equal(mine, theirs) for mine, theirs in zip(*results, strict=True))

    assert ranks(4, run) == [True] * 4


def test_sub_groups_have_global_ranks(ranks):  # noqa: F811
    def run(rank):
        group = dist.new_group([1, 3])
        if rank not in (1, 3):
            return None
        whole, rows, columns = numbers(5, 3), chunks(0, 3, 1), chunks(1, 1, 3)
        found, metadata = ours.reshard_local_shard(held(whole, rows), whole.size(), rows, columns, group)
        check(found, metadata, whole, columns, 2)
        return [shard.metadata.shard_offsets for shard in found]

    assert ranks(4, run) == [None, [[0, 0]], None, [[0, 2]]]


@pytest.mark.parametrize("dtype", [torch.bool, torch.int16, torch.uint16, torch.float8_e4m3fn, torch.complex64])
def test_any_dtype_and_any_strides(ranks, dtype):  # noqa: F811
    def run(rank):
        whole, rows, columns = numbers(4, 6).remainder(2).to(dtype), chunks(0, 0, 1), chunks(1, 1, 0)
        local = held(whole, rows)[0].t().contiguous().t()
        found, _ = ours.reshard_local_shard(local, whole.size(), rows, columns, dist.group.WORLD)
        expected = held(whole, columns)[0]
        return torch.equal(found[0].tensor.to(torch.complex128), expected.to(torch.complex128))

    assert ranks(2, run) == [True, True]
