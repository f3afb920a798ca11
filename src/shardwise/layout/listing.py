"""A layout that is a list of pieces: arbitrary rectangles, several per owner, and flat ranges."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from math import prod

import numpy as np

from shardwise.errors import LayoutError
from shardwise.geometry import (
    Box,
    Boxes,
    Ints,
    Places,
    Spans,
    Strides,
    boxes_of_blocks,
    cut,
    different,
    distinct,
    exact_sum,
    heads,
    ints,
    join,
    merge_spans,
    numbered,
    row_major,
    run_of,
    starts,
    tiles,
    totals,
)
from shardwise.layout.form import Cells, Holders, Piece, joined_bytes, rename
from shardwise.layout.grid import Grid, Idle

ATOMS = 4096  # parts that overlapping boxes may cut each other into, beside some for every box


@dataclass(frozen=True, eq=False)
class Buffers:
    """The buffers of all owners, sorted by owner: buffer b is number `number[b]` of `owner[b]` and has `shape[b]`."""

    owner: Ints
    shape: Ints

    @staticmethod
    def of(owner: Ints, shape: Ints) -> tuple[Buffers, Ints]:
        """Sorted by owner, each owner's in the given order; and where each given one went."""
        order = np.argsort(owner, kind="stable")
        place = np.empty_like(order)
        place[order] = np.arange(len(order))
        return Buffers(owner[order], shape[order]), ints(place)

    def rows(self, owner: int) -> range:
        """The buffers of one owner."""
        run = run_of(self.owner, owner)
        return range(run.start, run.stop)


