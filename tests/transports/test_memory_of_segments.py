"""What exchanges stage in shared memory: no more than was promised, and given back to the system when asked."""

import time

import numpy as np
import pytest
import torch.distributed as dist
from ranks import ranks  # noqa: F401
from wired import both, expect, part, use

import shardwise as sw
from shardwise.job.session import group_transport

SHAPE = (960, 1024)
ROWS, COLUMNS = both(SHAPE, 3)
VALUES = np.arange(960.0 * 1024).reshape(SHAPE)
MOVES = {
    "rows to columns": (ROWS, COLUMNS),
    "rows to all": (ROWS, sw.Layout.replicated(SHAPE, 3)),
    "one to rows": (sw.Layout.replicated(SHAPE, [1]), ROWS),
    "terms to columns": (sw.parse("960x1024/P@3"), COLUMNS),
}


def in_memory():
    """Bytes of segments that this process sees: its own, and what it has read of others."""
    found, ours = 0, False
    with open("/proc/self/smaps") as file:
        for line in file:
            if "-" in line.split()[0] and line[0] in "0123456789abcdef":
                ours = "memfd:shardwise" in line
            elif ours and line.startswith("Rss:"):
                found += 1024 * int(line.split()[1])
    return found


def test_staging_may_be_released_while_an_exchange_is_under_way(ranks):  # noqa: F811
    def run(rank):
        use("staged")
        for turn in range(4):
            handle = sw.reshard(part(VALUES + turn, ROWS, rank), COLUMNS, max_bytes=100_000, async_op=True)
            while not handle.done():
                if rank == 0:
                    sw.release_staging()
                time.sleep(0.0005)
            expect(handle.wait(), VALUES + turn, COLUMNS, rank)
        return True

    assert all(ranks(3, run))


@pytest.mark.parametrize("move", MOVES)
def test_segments_and_staging_keep_the_promise_of_the_plan(ranks, move):  # noqa: F811
    source, target = MOVES[move]

    def run(rank):
        use("staged")
        for most in (None, 1_000_000, 100_000):
            promised = sw.plan(source, target, itemsize=8, max_bytes=most).peak_bytes
            sw.release_staging()
            sw.reshard(part(VALUES, source, rank), target, max_bytes=most, transport="shared")
            transport = group_transport(None)
            assert transport.shared_staging.bytes + transport.staging.bytes <= promised <= (most or 2**62)
        return True

    assert all(ranks(3, run))


def test_what_is_released_is_free_at_once_whoever_still_has_it_mapped(ranks):  # noqa: F811
    rows, columns = both((3072, 4096), 3)

    def run(rank):
        use("staged")
        found = []
        for call in (lambda: sw.reshard(sw.empty(rows), columns), sw.release_staging):
            call()
            dist.barrier()
            found.append(in_memory())
            dist.barrier()
        return found

    for used, left in ranks(3, run):
        assert used > 10 * 2**20
        assert left == 0


@pytest.mark.parametrize("move", ["rows to columns", "one to rows"])
def test_rounds_of_calls_that_follow_one_another_share_what_was_promised(ranks, move):  # noqa: F811
    source, target = MOVES[move]
    source, target = (sw.parse(str(one).replace("960x1024", "96x128")) for one in (source, target))
    values = VALUES[:96, :128]

    def run(rank):
        use("staged")
        promised = sw.plan(source, target, itemsize=8).peak_bytes
        transport = group_transport(None)
        for turn in range(50):
            expect(sw.reshard(part(values + turn, source, rank), target), values + turn, target, rank)
            assert transport.shared_staging.bytes + transport.staging.bytes <= promised
        return len(transport.shared_staging._rounds)

    assert max(ranks(3, run)) <= 2


def test_staging_that_grows_does_not_leave_what_it_was_behind(ranks):  # noqa: F811
    def run(rank):
        use("staged")
        for size in (1024, 1280, 1536, 1792, 2048):
            rows, columns = both((3 * size, 1024), 3)
            sw.reshard(sw.empty(rows), columns)
        dist.barrier()
        return in_memory(), group_transport(None).shared_staging.bytes

    for seen, packed in ranks(3, run):
        assert packed < seen < 2.1 * packed  # what this rank sent, and what it got
