"""Saves that write only what changed: every step has its own values, whatever happens to the steps before it."""

import os
import random
import shutil
import signal
import sys
import tempfile
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from checkpoints import INDEX, has, names_in, shards_in
from hypothesis import given, settings
from hypothesis import strategies as st
from models import held, numbers, same
from test_run import folders_in, warnings_of
from test_run_crashes import Reaper

import shardwise as sw
from shardwise import checkpoint
from shardwise.checkpoint.async_saves import RunningSaves, SaveReport
from shardwise.job.agree import Callers
from shardwise.storage import locks
from shardwise.storage.sums import sums_name, with_digest
from shardwise.testing import on_ranks
from shardwise.transports import guarded_group

SIZE = 64 * 4 * 4  # bytes of a tensor `base`


def values(step, ranks=1):
    """What changes in every step, what changed in step 2 the last time, and what never does."""
    tensors = {
        "base": numbers(64, 4),
        "once": numbers(8, 4, start=min(step, 2)),
        "all": numbers(8, 4, start=100 * step),
    }
    if ranks > 1:
        tensors = {name: held(whole, f"{len(whole)}x4/S0@{ranks}") for name, whole in tensors.items()}
    return tensors | {"step": step}


def is_step(path, step):
    has(path, {name: value for name, value in values(step).items() if name != "step"}, {"step": step})


def used(path):
    """All files that a checkpoint has its tensors in."""
    return {name for entry in checkpoint.open(path).values() for name in entry.used()}


@pytest.fixture(params=["local", "memory"])
def folder(request, tmp_path):
    """An empty place for a run."""
    return str(tmp_path / "run") if request.param == "local" else f"memory://{tmp_path}/run"


@pytest.mark.parametrize("async_op", [False, True])
def test_every_step_has_its_own_values_and_writes_what_changed(folder, async_op):
    with checkpoint.Run(folder, keep=None) as run:
        reports = []
        for step in range(1, 5):
            done = run.save(step, values(step), incremental=True, async_op=async_op)
            if async_op:
                assert done.report is None
                done.wait()
            reports.append(done.report if async_op else done)
        assert [report.referenced for report in reports] == [0, SIZE, SIZE + 128, SIZE + 128]
        assert reports[0].written > SIZE + 256 > 2 * reports[1].written > 2 * reports[3].written
        for step in range(1, 5):
            is_step(run.path(step), step)
            assert checkpoint.verify(run.path(step)) == []


@settings(max_examples=8)
@given(changes=st.lists(st.sets(st.sampled_from("abc@d")), min_size=1, max_size=5))
def test_whatever_changes_is_found_again(tmp_path_factory, changes):
    path = tmp_path_factory.mktemp("any")
    state = {name: numbers(3, 5) for name in "abc@d"} | {"empty": torch.empty(0, 3)}
    states = []
    for at, some in enumerate([set(), *changes]):
        state = {name: tensor + 1 if name in some else tensor for name, tensor in state.items()}
        report = checkpoint.save(state, path / str(at), incremental=path / str(at - 1) if at else True)
        assert report.referenced == (60 * len(set("abc@d") - some) if at else 0)
        states.append(state)
    for at, state in enumerate(states):
        has(path / str(at), state)
    shutil.rmtree(path)


@pytest.mark.parametrize("async_op", [False, True])
def test_ranks_refer_to_their_own_parts_and_others_load_them(tmp_path, async_op):
    def whole(change):
        tensor = numbers(12, 4)
        tensor[6:] += change  # of rank 1
        return {"w": tensor, "r": numbers(5)}

    def train(rank):
        reports = []
        for at in range(3):
            earlier, state = (
                tmp_path / str(at - 1) if at else True,
                whole(at) | {"w": held(whole(at)["w"], "12x4/S0@2")},
            )
            done = checkpoint.save(state, tmp_path / str(at), incremental=earlier, async_op=async_op)
            if async_op:
                done.wait()
            reports.append(done.report if async_op else done)
        return reports

    first, second = on_ranks(2, train)
    assert first == second, "the report is of all ranks"
    assert [report.referenced for report in first] == [0, 6 * 16 + 20, 6 * 16 + 20]
    for at in range(3):
        has(tmp_path / str(at), whole(at))
    own, earlier = checkpoint.open(tmp_path / "2")["w"].used()
    assert own in shards_in(tmp_path / "2")
    assert earlier.removeprefix("../0/") in shards_in(tmp_path / "0")

    def resume(rank):
        into = {"w": held(torch.zeros(12, 4), "12x4/S1@3"), "r": torch.zeros(5)}
        checkpoint.load(tmp_path / "2", into, check="all")
        return into["w"].local_tensor()

    same(torch.cat(on_ranks(3, resume), dim=1), whole(2)["w"])


