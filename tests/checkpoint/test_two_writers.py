"""Two writers at one place, and what strangers have put there: one checkpoint, whole; nobody else's file is touched."""

import json
import os
import re
import signal
import socket
import stat
from multiprocessing import get_context

import pytest
import torch
from checkpoints import has, names_in, shards_in
from safetensors.torch import load_file, save_file

from shardwise import checkpoint
from shardwise.errors import CheckpointError
from shardwise.storage import folders, locks
from shardwise.storage.locks import WriterRecord
from shardwise.testing import on_ranks

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning", "ignore::FutureWarning")  # torch's own, as it saves
FORK = get_context("fork")
SAVED = ("safetensors", "dcp")
ROWS = {"mesh": {"tp": 3}, "rule": [{"name": "*", "placements": {"tp": "S0"}}]}
CONVERTED = {
    "one.safetensors": {},
    "one.pt": {},
    "several": {"max_shard_size": "600"},
    "alone": {},
    "sharded": {"format": "sharded", "rules": ROWS},
    "dcp": {"format": "dcp", "rules": ROWS},
}
BUSY = "another save or conversion is writing to"


def state(start):
    return {"w": torch.full((9, 4), float(start)), "deep": {"r": torch.full((6,), float(start))}, "start": start}


def which(path):
    """Which of the checkpoints it is; all of its values are of that one."""
    start = checkpoint.open(path).objects["start"]
    flat = state(start)
    has(path, {"w": flat["w"], "deep.r": flat["deep"]["r"]}, {"start": start})
    return start


def model(start):
    return {f"layers.{at}.w": torch.full((12, 4), 100.0 * start + at) for at in range(6)}


def of(path):
    """Which model it is; all of it is of that one."""
    found = {name: entry.read() for name, entry in checkpoint.open(path).items()}
    start = int(found["layers.0.w"][0, 0]) // 100
    assert found.keys() == model(start).keys()
    for name, tensor in model(start).items():
        torch.testing.assert_close(found[name], tensor, rtol=0, atol=0)
    return start


def source(tmp_path, start):
    path = tmp_path / f"in{start}.safetensors"
    save_file(model(start), path)
    return path


def attempt(work):
    """What it raised, as a text; empty where all went well."""
    try:
        work()
    except CheckpointError as error:
        return str(error)
    return ""


class Meanwhile:
    """Lets something happen just before call number `at` of the functions of the system that writers use."""

    CALLS = ("open", "fsync", "replace", "scandir", "unlink", "lstat")

    def __init__(self, at, happens):
        self.at, self.happens, self.calls, self.real = at, happens, 0, {name: getattr(os, name) for name in self.CALLS}

    def __enter__(self):
        for name, real in self.real.items():
            setattr(os, name, self.watched(real))
        return self

    def __exit__(self, *_):
        for name, real in self.real.items():
            setattr(os, name, real)

    def watched(self, real):
        def call(*args, **options):
            self.calls += 1
            if self.calls - 1 == self.at:
                self.__exit__()
                self.happens()
            return real(*args, **options)

        return call


# --- saves ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("format", SAVED)
def test_a_save_at_any_moment_of_another_leaves_one_of_them_whole(tmp_path, format):
    refused = 0
    for at in range(200):
        path, told = tmp_path / str(at), []
        checkpoint.save(state(1), path, format=format, durable=False)

        def other(path=path, told=told):
            told.append(attempt(lambda: checkpoint.save(state(3), path, format=format, durable=False)))

        with Meanwhile(at, other) as meanwhile:
            told.append(attempt(lambda path=path: checkpoint.save(state(2), path, format=format)))
        assert "" in told, "one of them wins"
        assert all(BUSY in text or not text for text in told)
        assert which(path) in {start for start, text in zip((3, 2)[-len(told) :], told, strict=True) if not text}
        assert len(names_in(path)) == 2, names_in(path)
        refused += any(told)
        if meanwhile.calls <= at:
            break
    assert refused
    assert len(told) == 1


@pytest.mark.parametrize("format", SAVED)
def test_saves_that_start_together_leave_one_of_them_whole(tmp_path, format):
    """Processes of their own; every round begins with a checkpoint that is there."""
    rounds, start, end = 25, FORK.Barrier(2), FORK.Barrier(2)
    results = FORK.SimpleQueue()

    def work(mine):
        torch.set_num_threads(1)
        for at in range(rounds):
            if mine == 2:
                checkpoint.save(state(1), tmp_path / str(at), format=format, durable=False)
            start.wait(60)
            text = attempt(lambda at=at: checkpoint.save(state(mine), tmp_path / str(at), format=format, durable=False))
            end.wait(60)
            results.put((at, mine, text))
        os._exit(0)

    processes = [FORK.Process(target=work, args=(mine,)) for mine in (2, 3)]
    for process in processes:
        process.start()
    told = [results.get() for _ in range(2 * rounds)]
    for process in processes:
        process.join(60)
    for at in range(rounds):
        texts = {mine: text for number, mine, text in told if number == at}
        assert "" in texts.values()
        assert all(BUSY in text for text in texts.values() if text)
        assert not texts[which(tmp_path / str(at))]
        assert len(names_in(tmp_path / str(at))) == 2


