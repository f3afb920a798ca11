"""A layout that is a product of axes: chunks, meshes, cyclic and fused layouts, replicas and partial sums."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, reduce
from typing import NamedTuple

import numpy as np

from shardwise.geometry import (
    Axis,
    Boxes,
    Folded,
    Ints,
    Places,
    Spans,
    Strides,
    block_numbers,
    block_shape,
    boxes_of_block,
    different,
    outer,
    part_lengths,
    row_major,
)
from shardwise.layout.form import Cells, Holders, Piece, joined_bytes, rename

NOTHING: Mapping[int, Folded] = {}


class Idle(NamedTuple):
    """Owners whose buffer has no cell, and the shapes of these buffers."""

    owners: Ints
    shapes: Ints


@dataclass(frozen=True, eq=False)
class Grid:
    """Part p0 of axis 0 crossed with part p1 of axis 1 ... is held by the owners `table[p0, p1, ..., term, replica]`.

    Every owner holds one such block, concatenated into one buffer, or nothing (`idle`).
    """

    axes: tuple[Axis, ...]
    table: Ints
    idle: Idle

    @staticmethod
    def build(spans: Sequence[Spans], table: Ints, folded: Mapping[int, Folded] = NOTHING) -> Grid:
        """From the spans of every dimension and owners by part; parts without cells become idle owners.

        Parts of a dim that share cells are given `folded` too: their owners become replicas.
        """
        parts = table.shape[:-2]
        lengths = part_lengths(spans, parts)
        empty = reduce(np.logical_or.outer, [n == 0 for n in lengths], np.zeros((), dtype=np.bool_))
        where = np.nonzero(np.broadcast_to(empty[..., None, None], table.shape))
        shapes = [n[i] for n, i in zip(lengths, where[:-2], strict=True)]
        idle = _idle(table[where], np.stack(shapes, axis=1) if shapes else np.zeros((0, 0), dtype=np.int64))
        if idle.owners.size == table.size:
            return Grid.empty([int(one.stop.max(initial=0)) for one in spans], idle)
        axes = list[Axis]()
        for dim, one in enumerate(spans):
            axis, numbers = Axis.of(folded[dim].spans if dim in folded else one)
            axes.append(axis)
            if dim in folded:
                table = _with_copies(table, dim, folded[dim].copies[numbers])
            elif len(numbers) < parts[dim] or (np.diff(numbers) < 0).any():  # else the table stays a view of its mesh
                table = table.take(numbers, axis=dim)
        return Grid(tuple(axes), _replicas_rising(table), idle)

    @staticmethod
    def empty(shape: Sequence[int], idle: Idle) -> Grid:
        """The grid of a tensor without cells: however it was cut, all that is left are idle owners."""
        axes = tuple(Axis.of(Spans.whole(size))[0] for size in shape)
        return Grid(axes, np.zeros([*(axis.parts for axis in axes), 1, 1], dtype=np.int64), idle)

    @staticmethod
    def detect(shape: Sequence[int], boxes: Boxes, owners: Ints, idle: Idle) -> Grid | None:
        """The grid that boxes of different owners form, if they do."""
        if 0 in shape:
            return Grid.empty(shape, _idle(*idle))
        block, axes = np.zeros(boxes.count, dtype=np.int64), list[Axis]()
        for a, size in enumerate(shape):
            cuts = different(boxes.lo[:, a])
            number = np.searchsorted(cuts, boxes.lo[:, a])
            edges = np.append(cuts, size)
            if not len(cuts) or cuts[0] != 0 or (edges[number + 1] != boxes.hi[:, a]).any():
                return None
            axes.append(Axis(edges, np.arange(len(cuts))))
            block = block * len(cuts) + number
        parts = [axis.parts for axis in axes]
        count = np.bincount(block) if boxes.count >= int(np.prod(parts)) else np.zeros(0, np.int64)
        if len(count) != int(np.prod(parts)) or (count != count[0]).any():
            return None
        table = owners[np.lexsort((owners, block))].reshape(*parts, 1, -1)
        return Grid(tuple(axes), table, _idle(idle.owners, idle.shapes))

    @property
    def terms(self) -> int:
        """How many contributions make one cell."""
        return self.table.shape[-2]

    @cached_property
    def owners(self) -> Ints:
        """All owners, rising."""
        return np.sort(np.concatenate([self.table.reshape(-1), self.idle.owners]))

    @cached_property
    def holders(self) -> Holders:
        """One row per block and term, in the order of the table."""
        terms, replicas = self.table.shape[-2:]
        flat = self.table.reshape(-1)
        return Holders(np.arange(0, len(flat) + replicas, replicas), flat, terms)

    @cached_property
    def cells(self) -> Cells:
        """The product of all intervals, in row-major order."""
        mine = [np.arange(len(a.part)) for a in self.axes]
        lo = outer([a.cuts[i] for a, i in zip(self.axes, mine, strict=True)])
        hi = outer([a.cuts[i + 1] for a, i in zip(self.axes, mine, strict=True)])
        return Cells(Boxes(lo, hi), block_numbers(self.axes, mine))

    def blocks(self, owner: int) -> Ints:
        """The block of an owner, if it has one."""
        return self.holders.rows_with(owner) // self.holders.terms

    def parts(self, owner: int) -> tuple[int, ...] | None:
        """An owner's part on every axis; None where it holds no cell."""
        block = self.blocks(owner)
        return tuple(map(int, np.unravel_index(block[0], self.table.shape[:-2]))) if len(block) else None

    def pieces(self, owner: int) -> tuple[Piece, ...]:
        """The boxes of an owner's block, laid out in its one buffer."""
        parts = self.parts(owner)
        if parts is None:
            return ()
        strides = row_major(self.buffers(owner)[0])
        boxes, corners = boxes_of_block(self.axes, parts)
        offsets = (corners * np.array(strides, np.int64)).sum(axis=1).tolist()
        return tuple(Piece(boxes.box(row), 0, offset, strides) for row, offset in enumerate(offsets))

    def places(self, owner: int, strides: Sequence[Strides]) -> Places:
        """The boxes of an owner's block, in a buffer of these strides."""
        parts = self.parts(owner)
        if parts is None:
            return Places.empty(len(self.axes))
        boxes, corners = boxes_of_block(self.axes, parts)
        rows = np.repeat(np.array(strides[:1], np.int64), len(corners), axis=0)
        return Places(boxes, np.zeros(len(corners), np.int64), (corners * rows).sum(axis=1), rows)

    def buffers(self, owner: int) -> tuple[tuple[int, ...], ...]:
        """The shape of an owner's one buffer."""
        parts = self.parts(owner)
        if parts is None:
            row = int(np.searchsorted(self.idle.owners, owner))
            return (tuple(self.idle.shapes[row].tolist()),)
        return (block_shape(self.axes, parts),)

    def volumes(self, blocks: Ints) -> Ints:
        """The cells of each of these blocks."""
        cells = np.ones(len(blocks), dtype=np.int64)
        parts = np.unravel_index(blocks, self.table.shape[:-2]) if self.axes else ()
        for axis, part in zip(self.axes, parts, strict=True):
            cells *= axis.lengths[part]
        return cells

    def largest(self) -> int:
        """The product of the longest parts."""
        return int(np.prod([axis.lengths.max(initial=0) for axis in self.axes], dtype=np.int64))

    def relabel(self, old: Ints, new: Ints) -> Grid:
        """The same blocks with other owners."""
        idle = _idle(rename(self.idle.owners, old, new), self.idle.shapes)
        return Grid(self.axes, _replicas_rising(rename(self.table, old, new)), idle)

    def digest(self) -> bytes:
        """Axes, owners and idle owners: normalized, so that equal meaning is equal bytes."""
        arrays = [x for axis in self.axes for x in (axis.cuts, axis.part)]
        return joined_bytes(b"grid", [*arrays, np.array(self.table.shape), self.table, *self.idle])


def _with_copies(table: Ints, dim: int, copies: Ints) -> Ints:
    """Row p of `copies` names the parts that are now part p: their owners become replicas."""
    before, after = table.shape[:dim], table.shape[dim + 1 :]
    every = table.take(copies.reshape(-1), axis=dim).reshape(*before, *copies.shape, *after)
    return np.moveaxis(every, dim + 1, -1).reshape(*before, len(copies), *after[:-1], -1)


def _replicas_rising(table: Ints) -> Ints:
    return table if table.shape[-1] == 1 or (np.diff(table, axis=-1) > 0).all() else np.sort(table, axis=-1)


def _idle(owners: Ints, shapes: Ints) -> Idle:
    order = np.argsort(owners)
    return Idle(owners[order], shapes[order])
