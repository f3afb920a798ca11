"""What every representation of a layout answers: pieces of an owner, and cells with their holders."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple, Protocol

import numpy as np

from shardwise.geometry import Bools, Box, Boxes, Ints, Places, Strides, ints, spread, starts


@dataclass(frozen=True, slots=True)
class Piece:
    """The cells of `box`, and where they lie in their owner's buffer: its number, the first element, the strides."""

    box: Box
    buffer: int
    offset: int
    strides: tuple[int, ...]


class Cells(NamedTuple):
    """Boxes that no holder's piece ends inside, with the block of each: cells of one block have the same holders."""

    boxes: Boxes
    block: Ints


@dataclass(frozen=True, eq=False)
class Holders:
    """The owners of every block, rising. A block of a partial layout has several terms, each with its own replicas.

    Row `block * terms + term` of `owners` is `owners[edges[row]:edges[row + 1]]`.
    """

    edges: Ints
    owners: Ints
    terms: int = 1

    @staticmethod
    def of(counts: Ints, owners: Ints) -> Holders:
        """Rows of these lengths."""
        return Holders(starts(counts), owners)

    @cached_property
    def counts(self) -> Ints:
        """How many owners each row has."""
        return np.diff(self.edges)

    @cached_property
    def most(self) -> int:
        """The longest row."""
        return int(self.counts.max(initial=0))

    @cached_property
    def single(self) -> bool:
        """True where every row has exactly one owner."""
        return bool((self.counts == 1).all())

    def expand(self, rows: Ints) -> tuple[Ints, Ints]:
        """All owners of these rows: the index into `rows`, and the owner."""
        if self.single:
            return np.arange(len(rows)), self.owners[rows]
        index, nth = spread(self.counts[rows])
        return index, self.owners[self.edges[rows[index]] + nth]

    def filtered(self, keep: Bools) -> Holders:
        """The same rows with some of the owners, chosen entry by entry."""
        row = np.repeat(np.arange(len(self.counts)), self.counts)[keep]
        return Holders(starts(ints(np.bincount(row, minlength=len(self.counts)))), self.owners[keep], self.terms)

    def pick(self, rows: Ints, turn: Ints) -> Ints:
        """One owner of each row, counting round and round; -1 where a row is empty."""
        count = self.counts[rows]
        place = np.where(count > 0, self.edges[rows] + turn % np.maximum(count, 1), len(self.owners))
        return np.append(self.owners, -1)[place]

    @cached_property
    def _row_by_number(self) -> Ints | None:
        """The row of every owner, by its number: where no owner has two and the numbers are not far apart."""
        most = int(self.owners.max(initial=-1))
        if not 0 <= most <= 4 * len(self.owners) + 1024:
            return None
        table = np.full(most + 2, -1)
        table[self.owners] = np.repeat(np.arange(len(self.counts)), self.counts)
        return table if np.count_nonzero(table >= 0) == len(self.owners) else None

    def row_of(self, owners: Ints) -> Ints:
        """A row of each owner, -1 where it has none. In a grid an owner has at most one."""
        if self._row_by_number is not None:
            return self._row_by_number[np.minimum(owners, len(self._row_by_number) - 1)]
        order = np.argsort(self.owners)
        known = self.owners[order]
        at = known.searchsorted(owners)
        place = np.append(order, -1)[at]
        row = self.edges.searchsorted(place, "right") - 1
        return np.where(np.append(known, -1)[at] == owners, row, -1)

    def rows_with(self, owner: int) -> Ints:
        """All rows of an owner."""
        return self.edges.searchsorted(np.flatnonzero(self.owners == owner), "right") - 1

    def term_of(self, owners: Ints) -> Ints:
        """Which term of a partial layout each owner holds; 0 where it holds none."""
        return np.maximum(self.row_of(owners), 0) % self.terms

    def hold(self, rows: Ints, owners: Ints) -> Bools:
        """Pair by pair: is that owner in that row?"""
        if self.single:
            return self.owners[rows] == owners
        if self._row_by_number is not None:
            return self.row_of(owners) == rows
        low, high = self.edges[rows], self.edges[rows + 1]
        while (low < high).any():  # bisection, all pairs in step
            middle = (low + high) // 2
            less = (low < high) & (self.owners[np.minimum(middle, len(self.owners) - 1)] < owners)
            low, high = np.where(less, middle + 1, low), np.where(less | (low == high), high, middle)
        place = np.minimum(low, len(self.owners) - 1)
        return (low < self.edges[rows + 1]) & (self.owners[place] == owners)


class Form(Protocol):
    """A representation of a layout: a grid, or a listing of pieces."""

    @property
    def terms(self) -> int:
        """How many contributions make one cell."""

    @property
    def owners(self) -> Ints:
        """All owners, rising, those with nothing included."""

    @property
    def holders(self) -> Holders:
        """Who holds each block."""

    @property
    def cells(self) -> Cells:
        """All cells, in the order of their first corners where the form is a grid."""

    def blocks(self, owner: int) -> Ints:
        """The blocks that an owner holds."""

    def pieces(self, owner: int) -> tuple[Piece, ...]:
        """What an owner holds, without empty boxes."""

    def places(self, owner: int, strides: Sequence[Strides]) -> Places:
        """What an owner holds, in buffers of these strides."""

    def buffers(self, owner: int) -> tuple[tuple[int, ...], ...]:
        """The shapes of an owner's buffers."""

    def largest(self) -> int:
        """The most cells that one owner holds."""

    def relabel(self, old: Ints, new: Ints) -> Form:
        """The same with other owners: `old` (rising) become `new`."""

    def digest(self) -> bytes:
        """Bytes that are equal where two forms mean the same."""


def rename(owners: Ints, old: Ints, new: Ints) -> Ints:
    """Each of `owners` (all of them in `old`) replaced by its new number."""
    return new[np.searchsorted(old, owners)]


def joined_bytes(kind: bytes, arrays: Sequence[Ints]) -> bytes:
    """Arrays as bytes that are the same on every machine, and different for different arrays."""
    return kind + b"".join(len(a).to_bytes(8, "little") + a.astype("<i8").tobytes() for a in arrays)
