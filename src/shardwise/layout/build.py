"""From checked arguments to forms: one dim spread over owners, and meshes."""

from __future__ import annotations

from dataclasses import replace
from math import prod
from typing import NamedTuple

import numpy as np

from shardwise.errors import LayoutError
from shardwise.geometry import Boxes, Ints, Spans, different, ints
from shardwise.layout.checks import checked_dim, counted, not_too_many
from shardwise.layout.form import Form
from shardwise.layout.grid import Grid
from shardwise.layout.listing import Listing
from shardwise.layout.mesh import Mesh, Partial, Placement, Shard, StridedShard


def along(shape: tuple[int, ...], dim: int, spans: Spans, owners: Ints) -> Form:
    """One dim spread over the owners. One that is named several times has as many buffers: that is a listing."""
    if len(different(owners)) == len(owners):
        every = [spans if d == dim else Spans.whole(size) for d, size in enumerate(shape)]
        table = owners.reshape([len(owners) if d == dim else 1 for d in range(len(shape))] + [1, 1])
        return Grid.build(every, table)
    lo = np.zeros((len(owners), len(shape)), dtype=np.int64)
    hi = np.tile(ints(shape), (len(owners), 1))
    lo[:, dim] = hi[:, dim] = shape[dim]  # parts that are not among the spans are empty
    lo[spans.part, dim], hi[spans.part, dim] = spans.start, spans.stop
    return Listing.of_boxes(shape, Boxes(lo, hi), owners)


class MeshForm(NamedTuple):
    """A grid, the reduction of its terms, and the placements in words."""

    form: Grid
    op: str | None
    words: tuple[str, ...]


def on_mesh(shape: tuple[int, ...], mesh: Mesh, placements: tuple[Placement, ...]) -> MeshForm:
    """Placements applied from left to right; the owner table is the mesh with its axes grouped by what they do."""
    spans = [Spans.whole(size) for size in shape]
    groups: list[list[int]] = [[] for _ in range(len(shape) + 2)]  # mesh axes of each dim, of terms, of replicas
    ops, words = set[str](), list[str]()
    for axis, (placement, count) in enumerate(zip(placements, mesh.shape, strict=True)):
        if isinstance(placement, Shard | StridedShard):
            placement = replace(placement, dim=checked_dim(placement.dim, shape))
            spans[placement.dim] = _sharded(spans[placement.dim], placement, count)
            groups[placement.dim].append(axis)
        elif isinstance(placement, Partial):
            if count > 1:  # one term is the value, whatever the reduction
                ops.add(placement.reduce_op)
            groups[-2].append(axis)
        else:
            groups[-1].append(axis)
        words.append(str(placement))
    if len(ops) > 1:
        raise LayoutError(
            f"placements {','.join(words)} mix reductions {sorted(ops)}: a layout has one. "
            f"Reduce the axes of the others first, as DTensor.redistribute does with Replicate() there"
        )
    table = mesh.ranks.transpose([axis for group in groups for axis in group])
    table = table.reshape([prod(mesh.shape[axis] for axis in group) for group in groups])
    op = ops.pop() if ops and table.shape[-2] > 1 and 0 not in shape else None  # one term is the value
    return MeshForm(Grid.build(spans, table), op, tuple(words))


def _sharded(spans: Spans, placement: Shard | StridedShard, count: int) -> Spans:
    if isinstance(placement, Shard):
        return spans.chunk(count)
    size = max(int(spans.stop.max(initial=0)), 1)
    factor = counted(placement.split_factor, "the split factor of a strided shard")
    not_too_many(factor, "chunks (the split factor of a strided shard)")
    not_too_many(min(factor * count * len(spans.start), size), "intervals of a strided shard")
    return spans.strided(min(factor, size), count)  # beyond the size every cell is a chunk of its own


def unless_counting(owners: Ints) -> tuple[int, ...] | None:
    """The owners as the notation writes them: not at all where they are 0, 1, 2, ..."""
    return None if (owners == np.arange(len(owners))).all() else tuple(owners.tolist())
