"""Conversions that are killed, fail or run onto what is there: nothing half-written, nothing lost, nothing stale."""

import errno
import json
import os
import random
import resource
import signal
import time
from multiprocessing import get_context

import fsspec
import pytest
import torch
import torch.distributed.checkpoint as dcp
from checkpoints import names_in
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file

from shardwise import checkpoint
from shardwise.errors import CheckpointError
from shardwise.state import Transposed
from shardwise.storage.folders import OutputFolder
from shardwise.storage.sums import data_name

INDEX = "model.safetensors.index.json"
ROWS = {"mesh": {"tp": 3}, "rule": [{"name": "*", "placements": {"tp": "S0"}}]}
FORMATS = {
    "one.safetensors": {},
    "several": {"max_shard_size": "3KB"},
    "sharded": {"format": "sharded", "rules": ROWS},
    "dcp": {"format": "dcp"},
    "dcp-of-three": {"format": "dcp", "rules": ROWS},
    "one.pt": {},
}


class StopError(Exception):
    """Raised by callbacks."""


def model(count=12, size=16, seed=0):
    torch.manual_seed(seed)
    return {f"layers.{at}.w": torch.randn(size, size) for at in range(count)}


def source(tmp_path, tensors, name="in.safetensors"):
    save_file(tensors, tmp_path / name)
    return tmp_path / name


