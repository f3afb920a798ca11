"""What is flattened leaves everything else as it was, and what cannot be flattened is refused on all ranks."""

import pytest
import torch
import torch.distributed as dist
from models import dtensor, held, lies, meshes, numbers, refused, same, same_refusals
from nested import QUARTERS, WHOLE, by_boxes, columns, flat, half, rows_of, terms
from ranks import ranks  # noqa: F401
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.placement_types import _StridedShard

import shardwise as sw
from shardwise import sharded_tensor as ours

pytestmark = pytest.mark.filterwarnings("ignore:Please use DTensor:FutureWarning")  # torch's word on its own


def test_everything_else_passes_untouched(ranks):  # noqa: F811
    def run(rank):
        row, square = meshes()
        strided = [_StridedShard(0, split_factor=2), Replicate()]
        values = {
            "tensor": torch.zeros(2),
            "step": 5,
            "nothing": None,
            "rows": dtensor(WHOLE.clone(), row, Shard(0)),
            "few rows": dtensor(WHOLE[:2].clone(), row, Shard(0)),
            "strided": sw.reshard(dtensor(WHOLE.clone(), square, Replicate(), Replicate()), (square, strided)),
            "terms": terms(WHOLE, row),
            "torch's": columns(half(), rank // 2),
            "ours": held(WHOLE, "8x6/S1@4"),
            "by a spec": ours.ones(ours.ChunkShardingSpec(0, [f"rank:{r}/cpu" for r in (2, 0)]), 8, 6),
            "cyclic": held(WHOLE, sw.Layout.cyclic((8, 6), 0, 1, 4)),
            "fused": held(WHOLE, sw.Layout.fused((8, 6), 0, [4, 4], 4)),
            "flat": held(WHOLE, sw.Layout.flat((8, 6), [(r, 12 * r, 12 * r + 12) for r in range(4)])),
        }
        nested = rows_of(columns(half(), rank // 2))
        state_dict = {
            "model": {**values, 7: nested},
            "list": [nested, {"x": 1}, (nested, 2)],
            "empty": {},
            "3": 3,
            3: 4,
        }
        found = sw.flatten_sharded_tensors(state_dict)
        assert {key: found["model"][key] is value for key, value in values.items()} == dict.fromkeys(values, True)
        assert (found["empty"], found["3"], found[3], found["list"][1]) == ({}, 3, 4, {"x": 1})
        for flattened in found["model"][7], found["list"][0], found["list"][2][0]:
            lies(flattened, WHOLE, QUARTERS)
        assert (found["list"][2][1], list(found)) == (2, list(state_dict))
        assert state_dict["model"][7] is nested
        assert state_dict["list"][0] is nested

    ranks(4, run)


def test_dtypes_are_kept(ranks):  # noqa: F811
    def run(rank):
        for dtype in torch.int64, torch.bfloat16, torch.bool, torch.complex64:
            whole = numbers(8, 6, dtype=dtype)
            found = flat(rows_of(columns(half(whole), rank // 2)))
            assert found.dtype == dtype
            same(found.gather(None), whole)

    ranks(4, run)


def test_in_a_sub_group(ranks):  # noqa: F811
    def run(rank):
        groups = [dist.new_group([0, 1]), dist.new_group([2, 3])]
        pair = rank // 2
        inner = columns(half(), pair)
        found = flat(by_boxes((4, 6), [((0, 0), (4, 6), rank)], [inner]), group=groups[pair])
        lies(found, half(), sw.Layout.chunk((4, 6), 1, [2 * pair, 2 * pair + 1]))
        same(found.gather(None), half())

    ranks(4, run)


def test_shards_that_are_terms_of_a_sum_are_refused(ranks):  # noqa: F811
    def run(rank):
        _, mesh = meshes()
        nested = rows_of(terms(half(), mesh["tp"]))
        return {"terms": refused(lambda: flat(nested))}

    same_refusals(ranks(4, run), terms="P")


def test_gaps_and_different_shapes_are_refused_on_all_ranks_alike(ranks):  # noqa: F811
    def run(rank):
        boxes = [((4 * pair, 0), (4, 6), 2 * pair + rank % 2) for pair in (0, 1)]
        if rank == 3:  # which says nothing of its part
            boxes = [((0, 0), (8, 6), 1)]
        gap = by_boxes((8, 6), boxes, [columns(half(), rank // 2)] if rank < 3 else [])
        taller = rows_of(columns(half(), rank // 2))
        if rank == 0:
            taller = by_boxes((4, 6), [((0, 0), (4, 6), 0)], [columns(half(), 0)])
        return {"gap": refused(lambda: flat(gap)), "shapes": refused(lambda: flat(taller))}

    same_refusals(ranks(4, run), gap="[4:8, 3:6]", shapes=["'x' has different shapes", "(4, 6)", "(8, 6)"])
