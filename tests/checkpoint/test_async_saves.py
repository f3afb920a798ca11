"""Saves beside training: what is saved is what the state was when `save` was called; the rest is done by others."""

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from checkpoints import all_of, has, names_in, same_tensors
from hypothesis import given, settings
from hypothesis import strategies as st
from models import held, numbers

import shardwise as sw
from shardwise import checkpoint
from shardwise.checkpoint import async_saves
from shardwise.checkpoint.async_saves import RunningSaves
from shardwise.checkpoint.staging import SaveMemory, StagedFile
from shardwise.job.agree import Callers
from shardwise.storage import locks
from shardwise.storage.background import WriterProcess
from shardwise.testing import on_ranks

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning", "ignore::FutureWarning")  # torch's own, as it loads
FORMATS = ("safetensors", "dcp")
ODD = [  # they begin anywhere in a file; safetensors cannot hold the last one
    torch.arange(3, dtype=torch.uint8),
    torch.tensor([True, False, True]),
    numbers(5, 3),
    numbers(4).to(torch.bfloat16),
    torch.view_as_complex(numbers(6, 2)),
    torch.view_as_complex(numbers(3, 2)),
    numbers(7).to(torch.float8_e4m3fn),
    numbers(6, 5).T,
    numbers(9, 4)[::2, 1:3],
    torch.tensor(3, dtype=torch.int64),
    torch.empty(0, 4),
    numbers(8, 2).double(),
    torch.view_as_complex(numbers(3, 2).double()),
]
KINDS = {"safetensors": ODD[:-1], "dcp": ODD}


def state(start, owners):
    rows = numbers(12, 4, start=start)
    return {"w": held(rows, f"12x4/S0@{owners}") if owners > 1 else rows, "r": numbers(5, start=start), "step": start}


def is_saved(path, start):
    has(path, {"w": numbers(12, 4, start=start), "r": numbers(5, start=start)}, {"step": start})


def change(tensors):
    for tensor in tensors.values():
        if isinstance(tensor, sw.ShardedTensor):
            tensor = tensor.local_tensor()
        if isinstance(tensor, torch.Tensor):
            tensor.fill_(-1)


def writer():
    """The process that writes for this one."""
    return RunningSaves.of(Callers("save", None)).process()._process


@pytest.mark.parametrize("count", [1, 2, 3])
@pytest.mark.parametrize("format", FORMATS)
def test_what_is_saved_is_what_the_state_was(tmp_path, format, count):
    def run(rank):
        for step in range(3):
            tensors = state(100 * step, count)
            handle = checkpoint.save(tensors, tmp_path / str(step), format=format, async_op=True)
            change(tensors)
            if step != 1:  # the next save waits for it
                handle.wait()
        return handle.done(), handle.error, repr(handle)

    for done, error, shown in on_ranks(count, run):
        assert (done, error) == (True, None)
        assert shown.endswith("2', complete)")
    for step in range(3):
        is_saved(tmp_path / str(step), 100 * step)
        assert not [name for name in names_in(tmp_path / str(step)) if name.startswith(".") and name != ".metadata"]


@pytest.mark.parametrize("format", FORMATS)
def test_files_are_the_same_as_those_of_a_save_that_waits(tmp_path, format):
    tensors = {str(at): tensor for at, tensor in enumerate(KINDS[format])} | {"value": [1, {"a": "b"}]}
    checkpoint.save(tensors, tmp_path / "a", format=format)
    checkpoint.save(tensors, tmp_path / "b", format=format, async_op=True).wait()

    def data(path):
        (name,) = [name for name in names_in(path) if name.endswith((".safetensors", ".distcp"))]
        token = name.split(".")[0][-16:]
        return Path(path, name).read_bytes().replace(token.encode(), b"0" * 16)

    assert data(tmp_path / "a") == data(tmp_path / "b")


