"""Containers under torch's names, resharded and gathered: exact values, gradients, and refusals on all ranks."""

import pytest
import torch
import torch.distributed as dist
from familiar import (
    BOTH,
    DTYPES,
    TORCH,
    check,
    columns,
    grid,
    listed,
    mine,
    numbers,
    placed,
    refused,
    rows,
    same,
    same_refusals,
)
from ranks import ranks  # noqa: F401

import shardwise as sw
from shardwise import sharded_tensor as ours

pytestmark = [  # torch's words on its own
    pytest.mark.filterwarnings("ignore:Please use DTensor:FutureWarning"),
    pytest.mark.filterwarnings("ignore:torch.distributed.nn.functional:FutureWarning"),
]


def specs(height, width):
    """On four ranks: all of them, some, several times, in other orders, blocks, and torch's own."""
    return [
        *(
            dim(*order)
            for dim in (rows, columns)
            for order in [(0, 1, 2, 3), (1, 2, 3, 0), (3, 1), (2,), (0, 3, 0, 2, 1, 1)]
        ),
        ours.ChunkShardingSpec(-1, placed(2, 3, 1)),
        ours.ChunkShardingSpec(-2, placed(3, 2, 1, 0)),
        grid(height, width, 3, 0, 1, 2),
        grid(height, width, 2, 1, 1, 2, api=TORCH),
        listed(((0, 0), (height, 2), 1), ((0, 2), (1, width - 2), 3), ((1, 2), (height - 1, width - 2), 1)),
        columns(1, 0, 3, 2, api=TORCH),
    ]


# --- reshard ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("shape", [(5, 7), (12, 21), (2, 3)])
def test_every_spec_becomes_every_other(ranks, shape):  # noqa: F811
    def run(rank):
        whole, known = numbers(*shape), specs(*shape)
        st = ours.shard_tensor(whole if rank == 0 else None, known[0])
        name = sw.fingerprint(st)
        for step in range(len(known)):  # through all of them, every time another pair
            for spec in (known[(5 * step + 3) % len(known)], known[step]):
                assert st.reshard(spec) is st
                check(st, whole, spec)
        same(st.gather(None), whole)
        assert sw.fingerprint(st) == name
        return name

    assert len(set(ranks(4, run))) == 1


@BOTH
@pytest.mark.parametrize(("source", "target"), [(rows, columns), (columns, rows), (rows, rows)])
def test_reshard_does_what_torch_does(ranks, api, source, target):  # noqa: F811
    def run(rank):
        whole, before, after = numbers(8, 12), source(0, 1, 2, 3, api=api), target(3, 2, 1, 0, api=api)
        st = api.init_from_local_shards(mine(whole, before, api), 8, 12)
        assert st.reshard(after) is st
        check(st, whole, after)
        assert st.reshard(after) is st

    ranks(4, run)


def test_placements_may_go_round(ranks):  # noqa: F811
    def run(rank):
        st = ours.shard_tensor(numbers(12, 21), rows(0, 1, 2))
        check(st.reshard(rows(1, 2, 0)), numbers(12, 21), rows(1, 2, 0))

    ranks(3, run)


def test_sub_groups_have_global_ranks(ranks):  # noqa: F811
    def run(rank):
        group = dist.new_group([1, 3])
        if rank in (1, 3):
            whole = numbers(5, 4)
            st = ours.shard_tensor(whole, rows(3, 1), src_rank=1, process_group=group)
            check(st, whole, rows(3, 1))
            check(st.reshard(columns(1, 3)), whole, columns(1, 3))
            check(st.reshard(grid(5, 4, 1, 1, 3, 3)), whole, grid(5, 4, 1, 1, 3, 3))
            found = st.gather(3)
            assert (found is None) == (rank == 1)
            same(st.gather(None), whole)
            assert st._process_group == group

    ranks(4, run)


def test_any_dtype_and_any_strides_arrive_as_they_are(ranks):  # noqa: F811
    def run(rank):
        for dtype in DTYPES:
            whole = (numbers(4, 6).remainder(2) if dtype == torch.bool else numbers(4, 6)).to(dtype)
            shards = [ours.Shard(s.tensor.t().contiguous().t(), s.metadata) for s in mine(whole, rows(0, 1))]
            st = ours.init_from_local_shards(shards, 4, 6)
            check(st.reshard(columns(1, 0, 1)), whole, columns(1, 0, 1))
            found = st.gather(1)
            same(whole if found is None else found, whole)
            assert (found is None) == (rank == 0)

    ranks(2, run)