def write_indexed(path, tensors, several):
    """As Hugging Face does, so many tensors in a file."""
    path.mkdir()
    names = list(tensors)
    count = -(-len(names) // several)
    where = {name: f"model-{at // several + 1:05d}-of-{count:05d}.safetensors" for at, name in enumerate(names)}
    for file in set(where.values()):
        save_file({name: tensors[name] for name in names if where[name] == file}, path / file, {"format": "pt"})
    (path / INDEX).write_text(json.dumps({"metadata": {}, "weight_map": where}))
    return path


def assert_same(found, expected):
    assert found.keys() == expected.keys()
    for name, tensor in expected.items():
        assert found[name].dtype == tensor.dtype
        torch.testing.assert_close(found[name], tensor, rtol=0, atol=0)


def assert_has(path, expected):
    """What lies there, opened anew."""
    assert_same({name: entry.read() for name, entry in checkpoint.open(path).items()}, expected)


def indexed(path):
    """By safetensors itself, as the index says."""
    said = json.loads((path / INDEX).read_text())["weight_map"]
    found = {name: tensor for file in set(said.values()) for name, tensor in load_file(path / file).items()}
    assert found.keys() == said.keys()
    return found


def identity(path):
    """Files that were written anew have another inode or another time."""
    return {file.name: (file.stat().st_ino, file.stat().st_mtime_ns) for file in map(path.joinpath, names_in(path))}


def everything(path):
    return {file.name: file.read_bytes() for file in map(path.joinpath, names_in(path))}


# --- killed ----------------------------------------------------------------------------------------------------------

FORK = get_context("fork")


def started(*args, **options):
    """A conversion in a process of its own, which nothing can tell that it is to end."""

    def work():
        torch.set_num_threads(1)
        checkpoint.convert(*args, **options)
        os._exit(0)

    process = FORK.Process(target=work)
    process.start()
    return process


def ended(process):
    """True where it was killed."""
    process.join(60)
    assert process.exitcode in (0, -signal.SIGKILL)
    return process.exitcode != 0


def check_interrupted(out, tensors):
    """What has a final name is whole, and the index comes last. Returns the files that are whole."""
    if not out.exists():
        return {}
    whole = {name: one for name, one in identity(out).items() if name.endswith(".safetensors")}
    for name in whole:
        for key, tensor in load_file(out / name).items():
            torch.testing.assert_close(tensor, tensors[key], rtol=0, atol=0)
    if (out / INDEX).exists():
        assert_same(indexed(out), tensors)
    return whole


@pytest.mark.slow
@pytest.mark.parametrize("jobs", [1, 3])
def test_killed_at_random_moments_it_goes_on_from_what_is_whole(tmp_path, jobs):
    chance = random.Random(jobs)
    tensors = model(30, 64)
    path, options = source(tmp_path, tensors), {"max_shard_size": "20KB", "jobs": jobs}
    since = time.monotonic()
    assert not ended(started(path, tmp_path / "first", **options))
    took, tries, kills, halfway = time.monotonic() - since, 0, 0, 0
    out = tmp_path / "out0"
    while kills < 15 and tries < 60:
        before, tries = check_interrupted(out, tensors), tries + 1
        process = started(path, out, **options)
        time.sleep(chance.uniform(0, took))
        os.kill(process.pid, signal.SIGKILL)
        killed = ended(process)
        after = check_interrupted(out, tensors)
        assert before.items() <= after.items()  # not written again
        kills, halfway = kills + killed, halfway + (0 < len(after) < 30 and killed)
        if not killed or (out / INDEX).exists():
            out = tmp_path / f"out{tries}"
    assert halfway > 0
    before = check_interrupted(out, tensors)
    checkpoint.convert(path, out, **options)
    assert before.items() <= identity(out).items()
    assert everything(out) == everything(tmp_path / "first")  # also: no .part is left
    assert_same(indexed(out), tensors)


@pytest.mark.parametrize("after", range(0, 12, 2))
def test_killed_after_some_tensors_the_rest_is_written(tmp_path, after):
    tensors = model()
    path, out = source(tmp_path, tensors), tmp_path / "out"

    def kill(done, total):
        if done > after * 1024:
            os.kill(os.getpid(), signal.SIGKILL)

    assert ended(started(path, out, max_shard_size="3KB", durable=False, progress=kill))
    before = check_interrupted(out, tensors)
    assert len(before) == after // 2
    assert not (out / INDEX).exists()
    checkpoint.convert(path, out, max_shard_size="3KB", durable=False)
    assert before.items() <= identity(out).items()
    assert_same(indexed(out), tensors)
    assert names_in(out) == [*(f"model-{at:05d}-of-00006.safetensors" for at in range(1, 7)), INDEX]


@pytest.mark.parametrize("kind", ["dcp-of-three", "sharded"])
def test_files_of_ranks_that_were_whole_are_kept(tmp_path, kind):
    tensors = model()
    path, out = source(tmp_path, tensors), tmp_path / "out"

    def kill(done, total):
        if done > total // 2:
            os.kill(os.getpid(), signal.SIGKILL)

    assert ended(started(path, out, durable=False, progress=kill, **FORMATS[kind]))
    before = {name: one for name, one in identity(out).items() if not name.startswith(".")}
    assert len(before) == 1  # of three; the kill was in the second
    checkpoint.convert(path, out, durable=False, **FORMATS[kind])
    assert before.items() <= identity(out).items()
    assert_has(out, tensors)
    checkpoint.convert(path, tmp_path / "at once", durable=False, **FORMATS[kind])
    ours, theirs = everything(out), everything(tmp_path / "at once")
    assert ours.keys() == theirs.keys()
    assert all(ours[name] == theirs[name] for name in ours if name != ".metadata")  # a pickle may refer, or repeat


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled:UserWarning")
def test_what_goes_on_from_files_of_an_earlier_try_is_what_torch_loads(tmp_path):
    tensors = model()
    path, out = source(tmp_path, tensors), tmp_path / "out"

    def kill(done, total):
        if done > total // 2:
            os.kill(os.getpid(), signal.SIGKILL)

    assert ended(started(path, out, durable=False, progress=kill, **FORMATS["dcp-of-three"]))
    checkpoint.convert(path, out, durable=False, **FORMATS["dcp-of-three"])
    found = {name: torch.zeros_like(tensor) for name, tensor in tensors.items()}
    dcp.load(found, checkpoint_id=out, no_dist=True)
    assert_same(found, tensors)


@pytest.mark.parametrize("kind", [kind for kind in FORMATS if kind != "several"])  # which has tests of its own
def test_killed_on_the_way_there_is_no_checkpoint_or_the_old_one(tmp_path, kind):
    out, old, new = tmp_path / "out" / kind, model(seed=1), model(seed=2)
    (tmp_path / "out").mkdir()
    for tensors, there in (old, None), (new, old):
        path = source(tmp_path, tensors)

        def kill(done, total):
            if done > total * 2 // 3:
                os.kill(os.getpid(), signal.SIGKILL)

        assert ended(started(path, out, durable=False, progress=kill, **FORMATS[kind]))
        if there is not None:
            assert_has(out, there)
        elif kind != "sharded":  # whose files open without an index: see the test below
            with pytest.raises(CheckpointError):
                checkpoint.open(out)
        checkpoint.convert(path, out, durable=False, **FORMATS[kind])
        assert_has(out, tensors)
        assert not list((tmp_path / "out").rglob("*.part"))
        assert len(list(out.glob("*.distcp"))) in (0, 1, 3)  # those of the interrupted try are gone


@pytest.mark.parametrize("kind", ["several", "sharded"])
def test_some_files_of_an_interrupted_conversion_are_no_checkpoint(tmp_path, kind):
    path, out = source(tmp_path, model()), tmp_path / "out"

    def kill(done, total):
        if done > total * 2 // 3:
            os.kill(os.getpid(), signal.SIGKILL)

    assert ended(started(path, out, durable=False, progress=kill, **FORMATS[kind]))
    assert list(out.glob("*.safetensors"))
    with pytest.raises(CheckpointError, match=r"index|shardwise.json|missing"):
        checkpoint.open(out)


@pytest.mark.parametrize(("first", "then"), [("3KB", "3KB"), ("3KB", None), (None, "3KB")])
def test_a_conversion_that_is_whole_is_not_replaced_by_another_one(tmp_path, first, then):
    out, old, new = tmp_path / "out", model(seed=1), model(seed=2)
    checkpoint.convert(source(tmp_path, old), out, durable=False, max_shard_size=first)
    with pytest.raises(CheckpointError, match="belongs to another, complete conversion: give another path"):
        checkpoint.convert(source(tmp_path, new), out, durable=False, max_shard_size=then)
    assert_has(out, old)


@pytest.mark.parametrize("most", ["3KB", None])
@pytest.mark.parametrize(
    ("name", "about"), [("model-00001-of-00002.safetensors", None), ("mine.safetensors", {"shardwise": "0" * 16})]
)
def test_files_of_others_are_never_taken_for_those_of_an_unfinished_conversion(tmp_path, name, about, most):
    out, path = tmp_path / "out", source(tmp_path, model())
    out.mkdir()
    save_file({"w": torch.ones(4)}, out / name, about)
    with pytest.raises(CheckpointError, match=f"{name} is not a part of this conversion: give another path"):
        checkpoint.convert(path, out, durable=False, max_shard_size=most)
    assert load_file(out / name)["w"].equal(torch.ones(4))
    assert names_in(out) == [name]


def test_a_whole_file_in_a_directory_is_replaced_by_another_one_at_once(tmp_path):
    out, old, new = tmp_path / "out", model(seed=1), model(seed=2)
    checkpoint.convert(source(tmp_path, old), out, durable=False)

    def stop(done, total):
        if done > total // 2:
            raise StopError

    with pytest.raises(StopError):
        checkpoint.convert(source(tmp_path, new), out, durable=False, progress=stop)
    assert_has(out, old)
    checkpoint.convert(source(tmp_path, new), out, durable=False)
    assert_has(out, new)


def test_sharded_files_go_on_from_what_is_whole(tmp_path):
    kind = "sharded"
    path, out = source(tmp_path, model()), tmp_path / "out"

    def kill(done, total):
        if done > total * 2 // 3:
            os.kill(os.getpid(), signal.SIGKILL)

    assert ended(started(path, out, durable=False, progress=kill, **FORMATS[kind]))
    before = {name: one for name, one in identity(out).items() if not name.startswith(".")}
    assert before
    checkpoint.convert(path, out, durable=False, **FORMATS[kind])
    assert before.items() <= identity(out).items()


def test_what_an_interrupted_conversion_of_other_sizes_left_goes(tmp_path):
    path, out = source(tmp_path, model()), tmp_path / "out"

    def kill(done, total):
        if done > total // 2:
            os.kill(os.getpid(), signal.SIGKILL)

    assert ended(started(path, out, durable=False, progress=kill, max_shard_size="3KB"))
    checkpoint.convert(path, out, durable=False, max_shard_size="5KB")
    assert_same(indexed(out), model())
    assert names_in(out) == [*(f"model-{at:05d}-of-00003.safetensors" for at in range(1, 4)), INDEX]


# --- what is whole is used again, but only of the same ---------------------------------------------------------------


def again(path, out, **options):
    """Which files a second conversion wrote; without verify, which would notice stale ones."""
    before = identity(out)
    checkpoint.convert(path, out, durable=False, verify=False, max_shard_size="3KB", **options)
    return {name for name, one in identity(out).items() if before.get(name) != one} - {INDEX}


@pytest.mark.parametrize("place", ["here", "memory://whole"])
@given(st.none() | st.binary(max_size=4), st.binary(max_size=4), st.integers(0, 4))
def test_a_file_is_there_where_it_begins_so_and_has_that_size(tmp_path_factory, place, data, start, size):
    folder = OutputFolder(tmp_path_factory.mktemp(place) if place == "here" else place, durable=False)
    if data is None:
        folder.remove("file")
    else:
        with folder.write("file") as file:
            file.write(data)
    assert folder.has("file", start, size) == (data is not None and len(data) == size and data.startswith(start))


def test_only_files_that_are_gone_are_written_again(tmp_path):
    path, out = source(tmp_path, model()), tmp_path / "out"
    checkpoint.convert(path, out, durable=False, max_shard_size="3KB")
    assert again(path, out) == set()
    (out / "model-00002-of-00006.safetensors").unlink()
    with (out / "model-00005-of-00006.safetensors").open("r+b") as file:
        file.truncate(1000)
    assert again(path, out) == {"model-00002-of-00006.safetensors", "model-00005-of-00006.safetensors"}
    assert_same(indexed(out), model())
    checkpoint.convert(path, tmp_path / "one.safetensors", durable=False)
    inode = (tmp_path / "one.safetensors").stat().st_ino
    checkpoint.convert(path, tmp_path / "one.safetensors", durable=False)
    assert (tmp_path / "one.safetensors").stat().st_ino == inode


CHANGES = {  # each makes files of the same names and sizes as before
    "other names for the same": (
        {"rename": lambda name: f"layers.{(int(name[7:-2]) - 1) % 12}.w"},
        lambda t: {f"layers.{(at - 1) % 12}.w": t[f"layers.{at}.w"] for at in range(12)},
    ),
    "another order of dims": ({"remap": [Transposed("*")]}, lambda t: {name: w.t() for name, w in t.items()}),
    "another dtype of the same size": (
        {"cast": [(f"layers.{at}.w", torch.int32) for at in range(12)]},
        lambda t: {name: w.to(torch.int32) for name, w in t.items()},
    ),
}


def unfinished(path, out):
    """As a conversion leaves it that was killed before the end."""
    checkpoint.convert(path, out, durable=False, max_shard_size="3KB")
    (out / INDEX).unlink()


@pytest.mark.parametrize("what", CHANGES)
def test_another_option_uses_nothing_that_is_stale(tmp_path, what):
    options, expected = CHANGES[what]
    path, out = source(tmp_path, model()), tmp_path / "out"
    unfinished(path, out)
    assert len(again(path, out, **options)) == 6
    assert_same(indexed(out), {name: tensor.contiguous() for name, tensor in expected(model()).items()})


@pytest.mark.parametrize("kind", ["the same file", "another file", "another format"])
def test_a_source_that_changed_uses_nothing_that_is_stale(tmp_path, kind):
    path, out = source(tmp_path, model()), tmp_path / "out"
    unfinished(path, out)
    new = model(seed=7)
    if kind == "another format":
        path = tmp_path / "in.pt"
        torch.save(new, path)
    else:
        path = source(tmp_path, new, path.name if kind == "the same file" else "other.safetensors")
    assert len(again(path, out)) == 6
    assert_same(indexed(out), new)


def unfinished_dcp(path, out, **options):
    """As above; returns the file with the first part and the values."""
    checkpoint.convert(path, out, durable=False, format="dcp", **options)
    (out / ".metadata").unlink()
    return next(out.glob("__0_*.distcp"))


def test_other_values_of_the_same_tensors_use_nothing_that_is_stale(tmp_path):
    path, out = tmp_path / "in", tmp_path / "out"
    checkpoint.save({"w": torch.ones(4), "step": 41, "seed": 7}, path, durable=False, sums=False)
    unfinished_dcp(path, out, select=["w", "seed"])
    assert checkpoint.convert(path, out, durable=False, format="dcp").objects == {"step": 41, "seed": 7}
    index = path / "shardwise.json"
    index.write_text(index.read_text().replace('"step": 41', '"step": 42'))
    assert checkpoint.convert(path, out, durable=False, format="dcp").objects == {"step": 42, "seed": 7}


SPOILED = {
    "its end is cut off": lambda body, text: body + text[:-1],
    "its start is cut off": lambda body, text: body[64:] + text,
    "it is empty": lambda body, text: b"",
    "its end has another length": lambda body, text: body + text[:-24] + b"\xff" * 8 + text[-16:],
    "its list is no list": lambda body, text: body + b"null" + (4).to_bytes(8, "little") + text[-16:],
    "its list is of nothing": lambda body, text: body + b"[]" + (2).to_bytes(8, "little") + text[-16:],
    "its list lacks something": lambda body, text: body + b"[[1]]" + (5).to_bytes(8, "little") + text[-16:],
    "its list is no text": lambda body, text: body + b"\xff" * (len(text) - 24) + text[-24:],
}


@pytest.mark.parametrize("how", SPOILED)
def test_a_dcp_file_that_is_not_whole_is_written_again(tmp_path, how):
    path, out = source(tmp_path, model(2) | {"scalar": torch.tensor(2.5), "none": torch.zeros(0, 3)}), tmp_path / "out"
    file = unfinished_dcp(path, out)
    data = file.read_bytes()
    length = 24 + int.from_bytes(data[-24:-16], "little")
    file.write_bytes(SPOILED[how](data[:-length], data[-length:]))
    checkpoint.convert(path, out, durable=False, verify=False, format="dcp")
    assert file.read_bytes() == data
    inode = file.stat().st_ino
    checkpoint.convert(path, out, durable=False, verify=False, format="dcp")
    assert file.stat().st_ino == inode  # what is whole stays


# --- failing ---------------------------------------------------------------------------------------------------------


def left(path):
    """Every file under a name that it was to have, and there are no others."""
    found = {
        file.relative_to(path).as_posix()
        for file in path.rglob("*")
        if file.is_file() and data_name(file.name) == file.name
    }
    assert not [name for name in found if name.endswith(".part")]
    return found


@pytest.mark.parametrize("jobs", [1, 3])
@pytest.mark.parametrize("kind", FORMATS)
def test_a_full_disk_leaves_nothing_half_written(tmp_path, monkeypatch, kind, jobs):
    path, out, count = source(tmp_path, model()), tmp_path / "out", []
    # every file flushes itself, its checksums and the directory; the first one also what its new directories are in
    allowed = {"several": 11}.get(kind, 0)

    def full(file):
        count.append(file)
        if len(count) > allowed:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with monkeypatch.context() as patched:
        patched.setattr(os, "fsync", full)
        # threads flush in any order: what fails may be the flush of a directory above
        flushed = "was written, but could not be flushed to the disk"
        what = "out.* cannot be written" if jobs == 1 else f"(cannot be written|{flushed})"
        with pytest.raises(CheckpointError, match=rf"{tmp_path}.*{what}: No space left on device"):
            checkpoint.convert(path, out / kind, jobs=jobs, **FORMATS[kind])
    assert len(left(out)) == 3 if (kind, jobs) == ("several", 1) else len(left(out)) < 6
    assert not any(name.endswith((INDEX, ".metadata", "shardwise.json", "one.pt")) for name in left(out))
    checkpoint.convert(path, out / kind, durable=False, **FORMATS[kind])
    assert_has(out / kind, model())


@pytest.mark.parametrize("kind", FORMATS)
def test_files_that_may_not_grow_are_an_error_that_names_them(tmp_path, kind):
    path, out = source(tmp_path, model(count=12, size=64)), tmp_path / "out"
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (12_000, hard))
    try:
        with pytest.raises(CheckpointError, match=r"cannot be written: File too large"):
            checkpoint.convert(path, out / kind, durable=False, **FORMATS[kind])
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert left(out) == set()


