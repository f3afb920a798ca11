"""What every representation of a layout answers: pieces of an owner, and cells with their holders."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple, Protocol

import numpy as np

from shardwise.geometry import Box, Boxes, Ints, different, spread, starts


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

    def expand(self, rows: Ints) -> tuple[Ints, Ints]:
        """All owners of these rows: the index into `rows`, and the owner."""
        if self.most == 1:
            return np.arange(len(rows)), self.owners[self.edges[rows]]
        index, nth = spread(self.counts[rows])
        return index, self.owners[self.edges[rows[index]] + nth]

    @cached_property
    def _row_of(self) -> Ints | None:
        """The one row of every owner, by its number: where no owner has two and the numbers are not far apart."""
        most = int(self.owners.max(initial=0))
        if most > 4 * len(self.owners) + 1024 or len(different(self.owners)) < len(self.owners):
            return None
        found = np.full(most + 2, -1)
        found[self.owners] = np.repeat(np.arange(len(self.counts)), self.counts)
        return found

    def rows_of(self, owner: int) -> np.ndarray[tuple[int], np.dtype[np.bool_]]:
        """For every row: is the owner in it?"""
        found = np.zeros(len(self.counts), dtype=np.bool_)
        found[self.edges.searchsorted(np.flatnonzero(self.owners == owner), "right") - 1] = True
        return found

    def pick(self, rows: Ints, turn: Ints) -> Ints:
        """One owner of each row, counting round and round; -1 where a row is empty."""
        count = self.counts[rows]
        place = np.where(count > 0, self.edges[rows] + turn % np.maximum(count, 1), len(self.owners))
        return np.append(self.owners, -1)[place]

    def hold(self, rows: Ints, owners: Ints) -> np.ndarray[tuple[int], np.dtype[np.bool_]]:
        """Pair by pair: is that owner in that row?"""
        if self.most == 1:
            return self.owners[self.edges[rows]] == owners
        if self._row_of is not None:
            return self._row_of[np.minimum(owners, len(self._row_of) - 1)] == rows
        low, high = self.edges[rows], self.edges[rows + 1]
        while (low < high).any():  # bisection, all pairs in step
            middle = (low + high) // 2
            less = (low < high) & (self.owners[np.minimum(middle, len(self.owners) - 1)] < owners)
            low, high = np.where(less, middle + 1, low), np.where(less | (low == high), high, middle)
        found = np.minimum(low, len(self.owners) - 1)
        return (low < self.edges[rows + 1]) & (self.owners[found] == owners)


class Form(Protocol):
    """A representation of a layout: a grid, or a listing of pieces."""

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
