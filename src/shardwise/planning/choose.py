"""Who serves whom: for every cell that an owner needs, the one owner that it comes from.

Every rule here looks at one block of the source or one of the target only, so that sender and receiver, and anybody
else, come to the same answer alone.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from shardwise.geometry import Bools, Boxes, Ints, cut, different, ints, numbered, running, spread, totals
from shardwise.layout import Holders
from shardwise.planning.copies import Copies
from shardwise.planning.hosts import Hosts
from shardwise.planning.lengths import split
from shardwise.planning.relays import Relays, Shares, handed

MOST_SENDERS = 8  # replicas that serve one request at most, give or take one: more messages buy no bandwidth
LEAST_SHARE = 2**15  # cells below which work is not shared out among equals: a message would cost more than it saves


class Need(NamedTuple):
    """Owner `target` needs region number `region`; regions rising, targets rising within each."""

    region: Ints
    target: Ints

    def take(self, rows: Ints | Bools) -> Need:
        """Some of them."""
        return Need(self.region[rows], self.target[rows])


class Among(NamedTuple):
    """The hosts of owners, if they matter; and the only owner whose copies are wanted, if it is one."""

    hosts: Hosts | None = None
    only: int | None = None


class Asked(NamedTuple):
    """What is asked of a row of holders, laid end to end: for every request the cells before it, all cells, and the
    most that one request for that row can have."""

    before: Ints
    total: Ints
    most: Ints

    @staticmethod
    def listed(row: Ints, by: Ints, volume: Ints, most: Ints) -> Asked:
        """All requests for some rows, in the order of those who ask; those of one in the given order."""
        order = np.lexsort((by, row))
        group, before, total = numbered(row[order]), np.empty_like(volume), np.empty_like(volume)
        before[order] = running(volume[order], group)
        total[order] = totals(volume[order], group, len(row))[group]
        return Asked(before, total, most)

    def take(self, rows: Ints | Bools) -> Asked:
        """Some of them."""
        return Asked(self.before[rows], self.total[rows], self.most[rows])


def deliver(
    boxes: Boxes,
    row: Ints,
    need: Need,
    holders: Holders,
    among: Among,
    *,
    team: Ints | None = None,
) -> list[Copies]:
    """Every taker gets its region from a holder: itself, one on its host, or one elsewhere, in this order.

    `row[r]` is the row of holders of region r. What no owner of a host holds is fetched once for that host and handed
    on there in the next step. Its takers share that work for all regions of one `team`, which have the same takers; by
    default every region is a team of its own.
    """
    hosts, only = among
    if hosts is None and holders.most == 1:  # no choice, and a taker that is the holder serves itself
        return [serve(boxes, need, row[need.region], holders)]
    takers = np.bincount(need.region, minlength=boxes.count)
    own = holders.hold(row[need.region], need.target)
    kept, need = need.take(own), need.take(~own)
    copies = [Copies.of(boxes.take(kept.region), kept.target, kept.target)]
    every = np.arange(boxes.count) if team is None else team
    volume, most = boxes.volumes(), largest(row, every, boxes.volumes())
    if hosts is None:
        asked = Asked.listed(row[need.region], need.target, volume[need.region], most[need.region])
        mine = serve(boxes, need, row[need.region], holders, asked, turn=row[need.region], only=only)
        return [*copies, mine]
    group, near = nearest(row[need.region], need.target, holders, hosts)
    nearby = near.counts[group] > 0
    hand, need = need.take(nearby), need.take(~nearby)
    asked = Asked.listed(group[nearby], hand.target, volume[hand.region], most[hand.region])
    copies.append(serve(boxes, hand, group[nearby], near, asked, turn=row[hand.region], only=only))
    relays = Relays.listed(need.region, need.target, hosts, row, every)
    region = relays.region
    least = least_share(holders.counts[row[region]], relays.several, takers[region])
    shares = Shares.of(
        relays, volume[region], relays.laid(volume[region]), least, (row if team is None else team)[region]
    )
    asked = Asked.listed(row[region], relays.host, volume[region], most[region]).take(shares.relay)
    copies.append(fetched(boxes, row, relays, shares, holders, asked, only=only))
    return [*copies, handed(boxes, relays, shares, only=None, step=1)]


def fetched(
    boxes: Boxes,
    row: Ints,
    relays: Relays,
    shares: Shares,
    holders: Holders,
    asked: Asked,
    *,
    only: int | None,
) -> Copies:
    """Shares of relays, from the holders of their regions; `asked` for each share what it is of its region."""
    region = relays.region[shares.relay]
    need, span = Need(region, shares.by), (shares.start, shares.stop)
    return serve(boxes, need, row[region], holders, asked, turn=row[region], span=span, only=only)


def nearest(row: Ints, target: Ints, holders: Holders, hosts: Hosts) -> tuple[Ints, Holders]:
    """For each pair of a row and a host of a target: the holders on that host. And which pair each need is."""
    pair, group = np.unique(row * hosts.count + hosts.host(target), return_inverse=True)
    rows = different(pair // hosts.count)
    entry, owner = holders.expand(rows)
    key = rows[entry] * hosts.count + hosts.host(owner)
    order = np.argsort(key, kind="stable")
    key, owner = key[order], owner[order]
    first, last = (ints(key.searchsorted(pair, side)) for side in ("left", "right"))
    index, nth = spread(last - first)
    return ints(group), Holders.of(ints(last - first), owner[first[index] + nth])


def largest(row: Ints, team: Ints, volume: Ints) -> Ints:
    """For each region the most cells that one team of takers can ask of its row."""
    order = np.lexsort((team, row))
    both = numbered(row[order], team[order])
    cells = totals(volume[order], both, len(row))[both]
    most = np.zeros(len(row), dtype=np.int64)
    rows = numbered(row[order])
    np.maximum.at(most, rows, cells)
    found = np.empty_like(most)
    found[order] = most[rows]
    return found


def least_share(replicas: Ints, takers: Ints, every: Ints) -> Ints:
    """The cells below which takers of one host do not share what they fetch, of so many takers on every host.

    Where replicas outnumber the hosts that ask, there is a message for each taker anyway.
    """
    return np.where(replicas * takers > every, 1, LEAST_SHARE)


def serve(
    boxes: Boxes,
    need: Need,
    row: Ints,
    holders: Holders,
    asked: Asked | None = None,
    *,
    turn: Ints | None = None,
    span: tuple[Ints, Ints] | None = None,
    only: int | None = None,
) -> Copies:
    """Copies for every need, from the holders of its row, in shares that differ by at most one cell.

    All that is asked of one row is laid end to end (`asked` says where each need lies; it is not looked at where no row
    has a choice) and cut into as many equal lengths as the row has holders: each serves one length. So a box is split
    only where that evens the load, and takers seldom have two senders. Where a row has more holders than are worth
    using, `turn` (by default the row) says with which one to begin. `span` are the cells of its region that each need
    is for, by default all. `only` skips what does not concern that owner.
    """
    if asked is None or not len(row) or holders.most == 1:
        chosen = row if holders.single else holders.edges[row]
        once = len(row) == boxes.count and bool((need.region[1:] > need.region[:-1]).all())  # nothing to pick out
        picked = boxes if once else boxes.take(need.region)
        if span is None:
            return Copies.of(picked, holders.owners[chosen], need.target)
        part, pieces = cut(picked, *span)
        return Copies.of(pieces, holders.owners[chosen[part]], need.target[part])
    turn = row if turn is None else turn
    start, stop = (np.zeros_like(row), boxes.volumes()[need.region]) if span is None else span
    if only is not None:
        mine = np.flatnonzero((need.target == only) | np.isin(row, holders.rows_with(only)))
        need, asked = need.take(mine), asked.take(mine)
        row, turn, start, stop = (column[mine] for column in (row, turn, start, stop))
    count = holders.counts[row]
    senders = np.minimum(count, MOST_SENDERS * -(-asked.total // asked.most))
    item, length, start, stop = split(asked.before, start, stop, np.divmod(asked.total, senders))
    chosen = (turn[item] + length * count[item] // senders[item]) % count[item]
    part, pieces = cut(boxes.take(need.region[item]), start, stop)
    item, chosen = item[part], chosen[part]
    return Copies.of(pieces, holders.owners[holders.edges[row[item]] + chosen], need.target[item])
