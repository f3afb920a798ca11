"""Saves that die or fail at any moment: a directory has the old checkpoint or the new one, whole, and no leftovers."""

import errno
import os
import random
import shutil
import signal
import sys
from pathlib import Path

import pytest
import torch.distributed as dist
from checkpoints import INDEX, has, held, names_in, numbers, same
from ranks import ranks  # noqa: F401

import shardwise as sw
from shardwise import checkpoint
from shardwise.testing import on_ranks

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning", "ignore::FutureWarning")  # torch's own, as it saves
FORMATS = ("safetensors", "dcp")
INDEXES = {"safetensors": INDEX, "dcp": ".metadata"}
WHOLES = {"w": (12, 4), "deep.r": (5,), "deep.s": ()}
FILE_CALLS = {"open", "write", "flush", "fsync", "replace", "close", "scandir", "unlink", "mkdir", "dump"}


def whole(start):
    """All tensors, whole; `start` tells one checkpoint from another."""
    return {name: numbers(*shape, start=start) for name, shape in WHOLES.items()}


def state(start, owners):
    """A state dict of them: sharded, replicated, and a scalar; and a value."""
    tensors = whole(start)
    rows = held(tensors["w"], f"12x4/S0@{owners}") if owners > 1 else tensors["w"]
    return {"w": rows, "deep": {"r": tensors["deep.r"], "s": tensors["deep.s"]}, "start": start}


def is_checkpoint(path, start):
    has(path, whole(start), {"start": start})


def which(path):
    """Which of the checkpoints it is; all values are of that one."""
    start = checkpoint.open(path).objects["start"]
    is_checkpoint(path, start)
    return start


def foreign(path):
    """Files of others, some with names much like ours, that nobody may touch; and how to see that they are there."""
    texts = {"notes.txt": "mine", "shard-00000-of-00002.txt": "mine", "__0_0.txt": "mine", f"{INDEX}.bak": "{}"}
    for name, text in texts.items():
        Path(path, name).write_text(text)
    Path(path, "shard-00000-of-00001-00.safetensors").mkdir()
    return [*texts, "shard-00000-of-00001-00.safetensors"]


@pytest.fixture(scope="module", params=FORMATS)
def old(request, tmp_path_factory):
    """A directory with a checkpoint of three ranks, and files of others."""
    path = tmp_path_factory.mktemp("old") / "checkpoint"
    on_ranks(3, lambda rank: checkpoint.save(state(1, 3), path, format=request.param))
    return request.param, path, foreign(path)


class Reaper:
    """Kills processes at a moment of this one: just before or after call number `moment` of a function in C.

    Calls that have to do with files are also listed apart, as moments worth dying at.
    """

    def __init__(self, moment=None, doomed=()):
        self.moment, self.doomed, self.calls, self.file_calls = moment, doomed, 0, []

    def __call__(self, frame, event, what):
        if event not in ("c_call", "c_return"):
            return
        if self.calls == self.moment:
            for process in sorted(self.doomed, key=os.getpid().__eq__):  # itself last
                os.kill(process, signal.SIGKILL)
        if what.__name__ in FILE_CALLS:
            self.file_calls.append(self.calls)
        self.calls += 1


def reaped(count, path, format, watched, victims, moment=None):
    """Save 2 over what is there, on so many ranks, and let victims die at a moment of the watched rank.

    Returns for every rank what it said: its moments, the error, or None where it died.
    """

    def run(rank):
        processes = [None] * count
        dist.all_gather_object(processes, os.getpid())
        new, reaper = state(2, count), Reaper(moment, [processes[victim] for victim in victims])
        sys.setprofile(reaper if rank == watched else None)
        try:
            checkpoint.save(new, path, format=format)
        except sw.ShardwiseError as error:
            return error
        finally:
            sys.setprofile(None)
        return reaper.calls, reaper.file_calls

    return on_ranks(count, run, dying=range(count), patience=10)


@pytest.fixture(scope="module")
def moments(old, tmp_path_factory):
    """For each of three ranks how many calls a save has, and which of them have to do with files."""
    format, path, _ = old

    def one(rank):
        copy = shutil.copytree(path, tmp_path_factory.mktemp("moments") / "copy")
        return reaped(3, copy, format, rank, [])[rank]

    return [one(rank) for rank in range(3)]


def worth_dying_at(moments, draw, most):
    """Calls that have to do with files, and some of those that come after the last of them."""
    calls, file_calls = moments
    late = draw.sample(range(file_calls[-1], calls), 4)
    return sorted({*draw.sample(file_calls, min(most, len(file_calls))), *file_calls[-4:], *late})


