"""Run: steps that are kept and removed, whole ones only; nothing of others is touched."""

import logging
import os
import signal
import time
from contextlib import contextmanager
from multiprocessing import get_context
from pathlib import Path

import fsspec
import numpy as np
import pytest
import torch
import torch.distributed as dist
from checkpoints import names_in
from models import held, numbers, same

import shardwise as sw
from shardwise import checkpoint
from shardwise.storage import locks
from shardwise.testing import on_ranks

FORMATS = ("safetensors", "dcp")


def state(step):
    """The state after a step, in one process."""
    return {"w": torch.full((6, 2), float(step)), "step": step}


def sharded_state(step, ranks):
    whole = numbers(8, 4, start=step)
    return {"w": held(whole, f"8x4/S0@{ranks}") if ranks > 1 else whole, "step": step}


def empty_state(ranks):
    whole = torch.zeros(8, 4)
    return {"w": held(whole, f"8x4/S1@{ranks}") if ranks > 1 else whole, "step": -1}


def is_step(found, step):
    """A loaded state is that of a step."""
    assert found["step"] == step
    same(found["w"], state(step)["w"])


def saved(run, *steps, **options):
    for step in steps:
        run.save(step, state(step), **options)


def folders_in(path):
    return [name for name in names_in(path) if name.startswith("step-")]


@contextmanager
def warnings_of(caplog):
    """The messages of warnings that are logged inside."""
    messages = []
    with caplog.at_level(logging.WARNING, logger="shardwise"):
        yield messages
    messages += [record.getMessage() for record in caplog.records]


@pytest.fixture(params=["local", "memory"])
def folder(request, tmp_path):
    """An empty place for a run."""
    return tmp_path / "run" if request.param == "local" else f"memory://{tmp_path}/run"


@pytest.mark.parametrize("format", FORMATS)
def test_the_newest_steps_are_kept_and_the_newest_is_resumed(folder, format):
    with checkpoint.Run(folder, keep=2) as run:
        assert (run.steps(), run.latest(), run.resume(into=state(0))) == ([], None, None)
        saved(run, 1, 5, 7, 12, format=format)
        assert (run.steps(), run.latest()) == ([7, 12], 12)
    found = state(0)
    with checkpoint.Run(folder, keep=2) as run:
        assert run.resume(into=found) == 12
    is_step(found, 12)


def test_every_nth_step_is_kept_for_good(folder):
    with checkpoint.Run(folder, keep=1, keep_every=4) as run:
        saved(run, *range(10))
        assert run.steps() == [0, 4, 8, 9]


def test_all_steps_are_kept_without_a_limit(folder):
    with checkpoint.Run(folder, keep=None) as run:
        saved(run, *range(5))
        assert run.steps() == list(range(5))


def test_a_removed_step_leaves_nothing_behind(tmp_path):
    with checkpoint.Run(tmp_path, keep=1) as run:
        saved(run, 1, 2)
        assert folders_in(tmp_path) == ["step-00000002"]
    assert names_in(tmp_path) == [".run.entry", "latest", "step-00000002"]


def test_the_file_latest_names_the_folder_of_the_newest_step(tmp_path):
    with checkpoint.Run(tmp_path) as run:
        saved(run, 3, 8)
        name = (tmp_path / "latest").read_text().strip()
        assert checkpoint.open(tmp_path / name).objects["step"] == 8
        assert run.path(8) == str(tmp_path / name)


def test_latest_is_not_believed_over_what_is_there(tmp_path):
    with checkpoint.Run(tmp_path) as run:
        saved(run, 3, 8)
        (tmp_path / "latest").write_text("step-00000099\n")
        assert run.latest() == 8
        (tmp_path / "latest").unlink()
        assert run.latest() == 8


def test_files_of_others_are_never_touched(tmp_path):
    (tmp_path / "step-00000001").mkdir(parents=True)
    texts = ["notes.txt", "step-00000001/notes.txt", "step-7", "step-00000001/shard-00000-of-00001.safetensors"]
    for name in texts:
        (tmp_path / name).write_text("mine")
    (tmp_path / "step-abc").mkdir()
    with checkpoint.Run(tmp_path, keep=1) as run:
        assert run.steps() == []
        saved(run, 1, 2, 3)
        assert run.steps() == [3]
    assert [(tmp_path / name).read_text() for name in texts] == ["mine"] * 4
    assert (tmp_path / "step-abc").is_dir()


