"""One rank's part of a whole model: what a process does before it loads a checkpoint."""

from __future__ import annotations

from collections.abc import Iterator
from importlib import import_module
from itertools import cycle, islice

from benchmarks import peers
from benchmarks.measure import Effort, Job, Row, Target, interleaved
from benchmarks.table import seconds
from benchmarks.tilings import Corners
from shardwise import Layout, Mesh, plan

TITLE = "One rank's part of a model"
ABOUT = """
1,000 tensors, each saved as 64 row shards, are to be loaded on a mesh of 8 x 8 (FSDP x tensor parallel): what one rank
has to read of each. Ours is `plan(source, target, itemsize=2).for_owner(rank)` for one tensor after the other, on layouts
that know their fingerprints (`plan` remembers by these, and starts with nothing remembered); "with construction" in a
note includes making all layouts. The peer is DCP's `create_read_items_for_chunk_list` with the rank's chunk of each
tensor; its objects are made before the clock starts. Ours says what the rank has to send as well.
"""
COUNT, SHARDS, RANK = 1_000, 64, 27
MESH = Mesh(fsdp=8, tp=8)
MODEL = (
    ((128_256, 4_096), "S0"),  # embedding
    ((4_096,), "R"),  # norm
    ((4_096, 4_096), "S0"),  # query
    ((1_024, 4_096), "S0"),  # key, value
    ((6_144,), "S0"),  # their biases
    ((128,), "R"),  # norm of heads
    ((4_096, 4_096), "S1"),  # output
    ((14_336, 4_096), "S0"),  # gate, up
    ((4_096, 14_336), "S1"),  # down
    ((64, 4_096), "R"),  # router
    ((1_536, 4_096), "S0"),  # an expert's gate, up
    ((4_096, 1_536), "S1"),  # an expert's down
)
DIFFERENT = tuple(((4_096, 1_024 + n), "S1") for n in range(COUNT))
Tensors = tuple[tuple[tuple[int, ...], str], ...]
Pair = tuple[Layout, Layout]


def rows(effort: Effort) -> Iterator[Row]:
    """All cases."""
    yield _row("1,000 tensors of 12 kinds, as models have", MODEL, effort)
    yield _row("1,000 tensors of 1,000 shapes", DIFFERENT, effort)


def _row(case: str, tensors: Tensors, effort: Effort) -> Row:
    asked = [_load(*pair) for pair in _layouts(tensors)]
    ours, constructed, peer = interleaved(
        Job(_parts, lambda: _layouts(tensors), effort.ours),
        Job(lambda _: _parts(_layouts(tensors)), _forget, effort.peer),
        Job(lambda _: sum(len(peers.read_items(load)) for load in asked), repeats=effort.peer),
    )
    if ours.result != peer.result:
        raise RuntimeError(f"{case}: {ours.result} copies, but the peer finds {peer.result}")
    note = f"{ours.result:,} copies to the rank; with construction {seconds(constructed.seconds)}"
    return Row(case, ours.seconds, peer.seconds, "DCP", Target(50), note)


def _layouts(tensors: Tensors) -> list[Pair]:
    """New layouts that know their fingerprints, and no plan that is remembered."""
    _forget()
    found = [
        (Layout.chunk(shape, 0, SHARDS), Layout.on_mesh(shape, MESH, ["S0", placement]))
        for shape, placement in islice(cycle(tensors), COUNT)
    ]
    for source, target in found:
        hash(source), hash(target)
    return found


def _forget() -> None:
    planner = import_module("shardwise.plan.plan")  # `shardwise.plan` is the function
    planner._plan.cache_clear()
    planner._part.cache_clear()


def _parts(pairs: list[Pair]) -> int:
    """The copies that come to the rank, from itself too."""
    parts = [plan(source, target, itemsize=2).for_owner(RANK) for source, target in pairs]
    return sum(int((part.copies.target == RANK).sum()) for part in parts)


def _load(source: Layout, target: Layout) -> peers.Load:
    saved = [corners for owner in source.owners() for corners in _corners(source, owner)]
    return peers.load(source.shape, saved, _corners(target, RANK))


def _corners(layout: Layout, owner: int) -> Corners:
    return [(list(piece.box.lo), list(piece.box.hi)) for piece in layout.pieces(owner)]
