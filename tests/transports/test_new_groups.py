"""Groups that the library makes itself: over any store, without torch's registry."""

import gc
import os
import threading
import time

import pytest
import torch
import torch.distributed as dist
from jobs import leave_the_first_group
from ranks import ranks  # noqa: F401

import shardwise as sw
from shardwise.transports.torch_groups import backend_names, new_group, timeout_of


def open_files():
    return len(os.listdir("/proc/self/fd"))


def tasks():
    """The threads of this process, also those of C++."""
    return len(os.listdir("/proc/self/task"))


def total(group, rank):
    numbers = torch.tensor([float(rank + 1)])
    group.allreduce([numbers]).wait()
    return numbers.item()


@pytest.mark.parametrize("hostname", [None, "127.0.0.1"])
def test_a_group_without_a_default_group(ranks, tmp_path, hostname):  # noqa: F811
    def run(rank):
        leave_the_first_group()
        store = dist.PrefixStore("one", dist.FileStore(str(tmp_path / "store"), 3))
        group = new_group(store, rank, 3, seconds=30, hostname=hostname)
        assert (group.rank(), group.size(), timeout_of(group)) == (rank, 3, 30.0)
        assert backend_names(group) == {"cpu": "gloo"}
        group.get_group_store().set(f"seen by {rank}", "yes")
        return total(group, rank)

    assert ranks(3, run, dying={9}) == [6.0] * 3


def test_several_groups_over_one_store_are_apart(ranks):  # noqa: F811
    def run(rank):
        home = dist.group.WORLD.get_group_store()
        groups = [new_group(dist.PrefixStore(f"group {at}", home), rank, 2, seconds=30) for at in range(3)]
        return [total(group, rank + at) for at, group in enumerate(groups)]

    assert ranks(2, run) == [[3.0, 5.0, 7.0]] * 2


def test_a_group_that_is_dropped_leaves_no_sockets_and_threads(ranks):  # noqa: F811
    def run(rank):
        home = dist.group.WORLD.get_group_store()
        before = open_files(), tasks(), threading.active_count()
        for at in range(10):
            group = new_group(dist.PrefixStore(f"group {at}", home), rank, 2, seconds=30)
            assert total(group, rank) == 3.0
            dist.barrier()
            del group
        gc.collect()
        end = time.monotonic() + 5
        while (open_files(), tasks()) > before[:2] and time.monotonic() < end:
            time.sleep(0.01)
        assert open_files() <= before[0]
        assert tasks() <= before[1]

    ranks(2, run)


def test_other_backends_are_refused():
    with pytest.raises(sw.ExchangeError, match="a group over mpi cannot be made here: only over gloo and nccl"):
        new_group(dist.HashStore(), 0, 1, backends={"cpu": "mpi"}, seconds=1)