def test_an_index_that_cannot_be_written_leaves_none(tmp_path, monkeypatch):
    path, out = source(tmp_path, model()), tmp_path / "out"
    replace = os.replace

    def refuse(old, new):
        if str(new).endswith("index.json"):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        replace(old, new)

    with monkeypatch.context() as patched:
        patched.setattr(os, "replace", refuse)
        with pytest.raises(CheckpointError, match=r"index\.json cannot be written: No space left"):
            checkpoint.convert(path, out, durable=False, max_shard_size="3KB")
    assert left(out) == {f"model-{at:05d}-of-00006.safetensors" for at in range(1, 7)}
    assert again(path, out) == set()


@pytest.mark.parametrize("jobs", [1, 3])
@pytest.mark.parametrize("kind", FORMATS)
def test_a_callback_that_raises_stops_it(tmp_path, kind, jobs):
    path, out, told = source(tmp_path, model()), tmp_path / "out", []

    def stop(done, total):
        told.append(done)
        if done > total // 2:
            raise StopError

    with pytest.raises(StopError):
        checkpoint.convert(path, out / kind, durable=False, jobs=jobs, progress=stop, **FORMATS[kind])
    assert jobs > 1 or sum(done > 6 * 1024 for done in told) == 1
    assert not any(name.endswith((INDEX, ".metadata", "shardwise.json", "one.pt")) for name in left(out))
    checkpoint.convert(path, out / kind, durable=False, **FORMATS[kind])
    assert_has(out / kind, model())


