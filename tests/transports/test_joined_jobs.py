"""Groups that join separately started jobs, or that torch's registry does not know; ranks without a default group."""

import os
import pickle

import numpy as np
import pytest
import torch
import torch.distributed as dist
from jobs import GROUPS, bare_group, custom_group, leave_the_first_group, start_job
from ranks import ranks  # noqa: F401
from torch.distributed._shard.sharding_spec import ChunkShardingSpec
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard
from wired import raised

import shardwise as sw
from shardwise import sharded_tensor as familiar

VALUES = torch.arange(96.0).reshape(8, 12)
TRAINERS, SERVERS = 4, 2
EVERYBODY = TRAINERS + SERVERS


def joined(folder, at, make, order=None):
    """Two jobs, and a group over all ranks of both; the group, and the mesh of this rank's job."""
    leave_the_first_group()
    trains = at < TRAINERS
    rank, size = (at, TRAINERS) if trains else (at - TRAINERS, SERVERS)
    start_job(folder, "trainers" if trains else "servers", rank, size)
    mesh = DeviceMesh("cpu", list(range(size)))
    return make(folder, "both", at if order is None else order[at], EVERYBODY), mesh


def on_jobs(ranks, work, *, count=EVERYBODY):  # noqa: F811
    return ranks(count, work, dying={99})  # they leave one by one: there is no group of all


def spread(values, mesh, placement):
    """A DTensor of these values, without a message."""
    local = values
    if isinstance(placement, Shard):
        local = values.chunk(mesh.size(), placement.dim)[mesh.get_local_rank()].clone()
    return DTensor.from_local(local, mesh, [placement], run_check=False)


def same(found, values):
    torch.testing.assert_close(found, values, rtol=0, atol=0)


@pytest.mark.parametrize("kind", GROUPS)
@pytest.mark.parametrize("order", [[0, 1, 2, 3, 4, 5], [5, 0, 4, 1, 3, 2]], ids=["in order", "mixed"])
def test_weights_go_from_the_mesh_of_one_job_to_that_of_another(ranks, tmp_path, kind, order):  # noqa: F811
    def run(at):
        group, mesh = joined(tmp_path, at, GROUPS[kind], order)
        rows, columns = (sw.Layout.chunk((8, 12), dim, owners) for dim, owners in ((0, order[:4]), (1, order[4:])))
        trains = at < TRAINERS
        x = spread(VALUES, mesh, Shard(0)) if trains else None
        for transport in ("group", "shared"):
            to = columns if trains else (mesh, [Shard(1)])
            found = sw.reshard(x, to, group=group, verify=True, transport=transport)
            assert (found is None) == trains
            if not trains:
                same(found.full_tensor(), VALUES)
                assert found.to_local().shape == (8, 6)
            held = sw.reshard(x, columns, group=group, transport=transport)  # a ShardedTensor over ranks of the group
            back = sw.reshard(held, (mesh, ["S0"]) if trains else rows, group=group, transport=transport)
            if trains:
                same(back.full_tensor(), VALUES)
        return sw.fingerprint(x, group=group), sw.fingerprint(held, group=group)

    prints = {name for both in on_jobs(ranks, run) for name in both}
    assert len(prints) == 1