def test_ranks_that_save_where_another_job_saves_are_all_told_before_they_write(tmp_path):
    path = tmp_path / "run"
    checkpoint.save(state(1), path, durable=False)
    with locks.claim_folder(folders.OutputFolder(path), "0" * 16) as claim:
        before = names_in(path)

        def run(rank):
            return attempt(lambda: checkpoint.save(state(2), path))

        told = on_ranks(2, run)
        assert names_in(path) == before
        claim.unfinished = False
    assert told[0] == told[1]
    assert f"{BUSY} {path} (process {os.getpid()} on host" in told[0]
    assert which(path) == 1


def test_only_files_that_the_replaced_index_names_go(tmp_path):
    checkpoint.save(state(1), tmp_path, durable=False)
    strangers = [
        f"shard-00000-of-00001-{'0' * 16}.safetensors",
        f"__0_{'1' * 16}.distcp",
        "x.part",
        f".x.{'2' * 16}.part",
    ]
    for name in strangers:
        (tmp_path / name).write_bytes(b"mine")
    os.rename(tmp_path / "shardwise.json", tmp_path / "backup.json")
    kept = shards_in(tmp_path)
    checkpoint.save(state(2), tmp_path, durable=False)
    assert {*strangers, *kept} <= set(names_in(tmp_path))
    checkpoint.save(state(3), tmp_path, durable=False)
    assert {*strangers, *kept} <= set(names_in(tmp_path))
    assert len(names_in(tmp_path)) == len(strangers) + 4
    assert which(tmp_path) == 3


# --- conversions ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", CONVERTED)
def test_a_conversion_in_the_middle_of_another_is_refused(tmp_path, kind):
    out, told = tmp_path / kind, []
    a, b = source(tmp_path, 1), source(tmp_path, 2)

    def meanwhile(done, total):
        if not told:
            told.append(attempt(lambda: checkpoint.convert(b, out, durable=False, **CONVERTED[kind])))

    checkpoint.convert(a, out, durable=False, progress=meanwhile, **CONVERTED[kind])
    assert f"{BUSY} {out}" in told[0]
    assert of(out) == 1
    assert not [*tmp_path.rglob("*.lock"), *tmp_path.rglob("*.part")]


@pytest.mark.parametrize("kind", CONVERTED)
def test_conversions_that_start_together_leave_one_of_them_whole(tmp_path, kind):
    rounds, start, end = 8, FORK.Barrier(2), FORK.Barrier(2)
    results, paths = FORK.SimpleQueue(), {one: source(tmp_path, one) for one in (1, 2)}

    def work(mine):
        torch.set_num_threads(1)
        for at in range(rounds):
            (tmp_path / str(at)).mkdir(exist_ok=True)
            start.wait(60)
            out = tmp_path / str(at) / kind
            text = attempt(lambda out=out: checkpoint.convert(paths[mine], out, durable=False, **CONVERTED[kind]))
            end.wait(60)
            results.put((at, mine, text))
        os._exit(0)

    processes = [FORK.Process(target=work, args=(mine,)) for mine in (1, 2)]
    for process in processes:
        process.start()
    told = [results.get() for _ in range(2 * rounds)]
    for process in processes:
        process.join(60)
    for at in range(rounds):
        texts = {mine: text for number, mine, text in told if number == at}
        assert "" in texts.values(), texts
        assert not texts[of(tmp_path / str(at) / kind)]


def test_a_save_and_a_conversion_to_one_place_keep_out_of_each_other(tmp_path):
    out, told, path = tmp_path / "out", [], source(tmp_path, 1)

    def meanwhile(done, total):
        if not told:
            told.append(attempt(lambda: checkpoint.save(state(1), out)))

    checkpoint.convert(path, out, durable=False, progress=meanwhile, **CONVERTED["sharded"])
    assert BUSY in told[0]
    assert of(out) == 1


def test_conversions_to_two_files_of_a_directory_run_at_the_same_time(tmp_path):
    a, b, told = source(tmp_path, 1), source(tmp_path, 2), []

    def meanwhile(done, total):
        if not told:
            told.append(attempt(lambda: checkpoint.convert(b, tmp_path / "b.safetensors", durable=False)))

    checkpoint.convert(a, tmp_path / "a.safetensors", durable=False, progress=meanwhile)
    assert told == [""]
    assert (of(tmp_path / "a.safetensors"), of(tmp_path / "b.safetensors")) == (1, 2)


