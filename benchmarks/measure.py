"""Clocks and the rows that they fill: jobs take turns, so that a noisy machine disturbs all of them alike."""

from __future__ import annotations

import gc
import tracemalloc
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from statistics import median
from time import perf_counter
from typing import Any


@dataclass(frozen=True, slots=True)
class Effort:
    """How often each side of a comparison runs; peers that take seconds run less often.

    Between processes both sides run equally often: many times with small tensors, which noise hits hardest.
    """

    ours: int
    peer: int
    slow_peer: int
    small: int
    medium: int
    large: int


FULL = Effort(ours=15, peer=7, slow_peer=3, small=200, medium=11, large=7)
QUICK = Effort(ours=3, peer=1, slow_peer=1, small=30, medium=3, large=3)


@dataclass(frozen=True, slots=True)
class Job:
    """Something to time: `prepare` makes the input of every call anew, while the clock stands.

    A repeat is so many calls in a row: more than one where a single call is too short to be timed alone.
    """

    run: Callable[[Any], Any]
    prepare: Callable[[], Any] = lambda: None
    repeats: int = 1
    calls: int = 1

    def due(self, turn: int, turns: int) -> bool:
        """Is this job's repeat due? They are spread evenly over all turns.

        >>> [Job(print, repeats=2).due(turn, 4) for turn in range(4)]
        [True, False, True, False]
        """
        return turn * self.repeats % turns < self.repeats


@dataclass(frozen=True, slots=True)
class Timed:
    """Seconds per call, the median of a job's repeats; and what the last call returned."""

    seconds: float
    result: Any


def interleaved(*jobs: Job) -> list[Timed]:
    """All jobs in turn, again and again."""
    seconds, results = every_repeat(*jobs)
    return [Timed(median(s), result) for s, result in zip(seconds, results, strict=True)]


def every_repeat(*jobs: Job) -> tuple[list[list[float]], list[Any]]:
    """All jobs in turn, again and again: for every job the seconds of its repeats, and what its last call returned."""
    turns = max(job.repeats for job in jobs)
    seconds: list[list[float]] = [[] for _ in jobs]
    results: list[Any] = [None for _ in jobs]
    for turn in range(turns):
        for n, job in enumerate(jobs):
            if job.due(turn, turns):
                once, results[n] = _once(job)
                seconds[n].append(once)
    return seconds, results


def _once(job: Job) -> tuple[float, Any]:
    inputs = [job.prepare() for _ in range(job.calls)]
    with _no_collector():
        start = perf_counter()
        for given in inputs:
            result = job.run(given)
        return (perf_counter() - start) / job.calls, result


@contextmanager
def _no_collector() -> Iterator[None]:
    """As in timeit: a sweep through everybody's objects is not for whoever is on the clock to pay."""
    gc.disable()
    try:
        yield
    finally:
        gc.enable()


def peak_bytes(job: Job) -> int:
    """The most memory that one call of a job allocates at a time, numpy's arrays included."""
    given = job.prepare()
    tracemalloc.start()
    try:
        job.run(given)
        return tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()


@dataclass(frozen=True, slots=True)
class Target:
    """A ratio to reach: so many times cheaper than the peer or, with `most`, no more than so many times its cost."""

    bound: float
    most: bool = False

    def __str__(self) -> str:
        return f"{'at most' if self.most else 'at least'} {self.bound:g}x"


@dataclass(frozen=True, slots=True)
class Row:
    """One comparison: seconds of ours and of the peer, what the peer is, and the ratio that was aimed at."""

    case: str
    ours: float
    peer: float | None = None
    against: str = ""
    target: Target | None = None
    note: str = ""

    @property
    def ratio(self) -> float | None:
        """How many times cheaper ours is; where the target is an upper bound, how many times the peer's cost."""
        if self.peer is None:
            return None
        return self.ours / self.peer if self.target and self.target.most else self.peer / self.ours

    @property
    def reached(self) -> bool | None:
        """None where nothing was aimed at."""
        if self.ratio is None or self.target is None:
            return None
        return self.ratio <= self.target.bound if self.target.most else self.ratio >= self.target.bound