def test_a_reshard_that_is_refused_leaves_it_as_it_was(ranks):  # noqa: F811
    def run(rank):
        whole = numbers(4, 6)
        st = ours.shard_tensor(whole, rows(0, 1))
        found = {
            "dim": refused(
                ValueError, lambda: st.reshard(ours.ChunkShardingSpec(3, placed(0, 1)) if rank else rows(1, 0))
            ),
            "other": refused(RuntimeError, lambda: st.reshard(columns(0, 1) if rank else columns(1, 0))),
            "outside": refused(RuntimeError, lambda: st.reshard(rows(0, 7))),
            "cover": refused(ValueError, lambda: st.reshard(grid(4, 5, 0, 1, 0, 1))),
            "none": refused(RuntimeError, lambda: st.reshard(None if rank else rows(1, 0))),
        }
        check(st, whole, rows(0, 1))
        return found

    words = {"dim": "rank 1 cannot take part", "other": "disagree on the target", "outside": "rank 7", "cover": "cover"}
    same_refusals(ranks(2, run), **words, none="rank 1 cannot take part")


def test_metadata_stay_the_same_on_all_ranks(ranks):  # noqa: F811
    def run(rank):
        found = []
        for followed in (True, False):
            st = ours.ones(rows(0, 1), 4, 4, requires_grad=True)
            with torch.set_grad_enabled(followed):
                st.reshard(rows(1))
            found.append((st.metadata(), st.requires_grad))
        return found

    first, second = ranks(2, run)
    assert first == second


# --- gradients -------------------------------------------------------------------------------------------------------


def test_gradients_are_those_of_a_plain_computation(ranks):  # noqa: F811
    def run(rank):
        for shape in ((8, 12), (5, 7)):
            whole, weight = numbers(*shape), (numbers(*shape) + 1).sqrt()
            plain = whole.clone().requires_grad_()
            (plain**3 * weight).sum().backward()
            known = [rows(0, 1, 2, 3), columns(1, 2, 3, 0), grid(*shape, 3, 0, 1, 2), rows(0, 0, 1, 2, 3)]
            for source, target in zip(known, known[1:] + known[:1], strict=True):
                st = ours.shard_tensor(whole.clone().requires_grad_(), source)
                leaves = st.local_shards()
                assert all(s.tensor.is_leaf and s.tensor.requires_grad for s in leaves)
                st.reshard(target).reshard(columns(0, 1, 2, 3))
                parts = [s.tensor**3 * ours.narrow_tensor(weight, s.metadata) for s in st.local_shards()]
                sum(p.sum() for p in parts).backward()
                for leaf in leaves:
                    expected = ours.narrow_tensor(plain.grad, leaf.metadata)
                    torch.testing.assert_close(leaf.tensor.grad, expected, rtol=1e-15, atol=0)

    ranks(4, run)


@BOTH
def test_gradients_are_those_of_torch(ranks, api):  # noqa: F811
    def run(rank):
        st = api.init_from_local_shards(mine(numbers(4, 4), rows(0, 1, api=api), api), 4, 4)
        leaf = st.local_tensor().requires_grad_()
        st.reshard(columns(0, 1, api=api))
        (st.local_tensor() ** 2).sum().backward()
        same(leaf.grad, 2 * leaf)

    ranks(2, run)


def test_gradients_come_also_where_ranks_hold_nothing(ranks):  # noqa: F811
    def run(rank):
        st = ours.ones(rows(0), 4, 3, requires_grad=True)
        handle = sw.reshard(st, columns(1, 2), async_op=True)
        found = handle.wait()
        assert (found is None) == (rank == 0)
        handle.backward() if found is None else (rank * found.local_tensor()).sum().backward()
        assert isinstance(st.grad, ours.ShardedTensor) == (rank == 0)
        if rank == 0:
            check(st.grad, torch.tensor([1.0, 1.0, 2.0]).expand(4, 3), rows(0))
        st.reshard(columns(1, 2))  # and in place
        assert st.requires_grad

    ranks(3, run)


def test_empty_shards_have_empty_gradients(ranks):  # noqa: F811
    def run(rank):
        st = ours.ones(rows(0, 0, 1, 1), 2, 3, requires_grad=True)  # rank 1 has two, and both are empty
        found = sw.reshard(st, columns(0, 1))
        (2 * found.local_tensor()).sum().backward()
        expected = [[[2.0] * 3]] * 2 if rank == 0 else [[], []]
        assert [s.tensor.grad.tolist() for s in st.local_shards()] == expected
        check(st.grad, torch.full((2, 3), 2.0), rows(0, 0, 1, 1))

    ranks(2, run)


