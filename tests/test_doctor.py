"""doctor: what it says of this machine, of limits, and of the ranks of a job."""

import os
import resource
import subprocess
import sys

import pytest

from shardwise.doctor import backends, descriptors, examine, hosts_of
from shardwise.planning import Hosts


def test_every_finding_of_this_machine_says_something(monkeypatch):
    monkeypatch.delenv("RANK", raising=False)
    found = [finding.what for finding in examine()]
    assert any(what.startswith("Python 3.") for what in found)
    assert any(what.startswith("torch ") for what in found)
    assert "gloo" in backends().what
    assert found[-1].startswith("one process; to look at the ranks of a job")


@pytest.mark.parametrize(
    ("soft", "hard", "fix"),
    [
        (256, 8192, "run `ulimit -n 4096` before the job"),
        (256, 1024, "run `ulimit -n 1024` before the job"),
        (256, resource.RLIM_INFINITY, "run `ulimit -n 4096` before the job"),
        (256, 256, "raise the hard limit"),
        (4096, 4096, ""),
        (resource.RLIM_INFINITY, resource.RLIM_INFINITY, ""),
    ],
)
def test_few_descriptors_come_with_the_remedy_that_works(soft, hard, fix):
    found = descriptors(soft, hard)
    assert found.fix.startswith(fix)
    assert (found.verdict == "fix") == bool(fix)


class Reach:
    """What a transport knows of its ranks."""

    def __init__(self, numbers):
        self.on_one_host = len(set(numbers)) == 1
        self.hosts = Hosts(tuple(range(len(numbers))), tuple(numbers))


def test_ranks_are_listed_by_host_and_those_of_one_name_that_share_nothing_get_a_remedy():
    (alone,) = hosts_of(Reach([0, 0, 0]), ["a"] * 3)
    assert alone.what == "all ranks share memory: a move between them is a copy"
    one, other = hosts_of(Reach([0, 0, 1, 1]), ["a", "a", "b", "b"])
    assert (one.what, other.what) == ("ranks 0, 1 on a: share memory", "ranks 2, 3 on b: share memory")
    *_, last = hosts_of(Reach([0, 0, 1]), ["a"] * 3)
    assert last.what == "not all ranks on a share memory"
    assert "one container" in last.fix


def test_ranks_of_torchrun_are_examined_together_and_the_first_prints():
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    command = [*torchrun, "-m", "shardwise", "doctor"]
    env = {**os.environ, "OMP_NUM_THREADS": "1", "COLUMNS": "200"}
    done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=120)
    assert "2 ranks, over gloo" in done.stdout, done.stderr
    assert done.stdout.count("all ranks share memory") == 1