@pytest.mark.parametrize(("ranks", "layout"), [(2, "12x4/S1@2"), (3, "12x4/S0@3")])
def test_under_another_layout_all_is_written(tmp_path, ranks, layout):
    whole = numbers(12, 4)

    def save(name, layout, earlier):
        return checkpoint.save({"w": held(whole, layout)}, tmp_path / name, incremental=earlier).referenced

    on_ranks(2, lambda rank: save("a", "12x4/S0@2", True))
    assert on_ranks(ranks, lambda rank: save("b", layout, tmp_path / "a")) == [0] * ranks
    shutil.rmtree(tmp_path / "a")
    has(tmp_path / "b", {"w": whole})


@pytest.mark.parametrize("direct", [True, False])
def test_files_of_many_pages_are_written_as_they_are(tmp_path, direct):
    """8 MiB at a time, past the page cache where that can be."""

    def save(rank):
        state = {"same": numbers(5), "a": torch.arange(2**20 + 3), "b": torch.arange(2**21, dtype=torch.int32)}
        checkpoint.save(state, path / "1", incremental=True)
        state = {"same": numbers(5), "a": state["a"] + 1, "b": state["b"] + 1}
        report = checkpoint.save(state, path / "2", incremental=path / "1")
        has(path / "2", state)
        return report.referenced, len(checkpoint.verify(path / "2"))

    path = tmp_path if direct else Path(tempfile.mkdtemp(dir="/dev/shm"))  # which cannot
    assert on_ranks(1, save) == [(20, 0)]
    shutil.rmtree(path)


def test_the_same_bytes_of_another_dtype_or_shape_are_written(tmp_path):
    for at, tensor in enumerate([torch.zeros(4), torch.zeros(4, dtype=torch.int32), torch.zeros(2, 2).int()]):
        report = checkpoint.save({"w": tensor}, tmp_path / str(at), incremental=tmp_path / str(at - 1) if at else True)
        assert report.referenced == 0
    same(checkpoint.open(tmp_path / "1")["w"].read(), torch.zeros(4, dtype=torch.int32))


def test_tied_tensors_are_referred_to_once(tmp_path):
    def state(step):
        one = numbers(8, 4)
        return {"a": one, "b": one, "step": step}

    checkpoint.save(state(1), tmp_path / "1", incremental=True)
    assert checkpoint.save(state(2), tmp_path / "2", incremental=tmp_path / "1").referenced == 128
    has(tmp_path / "2", {"a": numbers(8, 4), "b": numbers(8, 4)}, {"step": 2})


# --- retention --------------------------------------------------------------------------------------------------------


def test_what_newer_steps_need_of_removed_ones_stays(folder):
    with checkpoint.Run(folder, keep=1) as run:
        for step in range(1, 6):
            run.save(step, values(step), incremental=True)
            assert run.steps() == [step]
            is_step(run.path(step), step)
        needed = {name.split("/")[1] for name in used(run.path(5)) if "/" in name}
        assert needed == {"step-00000001", "step-00000002"}
        with pytest.raises(sw.CheckpointError):
            checkpoint.open(run.path(1))
        if "://" not in folder:
            there = folders_in(folder)
            assert there == ["step-00000001", "step-00000002", "step-00000005"]
        run.save(6, values(6))  # whole: nothing before is needed any more
        is_step(run.path(6), 6)
    if "://" not in folder:
        assert folders_in(folder) == ["step-00000006"]


def test_a_step_that_is_kept_for_good_keeps_what_it_needs(tmp_path):
    with checkpoint.Run(tmp_path, keep=1, keep_every=4) as run:
        for step in range(1, 8):
            run.save(step, values(step), incremental=step < 5)
        assert run.steps() == [4, 7]
        is_step(run.path(4), 4)
    assert folders_in(tmp_path) == [f"step-0000000{step}" for step in (1, 2, 4, 7)]