def test_a_folder_whose_file_latest_belongs_to_others_is_refused(tmp_path):
    (tmp_path / "latest").write_text("global_step100")
    with pytest.raises(sw.CheckpointError, match=r"latest was not written by shardwise.*Give another folder"):
        checkpoint.Run(tmp_path)
    assert names_in(tmp_path) == ["latest"]


def test_a_checkpoint_of_others_in_the_folder_of_a_step_is_not_removed(tmp_path, caplog):
    with checkpoint.Run(tmp_path, keep=1) as run:
        saved(run, 1)
        theirs = tmp_path / "step-00000000"
        theirs.mkdir()
        (theirs / "shardwise.json").write_text("{}")
        with warnings_of(caplog) as messages:
            saved(run, 2)
        assert (theirs / "shardwise.json").read_text() == "{}"
        assert "was not saved by shardwise" in messages[0]


@pytest.mark.parametrize(
    ("step", "kind", "text"),
    [
        (1.0, TypeError, "a step is a whole number, not 1.0"),
        ("3", TypeError, "a step is a whole number, not '3'"),
        (True, TypeError, "a step is a whole number, not True"),
        (None, TypeError, "a step is a whole number, not None"),
        (-1, ValueError, "a step is not negative, but -1 is given"),
    ],
)
def test_steps_that_are_no_whole_numbers_are_refused(tmp_path, step, kind, text):
    with checkpoint.Run(tmp_path) as run, pytest.raises(kind, match=text):
        run.save(step, state(0))


def test_whole_numbers_of_numpy_and_long_ones_are_steps(tmp_path):
    with checkpoint.Run(tmp_path) as run:
        saved(run, np.int64(3), torch.tensor(4), 10**12)
        assert run.steps() == [3, 4, 10**12]


@pytest.mark.parametrize(("name", "value"), [("keep", 0), ("keep", -1), ("keep", 1.5), ("keep_every", 0)])
def test_limits_that_keep_nothing_are_refused(tmp_path, name, value):
    with pytest.raises(ValueError, match=f"{name}= must be a positive whole number or None, not {value}"):
        checkpoint.Run(tmp_path / "run", **{name: value})
    assert not (tmp_path / "run").exists()


def test_a_step_that_is_saved_again_is_replaced(folder):
    with checkpoint.Run(folder, keep=2) as run:
        saved(run, 1, 2)
        run.save(2, {"w": torch.ones(3), "step": "again"})
        found = {"w": torch.zeros(3), "step": ""}
        assert (run.steps(), run.resume(into=found)) == ([1, 2], 2)
        assert found["step"] == "again"


def test_a_step_that_comes_before_the_last_one_is_refused(folder):
    with checkpoint.Run(folder) as run:
        saved(run, 4)
        with pytest.raises(sw.CheckpointError, match="step 3 comes before step 4 of this run: steps must rise"):
            saved(run, 3)
        assert run.steps() == [4]


def test_a_training_that_did_not_resume_cannot_overwrite_another(folder):
    with checkpoint.Run(folder) as run:
        saved(run, 4, 8)
    with checkpoint.Run(folder) as run:
        for step in (1, 8):
            with pytest.raises(
                sw.CheckpointError, match=rf"has step 8, so step {step} would not be the newest: resume"
            ):
                saved(run, step)
        saved(run, 9)
        assert run.steps() == [4, 8, 9]


def test_steps_of_an_abandoned_training_are_dropped_by_the_first_save_after_it(folder, caplog):
    with checkpoint.Run(folder, keep=5) as run:
        saved(run, 10, 20, 30)
    with checkpoint.Run(folder, keep=5) as run:
        found = state(0)
        assert run.resume(into=found, step=10) == 10
        is_step(found, 10)
        assert run.latest() == 30, "a look at an earlier step changes nothing"
        with warnings_of(caplog) as messages:
            saved(run, 15)
        assert "dropping [20, 30]: the training went on from 10" in messages[0]
        assert run.steps() == [10, 15]
        saved(run, 20)
    with checkpoint.Run(folder, keep=5) as run:
        assert run.resume(into=found) == 20
        is_step(found, 20)