# --- gather ----------------------------------------------------------------------------------------------------------


@BOTH
def test_gather_writes_what_the_others_have(ranks, api):  # noqa: F811
    def run(rank):
        whole = numbers(6, 5, dtype=torch.float32)
        for spec in (rows(0, 1, api=api), columns(1, 0, api=api), grid(6, 5, 1, 0, 0, 1, api=api)):
            st = api.init_from_local_shards(mine(whole, spec, api), 6, 5)
            out = torch.zeros(6, 5) if rank == 1 else None
            st.gather(1, out)
            st.gather(dst=1, out=out, dtype=torch.float32)
            wide = torch.zeros(6, 5, dtype=torch.float64) if rank == 1 else None
            st.gather(1, wide, dtype=torch.float32)
            with pytest.warns(FutureWarning, match="`enforce_dtype` is deprecated"):
                st.gather(1, out, enforce_dtype=True)
            if rank == 1:
                same(out, whole)
                same(wide, whole.double())

    ranks(2, run)


@pytest.mark.parametrize("value", [2**24 + 1, 2**62 + 1, 1e300, complex(1, 2)], ids=str)
def test_gather_changes_no_value(ranks, value):  # noqa: F811
    def run(rank):
        whole = torch.tensor([[value] * 3] * 5, dtype={int: torch.int64, float: torch.float64}.get(type(value)))
        st = ours.init_from_local_shards(mine(whole, rows(1, 0, 2)), 5, 3)
        out = torch.zeros_like(whole) if rank == 2 else None
        found = st.gather(2, out)
        if rank == 2:
            same(out, whole)
            assert found.data_ptr() == out.data_ptr()
        same(st.gather(None), whole)

    ranks(3, run)


def test_gathered_tensors_are_apart_from_autograd(ranks):  # noqa: F811
    def run(rank):
        st = ours.ones(rows(1, 0), 5, 3, requires_grad=True)
        assert not st.gather(None).requires_grad
        same(st.gather(None, dtype=torch.int8), torch.ones(5, 3, dtype=torch.int8))

    ranks(2, run)


def test_what_is_wrong_with_a_gather_is_raised_on_all(ranks):  # noqa: F811
    def run(rank):
        st = ours.ones(rows(1, 0), 5, 3)
        return {
            "wrong rank": refused(ValueError, lambda: st.gather(0, torch.zeros(5, 3))),
            "wrong size": refused(ValueError, lambda: st.gather(1, torch.zeros(3, 5) if rank == 1 else None)),
            "of one": refused(RuntimeError, lambda: st.gather(None, torch.zeros(3, 5) if rank == 1 else None)),
            "another dst": refused(RuntimeError, lambda: st.gather(rank)),
            "outside": refused(RuntimeError, lambda: st.gather(5)),
            "another dtype": refused(RuntimeError, lambda: st.gather(0, dtype=torch.int8 if rank else None)),
        }

    same_refusals(
        ranks(2, run),
        **{"wrong rank": "rank 1 cannot", "wrong size": "(5, 3)", "of one": "rank 1 cannot", "another dst": "disagree"},
        outside="rank 5",
    )


@pytest.mark.parametrize(
    "out",
    [
        torch.zeros(2, 5, 3, dtype=torch.float64),
        torch.zeros(3, 5, dtype=torch.int8),
        torch.zeros(5, 3).double().to("meta"),
    ],
    ids=["broadcast", "size", "meta"],
)
def test_room_of_another_dtype_is_checked_before_anything_is_sent(ranks, out):  # noqa: F811
    def run(rank):
        st = ours.ones(rows(1, 0), 5, 3)
        return {"out": refused((ValueError, RuntimeError), lambda: st.gather(None, out if rank == 1 else None))}

    same_refusals(ranks(2, run), out="rank 1 cannot take part")


@pytest.mark.parametrize(
    ("dst", "out"), [(0, [1.0]), (None, [1.0]), ("0", None), (-1, None)], ids=["list", "everywhere", "text", "negative"]
)
def test_nobody_waits_for_a_rank_that_gave_no_tensor_or_no_rank(ranks, dst, out):  # noqa: F811
    def run(rank):
        st = ours.ones(rows(1, 0), 5, 3)
        wrong = (dst, out) if rank == 0 else (None if dst is None else 0, None)
        return {"gather": refused((ValueError, TypeError, RuntimeError), lambda: st.gather(*wrong))}

    same_refusals(ranks(2, run, timeout=20, patience=5), gather="rank 0 cannot take part")