def test_a_removal_that_is_killed_at_any_moment_breaks_no_newer_step(tmp_path):
    """Also removals by the next job, which finds what is left."""

    def train(rank):
        with checkpoint.Run(tmp_path / "start", keep=1) as run:
            for step in (1, 2, 3):
                run.save(step, values(step, 2), incremental=True)

    def reaped(path, moment):
        def work(rank):
            guarded_group.GRACE = 0.1
            processes = [None] * 2
            dist.all_gather_object(processes, os.getpid())
            run = checkpoint.Run(path, keep=1)
            run.resume(into=values(0, 2))
            handle = run.save(4, values(4, 2), incremental=True, async_op=True)
            handle.wait()
            reaper = Reaper(moment, processes)
            sys.setprofile(reaper if rank == 0 else None)
            try:
                run.steps()  # removes what is old
            except sw.ShardwiseError as error:
                return error
            finally:
                sys.setprofile(None)
            return reaper.calls

        return on_ranks(2, work, dying=range(2), patience=10)

    on_ranks(2, train)
    calls = reaped(shutil.copytree(tmp_path / "start", tmp_path / "all"), None)[0]
    for moment in [*random.Random(1).sample(range(calls), 2), calls - 1]:
        path = shutil.copytree(tmp_path / "start", tmp_path / str(moment))
        reaped(path, moment)
        with checkpoint.Run(path, keep=1) as run:
            assert run.latest() == 4
            is_step(run.path(4), 4)
            run.resume(into=values(0))
            run.save(5, values(5))
        assert folders_in(path) == ["step-00000005"], "nothing is left of the dead"


def test_files_that_a_dead_writer_has_left_on_record_stay_if_newer_steps_need_them(tmp_path):
    with checkpoint.Run(tmp_path, keep=1) as run:
        run.save(1, values(1), incremental=True)
        (name,) = shards_in(run.path(1))
        record = locks.WriterRecord.mine("f" * 16, name.split(".")[0][-16:], [])  # as if it died after its commit
        (tmp_path / "step-00000001" / locks.LOCK).write_text(record.line())
        run.save(2, values(2), incremental=True)
        run.save(3, values(3), incremental=True)
        is_step(run.path(3), 3)
        assert run.steps() == [3]


def test_an_earlier_step_that_a_running_save_is_compared_with_is_kept(tmp_path):
    with checkpoint.Run(tmp_path, keep=1) as run:
        run.save(1, values(1), incremental=True)
        process = RunningSaves.of(Callers("save", None)).process()._process
        process.send_signal(signal.SIGSTOP)
        for step in (2, 3):
            run.save(step, values(step), incremental=True, async_op=True, in_flight=2)
        process.send_signal(signal.SIGCONT)
        run.save(4, values(4), incremental=True, async_op=True, in_flight=2)
        run.save(5, values(5), incremental=True)
        assert run.steps() == [5]
        is_step(run.path(5), 5)


def test_a_line_that_went_on_from_an_earlier_step_refers_to_that(tmp_path):
    with checkpoint.Run(tmp_path, keep=None) as run:
        for step in (1, 2, 3):
            run.save(step, values(step), incremental=True)
        run.resume(into=values(0), step=1)
        assert run.save(2, values(2) | {"base": numbers(64, 4) + 1}, incremental=True).referenced == 0
        assert run.save(3, values(3) | {"base": numbers(64, 4) + 1}, incremental=True).referenced == SIZE + 128
        run.save(3, values(3), incremental=True)  # again: compared with step 2
        assert run.steps() == [1, 2, 3]
        is_step(run.path(3), 3)


# --- what is missing or damaged ---------------------------------------------------------------------------------------


@pytest.fixture
def three(tmp_path):
    """A run with three steps, of which each needs the first."""
    with checkpoint.Run(tmp_path / "run", keep=None) as run:
        for step in (1, 2, 3):
            run.save(step, values(step), incremental=True)
    return tmp_path / "run"


def test_a_folder_that_was_copied_alone_names_the_remedy(three, tmp_path):
    shutil.copytree(three / "step-00000003", tmp_path / "alone" / "step-00000003")
    with pytest.raises(sw.CheckpointError, match=r"step-00000001/shard-.* is missing.*copy both folders, or convert"):
        checkpoint.load(tmp_path / "alone" / "step-00000003", values(0))
    assert "is missing" in str(checkpoint.verify(tmp_path / "alone" / "step-00000003")[0])
    (three / "step-00000001" / "kept").mkdir()
    moved = shutil.move(three, tmp_path / "moved")
    is_step(os.path.join(moved, "step-00000003"), 3)


def test_a_converted_step_needs_no_other(three, tmp_path):
    (tmp_path / "rules.toml").write_text("mesh = {tp = 2}\nrule = [{name = '*', placements = 'S0'}]")
    rules = {"sharded": tmp_path / "rules.toml", "safetensors": None, "dcp": None}
    for format in rules:
        checkpoint.convert(three / "step-00000003", tmp_path / format, format=format, rules=rules[format])
    with pytest.raises(sw.CheckpointError, match="is the source"):
        checkpoint.convert(three / "step-00000003", three / "step-00000001", format="sharded", rules=rules["sharded"])
    shutil.rmtree(three)
    for format in rules:
        same(checkpoint.open(tmp_path / format)["base"].read(), numbers(64, 4))