@settings(max_examples=25)
@given(order=st.lists(st.integers(0, len(ODD) - 2), min_size=1, max_size=8), format=st.sampled_from(FORMATS))
def test_any_tensors_in_any_order(tmp_path_factory, order, format):
    path = tmp_path_factory.mktemp("any") / "checkpoint"
    tensors = {f"{at}": KINDS[format][number] for at, number in enumerate(order)}
    checkpoint.save(tensors, path, format=format, async_op=True).wait()
    same_tensors(all_of(path)[0], tensors)
    shutil.rmtree(path)


def test_torch_loads_what_is_written_beside_training(tmp_path):
    tensors = {"a": numbers(6, 5), "deep": {"b": numbers(300, 40)}, "step": 3}
    checkpoint.save(tensors, tmp_path, format="dcp", async_op=True).wait()
    found = {"a": torch.zeros(6, 5), "deep": {"b": torch.zeros(300, 40)}, "step": 0}
    torch.distributed.checkpoint.load(found, checkpoint_id=tmp_path, no_dist=True)
    torch.testing.assert_close(found, tensors, rtol=0, atol=0)


@pytest.mark.slow
def test_the_process_that_writes_has_no_torch_and_ends_with_this_one(tmp_path):
    program = f"""
import torch
from shardwise import checkpoint
from shardwise.checkpoint.async_saves import RunningSaves
from shardwise.job.agree import Callers
checkpoint.save({{"w": torch.ones(4)}}, {str(tmp_path)!r}, async_op=True).wait()
print(RunningSaves.of(Callers("save", None)).process()._process.pid, flush=True)
input()
"""
    with subprocess.Popen([sys.executable, "-c", program], stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        pid = int(process.stdout.readline())
        mapped = Path(f"/proc/{pid}/maps").read_text()
        assert "numpy" in mapped
        assert "libtorch" not in mapped
        process.stdin.write(b"\n")
        process.stdin.close()
    gone(pid)


def gone(pid):
    end = time.monotonic() + 30
    while Path(f"/proc/{pid}").exists() and "Z" not in Path(f"/proc/{pid}/stat").read_text().split()[2]:
        assert time.monotonic() < end
        time.sleep(0.02)


# --- errors -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("victim", [0, 1])
def test_a_writer_that_is_killed_is_an_error_on_all_ranks_and_leaves_the_checkpoint_before(tmp_path, victim):
    def run(rank):
        checkpoint.save(state(1, 2), tmp_path, async_op=True).wait()
        process = writer()
        if rank == victim:
            process.send_signal(signal.SIGSTOP)  # so that it cannot have finished
        handle = checkpoint.save(state(2, 2), tmp_path, async_op=True)
        if rank == victim:
            process.kill()
        with pytest.raises(sw.CheckpointError, match=rf"failed: on rank {victim}, the process that writes") as error:
            handle.wait()
        assert handle.error is error.value
        with pytest.raises(sw.CheckpointError):
            handle.wait()
        checkpoint.save(state(3, 2), tmp_path / "next", async_op=True).wait()
        return str(error.value)

    first, second = on_ranks(2, run)
    assert first == second
    is_saved(tmp_path, 1)
    is_saved(tmp_path / "next", 3)


def test_an_error_that_nobody_waited_for_is_raised_by_the_next_save_on_all_ranks(tmp_path):
    def run(rank):
        checkpoint.save(state(1, 2), tmp_path / "a", async_op=True).wait()
        process = writer()
        if rank == 1:
            process.send_signal(signal.SIGSTOP)
        checkpoint.save(state(2, 2), tmp_path / "b", async_op=True)
        if rank == 1:
            process.kill()
        with pytest.raises(sw.CheckpointError, match=r"save to .*b failed: on rank 1"):
            checkpoint.save(state(3, 2), tmp_path / "c")
        checkpoint.save(state(4, 2), tmp_path / "d")
        return True

    assert on_ranks(2, run) == [True, True]
    is_saved(tmp_path / "a", 1)
    is_saved(tmp_path / "d", 4)
    assert not [name for name in names_in(tmp_path / "b") if name.endswith((".safetensors", ".json"))]


@pytest.fixture
def small_disk(tmp_path):
    """A file system of 2 MiB."""
    path = tmp_path / "small"
    path.mkdir()
    if subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=2m", "none", path], check=False, capture_output=True
    ).returncode:
        pytest.skip("mounting a small file system takes root")
    yield path
    subprocess.run(["umount", path], check=True)