@dataclass(frozen=True, eq=False)
class Listing:
    """Piece i holds `boxes[i]` in buffer `buffer[i]`, from element `offset[i]` on with `strides[i]`; none is empty."""

    shape: tuple[int, ...]
    boxes: Boxes
    buffer: Ints
    offset: Ints
    strides: Ints
    storage: Buffers
    overlapping: bool = False
    terms = 1  # only grids are partial

    @staticmethod
    def of_boxes(shape: tuple[int, ...], boxes: Boxes, owners: Ints, *, overlapping: bool = False) -> Listing:
        """Every box is a contiguous buffer of its own. That boxes may overlap is forgotten where they do not."""
        size = boxes.hi - boxes.lo
        buffers, place = Buffers.of(owners, size)
        full = np.flatnonzero((size > 0).all(axis=1))
        order = np.argsort(place[full], kind="stable")
        overlapping = overlapping and not _only_replicas(shape, boxes, owners)
        strides = _row_major(size[full])
        return Listing(
            shape,
            boxes.take(full).take(order),
            place[full][order],
            np.zeros(len(order), dtype=np.int64),
            strides[order],
            buffers,
            overlapping,
        )

    def as_grid(self) -> Grid | None:
        """The grid that the boxes form, where every owner has one buffer and they do."""
        if self.overlapping or (np.diff(self.storage.owner) == 0).any():
            return None
        empty = np.ones(len(self.storage.owner), dtype=np.bool_)
        empty[self.buffer] = False
        return Grid.detect(
            self.shape, self.boxes, self.piece_owner, Idle(self.storage.owner[empty], self.storage.shape[empty])
        )

    @staticmethod
    def of_ranges(shape: tuple[int, ...], start: Ints, stop: Ints, owners: Ints) -> Listing:
        """Every range of the flattened tensor is a 1-d buffer; it is at most 2 * ndim - 1 boxes."""
        buffers, place = Buffers.of(owners, (stop - start)[:, None])
        whole = Boxes(np.zeros((len(start), len(shape)), dtype=np.int64), np.tile(ints(shape), (len(start), 1)))
        row, boxes = cut(whole, start, stop)
        strides = ints(row_major(shape))
        offset = boxes.lo @ strides - start[row]
        order = np.argsort(place[row], kind="stable")
        return Listing(
            shape,
            boxes.take(order),
            place[row][order],
            ints(offset[order]),
            np.tile(strides, (len(row), 1)),
            buffers,
        )

    @staticmethod
    def of_blocks(shape: tuple[int, ...], spans: Sequence[Spans], table: Ints) -> Listing:
        """Parts of every dim, which may share cells, and owners by part, as for a grid: a buffer for each owner."""
        parts = np.unravel_index(np.arange(table.size), table.shape)[: len(shape)]
        sizes = [totals(s.stop - s.start, s.part, n)[p] for s, n, p in zip(spans, table.shape, parts, strict=False)]
        size = np.stack(sizes, axis=1)
        joined = [merge_spans(one) for one in spans]
        if all(heads(one.part).all() for one in joined):  # every buffer is one box
            first = [_first_cells(one, n)[p] for one, n, p in zip(joined, table.shape, parts, strict=False)]
            lo = np.stack(first, axis=1)
            return Listing.of_boxes(shape, Boxes(lo, lo + size), table.reshape(-1), overlapping=True)
        buffers, place = Buffers.of(table.reshape(-1), size)
        block, boxes, corner = boxes_of_blocks(spans, parts)
        strides = _row_major(size)[block]
        order = np.argsort(place[block], kind="stable")
        offset = (corner * strides).sum(axis=1)
        return Listing(shape, boxes.take(order), place[block][order], offset[order], strides[order], buffers)

    @property
    def piece_owner(self) -> Ints:
        """Whose each piece is; rising."""
        return self.storage.owner[self.buffer]

    @cached_property
    def owners(self) -> Ints:
        """All owners, rising."""
        return different(self.storage.owner)

    @cached_property
    def _cells_and_holders(self) -> tuple[Cells, Holders]:
        """Cells with their holders: equal boxes of several owners are one cell."""
        if not self.overlapping and exact_sum(self.boxes.volumes()) <= prod(self.shape):  # so no cell is held twice
            every = np.arange(self.boxes.count)
            return Cells(self.boxes, every), Holders.of(np.ones_like(every), self.piece_owner)
        first, number = distinct(self.boxes, self.shape)
        boxes = self.boxes.take(first)
        row, owner = number, self.piece_owner
        if self.overlapping:
            boxes, source, atom = _atoms(boxes)
            order = np.argsort(number, kind="stable")
            edges = starts(np.bincount(number, minlength=len(first)))
            owners = [owner[order[edges[s] : edges[s + 1]]] for s in source.tolist()]
            row, owner = np.repeat(atom, [len(o) for o in owners]), np.concatenate([*owners, ints([])])
        order = np.lexsort((owner, row))
        row, owner = row[order], owner[order]
        new = heads(row, owner)  # an owner that holds a cell twice counts once
        counts = np.bincount(row[new], minlength=boxes.count)
        return Cells(boxes, np.arange(boxes.count)), Holders.of(ints(counts), owner[new])

    @property
    def holders(self) -> Holders:
        """Who holds each cell."""
        return self._cells_and_holders[1]

    @property
    def cells(self) -> Cells:
        """The different boxes; every one is a block of its own."""
        return self._cells_and_holders[0]

    def blocks(self, owner: int) -> Ints:
        """The blocks that an owner holds."""
        return self.holders.rows_with(owner)

    def pieces(self, owner: int) -> tuple[Piece, ...]:
        """An owner's pieces, buffer after buffer."""
        rows = self.storage.rows(owner)
        first, last = np.searchsorted(self.buffer, [rows.start, rows.stop]).tolist()
        return tuple(
            Piece(
                self.boxes.box(i),
                int(self.buffer[i]) - rows.start,
                int(self.offset[i]),
                tuple(self.strides[i].tolist()),
            )
            for i in range(first, last)
        )

    def places(self, owner: int, strides: Sequence[Strides]) -> Places:
        """The same, in buffers of these strides."""
        pieces, shapes, ndim = self.pieces(owner), self.buffers(owner), len(self.shape)
        lying = [_lying(p.offset, p.strides, shapes[p.buffer], strides[p.buffer]) for p in pieces]
        return Places(
            Boxes.of([p.box for p in pieces], ndim),
            ints([p.buffer for p in pieces]),
            ints([offset for offset, _ in lying]),
            ints([steps for _, steps in lying]).reshape(len(pieces), ndim),
        )

    def buffers(self, owner: int) -> tuple[tuple[int, ...], ...]:
        """The shapes of an owner's buffers."""
        return tuple(tuple(self.storage.shape[b].tolist()) for b in self.storage.rows(owner))

    def largest(self) -> int:
        """The most cells of one owner."""
        return int(totals(self.boxes.volumes(), numbered(self.piece_owner), len(self.buffer)).max(initial=0))

    def relabel(self, old: Ints, new: Ints) -> Listing:
        """The same pieces with other owners."""
        buffers, place = Buffers.of(rename(self.storage.owner, old, new), self.storage.shape)
        order = np.argsort(place[self.buffer], kind="stable")
        return Listing(
            self.shape,
            self.boxes.take(order),
            place[self.buffer][order],
            self.offset[order],
            self.strides[order],
            buffers,
            self.overlapping,
        )

    def digest(self) -> bytes:
        """All pieces and buffers, in their order."""
        arrays = [*self.boxes, self.buffer, self.offset, self.strides, self.storage.owner, self.storage.shape]
        return joined_bytes(b"overlapping" if self.overlapping else b"listing", arrays)


