"""The most that any owner can stage where terms are reduced, counted owner by owner and not from copies."""

from __future__ import annotations

from functools import cached_property
from math import prod

import numpy as np

from shardwise.geometry import Bools, Ints, Overlaps, either, ints, totals
from shardwise.layout import Grid, Holders, Layout
from shardwise.planning import choose
from shardwise.planning.hosts import Hosts
from shardwise.planning.reduce import supplier
from shardwise.planning.reducers import Pairs, alone, sharing


def sums_load(source: Layout, target: Layout, edges: tuple[int, ...]) -> tuple[int, int, int]:
    """Where hosts add up terms: a cell of a term goes to one taker on its host, and every taker has one term itself."""
    span = max(np.diff(edges).tolist())
    return source.form.largest() + max(span - 2, 0) * target.form.largest(), 0, 0


def reduced_loads(source: Grid, target: Grid, takers: Holders, hosts: Hosts | None) -> tuple[int, int, int]:
    """The most cells that an owner can send and receive in each of the three steps."""
    reduced = Reduced(source, target, takers, hosts)
    given = (reduced.given_on(), 0) if hosts is None else reduced.given_between(hosts)
    return reduced.brought(), *given


class Reduced:
    """What every owner of two grids holds, takes and reduces at most; all columns are by owner."""

    def __init__(self, source: Grid, target: Grid, takers: Holders, hosts: Hosts | None) -> None:
        self._source, self._target, self._takers, self._hosts = source, target, takers, hosts
        self._overlaps = Overlaps(source.axes, target.axes)
        self._terms = source.terms
        self._owners = either(source.owners, target.owners)
        self._held = source.holders.row_of(self._owners) // self._terms
        self._row = takers.row_of(self._owners)
        self._takes = self._row >= 0
        self._taken = np.where(self._takes, target.volumes(np.maximum(self._row, 0)), 0)
        self._team = np.where(self._takes, takers.counts[np.maximum(self._row, 0)], 0)  # how many take the same

    @cached_property
    def _both(self) -> Ints:
        """The owners that take some of what they hold a term of."""
        both = np.flatnonzero((self._held >= 0) & self._takes)
        return both[self._overlaps.shared(self._held[both], self._row[both]) > 0]

    @cached_property
    def _paired(self) -> tuple[Pairs, Ints]:
        """All pairs that some owner has both of, and which of them each of these owners has."""
        width, both = len(self._takers.counts), self._both
        key, pair, having = np.unique(
            self._held[both] * width + self._row[both], return_inverse=True, return_counts=True
        )
        block, row = np.divmod(key, width)
        return Pairs(block, row, self._overlaps.shared(block, row), ints(having)), ints(pair)

    def _of_owners(self, values: Ints | Bools) -> Ints:
        """What belongs to pairs, for every owner that has one."""
        found = np.zeros(len(self._owners), dtype=np.int64)
        found[self._both] = values[self._paired[1]]
        return found

    @cached_property
    def _alone(self) -> Ints:
        """The cells that an owner has a term of and reduces for itself, as all takers do."""
        pairs, _ = self._paired
        each = alone(pairs, self._takers, self._source.holders, self._hosts)
        return self._of_owners(np.where(each, pairs.cells, 0))

    @cached_property
    def _own(self) -> Ints:
        """Of the cells that it has a term of, those that an owner reduces."""
        pairs, _ = self._paired
        crowd = (self._terms == 2) & (pairs.having == self._takers.counts[pairs.row])
        share = -(-pairs.cells // sharing(pairs.cells, pairs.having, crowd))
        return np.maximum(self._of_owners(share), self._alone)

    @cached_property
    def _others(self) -> Ints:
        """Of the cells that no taker has a term of, those that one of them reduces."""
        pairs, _ = self._paired
        having = totals(pairs.cells, pairs.row, len(self._takers.counts))
        rest, several = self._taken - np.where(self._takes, having[self._row], 0), np.maximum(self._team, 1)
        if self._regions == 1:
            return -(-rest // sharing(rest, several, several < 0))
        grain = min(self._source.largest(), self._target.largest(), 2 * choose.LEAST_SHARE)
        return np.where(several > 1, np.minimum(rest, -(-rest // several) + self._regions * grain), rest)

    @cached_property
    def _regions(self) -> int:
        """The most regions that a block of the target has."""
        axes = zip(self._source.axes, self._target.axes, strict=True)
        return prod(int(np.bincount(b.part_of(a.cross(b).theirs)).max(initial=0)) for a, b in axes)

    def brought(self) -> int:
        """In the first step: a cell of a term goes to its one reducer, or to those that reduce it for themselves."""
        sent = np.where(self._held >= 0, self._source.largest(), 0) - self._own + self._sent_to_alone()
        return int((sent + self._own * (self._terms - 1) + self._others * self._terms).max(initial=0))

    def _sent_to_alone(self) -> Ints:
        """What owners send to takers that have one of two terms and get the other."""
        sent, rows = np.zeros(len(self._owners), dtype=np.int64), np.flatnonzero((self._alone > 0) & (self._team > 1))
        if len(rows):
            to, holders = self._owners[rows], self._source.holders
            turn = ints(self._target.owners.searchsorted(to))
            by = supplier(holders.row_of(to) ^ 1, to, holders, self._hosts, turn)
            np.add.at(sent, self._owners.searchsorted(by), self._alone[rows])
        return sent

    @cached_property
    def _given(self) -> tuple[Ints, Ints]:
        """What an owner reduces and gives to others, and all that it takes and is given on."""
        several = self._team > 1
        taken = np.where(several, self._taken - self._alone, 0)
        return np.where(several, np.minimum(self._own - self._alone + self._others, taken), 0), taken

    def given_on(self) -> int:
        """In the second step: what an owner has reduced goes to all other takers, and it gets the rest."""
        parts, taken = self._given
        return int((parts * np.maximum(self._team - 2, 0) + taken).max(initial=0))

    def given_between(self, hosts: Hosts) -> tuple[int, int]:
        """In the second and the third step with hosts: to neighbours, and once to every other host; see `given`."""
        (parts, taken), row = (side[self._takes] for side in self._given), self._row[self._takes]
        key = row * hosts.count + hosts.host(self._owners[self._takes])
        groups, group, count = np.unique(key, return_inverse=True, return_counts=True)
        near, where = count[group], np.bincount(groups // hosts.count, minlength=len(self._takers.counts))[row]
        neighbours = totals(parts, group, len(groups))[group] - parts
        grain = min(int(parts.max(initial=0)), 2 * choose.LEAST_SHARE)
        fetched = np.minimum(taken, -(-taken // near) + grain)
        given = parts * (near + where - 2) + np.minimum(taken - parts, neighbours + fetched)
        handed = np.where(near > 1, taken + (near - 2) * fetched, 0)
        return int(given.max(initial=0)), int(handed.max(initial=0))
