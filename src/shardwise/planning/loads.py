"""The most that any owner can stage in each step, counted from the two layouts alone and not from copies."""

from __future__ import annotations

from functools import cached_property

import numpy as np

from shardwise.geometry import Ints, Overlaps, counted, ints, totals
from shardwise.layout import Grid, Holders, Layout
from shardwise.planning import choose
from shardwise.planning.hosts import Hosts
from shardwise.planning.reduced_loads import reduced_loads


def loads(source: Layout, target: Layout, takers: Holders, hosts: Hosts | None, *, reducing: bool) -> tuple[int, ...]:
    """The most cells that an owner can send and receive in each of the three steps."""
    if reducing and isinstance(source.form, Grid) and isinstance(target.form, Grid):
        return reduced_loads(source.form, target.form, takers, hosts)
    bounds, there = Bounds(source, target), target.form.largest()
    placed = None if hosts is None else Placed(bounds, takers, hosts)
    if reducing:
        given = takers.most if placed is None else min(takers.most, placed.takers_of_a_cell + placed.hosts_of_a_cell)
        first = bounds.staged(source.form.largest() * takers.most + 1, there * source.terms)
        return first, there * (given + 1), 0 if placed is None else there * placed.takers_of_a_cell
    if placed is None:
        return bounds.staged(bounds.sent(takers.most), there), 0, 0
    return bounds.staged(placed.given_near + bounds.sent(placed.hosts_of_a_cell), placed.got), placed.handed, 0


class Bounds:
    """Between two layouts: in a grid all blocks have as many replicas, and these share what is asked of their block."""

    def __init__(self, source: Layout, target: Layout) -> None:
        self.source, self.target = source, target
        self.here, self.there = source.form.largest(), target.form.largest()
        self.grids = isinstance(source.form, Grid) and isinstance(target.form, Grid)
        self.both = self._most_in_common()
        self.replicas = max(source.form.holders.most, 1) if isinstance(source.form, Grid) else 1

    def _most_in_common(self) -> int:
        """The most cells that a block of the one has in common with a block of the other."""
        here, there = self.source.form, self.target.form
        if not isinstance(here, Grid) or not isinstance(there, Grid) or not self.here:
            return min(self.here, self.there)
        return Overlaps(here.axes, there.axes).largest()

    def staged(self, sent: int, received: int) -> int:
        """What an owner stages that sends and receives; where no owner does both, the larger."""
        both = np.intersect1d(self.source.form.owners, self.target.form.owners, assume_unique=True)
        return sent + received if len(both) else max(sent, received)

    def sent(self, takers: int) -> int:
        """What one replica sends at most, where so many need each of its cells."""
        return int(self.shared(ints([self.here * takers]), ints([self.replicas]))[0])

    def shared(self, cells: Ints, replicas: Ints) -> Ints:
        """What falls to each of the replicas that share so many cells; not all do, where there are very many."""
        least = -(-self.both // choose.MOST_SENDERS)
        return np.maximum(-(-cells // replicas), np.where(replicas > 1, least, 0)) + 1

    @property
    def grain(self) -> int:
        """The most cells that are not cut where takers share a relay."""
        return min(self.both, 2 * choose.LEAST_SHARE)


class Placed:
    """The same with hosts: how many takers and holders of a cell there are on each."""

    def __init__(self, bounds: Bounds, takers: Holders, hosts: Hosts) -> None:
        self._bounds, self._takers, self._hosts = bounds, takers, hosts

    @cached_property
    def _taken(self) -> tuple[Ints, Ints, Ints]:
        return _by_host(self._takers, self._hosts)

    @cached_property
    def _held(self) -> tuple[Ints, Ints, Ints]:
        return _by_host(self._bounds.source.form.holders, self._hosts)

    def _on_each(self, values: tuple[Ints, Ints, Ints], fewest: bool) -> Ints:
        """The fewest or the most of a row on each host; none where no row is."""
        _, host, count = values
        found = np.zeros(self._hosts.count, dtype=np.int64)
        if fewest:
            found[host] = 2**62
        (np.minimum if fewest else np.maximum).at(found, host, count)
        return found

    def _of_a_term(self, holders: Holders, values: tuple[Ints, Ints, Ints], count: Ints) -> Ints:
        """The sum of counts on each host, of the term that has the most there: terms ask for their own rows only."""
        row, host, _ = values
        cells = totals(count, host * holders.terms + row % holders.terms, self._hosts.count * holders.terms)
        return cells.reshape(-1, holders.terms).max(axis=1)

    @cached_property
    def takers_of_a_cell(self) -> int:
        """The most on one host."""
        return int(self._taken[2].max(initial=0))

    @cached_property
    def hosts_of_a_cell(self) -> int:
        """The most hosts that need it."""
        return int(np.bincount(self._taken[0]).max(initial=0))

    @property
    def given_near(self) -> int:
        """What an owner sends at most to takers on its own host."""
        bounds, held, taken = self._bounds, self._held, self._taken
        here, common = max(bounds.here, 1), max(bounds.both, 1)
        asked = here * self._on_each(taken, fewest=False)
        everybody = self._of_a_term(self._takers, taken, taken[2])
        asked = np.minimum(asked, common * np.minimum(everybody, asked // common + 1))
        replicas = np.minimum(self._on_each(held, fewest=True), 2**62 if isinstance(bounds.source.form, Grid) else 1)
        both = (replicas > 0) & (asked > 0)
        return int(bounds.shared(asked[both], replicas[both]).max(initial=0))

    @property
    def got(self) -> int:
        """What an owner gets at most in the first step: what is held on its host, and its share of the rest."""
        bounds, there = self._bounds, self._bounds.there
        if not bounds.grids:
            return there
        rows = self._of_a_term(bounds.source.form.holders, self._held, np.ones_like(self._held[2]))
        team = self._on_each(self._taken, fewest=True)
        rows, team = rows[team > 0], team[team > 0]
        near = bounds.both * np.minimum(rows, there // max(bounds.both, 1) + 1)
        got = near - (-there // team) + bounds.grain * (team > 1)
        return min(there, int(got.max(initial=0)))

    @property
    def handed(self) -> int:
        """What a taker stages at most that shares what its host lacks with others there, and hands it on.

        In grids they share all that they take in equal parts, up to a grain (see `Shares.of`): each sends its part to
        the others and receives the rest.
        """
        bounds, count = self._bounds, self.takers_of_a_cell
        if count < 2:
            return 0
        if not bounds.grids:
            return bounds.there * count
        coarse = max(min(count, self._takers.most // bounds.replicas) - 2, 0)
        return bounds.there + (count - 2) * (bounds.there // count + 1) + coarse * bounds.grain


def _by_host(holders: Holders, hosts: Hosts) -> tuple[Ints, Ints, Ints]:
    """Row, host, and how many of the row are there, for all that are somewhere."""
    row = np.repeat(np.arange(len(holders.counts)), holders.counts)
    key, count = counted(row * hosts.count + hosts.host(holders.owners))
    return *np.divmod(key, hosts.count), count
