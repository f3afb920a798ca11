"""Which cells of a file go where in memory. Found once for all tensors that are stored alike and lie alike."""

from __future__ import annotations

from functools import lru_cache
from typing import NamedTuple

import numpy as np

from shardwise.checkpoint.entry import Alike, Entry
from shardwise.exchange.cuts import Cut, Places, Strides
from shardwise.geometry import Boxes, Ints, ints
from shardwise.layout import Layout
from shardwise.state.links import Link
from shardwise.state.view import View


class Local(NamedTuple):
    """An owner's tensors of a layout."""

    layout: Layout
    owner: int
    strides: tuple[Strides, ...]


class Match(NamedTuple):
    """Copy i takes the cells `boxes[i]`, from box `row[i]` of the `rows` that are needed, to `there[i]`.

    `wanted` are all cells that are needed.
    """

    rows: Ints
    row: Ints
    boxes: Boxes
    there: list[Cut]
    wanted: Boxes

    def sources(self, entry: Entry, view: View) -> list[Cut]:
        """Where the cells are in the files of one of the tensors, in bytes."""
        entry.check(self.wanted)
        places, order = entry.locate(self.rows).inside(self.row, self.boxes), list(view.order)
        boxes = Boxes(*(corner[:, order] for corner in self.boxes))
        return Places(boxes, places.tensor, places.offset, places.strides[:, order]).cuts()


def match(link: Link, entry: Entry, local: Local) -> Match:
    """What is to be copied of an entry to an owner's tensors."""
    return _match(entry.alike, local, link.source_view, link.target_view)


@lru_cache(maxsize=1024)
def _match(alike: Alike, local: Local, source_view: View, target_view: View) -> Match:
    count, ndim = alike.boxes, alike.ndim
    there = target_view.of_places(Places.of_owner(*local))
    wanted = source_view.back(there.boxes)
    # the number of its box stands for where a cell is: that differs from tensor to tensor
    found = Places(
        alike.corners(), np.arange(count), np.zeros(count, np.int64), np.zeros((count, ndim), np.int64)
    ).once(wanted)
    seen = source_view.of_places(found)
    row, placed = there.within(seen.boxes)
    rows, row = np.unique(seen.tensor[row], return_inverse=True)
    return Match(ints(rows), ints(row), source_view.back(placed.boxes), placed.cuts(), wanted)
