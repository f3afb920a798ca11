"""What went wrong once."""

import pytest
import torch
from familiar import columns, numbers, refused, rows, same, same_refusals
from ranks import ranks  # noqa: F401

import shardwise as sw
from shardwise import sharded_tensor as ours


def test_a_rank_that_holds_nothing_after_a_reshard_takes_part_in_backward(ranks):  # noqa: F811
    def run(rank):
        whole = numbers(4, 6)
        st = ours.shard_tensor(whole.requires_grad_(), rows(0, 1))
        before = st.local_tensor()
        st.reshard(columns(0))
        if rank == 0:
            with pytest.raises(sw.ExchangeError, match="holds shards"):
                st.backward()
            (st.local_tensor() ** 2).sum().backward()
        else:
            st.backward()
        same(before.grad, 2 * before.detach())

    ranks(2, run)


def test_room_that_autograd_follows_is_refused_and_changes_are_seen(ranks):  # noqa: F811
    def run(rank):
        st = ours.shard_tensor(numbers(3), rows(0, 1))
        leaf = torch.ones(3, dtype=torch.float64, requires_grad=True)
        found = {"leaf": refused(sw.ExchangeError, lambda: st.gather(1, leaf if rank else None))}
        room = torch.ones(3, dtype=torch.float64)
        y = (leaf * room).sum()  # autograd keeps the room as it is now
        st.gather(1, room if rank else None)
        if rank:
            with pytest.raises(RuntimeError, match="modified by an inplace operation"):
                y.backward()
        return found

    same_refusals(ranks(2, run), leaf="under torch.no_grad()")


def test_shards_of_a_rank_are_on_one_device(ranks):  # noqa: F811
    spec = ours.ChunkShardingSpec(0, ["rank:0/cpu", "rank:0/meta", "rank:1/cpu"])

    def run(rank):
        st = ours.shard_tensor(numbers(6), rows(0, 1))
        found = {"reshard": refused(ValueError, lambda: st.reshard(spec))}
        assert st.sharding_spec() == rows(0, 1)
        with pytest.raises(ValueError, match="on one device"):
            ours.zeros(spec, 6)
        return found

    same_refusals(ranks(2, run), reshard="on one device")


def test_what_is_asked_of_one_rank_only_is_raised_on_all(ranks):  # noqa: F811
    def run(rank):
        spec, other = rows(0, 1), columns(0, 1)
        calls = {
            "shape": (torch.zeros(1 + rank, 4), (2, 4), spec, other),
            "text": ("tensor" if rank else torch.zeros(1, 4), (2, 4), spec, other),
            "size": (torch.zeros(1, 4), (2, 4 + rank), spec, other),
            "dim": (torch.zeros(1, 4), (2, 4), spec, ours.ChunkShardingSpec(9 if rank else 1, ["rank:0/cpu"])),
            "none": (torch.zeros(1, 4), (2, 4), None if rank else spec, other),
        }
        return {
            name: refused(sw.ExchangeError, lambda call=call: ours.reshard_local_shard(*call, None))
            for name, call in calls.items()
        }

    words = {
        "shape": "rank 1 cannot",
        "text": "rank 1 cannot",
        "dim": "rank 1 cannot",
        "none": "Expecting ShardingSpec",
    }
    same_refusals(ranks(2, run), **words)


def test_very_many_shards_at_one_place_are_found_by_a_few():
    shards = [ours.ShardMetadata([0, 0], [4, 4], f"rank:{rank}/cpu") for rank in range(20_000)]
    with pytest.raises(ValueError, match=r"overlap in \[0:4, 0:4\]"):
        ours.validate_non_overlapping_shards_metadata(shards)


def test_one_overlap_among_very_many_is_found():
    shards = [ours.ShardMetadata([4 * n], [4], f"rank:{n}/cpu") for n in range(5_000)]
    shards.append(ours.ShardMetadata([4 * 1234 + 3], [1], "rank:5000/cpu"))
    with pytest.raises(ValueError, match=r"overlap in \[4939:4940\]"):
        ours.validate_non_overlapping_shards_metadata(shards)


def test_a_copy_is_not_the_same_on_ranks_without_shards(ranks):  # noqa: F811
    def run(rank):
        st = ours.shard_tensor(numbers(4), rows(0))
        copied = st.to(torch.float64, copy=True)
        assert copied is not st
        copied.reshard(rows(1))
        same(st.gather(None), numbers(4))

    ranks(2, run)


def test_gradients_go_through_reshards_in_a_row_also_where_a_rank_held_nothing_in_between(ranks):  # noqa: F811
    def run(rank):
        whole = numbers(6, 4)
        st = ours.shard_tensor(whole.requires_grad_(), rows(0, 1, 2))
        before = st.local_tensor()
        st.reshard(columns(2, 0)).reshard(rows(2, 1, 0))
        (st.local_tensor() ** 2).sum().backward()
        same(before.grad, 2 * before.detach())

    ranks(3, run)


@pytest.mark.parametrize("given", ["shard", "tensor"])
def test_a_rank_that_forgot_the_list_is_told_to_all(ranks, given):  # noqa: F811
    def run(rank):
        shard = ours.Shard.from_tensor_and_offsets(torch.zeros(2), [2 * rank], rank)
        wrong = shard if given == "shard" else shard.tensor
        return {"list": refused(TypeError, lambda: ours.init_from_local_shards(wrong if rank else [shard], 4))}

    same_refusals(ranks(2, run), list="must be a list of Shards")


def test_forgotten_offsets_are_said_to_be(ranks):  # noqa: F811
    def run(rank):
        shard = ours.Shard.from_tensor_and_offsets(torch.zeros(2), [0], rank)
        return {"offsets": refused(ValueError, lambda: ours.init_from_local_shards([shard], 4))}

    same_refusals(ranks(2, run), offsets="give each its shard_offsets, or a None")
