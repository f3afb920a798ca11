"""The timeout of the group is one budget for all buckets of a call."""

import time

import pytest
import torch
import torch.distributed as dist
from ranks import ranks  # noqa: F401

import shardwise as sw
from shardwise.job.job import Job
from shardwise.job.session import group_transport

COUNT, PAUSE, LIMIT = 12, 0.5, 3.0  # buckets, seconds before each, seconds of the group


def rows(fill):
    return {f"w{at}": sw.ShardedTensor(torch.full((8, 16), fill), "16x16/S0@2") for at in range(COUNT)}


def sync():
    target = {f"w{at}": sw.empty("16x16/S1@2") for at in range(COUNT)}
    return sw.Resharder(rows(1.0), target, max_bytes=1024).run


def reshard():
    return lambda: sw.reshard_state_dict(rows(1.0), [("*", "16x16/S1@2")], max_bytes=1024)


@pytest.mark.parametrize("prepare", [sync, reshard])
def test_buckets_that_are_each_in_time_are_not_when_all_take_too_long(ranks, prepare):  # noqa: F811
    def run(rank):
        call = prepare()
        call()
        dist.barrier()
        transport, exchange, met = group_transport(None), Job._carry_out, []

        def slow(job, *args, **options):
            met.append(len(job.plan.buckets()))
            time.sleep(PAUSE if rank == 1 else 0)
            return exchange(job, *args, **options)

        Job._carry_out = slow
        transport.seconds = LIMIT
        with pytest.raises(sw.ExchangeError) as error:
            call()
        return met, transport._end.get(), str(error.value)

    reports = ranks(2, run, dying={9})
    for met, end, _ in reports:
        assert end is None
        assert 1 < len(met) < met[0]
    assert "nothing came within 3 s from rank 1" in reports[0][2]


def test_budgets_of_calls_at_a_time_are_apart(ranks):  # noqa: F811
    def run(rank):
        transport = group_transport(None)
        other = sw.reshard(rows(1.0)["w0"], "16x16/S1@2", async_op=True)
        with transport.budget():
            other.wait()
            sw.reshard(rows(1.0)["w0"], "16x16/S1@2")
            end = transport._end.get()
            assert end is not None
            sw.reshard(rows(1.0)["w0"], "16x16/S1@2", async_op=True).wait()
            assert transport._end.get() == end
        return transport._end.get()

    assert ranks(2, run) == [None, None]
