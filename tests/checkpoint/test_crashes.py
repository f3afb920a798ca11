"""Saves that die or fail at any moment leave the old checkpoint or the new one, whole; damaged files are refused."""

import errno
import json
import os
import random
import shutil
import signal
import sys
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from checkpoints import INDEX, all_of, has, names_in, rewritten, shards_in
from models import held, numbers, same
from safetensors.torch import save_file

import shardwise as sw
from shardwise import checkpoint
from shardwise.job.agree import Callers
from shardwise.testing import on_ranks
from shardwise.transports import guarded_group

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
        guarded_group.GRACE = 0.1  # survivors need not wait long for answers of the dead
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


def worth_dying_at(count, path, format, watched, most):
    """Moments of a save of so many ranks to a path: calls that have to do with files, and some after the last of them.

    The path is saved to.
    """
    calls, file_calls = reaped(count, path, format, watched, [])[watched]
    draw = random.Random(f"{format}{count}{watched}")
    late = draw.sample(range(file_calls[-1], calls), 2)
    return sorted({*draw.sample(file_calls, min(most, len(file_calls))), *file_calls[-3:], *late})


@pytest.mark.slow
@pytest.mark.parametrize(("count", "watched", "victims"), [(2, 0, [0]), (2, 0, [1]), (2, 0, [0, 1]), (3, 1, [1])])
def test_a_killed_save_leaves_the_old_checkpoint_or_the_new_one(old, tmp_path, count, watched, victims):
    format, path, theirs = old
    found = []
    for moment in worth_dying_at(count, shutil.copytree(path, tmp_path / "all"), format, watched, 8):
        copy = shutil.copytree(path, tmp_path / str(moment))
        said = reaped(count, copy, format, watched, victims, moment)
        assert all(isinstance(one, sw.ExchangeError | tuple | None) for one in said)
        try:
            found.append(which(copy))
        except sw.CheckpointError as error:
            pytest.fail(f"killed at call {moment}, it is no checkpoint any more: {error}")
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


@pytest.mark.slow
@pytest.mark.parametrize("format", FORMATS)
@pytest.mark.parametrize("victims", [[1], [0, 1]])
def test_a_first_save_that_is_killed_does_not_look_like_a_checkpoint(tmp_path, victims, format):
    unfinished = 0
    for moment in worth_dying_at(2, tmp_path / "all", format, victims[0], 4):
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

        def run(rank, start=start, count=count):
            checkpoint.save(state(start, count), tmp_path, format=format)

        on_ranks(count, run)
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
        if "was written, but could not be flushed" in text and found == 2:
            continue  # the directory could not be flushed when the new index was there
        assert (at, found) == (at, 1)
        assert (at, names_in(copy)) == (at, before)


@pytest.mark.parametrize("error", [full_disk(), KeyboardInterrupt()], ids=["disk", "keyboard"])
def test_a_process_alone_that_fails_or_is_interrupted_at_any_call_loses_nothing(old, tmp_path, error):
    """What an interrupted one leaves goes with the next save; what failed leaves nothing."""
    format, path, theirs = old
    before, outcomes = names_in(path), []
    for at in range(100):
        copy = shutil.copytree(path, tmp_path / str(at))
        with Breaking(at, error) as broken:
            try:
                checkpoint.save(state(2, 1), copy, format=format)
            except (sw.CheckpointError, KeyboardInterrupt):
                outcomes.append("raised")
            else:
                outcomes.append("saved")
        found = which(copy)
        assert (at, found) in ((at, 2), (at, {"raised": 1, "saved": 2}[outcomes[-1]]))
        if found == 1 and isinstance(error, OSError):
            assert (at, names_in(copy)) == (at, before)
        if broken.calls <= at:
            break
    assert set(outcomes) == {"raised", "saved"}
    assert outcomes[-1] == "saved"
    only_one_file(copy, format, theirs)


