"""Who takes part: sub-groups, ranks that hold nothing of one side, disjoint sides, several in flight."""

import numpy as np
import pytest
import torch
import torch.distributed as dist
from ranks import ranks  # noqa: F401
from sharded import expect, held

import shardwise as sw
from shardwise.exchange import Exchange

VALUES = np.arange(42.0).reshape(6, 7)


def layout(text):
    return sw.parse(f"6x7/{text}")


@pytest.mark.devices
def test_sides_may_be_on_different_overlapping_or_disjoint_ranks(ranks):  # noqa: F811
    moves = [("S0@4", "S1@2:4,5"), ("S0@2:1,4", "S1@3:4,1,0"), ("R@1:5", "S0@5"), ("P@3:0,2,4", "S1@2:1,3")]

    def run(rank):
        for source, target in moves:
            for _ in range(2):  # the second time those who hold nothing need not be told
                found = sw.reshard(held(VALUES, layout(source), rank), layout(target))
                expect(found, VALUES, layout(target), rank)
        return True

    assert all(ranks(6, run))


@pytest.mark.devices
def test_ranks_that_hold_nothing_are_told_and_others_agree_at_once(ranks):  # noqa: F811
    def run(rank):
        finished, finish = [], Exchange.finish
        Exchange.finish = lambda self: finished.append(None) or finish(self)
        for count in (2, 4, 6):
            sw.reshard(held(VALUES, layout("S0@2"), rank), layout("S1@2:2,3"))
            assert len(finished) == count  # one to tell, one to move
        sw.reshard(held(VALUES, layout("S0@4"), rank), layout("S1@2:2,3"))
        assert len(finished) == 7  # all hold a part: nobody has to be told
        return True

    assert all(ranks(4, run))


@pytest.mark.devices
def test_sub_groups_with_ranks_of_any_number(ranks):  # noqa: F811
    def run(rank):
        groups = {(1, 3, 4): None, (5, 0): None}
        for members in groups:
            groups[members] = dist.new_group(sorted(members))
        for members, group in groups.items():
            if rank in members:
                source = sw.Layout.chunk((6, 7), 0, owners=list(members))
                target = sw.Layout.chunk((6, 7), 1, owners=list(reversed(members)))
                found = sw.reshard(held(VALUES, source, rank, group), target)  # its own group, without being told
                expect(found, VALUES, target, rank)
                found = sw.reshard(held(VALUES, source, rank), target, group=group)
                expect(found, VALUES, target, rank)
                whole = found.gather(dst=members[-1])
                assert (whole is None) == (rank != members[-1])
                if whole is not None:
                    np.testing.assert_array_equal(whole.numpy(), VALUES)
        return True

    assert all(ranks(6, run))


def test_a_rank_outside_the_group_is_refused(ranks):  # noqa: F811
    def run(rank):
        group = dist.new_group([0, 1])
        try:
            return sw.reshard(held(VALUES, layout("S0@2"), rank), layout("S1@2"), group=group) is not None
        except sw.ExchangeError as error:
            return "not in the group" in str(error)

    assert ranks(3, run) == [True] * 3


@pytest.mark.devices
def test_gather_brings_the_whole_to_one_or_to_all(ranks):  # noqa: F811
    def run(rank):
        for text in ("S0@4", "R@4", "P@4", "cyclic1=2@4:3,1,2,0"):
            x = held(VALUES, layout(text), rank)
            out = torch.zeros(6, 7, dtype=torch.float64) if rank == 2 else None
            found = x.gather(dst=2, out=out)
            assert (found is None) == (rank != 2)
            if rank == 2:
                np.testing.assert_array_equal(out.numpy(), VALUES)
            np.testing.assert_array_equal(x.gather(dst=None).numpy(), VALUES)
        big = sw.ShardedTensor(torch.full((1,), 2**24 + 1 + rank), "4/S0@4")  # no float32 can hold these
        assert big.gather(dst=None).tolist() == [2**24 + 1 + r for r in range(4)]
        return True

    assert all(ranks(4, run))


@pytest.mark.devices
def test_several_in_flight_keep_their_order(ranks):  # noqa: F811
    shape = (256, 300)
    rows, columns = sw.Layout.chunk(shape, 0, owners=4), sw.Layout.chunk(shape, 1, owners=4)

    def run(rank):
        arrays = [np.arange(np.prod(shape)).reshape(shape) * (i + 1) for i in range(6)]
        handles = [sw.reshard(held(a, rows, rank), columns, async_op=True, verify=i == 2) for i, a in enumerate(arrays)]
        meanwhile = torch.ones(3)
        dist.all_reduce(meanwhile)  # collective calls of others on the same group do not come between
        expect(sw.reshard(held(arrays[0], rows, rank), columns), arrays[0], columns, rank)
        for handle, array in reversed(list(zip(handles, arrays, strict=True))):
            expect(handle.wait(), array, columns, rank)
            assert handle.done()
            assert handle.wait() is handle.wait()
        return meanwhile.tolist()

    assert ranks(4, run) == [[4.0, 4.0, 4.0]] * 4


@pytest.mark.devices
def test_an_error_of_one_in_flight_is_raised_by_its_own_wait(ranks):  # noqa: F811
    def run(rank):
        good = sw.reshard(held(VALUES, layout("S0@3"), rank), layout("S1@3"), async_op=True)
        bad = sw.reshard(held(VALUES, layout("S0@3"), rank), layout("S1@3" if rank else "R@3"), async_op=True)
        last = sw.reshard(held(VALUES, layout("S0@3"), rank), layout("R@3"), async_op=True)
        expect(last.wait(), VALUES, layout("R@3"), rank)
        expect(good.wait(), VALUES, layout("S1@3"), rank)
        try:
            bad.wait()
        except sw.ExchangeError as error:
            return "disagree on the target" in str(error)

    assert ranks(3, run) == [True] * 3


def test_out_is_written_and_staging_is_kept(ranks):  # noqa: F811
    shape = (512, 512)
    rows, columns = sw.Layout.chunk(shape, 0, owners=2), sw.Layout.chunk(shape, 1, owners=2)

    def run(rank):
        values = np.arange(np.prod(shape), dtype=np.float32).reshape(shape)
        x, out = held(values, rows, rank), torch.empty(columns.local_shape(rank))
        for _ in range(3):
            found = sw.reshard(x, columns, out=out)
            assert found.local_tensor().data_ptr() == out.data_ptr()
            expect(found, values, columns, rank)
            out.zero_()
        container = sw.ShardedTensor(out, columns)
        assert sw.reshard(x, out=container) is container
        expect(container, values, columns, rank)
        kept = sw.release_staging()
        assert sw.release_staging() == 0
        return kept

    # a quarter is sent, and packed in two halves in turn; what comes is read where the sender packed it
    assert ranks(2, run) == [2 * 512 * 512] * 2
