"""Where the cells of two layouts meet: the raw material of a plan, for everybody or for one owner."""

from __future__ import annotations

from math import prod
from typing import NamedTuple

import numpy as np

from shardwise.geometry import Axis, Boxes, Ints, cross_grids, heads, ints, join, positions
from shardwise.layout import Cells, Grid, Layout


class Regions(NamedTuple):
    """Boxes that lie in one block of the source and one of the target, in the order of their first corners."""

    boxes: Boxes
    source: Ints
    target: Ints

    def take(self, rows: Ints) -> Regions:
        """Some of them."""
        return Regions(self.boxes.take(rows), self.source[rows], self.target[rows])


def count_regions(source: Layout, target: Layout) -> int:
    """How many regions there are at most, found without making them. Listings have few boxes: each was written down."""
    if isinstance(source.form, Grid) and isinstance(target.form, Grid):
        return prod(len(a.cross(b).lo) for a, b in zip(source.form.axes, target.form.axes, strict=True))
    for grid, other in (source.form, target.form), (target.form, source.form):
        if isinstance(grid, Grid):
            lo, hi = other.cells.boxes
            counts = [_count_crossed(axis, lo[:, dim], hi[:, dim]) for dim, axis in enumerate(grid.axes)]
            return int(np.prod(counts, axis=0, dtype=np.float64).sum())
    return source.form.cells.boxes.count * target.form.cells.boxes.count


def _count_crossed(axis: Axis, lo: Ints, hi: Ints) -> Ints:
    """How many intervals of an axis each of these ranges crosses."""
    return ints(np.searchsorted(axis.cuts, hi, "left") - np.searchsorted(axis.cuts, lo, "right") + 1)


def all_regions(source: Layout, target: Layout) -> Regions:
    """Every region."""
    if isinstance(source.form, Grid) and isinstance(target.form, Grid):
        return Regions(*cross_grids(source.form.axes, target.form.axes))
    here, there = source.form.cells, target.form.cells
    return _sorted(source, _joined(here, there))


def owner_regions(source: Layout, target: Layout, owner: int) -> Regions:
    """The regions that decide what one owner sends and receives.

    These are the regions of its own blocks on both sides. In listings, where a block that it needs has replicas to
    choose from, they are all regions of that block: who serves whom is settled among them. In grids that is counted.
    """
    if isinstance(source.form, Grid) and isinstance(target.form, Grid):
        regions = _grid_owner(source.form, target.form, owner)
    else:
        regions = _listed_owner(source, target, owner)
    if not regions:
        nothing = np.zeros((0, source.ndim), dtype=np.int64)
        return Regions(Boxes(nothing, nothing), nothing.reshape(-1), nothing.reshape(-1))
    boxes = Boxes.concat([f.boxes for f in regions])
    here, there = np.concatenate([f.source for f in regions]), np.concatenate([f.target for f in regions])
    return _sorted(source, Regions(boxes, here, there), unique=True)


def _sorted(source: Layout, regions: Regions, unique: bool = False) -> Regions:
    """Regions are disjoint, so that their first corners tell them apart."""
    key = positions(regions.boxes.lo, source.shape)
    order = np.argsort(key, kind="stable")
    return regions.take(order[heads(key[order])] if unique else order)


def _grid_owner(source: Grid, target: Grid, owner: int) -> list[Regions]:
    regions = list[Regions]()
    sends, receives = source.parts(owner), target.parts(owner)
    if sends is not None:
        regions.append(Regions(*cross_grids(source.axes, target.axes, parts=sends)))
    if receives is not None:
        boxes, there, here = cross_grids(target.axes, source.axes, parts=receives)
        regions.append(Regions(boxes, here, there))
    return regions


def _listed_owner(source: Layout, target: Layout, owner: int) -> list[Regions]:
    here, there, holders = source.form.cells, target.form.cells, source.form.holders
    receives = _joined(here, _only(there, target.form.blocks(owner)))
    choice = np.unique(receives.source)
    choice = choice[holders.counts[choice * holders.terms] > 1]
    return [receives, _joined(_only(here, np.union1d(choice, source.form.blocks(owner))), there)]


def _only(cells: Cells, blocks: Ints) -> Cells:
    rows = np.flatnonzero(np.isin(cells.block, blocks))
    return Cells(cells.boxes.take(rows), cells.block[rows])


def _joined(here: Cells, there: Cells) -> Regions:
    i, j = join(here.boxes, there.boxes)
    return Regions(here.boxes.take(i).overlap(there.boxes.take(j)), here.block[i], there.block[j])
