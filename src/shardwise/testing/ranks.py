"""Real ranks on this machine: forked processes with a gloo group between them."""

from __future__ import annotations

import ctypes
import gc
import multiprocessing
import os
import pickle
import signal
import sys
import tempfile
import time
import traceback
import warnings
from collections.abc import Callable, Collection, Sequence
from datetime import timedelta
from io import BytesIO
from multiprocessing.connection import Connection, wait
from typing import TYPE_CHECKING, Any, TypeVar

from shardwise.errors import ExchangeError

if TYPE_CHECKING:
    from shardwise.testing.hosts import Host

Pipes = list[tuple[Connection, Connection]]
PR_SET_PDEATHSIG = 1  # of Linux
T = TypeVar("T")
Report = tuple[float, str | None, T]  # when, the traceback of an error, the result


class RankError(ExchangeError):
    """The error of the rank that failed first."""


def on_ranks(
    count: int,
    work: Callable[[int], T],
    *,
    timeout: float = 60.0,
    patience: float = 60.0,
    dying: Collection[int] = (),
    hosts: Sequence[Host] | None = None,
    backend: str = "gloo",
) -> list[T]:
    """Call `work(rank)` on so many ranks of this machine; their results, in the order of the ranks.

    >>> on_ranks(2, lambda rank: 10 * rank)
    [0, 10]

    The ranks are forked, so that torch is imported once and `work` may be any function, and meet in a file, not on a
    port; each uses one thread. After `timeout` seconds all are ended. `patience` is the timeout of their process
    group. Ranks that are `dying` may die without a report: their result is None. `hosts`: the host of each rank, of
    `shardwise.testing.hosts`; this machine by default. `backend`: of the group, as torch names it, such as
    "cpu:gloo,cuda:nccl", where rank n uses GPU number n; or one of `shardwise.testing.ordered_group`. Tensors of a
    device come back on the CPU. POSIX only.
    """
    import torch
    import torch.distributed as dist

    import shardwise.tensor  # once, and not on every rank

    if sys.platform == "linux":
        import shardwise.transports.shared_memory  # noqa: F401

    if dist.is_initialized():
        raise RankError("on_ranks makes a process group: call it in a process without one, not on a rank")
    if hosts is not None and len(hosts) != count:
        raise RankError(f"{count} ranks need a host each, not {len(hosts)} hosts: name a host as often as it has ranks")
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # a forked child of one that runs several would wait for threads that it does not have
    try:
        with tempfile.TemporaryDirectory(prefix="shardwise-") as folder:
            store = os.path.join(folder, "store")
            return _run(hosts or [None] * count, work, store, timeout, patience, dying, backend)
    finally:
        torch.set_num_threads(threads)


def _run(
    hosts: Sequence[Host | None],
    work: Callable[[int], T],
    store: str,
    timeout: float,
    patience: float,
    dying: Collection[int],
    backend: str,
) -> list[T]:
    fork = multiprocessing.get_context("fork")
    pipes: Pipes = [fork.Pipe(duplex=False) for _ in hosts]
    together = not dying  # else the others cannot meet at the end
    start = [
        (rank, host, work, store, patience, pipes, together, os.getpid(), backend) for rank, host in enumerate(hosts)
    ]
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


def _rank(
    rank: int,
    host: Host | None,
    work: Callable[[int], T],
    store: str,
    patience: float,
    pipes: Pipes,
    together: bool,
    parent: int,
    backend: str,
) -> None:
    """The life of one rank: meet, work, report, and leave together."""
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)  # torch makes its pool anew after a fork; threads that ask for it first, together, abort
    gc.freeze()  # the collector would visit, and so copy, all that the parent has
    end_with(parent)
    for ours, end in enumerate(end for ends in pipes for end in reversed(ends)):
        if ours != 2 * rank:
            end.close()  # or the death of another rank would not be seen
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    pipe, limit = pipes[rank][1], timedelta(seconds=patience)
    try:
        if host is not None:
            host.enter()
        files = dist.FileStore(store, len(pipes))  # type: ignore[attr-defined]
        _prepare_device(backend, rank)
        dist.init_process_group(backend, store=files, rank=rank, world_size=len(pipes), timeout=limit)
        result = work(rank)
        if together:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore", UserWarning)  # that it uses the current device
                dist.barrier()
        pipe.send_bytes(_by_value((time.monotonic(), None, result)))
    except BaseException:
        pipe.send_bytes(pickle.dumps((time.monotonic(), traceback.format_exc(), None)))
    finally:
        pipe.close()
        os._exit(0)  # no handler of the parent runs here


def _prepare_device(backend: str, rank: int) -> None:
    """What has to be known before the group is made."""
    import torch

    if "nccl" in backend:
        torch.cuda.set_device(rank)
    elif "ordered" in backend:
        from shardwise.testing.ordered_group import register_backends

        register_backends()


def _by_value(report: Report[Any]) -> bytes:
    """A report with tensors by value, of the CPU: this process ends, and the parent knows no device."""
    import torch

    class Pickler(pickle.Pickler):
        def reducer_override(self, x: Any) -> Any:
            away = type(x) in (torch.Tensor, torch.nn.Parameter) and x.device.type not in ("cpu", "meta")
            return x.detach().cpu().__reduce_ex__(pickle.DEFAULT_PROTOCOL) if away else NotImplemented

    room = BytesIO()
    Pickler(room).dump(report)
    return room.getvalue()


def end_with(parent: int) -> None:
    """On Linux: die when the parent dies, even if it was killed."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
        if os.getppid() != parent:  # it was faster
            os._exit(1)


def _results(pipes: Pipes, deadline: float, dying: Collection[int]) -> list[Any]:
    """The result of every rank; raises the error of the rank that failed first."""
    reports = dict[int, Report[Any]]()
    waiting: dict[Any, int] = {pipe: rank for rank, (pipe, _) in enumerate(pipes)}
    while waiting:
        ready = wait(list(waiting), max(0.0, deadline - time.monotonic()))
        if not ready:
            break
        for pipe in ready:
            rank = waiting.pop(pipe)
            reports[rank] = _report(pipe, dying=rank in dying)
        if any(error for _, error, _ in reports.values()):
            deadline = min(deadline, time.monotonic() + 1.0)  # the others will see closed sockets, if anything
    failed = [(when, rank, error) for rank, (when, error, _) in reports.items() if error]
    if failed:
        _, rank, error = min(failed)
        raise RankError(f"rank {rank} of {len(pipes)} failed first ({len(failed)} failed in all):\n{error}")
    if waiting:
        raise RankError(f"ranks {sorted(waiting.values())} of {len(pipes)} did not end in time")
    return [reports[rank][2] for rank in range(len(pipes))]


def _report(pipe: Any, *, dying: bool) -> Report[Any]:
    try:
        report: Report[Any] = pickle.loads(pipe.recv_bytes())
        return report
    except EOFError:
        return time.monotonic(), None if dying else "the process died without a report", None
