"""Jobs that are started separately: forked processes with a default group of their own, which report to the demo."""

from __future__ import annotations

import gc
import logging
import multiprocessing
import os
import signal
import warnings
from collections.abc import Callable
from multiprocessing.connection import Connection, wait
from pathlib import Path
from time import monotonic
from typing import Any, NamedTuple, Self

import torch
import torch.distributed as dist

from shardwise.demo.figures import PATIENCE
from shardwise.errors import ExchangeError
from shardwise.testing.ranks import end_with


class Failure(NamedTuple):
    """The report of a rank that failed."""

    what: str


class Channel:
    """One rank's connection to the demo."""

    def __init__(self, rank: int, pipe: Connection) -> None:
        self.rank, self._pipe = rank, pipe

    def report(self, report: object) -> None:
        """Tell the demo. Only the first rank does."""
        if self.rank == 0:
            self._pipe.send(report)

    def total(self, number: int) -> int:
        """The sum over all ranks, which all call."""
        found = torch.tensor(number)
        if dist.is_initialized():
            dist.all_reduce(found)
        return int(found)

    def ended(self) -> bool:
        """True if the job is to end. All ranks call: the first knows."""
        told = torch.tensor([self.rank == 0 and self._pipe.poll()])
        if dist.is_initialized():
            dist.broadcast(told, 0)
        return bool(told)


Work = Callable[[Channel], None]


class Job:
    """Calls `work` on so many ranks. A single one has no process group. `reports`: those of the first rank so far."""

    def __init__(self, name: str, size: int, work: Work, folder: Path) -> None:
        self.name, self.reports, self.pipes = name, list[Any](), dict[Connection, int]()
        fork, self._ends = multiprocessing.get_context("fork"), False
        self._processes = list[Any]()
        for rank in range(size):
            ours, theirs = fork.Pipe()
            args = (rank, size, work, str(folder / name), theirs, os.getpid())
            self._processes.append(fork.Process(target=_live, args=args, daemon=True))
            with warnings.catch_warnings():
                warnings.simplefilter("ignore", DeprecationWarning)  # newer Pythons warn of forks beside threads
                self._processes[-1].start()
            theirs.close()
            self.pipes[ours] = rank

    def read(self) -> None:
        """Take the reports that have come. Raises an error if a rank has failed."""
        for pipe, rank in list(self.pipes.items()):
            while pipe in self.pipes and pipe.poll():
                report = self._next(pipe, rank)
                if isinstance(report, Failure):
                    raise ExchangeError(f"rank {rank} of the {self.name} failed: {report.what}")
                if report is not None:
                    self.reports.append(report)

    def _next(self, pipe: Connection, rank: int) -> object:
        try:
            return pipe.recv()
        except (EOFError, ConnectionError):
            del self.pipes[pipe]
            return None if self._ends else Failure("its process has died")

    def tell_end(self) -> None:
        """Tell it to end."""
        self._ends = True
        next(iter(self.pipes)).send("end")

    def kill(self) -> None:
        """As kill -9 does it."""
        self._ends = True
        for process in self._processes:
            process.kill()
        for process in self._processes:
            process.join()


class Jobs:
    """All jobs of an act. None is left at the end."""

    def __init__(self, folder: Path) -> None:
        self.started, self._folder = list[Job](), folder

    def start(self, name: str, size: int, work: Work) -> Job:
        """One more."""
        self.started.append(Job(name, size, work, self._folder))
        return self.started[-1]

    def wait_until(self, reached: Callable[[], bool], what: str) -> None:
        """Read all reports until something is reached."""
        end = monotonic() + PATIENCE
        while not reached():
            if monotonic() > end:
                raise ExchangeError(f"this took more than {PATIENCE:g} s: {what}")
            wait([pipe for job in self.started for pipe in job.pipes], timeout=1.0)
            for job in self.started:
                job.read()

    def end(self, job: Job) -> None:
        """Let a job end, and wait until it has."""
        job.tell_end()
        self.wait_until(lambda: not job.pipes, f"the end of the {job.name}")

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        for job in reversed(self.started):  # who waits for others goes first, or torch would report that they are gone
            job.kill()


def _live(rank: int, size: int, work: Work, store: str, pipe: Connection, parent: int) -> None:
    """The life of a rank."""
    torch.set_num_threads(1)  # torch makes its pool anew after a fork; threads that ask for it first, together, abort
    gc.freeze()  # the collector would visit, and so copy, all that the parent has
    end_with(parent)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the demo ends its jobs
    logging.disable(logging.WARNING)
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    try:
        if size > 1:
            files = dist.FileStore(store, size)  # type: ignore[attr-defined]
            dist.init_process_group("gloo", store=files, rank=rank, world_size=size)
        work(Channel(rank, pipe))
        if size > 1:
            dist.barrier()  # gloo may abort a process whose peers are still connected when it leaves
    except BaseException as error:
        pipe.send(Failure(f"{type(error).__name__}: {error}".partition("\n")[0]))
    finally:
        pipe.close()
        os._exit(0)  # no handler of the parent runs here
