"""Reading from the memory of other processes: where it is allowed, and what happens to memory that is no more there."""

import ctypes
import os
import signal
import time

import numpy as np
import pytest
import torch
from ranks import ranks  # noqa: F401
from wired import COLUMNS, ROWS, VALUES, expect, part, raised, use, works

import shardwise as sw
from shardwise.exchange import ViewCache
from shardwise.job.session import group_transport
from shardwise.transports import local_peers
from shardwise.transports.local_peers import MemoryProbe
from shardwise.transports.shared_memory import SharedMemoryTransport

me = os.getpid


def addresses(*tensors):
    return np.array([tensor.data_ptr() for tensor in tensors])


@pytest.mark.parametrize("most", [2**30, 1000])
@pytest.mark.parametrize("count", [0, 1, local_peers.MAX_RANGES, 3 * local_peers.MAX_RANGES + 5])
def test_any_number_of_ranges_is_read(monkeypatch, count, most):
    monkeypatch.setattr(local_peers, "MAX_BYTES", most)  # above it they are read in parts
    sizes = np.random.default_rng(count).integers(0, 50, count)
    sizes[::100] = 7000
    starts = np.cumsum(sizes) - sizes
    there, here = torch.randint(256, (int(sizes.sum()),), dtype=torch.uint8), torch.zeros(int(sizes.sum())).byte()
    back = starts[::-1].copy()
    local_peers.read(me(), here.data_ptr() + back, there.data_ptr() + back, sizes[::-1].copy())
    np.testing.assert_array_equal(here.numpy(), there.numpy())


def test_memory_that_is_not_there_is_an_error():
    room, one = torch.zeros(8), np.array([8])
    with pytest.raises(sw.ExchangeError, match="cannot be read: Bad address"):
        local_peers.read(me(), addresses(room), np.array([4096]), one)
    here, there = np.repeat(addresses(room), 2), np.array([room.data_ptr(), 4096])
    with pytest.raises(sw.ExchangeError, match="8 of 16 bytes were read"):
        local_peers.read(me(), here, there, np.repeat(one, 2))
    gone = os.fork()
    if not gone:
        os._exit(0)
    os.waitpid(gone, 0)
    with pytest.raises(sw.ExchangeError, match=f"process {gone} cannot be read: No such process"):
        local_peers.read(gone, addresses(room), addresses(room), one)


def test_it_is_tried_whether_memory_can_be_read(monkeypatch):
    probe = MemoryProbe.of_this_process()
    assert probe.is_readable(me())
    assert not probe._replace(content=b"something else!!").is_readable(me())
    assert not probe._replace(address=4096).is_readable(me())
    assert not probe.is_readable(0)
    monkeypatch.setattr(local_peers, "_libc", object())
    assert not probe.is_readable(me())  # a system that does not have it


def test_a_rank_that_may_not_read_is_sent_messages(ranks):  # noqa: F811
    def run(rank):
        use("read")
        if rank == 1:  # as a child may not read its parent, which may read it
            MemoryProbe.is_readable = lambda *_: False
        reads, read = [], local_peers.read
        works(rank)
        local_peers.read = lambda *args: reads.append(1) or read(*args)
        works(rank, transport="shared")
        return sorted(group_transport(None).local_peers.readers), len(reads)

    assert ranks(2, run) == [([], 1), ([0], 0)]


def test_a_rank_that_is_not_dumpable_can_still_take_part(ranks):  # noqa: F811
    def run(rank):
        use("read")
        if rank == 1:
            ctypes.CDLL(None).prctl(4, 0, 0, 0, 0)  # PR_SET_DUMPABLE: only root may read it now
        works(rank)
        return True

    assert all(ranks(2, run))


def test_memory_that_is_freed_in_the_middle_is_an_error_on_all_ranks(ranks):  # noqa: F811
    def run(rank):
        use("read")
        works(rank)
        x = part(VALUES, ROWS, rank)
        if rank == 0:
            locate = SharedMemoryTransport._location_in_place
            SharedMemoryTransport._location_in_place = lambda *args, **how: _nowhere(*locate(*args, **how))
        return raised(lambda: sw.reshard(x, COLUMNS))

    reports = ranks(2, run, patience=6, dying={9})
    assert [kind for kind, _, _ in reports] == ["ExchangeError"] * 2
    assert "rank 1 was reading from the memory of rank 0 when the transport broke" in reports[1][1]
    assert "Bad address" in reports[1][1]


def _nowhere(payload, segments):
    """The same location, with an address where there is nothing."""
    words = np.frombuffer(payload, np.int64).copy()
    words[5] = 4096
    return words.tobytes(), segments


def test_a_rank_that_stands_still_is_read_all_the_same(ranks):  # noqa: F811
    def run(rank):
        use("read")
        works(rank)
        if rank == 0:
            child = os.fork()  # who wakes it up again
            if not child:
                time.sleep(0.5)
                os.kill(os.getppid(), signal.SIGCONT)
                os._exit(0)
            os.kill(os.getpid(), signal.SIGSTOP)
        works(rank)
        return True

    assert all(ranks(2, run))


def test_many_short_runs_are_read_as_a_message(ranks):  # noqa: F811
    rows, columns = (sw.Layout.chunk((2000, 600), dim, owners=2) for dim in (0, 1))
    values = np.arange(2000 * 600.0).reshape(2000, 600)

    def run(rank):
        use("read")
        from shardwise.exchange import peer_reads

        peer_reads.SHORT = 1024
        spared, spare = [], ViewCache.spare
        ViewCache.spare = lambda views, size: spared.append(size) or spare(views, size)
        whole = part(values, rows, rank)
        turned = sw.ShardedTensor(whole.local_tensor().t().contiguous().t(), rows)  # runs of one element
        for x in (whole, turned):
            for out in (None, torch.empty(300, 2000, dtype=torch.float64).t()):
                expect(sw.reshard(x, columns, out=out), values, columns, rank)
        return spared

    assert ranks(2, run) == [[1000 * 300 * 8] * 3] * 2  # all but from rows to rows, which are long enough
