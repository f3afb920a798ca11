"""Files of this machine, read by many threads, and more of them than may be open."""

import resource
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

from shardwise import Layout, ShardedTensor, checkpoint
from shardwise.checkpoint.files import Span
from shardwise.checkpoint.local_files import LocalFiles
from shardwise.testing import on_ranks


def test_many_threads_read_what_they_ask_for(tmp_path):
    count, size = 200, 64
    for n in range(count):
        (tmp_path / str(n)).write_bytes(n.to_bytes(4, "little") * size)
    files = LocalFiles(tmp_path)

    def read(at):
        name = at * 7 % count
        whole = name.to_bytes(4, "little") * size
        (fetched,) = files.fetch([Span(str(name), 8, 24)])
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
    from shardwise.checkpoint.shares import written

    small = written(Layout.replicated((4, 4), range(16_000)), 4, 5)
    assert small.owners() == (5,)
    large = written(Layout.on_mesh((1 << 20, 64), [1000, 16], ["R", "S0"]), 4, 0)
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
