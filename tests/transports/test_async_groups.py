"""Asynchronous runs in groups of all kinds: each makes a group of its own, with the same owners."""

import pytest
import torch
import torch.distributed as dist
from jobs import GROUPS, leave_the_first_group, start_job
from ranks import ranks  # noqa: F401
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Shard, distribute_tensor

import shardwise as sw

WHOLE = torch.arange(64.0 * 48).reshape(64, 48)


@pytest.mark.parametrize("kind", GROUPS)
def test_groups_that_join_two_jobs(ranks, tmp_path, kind):  # noqa: F811
    """Trainer 2 ranks, server 2 ranks, with a group over all of them."""

    def run(n):
        leave_the_first_group()
        job, rank = ("trainer", n) if n < 2 else ("server", n - 2)
        start_job(str(tmp_path), job, rank, 2)
        group = GROUPS[kind](str(tmp_path), "both", n, 4)
        mesh = DeviceMesh("cpu", [0, 1])
        whole = WHOLE if job == "trainer" else WHOLE * 0
        state = {"w": distribute_tensor(whole, mesh, [Shard(0 if job == "trainer" else 1)])}
        sync = sw.Resharder(state if job == "trainer" else None, state if job == "server" else None, group=group)
        for step in range(3):
            handle = sync.run(async_op=True)
            total = torch.ones(1)
            dist.all_reduce(total)  # of this job alone
            if job == "trainer":
                state["w"].to_local().add_(1)
            handle.wait()
            if job == "server":
                torch.testing.assert_close(state["w"].full_tensor(), WHOLE + step, rtol=0, atol=0)
        dist.barrier()

    ranks(4, run, dying={9})


def test_processes_without_a_default_group(ranks, tmp_path):  # noqa: F811
    def run(rank):
        leave_the_first_group()
        group = GROUPS["bare"](str(tmp_path), "only", rank, 2)
        source = {"w": sw.ShardedTensor(WHOLE.chunk(2)[rank].clone(), "64x48/S0@2", group)}
        target = {"w": sw.ShardedTensor(torch.zeros(64, 24), "64x48/S1@2", group)}
        sync = sw.Resharder(source, target, group=group)
        handle = sync.run(async_op=True)
        source["w"].local_tensor().zero_()
        handle.wait()
        torch.testing.assert_close(target["w"].local_tensor(), WHOLE.chunk(2, 1)[rank], rtol=0, atol=0)

    ranks(2, run, dying={9})
