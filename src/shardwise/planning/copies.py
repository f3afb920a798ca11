"""Copies: which cells go from whom to whom, many at once."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import pairwise
from typing import overload

import numpy as np

from shardwise.geometry import Bools, Box, Boxes, Ints, different, heads, merge, positions


@dataclass(frozen=True, slots=True)
class Copy:
    """The cells of `box` go from owner `source` to owner `target`.

    In step 0 they are read from the source layout, later from what earlier steps brought into the target layout.
    `term` counts the contributions to a cell that is reduced: they are applied in that order.
    """

    source: int
    target: int
    box: Box
    term: int = 0
    step: int = 0
    round: int = 0

    @property
    def local(self) -> bool:
        """True where nothing has to be sent."""
        return self.source == self.target


@dataclass(frozen=True, eq=False)
class Copies(Sequence[Copy]):
    """A sequence of copies, kept as arrays; in the order in which cells are packed into messages."""

    boxes: Boxes
    source: Ints
    target: Ints
    term: Ints
    step: Ints
    round: Ints

    def __post_init__(self) -> None:
        for column in (*self.boxes, self.source, self.target, self.term, self.step, self.round):
            column.flags.writeable = False  # plans are values

    @staticmethod
    def of(boxes: Boxes, source: Ints, target: Ints, *, term: Ints | int = 0, step: int = 0) -> Copies:
        """Copies of one step, not yet in rounds."""
        zeros = np.zeros(len(source), dtype=np.int64)
        return Copies(boxes, source, target, zeros + term, zeros + step, zeros)

    @staticmethod
    def none(ndim: int) -> Copies:
        """No copies."""
        corners, columns = np.zeros((2, 0, ndim), dtype=np.int64), np.zeros((5, 0), dtype=np.int64)
        return Copies(Boxes(*corners), *columns)

    @staticmethod
    def concat(parts: Sequence[Copies]) -> Copies:
        """All of them, one after the other."""
        if len(parts) == 1:
            return parts[0]
        columns = zip(*((p.source, p.target, p.term, p.step, p.round) for p in parts), strict=True)
        return Copies(Boxes.concat([p.boxes for p in parts]), *map(np.concatenate, columns))

    def take(self, rows: Ints | Bools) -> Copies:
        """Some of them."""
        columns = (self.source, self.target, self.term, self.step, self.round)
        return Copies(self.boxes.take(rows), *(c[rows] for c in columns))

    def in_order(self, shape: Sequence[int]) -> Copies:
        """By step, round and place; at one place by target and term."""
        place = positions(self.boxes.lo, shape)
        extra = [column for column in (self.round, self.step) if column.any()]
        if not extra and not self.term.any():
            if (place[1:] > place[:-1]).all():
                return self
            ahead = (place[1:] > place[:-1]) | ((place[1:] == place[:-1]) & (self.target[1:] > self.target[:-1]))
            if ahead.all():  # as grids without replicas come
                return self
        return self.take(np.lexsort((self.term, self.target, place, *extra)))

    def merged(self) -> Copies:
        """Copies of one step, sender, receiver and term that touch along a whole side become one."""
        pair = self.pairs() * (int(self.term.max(initial=0)) + 1) + self.term
        ordered = np.sort(pair)
        again = ordered[1:][ordered[1:] == ordered[:-1]]
        if not len(again):
            return self
        rows = np.flatnonzero(again.take(again.searchsorted(pair), mode="clip") == pair)
        boxes, key = merge(self.boxes.take(rows), pair[rows])
        if boxes.count == len(rows):
            return self
        order = rows[np.argsort(pair[rows])]
        like, alone = self.take(order[pair[order].searchsorted(key)]), np.ones(len(pair), dtype=np.bool_)
        alone[rows] = False
        return Copies.concat([self.take(alone), replace(like, boxes=boxes)])

    def pairs(self) -> Ints:
        """A number for every step, sender and receiver that differ."""
        source, target = self.source, self.target
        width = int(max(source.max(initial=0), target.max(initial=0))) + 1
        if width > 2**30:  # numbers too large to be put together are counted first
            owners = different(np.concatenate([source, target]))
            source, target, width = owners.searchsorted(source), owners.searchsorted(target), len(owners)
        return (self.step * width + source) * width + target

    def stages(self) -> Iterator[tuple[int, int, Copies]]:
        """The copies of each step and round, in order."""
        edges = [*np.flatnonzero(heads(self.step, self.round)).tolist(), len(self.source)]
        for start, stop in pairwise(edges):
            some = self if len(edges) == 2 else self[start:stop]
            yield int(some.step[0]), int(some.round[0]), some

    @cached_property
    def volumes(self) -> Ints:
        """The cells of each."""
        return self.boxes.volumes()

    @cached_property
    def remote(self) -> Bools:
        """True where cells are sent."""
        return self.source != self.target

    def __len__(self) -> int:
        return len(self.source)

    @overload
    def __getitem__(self, at: int) -> Copy: ...
    @overload
    def __getitem__(self, at: slice) -> Copies: ...
    def __getitem__(self, at: int | slice) -> Copy | Copies:
        if isinstance(at, slice):
            return self.take(np.arange(len(self))[at])
        columns = (self.term, self.step, self.round)
        return Copy(int(self.source[at]), int(self.target[at]), self.boxes.box(at), *(int(c[at]) for c in columns))

    def __iter__(self) -> Iterator[Copy]:
        return (self[i] for i in range(len(self)))

    def __repr__(self) -> str:
        return f"Copies({len(self)} copies, {int(self.remote.sum())} between owners)"
