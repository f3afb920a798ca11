"""Whole tensors of one rank, sharded by any spec: held against torch's own where torch has the case."""

import pytest
import torch
import torch.distributed as dist
from familiar import BOTH, check, columns, grid, numbers, refused, rows, same_refusals
from ranks import ranks  # noqa: F401

from shardwise import sharded_tensor as ours

pytestmark = pytest.mark.filterwarnings("ignore:Please use DTensor:FutureWarning")  # torch's word on its own


def by_spec(tensor, spec, src_rank):
    return spec.shard(tensor, src_rank=src_rank, process_group=dist.group.WORLD)


@BOTH
def test_the_tensor_of_one_rank_is_sharded(ranks, api):  # noqa: F811
    def run(rank):
        whole = numbers(5, 7)
        for spec in (rows(1, 0, 2, api=api), columns(0, 1, 2, api=api)):
            for make in (api._shard_tensor, by_spec):
                st = make((whole + rank).requires_grad_(), spec, 2)
                check(st, whole + 2, spec)
                assert st.requires_grad
                assert st.local_tensor().is_leaf
        assert not api._shard_tensor(whole, spec).requires_grad
        group = dist.new_group([0, 2])
        if rank != 1:
            st = api._shard_tensor(whole + rank, rows(2, 0, api=api), src_rank=1, process_group=group)
            check(st, whole + 2, rows(2, 0, api=api))

    ranks(3, run)


def test_views_are_sharded_and_others_may_give_none(ranks):  # noqa: F811
    def run(rank):
        whole = numbers(7, 5).t()
        for spec in (rows(0, 1), grid(5, 7, 0, 1, 0, 0), columns(1, 0, 1)):
            check(ours.shard_tensor(whole, spec), whole, spec)
            check(ours.shard_tensor(whole if rank == 1 else None, spec, src_rank=1), whole, spec)
            check(spec.shard(whole if rank == 0 else None), whole, spec)

    ranks(2, run)


@BOTH
def test_ranks_must_ask_for_the_same(ranks, api):  # noqa: F811
    def run(rank):
        x = torch.zeros(4, 4)
        source = refused(ValueError, lambda: api._shard_tensor(x, rows(0, 1, api=api), src_rank=rank))
        assert "does not match with src_rank" in source
        return refused(ValueError, lambda: api._shard_tensor(x, rows(rank, 1 - rank, api=api)))

    for found in ranks(2, run):
        assert "does not match with sharding_spec" in found


def test_what_cannot_be_sharded_is_refused_on_all_ranks(ranks):  # noqa: F811
    def run(rank):
        x, spec = torch.zeros(4, 4), rows(0, 1)
        return {
            "does not match with src_rank": refused(ValueError, lambda: ours.shard_tensor(x, spec, src_rank=rank)),
            "4x4/S0@2:1,0": refused(ValueError, lambda: ours.shard_tensor(x, rows(rank, 1 - rank))),
            "passed None": refused(ValueError, lambda: ours.shard_tensor(x if rank else None, spec)),
            "size": refused(ValueError, lambda: ours.shard_tensor(torch.zeros(4, 4 + rank), spec)),
            "dtype": refused(ValueError, lambda: ours.shard_tensor(torch.zeros(4, 4 - rank).int(), spec)),
            "strided": refused(ValueError, lambda: ours.shard_tensor(x.to_sparse() if rank else x, spec)),
            "2 ranks": refused(ValueError, lambda: ours.shard_tensor(x, spec, src_rank=5)),
            "sharding dim": refused(ValueError, lambda: ours.shard_tensor(x[0], columns(0, 1))),
        }

    found = ranks(2, run)
    same_refusals(found, **{word: word for word in found[0] if word != "dtype"})


@BOTH
def test_placements_outside_the_group_are_refused(ranks, api):  # noqa: F811
    def run(rank):
        return {"spec": refused(ValueError, lambda: api._shard_tensor(torch.zeros(4), rows(0, 7, api=api)))}

    same_refusals(ranks(2, run), spec="7")


def test_specs_of_any_kind_are_taken_as_what_they_build(ranks):  # noqa: F811
    class Local(ours.ShardingSpec):
        """It has no name that pickle finds, and is equal to nothing."""

        def build_metadata(self, tensor_sizes, tensor_properties):
            return rows(0, 1).build_metadata(tensor_sizes, tensor_properties)

    def run(rank):
        whole, spec = numbers(4, 3), Local()
        check(ours.shard_tensor(whole, spec), whole, spec)
        check(spec.shard(whole), whole, spec)
        check(ours.shard_tensor(whole, spec if rank else rows(0, 1)), whole, spec if rank else rows(0, 1))
        check(ours.shard_tensor(whole, columns(1, 0)).reshard(spec), whole, spec)

    ranks(2, run)