@pytest.mark.parametrize("kind", GROUPS)
def test_a_resharder_and_a_checkpoint_work_over_two_jobs(ranks, tmp_path, kind):  # noqa: F811
    def run(at):
        group, mesh = joined(tmp_path, at, GROUPS[kind])
        trains = at < TRAINERS
        placement = Shard(0) if trains else Shard(1)
        state = {
            "w": spread(VALUES if trains else torch.zeros(8, 12), mesh, placement),
            "b": spread(VALUES[0] if trains else torch.zeros(12), mesh, Replicate()),
        }
        sync = sw.Resharder(state if trains else None, None if trains else state, group=group)
        for step in range(3):
            if trains:
                state["w"].to_local().mul_(2)
            sync.run()
            same(state["w"].full_tensor(), VALUES * 2 ** (step + 1))
            same(state["b"].full_tensor(), VALUES[0])
        moved = sw.reshard_state_dict(
            state if trains else None,
            {"w": sw.parse("8x12/S1@2:4,5") if trains else (mesh, "S1"), "b": "12/R@2:4,5"},
            group=group,
        )
        if not trains:
            same(moved["w"].full_tensor(), VALUES * 8)
        path = os.path.join(tmp_path, "saved")
        sw.checkpoint.save(
            {"w": sw.reshard(state["w"] if trains else None, "8x12/S0@6", group=group)}, path, group=group
        )
        for read in ("each", "once"):
            target = {"w": spread(torch.zeros(8, 12), mesh, placement)}
            # each job's own DTensor is a whole copy
            sw.checkpoint.load(path, target, group=group, read=read)
            same(target["w"].full_tensor(), VALUES * 8)
        return True

    assert all(on_jobs(ranks, run))


def test_only_a_part_of_a_job_may_join(ranks, tmp_path):  # noqa: F811
    members = {1: 2, 3: 0, 4: 1}  # trainers 1 and 3, and one server, by their ranks in the group

    def run(at):
        leave_the_first_group()
        trains = at < TRAINERS
        rank, size = (at, TRAINERS) if trains else (at - TRAINERS, SERVERS)
        start_job(tmp_path, "trainers" if trains else "servers", rank, size)
        half = dist.new_group([1, 3]) if trains else None
        mesh = DeviceMesh("cpu", [1, 3]) if trains else DeviceMesh("cpu", [0])
        everybody = DeviceMesh("cpu", list(range(size)))
        dist.barrier()  # gloo connects all of a group: nobody leaves before
        if at not in members:
            return None
        group = custom_group(tmp_path, "some", members[at], len(members))
        x = DTensor.from_local(VALUES[:4] if at == 1 else VALUES[4:], mesh, [Shard(0)]) if trains else None
        found = sw.reshard(x, "8x12/R@1:1", group=group)
        if not trains:
            same(found.local_tensor(), VALUES)
        y = sw.ShardedTensor(VALUES[:4] if at == 1 else VALUES[4:], "8x12/S0@2:1,3", half) if trains else None
        found = sw.reshard(y, "8x12/S1@3", group=group)  # owners of y are ranks of its job
        same(found.local_tensor(), VALUES[:, 4 * members[at] :][:, :4])
        full = spread(VALUES, everybody, Replicate())
        return raised(lambda: sw.reshard(full if trains else None, "8x12/R@1:1", group=group))[:2]

    reports = on_jobs(ranks, run)
    said = {report for report in reports if report is not None}
    assert len(said) == 1
    kind, text = said.pop()
    assert kind == "RefusedValueError"
    assert "names ranks 0, 2, but of that job only ranks 1, 3 joined the group" in text


def test_no_default_group_is_needed(ranks, tmp_path):  # noqa: F811
    def run(at):
        leave_the_first_group()
        if at == 0:
            start_job(tmp_path, "alone", 0, 1)
        group = bare_group(tmp_path, "both", at, 3)
        rows, columns = sw.Layout.chunk((8, 12), 0, owners=3), sw.Layout.chunk((8, 12), 1, owners=3)
        x = sw.ShardedTensor(torch.tensor_split(VALUES, [3, 6])[at].requires_grad_(), rows, group)
        y = sw.reshard(x, columns)  # the group of x, which its result has too
        same(y.local_tensor(), VALUES[:, 4 * at : 4 * at + 4])
        assert y.group is group
        (at * y.local_tensor()).sum().backward()
        same(x.grad.local_tensor()[0], torch.arange(3.0).repeat_interleave(4))
        same(y.detach().gather(dst=None), VALUES)
        out = sw.empty(rows, group=group)
        assert sw.reshard(y.detach(), out=out) is out
        same(out.shards[0], x.shards[0].detach())
        handle = sw.reshard(y.detach(), rows, group=group, async_op=True)
        same(handle.wait().local_tensor(), out.local_tensor())
        assert f"rank {at} holds" in repr(y)
        own = sw.ShardedTensor(VALUES, "8x12/R@1") if at == 2 else None  # of a process without a group: its own rank 0
        found = sw.reshard(own, "8x12/S1@3", group=group)
        same(found.local_tensor(), y.local_tensor().detach())
        without = None if at == 0 else raised(lambda: sw.reshard(own, "8x12/S1@3"))[:2]
        return sw.fingerprint(y.detach(), group=group), without

    reports = on_jobs(ranks, run, count=3)
    assert len({name for name, _ in reports}) == 1
    for kind, text in (without for _, without in reports[1:]):
        assert kind == "ExchangeError"
        assert "or give group=" in text


