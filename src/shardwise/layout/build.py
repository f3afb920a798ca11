"""From checked arguments to forms: one dim spread over owners, and meshes."""

from __future__ import annotations

from collections.abc import Sequence
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
from shardwise.layout.placements import MAY_REPLICATE, Dim, Partial, Placement, Replicate


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
    placed = [_counted_from_first(placement, shape) for placement in placements]
    for axis, (placement, count) in enumerate(zip(placed, mesh.shape, strict=True)):
        if isinstance(placement, Replicate):
            groups[-1].append(axis)
        elif isinstance(placement, Partial):
            groups[-2].append(axis)
        else:
            dim = placement.dim
            parts = prod(mesh.shape[other] for other in groups[dim])
            spans[dim] = placement.split(Dim(dim, shape, spans[dim], parts), count)
            groups[dim].append(axis)
    table = mesh.ranks.transpose([axis for group in groups for axis in group])
    table = table.reshape([prod(mesh.shape[axis] for axis in group) for group in groups])
    op, empty = _reduction(placed, mesh), 0 in shape
    shared = {split.dim for split in placed if isinstance(split, MAY_REPLICATE) and not empty}
    form = _form(shape, spans, table, [dim for dim in shared if overlap(spans[dim], shape[dim])])
    return MeshForm(form, None if empty else op, tuple(map(str, placed)))


def _counted_from_first(placement: Placement, shape: tuple[int, ...]) -> Placement:
    """With a dim that is not negative."""
    if isinstance(placement, Replicate | Partial):
        return placement
    return replace(placement, dim=checked_dim(placement.dim, shape))


def _reduction(placements: Sequence[Placement], mesh: Mesh) -> str | None:
    """The one of all partial axes. An axis of one rank has one term, which is the value whatever the reduction."""
    axes = zip(placements, mesh.shape, strict=True)
    ops = {one.reduce_op for one, count in axes if isinstance(one, Partial) and count > 1}
    if len(ops) > 1:
        raise LayoutError(
            f"placements {','.join(map(str, placements))} mix reductions {sorted(ops)}: a layout has one. "
            f"Reduce the axes of the others first, as DTensor.redistribute does with Replicate() there"
        )
    return next(iter(ops), None)


def _form(shape: tuple[int, ...], spans: list[Spans], table: Ints, shared: Sequence[int]) -> Form:
    """A grid; or a listing, where parts share some of their cells. `shared`: the dims where parts share cells."""
    folded = {dim: fold(spans[dim], table.shape[dim]) for dim in shared}
    known = {dim: one for dim, one in folded.items() if one is not None}
    if len(known) == len(folded):
        return Grid.build(spans, table, known)
    if table.shape[-2] > 1:
        raise LayoutError(
            "a layout cannot be partial where a mesh axis replicates some cells of a dim and splits others: "
            "reduce first (Replicate() or Shard() instead of Partial())"
        )
    return Listing.of_blocks(shape, spans, table)


def unless_counting(owners: Ints) -> tuple[int, ...] | None:
    """The owners as the notation writes them: not at all where they are 0, 1, 2, ..."""
    return None if (owners == np.arange(len(owners))).all() else tuple(owners.tolist())
