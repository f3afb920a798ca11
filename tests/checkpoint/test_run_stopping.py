"""Signals: one rank receives one, and all ranks save and stop in the same step; asynchronous saves are collected."""

import os
import signal
import threading

import pytest
import torch
import torch.distributed as dist
from test_run import empty_state, saved, sharded_state, state

import shardwise as sw
from shardwise import checkpoint
from shardwise.checkpoint import run as run_module
from shardwise.testing import on_ranks


def test_all_ranks_stop_in_the_same_step_if_one_of_them_receives_a_signal(tmp_path):
    def train(rank):
        with checkpoint.Run(tmp_path) as run:
            run.save_on(signal.SIGTERM)
            for step in range(1, 1000):
                if (rank, step) == (1, 5):
                    os.kill(os.getpid(), signal.SIGTERM)
                if run.should_stop():
                    run.save(step, sharded_state(step, 3))
                    break
            return step, run.latest(), run.should_stop()

    assert on_ranks(3, train) == [(5, 5, True)] * 3


def test_a_signal_from_outside_stops_all_ranks_in_one_step_and_another_number_resumes(tmp_path):
    """The signal arrives at any moment, also during a save."""

    def train(rank):
        with checkpoint.Run(tmp_path, keep=2) as run:
            run.save_on(signal.SIGTERM, signal.SIGUSR1)
            if rank == 2:
                threading.Timer(0.3, os.kill, (os.getpid(), signal.SIGTERM)).start()
            for step in range(1, 10**6):
                stop = run.should_stop()
                if stop or step % 3 == 0:
                    run.save(step, sharded_state(step, 4))
                if stop:
                    return step

    stopped = on_ranks(4, train)
    assert len(set(stopped)) == 1

    def resume(rank):
        into = empty_state(2)
        with checkpoint.Run(tmp_path) as run:
            return run.resume(into=into), into["step"]

    assert on_ranks(2, resume) == [(stopped[0],) * 2] * 2


def test_the_handlers_of_before_come_back_when_the_run_is_closed(tmp_path):
    before = signal.getsignal(signal.SIGUSR1)
    with checkpoint.Run(tmp_path) as run:
        run.save_on(signal.SIGUSR1)
        assert not run.should_stop()
        os.kill(os.getpid(), signal.SIGUSR1)
        os.kill(os.getpid(), signal.SIGUSR1)
        assert run.should_stop()
        assert run.should_stop(), "it stays so"
    assert signal.getsignal(signal.SIGUSR1) == before


def test_an_error_in_the_training_closes_the_run_without_waiting_for_other_ranks(tmp_path):
    def train(rank):
        if rank == 1:
            with pytest.raises(ZeroDivisionError), checkpoint.Run(tmp_path):
                raise ZeroDivisionError
        else:
            run = checkpoint.Run(tmp_path)
            run.close()
        dist.barrier()
        with checkpoint.Run(tmp_path) as run:
            return run.latest()

    assert on_ranks(2, train) == [None, None]


# --- asynchronous saves -----------------------------------------------------------------------------------------------


class Handle:
    """A save that runs on until it is let go, as `checkpoint.save(..., async_op=True)` returns it."""

    stall = waited = 0.0

    def __init__(self, work):
        self.work, self.finished, self.failure, self.error = work, False, None, None

    def stalled(self, seconds, waited):
        self.stall, self.waited = seconds, waited

    def done(self):
        return self.finished

    def wait(self):
        work, self.work = self.work, lambda: None
        self.finished = True
        if self.failure is not None:
            self.error = self.failure
            raise self.error
        work()


@pytest.fixture
def handles(monkeypatch):
    """The handles of saves with async_op=True; they write when they are waited for."""
    made, real = [], checkpoint.save

    def save(state, path, *, async_op=False, **options):
        if not async_op:
            return real(state, path, **options)
        made.append(Handle(lambda: real(state, path, **options)))
        return made[-1]

    monkeypatch.setattr(run_module, "save", save)
    return made