def test_a_mesh_over_two_jobs_is_refused_everywhere(ranks, tmp_path):  # noqa: F811
    def run(at):
        group, mesh = joined(tmp_path, at, custom_group)
        over = DeviceMesh.from_group(group, "cpu")
        x = DTensor.from_local(VALUES[:1], over, [Shard(0)], run_check=False)
        calls = [
            raised(lambda: sw.reshard(x, (over, [Replicate()]))),
            raised(lambda: sw.reshard(x, "6x12/R@6", group=group)),
            raised(lambda: sw.reshard(spread(VALUES, mesh, Shard(0)), "8x12/R@6", group=group)),
            raised(lambda: sw.Resharder({"w": x}, {"w": x}, group=group)),
            raised(lambda: sw.fingerprint(x, group=group)),
            raised(lambda: sw.reshard(None, "6x12/S0@7", group=group)),
        ]
        y = sw.reshard(spread(VALUES, mesh, Shard(0)) if at < TRAINERS else None, "8x12/R@6", group=group)
        torch.testing.assert_close(y.local_tensor(), VALUES, rtol=0, atol=0)  # refusals leave the group as it was
        return [(kind, text) for kind, text, _ in calls]

    reports = on_jobs(ranks, run)
    for kind, text in {said for report in reports for said in report[:1]}:
        assert kind == "ExchangeError"
        assert "mesh over several jobs" in text
    for number in range(1, 6):
        assert len({report[number] for report in reports}) == 1
        assert reports[0][number][0] is not None
    assert "the ranks disagree on the source" in reports[0][2][1]


def test_a_tensor_of_another_group_is_refused(ranks, tmp_path):  # noqa: F811
    def run(at):
        group, _ = joined(tmp_path, at, bare_group)
        other = bare_group(tmp_path, "other", EVERYBODY - 1 - at, EVERYBODY)
        x = sw.ShardedTensor(VALUES[at : at + 1], "6x12/S0@6", group)
        world = raised(lambda: sw.reshard(x, "6x12/R@4", group=dist.group.WORLD))[:2] if at < TRAINERS else None
        alone = raised(lambda: sw.checkpoint.load(str(tmp_path), {"w": x}))[:2]
        return raised(lambda: sw.reshard(x, "6x12/R@6", group=other))[:2], world, alone

    reports = on_jobs(ranks, run)
    said = {one for report in reports for one in report if one is not None}
    for kind, text in said:
        assert kind in ("RefusedValueError", "CheckpointError")
        assert "belongs to a group whose owners are ranks of the group" in text or "checkpoint" in text, text
    assert len({report[0] for report in reports}) == 1


def test_values_are_not_copied_between_groups_that_number_a_rank_differently(ranks, tmp_path):  # noqa: F811
    def run(at):
        group, _ = joined(tmp_path, at, bare_group)
        other = bare_group(tmp_path, "other", EVERYBODY - 1 - at, EVERYBODY)
        x = sw.ShardedTensor(torch.full((1, 12), float(at)), "6x12/S0@6", group)
        y = sw.ShardedTensor(torch.full((1, 12), float(at)), "6x12/S0@6", other)  # the same cells here, by their values
        assert not torch.equal(x, y)
        x.copy_(x.clone())
        return raised(lambda: x.copy_(y))[0]

    assert on_jobs(ranks, run) == ["UnsupportedError"] * EVERYBODY


