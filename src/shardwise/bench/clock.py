"""Clocks: jobs take turns, so that a noisy machine disturbs all of them alike."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from statistics import median
from time import perf_counter
from typing import Any, NamedTuple

Clock = Callable[[], float]  # seconds


@dataclass(frozen=True, slots=True)
class Task:
    """A function to time: `prepare` makes a new input for every call, outside the timed interval.

    A repeat is so many calls in a row: more than one where a single call is too short to be timed alone. `start` comes
    right before it, as where ranks have to meet.
    """

    run: Callable[[Any], object]
    prepare: Callable[[], object] = lambda: None
    repeats: int = 1
    calls: int = 1
    start: Callable[[], object] = lambda: None

    def due(self, turn: int, turns: int) -> bool:
        """Is this job's repeat due? They are spread evenly over all turns.

        >>> [Task(print, repeats=2).due(turn, 4) for turn in range(4)]
        [True, False, True, False]
        """
        return turn * self.repeats % turns < self.repeats


@dataclass(frozen=True, slots=True)
class Timing:
    """Seconds per call, the median of a job's repeats; and what the last call returned."""

    seconds: float
    result: object


class Interval(NamedTuple):
    """Start and end of a repeat: by default by the clock that all processes of a machine share."""

    start: float
    end: float


def interleaved(*jobs: Task, clock: Clock = perf_counter) -> list[Timing]:
    """All jobs in turn, again and again. `process_time` times what one thread does, whatever else runs."""
    spans, results = every_repeat(*jobs, clock=clock)
    took = [median(end - start for start, end in repeats) / job.calls for job, repeats in zip(jobs, spans, strict=True)]
    return [Timing(seconds, result) for seconds, result in zip(took, results, strict=True)]


def every_repeat(*jobs: Task, clock: Clock = perf_counter) -> tuple[list[list[Interval]], list[object]]:
    """All jobs in turn, again and again: for every job the spans of its repeats, and what its last call returned."""
    turns = max(job.repeats for job in jobs)
    spans: list[list[Interval]] = [[] for _ in jobs]
    results: list[object] = [None for _ in jobs]
    for turn in range(turns):
        for n, job in enumerate(jobs):
            if job.due(turn, turns):
                results[n] = None  # the next result may need its memory
                span, results[n] = _once(job, clock)
                spans[n].append(span)
    return spans, results


def together(ranks: Iterable[Sequence[Interval]]) -> float:
    """Seconds from when the first rank starts until the last one is done: the median over repeats.

    (Ranks that need not wait for each other may run one after the other, where there are more of them than cores.)

    >>> together([[Interval(0, 2), Interval(5, 9)], [Interval(1, 3), Interval(5, 6)]])
    3.5
    """
    return median(max(end for _, end in turn) - min(start for start, _ in turn) for turn in zip(*ranks, strict=True))


def _once(job: Task, clock: Clock) -> tuple[Interval, object]:
    inputs = [job.prepare() for _ in range(job.calls)]
    job.start()
    with _no_collector():
        start = clock()
        for given in inputs:
            result = job.run(given)
        return Interval(start, clock()), result


@contextmanager
def _no_collector() -> Iterator[None]:
    """As in timeit: garbage collection is not timed."""
    gc.disable()
    try:
        yield
    finally:
        gc.enable()