@pytest.mark.parametrize("kind", FORMATS)
def test_a_place_that_cannot_be_written_is_an_error_that_names_it(tmp_path, kind):
    path = source(tmp_path, model())
    (tmp_path / "file").write_text("here")
    with pytest.raises(CheckpointError, match=r"file.* cannot be written"):
        checkpoint.convert(path, tmp_path / "file" / "out" / kind, **FORMATS[kind])
    assert (tmp_path / "file").read_text() == "here"


def test_sources_that_are_not_all_there_write_nothing(tmp_path):
    with pytest.raises(CheckpointError, match="no such file or directory:"):
        checkpoint.convert(tmp_path / "none", tmp_path / "out")
    hf = write_indexed(tmp_path / "hf", model(), 2)
    (hf / "model-00004-of-00006.safetensors").unlink()
    with pytest.raises(CheckpointError, match=r"model-00004-of-00006\.safetensors is missing"):
        checkpoint.convert(hf, tmp_path / "out")
    checkpoint.convert(source(tmp_path, model()), tmp_path / "ours", durable=False, **FORMATS["sharded"])
    next((tmp_path / "ours").glob("shard-00002*.safetensors")).unlink()
    with pytest.raises(CheckpointError, match=r"shard-00002.* is missing"):
        checkpoint.convert(tmp_path / "ours", tmp_path / "out" / "one.safetensors")
    checkpoint.convert(source(tmp_path, model()), tmp_path / "dcp", durable=False, **FORMATS["dcp-of-three"])
    next((tmp_path / "dcp").glob("__1_*.distcp")).unlink()
    with pytest.raises(CheckpointError, match=r"__1_.* is missing"):
        checkpoint.convert(tmp_path / "dcp", tmp_path / "out" / "one.safetensors")
    assert not (tmp_path / "out").exists() or left(tmp_path / "out") == set()


