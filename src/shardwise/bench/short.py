"""The short benchmark: a few moves on ranks of this machine, ours over each transport, torch's, and the limit."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext
from dataclasses import asdict, dataclass
from functools import partial
from importlib import import_module
from math import isqrt
from typing import NamedTuple

import torch
import torch.distributed as dist

from shardwise.bench.clock import Interval, every_repeat, together
from shardwise.bench.moves import (
    GROUP,
    OUT,
    REDISTRIBUTE,
    SHARDED_TENSOR,
    SHARED,
    Shape,
    Variant,
    Ways,
    check,
    redistributed,
    rows_to_columns,
    silence,
    synchronized,
)
from shardwise.planning import size as in_words
from shardwise.storage.available_memory import available_memory
from shardwise.testing import on_ranks

VARIANTS = (OUT, SHARED, GROUP) if sys.platform == "linux" else (OUT, GROUP)  # which alone has shared memory
SECONDS = 3.0  # for a move, about
FEWEST, MOST = 3, 50  # repeats
ITEMSIZE = 4
BACKENDS = {"cpu": "gloo", "cuda": "cpu:gloo,cuda:nccl", "far": "gloo-and-ordered"}
Make = Callable[[Shape], Ways]


@dataclass(frozen=True, slots=True)
class MoveTimes:
    """The times of a move: seconds of every way, and the bytes between ranks.

    `ours`, `shared` (the source in shared memory) and `group` (over the process group) write into existing
    tensors. None: this way cannot do the move.
    """

    move: str
    ours: float
    shared: float | None
    group: float
    sharded_tensor: float | None
    redistribute: float
    limit: float
    bytes_moved: int
    lower_bound: int

    @property
    def ratio(self) -> float:
        """How many times faster ours is than the faster of torch's."""
        return min(filter(None, (self.sharded_tensor, self.redistribute))) / self.ours

    @property
    def of_the_limit(self) -> float:
        """How close ours comes to a strided copy of the same boxes, which takes this part of its time."""
        return self.limit / self.ours

    def to_json(self) -> dict[str, float | str | None]:
        """Everything, with the ratios."""
        return asdict(self) | {"ratio": self.ratio, "of_the_limit": self.of_the_limit}


def bench(ranks: int = 4, size: int = 2**26, device: str = "cpu") -> Iterator[MoveTimes]:
    """Measure one move after the other, of a square float32 tensor of about `size` bytes.

    `device`: "cpu", or "cuda" with a GPU of this machine for each rank. ("far" is the test device: not for figures.)
    """
    check_options(ranks, size, device)
    shape = _shape(ranks, size)
    import_module("torch._dynamo")  # as the first DTensor does: once, and not on every rank
    for name, make in _moves(ranks, VARIANTS if device == "cpu" else (OUT, GROUP)):
        work = partial(_measure, make, shape, device)
        yield _times(name, on_ranks(ranks, work, timeout=600, backend=BACKENDS[device]))


def check_options(ranks: int, size: int, device: str = "cpu") -> None:
    """Refuse options that this machine cannot satisfy."""
    if device not in BACKENDS:
        raise ValueError(f"--device {device}: cpu or cuda")
    if device == "cuda":
        _check_gpus(ranks)
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    most = max(8, 2 * cores)
    if not 2 <= ranks <= most:
        raise ValueError(f"--ranks {ranks}: from 2 to {most} make sense on this machine, which has {cores} cores")
    if size < ITEMSIZE * ranks**2:
        raise ValueError(f"--size {size}: {ranks} ranks share rows and columns of at least {ITEMSIZE * ranks**2} bytes")
    needed, free = memory_needed(ranks, size), available_memory()
    if needed > free:
        raise ValueError(
            f"--size {in_words(size)} on {ranks} ranks takes about {in_words(needed)} of memory, most of it for "
            f"redistribute, which gathers whole tensors; there are {in_words(free)}: ask for less, or for fewer ranks"
        )


def _check_gpus(ranks: int) -> None:
    gpus = torch.cuda.device_count()  # which does not start CUDA: a forked process could not use it then
    if not gpus:
        raise ValueError(
            "--device cuda: torch finds no GPU on this machine; check nvidia-smi, and that torch was installed with "
            "CUDA (torch.version.cuda is not None), or leave --device out"
        )
    if not 2 <= ranks <= gpus:
        raise ValueError(f"--ranks {ranks}: nccl needs a GPU for each of at least 2 ranks, and this machine has {gpus}")


def memory_needed(ranks: int, size: int) -> int:
    """What the largest move takes in all: to have all of it everywhere.

    On every rank what is received, what redistribute receives and gathers from, and what the limit copies from; the
    source twice, and what is packed.
    """
    return (4 * ranks + 4) * size


def _shape(ranks: int, size: int) -> Shape:
    """
    >>> _shape(4, 2**20), _shape(3, 2**20)
    ((512, 512), (510, 510))
    """
    side = isqrt(size // ITEMSIZE) // ranks * ranks
    return side, side


def _moves(ranks: int, variants: Sequence[Variant]) -> Iterator[tuple[str, Make]]:
    yield "rows -> columns", partial(rows_to_columns, variants=variants)
    yield "S0 -> R", partial(redistributed, ["S0"], ["R"], variants=variants)
    if ranks > 2 and ranks % 2 == 0:
        yield "[S0, S1] -> [S1, S0]", partial(redistributed, ["S0", "S1"], ["S1", "S0"], variants=variants)


class RankTimes(NamedTuple):
    """The times of one rank: every repeat of every way; bytes moved, and the fewest possible."""

    spans: dict[str, list[Interval]]
    bytes_moved: int
    lower_bound: int


def _measure(make: Make, shape: Shape, device: str, _rank: int) -> RankTimes:
    silence()
    with torch.device(device) if device != "cpu" else nullcontext():
        return _measured(make, shape, device)


def _measured(make: Make, shape: Shape, device: str) -> RankTimes:
    sides = make(shape)
    check(sides)
    assert sides.limit is not None, "these are all copies"
    every = sides.peers | sides.ours | {"limit": sides.limit}
    ways = {name: synchronized(way, device) for name, way in every.items()}
    once, _ = every_repeat(*(side.job(1) for side in ways.values()))
    repeats = _repeats(sum(end - start for ((start, end),) in once))
    spans, _ = every_repeat(*(side.job(repeats) for side in ways.values()))
    return RankTimes(dict(zip(ways, spans, strict=True)), sides.plan.bytes_moved, sides.plan.lower_bound)


def _repeats(turn: float) -> int:
    """How often all ways can have their turn, which takes so many seconds; the same on every rank."""
    slowest = torch.tensor(turn)
    dist.all_reduce(slowest, dist.ReduceOp.MAX)
    return max(FEWEST, min(MOST, int(SECONDS / slowest.item())))


def _times(name: str, reports: list[RankTimes]) -> MoveTimes:
    seconds = {way: together(rank.spans[way] for rank in reports) for way in reports[0].spans}
    return MoveTimes(
        move=name,
        ours=seconds[str(OUT)],
        shared=seconds.get(str(SHARED)),
        group=seconds[str(GROUP)],
        sharded_tensor=seconds.get(SHARDED_TENSOR),
        redistribute=seconds[REDISTRIBUTE],
        limit=seconds["limit"],
        bytes_moved=reports[0].bytes_moved,
        lower_bound=reports[0].lower_bound,
    )
