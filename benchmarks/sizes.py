"""One move by size and by number of ranks: all ways next to each other, in a table and in a picture."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from math import isqrt
from pathlib import Path
from typing import NamedTuple

import torch.distributed as dist

from benchmarks.measure import Effort
from benchmarks.table import Sheet, binary
from benchmarks.tensor import GIB, KIB, MIB, ready, repeats
from shardwise.bench.clock import Interval, every_repeat, together
from shardwise.bench.moves import GROUP, OUT, REDISTRIBUTE, SHARDED_TENSOR, SHARED, check, rows_to_columns, silence
from shardwise.bench.table import seconds
from shardwise.testing import on_ranks

TITLE = "By size and number of ranks"
ABOUT = """
Rows -> columns (Shard(0) -> Shard(1)) as in the section before, from 4 KiB to 1 GiB, on 2, 4 and 8 ranks: ours with
`out=`, the same with the source in shared memory, and over the group; torch's ways; and the limit. Peers that gather
whole tensors are left out where these would take more than 8 GiB. The picture is of 4 ranks.

![Time against size: shardwise, torch's ways and the limit](images/performance.png)
"""
SIZES = (4 * KIB, 64 * KIB, MIB, 16 * MIB, 64 * MIB, 256 * MIB, GIB)
WORLDS = (2, 4, 8)
MOST = 8 * GIB  # of memory, for whole tensors on every rank
LIMIT = "limit"
WAYS = (str(OUT), str(SHARED), str(GROUP), SHARDED_TENSOR, REDISTRIBUTE, LIMIT)
NAMES = ("shardwise", "source shared", "over the group", "ShardedTensor", "redistribute", "limit")


class Point(NamedTuple):
    """What was found for a size and a number of ranks: seconds by way."""

    ranks: int
    bytes: int
    seconds: dict[str, float]


def sheet(effort: Effort) -> Sheet:
    """A line for every size and number of ranks."""
    from benchmarks.picture import draw

    points = list(_points(effort))
    columns = ["ranks", "size", *NAMES, "faster than torch", "of the limit", "source shared"]

    def picture(path: Path) -> None:
        draw([point for point in points if point.ranks == 4], path)

    return Sheet(columns, list(map(_line, points)), [True] * len(columns), pictures={"images/performance.png": picture})


def _line(point: Point) -> list[str]:
    found = point.seconds
    best = min(found[way] for way in (SHARDED_TENSOR, REDISTRIBUTE) if way in found)
    times = [seconds(found[way]) if way in found else "" for way in WAYS]
    shares = [f"{found[LIMIT] / found[way]:.0%}" for way in WAYS[:2]]
    return [str(point.ranks), binary(point.bytes), *times, f"{best / found[WAYS[0]]:.3g}x", *shares]


def _points(effort: Effort) -> Iterator[Point]:
    ready()
    for ranks in WORLDS:
        for size in SIZES:
            if ranks * size <= 4 * GIB:  # or ranks would not find the room
                found = on_ranks(ranks, partial(_measured, size, effort), timeout=600)
                calls = repeats(size, effort)[1]
                yield Point(ranks, size, {way: together(rank[way] for rank in found) / calls for way in found[0]})


def _measured(size: int, effort: Effort, _rank: int) -> dict[str, list[Interval]]:
    silence()
    sides = rows_to_columns((isqrt(size // 4),) * 2, (OUT, SHARED, GROUP))
    if 2 * dist.get_world_size() * size > MOST:
        del sides.peers[REDISTRIBUTE]
    check(sides)
    assert sides.limit is not None, "nothing is reduced"
    ways = sides.ours | sides.peers | {LIMIT: sides.limit}
    often, calls = repeats(size, effort)
    slow = min(often, effort.slow_peer) if size > 16 * MIB else often
    spans, _ = every_repeat(*(side.job(slow if way == REDISTRIBUTE else often, calls) for way, side in ways.items()))
    return dict(zip(ways, spans, strict=True))
