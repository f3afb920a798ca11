"""Steps in memory: they outlive the job, one rank with its keeper may be lost, and nothing is left behind."""

import os
import re
import shutil
import signal
from contextlib import suppress

import pytest
import torch
import torch.distributed as dist
from kept import LEASE, ended_at_last, gone, keepers_of, killed_after, resumed
from models import held, numbers, same
from test_run import empty_state, sharded_state

import shardwise as sw
from shardwise import checkpoint
from shardwise.checkpoint import keeping
from shardwise.storage import keepers
from shardwise.testing import on_ranks

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning", "ignore::FutureWarning")  # torch's own


@pytest.fixture
def folder(tmp_path):
    path = tmp_path / "run"
    with ended_at_last(path):
        yield path


def is_step(found, step, ranks):
    """All ranks have resumed this step, bit-for-bit."""
    whole = torch.cat([w for *_, w in found], dim=1)
    assert [(number, value) for number, _, value, _ in found] == [(step, step)] * ranks
    same(whole, numbers(8, 4, start=step))


@pytest.mark.slow
def test_a_killed_job_resumes_from_memory_on_other_numbers_of_ranks(folder):
    killed_after(folder, 4, 1, keep=(2, 3))
    found = resumed(folder, 3, close=False)
    is_step(found, 3, 3)
    assert found[0][1] == (3, 128, 0, 0), "all of it from memory of this host"
    found = resumed(folder, 4)
    is_step(found, 3, 4)
    gone(folder)
    is_step(resumed(folder, 2), 1, 2)


def test_what_a_keeper_says_of_a_step_does_not_grow_with_the_ranks(folder):
    def said(ranks):
        def keep(rank):
            with checkpoint.Run(folder, memory=2, lease=LEASE) as run:
                run.keep(1, sharded_state(1, ranks))
                return [list(one.step.values()) for one in run._keeping._keeper.held()]

        return on_ranks(ranks, keep)[0]

    assert [len(str(values)) for values in said(4)] == [len(str(values)) for values in said(1)], "a packet has a limit"


def test_what_a_job_kept_does_not_come_back_after_one_without_memory_has_saved(folder):
    killed_after(folder, 2, 1, keep=(9,))

    def go_on(rank):
        with checkpoint.Run(folder) as run:
            into = empty_state(2)
            found = run.resume(into=into)
            run.save(2, sharded_state(2, 2))
            return found

    assert on_ranks(2, go_on) == [1, 1]
    is_step(resumed(folder, 2), 2, 2)
    gone(folder)


@pytest.mark.parametrize("lost", [0, 2])
def test_any_rank_may_be_lost_with_its_keeper(folder, lost):
    killed_after(folder, 3, keep=(7,), dead_keepers=(lost,))
    assert len(keepers_of(folder)) == 2
    found = resumed(folder, 2)
    is_step(found, 7, 2)
    assert found[0][1].memory == 128


def test_what_is_not_in_memory_any_more_is_read_from_the_same_step_on_the_disk(folder):
    killed_after(folder, 4, 5, dead_keepers=(1, 2))
    found = resumed(folder, 3)
    is_step(found, 5, 3)
    assert found[0][1] == (5, 96, 0, 32), "of the file of rank 1 both copies are lost"


def test_a_step_that_is_lost_in_memory_gives_way_to_the_one_on_the_disk(folder):
    killed_after(folder, 4, 5, keep=(6,), dead_keepers=(1, 2))
    found = resumed(folder, 3)
    is_step(found, 5, 3)
    assert found[0][1] == (5, 96, 0, 32), "it is held, too"


def test_a_lost_step_that_was_never_on_the_disk_does_not_block_a_new_start(folder):
    killed_after(folder, 3, keep=(1,), dead_keepers=(0, 1))
    assert [step for step, *_ in resumed(folder, 2)] == [None, None]


def test_nothing_is_left_after_the_lease(folder):
    def train(rank):
        run = checkpoint.Run(folder, memory=2, lease=0.5)
        run.keep(1, sharded_state(1, 2))
        assert run.steps() == []
        dist.barrier()
        os.kill(os.getpid(), signal.SIGKILL)

    on_ranks(2, train, dying=range(2))
    gone(folder)


def test_a_keeper_that_is_killed_is_replaced(folder):
    def train(rank):
        run = checkpoint.Run(folder, memory=2, lease=LEASE)
        run.keep(1, sharded_state(1, 2))
        if rank == 1:
            os.kill(run._keeping._keeper._process.pid, signal.SIGKILL)
        run.keep(2, sharded_state(2, 2))
        run.keep(3, sharded_state(3, 2))
        dist.barrier()
        os.kill(os.getpid(), signal.SIGKILL)

    on_ranks(2, train, dying=range(2))
    is_step(resumed(folder, 2), 3, 2)
    gone(folder)