@pytest.mark.parametrize(("count", "watched", "victims"), [(2, 0, [0]), (2, 0, [1]), (2, 0, [0, 1]), (3, 1, [1])])
def test_a_killed_save_leaves_the_old_checkpoint_or_the_new_one(old, moments, tmp_path, count, watched, victims):
    format, path, theirs = old
    found = []
    for moment in worth_dying_at(moments[watched], random.Random(f"{format}{watched}{victims}"), 12):
        copy = shutil.copytree(path, tmp_path / str(moment))
        said = reaped(count, copy, format, watched, victims, moment)
        assert all(isinstance(one, sw.ExchangeError | tuple | None) for one in said)
        try:
            found.append(which(copy))
        except sw.CheckpointError as error:
            pytest.fail(f"killed at call {moment} of {moments[watched][0]}, it is no checkpoint any more: {error}")
        checkpoint.save(state(3, 1), copy, format=format)
        is_checkpoint(copy, 3)
        only_one_file(copy, format, theirs)
    assert set(found) <= {1, 2}


def only_one_file(path, format, theirs):
    """There is an index, a file of tensors, and what others have put there; nothing is left of other saves."""
    ours = [name for name in names_in(path) if name not in theirs]
    assert len(ours) == 2, f"leftovers: {ours}"
    assert INDEXES[format] in ours
    assert set(theirs) <= set(names_in(path))


@pytest.mark.parametrize("format", FORMATS)
@pytest.mark.parametrize("victims", [[0], [1], [0, 1]])
def test_a_first_save_that_is_killed_does_not_look_like_a_checkpoint(moments, old, tmp_path, victims, format):
    if old[0] != format:
        pytest.skip("the moments are those of the other format")
    unfinished = 0
    for moment in worth_dying_at(moments[victims[0]], random.Random(f"{format}{victims}"), 8):
        path = tmp_path / str(moment)
        reaped(2, path, format, victims[0], victims, moment)
        if INDEXES[format] in (names_in(path) if path.exists() else ()):
            assert which(path) == 2
            continue
        unfinished += 1
        with pytest.raises(sw.CheckpointError, match=str(path)):
            checkpoint.open(path)
        checkpoint.save(state(3, 1), path, format=format)
        only_one_file(path, format, [])
    assert unfinished


@pytest.mark.parametrize("format", FORMATS)
def test_saves_over_others_of_more_and_of_fewer_ranks_leave_nothing_of_them(tmp_path, format):
    for start, count in enumerate((4, 1, 3, 2)):
        on_ranks(count, lambda rank, start=start, count=count: checkpoint.save(state(start, count), tmp_path, format=format))
        is_checkpoint(tmp_path, start)
        assert len(names_in(tmp_path)) == count + 1


class Breaking:
    """Lets call number `at` of the functions of the system that saving uses fail on this rank."""

    CALLS = ("fsync", "replace", "scandir", "unlink", "makedirs")

    def __init__(self, at, error):
        self.at, self.error, self.calls, self.real = at, error, 0, {name: getattr(os, name) for name in self.CALLS}

    def __enter__(self):
        for name, real in self.real.items():
            setattr(os, name, self.breaking(real))
        return self

    def __exit__(self, *_):
        for name, real in self.real.items():
            setattr(os, name, real)

    def breaking(self, real):
        def call(*args, **options):
            self.calls += 1
            if self.calls - 1 == self.at:
                raise self.error
            return real(*args, **options)

        return call


def full_disk():
    return OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


@pytest.mark.parametrize("failing", [0, 1])
def test_a_disk_that_fails_on_one_rank_raises_on_all_and_changes_nothing(old, tmp_path, failing):
    format, path, _ = old
    before = names_in(path)
    copies = [shutil.copytree(path, tmp_path / str(at)) for at in range(14)]

    def run(rank):
        said = []
        for at, copy in enumerate(copies):
            with Breaking(at if rank == failing else None, full_disk()) as broken:
                try:
                    checkpoint.save(state(2, 2), copy, format=format)
                except sw.CheckpointError as error:
                    said.append(str(error))
                else:
                    said.append(None)
            dist.barrier()
        return said, broken.calls

    (said, calls), (other, _) = on_ranks(2, run)
    assert said == other
    assert (calls, said[-1])[failing] in (None, calls)
    for at, (copy, text) in enumerate(zip(copies, said, strict=True)):
        found = which(copy)
        if text is None:
            assert found == 2
            continue
        assert os.strerror(errno.ENOSPC) in text
        assert str(copy) in text
        assert (at, found) == (at, 1)
        assert (at, names_in(copy)) == (at, before)


