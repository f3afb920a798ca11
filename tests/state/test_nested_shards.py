"""Sharded tensors of sharded tensors, as one: FSDP over TP in every make, on four ranks."""

from itertools import product

import pytest
import torch.distributed as dist
from models import dtensor, lies, meshes, numbers, same
from nested import QUARTERS, TORCH, WHOLE, by_boxes, columns, flat, half, halves, in_pair, is_whole, rows_of
from ranks import ranks  # noqa: F401
from torch.distributed.tensor import Replicate, Shard

import shardwise as sw
from shardwise import sharded_tensor as ours
from shardwise.state import _flatten_sharded_tensors

pytestmark = pytest.mark.filterwarnings("ignore:Please use DTensor:FutureWarning")  # torch's word on its own
MAKES = {
    "torch's in torch's": lambda tp: rows_of(columns(half(), dist.get_rank() // 2)),
    "a DTensor in torch's": lambda tp: rows_of(dtensor(half().clone(), tp, Shard(1))),
    "a DTensor in ours": lambda tp: sw.ShardedTensor(dtensor(half().clone(), tp, Shard(1)), halves()),
    "a DTensor in ours by a spec": lambda tp: rows_of(dtensor(half().clone(), tp, Shard(1)), api=ours),
    "torch's in ours": lambda tp: sw.ShardedTensor(columns(half(), dist.get_rank() // 2), halves()),
    "torch's in ours by a spec": lambda tp: rows_of(columns(half(), dist.get_rank() // 2), api=ours),
    "ours by a spec in ours": lambda tp: sw.ShardedTensor([columns(half(), dist.get_rank() // 2, ours)], halves()),
    "ours by a spec in ours by a spec": lambda tp: rows_of(columns(half(), dist.get_rank() // 2, ours), api=ours),
    "ours in ours": lambda tp: sw.ShardedTensor([in_pair(half())], halves()),
}


@pytest.mark.parametrize("make", MAKES.values(), ids=MAKES)
def test_fsdp_over_tp_becomes_one_tensor_with_its_true_owners(ranks, make):  # noqa: F811
    def run(rank):
        _, mesh = meshes()
        nested = make(mesh["tp"])
        found = flat(nested)
        is_whole(found, WHOLE, QUARTERS)
        for owner in range(4):
            assert found.layout.owners(QUARTERS.pieces(owner)[0].box) == (owner,)
        (shard,) = found.shards
        shard.add_(100)  # the memory is that of the inner shard
        is_whole(flat(nested), WHOLE + 100, QUARTERS)

    ranks(4, run)


def test_it_is_a_sharded_tensor_with_metadata_that_can_go_back_to_torch(ranks):  # noqa: F811
    def run(rank):
        found = flat(rows_of(columns(half(), rank // 2)))
        assert type(found) is ours.ShardedTensor
        shards = sorted((str(m.placement), *m.shard_offsets) for m in found.metadata().shards_metadata)
        assert shards == [(f"rank:{r}/cpu", 4 * (r // 2), 3 * (r % 2)) for r in range(4)]
        theirs = found.to_torch()
        same(ours.ShardedTensor.from_torch(theirs).gather(None), WHOLE)
        assert _flatten_sharded_tensors is sw.flatten_sharded_tensors

    ranks(4, run)


def test_several_outer_and_inner_shards(ranks):  # noqa: F811
    """Every pair has two strips of two rows; a strip has three parts, of which the even rank has two."""

    def run(rank):
        pair, at = rank // 2, rank % 2
        strips = [slice(2 * pair, 2 * pair + 2), slice(4 + 2 * pair, 6 + 2 * pair)]
        cuts = [(0, 1, 0), (1, 4, 1), (4, 6, 0)]
        inner_boxes = [((0, a), (2, b - a), 2 * pair + who) for a, b, who in cuts]
        inner = [
            by_boxes((2, 6), inner_boxes, [WHOLE[strip, a:b].clone() for a, b, who in cuts if who == at])
            for strip in strips
        ]
        outer_boxes = [((top, 0), (2, 6), 2 * (top // 2 % 2) + at) for top in (0, 2, 4, 6)]
        expected = [(2 * (top // 2 % 2) + who, (top, a), (top + 2, b)) for top in (0, 2, 4, 6) for a, b, who in cuts]
        is_whole(flat(by_boxes((8, 6), outer_boxes, inner)), WHOLE, sw.Layout.boxes((8, 6), expected))

    ranks(4, run)


def test_three_levels(ranks):  # noqa: F811
    whole = numbers(8, 6, 5)

    def run(rank):
        _, mesh = meshes()
        pair, at = rank // 2, rank % 2
        part = whole[4 * pair : 4 * pair + 4]
        rows = [((4 * p, 0, 0), (4, 6, 5), 2 * p + at) for p in (0, 1)]
        # rows of a pair, columns of a rank, and two slices there
        mine = part[:, 3 * at : 3 * at + 3]
        slices = by_boxes((4, 3, 5), [((0, 0, 0), (4, 3, 2), rank), ((0, 0, 2), (4, 3, 3), rank)],
                          [mine[..., :2].clone(), mine[..., 2:].clone()])  # fmt: skip
        middle = by_boxes((4, 6, 5), [((0, 3 * a, 0), (4, 3, 5), 2 * pair + a) for a in (0, 1)], [slices])
        boxes = [
            (2 * p + a, (4 * p, 3 * a, lo), (4 * p + 4, 3 * a + 3, hi))
            for p in (0, 1) for a in (0, 1) for lo, hi in ((0, 2), (2, 5))
        ]  # fmt: skip
        is_whole(flat(by_boxes((8, 6, 5), rows, [middle])), whole, sw.Layout.boxes((8, 6, 5), boxes))
        # rows of a pair, two strips of those, and DTensors by slices
        strips = [dtensor(part[2 * s : 2 * s + 2].clone(), mesh["tp"], Shard(2)) for s in (0, 1)]
        middle = by_boxes((4, 6, 5), [((2 * s, 0, 0), (2, 6, 5), rank) for s in (0, 1)], strips)
        boxes = [
            (2 * p + a, (4 * p + 2 * s, 0, 3 * a), (4 * p + 2 * s + 2, 6, 3 + 2 * a))
            for p in (0, 1) for s in (0, 1) for a in (0, 1)
        ]  # fmt: skip
        is_whole(flat(by_boxes((8, 6, 5), rows, [middle], ours)), whole, sw.Layout.boxes((8, 6, 5), boxes))

    ranks(4, run)


def test_dtensors_with_fewer_columns_than_ranks(ranks):  # noqa: F811
    def run(rank):
        _, mesh = meshes()
        thin = numbers(8, 1)
        found = flat(rows_of(dtensor(half(thin).clone(), mesh["tp"], Shard(1)), (8, 1)))
        assert [tuple(shard.shape) for shard in found.shards if shard.numel()] == [(4, 1)][: 1 - rank % 2]
        same(found.gather(None), thin)
        lies(sw.reshard(found, "8x1/S0@4"), thin, "8x1/S0@4")

    ranks(4, run)


def test_outer_shards_without_rows(ranks):  # noqa: F811
    def run(rank):
        _, mesh = meshes()
        boxes = [((0, 0), (8, 6), rank % 2), ((8, 0), (0, 6), 2 + rank % 2)]
        part = WHOLE if rank < 2 else WHOLE[:0]
        inner = [dtensor(part.clone(), mesh["tp"], Shard(1)), columns(part, rank // 2)]
        for one, api in product(inner, (TORCH, ours)):
            found = flat(by_boxes((8, 6), boxes, [one], api))
            same(found.gather(None), WHOLE)
            assert [tuple(shard.shape) for shard in found.shards if shard.numel()] == [(8, 3)][: rank < 2]
            lies(sw.reshard(found, "8x6/S0@4"), WHOLE, "8x6/S0@4")

    ranks(4, run)


def test_tensors_without_cells(ranks):  # noqa: F811
    def run(rank):
        _, mesh = meshes()
        nothing = numbers(0, 6)
        for inner in dtensor(nothing, mesh["tp"], Shard(1)), columns(nothing, rank // 2):
            same(flat(rows_of(inner, (0, 6))).gather(None), nothing)

    ranks(4, run)


def test_ranks_without_shards_keep_the_key_and_know_the_whole(ranks):  # noqa: F811
    def run(rank):
        boxes = [((0, 0), (8, 6), rank % 2)]
        nested = by_boxes((8, 6), boxes, [columns(WHOLE, 0)] if rank < 2 else [])
        found = sw.flatten_sharded_tensors({"before": 1, "x": nested, "after": 2})
        assert list(found) == ["before", "x", "after"]
        assert found["x"].layout == sw.Layout.chunk((8, 6), 1, [0, 1])
        assert len(found["x"].shards) == (rank < 2)
        same(found["x"].gather(None), WHOLE)
        lies(sw.reshard_state_dict(found, [("*", "8x6/S0@4")])["x"], WHOLE, "8x6/S0@4")

    ranks(4, run)


def test_none_stays_none_on_ranks_that_have_nothing(ranks):  # noqa: F811
    def run(rank):
        nested = by_boxes((8, 6), [((0, 0), (8, 6), rank % 2)], [columns(WHOLE, 0)]) if rank < 2 else None
        found = sw.flatten_sharded_tensors({"x": nested, "after": 2})
        assert list(found) == ["x", "after"]
        assert (found["x"] is None) == (rank > 1)
        lies(sw.reshard(found["x"], "8x6/S0@4"), WHOLE, "8x6/S0@4")

    ranks(4, run)


def test_inner_replicas_stay_replicas(ranks):  # noqa: F811
    def run(rank):
        _, mesh = meshes()
        both = sw.Layout.boxes((8, 6), [(r, (4 * (r // 2), 0), (4 * (r // 2) + 4, 6)) for r in range(4)])
        found = flat(rows_of(dtensor(half().clone(), mesh["tp"], Replicate())))
        is_whole(found, WHOLE, both)
        after = sw.reshard_state_dict({"x": found}, {"x": "8x6/S1@4"})
        lies(after["x"], WHOLE, "8x6/S1@4")

    ranks(4, run)


def test_replicas_on_some_ranks_alone(ranks):  # noqa: F811
    def run(rank):
        _, mesh = meshes()
        inside = [dtensor(WHOLE.clone(), mesh["tp"], Replicate())] if rank < 2 else []
        found = flat(by_boxes((8, 6), [((0, 0), (8, 6), rank % 2)], inside))
        assert found.layout == sw.Layout.replicated((8, 6), [0, 1])
        same(found.gather(None), WHOLE)
        lies(sw.reshard_state_dict({"x": found}, {"x": "8x6/S1@4"})["x"], WHOLE, "8x6/S1@4")

    ranks(4, run)


def test_some_ranks_have_plain_shards_and_others_nested_ones(ranks):  # noqa: F811
    def run(rank):
        boxes = [((0, 0), (4, 6), rank % 2), ((4, 0), (2, 6), 2), ((6, 0), (2, 6), 3)]
        inner = columns(WHOLE[:4], 0) if rank < 2 else WHOLE[2 * rank : 2 * rank + 2].clone()
        expected = [(0, (0, 0), (4, 3)), (1, (0, 3), (4, 6)), (2, (4, 0), (6, 6)), (3, (6, 0), (8, 6))]
        is_whole(flat(by_boxes((8, 6), boxes, [inner])), WHOLE, sw.Layout.boxes((8, 6), expected))

    ranks(4, run)


def test_a_rank_has_a_plain_shard_beside_a_nested_one(ranks):  # noqa: F811
    def run(rank):
        boxes = [((0, 0), (4, 6), rank % 2), ((4, 0), (4, 6), 0)]
        inner = ([columns(WHOLE[:4], 0)] if rank < 2 else []) + ([WHOLE[4:].clone()] if rank == 0 else [])
        expected = [(0, (0, 0), (4, 3)), (1, (0, 3), (4, 6)), (0, (4, 0), (8, 6))]
        is_whole(flat(by_boxes((8, 6), boxes, inner)), WHOLE, sw.Layout.boxes((8, 6), expected))

    ranks(4, run)
