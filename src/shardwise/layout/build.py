"""From checked arguments to forms: one dim spread over owners, and meshes."""

from __future__ import annotations

from dataclasses import replace
from math import prod
from typing import NamedTuple

import numpy as np

from shardwise.errors import LayoutError
from shardwise.geometry import Boxes, Ints, Spans, different, fold, ints, overlap
from shardwise.layout.checks import checked_dim
from shardwise.layout.form import Form
from shardwise.layout.grid import Grid
from shardwise.layout.listing import Listing
from shardwise.layout.mesh import Mesh
from shardwise.layout.placements import Dim, Fused, Heads, Partial, Placement, Replicate


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
    """A form, the reduction of its terms, and the placements in words."""

    form: Form
    op: str | None
    words: tuple[str, ...]


def on_mesh(shape: tuple[int, ...], mesh: Mesh, placements: tuple[Placement, ...]) -> MeshForm:
    """Placements applied from left to right; the owner table is the mesh with its axes grouped by what they do."""
    spans = [Spans.whole(size) for size in shape]
    groups: list[list[int]] = [[] for _ in range(len(shape) + 2)]  # mesh axes of each dim, of terms, of replicas
    ops, words = set[str](), list[str]()
    for axis, (placement, count) in enumerate(zip(placements, mesh.shape, strict=True)):
        if isinstance(placement, Replicate):
            groups[-1].append(axis)
        elif isinstance(placement, Partial):
            if count > 1:  # one term is the value, whatever the reduction
                ops.add(placement.reduce_op)
            groups[-2].append(axis)
        else:
            dim = checked_dim(placement.dim, shape)
            placement = replace(placement, dim=dim)
            parts = prod(mesh.shape[other] for other in groups[dim])
            spans[dim] = placement.split(Dim(dim, shape, spans[dim], parts), count)
            groups[dim].append(axis)
        words.append(str(placement))
    if len(ops) > 1:
        raise LayoutError(
            f"placements {','.join(words)} mix reductions {sorted(ops)}: a layout has one. "
            f"Reduce the axes of the others first, as DTensor.redistribute does with Replicate() there"
        )
    table = mesh.ranks.transpose([axis for group in groups for axis in group])
    table = table.reshape([prod(mesh.shape[axis] for axis in group) for group in groups])
    op = ops.pop() if ops and table.shape[-2] > 1 and 0 not in shape else None  # one term is the value
    shared = {p.dim % len(shape) for p in placements if isinstance(p, Heads | Fused)}
    return MeshForm(_form(shape, spans, table, shared), op, tuple(words))


def _form(shape: tuple[int, ...], spans: list[Spans], table: Ints, shared: set[int]) -> Form:
    """A grid, or a listing where parts of a dim share some of their cells; `shared` are the dims where they may."""
    for dim in shared:
        if not overlap(spans[dim], shape[dim]):
            continue
        folded = fold(spans[dim], table.shape[dim])
        if folded is None:
            return _listing(shape, spans, table)
        spans[dim], table = folded.spans, _with_copies(table, dim, folded.copies)
    return Grid.build(spans, table)


def _listing(shape: tuple[int, ...], spans: list[Spans], table: Ints) -> Listing:
    if table.shape[-2] > 1:
        raise LayoutError(
            "a layout cannot be partial where a mesh axis replicates some heads of a dim and splits others: "
            "reduce first (Replicate() or Shard() instead of Partial())"
        )
    return Listing.of_blocks(shape, spans, table)


def _with_copies(table: Ints, dim: int, copies: Ints) -> Ints:
    """Row p of `copies` names the parts that are now part p: their owners become replicas."""
    parts, count = copies.shape
    every = table.take(copies.reshape(-1), axis=dim)
    apart = every.reshape(*table.shape[:dim], parts, count, *table.shape[dim + 1 :])
    return np.moveaxis(apart, dim + 1, -1).reshape(*table.shape[:dim], parts, *table.shape[dim + 1 : -1], -1)


def unless_counting(owners: Ints) -> tuple[int, ...] | None:
    """The owners as the notation writes them: not at all where they are 0, 1, 2, ..."""
    return None if (owners == np.arange(len(owners))).all() else tuple(owners.tolist())