def test_a_file_that_may_not_grow_raises_on_all_ranks(old, tmp_path):
    """By a limit of the system on one rank: the error comes in the middle of a real write."""
    format, path, _ = old
    copy, before = shutil.copytree(path, tmp_path / "copy"), names_in(path)

    def run(rank):
        import resource

        if rank == 1:
            resource.setrlimit(resource.RLIMIT_FSIZE, (100, resource.RLIM_INFINITY))
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
def test_a_rank_that_is_interrupted_while_others_go_on_leaves_what_their_index_names(tmp_path, format):
    def run(rank):
        tell, calls = Callers.tell, []

        def interrupted(self, *said, **same):
            found = tell(self, *said, **same)
            calls.append(found)
            if rank == 1 and len(calls) == 3:  # all know by now that all have written
                raise KeyboardInterrupt
            return found

        Callers.tell = interrupted
        try:
            checkpoint.save(state(1, 2), tmp_path / "made", format=format)
        except KeyboardInterrupt:
            os._exit(0)
        except sw.ExchangeError as error:
            return str(error)

    said = on_ranks(2, run, patience=20, dying=[1])[0]
    assert "rank 0 was " in said, said
    assert "rank 1" in said.split("rank 0 was ")[1], "it names the one that is gone, whichever call notices it"
    is_checkpoint(tmp_path / "made", 1)


@pytest.mark.parametrize("format", FORMATS)
def test_a_path_that_leads_through_a_file_is_refused_everywhere(tmp_path, format):
    (tmp_path / "file").write_text("mine")

    def run(rank):
        with pytest.raises(sw.CheckpointError, match=r"file/below.* cannot be written: Not a directory") as error:
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
        with pytest.raises(sw.CheckpointError, match=r"copy has a checkpoint of .*format") as error:
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
    with pytest.raises(sw.CheckpointError, match="'later' is object, which cannot be stored"):
        checkpoint.save({**state(2, 1), "later": object()}, path)
    is_checkpoint(path, 1)
    assert len(checkpoint.open(path).files.names()) == 3


def test_one_that_was_opened_before_another_was_saved_says_which_file_is_gone(tmp_path):
    checkpoint.save(state(1, 1), tmp_path)
    seen, unseen = checkpoint.open(tmp_path), checkpoint.open(tmp_path)
    same(seen["w"].read(), whole(1)["w"])
    checkpoint.save(state(2, 1), tmp_path)
    same(seen["w"].read(), whole(1)["w"])  # it is mapped
    with pytest.raises(sw.CheckpointError, match=r"shard-00000-of-00001-\w+\.safetensors is missing"):
        unseen["w"].read()


# --- damaged files ---------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """A checkpoint of two ranks."""
    path = tmp_path_factory.mktemp("saved") / "ours"
    on_ranks(2, lambda rank: checkpoint.save(state(1, 2), path))
    return path


@pytest.fixture
def ours(saved, tmp_path):
    """A copy of it, and a secret beside it."""
    (tmp_path / "secret.safetensors").write_bytes(b"secret")
    return shutil.copytree(saved, tmp_path / "ours")


@pytest.fixture
def unchecked(ours):
    """The same without checksums, so that damage is only found where it makes no sense."""
    rewritten(ours / INDEX, lambda said: said.pop("sums"))
    for file in ours.glob("*.sums.json"):
        file.unlink()
    return ours