# --- writers that died ------------------------------------------------------------------------------------------------


def killed(path, out, **options):
    """A conversion that dies after half of it."""

    def kill(done, total):
        if done > total // 2:
            os.kill(os.getpid(), signal.SIGKILL)

    process = FORK.Process(target=checkpoint.convert, args=(path, out), kwargs={"progress": kill, **options})
    process.start()
    process.join(60)
    assert process.exitcode == -signal.SIGKILL


@pytest.mark.parametrize("kind", ["sharded", "dcp"])
def test_another_conversion_removes_what_one_that_died_or_failed_has_left(tmp_path, kind):
    out = tmp_path / "out"
    killed(source(tmp_path, 1), out, durable=False, **CONVERTED[kind])
    assert len(names_in(out)) == 3, "a file, one aside, and the record of both"

    def stop(done, total):
        if done > total // 2:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        checkpoint.convert(source(tmp_path, 2), out, durable=False, progress=stop, **CONVERTED[kind])
    assert len(names_in(out)) == 2, "a file, and the record of it"
    checkpoint.convert(source(tmp_path, 3), out, durable=False, **CONVERTED[kind])
    assert of(out) == 3
    assert len(names_in(out)) == 4


@pytest.mark.parametrize("why", ["another user's", "of another host"])
def test_what_a_writer_left_that_may_not_be_ours_to_remove_stays(tmp_path, monkeypatch, why):
    out = tmp_path / "out"
    killed(source(tmp_path, 1), out, durable=False, **CONVERTED["sharded"])
    left = {name for name in names_in(out) if name != locks.LOCK}
    with monkeypatch.context() as patched:
        if why == "another user's":
            patched.setattr(locks, "geteuid", lambda: os.geteuid() + 1)
        else:
            patched.setattr("shardwise.storage.locks.node", lambda: "elsewhere")
        checkpoint.convert(source(tmp_path, 2), out, durable=False, **CONVERTED["sharded"])
    assert left <= set(names_in(out))
    assert of(out) == 2
    if why == "of another host":
        checkpoint.convert(source(tmp_path, 3), out, durable=False, **CONVERTED["sharded"])
        assert not left & set(names_in(out))
        assert len(names_in(out)) == 4


def test_a_file_is_cleaned_up_by_the_next_conversion_to_it(tmp_path):
    (tmp_path / "out").mkdir()
    out = tmp_path / "out" / f"{'long' * 60}.safetensors"
    killed(source(tmp_path, 1), out, durable=False)
    assert len(names_in(tmp_path / "out")) == 2
    with pytest.raises(CheckpointError, match=r"is unfinished: a save or a conversion to it was interrupted"):
        checkpoint.open(tmp_path / "out")
    checkpoint.convert(source(tmp_path, 2), out, durable=False)
    assert names_in(tmp_path / "out") == [out.name]


@pytest.mark.parametrize("text", ["", "{", "[]\n{}\n", '{"host": 1}\n', "null\n" * 3, '{"a":' * 9000, "\0\xff"])
def test_a_record_that_cannot_be_read_is_left_out(tmp_path, text):
    (tmp_path / locks.LOCK).write_text(text)
    checkpoint.save(state(1), tmp_path, durable=False)
    assert which(tmp_path) == 1
    assert len(names_in(tmp_path)) == 2


WRONG = {
    "host": [None, 1, ["a"]],
    "since": [None, "1", [1]],
    "run": [None, 1, "abc", "A" * 16],
    "token": [None, 1, "abc", "A" * 16],
    "old": [None, 1, "ab", {"a": "b"}, ["a", 1]],
}


@pytest.mark.parametrize(("field", "value"), [(field, value) for field, values in WRONG.items() for value in values])
def test_a_record_with_a_field_of_another_kind_is_none(field, value):
    line = WriterRecord.mine("a" * 16, "b" * 16, ["c", "d"]).line()
    assert WriterRecord.read(line.encode()).line() == line
    with pytest.raises((TypeError, ValueError)):
        WriterRecord.read(json.dumps({**json.loads(line), field: value}).encode())


