"""A layout as tiles: boxes with their holders. Too many tiles of a grid are merged, of a listing left out."""

from __future__ import annotations

from itertools import pairwise, product
from math import prod
from typing import TypedDict

import numpy as np

from shardwise.geometry import Boxes, Ints, ints, merge, outer, positions
from shardwise.layout import Grid, Layout
from shardwise.notation import write_ranges
from shardwise.report.groups import Groups

LONGEST = 40  # characters of a label
# of owners, in turn
COLOURS = ("#9dbcf0", "#f6bd8c", "#7fc3a4", "#ecacd8", "#ece08f", "#b9a5ea", "#8fdcec", "#e59a94")
MOST_ALONG = 64  # tiles side by side: more could not be seen


class TileHolders(TypedDict):
    """The owners that hold a tile."""

    who: str
    groups: list[int]
    replicas: int


class TileRows(TypedDict):
    """Tiles as rows lo..., hi..., number of its holders in `sets`."""

    tiles: list[list[int]]
    sets: list[TileHolders]
    total: int  # with those that were put together or left out
    merged: bool


class Tiles(TileRows):
    """What a page has to know of a layout."""

    text: str
    shape: list[int]
    op: str | None
    terms: int
    shards: int
    idle: str


def tiles(layout: Layout, groups: Groups, most: int) -> Tiles:
    """The tiles of a layout, at most so many."""
    form = layout.form
    counts = [len(axis.part) for axis in form.axes] if isinstance(form, Grid) else []
    if isinstance(form, Grid) and _fewer(counts, most) != counts:
        rows = _put_together(form, groups, most)
    else:
        rows = _all(layout, groups, most)
    idle = np.setdiff1d(form.owners, form.holders.owners)
    return {
        "text": layout.brief(),
        "shape": list(layout.shape),
        "op": layout.op,
        "terms": layout.terms,
        "shards": len(form.holders.owners),
        "idle": _shortened(idle),
        **rows,
    }


def _all(layout: Layout, groups: Groups, most: int) -> TileRows:
    """Every tile; the first ones where they are too many."""
    boxes, block = merge(*layout.form.cells)
    order = np.argsort(positions(boxes.lo, layout.shape), kind="stable")[:most]
    total, boxes, block = boxes.count, boxes.take(order), block[order]
    different, number = np.unique(block, return_inverse=True)
    sets = [_holders(layout, groups, int(row)) for row in different]
    return {"tiles": _rows(boxes, ints(number)), "sets": sets, "total": total, "merged": False}


def _rows(boxes: Boxes, number: Ints) -> list[list[int]]:
    return np.concatenate([*boxes, number[:, None]], axis=1).tolist()


def _holders(layout: Layout, groups: Groups, block: int) -> TileHolders:
    """Who holds a block: replicas with commas, the terms of a partial with plus signs."""
    holders, terms = layout.form.holders, layout.terms
    rows = block * terms + np.arange(terms)
    words = [write_ranges(holders.expand(rows[t : t + 1])[1].tolist()) for t in range(min(terms, LONGEST))]
    owners = holders.expand(rows)[1]
    text = "+".join(words)
    return {
        "who": text if len(text) <= LONGEST else f"{len(owners)} owners",
        "groups": np.unique(groups.of_owners(owners)).tolist(),
        "replicas": int(holders.counts[rows].max(initial=0)),
    }


def _put_together(grid: Grid, groups: Groups, most: int) -> TileRows:
    """Neighbours along every axis as one tile."""
    counts = [len(axis.part) for axis in grid.axes]
    edges = [np.arange(n + 1) * count // n for n, count in zip(_fewer(counts, most), counts, strict=True)]
    cuts = [axis.cuts[edge] for axis, edge in zip(grid.axes, edges, strict=True)]
    boxes = Boxes(outer([c[:-1] for c in cuts]), outer([c[1:] for c in cuts]))
    parts = [
        [np.unique(axis.part[a:b]) for a, b in pairwise(edge.tolist())]
        for axis, edge in zip(grid.axes, edges, strict=True)
    ]
    sets = [_several(grid.table[np.ix_(*chosen)], groups) for chosen in product(*parts)]
    return {"tiles": _rows(boxes, np.arange(boxes.count)), "sets": sets, "total": prod(counts), "merged": True}


def _fewer(counts: list[int], most: int) -> list[int]:
    """As many along each axis as can be seen, and as all together may be: the longest is halved first."""
    counts = [-(-n // max(1, -(-n // MOST_ALONG))) for n in counts]
    while prod(counts) > most:
        longest = counts.index(max(counts))
        counts = [-(-n // 2) if axis == longest else n for axis, n in enumerate(counts)]
    return counts


def _several(owners: Ints, groups: Groups) -> TileHolders:
    """The holders of tiles that were put together."""
    different = np.unique(owners)
    return {
        "who": _shortened(different),
        "groups": np.unique(groups.of_owners(different)).tolist(),
        "replicas": owners.shape[-1],
    }


def _shortened(owners: Ints) -> str:
    """Their numbers; where that takes too long, how many."""
    if len(owners) > 1000:
        step = int(owners[-1] - owners[0]) == len(owners) - 1
        return f"{owners[0]}-{owners[-1]}" if step else f"{len(owners)} owners from {owners[0]} to {owners[-1]}"
    text = write_ranges(owners.tolist())
    return text if len(text) <= LONGEST else f"{len(owners)} owners from {owners[0]} to {owners[-1]}"
