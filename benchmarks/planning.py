"""Whole plans between two layouts, and one owner's part of them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial

import numpy as np
from torch import bfloat16

from benchmarks import peers
from benchmarks.caches import forget
from benchmarks.measure import Effort, Row, Target, on_the_cpu, peak_bytes
from benchmarks.table import size
from benchmarks.tilings import Tiling, grid, guillotine, listed
from shardwise import Layout, Mesh, Plan, parse
from shardwise.bench.clock import Task
from shardwise.bench.table import seconds
from shardwise.job.plan import ModelPlan, TensorInfo
from shardwise.job.remap import links
from shardwise.planning import Hosts, plan_parts

TITLE = "Planning"
ABOUT = """
Whole plans are `Plan(source, target, itemsize).copies`: all copies of all owners, as arrays. The layouts are made
before the clock starts, as are the peer's objects; "with construction" in a note includes making ours from arrays. The
peer is the planner of torch's distributed checkpoints (DCP), `create_read_items_for_chunk_list` over all target chunks,
which makes a `ReadItem` object per copy. Both sides must find equally many. Times are CPU time of one thread, on both
sides.

One owner's part is `Plan(source, target, itemsize).for_owner(owner)`, compared with the whole plan. The mesh is dp=16,
fsdp=64, tp=16: 16,384 owners. Parts are remembered by the fingerprints of the layouts, so all is forgotten before each
call; the layouts are new and know nothing but their fingerprints, which the notes include in "with construction".
Memory is the most that is allocated at a time.

Then come the moves that are the hardest ones where replicas, terms or hosts give a choice, compared with what one
owner's part is to take at most: 50 ms of 16,384 owners and 200 ms of 65,536. "One owner" and "one server" of a model
are its links by name, its plans and buckets, and the parts of that owner in all of them, as a `Resharder` makes them.
"""
SQUARE = (100_000, 100_000)
LARGE = (1_000_000, 1_000_000)
Pair = tuple[Layout, Layout]


def rows(effort: Effort) -> Iterator[Row]:
    """All cases."""
    yield from _whole_plans(effort)
    yield _growth(effort)
    yield from _strips(effort)
    yield from _parts(effort)
    yield from _limits(effort)
    yield from _models(effort)


def copies(pair: Pair) -> int:
    """A fresh plan: the number of its copies, all computed."""
    return len(Plan(*pair, 4).copies)


def part(pair: Pair) -> int:
    """One owner's part of a fresh plan, with nothing remembered: the number of its copies."""
    forget()
    return len(Plan(*pair, 4).for_owner(OWNER).copies)


def _made(source: Tiling, target: Tiling) -> Callable[[], Pair]:
    return lambda: (source.layout(), target.layout())


# --- whole plans -----------------------------------------------------------------------------------------------------


def _whole_plans(effort: Effort) -> Iterator[Row]:
    yield _against_dcp("grids, 100 x 100 -> 80 x 125", grid(SQUARE, 100, 100), grid(SQUARE, 80, 125), 200, effort)
    source, target = (guillotine(SQUARE, 10_000, seed=seed) for seed in (1, 2))
    yield _against_dcp("10,000 -> 10,000 random rectangles", source, target, 50, effort)


def _against_dcp(case: str, source: Tiling, target: Tiling, bound: float, effort: Effort) -> Row:
    asked, made = peers.load(source.shape, source.corners(), target.corners()), _made(source, target)
    ours, constructed, peer = on_the_cpu(
        Task(copies, made, effort.ours, calls=3),
        Task(lambda _: copies(made()), repeats=effort.ours, calls=3),
        Task(lambda _: len(peers.read_items(asked)), repeats=effort.slow_peer),
    )
    if ours.result != peer.result:
        raise RuntimeError(f"{case}: {ours.result} copies, but the peer finds {peer.result}")
    note = f"{ours.result:,} copies; with construction {seconds(constructed.seconds)}"
    return Row(case, ours.seconds, peer.seconds, "DCP", Target(bound), note)


