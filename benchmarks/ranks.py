"""Work on several processes with a gloo group between them, forked so that torch is imported once."""

from __future__ import annotations

import multiprocessing
import os
import time
import traceback
from collections.abc import Callable
from datetime import timedelta
from multiprocessing.connection import Connection, wait
from tempfile import TemporaryDirectory
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

LIMIT = timedelta(seconds=300)


class Report(NamedTuple):
    """What a rank says before it leaves: when, how it failed if it did, and what its work returned."""

    when: float
    error: str | None
    result: Any = None


def on_ranks(count: int, work: Callable[[], Any]) -> list[Any]:
    """What `work()` returned on every rank, in their order; where ranks failed, the error of the first one."""
    torch.set_num_threads(1)  # a fork has none of the threads that a pool of torch's would wait for
    fork = multiprocessing.get_context("fork")
    pipes = [fork.Pipe(duplex=False) for _ in range(count)]
    with TemporaryDirectory() as folder:
        ranks = [fork.Process(target=_rank, args=(n, folder, pipes, work), daemon=True) for n in range(count)]
        try:
            for rank in ranks:
                rank.start()
            for _, end in pipes:
                end.close()
            return _results([pipe for pipe, _ in pipes])
        finally:
            for rank in ranks:
                rank.kill()
                rank.join()


def _rank(rank: int, folder: str, pipes: list[tuple[Connection, Connection]], work: Callable[[], Any]) -> None:
    """The life of a rank."""
    for _, end in pipes[:rank] + pipes[rank + 1 :]:
        end.close()  # or nobody would see that another rank died
    try:
        os.environ["GLOO_SOCKET_IFNAME"] = "lo"
        if dist.is_initialized():  # another benchmark pretended a world before the fork
            dist.destroy_process_group()
        store = dist.FileStore(f"{folder}/store", len(pipes))
        dist.init_process_group("gloo", store=store, rank=rank, world_size=len(pipes), timeout=LIMIT)
        result = work()
        dist.barrier()  # a rank that leaves closes connections that others may still need
        pipes[rank][1].send(Report(time.monotonic(), None, result))
    except BaseException:
        pipes[rank][1].send(Report(time.monotonic(), traceback.format_exc()))
    finally:
        os._exit(0)  # nothing that the parent meant for its own end runs here


def _results(pipes: list[Connection]) -> list[Any]:
    reports = dict[int, Report]()
    while len(reports) < len(pipes) and not any(report.error for report in reports.values()):
        waiting = {pipe: rank for rank, pipe in enumerate(pipes) if rank not in reports}
        ready = wait(list(waiting), LIMIT.total_seconds())
        if not ready:
            raise RuntimeError(f"ranks {sorted(waiting.values())} did not end in {LIMIT}")
        reports |= {rank: _report(pipe) for pipe, rank in waiting.items() if pipe in ready}
    failed = [(report.when, rank, report.error) for rank, report in reports.items() if report.error]
    if failed:
        _, rank, error = min(failed)
        raise RuntimeError(f"rank {rank} of {len(pipes)} failed first:\n{error}")
    return [reports[rank].result for rank in range(len(pipes))]


def _report(pipe: Connection) -> Report:
    try:
        return pipe.recv()
    except EOFError:
        return Report(time.monotonic(), "the process died without a word")