def test_a_step_of_an_abandoned_training_is_replaced_whole(tmp_path):
    with checkpoint.Run(tmp_path, keep=5) as run:
        saved(run, 10, 20)
        run.resume(into=state(0), step=10)
        saved(run, 20)
        assert run.steps() == [10, 20]
        assert len(names_in(tmp_path / "step-00000020")) == 2, "an index, and a file with its checksums"


def test_a_step_that_is_not_there_is_refused_with_those_that_are(folder):
    with checkpoint.Run(folder) as run:
        saved(run, 1, 2)
        with pytest.raises(sw.CheckpointError, match=r"has no step 7: it has \[1, 2\]"):
            run.resume(into=state(0), step=7)


def test_a_closed_run_refuses_all_calls(tmp_path):
    with checkpoint.Run(tmp_path) as run:
        saved(run, 1)
    run.close()
    assert repr(run) == f"Run({str(tmp_path)!r}, keep=3, keep_every=None, closed)"
    for call in (lambda: saved(run, 2), run.steps, run.latest, run.should_stop, lambda: run.resume(into=state(0))):
        with pytest.raises(sw.CheckpointError, match="is closed: make a new Run"):
            call()


# --- ranks ------------------------------------------------------------------------------------------------------------


def test_ranks_save_and_another_number_of_ranks_resumes(tmp_path):
    def train(rank):
        with checkpoint.Run(tmp_path, keep=2) as run:
            for step in (1, 2, 3):
                run.save(step, sharded_state(step, 4))
            return run.steps(), run.latest()

    def resume(rank):
        into = empty_state(2)
        with checkpoint.Run(tmp_path) as run:
            return run.resume(into=into), into["step"], into["w"].gather(0)

    assert on_ranks(4, train) == [([2, 3], 3)] * 4
    for rank, (step, value, whole) in enumerate(on_ranks(2, resume)):
        assert (step, value) == (3, 3)
        if rank == 0:
            same(whole, numbers(8, 4, start=3))


def test_ranks_with_different_steps_or_options_are_refused_on_all(tmp_path):
    def work(rank):
        texts = []
        try:
            checkpoint.Run(tmp_path, keep=rank + 1)
        except sw.ShardwiseError as error:
            texts.append(str(error))
        with checkpoint.Run(tmp_path) as run:
            try:
                run.save(rank, sharded_state(0, 2))
            except sw.ShardwiseError as error:
                texts.append(str(error))
            return texts, run.steps()

    (texts, steps), other = on_ranks(2, work)
    assert (texts, steps) == other
    assert "keep" in texts[0]
    assert "step" in texts[1]
    assert steps == []


def test_ranks_of_a_subgroup_have_a_run_of_their_own(tmp_path):
    def work(rank):
        group = dist.new_group([1, 2])
        if rank == 0:
            return None
        with checkpoint.Run(tmp_path, group=group) as run:
            run.save(1, {"w": torch.ones(4), "step": 1})
            found = {"w": torch.zeros(4), "step": 0}
            return run.resume(into=found), found["step"], found["w"].sum().item()

    assert on_ranks(3, work)[1:] == [(1, 1, 4.0)] * 2


# --- two jobs ---------------------------------------------------------------------------------------------------------


def test_a_second_run_on_the_same_folder_is_refused_and_names_the_holder(tmp_path):
    text = rf"another job has the run .* \(process {os.getpid()} on host "
    with checkpoint.Run(tmp_path), pytest.raises(sw.CheckpointError, match=text):
        checkpoint.Run(tmp_path)
    with checkpoint.Run(tmp_path) as run:
        saved(run, 1)


def test_a_second_job_is_refused_on_all_its_ranks(tmp_path):
    def work(rank):
        try:
            checkpoint.Run(tmp_path)
        except sw.CheckpointError as error:
            return str(error)

    with checkpoint.Run(tmp_path):
        texts = on_ranks(2, work)
    assert texts[0] == texts[1]
    assert f"process {os.getpid()} on host" in texts[0]