def _growth(effort: Effort) -> Row:
    few, many = ([guillotine(LARGE, count, seed=seed) for seed in (1, 2)] for count in (10_000, 100_000))
    small, large = on_the_cpu(Task(copies, _made(*few), effort.ours, 3), Task(copies, _made(*many), effort.peer))
    note = f"{large.result:,} copies after {small.result:,}"
    case = "100,000 -> 100,000 random rectangles"
    return Row(case, large.seconds, small.seconds, "10,000", Target(15, most=True), note)


def _strips(effort: Effort) -> Iterator[Row]:
    source, target = grid((40_000, 100_000), 10_000, 1), grid((40_000, 100_000), 8_000, 1)
    grids, strips, lists = on_the_cpu(
        Task(copies, _made(grid(SQUARE, 100, 100), grid(SQUARE, 80, 125)), effort.ours, 5),
        Task(copies, _made(source, target), effort.ours, 5),
        Task(copies, _made(listed(source), listed(target)), effort.ours, 5),
    )
    base = grids.seconds / grids.result
    for case, found in ("10,000 -> 8,000 row strips, per copy", strips), ("the same strips as lists, per copy", lists):
        note = f"{found.result:,} copies in {seconds(found.seconds)}"
        yield Row(case, found.seconds / found.result, base, "grids, per copy", Target(1, most=True), note)


# --- one of 16,384 owners --------------------------------------------------------------------------------------------

MESH, OWNER = Mesh(dp=16, fsdp=64, tp=16), 777
MATRIX, CUBE = (16_384, 16_384), (4_096, 4_096, 4_096)
HSDP = (MATRIX, "S0,S0,S1", "R,S0,S1")
MANY = Target(500)  # where the whole plan is large: of a small one, a part is mostly what numpy takes for short arrays
MOVES = (
    ("fully sharded -> HSDP", HSDP, None),
    ("HSDP -> tensor parallel", (MATRIX, "R,S0,S1", "R,R,S1"), MANY),
    ("fully sharded -> tensor parallel", (MATRIX, "S0,S0,S1", "R,R,S1"), MANY),
    ("3-d, S0,S1,S2 -> S1,S2,S0", (CUBE, "S0,S1,S2", "S1,S2,S0"), None),
)


def _parts(effort: Effort) -> Iterator[Row]:
    for name, move, target in MOVES:
        yield _one_owner(name, partial(_on_mesh, *move), target, effort)
    (proof,) = on_the_cpu(Task(Plan.verify, _planned, effort.slow_peer))
    note = "fully sharded -> HSDP: all copies proven against both layouts"
    yield Row("verify() of a whole plan", proof.seconds, note=note)


def _on_mesh(shape: tuple[int, ...], source: str, target: str) -> Pair:
    pair = Layout.on_mesh(shape, MESH, source), Layout.on_mesh(shape, MESH, target)
    for layout in pair:
        hash(layout)
    return pair


def _one_owner(name: str, fresh: Callable[[], Pair], target: Target | None, effort: Effort) -> Row:
    jobs = (
        Task(part, fresh, effort.ours, calls=10),
        Task(copies, fresh, effort.peer),
        Task(lambda _: part(fresh()), repeats=effort.ours, calls=10),
    )
    one, whole, constructed = on_the_cpu(*jobs)
    memory, whole_memory = (size(peak_bytes(job)) for job in jobs[:2])
    note = (
        f"{one.result:,} copies and {memory} for one owner, {whole.result:,} copies and {whole_memory} for all; "
        f"one owner with construction {seconds(constructed.seconds)}"
    )
    return Row(f"one owner, {name}", one.seconds, whole.seconds, "whole plan", target, note)


def _planned() -> Plan:
    made = Plan(*_on_mesh(*HSDP), 4)
    len(made.copies)  # computed before the clock starts
    return made


# --- one of many owners, where replicas, terms or hosts give a choice ------------------------------------------------

WANTED = {16_384: 0.05, 65_536: 0.2}  # seconds of one owner's part, and 50 MiB of the smaller world
HARD = {
    "P -> R": ("P@{w}", "R@{w}", None),
    "P -> R, hosts=8": ("P@{w}", "R@{w}", 8),
    "S0,P@Hx8 -> R, hosts=8": ("S0,P@{h}x8", "R@{w}", 8),
    "R,S0@2x(W/2) -> R, hosts=8": ("R,S0@2x{half}", "R@{w}", 8),
    "S0 -> R,S1@16x(W/16), hosts=8": ("S0@{w}", "R,S1@16x{sixteenth}", 8),
    "S0,R -> R,S1, 16 replicas": ("S0,R@{sixteenth}x16", "R,S1@{sixteenth}x16", None),
}


