"""What once went wrong: several transports on one group, other modes and threads, memory that is not what it seems."""

import copy
import os

import numpy as np
import pytest
import torch
import torch.distributed as dist
from devices import device_type
from ranks import ranks  # noqa: F401
from sharded import expect, held
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard

import shardwise as sw

SIDE = 128  # rows of 64 KiB tensors: messages of their own
ROWS, COLUMNS = sw.Layout.chunk((SIDE, SIDE), 0, owners=2), sw.Layout.chunk((SIDE, SIDE), 1, owners=2)


def big(rank, value):
    return sw.ShardedTensor(torch.full((SIDE // 2, SIDE), float(value)), ROWS)


@pytest.mark.devices
def test_two_transports_on_one_group_never_take_each_others_messages(ranks):  # noqa: F811
    def run(rank):
        mesh = DeviceMesh(device_type(), [[0, 1]])  # some ranks of the default group, beside all of them
        for step in range(15):
            inner = None
            if rank < 2:
                local = torch.full((SIDE // 2, SIDE), 1000.0 + step)
                x = DTensor.from_local(local, mesh, [Replicate(), Shard(0)], run_check=False)
                inner = sw.reshard(x, (mesh, [Replicate(), Shard(1)]), async_op=True)
            outer = sw.reshard(big(rank, 2000 + step) if rank < 2 else None, COLUMNS, async_op=True)
            if rank < 2:
                assert inner.wait().to_local().unique().tolist() == [1000.0 + step]
                assert outer.wait().local_tensor().unique().tolist() == [2000.0 + step]
            else:
                assert outer.wait() is None
        return True

    assert all(ranks(3, run))


def test_what_was_abandoned_on_one_transport_is_never_received_on_another(ranks):  # noqa: F811
    def run(rank):
        mesh = DeviceMesh(device_type(), [[0, 1]])

        def on_mesh(value, target):
            local = torch.full((SIDE // 2, SIDE), float(value))
            x = DTensor.from_local(local, mesh, [Replicate(), Shard(0)], run_check=False)
            return sw.reshard(x, (mesh, [Replicate(), Shard(target)]))

        if rank < 2:
            on_mesh(1, 1)
            with pytest.raises(sw.ExchangeError, match="disagree on the target"):
                on_mesh(666, 1 if rank == 0 else 0)
        found = []
        for value in (3, 4, 5):
            y = sw.reshard(big(rank, value) if rank < 2 else None, COLUMNS)
            found.append(None if y is None else y.local_tensor().unique().tolist())
        return found

    assert ranks(3, run) == [[[3.0], [4.0], [5.0]]] * 2 + [[None] * 3]


@pytest.mark.devices
def test_refusals_in_flight_and_beside_do_not_cross(ranks):  # noqa: F811
    def run(rank):
        for _ in range(10):
            bad = sw.reshard(big(rank, 1), COLUMNS if rank else ROWS, async_op=True)
            with pytest.raises(sw.ExchangeError, match="disagree on the operation"):
                sw.fingerprint(big(rank, 1)) if rank else sw.reshard(big(rank, 1), COLUMNS)
            with pytest.raises(sw.ExchangeError, match="disagree on the target"):
                bad.wait()
        return sw.reshard(big(rank, 9), COLUMNS).local_tensor().unique().tolist()

    assert ranks(2, run) == [[9.0]] * 2


def test_handles_that_verify_may_be_waited_for_in_any_order_between_other_calls(ranks):  # noqa: F811
    def run(rank):
        for _ in range(5):
            handles = [sw.reshard(big(rank, n), COLUMNS, async_op=True, verify=True) for n in range(2)]
            total = torch.ones(1)
            if rank:
                dist.all_reduce(total)
            for handle in handles if rank else reversed(handles):
                handle.wait()
            if not rank:
                dist.all_reduce(total)
            assert total.item() == 2
        return True

    assert all(ranks(2, run))


@pytest.mark.devices
def test_gradients_are_verified_too(ranks):  # noqa: F811
    def run(rank):
        from shardwise.job import job

        verified, verify = [], job.verify_moves
        job.verify_moves = lambda *args: verified.append(verify(*args))
        x = big(rank, 1).requires_grad_()
        sw.reshard(x, COLUMNS, verify=True).local_tensor().sum().backward()
        return len(verified)

    assert ranks(2, run) == [2, 2]


@pytest.mark.devices
def test_inference_mode_and_no_grad_hold_where_the_work_is_done(ranks):  # noqa: F811
    def run(rank):
        with torch.inference_mode():
            handle = sw.reshard(big(rank, 7), COLUMNS, async_op=True)
            assert handle.wait().local_tensor().unique().tolist() == [7.0]
        expect(sw.reshard(big(rank, 8), COLUMNS), np.full((SIDE, SIDE), 8, np.float32), COLUMNS, rank)
        handle = sw.reshard(big(rank, 7).requires_grad_(), COLUMNS, async_op=True)
        with torch.no_grad():
            found = handle.wait()  # autograd follows where the call was made
        return found.requires_grad

    assert ranks(2, run) == [True, True]


def test_a_new_process_group_gets_new_meshes(ranks, tmp_path):  # noqa: F811
    def run(rank):
        for turn in range(3):
            if turn:
                store = dist.FileStore(os.path.join(tmp_path, str(turn)), 2)
                dist.init_process_group("gloo", store=store, rank=rank, world_size=2)
            mesh = init_device_mesh(device_type(), (2,))
            x = DTensor.from_local(torch.full((1, 4), float(rank)), mesh, [Shard(0)], run_check=False)
            y = sw.reshard(x, (mesh, [Shard(1)]))
            assert y.device_mesh is mesh
            assert y.full_tensor().tolist() == [[0.0] * 4, [1.0] * 4]
            if turn < 2:
                dist.barrier()
                dist.destroy_process_group()
                with pytest.raises(sw.ExchangeError, match="init_process_group"):
                    sw.reshard(x, (mesh, [Shard(1)]))
        return True

    assert all(ranks(2, run))


@pytest.mark.devices
def test_reductions_and_casts_together_give_all_replicas_the_same_bits(ranks):  # noqa: F811
    def run(rank):
        terms = [torch.randn(64, 64, generator=torch.Generator().manual_seed(r)).bfloat16() for r in range(4)]
        value = torch.stack([t.float() for t in terms])
        expected = (((value[0] + value[1]) + value[2]) + value[3]).bfloat16()
        x = sw.ShardedTensor(terms[rank], "64x64/P@4")
        for dtype in (torch.float32, torch.bfloat16, torch.float8_e5m2):
            for target in ("64x64/R@4", "64x64/S1@4"):
                found = sw.reshard(x, target, dtype=dtype, verify=True)
                whole = sw.reshard(found, "64x64/R@4").local_tensor()
                assert torch.equal(whole.float(), expected.to(dtype).float()), (dtype, target)
        return True

    assert all(ranks(4, run))


@pytest.mark.devices
def test_casts_are_verified_on_ranks_that_hold_one_side_only(ranks):  # noqa: F811
    def run(rank):
        values = np.linspace(0, 1, 12).reshape(3, 4)
        source, target = sw.parse("3x4/S0@2"), sw.parse("3x4/S1@2:2,3")
        found = sw.reshard(held(values, source, rank), target, dtype=torch.float16, verify=True)
        expect(found, values.astype(np.float16), target, rank)
        return True

    assert all(ranks(4, run))


@pytest.mark.devices
def test_a_limit_counts_what_travels_after_the_cast(ranks):  # noqa: F811
    source, target, limit = sw.parse("4x4/S0@2"), sw.parse("4x4/S1@2"), 10
    assert sw.plan(source, target, itemsize=2, max_bytes=limit).peak_bytes <= limit
    with pytest.raises(sw.PlanError, match="max_bytes"):
        sw.plan(source, target, itemsize=4, max_bytes=limit)  # before the cast it could not be kept

    def run(rank):
        values = np.arange(16, dtype=np.float32).reshape(4, 4)
        found = sw.reshard(held(values, source, rank), target, dtype=torch.float16, max_bytes=limit)
        expect(found, values.astype(np.float16), target, rank)
        return True

    assert all(ranks(2, run))


@pytest.mark.devices
def test_parameters_are_written_as_out(ranks):  # noqa: F811
    def run(rank):
        mesh = init_device_mesh(device_type(), (2,))
        x = DTensor.from_local(torch.full((1, 4), float(rank)), mesh, [Shard(0)], run_check=False)
        weight = torch.nn.Parameter(DTensor.from_local(torch.zeros(2, 2), mesh, [Shard(1)], run_check=False))
        plain = torch.nn.Parameter(torch.zeros(2, 2))
        with torch.no_grad():
            assert sw.reshard(x, out=weight) is weight
            sw.reshard(x, (mesh, [Shard(1)]), out=plain)
        return weight.to_local().tolist(), plain.tolist()

    assert ranks(2, run) == [([[0.0, 0.0], [1.0, 1.0]],) * 2] * 2


STRANGE = {
    "meta": (lambda *shape: torch.empty(shape, device="meta"), "no memory"),
    "sparse": (lambda *shape: torch.zeros(shape).to_sparse(), "no memory"),
    "freed": (lambda *shape: freed(*shape), "was given back"),
    "overlapping itself": (lambda *shape: torch.zeros(2 * SIDE).as_strided(shape, (1, 1)), "share memory"),
    "expanded": (lambda *shape: torch.zeros(1, shape[1]).expand(shape), "share memory"),
    "of inference": (lambda *shape: inferred(*shape), "inference mode"),
}


def freed(*shape):
    tensor = torch.zeros(*shape)
    tensor.untyped_storage().resize_(0)
    return tensor


def inferred(*shape):
    with torch.inference_mode():
        return torch.zeros(*shape)


def test_memory_that_cannot_be_used_is_refused_on_every_rank(ranks):  # noqa: F811
    def run(rank):
        for make, words in STRANGE.values():
            with pytest.raises(sw.ExchangeError, match=words):
                sw.reshard(big(rank, 1), COLUMNS, out=make(SIDE, SIDE // 2) if rank else None)
            if words in ("no memory", "was given back"):
                x = sw.ShardedTensor(make(SIDE // 2, SIDE), ROWS) if rank else big(rank, 1)
                with pytest.raises(sw.ExchangeError, match=words):
                    sw.reshard(x, COLUMNS)
        return sw.reshard(big(rank, 5), COLUMNS).local_tensor().unique().tolist()

    assert ranks(2, run) == [[5.0]] * 2


def test_copies_stay_in_their_group(ranks):  # noqa: F811
    def run(rank):
        group = dist.new_group([0, 1])
        x = sw.ShardedTensor(torch.full((SIDE // 2, SIDE), 1.0), ROWS, group)
        same, apart = copy.copy(x), copy.deepcopy(x)
        assert same.group is apart.group is group
        assert same.shards[0] is x.shards[0]
        assert apart.shards[0].data_ptr() != x.shards[0].data_ptr()
        return True

    assert all(ranks(2, run))


@pytest.mark.devices
def test_a_rank_without_the_tensor_asks_for_its_fingerprint_too(ranks):  # noqa: F811
    def run(rank):
        values = np.arange(12.0).reshape(3, 4)
        there = sw.reshard(held(values, sw.parse("3x4/S0@2"), rank), "3x4/S1@2:2,3")
        conjugate = sw.ShardedTensor(torch.full((1,), 1 + 2j).conj(), "4/S0@4")
        plain = sw.ShardedTensor(torch.full((1,), 1 - 2j), "4/S0@4")
        return (
            sw.fingerprint(held(values, sw.parse("3x4/S0@2"), rank)) == sw.fingerprint(there),
            sw.fingerprint(conjugate) == sw.fingerprint(plain),
        )

    assert ranks(4, run) == [(True, True)] * 4


def test_messages_without_tags_keep_the_order_of_the_program(ranks):  # noqa: F811
    """As with nccl: all messages follow agreement, in batches, and what is in flight is done by who waits."""

    def run(rank):
        from shardwise.job.session import group_transport

        group_transport(None).tagged = False
        handles = [sw.reshard(big(rank, n), COLUMNS, async_op=True) for n in range(3)]
        now = sw.reshard(big(rank, 3), COLUMNS)
        assert all(handle.done() for handle in handles)
        found = [handle.wait() for handle in handles] + [now]
        last = sw.reshard(big(rank, 4), COLUMNS, async_op=True)
        assert not last.done()
        return [y.local_tensor().unique().tolist() for y in [*found, last.wait()]]

    assert ranks(2, run) == [[[0.0], [1.0], [2.0], [3.0], [4.0]]] * 2


def test_wire_is_another_spelling_of_transport(ranks):  # noqa: F811
    def on_rank(rank):
        x = sw.ShardedTensor(torch.arange(6.0).reshape(3, 2) + 6 * rank, "6x2/S0@2")
        moved = sw.reshard(x, "6x2/S1@2", wire="group")
        again = sw.reshard_state_dict({"x": moved}, {"x": "6x2/S0@2"}, wire="group")["x"]
        torch.testing.assert_close(again.local_tensor(), x.local_tensor())
        sw.Resharder({"x": x}, {"x": again}, wire="group").run()
        calls = (
            lambda: sw.reshard(x, "6x2/S1@2", wire="group", transport="group"),
            lambda: sw.reshard_state_dict({"x": x}, {"x": "6x2/S1@2"}, wire="group", transport="group"),
            lambda: sw.Resharder({"x": x}, {"x": again}, wire="group", transport="group"),
        )
        for call in calls:
            with pytest.raises(TypeError, match="transport= and wire="):
                call()
        with pytest.raises(sw.ShardwiseError, match="transport="):
            sw.reshard(x, "6x2/S1@2", wire="pigeon")

    ranks(2, on_rank)
