"""The fixture `ranks` itself: results in order, the first failure, and an end to waiting."""

import os
import sys
import tempfile
import time
from multiprocessing import get_context
from pathlib import Path

import pytest
from ranks import ranks  # noqa: F401  pytest looks fixtures up by name

from shardwise.testing import RankError, on_ranks


def test_results_come_in_the_order_of_the_ranks(ranks):  # noqa: F811
    def total(rank):
        import torch
        import torch.distributed as dist

        value = torch.tensor([rank + 1])
        dist.all_reduce(value)
        return rank, int(value)

    assert ranks(3, total) == [(0, 6), (1, 6), (2, 6)]


def test_the_rank_that_failed_first_is_reported(ranks):  # noqa: F811
    def fail(rank):
        import torch.distributed as dist

        if rank == 1:
            raise ValueError("this is why")
        dist.barrier()

    with pytest.raises(RankError, match=r"(?s)rank 1 of 3 failed first.*ValueError: this is why"):
        ranks(3, fail)


def test_ranks_cannot_start_ranks(ranks):  # noqa: F811
    def nested(rank):
        with pytest.raises(RankError, match="call it in a process without one"):
            ranks(2, lambda rank: rank)
        return True

    assert ranks(2, nested) == [True, True]


def test_a_rank_that_dies_is_reported(ranks):  # noqa: F811
    with pytest.raises(RankError, match=r"rank 0 of 2 failed first.*\n.*died without a report"):
        ranks(2, lambda rank: os._exit(3) if rank == 0 else time.sleep(60))


def test_a_rank_that_never_ends_is_named(ranks):  # noqa: F811
    with pytest.raises(RankError, match=r"ranks \[0, 1\] of 2 did not end in time"):
        ranks(2, lambda rank: time.sleep(60 * rank), timeout=1.0)


@pytest.mark.skipif(sys.platform != "linux", reason="other systems do not tell a process that its parent is no more")
def test_ranks_end_with_who_started_them_however_that_ends(tmp_path):
    def start():
        def work(rank):
            (tmp_path / str(rank)).write_text(str(os.getpid()))
            time.sleep(60)

        tempfile.tempdir = str(tmp_path)  # who is killed cannot remove what it made
        on_ranks(2, work)

    parent = get_context("fork").Process(target=start)
    parent.start()
    wait_until(lambda: all((tmp_path / rank).exists() and (tmp_path / rank).read_text() for rank in "01"))
    parent.kill()
    parent.join()
    pids = [int((tmp_path / rank).read_text()) for rank in "01"]
    wait_until(lambda: not any(map(runs, pids)))


def runs(pid):
    """True for a process that lives, and is not only waiting for somebody to ask how it ended."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


def wait_until(holds):
    until = time.monotonic() + 20
    while not holds():
        assert time.monotonic() < until
        time.sleep(0.01)
