"""Whether every rank reads what it needs, or every byte is read once and sent on: where `read=` leaves that open."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from time import monotonic_ns
from typing import Literal

import torch

from shardwise.checkpoint.filling import Fill, FillOptions, Prepared, fill_each, fill_once
from shardwise.exchange.overflow import Losses
from shardwise.job.agree import Callers
from shardwise.job.progress import Progress, reporter

Read = Literal["each", "once"]
TRIAL = 2**28  # bytes of tensors that are read in one way, to measure it
FILLS: Mapping[Read, Fill] = {"each": fill_each, "once": fill_once}


def way(callers: Callers, read: Read | None, near: Iterable[bool]) -> Fill:
    """How to fill. `near` tells for every rank whether its files are those of its host; all ranks find the same.

    Ranks of one host share its page cache: what one of them has read, the others find there. Remote files have no such
    cache, so nothing is fetched twice. Files that several hosts reach by a path may be near or far: that is measured.
    """
    if read is not None or callers.transport is None:
        return FILLS[read or "each"]
    if not all(near):
        return fill_once
    return fill_each if callers.transport.on_one_host else fill_measured


def fill_measured(
    callers: Callers, flat: Mapping[str, object], prepare: Callable[[], Prepared], options: FillOptions
) -> tuple[Prepared, Losses]:
    """The first tensors one way, the next ones the other way, and the rest as was faster."""

    def say() -> tuple[Prepared, bool]:
        prepared = prepare()
        return prepared, bool(prepared.buffers) or any(one.delivered for one in prepared.targets.values())

    prepared, whole = callers.tell(say)  # tensors that are handed over together cannot be filled in parts
    *trials, rest = [list(prepared.streams)] if any(whole.values()) else _trials(prepared)
    total, losses = sum(map(prepared.size, (*trials, rest))), Losses()
    with reporter(options.progress, total, "load", here=callers.first) as tell:
        done, speed = 0, dict[Read, float]()

        def fill(read: Read, names: Sequence[str]) -> None:
            nonlocal done
            size, before = prepared.size(names), done
            progress: Progress = (
                None if tell is None else lambda part, of: tell(before + size * part // max(of, 1), total)
            )
            started = monotonic_ns()
            _, lost = FILLS[read](callers, flat, lambda: prepared.only(names), options._replace(progress=progress))
            speed[read] = size / _slowest(callers, monotonic_ns() - started)
            done += size
            for one in lost.per_tensor():
                losses.add(one)

        for read, names in zip(FILLS, trials, strict=False):
            fill(read, names)
        fill(max(speed, key=lambda read: speed[read], default="once"), rest)
    return prepared, losses


def _trials(prepared: Prepared) -> list[list[str]]:
    """The names of two trials, and of the rest; only the rest where there is too little to measure."""
    names = iter(prepared.streams)
    trials = [list(_first(prepared, names)) for _ in FILLS]
    rest = list(names)
    return [*trials, rest] if prepared.size(rest) >= 2 * TRIAL else [list(prepared.streams)]


def _first(prepared: Prepared, names: Iterable[str]) -> Iterable[str]:
    """So many that they have as many bytes as a trial needs."""
    size = 0
    for name in names:
        yield name
        size += prepared.streams[name].size
        if size >= TRIAL:
            return


def _slowest(callers: Callers, took: int) -> int:
    """Nanoseconds on the rank where it took longest."""
    return max(1, int(callers.highest(torch.tensor([took], dtype=torch.int64, device="cpu"))))
