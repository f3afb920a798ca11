"""The fixture `ranks(n, fn)`: `fn(rank)` on n forked processes with a gloo group between them.

Forked, not spawned, so that torch is imported once. The group meets in a file, not on a port.
"""

import multiprocessing
import os
import time
import traceback
import warnings
from datetime import timedelta
from multiprocessing.connection import wait

import pytest

TIMEOUT = 60.0


class RankError(AssertionError):
    """What went wrong on the rank that failed first."""


@pytest.fixture
def ranks(tmp_path):
    """Run `fn(rank)` on n ranks and give back what they returned, in the order of the ranks.

    `patience` is the timeout of the group. Ranks that are `dying` may end without a word: None stands for them.
    """
    runs = iter(range(1000))

    def run(n, fn, timeout=TIMEOUT, patience=TIMEOUT, dying=()):
        return _run(n, fn, str(tmp_path / f"store{next(runs)}"), timeout, patience, dying)

    return run


def _run(n, fn, store, timeout, patience=TIMEOUT, dying=()):
    _one_thread()
    fork = multiprocessing.get_context("fork")
    pipes = [fork.Pipe(duplex=False) for _ in range(n)]
    together = not dying  # the others cannot meet at the end
    start = [(rank, fn, store, patience, pipes, together) for rank in range(n)]
    processes = [fork.Process(target=_rank, args=args, daemon=True) for args in start]
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", DeprecationWarning)  # newer Pythons warn of forks beside threads
            for process in processes:
                process.start()
        for _, end in pipes:
            end.close()
        return _results(pipes, time.monotonic() + timeout, dying)
    finally:
        for process in processes:
            process.kill()
            process.join()


def _one_thread():
    """torch in one thread: a forked child of one that ran OpenMP could wait for threads that it does not have."""
    import torch

    torch.set_num_threads(1)


def _rank(rank, fn, store, patience, pipes, together):
    """The life of one rank: meet, run, report, and leave together."""
    import torch.distributed as dist

    for _, end in pipes[:rank] + pipes[rank + 1 :]:
        end.close()  # or nobody would see that another rank died
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    pipe, limit = pipes[rank][1], timedelta(seconds=patience)
    try:
        files = dist.FileStore(store, len(pipes))
        dist.init_process_group("gloo", store=files, rank=rank, world_size=len(pipes), timeout=limit)
        result = fn(rank)
        if together:
            dist.barrier()
        pipe.send((time.monotonic(), None, result))
    except BaseException:
        pipe.send((time.monotonic(), traceback.format_exc(), None))
    finally:
        pipe.close()
        os._exit(0)  # no handler or fixture of the parent runs here


def _results(pipes, deadline, dying):
    """What every rank reported; where one failed, an error with the report of the first one."""
    reports, waiting = {}, {pipe: rank for rank, (pipe, _) in enumerate(pipes)}
    while waiting:
        ready = wait(list(waiting), max(0.0, deadline - time.monotonic()))
        if not ready:
            break
        for pipe in ready:
            rank = waiting.pop(pipe)
            reports[rank] = _report(pipe, rank in dying)
        if any(error for _, error, _ in reports.values()):
            deadline = min(deadline, time.monotonic() + 1.0)  # the others will see closed sockets, if anything
    failed = [(when, rank, error) for rank, (when, error, _) in reports.items() if error]
    if failed:
        _, rank, error = min(failed)
        raise RankError(f"rank {rank} of {len(pipes)} failed first ({len(failed)} failed in all):\n{error}")
    if waiting:
        raise RankError(f"ranks {sorted(waiting.values())} of {len(pipes)} did not end in time")
    return [reports[rank][2] for rank in range(len(pipes))]


def _report(pipe, dying):
    try:
        return pipe.recv()
    except EOFError:
        return time.monotonic(), None if dying else "the process died without a word", None
