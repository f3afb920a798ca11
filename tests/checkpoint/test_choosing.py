"""Whether every rank reads its own part, or bytes are read once and sent: chosen alike on all ranks."""

import pytest
import torch
import torch.distributed as dist
from checkpoints import held, numbers

from shardwise import checkpoint
from shardwise.checkpoint import choosing
from shardwise.checkpoint.local_files import LocalFiles
from shardwise.errors import CheckpointError
from shardwise.testing import hosts, on_ranks, why_no_hosts
from shardwise.transports.shared_memory import SharedMemoryTransport

COUNT, BYTES = 12, 8 * 6 * 4  # tensors, and the size of each


def save(path):
    checkpoint.save({f"t{at:02}": numbers(8, 6, start=100 * at) for at in range(COUNT)}, path)


def load(path, ranks=2, **options):
    """Load on a rank: the way and the names of every part of the load, and whether the values are right."""
    parts = []

    def noted(read, fill):
        def work(callers, flat, prepare, options):
            prepared, losses = fill(callers, flat, prepare, options)
            parts.append((read, list(prepared.streams)))
            return prepared, losses

        return work

    choosing.FILLS = {read: noted(read, fill) for read, fill in choosing.FILLS.items()}
    choosing.fill_each, choosing.fill_once = choosing.FILLS["each"], choosing.FILLS["once"]
    into = {f"t{at:02}": held(torch.zeros(8, 6), f"8x6/S0@{ranks}") for at in range(COUNT)}
    checkpoint.load(path, into, group=dist.group.WORLD, **options)
    for at, tensor in enumerate(into.values()):
        expected = held(numbers(8, 6, start=100 * at), f"8x6/S0@{ranks}")
        torch.testing.assert_close(tensor.shards, expected.shards, rtol=0, atol=0)
    return parts


def on_two_hosts(each, once):
    """Ranks that seem to be on hosts of their own, where a byte takes so many seconds; rank 1 has another clock."""
    SharedMemoryTransport.on_one_host = property(lambda self: False)
    choosing.TRIAL = 2 * BYTES
    clock = [0]
    took = {"each": each, "once": once}

    def ticking(read, fill):
        def work(callers, flat, prepare, options):
            result = fill(callers, flat, prepare, options)
            clock[0] += took[read]
            return result

        return work

    choosing.FILLS = {read: ticking(read, fill) for read, fill in choosing.FILLS.items()}
    choosing.monotonic_ns = lambda: clock[0]


def test_ranks_of_one_host_read_what_they_need_from_local_files(tmp_path):
    save(tmp_path / "m")
    for parts in on_ranks(2, lambda _: load(tmp_path / "m")):
        assert [read for read, _ in parts] == ["each"]


def test_remote_files_are_read_once(tmp_path):
    save(tmp_path / "m")

    def run(rank):
        LocalFiles.near = False
        return load(tmp_path / "m")

    for parts in on_ranks(2, run):
        assert [read for read, _ in parts] == ["once"]


def test_what_one_rank_alone_reaches_from_afar_is_read_once(tmp_path):
    save(tmp_path / "m")

    def run(rank):
        LocalFiles.near = rank == 0
        return load(tmp_path / "m")

    for parts in on_ranks(2, run):
        assert [read for read, _ in parts] == ["once"]


@pytest.mark.parametrize("faster", ["each", "once"])
def test_between_hosts_the_way_is_measured_on_the_first_tensors(tmp_path, faster):
    """The ranks measure different times, each another way as the faster one: the slowest rank decides for all."""
    save(tmp_path / "m")

    def run(rank):
        slow, quick = (1000, 10) if rank else (20, 30)
        on_two_hosts(**({"each": quick, "once": slow} if faster == "each" else {"each": slow, "once": quick}))
        return load(tmp_path / "m")

    for parts in on_ranks(2, run):
        assert [read for read, _ in parts] == ["each", "once", faster]
        assert [len(names) for _, names in parts] == [2, 2, COUNT - 4]
        assert sorted(name for _, names in parts for name in names) == [f"t{at:02}" for at in range(COUNT)]


def test_too_little_to_measure_is_read_once(tmp_path):
    save(tmp_path / "m")

    def run(rank):
        on_two_hosts(1, 1)
        choosing.TRIAL = COUNT * BYTES // 3
        return load(tmp_path / "m")

    for parts in on_ranks(2, run):
        assert [read for read, _ in parts] == ["once"]


def test_progress_of_a_measured_load_rises_to_the_end(tmp_path):
    save(tmp_path / "m")

    def run(rank):
        on_two_hosts(1, 2)
        told = []
        load(tmp_path / "m", progress=lambda done, total: told.append((done, total)))
        return told

    for told in on_ranks(2, run):
        assert told == sorted(told)
        assert {total for _, total in told} == {COUNT * BYTES}
        assert told[-1] == (COUNT * BYTES, COUNT * BYTES)


def test_a_damaged_file_in_a_measured_load_is_refused_alike_on_all_ranks(tmp_path):
    save(tmp_path / "m")
    for file in (tmp_path / "m").glob("*.safetensors"):
        file.write_bytes(file.read_bytes()[:-40])

    def run(rank):
        on_two_hosts(1, 2)
        with pytest.raises(CheckpointError) as raised:
            load(tmp_path / "m")
        return str(raised.value)

    assert len(set(on_ranks(2, run))) == 1


def test_values_out_of_range_are_counted_over_all_parts_of_a_measured_load(tmp_path):
    checkpoint.save({f"t{at:02}": torch.full((8, 6), 1e5) for at in range(COUNT)}, tmp_path / "m")

    def run(rank):
        on_two_hosts(1, 2)
        into = {f"t{at:02}": torch.zeros(8, 6, dtype=torch.float16) for at in range(COUNT)}
        with pytest.raises(ValueError, match="overflow='allow' casts anyway") as raised:
            checkpoint.load(tmp_path / "m", into, group=dist.group.WORLD)
        return str(raised.value)

    (said,) = set(on_ranks(2, run))
    assert f"(and {COUNT - 1} more tensors" in said


def test_files_that_are_not_in_the_page_cache_are_read_before_they_are_mapped(tmp_path):
    save(tmp_path / "m")

    def run(rank):
        LocalFiles.cached = lambda self, bytes: False
        read_into, sizes = LocalFiles.read_into, []

        def counted(self, name, start, memory):
            sizes.append(len(memory))
            return read_into(self, name, start, memory)

        LocalFiles.read_into = counted
        assert [read for read, _ in load(tmp_path / "m", read="once")] == ["once"]
        return sum(size for size in sizes if size == BYTES)

    assert sum(on_ranks(2, run)) == COUNT * BYTES


@pytest.mark.skipif(why_no_hosts() is not None, reason=str(why_no_hosts()))
def test_real_hosts_measure_and_agree(tmp_path):
    save(tmp_path / "m")

    def run(rank):
        choosing.TRIAL = 2 * BYTES
        return load(tmp_path / "m", ranks=4)

    with hosts(2) as (a, b):
        (parts,) = {str(parts): parts for parts in on_ranks(4, run, hosts=[a, a, b, b])}.values()
    assert [read for read, _ in parts[:2]] == ["each", "once"]
    assert parts[2][0] in ("each", "once")
    assert [len(names) for _, names in parts] == [2, 2, COUNT - 4]
