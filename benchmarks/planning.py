"""Whole plans between two layouts, and one owner's part of them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial

from benchmarks import peers
from benchmarks.measure import Effort, Job, Row, Target, interleaved, peak_bytes
from benchmarks.table import seconds, size
from benchmarks.tilings import Tiling, grid, guillotine, listed
from shardwise import Layout, Mesh, Plan

TITLE = "Planning"
ABOUT = """
Whole plans are `Plan(source, target, itemsize).copies`: all copies of all owners, as arrays. The layouts are made before
the clock starts, as are the peer's objects; "with construction" in a note includes making ours from arrays. The peer is
the planner of torch's distributed checkpoints (DCP), `create_read_items_for_chunk_list` over all target chunks, which
produces a `ReadItem` object per copy. Both sides must find equally many. Parts are `Plan(source, target,
itemsize).part(owner)`, on layouts that nobody has looked at before.
"""
SQUARE = (100_000, 100_000)
LARGE = (1_000_000, 1_000_000)
MESH = Mesh(dp=16, fsdp=64, tp=16)
OWNER = 777
Pair = tuple[Layout, Layout]


def rows(effort: Effort) -> Iterator[Row]:
    """All cases."""
    yield from _whole_plans(effort)
    yield _growth(effort)
    yield from _strips(effort)
    yield from _parts(effort)


def copies(pair: Pair) -> int:
    """A fresh plan: the number of its copies, all computed."""
    return len(Plan(*pair, 4).copies)


def part(pair: Pair) -> int:
    """The copies of one owner of a fresh plan."""
    return len(Plan(*pair, 4).part(OWNER).copies)


def _made(source: Tiling, target: Tiling) -> Callable[[], Pair]:
    return lambda: (source.layout(), target.layout())


# --- whole plans -----------------------------------------------------------------------------------------------------


def _whole_plans(effort: Effort) -> Iterator[Row]:
    yield _against_dcp("grids, 100 x 100 -> 80 x 125", grid(SQUARE, 100, 100), grid(SQUARE, 80, 125), 200, effort)
    random = (guillotine(SQUARE, 10_000, seed=seed) for seed in (1, 2))
    yield _against_dcp("10,000 -> 10,000 random rectangles", *random, 50, effort)


def _against_dcp(case: str, source: Tiling, target: Tiling, bound: float, effort: Effort) -> Row:
    asked, made = peers.load(source.shape, source.corners(), target.corners()), _made(source, target)
    ours, constructed, peer = interleaved(
        Job(copies, made, effort.ours),
        Job(lambda _: copies(made()), repeats=effort.ours),
        Job(lambda _: len(peers.read_items(asked)), repeats=effort.slow_peer),
    )
    if ours.result != peer.result:
        raise RuntimeError(f"{case}: {ours.result} copies, but the peer finds {peer.result}")
    note = f"{ours.result:,} copies; with construction {seconds(constructed.seconds)}"
    return Row(case, ours.seconds, peer.seconds, "DCP", Target(bound), note)


def _growth(effort: Effort) -> Row:
    few, many = ([guillotine(LARGE, count, seed=seed) for seed in (1, 2)] for count in (10_000, 100_000))
    small, large = interleaved(Job(copies, _made(*few), effort.ours), Job(copies, _made(*many), effort.peer))
    note = f"{large.result:,} copies after {small.result:,}"
    case = "100,000 -> 100,000 random rectangles"
    return Row(case, large.seconds, small.seconds, "10,000", Target(15, most=True), note)


def _strips(effort: Effort) -> Iterator[Row]:
    source, target = grid((40_000, 100_000), 10_000, 1), grid((40_000, 100_000), 8_000, 1)
    grids, strips, lists = interleaved(
        Job(copies, _made(grid(SQUARE, 100, 100), grid(SQUARE, 80, 125)), effort.ours),
        Job(copies, _made(source, target), effort.ours),
        Job(copies, _made(listed(source), listed(target)), effort.ours),
    )
    base = grids.seconds / grids.result
    for case, found in ("10,000 -> 8,000 row strips, per copy", strips), ("the same strips as lists, per copy", lists):
        note = f"{found.result:,} copies in {seconds(found.seconds)}"
        yield Row(case, found.seconds / found.result, base, "grids, per copy", Target(1, most=True), note)


# --- one of 16,384 owners --------------------------------------------------------------------------------------------

MOVES = (
    ("fully sharded -> HSDP", (16_384, 16_384), "S0,S0,S1", "R,S0,S1"),
    ("HSDP -> tensor parallel", (16_384, 16_384), "R,S0,S1", "R,R,S1"),
    ("3-d, S0,S1,S2 -> S1,S2,S0", (4_096, 4_096, 4_096), "S0,S1,S2", "S1,S2,S0"),
)


def _parts(effort: Effort) -> Iterator[Row]:
    for name, shape, source, target in MOVES:
        yield _one_owner(name, partial(_on_mesh, shape, source, target), effort)
    fresh = partial(_on_mesh, (16_384, 16_384), "S0,S0,S1", "R,R,R")
    (one,) = interleaved(Job(part, fresh, effort.ours))
    note = f"{one.result:,} copies of 16,384 * 16,384 in the whole plan, which is not computed"
    yield Row("one of 16,384 owners, fully sharded -> replicated", one.seconds, note=note)
    yield _proof(effort)


def _on_mesh(shape: tuple[int, ...], source: str, target: str) -> Pair:
    return Layout.on_mesh(shape, MESH, source), Layout.on_mesh(shape, MESH, target)


def _one_owner(name: str, fresh: Callable[[], Pair], effort: Effort) -> Row:
    known = fresh()
    part(known)
    jobs = Job(part, fresh, effort.ours), Job(copies, fresh, effort.peer), Job(part, lambda: known, effort.ours)
    one, whole, again = interleaved(*jobs)
    memory, whole_memory = (size(peak_bytes(job)) for job in jobs[:2])
    note = (
        f"{one.result:,} copies and {memory} for one owner, {whole.result:,} copies and {whole_memory} for all; "
        f"{seconds(again.seconds)} on layouts that were asked before"
    )
    return Row(f"one of 16,384 owners, {name}", one.seconds, whole.seconds, "whole plan", Target(500), note)


def _proof(effort: Effort) -> Row:
    """The proof of a whole plan, made before the clock starts."""

    def planned() -> Plan:
        made = Plan(*_on_mesh((16_384, 16_384), "S0,S0,S1", "R,S0,S1"), 4)
        copies_of_all = made.copies
        assert len(copies_of_all)
        return made

    (proof,) = interleaved(Job(Plan.verify, planned, effort.slow_peer))
    return Row(
        "verify, 16,384 owners, fully sharded -> HSDP", proof.seconds, note="262,144 copies against both layouts"
    )
