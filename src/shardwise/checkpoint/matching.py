"""Match cells of files with memory. Cached for all tensors that are stored alike and have the same layout."""

from __future__ import annotations

from functools import lru_cache
from typing import NamedTuple

import numpy as np

from shardwise.checkpoint.entry import Alike, Entry
from shardwise.geometry import Box, Boxes, Ints, Places, Strides, Window, ints
from shardwise.job.remap import Link
from shardwise.job.subtensor import Subtensor
from shardwise.layout import Layout, places_of


class Local(NamedTuple):
    """An owner's tensors of a layout."""

    layout: Layout
    owner: int
    strides: tuple[Strides, ...]

    def places(self) -> Places:
        """Where its cells are in them."""
        return places_of(self.layout, self.owner, self.strides)


class Packed(NamedTuple):
    """The cells of a box one after the other, in one tensor without dims of its own."""

    box: Box

    def places(self) -> Places:
        """Where its cells are in it."""
        return Places.packed(Boxes.of([self.box], len(self.box.lo)))


class Match(NamedTuple):
    """Copy i takes the cells `boxes[i]`, from box `row[i]` of the `rows` that are needed, to `there[i]`.

    `dense` are the same cells where boxes lie row-major, from the first element of their row on. `wanted` are all cells
    that are needed.
    """

    rows: Ints
    row: Ints
    boxes: Boxes
    dense: list[Window]
    there: list[Window]
    wanted: Boxes

    def sources(self, entry: Entry, view: Subtensor) -> list[Window]:
        """Where the cells are in the files of one of the tensors."""
        entry.check(self.wanted)
        at, size = entry.locate(self.rows), entry.dtype.itemsize
        if at.strides is None:
            files, starts, rows = entry.file[self.rows].tolist(), at.start.tolist(), self.row.tolist()
            return [
                Window(files[row], cut.shape, cut.strides, starts[row] + cut.offset * size)
                for row, cut in zip(rows, self.dense, strict=True)
            ]
        places = entry.places(self.rows, at).inside(self.row, self.boxes)
        return entry.cuts(view.of_places(places))


def match(link: Link, entry: Entry, memory: Local | Packed) -> Match:
    """The copies from an entry to local tensors."""
    return _match(entry.alike, memory, link.source_view, link.target_view)


@lru_cache(maxsize=1024)
def _match(alike: Alike, memory: Local | Packed, source_view: Subtensor, target_view: Subtensor) -> Match:
    there = target_view.of_places(memory.places())
    wanted = source_view.back(there.boxes)
    # the number of its box stands for its file: that differs from tensor to tensor
    packed, count = Places.packed(alike.boxes), alike.boxes.count
    stored = Places(packed.boxes, np.arange(count), np.zeros(count, np.int64), packed.strides)
    number, held = stored.once(wanted)
    here = source_view.of_places(held)  # one for one: nothing that is wanted is out of sight
    rows, row = np.unique(held.tensor, return_inverse=True)
    placed = there.inside(number, here.boxes)
    return Match(ints(rows), ints(row), held.boxes, here.windows(), placed.windows(), wanted)