@pytest.mark.parametrize("format", FORMATS)
def test_a_full_disk_is_an_error_on_all_ranks_and_leaves_the_checkpoint_before(small_disk, format):
    large = sw.Layout.chunk((2**20,), 0, owners=2)

    def run(rank):
        checkpoint.save(state(1, 2), small_disk / "a", format=format, async_op=True).wait()
        tensors = {"w": sw.ShardedTensor([torch.ones(2**19)], large)}
        handle = checkpoint.save(tensors, small_disk / "a", format=format, async_op=True)
        with pytest.raises(sw.CheckpointError, match="No space left on device") as error:
            handle.wait()
        checkpoint.save(state(3, 2), small_disk / "a", format=format, async_op=True).wait()
        return str(error.value)

    first, second = on_ranks(2, run)
    assert first == second
    is_saved(small_disk / "a", 3)
    assert len(names_in(small_disk / "a")) == 3


def test_a_rank_that_is_too_late_ends_the_save_after_the_patience(tmp_path):
    def run(rank):
        checkpoint.save(state(1, 2), tmp_path, async_op=True).wait()
        process = writer()
        if rank == 1:
            process.send_signal(signal.SIGSTOP)
        handle = checkpoint.save(state(2, 2), tmp_path, async_op=True, patience=1.5)
        if rank == 0:
            assert handle._saves.running
            assert "after 1.5 s the files of 1 of 2 callers are not written" in handle.save.pending.error()
            Path(tmp_path, "go").touch()
        while not Path(tmp_path, "go").exists():
            time.sleep(0.02)
        if rank == 1:
            process.send_signal(signal.SIGCONT)
        return rank

    assert on_ranks(2, run) == [0, 1]
    Path(tmp_path, "go").unlink()
    is_saved(tmp_path, 1)


def test_options_are_checked_on_all_ranks(tmp_path):
    def run(rank):
        for options, match in [
            ({"in_flight": 0}, "in_flight=0: give the number of saves"),
            ({"patience": -1.0}, "patience=-1.0: give a finite number of seconds"),
            ({"in_flight": 1 + rank}, "the ranks disagree on the in_flight"),
        ]:
            with pytest.raises(ValueError, match=match):
                checkpoint.save(state(1, 2), tmp_path / "never", async_op=True, **options)
        return True

    assert on_ranks(2, run) == [True, True]
    assert not Path(tmp_path, "never").exists()


# --- several saves, and their ends ------------------------------------------------------------------------------------


def test_a_path_that_is_written_to_beside_training_is_refused_to_others(tmp_path):
    checkpoint.save(state(1, 1), tmp_path, async_op=True).wait()
    process = writer()
    process.send_signal(signal.SIGSTOP)
    handle = checkpoint.save(state(2, 1), tmp_path, async_op=True)
    try:
        program = f"import torch, shardwise; shardwise.checkpoint.save({{'w': torch.ones(1)}}, {str(tmp_path)!r})"
        other = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
        assert "another save or conversion is writing to" in other.stderr
    finally:
        process.send_signal(signal.SIGCONT)
    handle.wait()
    is_saved(tmp_path, 2)
    checkpoint.save(state(3, 1), tmp_path)
    is_saved(tmp_path, 3)


def test_two_saves_may_run_at_a_time(tmp_path):
    def run(rank):
        handles = [checkpoint.save(state(n, 2), tmp_path / str(n), async_op=True, in_flight=2) for n in range(5)]
        assert handles[2].done()
        assert all(0 <= handle.waited < handle.stall for handle in handles)
        for handle in reversed(handles):
            handle.wait()
        return all(handle.done() for handle in handles)

    assert on_ranks(2, run) == [True, True]
    for n in range(5):
        is_saved(tmp_path / str(n), n)