def _first_cells(spans: Spans, parts: int) -> Ints:
    """The first cell of every part, each of which is one interval; 0 for parts without cells."""
    first = np.zeros(parts, dtype=np.int64)
    first[spans.part] = spans.start
    return first


def _row_major(shapes: Ints) -> Ints:
    """The strides of contiguous buffers, row by row."""
    strides = np.ones_like(shapes)
    strides[:, :-1] = np.cumprod(shapes[:, :0:-1], axis=1)[:, ::-1]
    return strides


def _only_replicas(shape: tuple[int, ...], boxes: Boxes, owners: Ints) -> bool:
    """True where boxes that share cells are equal and of different owners."""
    first, number = distinct(boxes, shape)
    order = np.lexsort((owners, number))
    return bool(heads(number[order], owners[order]).all()) and tiles(boxes.take(first), shape)


def _atoms(boxes: Boxes) -> tuple[Boxes, Ints, Ints]:
    """Overlapping boxes cut so that none ends inside another: the atoms, and the (box, atom) pairs that belong.

    Every box adds the atoms of its cells that no earlier box has, and cuts those of the earlier boxes that it meets.
    """
    left, right = join(boxes, boxes)
    earlier = left[left > right], right[left > right]
    order = np.lexsort(earlier[::-1])
    whose, neighbour = earlier[0][order], earlier[1][order]
    atoms, parts = list[list[tuple[Box, list[int]]]](), 0
    for i in range(boxes.count):
        rest = [boxes.box(i)]
        for j in neighbour[run_of(whose, i)].tolist():
            before = len(atoms[j])
            atoms[j], rest = _cut_by(atoms[j], boxes.box(i), i, rest)
            parts += len(atoms[j]) - before
        atoms.append([(part, [i]) for part in rest])
        parts += len(rest)
        if parts > ATOMS + 16 * boxes.count:
            raise LayoutError(
                f"{boxes.count} overlapping boxes cut each other into more than {parts} parts: "
                f"make them disjoint, or equal (replicas)"
            )
    every = [atom for cells in atoms for atom in cells]
    pairs = [(i, n) for n, (_, members) in enumerate(every) for i in members]
    return Boxes.of([a for a, _ in every], boxes.ndim), ints([p[0] for p in pairs]), ints([p[1] for p in pairs])


def _cut_by(
    atoms: list[tuple[Box, list[int]]], box: Box, number: int, rest: list[Box]
) -> tuple[list[tuple[Box, list[int]]], list[Box]]:
    """Atoms cut by one more box, which takes part in what it covers; and what of the rest of that box they leave."""
    parts = list[tuple[Box, list[int]]]()
    for atom, members in atoms:
        shared = atom & box
        if shared is None:
            parts.append((atom, members))
            continue
        parts.append((shared, [*members, number]))
        parts.extend((part, members) for part in atom.minus(shared))
        rest = [part for r in rest for part in r.minus(shared)]
    return parts, rest


def _lying(offset: int, strides: Strides, shape: tuple[int, ...], real: Strides) -> tuple[int, Strides]:
    """The first element and the strides of a piece in a buffer that need not be contiguous.

    Buffers of boxes have the dims of the layout, so the piece is a block of the buffer; flat ranges have one dim, in
    which the piece is strided.
    """
    if len(shape) == len(strides):
        corner = np.unravel_index(offset, shape) if shape else ()
        return sum(int(at) * step for at, step in zip(corner, real, strict=True)), real
    return offset * real[0], tuple(stride * real[0] for stride in strides)
