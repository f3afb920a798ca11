"""Who serves whom: for every cell that an owner needs, the one owner that it comes from.

Every rule here looks at one block of the source only (all its regions, holders and takers), so that sender and
receiver, and anybody else, come to the same answer alone.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from shardwise.geometry import Bools, Boxes, Ints, cut, ints, numbered, running, spread
from shardwise.layout import Holders
from shardwise.plan.copies import Copies

MOST_SENDERS = 8  # replicas that serve one taker at most: beyond that more messages buy no bandwidth


class Need(NamedTuple):
    """Owner `target` needs region number `region`; regions rising, targets rising within each."""

    region: Ints
    target: Ints

    def take(self, rows: Ints | Bools) -> Need:
        """Some of them."""
        return Need(self.region[rows], self.target[rows])


class Hosts(NamedTuple):
    """The host of every owner, as numbers."""

    owners: Ints
    host: Ints

    def of(self, owners: Ints) -> Ints:
        """Their hosts."""
        return self.host[np.searchsorted(self.owners, owners)]


class Among(NamedTuple):
    """Where owners live, if that matters; and the one owner that is asked for, if it is one."""

    hosts: Hosts | None = None
    only: int | None = None


def deliver(boxes: Boxes, row: Ints, need: Need, holders: Holders, among: Among, step: int = 0) -> list[Copies]:
    """Every taker gets its region from a holder: itself, one on its host, or one elsewhere, in this order.

    `row[r]` is the row of holders of region r. Across hosts a region is fetched once per host, by its takers there in
    equal shares, who hand it on in the next step.
    """
    hosts, only = among
    if hosts is None and holders.most == 1:  # no choice, and a taker that is the holder serves itself
        return [serve(boxes, need, row[need.region], holders, step=step)]
    own = holders.hold(row[need.region], need.target)
    kept, need = need.take(own), need.take(~own)
    copies = [Copies.of(boxes.take(kept.region), kept.target, kept.target, step=step)]
    if hosts is None:
        return [*copies, serve(boxes, need, row[need.region], holders, only=only, step=step)]
    group, near = _near(row[need.region], need.target, holders, hosts)
    found = near.counts[group] > 0
    at_hand = need.take(found)
    copies.append(serve(boxes, at_hand, group[found], near, turn=row[at_hand.region], only=only, step=step))
    return copies + _relayed(boxes, row, need.take(~found), holders, hosts, step)


def _near(row: Ints, target: Ints, holders: Holders, hosts: Hosts) -> tuple[Ints, Holders]:
    """For each pair of a row and a host of a target: the holders on that host. And which pair each need is."""
    width = int(hosts.host.max(initial=0)) + 1
    pair, group = np.unique(row * width + hosts.of(target), return_inverse=True)
    entry, owner = holders.expand(pair // width)
    here = hosts.of(owner) == (pair % width)[entry]
    return ints(group), Holders.of(ints(np.bincount(entry[here], minlength=len(pair))), owner[here])


def _relayed(boxes: Boxes, row: Ints, need: Need, holders: Holders, hosts: Hosts, step: int) -> list[Copies]:
    """Regions that no owner of a host holds: its takers fetch a share each and give it to the others there."""
    order = np.lexsort((need.target, hosts.of(need.target), need.region))
    need = need.take(ints(order))
    width = int(hosts.host.max(initial=0)) + 1
    team = numbered(need.region * width + hosts.of(need.target))
    size = np.bincount(team)
    item, parts = divided(boxes.take(need.region), running(np.ones_like(team), team), size[team])
    fetched = serve(parts, Need(np.arange(len(item)), need.target[item]), row[need.region[item]], holders, step=step)
    first = np.cumsum(size) - size
    copy, nth = spread(ints(size[team[item]]))
    to = need.target[first[team[item]][copy] + nth]
    other = to != need.target[item][copy]
    handed = Copies.of(parts.take(copy[other]), need.target[item][copy[other]], to[other], step=step + 1)
    return [fetched, handed]


def divided(boxes: Boxes, nth: Ints, count: Ints) -> tuple[Ints, Boxes]:
    """Share `nth` of `count` equal shares of each box, as boxes; and the row that each came from."""
    if (count == 1).all():
        return np.arange(boxes.count), boxes
    each, extra = np.divmod(boxes.volumes(), count)
    start = nth * each + np.minimum(nth, extra)
    return cut(boxes, start, start + each + (nth < extra))


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
    """What is needed, from the holders of each need's row, in equal shares to the cell.

    All that is asked of one row is laid end to end and cut into as many equal lengths as the row has holders: each
    serves one length. So a box is split only where that evens the load, and takers seldom have two senders. Where a
    row has more holders than are worth asking, `turn` (the row unless given) says with which one to begin. `only` skips
    what does not concern that owner, once everybody's place is known.
    """
    if not len(row) or holders.most == 1:
        return Copies.of(boxes.take(need.region), holders.owners[holders.edges[row]], need.target, step=step)
    order = np.argsort(row, kind="stable")
    turn = (row if turn is None else turn)[order]
    need, row = need.take(order), row[order]
    volume, group = boxes.volumes()[need.region], numbered(row)
    before = running(volume, group)
    total, asked = np.zeros((2, int(group[-1]) + 1), dtype=np.int64)
    np.add.at(total, group, volume)
    np.add.at(asked, group, 1)
    if only is not None:
        mine = np.flatnonzero((need.target == only) | holders.rows_of(only)[row])
        need, row, turn, group = need.take(mine), row[mine], turn[mine], group[mine]
        volume, before = volume[mine], before[mine]
    senders = np.minimum(holders.counts[row], MOST_SENDERS * asked[group])
    each, extra = np.divmod(total[group], senders)
    first, last = _stick(before, each, extra), _stick(before + volume - 1, each, extra)
    item, nth = spread(last - first + 1)
    stick = first[item] + nth
    start = np.maximum(_begin(stick, each[item], extra[item]) - before[item], 0)
    stop = np.minimum(_begin(stick + 1, each[item], extra[item]) - before[item], volume[item])
    part, pieces = cut(boxes.take(need.region[item]), start, stop)
    stick, item = stick[part], item[part]
    count = holders.counts[row[item]]
    chosen = (turn[item] + stick * count // senders[item]) % count
    return Copies.of(pieces, holders.owners[holders.edges[row[item]] + chosen], need.target[item], step=step)


def _begin(stick: Ints, each: Ints, extra: Ints) -> Ints:
    """Where a stick begins, when the first `extra` of them are one longer than `each`."""
    return stick * each + np.minimum(stick, extra)


def _stick(position: Ints, each: Ints, extra: Ints) -> Ints:
    """The stick that a position lies in."""
    longer = extra * (each + 1)
    return np.where(position < longer, position // (each + 1), extra + (position - longer) // np.maximum(each, 1))


def reduce(boxes: Boxes, row: Ints, need: Need, holders: Holders, among: Among, turn: Ints) -> list[Copies]:
    """Regions whose value is a reduction over `holders.terms` contributions, which come in the order of the terms.

    Where several takers need a region, each reduces an equal share and gives the result to the others, if that moves
    fewer cells than reducing everything everywhere. `row[r]` is the row of holders of the first term of region r, and
    `turn[i]` the number of need i's target among all takers.
    """
    terms, takers = holders.terms, np.bincount(need.region, minlength=boxes.count)
    first = row[need.region]
    has = np.zeros(len(first), dtype=np.bool_)
    for term in range(terms):
        has |= holders.hold(first + term, need.target)
    having = np.bincount(need.region[has], minlength=boxes.count)
    alone = takers * terms - having <= terms - (having > 0) + takers - 1
    reducer = alone[need.region] | has | (having[need.region] == 0)
    nth = running(reducer.astype(np.int64), need.region)
    share = np.where(alone, 1, np.where(having > 0, having, takers))[need.region]
    rows = np.flatnonzero(reducer)
    item, parts = divided(boxes.take(need.region[rows]), np.where(share == 1, 0, nth)[rows], share[rows])
    at = rows[item]
    to = need.target[at]
    copies = [
        Copies.of(parts, _supplier(first[at] + term, to, holders, among.hosts, turn[at]), to, term=term)
        for term in range(terms)
    ]
    return copies + _shared(parts, need, at, ~alone, among)


def _supplier(row: Ints, target: Ints, holders: Holders, hosts: Hosts | None, turn: Ints) -> Ints:
    """One holder for all that a target takes of a row: itself, one on its host, or one elsewhere, in turn.

    Never split between replicas, so that all contributions to a cell can be cut into rounds alike.
    """
    found = holders.pick(row, turn)
    if hosts is not None:
        group, near = _near(row, target, holders, hosts)
        found = np.where(near.counts[group] > 0, near.pick(group, turn), found)
    return np.where(holders.hold(row, target), target, found)


def _shared(parts: Boxes, need: Need, at: Ints, wanted: Bools, among: Among) -> list[Copies]:
    """Reduced parts go to the other takers of their regions."""
    keep = np.flatnonzero(wanted[need.region[at]])
    if not len(keep):
        return []
    parts, at = parts.take(keep), at[keep]
    count = np.bincount(need.region)
    first = np.cumsum(count) - count
    item, nth = spread(ints(count[need.region[at]]))
    target = need.target[first[need.region[at]][item] + nth]
    other = target != need.target[at][item]
    reducers = Holders.of(np.ones_like(at), need.target[at])
    return deliver(parts, np.arange(len(at)), Need(item[other], target[other]), reducers, among, step=1)