def test_a_source_is_never_put_together_from_two_jobs(ranks, tmp_path):  # noqa: F811
    def run(at):
        group, mesh = joined(tmp_path, at, custom_group)
        state = {"w": spread(VALUES + at // TRAINERS, mesh, Shard(0))}  # each job has one of its own
        target = {"w": sw.empty("8x12/S1@6", group=group)}
        said = [
            raised(lambda: sw.Resharder(state, target, group=group))[:2],
            raised(lambda: sw.reshard_state_dict(state, {"w": "8x12/S1@6"}, group=group))[:2],
            raised(lambda: sw.checkpoint.save(state, os.path.join(tmp_path, "saved"), group=group))[:2],
        ]
        sw.Resharder(state if at < TRAINERS else None, target, group=group).run()
        same(target["w"].gather(dst=None), VALUES)
        sw.Resharder(target, state, group=group).run()  # of all ranks, to each job
        same(state["w"].full_tensor(), VALUES)
        return tuple(said)

    (said,) = set(on_jobs(ranks, run))
    for kind, text in said:
        assert kind == "RefusedValueError"
        assert "'w' is given by several jobs, as 8x12/S0@4 and as 8x12/S0@2:4,5" in text


def test_plain_tensors_of_two_jobs_are_not_taken_for_replicas(ranks, tmp_path):  # noqa: F811
    def run(at):
        group, mesh = joined(tmp_path, at, custom_group)
        trains = at < TRAINERS
        state = {"b": VALUES[0] + at // TRAINERS}  # each job has one of its own
        target = {"b": sw.empty("12/S0@6", group=group)}
        path = os.path.join(tmp_path, "saved")
        said = [
            raised(lambda: sw.Resharder(state, target, group=group))[:2],
            raised(lambda: sw.reshard_state_dict(state, {"b": "12/S0@6"}, group=group))[:2],
            raised(lambda: sw.checkpoint.save(state, path, group=group))[:2],
        ]
        mixed = {"b": state["b"] if trains else spread(VALUES[0], mesh, Shard(0))}
        sharded = raised(lambda: sw.Resharder(mixed, target, group=group))[:2]
        for source in ({"b": state["b"] if trains else None}, state if trains else None):
            sw.Resharder(source, target, group=group).run()
            same(target["b"].gather(dst=None), VALUES[0])
        replicas = {"b": sw.ShardedTensor(VALUES[0].clone(), "12/R@6", group)}  # which says that all are the same
        sw.Resharder(replicas, state, group=group).run()
        same(state["b"], VALUES[0])
        sw.checkpoint.save({"b": state["b"] if trains else None}, path, group=group)
        sw.checkpoint.load(path, state, group=group)  # each job's own is a whole copy
        same(state["b"], VALUES[0])
        return tuple(said), sharded

    ((said, sharded),) = set(on_jobs(ranks, run))
    for kind, text in said:
        assert kind == "RefusedValueError"
        assert "'b' is given by several jobs, as a plain tensor on rank 0 and as a plain tensor on rank 4" in text
        assert "give it on ranks of one job, and None on the others" in text
    assert "'b' is given by several jobs, as a plain tensor on rank 0 and as 12/S0@2:4,5" in sharded[1]


def test_a_group_of_one_job_keeps_the_ranks_of_the_job(ranks, tmp_path):  # noqa: F811
    def run(rank):
        group = dist.new_group([1, 2])
        odd = custom_group(tmp_path, "odd", rank - 1, 2) if rank else None  # registered by other numbers
        if not rank:
            return None
        x = sw.ShardedTensor(VALUES[4 * (rank - 1) :][:4], "8x12/S0@2:1,2", group)
        found = sw.reshard(x, "8x12/S1@2:1,2", group=group)
        np.testing.assert_array_equal(found.local_tensor(), VALUES[:, 6 * (rank - 1) :][:, :6])
        y = sw.ShardedTensor(VALUES[4 * (rank - 1) :][:4], "8x12/S0@2", odd)
        found = sw.reshard(y, "8x12/S1@2", group=odd)
        np.testing.assert_array_equal(found.local_tensor(), VALUES[:, 6 * (rank - 1) :][:, :6])
        return raised(lambda: sw.reshard(y, "8x12/S1@2:1,2", group=group))[0]

    assert ranks(3, run) == [None, "RefusedValueError", "RefusedValueError"]


@pytest.mark.parametrize("kind", GROUPS)
def test_the_familiar_containers_count_ranks_of_the_group(ranks, tmp_path, kind):  # noqa: F811
    def run(at):
        group, _ = joined(tmp_path, at, GROUPS[kind], [5, 0, 4, 1, 3, 2])
        me, values = group.rank(), VALUES[:6]
        rows = familiar.ChunkShardingSpec(0, [f"rank:{owner}/cpu" for owner in range(EVERYBODY)])
        columns = familiar.ChunkShardingSpec(1, ["rank:5/cpu", "rank:2/cpu"])
        row = values[me : me + 1].clone()
        mine = familiar.Shard.from_tensor_and_offsets(row, [me, 0], me)
        made = {
            "zeros": familiar.zeros(rows, 6, 12, process_group=group),
            "local shards": familiar.init_from_local_shards([mine], 6, 12, process_group=group),
            "computed": familiar.init_from_local_shards([mine], None, None, process_group=group),
            "local tensor": familiar.ShardedTensor._init_from_local_tensor(row, rows, 6, 12, process_group=group),
            "whole": familiar.shard_tensor(values if me == 4 else None, rows, src_rank=4, process_group=group),
            "whole everywhere": familiar.shard_tensor(values.clone(), columns, process_group=group),
        }
        metadata = made["computed"].metadata()
        made["metadata"] = familiar.ShardedTensor.init_from_local_shards_and_global_metadata(
            [mine], metadata, process_group=group
        )
        with familiar.load_with_process_group(group):
            made["pickled"] = pickle.loads(pickle.dumps(made["metadata"]))
        for name, st in made.items():
            same(st.reshard(columns).gather(dst=None), values * (name != "zeros"))
        shards, _ = familiar.reshard_local_shard(row, (6, 12), rows, columns, group)
        assert [shard.metadata.placement.rank() for shard in shards] == ([me] if me in (2, 5) else [])
        theirs = ChunkShardingSpec(0, ["rank:0/cpu"])  # of torch, which would name the shards by ranks of the job
        assert raised(lambda: made["metadata"].to_torch())[0] == "LayoutError"
        assert raised(lambda: familiar.zeros(theirs, 6).to(torch.half, process_group=group))[0] == "ValueError"
        return raised(lambda: sw.reshard(made["metadata"], theirs, group=group))[:2]

    said = set(on_jobs(ranks, run))
    assert len(said) == 1
    assert "knows ranks of one job alone" in said.pop()[1]


def test_a_tensor_over_several_jobs_is_not_pickled(ranks, tmp_path):  # noqa: F811
    def run(at):
        group, _ = joined(tmp_path, at, custom_group)
        x = sw.ShardedTensor(VALUES[at : at + 1], "6x12/S0@6", group)
        sw.fingerprint(x)
        return raised(lambda: pickle.dumps(x))[:2]

    for kind, text in on_jobs(ranks, run):
        assert kind == "UnsupportedError"
        assert "make it again: ShardedTensor(shards, layout, group)" in text


def test_a_job_whose_store_is_gone_is_told_to_all(ranks, tmp_path):  # noqa: F811
    class Gone:
        def compare_set(self, *_):
            raise RuntimeError("Connection refused")

    def run(at):
        import shardwise.transports.members as members

        group, _ = joined(tmp_path, at, bare_group)
        if at == 1:
            members._stored = lambda world: Gone().compare_set()
        return raised(lambda: sw.reshard(None, "8x12/R@6", group=group))[:2]

    said = set(on_jobs(ranks, run))
    assert len(said) == 1
    kind, text = said.pop()
    assert kind == "ExchangeError"
    assert "rank 1 of the group cannot take part: the store of its job cannot be used" in text