def test_a_flipped_bit_in_an_earlier_step_is_named_there(three):
    (name,) = shards_in(three / "step-00000001")
    data = bytearray((three / "step-00000001" / name).read_bytes())
    start = checkpoint.open(three / "step-00000003")["base"].ranges()[0][1].start
    data[start + 5] ^= 1
    (three / "step-00000001" / name).write_bytes(data)
    with pytest.raises(sw.CheckpointError, match=rf"step-00000001/{name}, bytes .*base"):
        checkpoint.load(three / "step-00000003", values(0), check="all")
    assert "step-00000001" in str(checkpoint.verify(three / "step-00000003")[0])


def test_only_what_is_needed_of_an_earlier_step_is_verified(tmp_path):
    big = {"kept": numbers(2**19), "changed": numbers(2**20)}
    checkpoint.save(big, tmp_path / "1", incremental=True)
    changed = checkpoint.open(tmp_path / "1")["changed"].ranges()[0][1]
    checkpoint.save(big | {"changed": big["changed"] + 1}, tmp_path / "2", incremental=tmp_path / "1")
    with (tmp_path / "1" / changed.file).open("r+b") as file:
        file.seek(changed.stop - 7)
        file.write(b"!")
    assert [damage.tensors[0][0] for damage in checkpoint.verify(tmp_path / "1")] == ["changed"]
    assert checkpoint.verify(tmp_path / "2") == []


def test_a_step_whose_earlier_files_are_lost_is_not_resumed(three, caplog):
    shutil.rmtree(three / "step-00000002")
    with checkpoint.Run(three) as run, warnings_of(caplog) as messages:
        assert run.steps() == [1]
        into = values(0)
        assert run.resume(into=into) == 1
        same(into["all"], values(1)["all"])
    assert any("step-00000002/shard-" in message and "missing" in message for message in messages)


@pytest.mark.parametrize("lost", ["data", "sums", "damaged sums"])
def test_what_cannot_be_compared_is_written(tmp_path, lost):
    checkpoint.save(values(1), tmp_path / "1", incremental=True)
    (name,) = shards_in(tmp_path / "1")
    path = tmp_path / "1" / (name if lost == "data" else sums_name(name))
    if lost == "damaged sums":
        path.write_bytes(path.read_bytes().replace(b"base", b"bass"))
    else:
        path.unlink()
    assert checkpoint.save(values(2), tmp_path / "2", incremental=tmp_path / "1").referenced == 0
    shutil.rmtree(tmp_path / "1")
    is_step(tmp_path / "2", 2)


def test_what_was_not_saved_incrementally_is_written(tmp_path):
    with checkpoint.Run(tmp_path) as run:
        run.save(1, values(1))
        assert run.save(2, values(2), incremental=True).referenced == 0
        run.save(3, values(3), format="dcp")
        assert run.save(4, values(4), incremental=True).referenced == SIZE + 128
        is_step(run.path(4), 4)


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ('"step-00000001": {', '"..": {'),
        ('"step-00000001": {', '"a/b": {'),
        ("[[0], ", "[[1], "),
        ("[[0], ", "[[-1], "),
        ('{"0": ', '{"x": '),
        ('"tensors": [', '"tensor": ['),
    ],
)
def test_an_index_that_leads_elsewhere_is_refused(three, old, new):
    index = three / "step-00000003" / INDEX
    start, earlier = index.read_text().split('"earlier": ')
    text = f'{start}"earlier": {earlier.replace(old, new)}'
    assert text != index.read_text()
    index.write_bytes(with_digest(text.split(',\n "digest"')[0].encode() + b"\n}"))
    with pytest.raises(sw.CheckpointError, match="its field 'earlier' is invalid"):
        checkpoint.open(three / "step-00000003")


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"format": "dcp", "incremental": True}, "only checkpoints with format='safetensors'"),
        ({"sums": False, "incremental": True}, "and sums=True can be incremental"),
        ({"incremental": "elsewhere/a"}, "is not beside"),
        ({"incremental": "b"}, "is not beside"),
        ({"incremental": "nothing"}, "has no shardwise.json"),
    ],
)
def test_what_cannot_be_incremental_is_refused_before_anything_is_written(tmp_path, monkeypatch, options, text):
    monkeypatch.chdir(tmp_path)
    with pytest.raises((ValueError, sw.CheckpointError), match=text):
        checkpoint.save(values(1), "b", **options)
    assert names_in(tmp_path) == []


def test_a_report_shows_both_amounts():
    assert repr(SaveReport(2**20, 2**30)) == "SaveReport(1.00 MiB written, 1.00 GiB in earlier checkpoints)"
    with pytest.raises(TypeError, match="a run knows the step before"), checkpoint.Run("memory://typed") as run:
        run.save(1, values(1), incremental="step-1")
