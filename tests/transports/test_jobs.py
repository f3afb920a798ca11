"""Jobs as people start them, several on one host; and what is left of them when they have ended, however they ended."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from ranks import ranks  # noqa: F401
from wired import COLUMNS, ROWS, VALUES, part, use

import shardwise as sw

SCRIPT = Path(__file__).parent / "one_host.py"
TORCHRUN = [sys.executable, "-m", "torch.distributed.run", "--nproc_per_node=2", "--standalone"]


def left_by(pids):
    """Names in shared memory and addresses of these processes."""
    with open("/proc/net/unix") as file:
        names = {line.split()[-1] for line in file if "@shardwise-" in line} | set(os.listdir("/dev/shm"))
    return [name for name in names if any(f"-{pid}-" in name or f"_{pid}_" in name for pid in pids)]


@pytest.mark.slow
def test_jobs_that_run_at_a_time_on_one_host(tmp_path):
    starts = [TORCHRUN, [sys.executable]]  # which spawns its ranks
    jobs = []
    for number, start in enumerate(starts):
        (tmp_path / str(number)).mkdir()
        command = [*start, str(SCRIPT), str(tmp_path / str(number)), str(number)]
        jobs.append(subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True))
    try:
        said = [job.communicate(timeout=100)[0] for job in jobs]
    finally:
        for job in jobs:
            job.kill()
    assert [job.returncode for job in jobs] == [0, 0], "\n".join(said)
    pids = [path.read_text() for path in tmp_path.glob("*/rank *")]
    assert len(pids) == 4
    assert left_by(pids) == []


def test_nothing_is_left_of_ranks_that_were_killed(ranks):  # noqa: F811
    def run(rank):
        use("staged")
        sw.reshard(part(VALUES, ROWS, rank), COLUMNS)
        x = part(VALUES, ROWS, rank, shared=True)
        sw.reshard(x, COLUMNS)
        made, pids = sw.empty(ROWS, shared=True), [None, None]
        dist.all_gather_object(pids, os.getpid())
        if rank == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        time.sleep(0.2)
        return pids, left_by(pids[:1]), left_by(pids[1:]), made.shards

    pids, of_living, of_dead, _ = ranks(2, run, dying={1})[0]
    assert len(of_living) == 1  # its address, as long as it lives
    assert of_dead == []
    assert left_by(pids) == []


def test_shared_memory_outlives_a_fork(ranks):  # noqa: F811
    def run(rank):
        use("staged")
        x = part(VALUES, ROWS, rank, shared=True)
        sw.reshard(x, COLUMNS)
        read, write = os.pipe()
        child = os.fork()
        if not child:
            local = x.local_tensor()
            os.write(write, str(float(local.sum())).encode())
            del x, local  # which must neither tell others nor unmap what is the parent's
            sw.share_(torch.zeros(10))
            os._exit(0)
        os.waitpid(child, 0)
        same = float(os.read(read, 100)) == float(x.local_tensor().sum())
        found = sw.reshard(x, COLUMNS)
        return same and torch.equal(found.local_tensor(), part(VALUES, COLUMNS, rank).local_tensor())

    assert all(ranks(2, run))