def test_a_record_removes_nothing_but_files_of_ours_that_no_index_names(tmp_path):
    checkpoint.save(state(1), tmp_path, durable=False)
    (current,) = shards_in(tmp_path)
    for name in ("notes.txt", "model.safetensors"):
        (tmp_path / name).write_bytes(b"mine")
    (tmp_path / ".." / "outside").resolve().write_bytes(b"mine")
    record = WriterRecord.mine(
        "a" * 16, "b" * 16, [current, "notes.txt", "model.safetensors", "../outside", "shardwise.json"]
    )
    with locks.claim_folder(folders.OutputFolder(tmp_path), "c" * 16):
        pass
    (tmp_path / locks.LOCK).write_text(record.line())
    with locks.claim_folder(folders.OutputFolder(tmp_path), "c" * 16):
        assert which(tmp_path) == 1
    assert (tmp_path / ".." / "outside").resolve().exists()
    assert names_in(tmp_path) == sorted([current, "notes.txt", "model.safetensors", "shardwise.json"])


# --- what strangers put there -----------------------------------------------------------------------------------------


def plant(what, path, victim):
    if what == "symlink":
        path.symlink_to(victim)
    elif what == "hard link":
        os.link(victim, path)
    elif what == "dangling symlink":
        path.symlink_to(victim.with_name("nothing"))
    elif what == "pipe":
        os.mkfifo(path)
    elif what == "directory":
        path.mkdir()
    else:
        here = os.getcwd()
        os.chdir(path.parent)  # names of sockets are short
        socket.socket(socket.AF_UNIX).bind(path.name)
        os.chdir(here)


PLANTED = ("symlink", "hard link", "dangling symlink", "pipe", "directory", "socket")


@pytest.mark.parametrize("what", PLANTED)
@pytest.mark.parametrize("kind", [*CONVERTED, "save"])
def test_what_is_planted_at_a_name_that_can_be_foreseen_does_no_harm(tmp_path, kind, what):
    victim, path, out = tmp_path / "victim", source(tmp_path, 1), tmp_path / "folder" / kind
    out.parent.mkdir()
    victim.write_bytes(b"precious")

    def write(out):
        if kind == "save":
            checkpoint.save(state(1), out, durable=False)
        else:
            checkpoint.convert(path, out, durable=False, **CONVERTED[kind])

    write(out)
    single = out.is_file()
    folder = out.parent if single else out
    final = {name: (folder / name).read_bytes() for name in names_in(folder)}
    lock = f".{kind}.lock" if single else locks.LOCK
    names = (*final, *(f"{name}.part" for name in final), *(f".{name}.part" for name in final), lock)

    def work():
        for name in names:
            for one in names_in(folder):
                (folder / one).rmdir() if (folder / one).is_dir() else (folder / one).unlink()
            plant(what, folder / name, victim)
            attempt(lambda: write(out))
            assert victim.read_bytes() == b"precious"
            assert not victim.with_name("nothing").exists()
        os._exit(0)

    process = FORK.Process(target=work)
    process.start()
    process.join(60)
    assert process.exitcode == 0, "it has ended, and harmed nothing"


def test_a_source_that_is_called_as_a_file_aside_once_was_survives(tmp_path):
    os.rename(source(tmp_path, 1), tmp_path / "m.safetensors.part")
    checkpoint.convert(tmp_path / "m.safetensors.part", tmp_path / "m.safetensors", durable=False)
    torch.testing.assert_close(load_file(tmp_path / "m.safetensors.part"), model(1), rtol=0, atol=0)
    assert of(tmp_path / "m.safetensors") == 1


def test_files_aside_are_new_have_random_names_and_the_mode_of_the_umask(tmp_path):
    names, path, before = [], source(tmp_path, 1), os.umask(0o027)
    try:
        for _ in range(2):
            checkpoint.convert(
                path, tmp_path / "out.safetensors", durable=False, progress=lambda *_: names.append(names_in(tmp_path))
            )
            (tmp_path / "out.safetensors").rename(tmp_path / "done.safetensors")
    finally:
        os.umask(before)
    asides = {name for listed in names for name in listed if name.endswith(".part")}
    assert len(asides) == 2
    assert all(re.fullmatch(r"\.out\.safetensors\.[0-9a-f]{16}\.part", name) for name in asides)
    assert stat.S_IMODE((tmp_path / "done.safetensors").stat().st_mode) == 0o640


# --- what is used again -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["several", "sharded", "dcp"])
def test_a_conversion_says_which_files_it_did_not_write_again(tmp_path, kind):
    path, out, told = source(tmp_path, 1), tmp_path / "out", []
    killed(path, out, durable=False, **CONVERTED[kind])
    whole = [name for name in names_in(out) if not name.startswith(".")]
    made = checkpoint.convert(
        path, out, durable=False, progress=lambda done, total: told.append(done), verify=False, **CONVERTED[kind]
    )
    assert sorted(made.reused) == whole
    assert len(whole) >= 1
    assert told == sorted(told)
    assert told[-2] == told[-1], "what is used again counts as done"
    assert checkpoint.open(out).reused == ()