def test_a_result_that_is_not_what_was_to_be_written_is_noticed(tmp_path, monkeypatch):
    path, replace = source(tmp_path, model()), os.replace

    def spoil(old, new):
        data = bytearray(old.read_bytes())
        data[-1] ^= 1
        old.write_bytes(data)
        replace(old, new)

    monkeypatch.setattr(os, "replace", spoil)
    with pytest.raises(CheckpointError, match=r"does not match the source: layers\.\d+\.w: 1 or more cells differ"):
        checkpoint.convert(path, tmp_path / "out.safetensors", durable=False)
    checkpoint.convert(path, tmp_path / "unverified.safetensors", durable=False, verify=False)


# --- onto what is there ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["in.safetensors", "in.pt"])
def test_a_file_is_not_converted_onto_itself(tmp_path, kind):
    path = tmp_path / kind
    (save_file if kind == "in.safetensors" else torch.save)(model(), path)
    before = path.read_bytes()
    with pytest.raises(CheckpointError, match="is the source: give another path"):
        checkpoint.convert(path, tmp_path / "." / kind, cast=torch.bfloat16, durable=False)
    assert path.read_bytes() == before
    assert os.listdir(tmp_path) == [kind]


def test_a_sharded_checkpoint_is_not_converted_onto_itself(tmp_path):
    out = tmp_path / "ours"
    checkpoint.convert(source(tmp_path, model()), out, durable=False, **FORMATS["sharded"])
    said = {"mesh": {"tp": 2}, "rule": [{"name": "*", "placements": {"tp": "S1"}}]}
    with pytest.raises(CheckpointError, match="is the source: give another path"):
        checkpoint.convert(out, out, format="sharded", rules=said, cast=torch.half, durable=False)
    assert_has(out, model())