def test_a_keeper_that_stands_still_is_replaced_and_its_memory_is_not_written_again(folder, monkeypatch):
    monkeypatch.setattr(keepers, "PATIENCE", 2.0)

    def train(rank):
        run = checkpoint.Run(folder, memory=2, lease=LEASE)
        run.keep(1, sharded_state(1, 2))
        run.keep(2, sharded_state(2, 2))
        memory = run._keeping._held[-1].files[0].memory
        before = memory.clone()
        if rank == 1:
            os.kill(run._keeping._keeper._process.pid, signal.SIGSTOP)
        for step in (3, 4, 5):
            run.keep(step, sharded_state(step, 2))
        if rank == 1:
            same(memory, before)
        assert len(keepers_of(folder)) == 2
        into = empty_state(2)
        assert run.resume(into=into) == into["step"] == 5
        run.close()

    on_ranks(2, train)
    gone(folder)


def test_memory_that_is_not_there_is_refused_before_anything_is_written(folder, monkeypatch):
    def train(rank):
        run = checkpoint.Run(folder, memory=2, lease=LEASE)
        run.save(1, sharded_state(1, 2))
        if rank == 1:
            monkeypatch.setattr(keeping, "available_memory", lambda: 2**16)
        with pytest.raises(sw.CheckpointError) as error:
            run.save(2, {"w": held(torch.zeros(2**17), f"{2**17}/S0@2"), "step": 2})
        into = empty_state(2)
        assert run.resume(into=into) == 1
        assert run.steps() == [1]
        run.close()
        return str(error.value)

    one, other = on_ranks(2, train)
    assert one == other
    assert re.search(r"memory=2 needs 1.99 MiB .* which has 64.00 KiB left", one)


def test_files_in_memory_are_those_on_the_disk_byte_for_byte(folder):
    """Those that a rank holds for another one, too: also of tensors of odd sizes, dtypes and replicas."""

    def train(rank):
        whole = torch.arange(21.0)
        state = {
            "bytes": held(torch.arange(7, dtype=torch.uint8), "7/boxes=0:3+3:7@2"),
            "complex": held(torch.complex(whole, -whole).reshape(7, 3), "7x3/S1@2"),
            "brain": held(whole.bfloat16(), "21/S0@2"),
            "empty": torch.zeros(0, 3),
            "double": torch.tensor(2.0, dtype=torch.float64),
            "both": torch.arange(2**21),
            "nested": [{"n": 3, "t": torch.ones(2, dtype=torch.bool)}],
        }
        state["tied"] = state["both"]
        run = checkpoint.Run(folder, memory=2, lease=LEASE)
        run.save(4, state)
        (step,) = run._keeping.find(run._callers("test"))[4]
        files = {}
        for address, names in step.hosts[run._keeping.host]:
            with keeping.KeeperConnection(address) as keeper:
                for name, file in zip(names, keeper.fetch(step.token, names), strict=True):
                    files.setdefault(name, []).append(os.pread(file, step.sizes[name], 0))
                    os.close(file)
        run.close()
        return files

    for files in on_ranks(2, train):
        on_disk = {path.name: path.read_bytes() for path in (folder / "step-00000004").iterdir()}
        assert {len(copies) for copies in files.values()} == {2}
        assert files.keys() == {name for name in on_disk if not name.endswith(".sums.json")}
        for name, copies in files.items():
            assert copies[0] == copies[1] == on_disk[name]


@pytest.mark.parametrize("format", ["safetensors", "dcp"])
def test_all_of_a_state_comes_back_from_memory_as_from_the_disk(folder, format):
    def made(rank, value):
        whole = torch.full((6, 5), value)
        return {
            "model": {"w": held(whole.bfloat16(), "6x5/S0@2"), "c": torch.full((3,), value, dtype=torch.complex64)},
            "list": [value, {"name": str(value)}],
            "random": checkpoint.random_state(),
        }

    def train(rank):
        torch.manual_seed(rank)
        run = checkpoint.Run(folder, memory=2, lease=LEASE)
        run.save(4, made(rank, 2.5), format=format)
        drawn = torch.rand(3).tolist()
        shutil.rmtree(folder / "step-00000004") if rank == 0 else None
        dist.barrier()
        into = made(rank, 0.0)
        assert run.resume(into=into) == 4
        run.close()
        assert torch.rand(3).tolist() == drawn
        return into["model"]["w"].local_tensor(), into["model"]["c"], into["list"], run.resumed.disk

    for w, c, values, disk in on_ranks(2, train):
        same(w, torch.full((3, 5), 2.5).bfloat16())
        same(c, torch.full((3,), 2.5, dtype=torch.complex64))
        assert (values, disk) == ([2.5, {"name": "2.5"}], 0)


