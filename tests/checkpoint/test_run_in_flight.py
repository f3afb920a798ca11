"""Several saves of a run at a time: they become whole in order, and an error of each reaches all ranks."""

import signal
import time

import fsspec
import pytest
import torch.distributed as dist
from checkpoints import has
from models import numbers
from test_run import is_step, sharded_state, state

import shardwise as sw
from shardwise import checkpoint
from shardwise.checkpoint.async_saves import RunningSaves
from shardwise.job.agree import Callers
from shardwise.testing import on_ranks


def writer():
    """The process that writes for this one."""
    return RunningSaves.of(Callers("save", None)).process()._process


def found_in(path):
    into = state(0)
    checkpoint.load(path, into)
    return into


def test_saves_in_flight_do_not_wait_for_each_other_and_become_whole_in_order(tmp_path):
    with checkpoint.Run(tmp_path, keep=2) as run:
        process = writer()
        process.send_signal(signal.SIGSTOP)
        handles = [run.save(step, state(step), async_op=True, in_flight=3) for step in (1, 2, 3)]
        assert [handle.done() for handle in handles] == [False] * 3
        assert all(handle.waited < handle.stall for handle in handles)
        process.send_signal(signal.SIGCONT)
        handles[1].wait()
        assert handles[0].done()
        run.save(4, state(4), async_op=True, in_flight=3)
        run.save(5, state(5))
        assert (run.steps(), run.latest()) == ([4, 5], 5)
        is_step(found_in(run.path(5)), 5)


def test_a_save_that_waits_for_an_earlier_one_says_so_in_its_stall(tmp_path):
    with checkpoint.Run(tmp_path) as run:
        process = writer()
        process.send_signal(signal.SIGSTOP)
        run.save(1, state(1), async_op=True)
        continued = time.monotonic() + 0.2
        signal.signal(signal.SIGALRM, lambda *_: process.send_signal(signal.SIGCONT))
        signal.setitimer(signal.ITIMER_REAL, 0.2)
        begun = time.monotonic()
        handle = run.save(2, state(2), async_op=True)
        assert handle.stall >= handle.waited >= continued - begun


def test_steps_of_an_object_store_become_whole_in_order(tmp_path, monkeypatch):
    """Each save has a thread of its own there: the second must not overtake the first."""
    store, real = fsspec.filesystem("memory"), type(fsspec.filesystem("memory")).open

    def slow(self, path, mode="rb", **options):
        if "step-00000001/" in path and mode == "wb":
            time.sleep(0.1)
        return real(self, path, mode, **options)

    monkeypatch.setattr(type(store), "open", slow)
    with checkpoint.Run(f"memory://{tmp_path}/run", keep=1) as run:
        first, second = (run.save(step, state(step), async_op=True, in_flight=2) for step in (1, 2))
        second.wait()
        assert first.done()
        assert run.steps() == [2]


def test_an_error_of_each_save_reaches_all_ranks_and_the_next_ones_go_on(tmp_path):
    def train(rank):
        with checkpoint.Run(tmp_path, keep=2) as run:
            run.save(1, sharded_state(1, 2), async_op=True).wait()
            process, errors = writer(), []
            if rank == 1:
                process.send_signal(signal.SIGSTOP)
            dist.barrier()
            options = {"async_op": True, "in_flight": 2, "patience": 0.3}
            handles = [run.save(step, sharded_state(step, 2), **options) for step in (2, 3)]
            if rank == 0:
                while not all(handle.done() for handle in handles):
                    time.sleep(0.05)
            dist.barrier()
            if rank == 1:
                process.send_signal(signal.SIGCONT)
            for _ in handles:
                with pytest.raises(sw.CheckpointError) as error:
                    run.save(4, sharded_state(4, 2))
                errors.append(str(error.value).split(" failed")[0][-8:])
            run.save(4, sharded_state(4, 2))
            return errors, run.steps(), run.latest()

    assert on_ranks(2, train) == [(["00000002", "00000003"], [1, 4], 4)] * 2
    has(tmp_path / "step-00000004", {"w": numbers(8, 4, start=4)}, {"step": 4})


def test_the_end_of_a_run_waits_for_all_saves_and_raises_every_error(tmp_path):
    def train(rank):
        run = checkpoint.Run(tmp_path)
        process = writer()
        process.send_signal(signal.SIGSTOP)
        for step in (1, 2):
            run.save(step, state(step), async_op=True, in_flight=2)
        process.kill()
        with pytest.raises(sw.CheckpointError, match="step-00000001 failed") as error:
            run.close()
        assert "step-00000002 failed" in error.value.__notes__[0]

    on_ranks(1, train)


def test_numbers_in_flight_that_are_none_are_refused(tmp_path):
    with checkpoint.Run(tmp_path) as run:
        for number in (0, True, "2"):
            with pytest.raises(ValueError, match="give the number of saves that may run at a time"):
                run.save(1, state(1), async_op=True, in_flight=number)
        run.save(1, state(1), async_op=True, in_flight=2)