@pytest.mark.parametrize("error", [full_disk(), KeyboardInterrupt()], ids=["disk", "keyboard"])
def test_a_process_alone_that_fails_or_is_interrupted_at_any_call_loses_nothing(old, tmp_path, error):
    format, path, theirs = old
    before, seen = names_in(path), set()
    for at in range(100):
        copy = shutil.copytree(path, tmp_path / str(at))
        with Breaking(at, error) as broken:
            try:
                checkpoint.save(state(2, 1), copy, format=format)
            except (sw.CheckpointError, KeyboardInterrupt):
                seen.add("raised")
            else:
                seen.add("saved")
                assert (at, which(copy)) == (at, 2)
        assert (at, which(copy) in (1, 2)) == (at, True)
        assert which(copy) == 2 or names_in(copy) == before, f"call {at}: {names_in(copy)}"
        if broken.calls <= at:
            break
    only_one_file(copy, format, theirs)
    assert seen == {"raised", "saved"}


def test_a_file_that_may_not_grow_raises_on_all_ranks(old, tmp_path):
    """By a limit of the system on one rank: the error comes in the middle of a real write."""
    format, path, _ = old
    copy, before = shutil.copytree(path, tmp_path / "copy"), names_in(path)

    def run(rank):
        import resource

        if rank == 1:
            resource.setrlimit(resource.RLIMIT_FSIZE, (300, resource.RLIM_INFINITY))
        with pytest.raises(sw.CheckpointError) as error:
            checkpoint.save(state(2, 3), copy, format=format)
        resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
        assert not checkpoint.save(state(2, 3), f"{copy}2", format=format), "the group can be used after that"
        return str(error.value)

    said = on_ranks(3, run)
    assert said == [said[0]] * 3
    assert os.strerror(errno.EFBIG) in said[0]
    assert "rank 1 " in said[0]
    is_checkpoint(copy, 1)
    is_checkpoint(f"{copy}2", 2)
    assert names_in(copy) == before


@pytest.mark.parametrize("format", FORMATS)
def test_a_path_that_leads_through_a_file_is_refused_everywhere(tmp_path, format):
    (tmp_path / "file").write_text("mine")

    def run(rank):
        with pytest.raises(sw.CheckpointError, match=r"file/below cannot be written: Not a directory") as error:
            checkpoint.save(state(1, 2), tmp_path / "file" / "below", format=format)
        return str(error.value)

    said = on_ranks(2, run)
    assert said[0] == said[1]
    assert names_in(tmp_path) == ["file"]


def test_another_format_in_the_same_directory_is_refused(old, tmp_path):
    format, path, _ = old
    copy, before = shutil.copytree(path, tmp_path / "copy"), names_in(path)
    other = next(one for one in FORMATS if one != format)

    def run(rank):
        with pytest.raises(sw.CheckpointError, match=f"copy has a checkpoint of format '{format}'") as error:
            checkpoint.save(state(2, 2), copy, format=other)
        return str(error.value)

    said = on_ranks(2, run)
    assert said[0] == said[1]
    is_checkpoint(copy, 1)
    assert names_in(copy) == before


@pytest.mark.parametrize("where", ["", "file://", "memory:/"])
def test_a_value_that_cannot_be_stored_leaves_the_old_checkpoint(tmp_path, where):
    path = f"{where}{tmp_path}"
    checkpoint.save(state(1, 1), path)
    with pytest.raises(sw.CheckpointError, match="'later' is object, which is not stored"):
        checkpoint.save({**state(2, 1), "later": object()}, path)
    is_checkpoint(path, 1)
    assert len(checkpoint.open(path).files.names()) == 2


def test_one_that_was_opened_before_another_was_saved_says_which_file_is_gone(tmp_path):
    checkpoint.save(state(1, 1), tmp_path)
    seen, unseen = checkpoint.open(tmp_path), checkpoint.open(tmp_path)
    same(seen["w"].read(), whole(1)["w"])
    checkpoint.save(state(2, 1), tmp_path)
    same(seen["w"].read(), whole(1)["w"])  # it is mapped
    with pytest.raises(sw.CheckpointError, match=r"shard-00000-of-00001-\w+\.safetensors is missing"):
        unseen["w"].read()
