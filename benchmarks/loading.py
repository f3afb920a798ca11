"""One rank's part of a whole model: what a process does before it loads a checkpoint."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import cycle, islice

from benchmarks import peers
from benchmarks.caches import forget
from benchmarks.measure import Effort, Row, Target, on_the_cpu
from benchmarks.tilings import Corners
from shardwise import Layout, Mesh, Part, Plan, plan
from shardwise.bench.clock import Task
from shardwise.bench.table import seconds
from shardwise.planning import plan_parts

TITLE = "One rank's part of a model"
ABOUT = """
1,000 tensors, each saved as 64 row shards, are to be loaded: what one rank has to read of each. Ours is one plan for
every pair of layouts that differs, `plan_parts(plans, rank)` for all of them, and `plan.for_owner(rank)` of each
tensor, as a `Resharder` does it. The layouts know their fingerprints (plans are remembered by these; nothing is
remembered at the start); "with construction" in a note includes making all layouts and their fingerprints, and "one by
one" is without `plan_parts`. The peer is DCP's local load plan, `create_default_local_load_plan`, of a state dict of
DTensors; these and the checkpoint's metadata are made before the clock starts. Both sides must find equally many copies
to the rank; ours also says what the rank has to send, as it would between processes. Times are CPU time of one thread.
"""
COUNT, SHARDS, RANK = 1_000, 64, 3
SERVERS, TRAINERS = Mesh(fsdp=1, tp=8), Mesh(fsdp=8, tp=8)
MODEL = (  # shape, and how tensor parallelism places it
    ((128_256, 4_096), "S0"),  # embedding
    ((4_096,), "R"),  # norm
    ((4_096, 4_096), "S0"),  # query
    ((1_024, 4_096), "S0"),  # key, value
    ((6_144,), "S0"),  # biases
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
    yield _row("12 kinds of tensor, on 8 tensor parallel ranks", MODEL, SERVERS, 50, effort)
    yield _row("12 kinds of tensor, on 8 x 8 ranks (FSDP x TP)", MODEL, TRAINERS, 50, effort)
    yield _row("1,000 different shapes, on 8 tensor parallel ranks", DIFFERENT, SERVERS, 20, effort)


def _row(case: str, tensors: Tensors, mesh: Mesh, bound: float, effort: Effort) -> Row:
    loads = [(_load(*pair), pair[1].local_shape(RANK)) for pair in _layouts(tensors, mesh)[: len(tensors)]]
    asked = [(*load, placement) for load, (_, placement) in zip(loads, tensors, strict=True)]
    model = peers.model(list(islice(cycle(asked), COUNT)), mesh, RANK)
    ours, apart, constructed, peer, items = on_the_cpu(
        Task(_parts, lambda: _layouts(tensors, mesh), effort.ours),
        Task(lambda pairs: _parts(pairs, together=False), lambda: _layouts(tensors, mesh), effort.peer),
        Task(lambda _: _parts(_layouts(tensors, mesh)), repeats=effort.slow_peer),
        Task(lambda _: peers.local_load_plan(model), repeats=effort.peer),
        Task(lambda _: [len(peers.read_items(load)) for load, *_ in islice(cycle(asked), COUNT)], repeats=effort.peer),
    )
    found = sum(int((part.copies.target == RANK).sum()) for part in ours.result)
    if {found} != {peer.result, sum(items.result)}:
        raise RuntimeError(f"{case}: {found} copies, but the peer finds {peer.result} and {sum(items.result)}")
    alone = f"DCP's search for overlapping chunks alone {seconds(items.seconds)}"
    ways = f"with construction {seconds(constructed.seconds)}, one by one {seconds(apart.seconds)}"
    note = f"{found:,} copies to the rank; {alone}; ours {ways}"
    return Row(case, ours.seconds, peer.seconds, "DCP", Target(bound), note)


def _layouts(tensors: Tensors, mesh: Mesh) -> list[Pair]:
    """New layouts that know their fingerprints, and no plan that is remembered."""
    forget()
    found = [
        (Layout.chunk(shape, 0, SHARDS), Layout.on_mesh(shape, mesh, ["S0", placement]))
        for shape, placement in islice(cycle(tensors), COUNT)
    ]
    for layout in (layout for pair in found for layout in pair):
        hash(layout)
    return found


def _parts(pairs: list[Pair], *, together: bool = True) -> list[Part]:
    different, plans = dict[Pair, Plan](), list[Plan]()
    for pair in pairs:
        one = different.get(pair)
        if one is None:
            one = different[pair] = plan(*pair, itemsize=2)
        plans.append(one)
    if together:
        plan_parts(different.values(), RANK)
    return [one.for_owner(RANK) for one in plans]


def _load(source: Layout, target: Layout) -> peers.Load:
    return peers.load(source.shape, corners_of(source), _corners(target, RANK))


def corners_of(layout: Layout) -> Corners:
    """The boxes of all owners."""
    return [corners for owner in layout.owners() for corners in _corners(layout, owner)]


def _corners(layout: Layout, owner: int) -> Corners:
    return [(list(piece.box.lo), list(piece.box.hi)) for piece in layout.pieces(owner)]