@pytest.fixture
def theirs(tmp_path):
    """Two safetensors files with an index, as Hugging Face has them."""
    path = tmp_path / "theirs"
    path.mkdir()
    (tmp_path / "secret.safetensors").write_bytes(b"secret")
    where = {"w": "a.safetensors", "deep.r": "b.safetensors", "deep.s": "b.safetensors"}
    for file in set(where.values()):
        save_file({name: value for name, value in whole(1).items() if where[name] == file}, path / file, {"a": "b"})
    (path / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": where}))
    return path


def refused(path, *words):
    """Reading all of it is refused with one kind of error, that has these words."""
    with pytest.raises(sw.CheckpointError) as error:
        all_of(path)
    for word in (str(path), *words):
        assert word in str(error.value), f"{word!r} is not in {error.value}"


def tensor(**fields):
    """Changes fields of the first tensor that a header describes."""

    def change(said):
        name = next(name for name in said if name != "__metadata__")
        said[name].update(fields)

    return change


def overlapping(said):
    first, second = [one for name, one in said.items() if name != "__metadata__"][:2]
    second["data_offsets"] = [at - second["data_offsets"][0] for at in second["data_offsets"]]
    assert first["data_offsets"][0] == 0


HEADERS = {
    "dtype": (tensor(dtype="F4"), ["'F4'"]),
    "a list as dtype": (tensor(dtype=[]), []),
    "another dtype": (tensor(dtype="F64"), ["bytes"]),
    "shape": (tensor(shape=[10**6]), ["bytes"]),
    "negative": (tensor(shape=[-1, -5]), ["shape"]),
    "absurd": (tensor(shape=[2**62, 2**62]), []),
    "huge": (tensor(shape=[2**40, 2**40]), []),
    "true": (tensor(shape=[True]), []),
    "offsets": (tensor(data_offsets=[0, 10**9]), ["truncated"]),
    "backwards": (tensor(data_offsets=[4, 0]), []),
    "three offsets": (tensor(data_offsets=[0, 4, 8]), []),
    "texts": (tensor(data_offsets=["0", "4"]), []),
    "overlapping": (overlapping, ["bytes"]),
    "no fields": (lambda said: said.update(extra={}), ["extra"]),
    "no object": (lambda said: said.update(extra=3), ["extra"]),
    "metadata": (lambda said: said.update(__metadata__={"a": 1}), ["__metadata__"]),
    "more": (lambda said: said.update(extra={"dtype": "U8", "shape": [1], "data_offsets": [0, 1]}), ["extra"]),
}


@pytest.mark.parametrize("case", list(HEADERS))
def test_a_header_that_cannot_be_is_refused(ours, theirs, case):
    change, words = HEADERS[case]
    for path, file in (ours, shards_in(ours)[0]), (theirs, "b.safetensors"):
        rewritten(path / file, change)
        refused(path, file, *words)


TEXTS = {
    "empty": b"",
    "short": b"\x01\x00",
    "huge length": (2**63).to_bytes(8, "little") + b"{}",
    "most of all": b"\xff" * 8 + b"{}",
    "length beyond the end": (1000).to_bytes(8, "little") + b"{}" + b" " * 20,
    "no JSON": (2).to_bytes(8, "little") + b"{]",
    "no object": (2).to_bytes(8, "little") + b"[]",
    "no text": (2).to_bytes(8, "little") + b"\xff\xfe",
    "deep": (200_000).to_bytes(8, "little") + b'{"a":' * 40_000,
    "deep lists": (100_005).to_bytes(8, "little") + b'{"a":' + b"[" * 100_000,
    "digits": (10_020).to_bytes(8, "little") + b'{"a":{"shape":' + b"9" * 10_006,
    "twice": (16).to_bytes(8, "little") + b'{"a":{}, "a":{}}',
    "zeros": b"\0" * 100,
}


@pytest.mark.parametrize("case", list(TEXTS))
def test_a_file_that_is_something_else_is_refused(ours, theirs, case):
    for path, file in (ours, shards_in(ours)[1]), (theirs, "b.safetensors"):
        (path / file).write_bytes(TEXTS[case])
        refused(path, file)


@pytest.mark.parametrize("case", [name for name in TEXTS if name not in ("huge length", "most of all")])
def test_an_index_that_is_something_else_is_refused(ours, theirs, case):
    for path, file in (ours, INDEX), (theirs, "model.safetensors.index.json"):
        (path / file).write_bytes(TEXTS[case][8:])
        refused(path, file)


def setting(*keys):
    """Sets something along keys."""

    def change(value):
        def set_it(said):
            for key in keys[:-1]:
                said = said[key]
            said[keys[-1]] = value

        return set_it

    return change


INDEX_CASES = {
    "version": (setting("shardwise")(2), ["version 2"]),
    "no version": (setting("shardwise")(None), ["version"]),
    "files": (setting("files")({}), ["files"]),
    "tensors": (setting("tensors")([]), ["tensors"]),
    "values": (setting("values")(None), ["values"]),
    "up": (setting("files", 0)("../secret.safetensors"), ["'../secret.safetensors'", "not inside"]),
    "down and up": (setting("files", 0)("a/../../secret.safetensors"), ["not inside"]),
    "root": (setting("files", 0)("/etc/passwd"), ["not inside"]),
    "backslash": (setting("files", 0)("..\\secret.safetensors"), ["not inside"]),
    "a number": (setting("files", 0)(0), ["not inside"]),
    "itself": (setting("files", 0)("."), ["not inside"]),
    "nothing": (setting("files", 0)(""), ["not inside"]),
    "zero byte": (setting("files", 0)("a\0b"), ["not inside"]),
    "no text": (setting("files", 0)("\ud800"), []),
    "long name": (setting("files", 0)("x" * 5000), []),
    "a gone file": (setting("files", 0)("gone.safetensors"), ["gone.safetensors is missing"]),
    "fewer files": (lambda said: said["files"].pop(), ["'w'"]),
    "swapped": (lambda said: said["files"].reverse(), ["w@", "not the file"]),
    "tensor": (setting("tensors", "w")(3), ["'w'"]),
    "no layout": (lambda said: said["tensors"]["w"].pop("layout"), ["'w'"]),
    "dtype": (setting("tensors", "w", "dtype")("F4"), ["'w'", "F4"]),
    "dtype of a list": (setting("tensors", "w", "dtype")(["F32"]), ["'w'"]),
    "another dtype": (setting("tensors", "w", "dtype")("I32"), ["w@"]),
    "shape": (setting("tensors", "w", "shape")([12, 5]), ["'w'"]),
    "huge shape": (lambda said: said["tensors"]["w"].update(shape=[2**40], layout=f"{2**40}/R@1"), ["w"]),
    "layout": (setting("tensors", "w", "layout")("12x4/Q"), ["'w'"]),
    "layout of others": (setting("tensors", "w", "layout")("12x4/S0@3"), ["'w'"]),
    "another layout": (setting("tensors", "w", "layout")("12x4/S1@2"), ["w@"]),
    "partial": (setting("tensors", "w", "layout")("12x4/P@2"), ["'w'"]),
    "many owners": (setting("tensors", "w", "layout")("12x4/S0@1000000"), ["'w'"]),
    "very many": (setting("tensors", "w", "layout")("12x4/S0@99999999999999999999"), ["'w'"]),
    "brackets": (setting("tensors", "w", "layout")("(" * 10**5), ["'w'"]),
    "boxes": (setting("tensors", "w", "layout")("12x4/boxes=0:6,0:4+6:99,0:4@2"), ["'w'"]),
    "a new name": (lambda said: said["tensors"].update(v=said["tensors"]["w"]), ["v@"]),
    "path": (setting("paths", "deep.r")(5), ["deep.r"]),
    "path of a text": (setting("paths", "deep.r")("deep"), ["deep.r"]),
    "path of lists": (setting("paths", "deep.r")([[1]]), ["deep.r"]),
    "path of nothing": (setting("paths", "deep.r")([]), ["deep.r"]),
    **{
        f"value {value!r:.30}": (setting("values", "start")(value), ["start"])
        for value in (
            {"float": 3},
            {"float": "x"},
            {"float": "0x1p99999"},
            {"complex": 3},
            {"complex": ["1", "2", "3"]},
            {"bytes": "é"},
            {"bytes": "!"},
            {"bytes": 3},
            {"tuple": 3},
            {"set": [[1]]},
            {"size": ["a"]},
            {"dtype": "nn"},
            {"dtype": 5},
            {"device": "toaster"},
            {"device": 5},
            {"key": "x"},
            {"place": None},
            {"dict": 5},
            {"dict": [1]},
            {"dict": [[[1], 2]]},
            {"dict": [[1, 2, 3]]},
            {"what": 1},
            {"dict": [], "tuple": []},
            {},
            json.loads("[" * 900 + "]" * 900),
        )
    },
}


@pytest.mark.parametrize("case", list(INDEX_CASES))
def test_an_index_that_does_not_make_sense_is_refused(ours, case):
    change, words = INDEX_CASES[case]
    rewritten(ours / INDEX, change)
    refused(ours, *words)


WEIGHT_MAPS = {
    "none": (lambda said: said.pop("weight_map"), ["weight_map"]),
    "a list": (setting("weight_map")([]), ["weight_map"]),
    "up": (setting("weight_map", "w")("../secret.safetensors"), ["../secret.safetensors", "not inside"]),
    "root": (setting("weight_map", "w")("/etc/passwd"), ["not inside"]),
    "a number": (setting("weight_map", "w")(3), ["not inside"]),
    "no text": (setting("weight_map", "w")("\ud800"), []),
    "gone": (setting("weight_map", "w")("c.safetensors"), ["c.safetensors is missing"]),
    "the other": (setting("weight_map", "w")("b.safetensors"), ["b.safetensors", "'w'"]),
    "more": (setting("weight_map", "v")("a.safetensors"), ["a.safetensors", "'v'"]),
}


@pytest.mark.parametrize("case", list(WEIGHT_MAPS))
def test_a_weight_map_that_does_not_make_sense_is_refused(theirs, case):
    change, words = WEIGHT_MAPS[case]
    rewritten(theirs / "model.safetensors.index.json", change)
    refused(theirs, *words)


def test_files_that_are_swapped_missing_or_of_another_save_are_refused(ours, tmp_path):
    first, second = (ours / name for name in shards_in(ours))
    texts = first.read_bytes(), second.read_bytes()
    first.write_bytes(texts[1])
    second.write_bytes(texts[0])
    refused(ours, "not the file that the index was written for")
    first.write_bytes(texts[0])
    second.unlink()
    refused(ours, f"{second.name} is missing")
    second.mkdir()
    refused(ours, second.name)


def test_a_directory_that_is_nothing_says_what_is_in_it(tmp_path):
    refused(tmp_path, "it has no files")
    (tmp_path / "notes.txt").write_text("mine")
    refused(tmp_path, "notes.txt")
    refused(tmp_path / "notes.txt")
    refused(tmp_path / "nowhere", "no such file or directory")
    refused(f"memory:/{tmp_path}", "no such file or directory")
    refused("gopher://a/b")


def damaged(text, draw):
    """Other bytes: some flipped, cut off, doubled, or taken out."""
    return next(other for other in iter(lambda: perhaps_damaged(text, draw), None) if other != text)


def perhaps_damaged(text, draw):
    """The same, but a byte may be replaced by an equal one."""
    text, kind = bytearray(text), draw.randrange(6)
    where = draw.randrange(len(text))
    if kind == 0:
        del text[where:]
    elif kind == 1:
        del text[where : where + draw.randrange(1, 9)]
    elif kind == 2:
        text[where:where] = bytes(draw.randrange(256) for _ in range(draw.randrange(1, 9)))
    else:
        for _ in range(kind - 2):
            where = draw.randrange(len(text))
            text[where] = draw.choice([text[where] ^ 1 << draw.randrange(8), draw.choice(b'0129-,:"[]{}@x/. ')])
    return bytes(text)


@pytest.mark.parametrize("kind", ["ours", "unchecked", "theirs"])
def test_random_damage_gives_values_or_one_kind_of_error(request, tmp_path, kind):
    """Never another error; never other shapes or dtypes; nothing outside of the directory is looked at or touched."""
    path, draw, outcomes = request.getfixturevalue(kind), random.Random(1), {"same": 0, "other": 0, "refused": 0}
    files = {name: (path / name).read_bytes() for name in names_in(path)}
    expected, unnamed = whole(1), []
    before = names_in(tmp_path)
    for number in range(300):
        name = draw.choice(list(files))
        (path / name).write_bytes(damaged(files[name], draw))
        try:
            found, _ = all_of(path)
            into = {name: torch.zeros_like(value) for name, value in expected.items()}
            checkpoint.load(path, into)
        except sw.CheckpointError as error:
            outcomes["refused"] += 1
            unnamed += [str(error)] if str(path) not in str(error) else []
        except Exception as error:
            raise AssertionError(f"damage {number}, to {name}: {error!r}: {(path / name).read_bytes()!r}") from error
        else:
            equal = all(name in found and torch.equal(found[name], value) for name, value in expected.items())
            outcomes["same" if equal else "other"] += 1
        (path / name).write_bytes(files[name])
    assert unnamed == []
    assert outcomes["refused"] > 60
    unnoticed = outcomes["same"] + outcomes["other"]
    assert unnoticed == 0 if kind == "ours" else unnoticed > 10, outcomes
    assert names_in(tmp_path) == before
    assert names_in(path) == sorted(files)
    assert (tmp_path / "secret.safetensors").read_bytes() == b"secret"
