"""What DTensor.redistribute would send between two layouts: a model, to hold plans against. It runs nothing.

redistribute changes one mesh axis at a time, each by one collective. Let a tensor have V cells, the axis n owners, and
let the other axes that do not split it (replicas or terms) have F owners together. Summed over everybody, then,
an all-gather (S to R) and a reduce-scatter (P to S) send V * F * (n - 1) cells, an all-reduce (P to R) is both, one
after the other, and what is replicated is cut for nothing. From one dim to another (S0 to S1) an all-to-all sends
(n - 1) / n of V * F; process groups on CPUs have none, and gather and cut. Padding of uneven shards is not counted.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from math import prod
from typing import NamedTuple

from shardwise.layout import Layout, Mesh, Partial, Placement, Replicate, Shard, StridedShard

OF_DTENSOR = (Shard, StridedShard, Replicate, Partial)
MeshPlacements = tuple[Mesh, tuple[Placement, ...]]


class Redistribution(NamedTuple):
    """The bytes that all owners send together, or why it cannot be done at all; `steps` in words."""

    bytes: int | None
    steps: tuple[str, ...] = ()
    why_not: str = ""


def redistributed(source: Layout, target: Layout, itemsize: int, *, all_to_all: bool = True) -> Redistribution:
    """From one layout to another; `all_to_all=False` is the way of CPUs.

    >>> from shardwise.layout import parse
    >>> redistributed(parse("8x6/S0@4"), parse("8x6/S1@4"), 4)
    Redistribution(bytes=144, steps=('all-to-all S0 -> S1 over 4',), why_not='')
    >>> redistributed(parse("8x6/S0@4"), parse("8x6/S1@4"), 4, all_to_all=False).bytes
    576
    """
    here, there = _on_mesh(source), _on_mesh(target)
    why_not = _refusal(here, there)
    if here is None or there is None or why_not:
        return Redistribution(None, why_not=why_not)
    current, sizes = list(here[1]), here[0].shape
    total, steps = 0, list[str]()
    for axis, goal in _changes(here[1], there[1]):
        around = prod(n for at, n in enumerate(sizes) if at != axis and not _splits(current[at]))
        word, cells = _collective(current[axis], goal, prod(source.shape) * around, sizes[axis], all_to_all)
        total += cells
        steps.append(f"{word} {current[axis]} -> {goal} over {sizes[axis]}")
        current[axis] = goal
    return Redistribution(total * itemsize, tuple(steps))


def _on_mesh(layout: Layout) -> MeshPlacements | None:
    """The mesh and placements that a layout was written with; None for other kinds."""
    s = layout.spelling
    if s.kind != "mesh" or len(set(s.owners or ())) < len(s.owners or ()):
        return None
    mesh = Mesh.of(s.mesh, s.names, ranks=s.owners)
    placements = mesh.placements(list(s.items))
    return (mesh, placements) if all(isinstance(p, OF_DTENSOR) for p in placements) else None


def _refusal(here: MeshPlacements | None, there: MeshPlacements | None) -> str:
    """Why it cannot be done, or nothing."""
    if here is None or there is None:
        return "a DTensor lies on a mesh, one placement per axis"
    if here[0].ranks.tolist() != there[0].ranks.tolist():
        return "source and target are different meshes"
    if any(isinstance(b, Partial) and a != b for a, b in zip(here[1], there[1], strict=True)):
        return "the target is a partial sum"
    return ""


def _changes(source: Sequence[Placement], target: Sequence[Placement]) -> Iterator[tuple[int, Placement]]:
    """Axis by axis what it becomes: from the inside out, over R where outer axes cut the same dim otherwise; then the
    rest from the outside in."""
    current = list(source)
    for axis in reversed(range(len(source))) if any(map(_splits, source)) else ():
        goal = target[axis]
        if isinstance(goal, Shard) and _cutting(current[:axis], goal.dim) != _cutting(target[:axis], goal.dim):
            goal = Replicate()
        if current[axis] != goal:
            yield axis, goal
            current[axis] = goal
    yield from ((axis, goal) for axis, goal in enumerate(target) if current[axis] != goal)


def _splits(placement: Placement) -> bool:
    return isinstance(placement, Shard | StridedShard)


def _cutting(placements: Sequence[Placement], dim: int) -> list[int]:
    """The axes that split a dim."""
    return [axis for axis, placement in enumerate(placements) if placement == Shard(dim)]


def _collective(source: Placement, target: Placement, cells: int, count: int, all_to_all: bool) -> tuple[str, int]:
    """What changes an axis of `count` owners, and the cells that it sends, where `cells` are split over it."""
    whole = cells * (count - 1)
    match source, target:
        case Replicate(), _:
            return "cut", 0
        case Partial(), Replicate():
            return "all-reduce", 2 * whole
        case Partial(), Shard():
            return "reduce-scatter", whole
        case Partial(), _:
            return "all-reduce and cut", 2 * whole
        case Shard(), Shard() if all_to_all:
            return "all-to-all", whole // count
        case _, Replicate():
            return "all-gather", whole
    return "all-gather and cut", whole