def test_an_indexed_source_is_not_damaged_by_a_conversion_onto_itself_that_fails(tmp_path):
    hf = write_indexed(tmp_path / "hf", model(), 2)

    def stop(done, total):
        if done > total // 2:
            raise StopError

    with pytest.raises((StopError, CheckpointError, ValueError)):
        checkpoint.convert(hf, hf, max_shard_size=1024, cast=torch.half, durable=False, progress=stop)
    assert_has(hf, model())


def test_what_replaced_a_file_that_was_opened_is_not_taken_for_it(tmp_path):
    opened = checkpoint.open(source(tmp_path, model(seed=1)))
    os.replace(source(tmp_path, model(seed=2), "new.safetensors"), tmp_path / "in.safetensors")
    for name, value in model(seed=1).items():
        assert torch.equal(opened[name].read(), value)
    checkpoint.convert(opened, tmp_path / "out.safetensors", durable=False, verify=False)
    assert_has(tmp_path / "out.safetensors", model(seed=1))


def test_a_file_that_changes_after_it_was_opened_is_refused(tmp_path):
    opened = checkpoint.open(source(tmp_path, model(seed=1)))
    changed = source(tmp_path, model(seed=2), "new.safetensors").read_bytes()
    (tmp_path / "in.safetensors").write_bytes(changed)
    with pytest.raises(
        CheckpointError, match=r"in\.safetensors was replaced or changed since the checkpoint was opened"
    ):
        next(iter(opened.values())).read()
    with pytest.raises(CheckpointError, match="was replaced or changed"):
        checkpoint.convert(opened, tmp_path / "out.safetensors", durable=False, verify=False)
    assert not (tmp_path / "out.safetensors").exists()