def test_memory_is_used_again_and_released(tmp_path):
    tensors = {"w": torch.ones(2**18)}
    for _ in range(3):
        checkpoint.save(tensors, tmp_path / "a", async_op=True).wait()
    memory = RunningSaves.of(Callers("save", None)).memory
    assert len(memory._spare) == 1
    assert sw.release_staging() >= 2**20
    assert memory._spare == []
    checkpoint.save(tensors, tmp_path / "b", async_op=True).wait()
    has(tmp_path / "b", tensors)


@pytest.mark.parametrize("format", FORMATS)
def test_what_is_prepared_is_ready_for_the_first_save(tmp_path, format):
    def run(rank):
        checkpoint.prepare(state(1, 2), format=format)
        prepared, pid = RunningSaves.of(Callers("save", None)).memory._spare, writer().pid
        (address,) = [one.data_ptr() for one in prepared]
        checkpoint.save(state(2, 2), tmp_path, format=format, async_op=True).wait()
        return address == prepared[0].data_ptr() and writer().pid == pid and len(prepared) == 1

    assert on_ranks(2, run) == [True, True]
    is_saved(tmp_path, 2)


@pytest.mark.parametrize("format", FORMATS)
def test_a_save_goes_on_when_all_ranks_die_after_it_has_returned(tmp_path, format):
    def run(rank):
        checkpoint.save(state(1, 3), tmp_path, format=format, async_op=True).wait()
        checkpoint.save(state(2, 3), tmp_path, format=format, async_op=True)
        os.kill(os.getpid(), signal.SIGKILL)

    with pytest.raises(Exception, match="rank"):
        on_ranks(3, run)
    end = time.monotonic() + 60
    while checkpoint.open(tmp_path).objects["step"] != 2:
        assert time.monotonic() < end
        time.sleep(0.05)
    is_saved(tmp_path, 2)


def test_a_fork_has_a_writer_of_its_own(tmp_path):
    checkpoint.save(state(1, 1), tmp_path / "a", async_op=True).wait()
    pid = writer().pid

    def run(rank):
        checkpoint.save(state(2, 2), tmp_path / "b", async_op=True).wait()
        return writer().pid

    assert len({pid, *on_ranks(2, run)}) == 3
    is_saved(tmp_path / "b", 2)


def test_object_stores_are_written_to_by_a_thread():
    path = "memory://asynchronous/checkpoint"
    for step in range(2):
        tensors = state(step, 1)
        handle = checkpoint.save(tensors, path, async_op=True)
        change(tensors)
        handle.wait()
        is_saved(path, step)