def test_what_all_ranks_have_is_not_sent_again(folder):
    """Only the shards travel to their second place."""

    def train(rank):
        state = {
            "all": torch.arange(1000.0),
            "w": held(numbers(8, 4), "8x4/S0@4"),
            "two": held(numbers(8, 4), "8x4/S0,R@2x2"),
        }
        run = checkpoint.Run(folder, memory=2, lease=LEASE)
        run.keep(1, state)
        plan = run._keeping._job._job.plan
        run.close()
        return {one.link.source: one.plan.bytes_moved for one in plan.links}

    assert on_ranks(4, train)[0] == {"all": 0, "w": 128, "two": 0}


def test_keeps_are_refused_without_memory_and_with_steps_that_do_not_rise(folder):
    with checkpoint.Run(folder) as run, pytest.raises(sw.CheckpointError, match="memory="):
        run.keep(1, {"w": torch.zeros(2)})
    for options in ({"memory": 0}, {"memory": 2.0}, {"memory": 2, "lease": 0}, {"memory": 2, "lease": float("inf")}):
        with pytest.raises(ValueError, match=r"(memory|lease)="):
            checkpoint.Run(folder, **options)
    killed_after(folder, 2, keep=(5,))
    with checkpoint.Run(folder, memory=1, lease=LEASE) as run:
        with pytest.raises(sw.CheckpointError, match="has step 5"):
            run.keep(5, {"w": torch.zeros(2)})
        run.keep(6, {"w": torch.zeros(2)})
    gone(folder)


def test_a_run_that_goes_back_forgets_later_steps(folder):
    killed_after(folder, 2, 1, keep=(2, 3))

    def train(rank):
        run = checkpoint.Run(folder, memory=2, lease=LEASE)
        assert run.resume(into=empty_state(2), step=1) == 1
        run.keep(2, sharded_state(20, 2))
        dist.barrier()
        os.kill(os.getpid(), signal.SIGKILL)

    on_ranks(2, train, dying=range(2))
    found = resumed(folder, 2)
    assert [(step, value) for step, _, value, _ in found] == [(2, 20)] * 2


def test_a_folder_that_was_made_anew_has_nothing_in_memory(folder):
    killed_after(folder, 2, keep=(5,))
    with ended_at_last(folder):
        before = keepers_of(folder)
        shutil.rmtree(folder)
        assert [step for step, *_ in resumed(folder, 2)] == [None, None]
        for process in before.values():
            os.kill(process, signal.SIGKILL)


def test_what_an_earlier_job_left_on_lost_hosts_does_not_count(folder):
    """Its keepers come back when another job has already gone on from an older step."""
    killed_after(folder, 2, 1, keep=(9,))
    old = keepers_of(folder)
    aside = {address: f"{os.path.dirname(address)}/away-{os.path.basename(address)}" for address in old}
    for address, away in aside.items():
        os.rename(address, away)
    killed_after_resume(folder)
    for address, away in aside.items():
        os.rename(away, address)
    found = resumed(folder, 2)
    is_step(found, 2, 2)


def killed_after_resume(folder):
    def train(rank):
        run = checkpoint.Run(folder, memory=2, lease=LEASE)
        assert run.resume(into=empty_state(2)) == 1
        run.keep(2, sharded_state(2, 2))
        dist.barrier()
        os.kill(os.getpid(), signal.SIGKILL)

    on_ranks(2, train, dying=range(2))


def test_after_close_nothing_is_left_and_after_an_error_of_one_rank_all_is(folder):
    def train(rank):
        with suppress(ZeroDivisionError), checkpoint.Run(folder, memory=2, lease=LEASE) as run:
            run.keep(1, sharded_state(1, 2))
            raise ZeroDivisionError

    on_ranks(2, train)
    is_step(resumed(folder, 2), 1, 2)
    gone(folder)


def test_saves_of_what_changed_are_whole_in_memory(folder):
    """On the disk they lack what did not change. So lost files of them are not taken from there one by one."""

    def train(rank):
        run = checkpoint.Run(folder, memory=2, lease=LEASE)
        for step in (1, 2):
            report = run.save(step, {**sharded_state(step, 3), "frozen": torch.arange(1000.0)}, incremental=True)
        dist.barrier()
        if rank != 2:
            os.kill(run._keeping._keeper._process.pid, signal.SIGKILL)
        assert report.referenced or rank
        os.kill(os.getpid(), signal.SIGKILL)

    on_ranks(3, train, dying=range(3))
    found = resumed(folder, 2)
    is_step(found, 2, 2)
    assert found[0][1].memory == 0, "two of three files are lost"