INTO = {
    "its own directory, as one file": ({}, "hf"),
    "its own directory, in files of another size": ({"max_shard_size": "5KB"}, "hf"),
    "its own directory, as dcp": ({"format": "dcp"}, "hf"),
    "a directory with an index": ({}, "other"),
    "a directory of shardwise": ({"max_shard_size": "3KB"}, "ours"),
    "a directory of dcp": ({}, "dcp"),
    "a directory of dcp, sharded": (FORMATS["sharded"], "dcp"),
    "a directory with another file": ({}, "file"),
    "a directory within": ({}, "hf/within"),
}


@pytest.mark.parametrize("what", INTO)
def test_what_is_returned_is_what_was_written_or_it_is_refused(tmp_path, what):
    """Whatever else the directory has; and the source stays whole, but where it is what was to be replaced."""
    options, name = INTO[what]
    hf, tensors = write_indexed(tmp_path / "hf", model(), 2), model(seed=9)
    write_indexed(tmp_path / "other", {f"old.{key}": tensor for key, tensor in tensors.items()}, 2)
    checkpoint.convert(tmp_path / "other", tmp_path / "ours", durable=False, **FORMATS["sharded"])
    checkpoint.convert(tmp_path / "other", tmp_path / "dcp", durable=False, format="dcp")
    checkpoint.convert(tmp_path / "other", tmp_path / "file" / "old.safetensors", durable=False)
    listed = set(os.listdir(tmp_path / name)) if (tmp_path / name).exists() else set()
    try:
        made = checkpoint.convert(hf, tmp_path / name, cast=torch.half, durable=False, **options)
    except (CheckpointError, ValueError):
        assert set(os.listdir(tmp_path / name)) == listed  # refused before anything was written
    else:
        assert_same(
            {key: entry.read() for key, entry in made.items()},
            {key: tensor.half() for key, tensor in model().items()},
        )
        assert made.format == {"dcp": "dcp", "sharded": "shardwise"}.get(options.get("format"), "safetensors")
    if what != "its own directory, in files of another size":
        assert_same(indexed(hf), model())


@pytest.mark.filterwarnings("ignore:The given buffer is not writable:UserWarning")
def test_a_failed_conversion_to_a_remote_place_leaves_what_was_there(tmp_path):
    memory = fsspec.filesystem("memory")
    with memory.open("/interrupted/out.safetensors", "wb") as file:
        file.write(b"as it was")

    def stop(done, total):
        raise StopError

    with pytest.raises(StopError):
        checkpoint.convert(source(tmp_path, model()), "memory://interrupted/out.safetensors", progress=stop)
    assert memory.cat_file("/interrupted/out.safetensors") == b"as it was"