def test_ranks_in_several_groups_save_side_by_side(tmp_path):
    def run(rank):
        groups = [dist.new_group([0, 1]), dist.new_group([2, 3])]
        mine = groups[rank // 2]
        tensors = {"w": torch.full((4,), float(rank // 2)), "step": rank // 2}
        path = tmp_path / str(rank // 2)
        checkpoint.save(tensors, path, group=mine, async_op=True).wait()
        return json.loads((path / "shardwise.json").read_text())["values"]["step"]

    assert on_ranks(4, run) == [0, 0, 1, 1]


# --- where this process is, and who else is there ---------------------------------------------------------------------


class Stopped:
    """The writer of this process stands still inside."""

    def __enter__(self):
        self.process = writer()
        self.process.send_signal(signal.SIGSTOP)

    def __exit__(self, *_):
        self.process.send_signal(signal.SIGCONT)


def test_a_relative_path_means_where_the_process_was_when_it_saved(tmp_path, monkeypatch):
    for name in ("before", "then", "after"):
        Path(tmp_path, name).mkdir()
    monkeypatch.chdir(tmp_path / "before")
    writer()
    monkeypatch.chdir(tmp_path / "then")
    with Stopped():
        handle = checkpoint.save(state(1, 1), "here", async_op=True)
        monkeypatch.chdir(tmp_path / "after")
    handle.wait()
    is_saved(tmp_path / "then" / "here", 1)
    assert names_in(tmp_path / "before") == names_in(tmp_path / "after") == []
    assert len(os.listdir(tmp_path / "then" / "here")) == 3


def test_several_threads_may_wait_for_one_save_and_look_at_it(tmp_path):
    with Stopped(), ThreadPoolExecutor(3) as pool:
        handle = checkpoint.save(state(1, 1), tmp_path, async_op=True)
        waiting = [pool.submit(handle.wait) for _ in range(2)]
        with pytest.raises(TimeoutError):
            waiting[0].result(timeout=0.2)
        assert pool.submit(handle.done).result(timeout=20) is False
        writer().send_signal(signal.SIGCONT)
        assert [one.result(timeout=20) for one in waiting] == [None, None]
    is_saved(tmp_path, 1)


def test_a_wait_that_is_interrupted_can_be_repeated(tmp_path):
    def interrupt(*_):
        raise TimeoutError("enough")

    with Stopped():
        handle = checkpoint.save(state(1, 1), tmp_path, async_op=True)
        before = signal.signal(signal.SIGALRM, interrupt)
        signal.setitimer(signal.ITIMER_REAL, 0.2)
        with pytest.raises(TimeoutError, match="enough"):
            handle.wait()
        signal.signal(signal.SIGALRM, before)
        assert "running" in repr(handle)
    handle.wait()
    is_saved(tmp_path, 1)


def in_a_fork(work):
    """Run it in a child; what it returned."""
    reading, writing = os.pipe()
    child = os.fork()
    if not child:
        try:
            os.write(writing, str(work()).encode())
        finally:
            os._exit(0)
    os.close(writing)
    with open(reading) as answer:
        text = answer.read()
    os.waitpid(child, 0)
    return text


def test_a_fork_cannot_wait_for_the_saves_of_its_parent_and_shares_no_memory_with_them(tmp_path):
    tensors = {"w": torch.ones(2**14)}
    checkpoint.save(tensors, tmp_path / "a", async_op=True).wait()  # its memory is used again
    handle = checkpoint.save(tensors, tmp_path / "b", async_op=True)

    def child():
        with pytest.raises(sw.CheckpointError, match="was started by the process that this one was forked from"):
            handle.wait()
        assert not any(saves.memory._spare or saves.running for saves in async_saves._all)
        checkpoint.save({"w": torch.zeros(2**14)}, tmp_path / "c", async_op=True).wait()
        return "fine"

    assert in_a_fork(child) == "fine"
    handle.wait()
    has(tmp_path / "b", tensors)
    has(tmp_path / "c", {"w": torch.zeros(2**14)})


def test_a_writer_that_cannot_start_is_an_error_on_all_ranks_and_leaves_the_checkpoint_before(tmp_path):
    checkpoint.save(state(1, 1), tmp_path)

    def run(rank):
        with pytest.MonkeyPatch.context() as patch:
            if rank == 1:
                patch.setattr(sys, "executable", str(tmp_path / "no-python"))
            handle = checkpoint.save(state(2, 2), tmp_path, async_op=True)
            with pytest.raises(sw.CheckpointError, match=r"rank 1, .* cannot be started with '.*no-python'") as error:
                handle.wait()
            with pytest.raises(sw.CheckpointError, match=r"cannot be started with '.*no-python'"):
                checkpoint.prepare(state(2, 2))
        return str(error.value)

    first, second = on_ranks(2, run)
    assert first == second
    is_saved(tmp_path, 1)
    checkpoint.save(state(3, 1), tmp_path)
    assert len(os.listdir(tmp_path)) == 3


def test_a_save_that_no_writer_took_leaves_the_path_to_the_next(tmp_path, monkeypatch):
    with monkeypatch.context() as patch:
        patch.setattr(RunningSaves, "process", lambda saves: WriterProcess())
        patch.setattr(sys, "executable", "/no/python")
        handle = checkpoint.save(state(1, 1), tmp_path, async_op=True)
        with pytest.raises(sw.CheckpointError, match="Save without async_op=True"):
            handle.wait()
    checkpoint.save(state(2, 1), tmp_path, async_op=True).wait()
    is_saved(tmp_path, 2)
    assert len(os.listdir(tmp_path)) == 3


def test_a_writer_imports_what_this_process_does_whatever_lies_in_the_working_directory(tmp_path):
    Path(tmp_path, "json.py").write_text("raise ImportError('not this one')")
    program = """
import sys
sys.path[0] = {source!r}
import torch
from shardwise import checkpoint
checkpoint.save({{"w": torch.ones(4)}}, "saved", async_op=True).wait()
"""
    source = str(Path(sw.__file__).parents[1])
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    Path(tmp_path, "program").mkdir()
    script = tmp_path / "program" / "train.py"
    script.write_text(program.format(source=source))
    subprocess.run([sys.executable, script], cwd=tmp_path, env=environment, check=True)
    has(tmp_path / "saved", {"w": torch.ones(4)})


def test_a_writer_that_fails_early_says_why(tmp_path, monkeypatch):
    Path(tmp_path, "json.py").write_text("raise ImportError('not this one')")
    monkeypatch.syspath_prepend(tmp_path)
    saves = RunningSaves()
    monkeypatch.setattr(RunningSaves, "of", lambda callers: saves)
    with pytest.raises(sw.CheckpointError, match="not this one"):
        checkpoint.save(state(1, 1), tmp_path / "saved", async_op=True).wait()


@pytest.mark.slow
def test_nobody_waits_for_the_output_of_a_writer(tmp_path):
    program = f"""
import torch
from shardwise import checkpoint
checkpoint.save({{"w": torch.ones(4)}}, {str(tmp_path / "a")!r}, async_op=True).wait()
from shardwise.checkpoint.async_saves import RunningSaves
from shardwise.job.agree import Callers
process = RunningSaves.of(Callers("save", None)).process()._process
process.send_signal(19)
print(process.pid)
"""
    ended = subprocess.run([sys.executable, "-c", program], capture_output=True, timeout=60, check=True)
    os.kill(int(ended.stdout), signal.SIGCONT)
    gone(int(ended.stdout))


def test_memory_that_a_thread_writes_from_lives_as_long_as_the_thread():
    memory = SaveMemory().take(2**20)
    address, view = memory.data_ptr(), StagedFile("f", 2**20, memory, ()).view
    del memory
    mapped = [line.split()[0].split("-") for line in Path("/proc/self/maps").read_text().splitlines()]
    assert any(int(start, 16) <= address < int(stop, 16) for start, stop in mapped)
    assert view.nbytes == 2**20


def test_the_directory_may_become_a_file_while_the_save_runs(tmp_path):
    with Stopped():
        handle = checkpoint.save(state(1, 1), tmp_path / "here", async_op=True)
        shutil.rmtree(tmp_path / "here")
        Path(tmp_path, "here").touch()
    with pytest.raises(sw.CheckpointError, match="here cannot be written: File exists"):
        handle.wait()


@pytest.mark.parametrize("options", [{"in_flight": True}, {"patience": True}, {"patience": float("inf")}])
def test_numbers_that_are_none_are_refused(tmp_path, options):
    with pytest.raises(ValueError, match=r"give (the number|a finite number)"):
        checkpoint.save(state(1, 1), tmp_path / "never", async_op=True, **options)


def test_a_save_that_is_interrupted_leaves_the_path_to_the_next(tmp_path, monkeypatch):
    def interrupted(*_):
        raise KeyboardInterrupt

    for owner, name in ((RunningSaves, "submit"), (locks.FileLock, "write"), (locks, "_clean_up")):
        with monkeypatch.context() as patch:
            patch.setattr(owner, name, interrupted)
            with pytest.raises(KeyboardInterrupt):
                checkpoint.save(state(1, 1), tmp_path, async_op=True)
        checkpoint.save(state(2, 1), tmp_path, async_op=True).wait()
        is_saved(tmp_path, 2)
        assert len(os.listdir(tmp_path)) == 3


def test_files_have_the_permissions_that_the_process_gives_its_files_when_it_saves(tmp_path):
    writer()
    before = os.umask(0o077)
    try:
        checkpoint.save(state(1, 1), tmp_path / "secret", async_op=True).wait()
    finally:
        os.umask(before)
    checkpoint.save(state(1, 1), tmp_path / "open", async_op=True).wait()
    for name, mode in (("secret", 0o600), ("open", 0o666 & ~before)):
        assert {entry.stat().st_mode & 0o777 for entry in os.scandir(tmp_path / name)} == {mode}