def _limits(effort: Effort) -> Iterator[Row]:
    for name, (*texts, hosts) in HARD.items():
        for world, limit in WANTED.items():
            sizes = {"w": world, "h": world // 8, "half": world // 2, "sixteenth": world // 16}
            pair = [f"{2 * world}x8192/{text}".format(**sizes) for text in texts]
            one = Task(_hosted_part, partial(_parsed, *pair, hosts), effort.ours)
            (found,) = on_the_cpu(one)
            note = f"{found.result:,} copies, {size(peak_bytes(one))}"
            case = f"one owner of {world:,}, {name}"
            yield Row(case, found.seconds, limit, "wanted", Target(1, most=True), note)


def _parsed(source: str, target: str, per_host: int | None) -> tuple[Layout, Layout, Hosts | None]:
    forget()
    pair = parse(source), parse(target)
    for layout in pair:
        hash(layout)
    return *pair, None if per_host is None else Hosts.of(per_host, pair[0].form.owners)


def _hosted_part(given: tuple[Layout, Layout, Hosts | None]) -> int:
    source, target, hosts = given
    return len(Plan(source, target, 4, None, hosts).for_owner(OWNER).copies)


# --- one owner's part of a model -------------------------------------------------------------------------------------

TRAINERS, SERVERS, TENSORS, SHAPES = 4_096, 1_024, 10_000, 1_000


def _models(effort: Effort) -> Iterator[Row]:
    """Links, buckets and the copies of one owner, between two jobs; their owners are on hosts of eight, or it is not
    known where they are."""
    for end, owner in ("one owner", OWNER), ("one server", TRAINERS + OWNER):
        for option, hosts in ("hosts=8", Hosts.of(8, np.arange(TRAINERS + SERVERS))), ("hosts=None", None):
            run = partial(_part_of_model, hosts=hosts, owner=owner)
            (task,) = on_the_cpu(Task(lambda sides, run=run: run(*sides), _sides, effort.slow_peer))
            case = f"{end}, 10,000 tensors of 1,000 shapes, 4,096 -> 1,024 owners, {option}"
            yield Row(case, task.seconds, 2.0, "wanted", Target(1, most=True), f"{task.result:,} copies")


def _sides() -> tuple[dict[str, TensorInfo], dict[str, TensorInfo]]:
    """New layouts, one for each shape on each side, as those of DTensors are."""
    kinds = list[tuple[TensorInfo, TensorInfo]]()
    for n in range(SHAPES):
        shape, target = (64 * (1 + n % 40), 512 * (1 + n // 40)), ("R,S1@128x8", "S0,R@128x8")[n % 2]
        texts = f"S0@{TRAINERS}", f"{target}:{TRAINERS}-{TRAINERS + SERVERS - 1}"
        layouts = [parse(f"{shape[0]}x{shape[1]}/{text}") for text in texts]
        kinds.append((TensorInfo(shape, bfloat16, layouts[0], "cpu"), TensorInfo(shape, bfloat16, layouts[1], "cpu")))
    names = {f"t{n}": kinds[n % SHAPES] for n in range(TENSORS)}
    return {name: pair[0] for name, pair in names.items()}, {name: pair[1] for name, pair in names.items()}


def _part_of_model(
    sources: dict[str, TensorInfo], targets: dict[str, TensorInfo], *, hosts: Hosts | None, owner: int
) -> int:
    forget()
    shapes = [{name: info.shape for name, info in side.items()} for side in (sources, targets)]
    made, copies = ModelPlan.of(links(*shapes), sources, targets, hosts=hosts), 0
    for bucket in made.buckets():
        plans = [made.links[at].plan for at in bucket]
        plan_parts(plans, owner)
        copies += sum(len(one.part(owner).copies) for one in plans)
    return copies
