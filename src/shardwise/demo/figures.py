"""What is measured: a job of ours and torch's way to the same, by turns."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from statistics import median
from time import perf_counter

from shardwise.errors import ExchangeError
from shardwise.testing import RankError, on_ranks

TURNS = 5
PATIENCE = 600.0  # seconds: a busy machine is slow, and not broken

Times = dict[str, list[float]]


@dataclass(frozen=True)
class Figure:
    """A row of the last table. `way` is how torch does it; None where it has no way."""

    step: str
    bytes: int
    ours: float
    way: str = ""
    torch: float | None = None


def by_turns(jobs: Mapping[str, Callable[[int], object]], meet: Callable[[], object] = lambda: None) -> Times:
    """Seconds of every job, given the number of the turn. In turns, so that all see the same machine; the first
    turn warms up. Ranks `meet` before each."""
    times: Times = {name: [] for name in jobs}
    for turn in range(TURNS + 1):
        for name, job in jobs.items():
            meet()
            began = perf_counter()
            job(turn)
            if turn:
                times[name].append(perf_counter() - began)
    return times


def slowest(reports: Sequence[Times], name: str) -> float:
    """The median over the turns of the slowest rank."""
    return median(map(max, zip(*(report[name] for report in reports), strict=True)))


def ranks(count: int, work: Callable[[int], dict[str, object]]) -> list[dict[str, object]]:
    """`on_ranks`, with what went wrong in one line."""
    try:
        return on_ranks(count, work, timeout=PATIENCE, patience=PATIENCE)
    except RankError as error:
        first, *_, last = str(error).strip().splitlines()
        raise ExchangeError(f"{first} {last}" if last != first else first) from error


def check(holds: bool, what: str) -> None:
    """Say what is wrong, if it is."""
    if not holds:
        raise ExchangeError(f"this should not be: {what}")
