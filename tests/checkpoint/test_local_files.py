"""Files of this machine, read by many threads, and more of them than may be open."""

import os
import resource
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch
from confined import refused

from shardwise import Layout, ShardedTensor, checkpoint
from shardwise.checkpoint import local_files
from shardwise.checkpoint.files import ByteRange
from shardwise.checkpoint.local_files import LocalFiles
from shardwise.errors import CheckpointError
from shardwise.testing import on_ranks


def test_many_threads_read_what_they_ask_for(tmp_path):
    count, size = 200, 64
    for n in range(count):
        (tmp_path / str(n)).write_bytes(n.to_bytes(4, "little") * size)
    files = LocalFiles(tmp_path)

    def read(at):
        name = at * 7 % count
        whole = name.to_bytes(4, "little") * size
        (fetched,) = files.fetch([ByteRange(str(name), 8, 24)])
        return files.read(str(name), 4, 12) == whole[4:12] and fetched.tobytes() == whole[8:24]

    with ThreadPoolExecutor(8) as pool:
        assert all(pool.map(read, range(20 * count)))


@pytest.fixture
def few_files():
    """As many as most systems allow."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (1024, hard))
    yield
    resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


def test_a_tensor_in_more_files_than_may_be_open(tmp_path, few_files):
    rows = 1500
    rules = {"mesh": {"tp": rows}, "rule": [{"name": "*", "placements": "S0"}]}
    values = torch.arange(rows * 2.0).reshape(rows, 2)
    torch.save({"w": values}, tmp_path / "whole.pt")
    made = checkpoint.convert(tmp_path / "whole.pt", tmp_path / "parts", format="sharded", rules=rules, durable=False)
    assert made["w"].shards == rows
    assert torch.equal(made["w"].read(), values)
    into = {"w": torch.zeros(rows, 2)}
    checkpoint.load(tmp_path / "parts", into)
    assert torch.equal(into["w"], values)
    assert checkpoint.verify(tmp_path / "parts", tmp_path / "whole.pt", jobs=4) == []


def test_replicas_on_very_many_ranks_are_shared_out_at_once():
    """What a save asks for every tensor; by pieces of every owner it would take seconds each."""
    from shardwise.checkpoint.assignment import assign_writers

    small = assign_writers("small", Layout.replicated((4, 4), range(16_000)), 4, 5)
    assert small.owners() == (5,)
    large = assign_writers("large", Layout.on_mesh((1 << 20, 64), [1000, 16], ["R", "S0"]), 4, 0)
    assert len(large.owners()) == 16_000
    assert sum(piece.box.volume for piece in large.pieces(0)) * 4 == (1 << 20) * 64 * 4 // 16_000 // 256 * 256


def test_what_only_some_ranks_have_is_saved_from_the_first_of_them(tmp_path):
    def run(rank):
        own = None if rank == 0 else torch.full((3,), float(rank))
        layout = Layout.chunk((6,), 0, 3)
        state = {"own": own, "w": ShardedTensor(torch.full((2,), float(rank)), layout)}
        if rank:
            checkpoint.save(state, tmp_path / "made")
            return
        with pytest.warns(UserWarning, match="'own' differs between ranks"):
            checkpoint.save(state, tmp_path / "made")

    on_ranks(3, run)
    found = checkpoint.open(tmp_path / "made")
    assert found["own"].read().tolist() == [1.0, 1.0, 1.0]
    assert found["w"].read().tolist() == [0.0, 0.0, 1.0, 1.0, 2.0, 2.0]


def rewritten(path, change):
    """The same file with other bytes, written in place; its times are as they were."""
    was = path.stat()
    with path.open("r+b") as file:
        change(file)
    os.utime(path, ns=(was.st_atime_ns, was.st_mtime_ns))


def other_values(file):
    file.seek(-16, 2)
    file.write(bytes(range(16)))


def cut_off(file):
    file.truncate(200)


READERS = {
    "read": lambda found: found["w"].read(),
    "load": lambda found: checkpoint.load(found, {"w": torch.zeros(5_000)}),
    "verify": lambda found: checkpoint.verify(found, found),
    "convert": lambda found: checkpoint.convert(found, "out.pt"),
    "copy": lambda found: checkpoint.convert(found, "out.safetensors"),
}


@pytest.mark.parametrize("before", [lambda found: found["w"].read(), lambda found: None], ids=["a read", "open"])
@pytest.mark.parametrize("change", [other_values, cut_off])
@pytest.mark.parametrize("format", ["safetensors", "dcp", "torch.save"])
def test_files_that_are_written_to_afterwards_are_noticed(tmp_path, monkeypatch, format, change, before):
    """Also where they are cut off, which would end a process that reads what is mapped: so in one of its own."""
    monkeypatch.chdir(tmp_path)
    for name, read in READERS.items():
        path = Path(f"{name}.pt")
        if format == "torch.save":
            torch.save({"w": torch.ones(5_000)}, path)
        else:
            checkpoint.save({"w": torch.ones(5_000)}, path, format=format)
        (data,) = [path] if path.is_file() else [p for p in path.iterdir() if p.suffix in (".safetensors", ".distcp")]

        def work(path=path, data=data, read=read):
            found = checkpoint.open(path)
            before(found)
            time.sleep(0.02)  # longer than what clocks of file systems count
            rewritten(data, change)
            return read(found)

        refused(work, CheckpointError, data.name, "changed since the checkpoint was opened")


def test_a_file_that_is_replaced_is_read_as_it_was(tmp_path):
    torch.save({"w": torch.ones(5_000)}, tmp_path / "m.pt")
    found = checkpoint.open(tmp_path / "m.pt")
    assert found["w"].read().sum() == 5_000
    torch.save({"w": torch.zeros(5_000)}, tmp_path / "new.pt")
    (tmp_path / "new.pt").replace(tmp_path / "m.pt")
    assert found["w"].read().sum() == 5_000


@pytest.mark.parametrize("format", ["safetensors", "dcp"])
def test_a_file_that_is_replaced_before_its_first_read_is_noticed(tmp_path, format):
    for name, value in ("old", 0.0), ("new", 1.0):
        checkpoint.save({"w": torch.full((5_000,), value), "v": torch.ones(3)}, tmp_path / name, format=format)
    (old,), (new,) = ([p for p in (tmp_path / n).iterdir() if p.stat().st_size > 15_000] for n in ("old", "new"))
    found = checkpoint.open(tmp_path / "old")
    time.sleep(0.02)
    new.replace(old)  # which is older than the checkpoint was when it was opened, but not there
    for _ in range(2):  # the second look is no excuse
        with pytest.raises(
            CheckpointError, match=f"{old.name} was replaced or changed since the checkpoint was opened"
        ):
            found["w"].read()


@pytest.mark.parametrize("format", ["safetensors", "dcp"])
def test_a_file_that_is_the_same_is_read_whatever_names_and_clocks_say(tmp_path, monkeypatch, format):
    checkpoint.save({"w": torch.ones(5_000)}, tmp_path / "m", format=format)
    found = checkpoint.open(tmp_path / "m")
    time.sleep(0.02)
    for file in (tmp_path / "m").iterdir():
        os.link(file, tmp_path / f"{file.name}.copy")
    assert found["w"].read().sum() == 5_000
    monkeypatch.setattr(local_files, "time_ns", lambda: time.time_ns() - 3600 * 10**9)  # the file server is ahead of us
    checkpoint.save({"w": torch.ones(5_000)}, tmp_path / "ahead", format=format)
    assert checkpoint.open(tmp_path / "ahead")["w"].read().sum() == 5_000
