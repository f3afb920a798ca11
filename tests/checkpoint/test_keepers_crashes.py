"""Ranks and keepers killed while a step is kept and while one is resumed: never a mixture, never a hang."""

import os
import random
import signal
import sys

import pytest
import torch.distributed as dist
from kept import LEASE, ended_at_last, gone, killed_after, resumed
from test_keepers import is_step
from test_run import empty_state, sharded_state

import shardwise as sw
from shardwise import checkpoint
from shardwise.testing import on_ranks
from shardwise.transports import guarded_group

pytestmark = [
    pytest.mark.slow,
    pytest.mark.filterwarnings("ignore::UserWarning", "ignore::FutureWarning"),  # torch's own
]
MOMENTS = 1  # of each kind
CALLS = {"sendmsg", "recvmsg", "memfd_create", "connect", "posix_fallocate", "copy_", "close", "unlink", "fstat"}


@pytest.fixture
def folder(tmp_path):
    path = tmp_path / "run"
    with ended_at_last(path):
        yield path


class Reaper:
    """Kills processes just before or after call number `moment` of a function in C that has to do with keeping."""

    def __init__(self, moment, doomed):
        self.moment, self.doomed, self.calls = moment, doomed, 0

    def __call__(self, frame, event, what):
        if event in ("c_call", "c_return") and what.__name__ in CALLS:
            if self.calls == self.moment:
                for process in sorted(self.doomed, key=os.getpid().__eq__):  # itself last
                    os.kill(process, signal.SIGKILL)
            self.calls += 1


def reaped(folder, watched, victims, moment, *, work, ranks=3, keepers=False):
    """Ranks do the work, while victims die at a moment of the watched one, with their keepers. Calls of each."""

    def run(rank):
        guarded_group.GRACE = 0.1  # survivors need not wait long for answers of the dead
        opened = checkpoint.Run(folder, memory=2, lease=LEASE)
        known = [None] * ranks
        keeper = opened._keeping._keeper._process.pid
        dist.all_gather_object(known, ([os.getpid()] if keepers != "only" else []) + ([keeper] if keepers else []))
        doomed = [process for victim in victims for process in known[victim]]
        prepare, measured = work
        prepare(opened)
        reaper = Reaper(moment, doomed)
        sys.setprofile(reaper if rank == watched else None)
        try:
            measured(opened)
        except sw.ShardwiseError:
            return None
        finally:
            sys.setprofile(None)
        return reaper.calls

    return on_ranks(ranks, run, dying=range(ranks), patience=10)


def keep_two(run):
    run.keep(1, sharded_state(1, 3))
    run.keep(2, sharded_state(2, 3))


KEEPING = keep_two, lambda run: run.keep(3, sharded_state(3, 3))
RESUMING = lambda run: None, lambda run: run.resume(into=empty_state(3))


@pytest.fixture(scope="module")
def calls(tmp_path_factory):
    """How many calls rank 1 makes while a step is kept."""
    path = tmp_path_factory.mktemp("calls") / "run"
    with ended_at_last(path):
        return reaped(path, 1, [], None, work=KEEPING)[1]


@pytest.mark.parametrize(("victims", "keepers"), [([1], True), ([2], True), ([1], "only")])
def test_a_rank_and_a_keeper_may_die_at_any_moment_while_a_step_is_kept(tmp_path, calls, victims, keepers):
    draw, watched = random.Random(f"{victims}{keepers}"), 1
    for moment in draw.sample(range(calls), MOMENTS):
        path = tmp_path / str(moment)
        with ended_at_last(path):
            reaped(path, watched, victims, moment, work=KEEPING, keepers=keepers)
            found = resumed(path, 2)
            step = found[0][0]
            assert step in (2, 3)
            is_step(found, step, 2)
            assert found[0][1].memory == 128
            gone(path)


def test_a_rank_may_die_at_any_moment_of_a_recovery(folder):
    killed_after(folder, 4, keep=(4, 5))
    calls = reaped(folder, 1, [], None, work=RESUMING)[1]
    for moment in sorted(random.Random(0).sample(range(calls), MOMENTS)):
        reaped(folder, 1, [1], moment, work=RESUMING, keepers=True)
    found = resumed(folder, 2)
    is_step(found, 5, 2)
    assert found[0][1].memory == 128
    gone(folder)
