"""Times of ours and of torch's way to the same result, by turns."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import count
from typing import TypeVar

from shardwise.bench.clock import Interval, Task, every_repeat, together
from shardwise.errors import ExchangeError
from shardwise.testing import RankError, on_ranks

T = TypeVar("T")
TURNS = 5
PATIENCE = 600.0  # seconds: a busy machine is slow, and not broken

Times = dict[str, list[Interval]]


@dataclass(frozen=True)
class Figure:
    """A row of the last table. `way` is how torch does it; None where it has no way."""

    step: str
    bytes: int
    ours: float
    way: str = ""
    torch: float | None = None


def by_turns(jobs: Mapping[str, Callable[[int], object]], meet: Callable[[], object] = lambda: None) -> Times:
    """When every job ran, given the number of the turn; turn 0 warms up. Ranks `meet` before each."""
    for job in jobs.values():
        meet()
        job(0)
    timed = [Task(job, count(1).__next__, repeats=TURNS, start=meet) for job in jobs.values()]
    return dict(zip(jobs, every_repeat(*timed)[0], strict=True))


def seconds_of(reports: Sequence[Times], name: str) -> float:
    """The time of a job on all ranks together."""
    return together(report[name] for report in reports)


def ranks(count: int, work: Callable[[int], T]) -> list[T]:
    """`on_ranks`, with errors as one line."""
    try:
        return on_ranks(count, work, timeout=PATIENCE, patience=PATIENCE)
    except RankError as error:
        first, *_, last = str(error).strip().splitlines()
        raise ExchangeError(f"{first} {last}" if last != first else first) from error


def check(holds: bool, what: str) -> None:
    """Raise where something does not hold."""
    if not holds:
        raise ExchangeError(f"this should not be: {what}")
