"""Processes killed in the middle of saves and removals: what looks like a whole step is one."""

import os
import random
import shutil
import signal
import sys

import pytest
import torch.distributed as dist
from checkpoints import all_of, names_in
from models import numbers, same
from test_run import empty_state, folders_in, sharded_state

import shardwise as sw
from shardwise import checkpoint
from shardwise.testing import on_ranks
from shardwise.transports import guarded_group

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning", "ignore::FutureWarning")  # torch's own
FILE_CALLS = {"open", "write", "flush", "fsync", "replace", "close", "scandir", "unlink", "mkdir", "rmdir"}


class Reaper:
    """Kills processes just before or after call number `moment` of a function in C that has to do with files."""

    def __init__(self, moment, doomed):
        self.moment, self.doomed, self.calls = moment, doomed, 0

    def __call__(self, frame, event, what):
        if event in ("c_call", "c_return") and what.__name__ in FILE_CALLS:
            if self.calls == self.moment:
                for process in sorted(self.doomed, key=os.getpid().__eq__):  # itself last
                    os.kill(process, signal.SIGKILL)
            self.calls += 1


def reaped(path, ranks, watched, victims, moment, drops):
    """Resume and save the next step, while victims die at a moment of the watched rank.

    With `drops` the training goes on from the first step, so that later ones are dropped. Returns what every rank has
    come to: its calls, an error, or None if it died.
    """

    def work(rank):
        guarded_group.GRACE = 0.1  # survivors need not wait long for answers of the dead
        processes = [None] * ranks
        dist.all_gather_object(processes, os.getpid())
        run = checkpoint.Run(path, keep=1 if not drops else 5)
        step = run.resume(into=empty_state(ranks), step=1 if drops else None)
        reaper = Reaper(moment, [processes[victim] for victim in victims])
        sys.setprofile(reaper if rank == watched else None)
        try:
            run.save(step + 1 if not drops else 5, sharded_state(step + 1 if not drops else 5, ranks))
        except sw.ShardwiseError as error:
            return error
        finally:
            sys.setprofile(None)
        return reaper.calls

    return on_ranks(ranks, work, dying=range(ranks), patience=10)


@pytest.fixture(scope="module")
def three(tmp_path_factory):
    """A run with three steps, of two ranks."""
    path = tmp_path_factory.mktemp("three") / "run"

    def train(rank):
        with checkpoint.Run(path, keep=5) as run:
            for step in (1, 2, 3):
                run.save(step, sharded_state(step, 2))

    on_ranks(2, train)
    return path


def whole_steps(path):
    """All folders that look like a checkpoint have the values of their step."""
    steps = []
    for name in folders_in(path):
        if "shardwise.json" in names_in(path / name):
            step = int(name[5:])
            tensors, values = all_of(path / name)
            assert values == {"step": step}
            same(tensors["w"], numbers(8, 4, start=step))
            steps.append(step)
        else:
            with pytest.raises(sw.CheckpointError):
                checkpoint.open(path / name)
    return steps


@pytest.mark.slow
@pytest.mark.parametrize(("watched", "victims"), [(0, [0]), (0, [1]), (0, [0, 1]), (1, [1])])
@pytest.mark.parametrize("drops", [False, True], ids=["goes on", "goes back"])
def test_a_run_that_is_killed_has_only_whole_steps_and_resumes(three, tmp_path, watched, victims, drops):
    calls = reaped(shutil.copytree(three, tmp_path / "all"), 2, watched, [], None, drops)[watched]
    draw = random.Random(f"{watched}{victims}{drops}")
    for moment in sorted({*draw.sample(range(calls), 6), calls - 1}):
        path = shutil.copytree(three, tmp_path / str(moment))
        reaped(path, 2, watched, victims, moment, drops)
        there = whole_steps(path)
        assert there, "a whole step is there at any moment"
        assert max(there) in ({3, 4} if not drops else {1, 2, 3, 5}), there
        if drops and 5 in there:
            assert there == [1, 5], "no dropped step comes back"

        with checkpoint.Run(path, keep=1) as run:
            found = empty_state(1)
            assert run.resume(into=found) == max(there) == found["step"]
            run.save(9, sharded_state(9, 1))
            assert run.steps() == [9]
        assert names_in(path) == [".run.entry", "latest", "step-00000009"], "nothing is left of the dead"
        assert len(names_in(path / "step-00000009")) == 2, "an index, and a file with its checksums"


def test_a_removal_that_was_interrupted_is_finished_by_the_next_job(three, tmp_path, monkeypatch):
    path = shutil.copytree(three, tmp_path / "run")
    real = os.unlink

    def dying(name, *args, **options):
        if "shard-" in os.fspath(name):
            raise KeyboardInterrupt
        real(name, *args, **options)

    monkeypatch.setattr(os, "unlink", dying)
    with checkpoint.Run(path, keep=1) as run:
        run.resume(into=empty_state(1))
        with pytest.raises(KeyboardInterrupt):
            run.save(4, sharded_state(4, 1))
    monkeypatch.undo()
    assert whole_steps(path) == [4]
    assert folders_in(path) == [f"step-0000000{step}" for step in (1, 2, 3, 4)]
    with checkpoint.Run(path, keep=1) as run:
        assert run.resume(into=empty_state(1)) == 4
        run.save(5, sharded_state(5, 1))
    assert folders_in(path) == ["step-00000005"]


def test_old_steps_that_cannot_be_removed_are_a_warning_and_the_step_is_saved(three, tmp_path, monkeypatch, caplog):
    path = shutil.copytree(three, tmp_path / "run")
    real = os.unlink

    def refusing(name, *args, **options):
        if os.fspath(name).endswith("shardwise.json"):
            raise PermissionError
        real(name, *args, **options)

    with checkpoint.Run(path, keep=1) as run:
        run.resume(into=empty_state(1))
        monkeypatch.setattr(os, "unlink", refusing)
        run.save(4, sharded_state(4, 1))
        assert [record.getMessage().split(",")[0] for record in caplog.records] == ["step 4 is saved"]
        assert run.steps() == [1, 2, 3, 4]
        monkeypatch.undo()
        run.save(5, sharded_state(5, 1))
        assert run.steps() == [5]


def test_a_step_is_never_set_aside_before_a_newer_one_is_whole(three, tmp_path):
    """A save that fails on one rank leaves all steps that were there."""
    path = shutil.copytree(three, tmp_path / "run")

    def work(rank):
        with checkpoint.Run(path, keep=1) as run:
            run.resume(into=empty_state(2))
            state = sharded_state(4, 2)
            if rank == 1:
                state["odd"] = object()
            with pytest.raises(sw.ShardwiseError):
                run.save(4, state)
            return run.steps(), run.latest()

    assert on_ranks(2, work) == [([1, 2, 3], 3)] * 2
