"""What no owner of a host holds: its takers there fetch a share each, and hand it on to one another."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from shardwise.geometry import Bools, Boxes, Ints, cut, heads, numbered, running, spread, totals
from shardwise.planning.copies import Copies
from shardwise.planning.hosts import Hosts
from shardwise.planning.lengths import begin, length_at


class Relays(NamedTuple):
    """Relay i brings region `region[i]` to its takers on one host, `takers[first[i]:first[i] + several[i]]`, rising.

    Relays of one host and one `team` of takers stand together, in the order in which they share the work.
    """

    region: Ints
    host: Ints
    team: Ints
    first: Ints
    several: Ints  # how many takers each has
    takers: Ints

    @staticmethod
    def listed(region: Ints, target: Ints, hosts: Hosts, row: Ints, team: Ints) -> Relays:
        """For every target that needs a region; `row` and `team` are those of all regions."""
        host = hosts.host(target)
        order = np.lexsort((target, region, row[region], team[region], host))
        region, host, target = region[order], host[order], target[order]
        first = np.flatnonzero(heads(host, region))
        return Relays(
            region[first], host[first], team[region[first]], first, np.diff(np.append(first, len(region))), target
        )

    def laid(self, volume: Ints) -> tuple[Ints, Ints]:
        """All relays of a team and host laid end to end: the cells before each, and all of its team's."""
        line = numbered(self.host, self.team)
        return running(volume, line), totals(volume, line, len(line))[line]


class Shares(NamedTuple):
    """Cells `start:stop` of the region of relay `relay`, counted in row-major order, are fetched by owner `by`."""

    relay: Ints
    by: Ints
    start: Ints
    stop: Ints

    @staticmethod
    def of(relays: Relays, volume: Ints, laid: tuple[Ints, Ints], least: Ints, turn: Ints) -> Shares:
        """Teams share their lines in equal lengths, beginning with the one whose turn it is.

        Grains of at least `least` cells are not cut: each is fetched by the taker in whose length it begins.
        """
        before, total = laid
        grains = np.maximum(volume // least, 1)
        each, extra = np.divmod(volume, grains)
        size, longer = np.divmod(total, relays.several)
        first, last = (length_at(at, size, longer) for at in (before, before + begin(grains - 1, each, extra)))
        row, nth = spread(last - first + 1)
        number = first[row] + nth
        edges = [
            _grain_from(begin(n, size[row], longer[row]) - before[row], grains[row], each[row], extra[row])
            for n in (number, number + 1)
        ]
        by = relays.takers[relays.first[row] + (number + turn[row]) % relays.several[row]]
        return Shares(row, by, *edges).take(edges[1] > edges[0])

    def take(self, rows: Ints | Bools) -> Shares:
        """Some of them."""
        return Shares(*(column[rows] for column in self))


def _grain_from(position: Ints, grains: Ints, each: Ints, extra: Ints) -> Ints:
    """Where the first grain begins that begins at a position or after it; the end of all grains where none does."""
    nth = np.where(position > 0, length_at(np.maximum(position, 1) - 1, each, extra) + 1, 0)
    return begin(np.minimum(nth, grains), each, extra)


def handed(boxes: Boxes, relays: Relays, shares: Shares, *, only: int | None, step: int) -> Copies:
    """Every share goes to the other takers of its relay; with `only` just what that owner sends or receives."""
    count = relays.several[shares.relay]
    if only is not None:
        count = np.where(shares.by == only, count, 0)
    share, nth = spread(count)
    to = relays.takers[relays.first[shares.relay[share]] + nth]
    if only is not None:
        others = np.flatnonzero(shares.by != only)
        share, to = np.concatenate([share, others]), np.concatenate([to, np.full(len(others), only)])
    other = to != shares.by[share]
    share, to = share[other], to[other]
    part, pieces = cut(boxes.take(relays.region[shares.relay[share]]), shares.start[share], shares.stop[share])
    return Copies.of(pieces, shares.by[share[part]], to[part], step=step)
