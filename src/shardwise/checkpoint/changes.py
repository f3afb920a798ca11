"""How much the tensors of a checkpoint changed from another one: for people, who look for what moved most."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from math import inf, sqrt
from typing import NamedTuple

import torch

from shardwise.checkpoint.entry import Checkpoint
from shardwise.checkpoint.selection import Select, Selection
from shardwise.checkpoint.streams import CHUNK, Stream, check_jobs, map_in_order, stream_of, streams_of
from shardwise.job.names import Rename
from shardwise.job.progress import Progress, check_progress, reporter
from shardwise.quoting import in_line


class Change(NamedTuple):
    """Of one tensor. `relative`: the norm of the difference over that of the first; inf for one that came or went."""

    name: str
    what: str = ""  # where there are no values to compare: added, removed, another shape
    relative: float = inf
    largest: float = 0.0  # of any element
    changed: float = 1.0  # share of the elements

    def __str__(self) -> str:
        if self.what:
            return f"{in_line(self.name)}: {self.what}"
        return (
            f"{in_line(self.name)}: {self.relative:.3g} ({self.changed:.1%} of elements, by up to {self.largest:.3g})"
        )


def changes(
    a: Checkpoint,
    b: Checkpoint,
    *,
    rename: Rename = None,
    select: Select = None,
    exclude: Select = None,
    jobs: int = 1,
    progress: Progress = None,
) -> list[Change]:
    """All tensors that differ: those that came, went or have another shape, then by relative change, largest first.

    `select` and `exclude` hold for the names of both. With `rename` as well, tensors that only b has are left out.
    """
    check_progress(progress)
    check_jobs(jobs)
    chosen = Selection(select, exclude)
    source = streams_of(a, rename=rename, selection=chosen.but_for(a, b))
    meant = chosen.of(b) if chosen.everything or not rename else source.__contains__
    there = {name: stream_of(entry) for name, entry in b.items() if name in source or meant(name)}
    listed = [Change(name, "removed") for name in source if name not in there]
    listed += [Change(name, "added") for name in there if name not in source]
    pairs = {name: (stream, there[name]) for name, stream in source.items() if name in there}
    found = [*listed, *_all_of(pairs, jobs, progress)]
    return sorted(found, key=lambda change: (not change.what, -change.relative))


def _all_of(pairs: Mapping[str, tuple[Stream, Stream]], jobs: int, progress: Progress) -> Iterator[Change]:
    total, done = sum(a.size for a, _ in pairs.values()), 0
    with reporter(progress, total, "diff", here=True) as tell:
        for name, change in map_in_order(pairs, lambda name: _change(name, *pairs[name]), jobs):
            if change is not None:
                yield change
            done += pairs[name][0].size
            if tell is not None:
                tell(done, total)


def _change(name: str, a: Stream, b: Stream) -> Change | None:
    """None if no value differs."""
    if a.shape != b.shape:
        return Change(name, f"shape {a.shape} became {b.shape}")
    a.check()
    b.check()
    sums, count = _Sums(), 0
    for part, before in a.chunks(a.whole, CHUNK):
        after = torch.empty(len(before), dtype=b.dtype, device="cpu")
        a.fill(part, before)
        b.fill(part, after)
        sums.add(before, after)
        count += len(before)
    if sums.changed:
        return Change(name, "", sums.relative, sums.largest, sums.changed / count)
    return None if a.dtype == b.dtype else Change(name, f"{a.dtype} became {b.dtype}, with equal values")


@dataclass
class _Sums:
    """Of a tensor, chunk by chunk."""

    first: float = 0.0  # squares of all elements of the first
    apart: float = 0.0  # squares of all differences
    largest: float = 0.0
    changed: int = 0

    def add(self, before: torch.Tensor, after: torch.Tensor) -> None:
        """Elements of both, one for one. NaN equals NaN; what becomes NaN, or was, differs without bounds."""
        x, y = _wide(before), _wide(after)
        equal = (before == after if before.dtype == after.dtype else x == y) | (x.isnan() & y.isnan())
        apart = (y - x).abs().nan_to_num(nan=inf, posinf=inf).masked_fill_(equal, 0)
        self.first += float(x.abs().nan_to_num(nan=0.0).square().sum())
        self.apart += float(apart.square().sum())
        self.largest = max(self.largest, float(apart.max()) if len(apart) else 0.0)
        self.changed += int(equal.logical_not().sum())

    @property
    def relative(self) -> float:
        """Of the norms."""
        return sqrt(self.apart / self.first) if self.first and self.apart < inf else inf


def _wide(values: torch.Tensor) -> torch.Tensor:
    return values.to(torch.complex128 if values.is_complex() else torch.float64)


def lines(found: Sequence[Change], limit: int) -> Iterator[str]:
    """For a terminal."""
    yield from map(str, found[:limit])
    if len(found) > limit:
        yield f"... and {len(found) - limit:,} more tensors"
    if not found:
        yield "no tensor differs in any value"
