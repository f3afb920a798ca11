"""What is measured: how often, and the rows that clocks fill."""

from __future__ import annotations

import tracemalloc
from dataclasses import dataclass
from functools import partial
from time import process_time
from typing import Literal

from shardwise.bench.clock import Task, interleaved

on_the_cpu = partial(interleaved, clock=process_time)  # for work of one thread: what else runs here does not count


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


def peak_bytes(job: Task) -> int:
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
    """A ratio to reach: so many times cheaper than the peer or, with `most`, no more than so many times its cost.

    >>> str(Target(4)), str(Target(1.1, most=True)), str(Target(0.6, percent=True))
    ('at least 4x', 'at most 1.1x', 'at least 60%')
    """

    bound: float
    most: bool = False
    percent: bool = False

    def __str__(self) -> str:
        return f"{'at most' if self.most else 'at least'} {self.written(self.bound)}"

    def written(self, ratio: float) -> str:
        """A ratio, as this one is written."""
        return f"{100 * ratio:.0f}%" if self.percent else f"{float(f'{ratio:.3g}'):g}x"


@dataclass(frozen=True, slots=True)
class Row:
    """One comparison: seconds or bytes of ours and of the peer, what the peer is, and the ratio that was aimed at.

    `limit` is what no way can beat, in seconds. `moved` are bytes between ranks. `memory` is the most that a rank
    takes above what it had, in bytes: with ours, and with the peer.
    """

    case: str
    ours: float
    peer: float | None = None
    against: str = ""
    target: Target | None = None
    note: str = ""
    limit: float | None = None
    moved: int | None = None
    memory: tuple[int, int] | None = None
    unit: Literal["seconds", "bytes"] = "seconds"

    @property
    def ratio(self) -> float | None:
        """How many times cheaper ours is; where the target is an upper bound, how many times the peer's cost."""
        if self.peer is None:
            return None
        return self.ours / self.peer if self.target and self.target.most else self.peer / self.ours

    @property
    def of_the_limit(self) -> float | None:
        """1 where ours takes no longer than the limit."""
        return None if self.limit is None else self.limit / self.ours

    @property
    def reached(self) -> bool | None:
        """None where nothing was aimed at."""
        if self.ratio is None or self.target is None:
            return None
        return self.ratio <= self.target.bound if self.target.most else self.ratio >= self.target.bound


def against_the_limit(row: Row, target: Target, limit: str = "strided copies") -> Row:
    """The same, held against the limit instead of the peer."""
    return Row(f"{row.case}, against the limit", row.ours, row.limit, limit, target)