def test_the_lock_dies_with_its_holder_even_if_a_fork_of_it_lives_on(tmp_path):
    fork = get_context("fork")
    receiver, sender = fork.Pipe(duplex=False)

    def hold():
        run = checkpoint.Run(tmp_path)
        if os.fork() == 0:
            sender.send((os.getpid(), repr(run)))
        time.sleep(60)
        os._exit(0)

    holder = fork.Process(target=hold)
    holder.start()
    assert receiver.poll(60), "the lock is held"
    child, _ = receiver.recv()
    try:
        with pytest.raises(sw.CheckpointError, match=f"process {holder.pid} on host"):
            checkpoint.Run(tmp_path)
        holder.kill()
        holder.join()
        with checkpoint.Run(tmp_path) as run:
            assert run.latest() is None
    finally:
        holder.kill()
        os.kill(child, signal.SIGKILL)


def test_a_run_that_was_dropped_without_close_can_be_made_again(tmp_path):
    run = checkpoint.Run(tmp_path)
    saved(run, 1)
    del run
    with checkpoint.Run(tmp_path) as run:
        assert run.latest() == 1


def test_without_locks_the_job_that_started_last_goes_on_and_the_other_stops(folder, monkeypatch):
    def no_locks(*_):
        raise OSError(38, "Function not implemented")

    monkeypatch.setattr(locks.fcntl, "flock", no_locks)
    first = checkpoint.Run(folder)
    saved(first, 1)
    with checkpoint.Run(folder) as second:
        second.resume(into=state(0))
        saved(second, 2)
        with pytest.raises(sw.CheckpointError, match=rf"another job has taken over .*process {os.getpid()} on host"):
            saved(first, 3)
        saved(second, 4)
        assert second.steps() == [1, 2, 4]


def test_a_run_whose_entry_was_removed_stops(tmp_path):
    with checkpoint.Run(tmp_path) as run:
        (tmp_path / ".run.entry").unlink()
        with pytest.raises(sw.CheckpointError, match=r"\.run\.entry was removed: .*Make a new Run"):
            saved(run, 1)
        (tmp_path / ".run.entry").write_text("mine")
        with pytest.raises(sw.CheckpointError, match="is not an entry of a run"):
            saved(run, 1)


def test_a_remote_run_leaves_only_its_steps(tmp_path):
    where = f"memory://{tmp_path}/run"
    with checkpoint.Run(where, keep=1) as run:
        saved(run, 1, 2, 3)
    there = sorted(path.rpartition("/run/")[2] for path in fsspec.filesystem("memory").find(f"{tmp_path}/run"))
    assert [name for name in there if "/" not in name] == [".run.entry", "latest"]
    assert {name.split("/")[0] for name in there if "/" in name} == {"step-00000003"}


def test_a_relative_run_is_refused_on_all_ranks_after_the_working_directory_has_changed(tmp_path):
    for name in ("then", "now"):
        Path(tmp_path, name).mkdir()

    def run(rank):
        os.chdir(tmp_path / "then")
        with checkpoint.Run("run") as run:
            run.save(1, {"w": torch.ones(2)})
            run.save(2, {"w": torch.zeros(2)}, async_op=True)
            if rank == 1:
                os.chdir(tmp_path / "now")
            for ask in (run.steps, run.latest, lambda: run.save(3, {}), lambda: run.resume({"w": torch.ones(2)})):
                with pytest.raises(sw.CheckpointError, match=r"from .*then to .*now: give Run an absolute path"):
                    ask()
        return True

    assert on_ranks(2, run) == [True, True]
    assert list(Path(tmp_path, "now").iterdir()) == []
    with checkpoint.Run(tmp_path / "then" / "run") as whole:
        assert whole.steps() == [1, 2]


def test_steps_that_no_training_reaches_are_refused(tmp_path):
    with checkpoint.Run(tmp_path) as run:
        for step in (10**18, 10**300, 10**5000):
            with pytest.raises(ValueError, match="less than 1000000000000000000"):
                run.save(step, {"w": torch.ones(2)})
        run.save(10**18 - 1, {"w": torch.ones(2)})
        assert run.latest() == 10**18 - 1
