"""Who serves whom: for every cell that an owner needs, the one owner that it comes from.

Every rule here looks at one block of the source only (all its regions, holders and takers), so that sender and
receiver, and anybody else, come to the same answer alone.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from shardwise.geometry import Bools, Boxes, Ints, cut, ints, numbered, running, spread, starts, totals
from shardwise.layout import Holders
from shardwise.planning.copies import Copies
from shardwise.planning.hosts import Hosts

MOST_SENDERS = 8  # replicas that serve one taker at most: beyond that more messages buy no bandwidth
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


def deliver(
    boxes: Boxes, row: Ints, need: Need, holders: Holders, among: Among, *, turn: Ints | None = None, step: int = 0
) -> list[Copies]:
    """Every taker gets its region from a holder: itself, one on its host, or one elsewhere, in this order.

    `row[r]` is the row of holders of region r. Across hosts a region is fetched once per host, by its takers there in
    turn, who pass it on in the next step. Every owner must compute the same turns: `turn[r]` is the row by default;
    pass it where rows were renumbered.
    """
    hosts, only = among
    turn = row if turn is None else turn
    if hosts is None and holders.most == 1:  # no choice, and a taker that is the holder serves itself
        return [serve(boxes, need, row[need.region], holders, step=step)]
    own = holders.hold(row[need.region], need.target)
    kept, need = need.take(own), need.take(~own)
    copies = [Copies.of(boxes.take(kept.region), kept.target, kept.target, step=step)]
    if hosts is None:
        return [*copies, serve(boxes, need, row[need.region], holders, only=only, step=step)]
    group, near = _near(row[need.region], need.target, holders, hosts)
    nearby = near.counts[group] > 0
    at_hand = need.take(nearby)
    copies.append(serve(boxes, at_hand, group[nearby], near, turn=turn[at_hand.region], only=only, step=step))
    return copies + _relayed(boxes, row, turn, need.take(~nearby), holders, hosts, step)


def _near(row: Ints, target: Ints, holders: Holders, hosts: Hosts) -> tuple[Ints, Holders]:
    """For each pair of a row and a host of a target: the holders on that host. And which pair each need is."""
    pair, group = np.unique(row * hosts.count + hosts.host(target), return_inverse=True)
    entry, owner = holders.expand(pair // hosts.count)
    here = hosts.host(owner) == (pair % hosts.count)[entry]
    return ints(group), Holders.of(ints(np.bincount(entry[here], minlength=len(pair))), owner[here])


def _relayed(
    boxes: Boxes, row: Ints, turn: Ints, need: Need, holders: Holders, hosts: Hosts, step: int
) -> list[Copies]:
    """Regions that no owner of a host holds: some of its takers fetch them and give them to the others there."""
    host = hosts.host(need.target)
    order = np.lexsort((need.target, host, need.region))
    need, team = need.take(ints(order)), numbered(need.region[order], host[order])
    size = np.bincount(team)
    place = running(np.ones_like(team), team)
    item, parts = shared(boxes.take(need.region), place, size[team], turn=turn[need.region])
    fetched = serve(parts, Need(np.arange(len(item)), need.target[item]), row[need.region[item]], holders, step=step)
    copy, nth = spread(ints(size[team[item]]))
    to, by = need.target[starts(ints(size))[team[item]][copy] + nth], need.target[item][copy]
    handed = Copies.of(parts.take(copy[to != by]), by[to != by], to[to != by], step=step + 1)
    return [fetched, handed]


def shared(boxes: Boxes, place: Ints, count: Ints, *, turn: Ints) -> tuple[Ints, Boxes]:
    """What falls to each member of a team that works on a box together; and the row that every part came from.

    The member at `place` of `count` gets an equal share, where shares are not too small; else fewer members get one,
    beginning with the one whose turn it is.
    """
    volume = boxes.volumes()
    workers = np.clip(volume // LEAST_SHARE, 1, count)
    nth = (place - turn) % count
    rows = np.flatnonzero(nth < workers)
    each, extra = np.divmod(volume[rows], workers[rows])
    item, parts = cut(boxes.take(rows), _begin(nth[rows], each, extra), _begin(nth[rows] + 1, each, extra))
    return rows[item], parts


def serve(
    boxes: Boxes,
    need: Need,
    row: Ints,
    holders: Holders,
    *,
    turn: Ints | None = None,
    only: int | None = None,
    step: int = 0,
) -> Copies:
    """Copies for every need, from the holders of its row, in shares that differ by at most one cell.

    All that one row has to serve is laid end to end and cut into as many equal lengths as the row has holders: each
    serves one length. So a box is split only where that evens the load, and takers seldom have two senders. Where a
    row has more holders than are worth using, `turn` (by default the row) says with which one to begin. `only` skips
    what does not concern that owner, once everybody's place is known.
    """
    if not len(row) or holders.most == 1:
        once = len(row) == len(boxes.lo) and bool((need.region[1:] > need.region[:-1]).all())  # nothing to pick out
        picked = boxes if once else boxes.take(need.region)
        return Copies.of(picked, holders.owners[holders.edges[row]], need.target, step=step)
    order = np.argsort(row, kind="stable")
    turn, row, need = (row if turn is None else turn)[order], row[order], need.take(order)
    volume, group = boxes.volumes()[need.region], numbered(row)
    before, groups = running(volume, group), int(group[-1]) + 1
    total, requests = totals(volume, group, groups)[group], np.bincount(group)[group]
    if only is not None:
        mine = (need.target == only) | np.isin(row, holders.rows_with(only))
        need, row, turn, volume, before, total, requests = (
            need.take(mine),
            *(column[mine] for column in (row, turn, volume, before, total, requests)),
        )
    senders = np.minimum(holders.counts[row], MOST_SENDERS * requests)
    item, stick, pieces = _lengths(boxes.take(need.region), before, np.divmod(total, senders))
    count = holders.counts[row[item]]
    chosen = (turn[item] + stick * count // senders[item]) % count
    return Copies.of(pieces, holders.owners[holders.edges[row[item]] + chosen], need.target[item], step=step)


def _lengths(boxes: Boxes, before: Ints, lengths: tuple[Ints, Ints]) -> tuple[Ints, Ints, Boxes]:
    """Boxes that lie end to end from `before` on, cut where a length ends: row, number of the length, and part."""
    each, extra = lengths
    volume = boxes.volumes()
    first, last = _length_at(before, each, extra), _length_at(before + volume - 1, each, extra)
    item, nth = spread(last - first + 1)
    number = first[item] + nth
    start = np.maximum(_begin(number, each[item], extra[item]) - before[item], 0)
    stop = np.minimum(_begin(number + 1, each[item], extra[item]) - before[item], volume[item])
    part, pieces = cut(boxes.take(item), start, stop)
    return item[part], number[part], pieces


def _begin(number: Ints, each: Ints, extra: Ints) -> Ints:
    """Where a length begins, when the first `extra` of them are one longer than `each`."""
    return number * each + np.minimum(number, extra)


def _length_at(position: Ints, each: Ints, extra: Ints) -> Ints:
    """The length that a position lies in."""
    longer = extra * (each + 1)
    return np.where(position < longer, position // (each + 1), extra + (position - longer) // np.maximum(each, 1))


def reduce(boxes: Boxes, row: Ints, need: Need, holders: Holders, among: Among, turn: Ints) -> list[Copies]:
    """Regions whose value is a reduction over `holders.terms` contributions, which come in the order of the terms.

    Where several takers need a region, some of them reduce a share each and give the result to the others, if that
    moves fewer cells than reducing everything everywhere. `row[r]` is the row of holders of the first term of region r,
    and `turn[i]` the number of need i's target among all takers.
    """
    terms, takers = holders.terms, np.bincount(need.region, minlength=boxes.count)
    has = holders.row_of(need.target) // terms == row[need.region] // terms
    having = np.bincount(need.region[has], minlength=boxes.count)
    alone = takers * terms - having <= terms - (having > 0) + takers - 1
    reducer = alone[need.region] | has | (having[need.region] == 0)
    rows = np.flatnonzero(reducer)
    region, solo = need.region[rows], alone[need.region[rows]]
    team = np.where(solo, 1, np.bincount(region, minlength=boxes.count)[region])
    place = np.where(solo, 0, running(np.ones_like(rows), region))
    item, parts = shared(boxes.take(region), place, team, turn=row[region] // terms)
    at = rows[item]
    part, term = _contributions(need.target[at], row[need.region[at]], holders, among.only)
    to = need.target[at][part]
    by = _supplier(row[need.region[at]][part] + term, to, holders, among.hosts, turn[at][part])
    return [Copies.of(parts.take(part), by, to, term=term), *_given_on(parts, row, need, at, ~alone, among)]


def _contributions(target: Ints, row: Ints, holders: Holders, only: int | None) -> tuple[Ints, Ints]:
    """Pairs of a part and a term: all; or for one owner all terms of what it reduces, and its own term of the rest."""
    if only is None:
        return np.divmod(np.arange(len(target) * holders.terms), holders.terms)
    own = int(holders.row_of(ints([only]))[0])
    mine, gives = target == only, (row // holders.terms == own // holders.terms) & (own >= 0)
    part, nth = spread(np.where(mine, holders.terms, gives))
    return part, np.where(mine[part], nth, own % holders.terms)


def _supplier(row: Ints, target: Ints, holders: Holders, hosts: Hosts | None, turn: Ints) -> Ints:
    """One holder for all that a target takes of a row: itself, one on its host, or one elsewhere, in turn.

    Never split between replicas, so that all contributions to a cell can be cut into rounds alike.
    """
    owner = holders.pick(row, turn)
    if hosts is not None:
        group, near = _near(row, target, holders, hosts)
        owner = np.where(near.counts[group] > 0, near.pick(group, turn), owner)
    return np.where(holders.hold(row, target), target, owner)


def _given_on(parts: Boxes, row: Ints, need: Need, at: Ints, wanted: Bools, among: Among) -> list[Copies]:
    """Reduced parts go to the other takers of their regions."""
    keep = np.flatnonzero(wanted[need.region[at]])
    if not len(keep):
        return []
    parts, at = parts.take(keep), at[keep]
    count = ints(np.bincount(need.region))
    item, nth = spread(count[need.region[at]])
    target = need.target[starts(count)[need.region[at]][item] + nth]
    other = target != need.target[at][item]
    reducers = Holders.of(np.ones_like(at), need.target[at])
    others = Need(item[other], target[other])
    return deliver(parts, np.arange(len(at)), others, reducers, among, turn=row[need.region[at]], step=1)