def test_an_asynchronous_save_counts_once_it_is_whole(tmp_path, handles):
    with checkpoint.Run(tmp_path, keep=1) as run:
        saved(run, 1)
        handle = run.save(2, state(2), async_op=True)
        assert handle is handles[0]
        assert (run.steps(), run.latest(), (tmp_path / "latest").read_text()) == ([1], 1, "step-00000001\n")
        handle.finished = True
        assert (run.steps(), run.latest(), (tmp_path / "latest").read_text()) == ([2], 2, "step-00000002\n")


def test_the_next_save_waits_for_the_one_before_it(tmp_path, handles):
    with checkpoint.Run(tmp_path, keep=2) as run:
        for step in (1, 2, 3):
            run.save(step, state(step), async_op=True)
            assert [handle.finished for handle in handles] == [True] * (step - 1) + [False]
        assert run.steps() == [1, 2]
    assert all(handle.finished for handle in handles), "close waits"
    with checkpoint.Run(tmp_path) as run:
        assert run.steps() == [2, 3]


def test_old_steps_stay_if_an_asynchronous_save_fails_and_the_error_comes_with_the_next_call(tmp_path, handles):
    with checkpoint.Run(tmp_path, keep=1) as run:
        saved(run, 1)
        run.save(2, state(2), async_op=True)
        handles[0].failure = sw.CheckpointError("the disk is full")
        with pytest.raises(sw.CheckpointError, match="the disk is full"):
            saved(run, 3)
        assert run.steps() == [1]
        saved(run, 3)
        assert run.steps() == [3]


def test_should_stop_collects_a_save_that_is_done_on_all_ranks(tmp_path):
    def work(rank):
        real = checkpoint.save
        handles = []

        def save(state, path, *, async_op=False, **options):
            handles.append(Handle(lambda: real(state, path, **options)))
            return handles[-1]

        run_module.save = save
        with checkpoint.Run(tmp_path) as run:
            run.save(1, {"w": torch.ones(4)}, async_op=True)
            handles[0].finished = rank == 0
            run.should_stop()
            before = handles[0].work.__name__, run.latest()
            handles[0].finished = True
            dist.barrier()
            run.should_stop()
            return before, run.latest()

    assert on_ranks(2, work) == [(("<lambda>", None), 1)] * 2


def test_steps_that_are_saved_beside_the_training_are_kept_and_resumed(tmp_path):
    """By the process that really writes them."""

    def train(rank):
        with checkpoint.Run(tmp_path, keep=2) as run:
            state = sharded_state(0, 2)
            for step in range(1, 6):
                state = sharded_state(step, 2)
                handle = run.save(step, state, async_op=True)
                state["w"].local_tensor().zero_()  # trains on
            handle.wait()
            return run.steps(), run.latest()

    def resume(rank):
        into = empty_state(3)
        with checkpoint.Run(tmp_path) as run:
            return run.resume(into=into), into["step"], into["w"].local_tensor().sum().item()

    assert on_ranks(2, train) == [([4, 5], 5)] * 2
    found = on_ranks(3, resume)
    assert [one[:2] for one in found] == [(5, 5)] * 3
    assert sum(total for *_, total in found) == sharded_state(5, 1)["w"].sum().item()


def test_an_asynchronous_save_that_fails_on_one_rank_is_raised_on_all_by_the_next_call_of_the_run(tmp_path):
    def train(rank):
        with checkpoint.Run(tmp_path, keep=1) as run:
            run.save(1, sharded_state(1, 2))
            run.save(2, sharded_state(2, 2), async_op=True)
            run.close()
        with checkpoint.Run(tmp_path, keep=1) as run:
            run.resume(into=empty_state(2))
            if rank == 0:
                (tmp_path / "step-00000003").write_text("no folder can be made here")
            dist.barrier()
            texts = []
            for _ in range(2):
                try:
                    run.save(3, sharded_state(3, 2), async_op=True)
                    run.save(4, sharded_state(4, 2))
                except sw.ShardwiseError as error:
                    texts.append(str(error))
            return texts, run.steps()

    one, other = on_ranks(2, train)
    assert one == other
    texts, steps = one
    assert len(texts) == 2
    assert "step-00000003" in texts[0]
    assert steps == [2]
