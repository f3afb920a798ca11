"""One owner's part of a plan between two grids, where hosts matter: counted, not listed (see replicas.py).

What no holder on a host has, its takers there fetch in shares and hand on to each other.
"""

from __future__ import annotations

import numpy as np

from shardwise.geometry import Boxes, Ints, different, ints, running, totals
from shardwise.layout import Holders
from shardwise.planning.choose import Asked, Need, fetched, least_share, serve
from shardwise.planning.copies import Copies
from shardwise.planning.counts import HostCounts
from shardwise.planning.relays import Relays, Shares, handed


def received(counts: HostCounts) -> list[Copies]:
    """What an owner keeps, receives, and hands on."""
    if counts.taken < 0:
        return []
    boxes, row, term = counts.wanted()
    held = row == counts.held
    near = np.isin(row, counts.holders.row_of(counts.here)) & ~held
    copies = [counts.kept(boxes.take(held))]
    if near.any():
        copies.append(_from_host(counts, boxes.take(near), row[near], term))
    if not (near | held).all():
        far = ~(near | held)
        copies += _from_afar(counts, boxes.take(far), row[far], term)
    return copies


def _from_host(counts: HostCounts, boxes: Boxes, row: Ints, term: int) -> Copies:
    """From holders on the owner's host, who share what is asked of them there."""
    holders, takers, owner = counts.holders, counts.takers, counts.owner
    rows, here = different(row), counts.here
    mine = takers.row_of(here)
    asking = here[(mine >= 0) & (mine % holders.terms == term)] if takers.terms > 1 else here[mine >= 0]
    pair, by = (side.reshape(-1) for side in np.meshgrid(rows, asking, indexing="ij"))
    cells = counts.cells(pair, takers.row_of(by)) * (holders.row_of(by) != pair)
    table, at = cells.reshape(len(rows), len(asking)), rows.searchsorted(row)
    before = table[:, asking < owner].sum(axis=1)[at] + running(boxes.volumes(), row)
    asked = Asked(before, table.sum(axis=1)[at], counts.overlaps.most(row // holders.terms))
    where = holders.row_of(here)
    order = np.lexsort((here, where))
    order = order[np.isin(where[order], rows)]
    near = Holders.of(ints(np.bincount(rows.searchsorted(where[order]), minlength=len(rows))), here[order])
    return serve(boxes, Need(np.arange(len(row)), np.full(len(row), owner)), at, near, asked, turn=row)


def _from_afar(counts: HostCounts, boxes: Boxes, row: Ints, term: int) -> list[Copies]:
    """The owner's share of what its host lacks, and what it gets from the other takers there and hands on to them."""
    takers, holders, owner = counts.takers, counts.holders, counts.owner
    team = counts.here[takers.row_of(counts.here) == counts.taken]
    every = np.full(len(row), counts.taken)
    relays = Relays(
        np.arange(len(row)), np.full(len(row), counts.host), every, np.zeros_like(row), len(team) + 0 * row, team
    )
    volume = boxes.volumes()
    least = least_share(holders.counts[row], relays.several, takers.counts[every])
    shares = Shares.of(relays, volume, relays.laid(volume), least, every)
    mine = shares.take(shares.by == owner)
    asked = _asked_from_afar(counts, row[mine.relay], running(volume, row)[mine.relay], term)
    copies = fetched(boxes, row, relays, mine, holders, asked, only=None)
    return [copies, handed(boxes, relays, shares, only=owner, step=1)]


def _asked_from_afar(counts: HostCounts, row: Ints, inside: Ints, term: int) -> Asked:
    """What hosts without a holder ask of rows, in the order of hosts; at one host in the order of its takers' rows."""
    holders, terms = counts.holders, counts.holders.terms
    rows = different(row)
    if not len(rows):
        return Asked(inside, inside, inside)
    host, taking = taken = counts.rows_by_host(counts.takers, term)
    blocks = len(counts.takers.counts) // terms
    weights = [np.bincount(taking[which] // terms, minlength=blocks) for which in (host >= 0, host < counts.host)]
    total, before = counts.overlaps.weighed(rows // terms, weights)
    entry, holder = holders.expand(rows)
    key = different(entry * counts.hosts.count + counts.hosts.host(holder))
    entry, having = np.divmod(key, counts.hosts.count)
    index, took = counts.at(having, taken)
    entry, having = entry[index], having[index]
    cells = counts.cells(rows[entry], took)
    total = total - totals(cells, entry, len(rows))
    before = before - totals(cells * (having < counts.host), entry, len(rows))
    own = taking[host == counts.host]
    own = own[own < counts.taken]
    entry, took = (side.reshape(-1) for side in np.meshgrid(np.arange(len(rows)), own, indexing="ij"))
    before = before + totals(counts.cells(rows[entry], took), entry, len(rows))
    at = rows.searchsorted(row)
    return Asked(before[at] + inside, total[at], counts.overlaps.most(row // terms))


def sent(counts: HostCounts) -> list[Copies]:
    """What an owner sends of its own block, in the first step."""
    if counts.held < 0:
        return []
    boxes, team, need = counts.offered()
    host = counts.hosts.host(need.target)
    there = counts.hosts.host(counts.holders.expand(ints([counts.held]))[1])
    near = host == counts.host
    return [
        *_to_host(counts, boxes, need.take(near)),
        *_to_afar(counts, boxes, team, need.take(~np.isin(host, there))),
    ]


def _to_host(counts: HostCounts, boxes: Boxes, need: Need) -> list[Copies]:
    """To takers on the owner's host."""
    here = counts.here[counts.holders.row_of(counts.here) == counts.held]
    return [counts.given(boxes, need, here)] if len(need.region) else []


def _to_afar(counts: HostCounts, boxes: Boxes, team: Ints, need: Need) -> list[Copies]:
    """To takers on hosts that hold nothing of the owner's block."""
    if not len(need.region):
        return []
    row, volume = np.full(boxes.count, counts.held), boxes.volumes()
    relays = Relays.listed(need.region, need.target, counts.hosts, row, team)
    region, replicas = relays.region, counts.holders.counts[row[relays.region]]
    least = least_share(replicas, relays.several, counts.takers.counts[relays.team])
    shares = Shares.of(relays, volume[region], _laid(counts, relays, volume[region]), least, relays.team)
    asked = Asked.listed(row[region], relays.host, volume[region], counts.most_of_held(len(region))).take(shares.relay)
    copies = fetched(boxes, row, relays, shares, counts.holders, asked, only=counts.owner)
    return [copies.take(copies.source == counts.owner)]


def _laid(counts: HostCounts, relays: Relays, volume: Ints) -> tuple[Ints, Ints]:
    """Where these relays lie in all that their hosts lack of their teams' rows, and how much that is."""
    inside, alone = relays.laid(volume)
    some = np.flatnonzero(relays.several > 1)
    if not len(some):
        return inside, alone
    terms, width = counts.holders.terms, len(counts.takers.counts)
    key = relays.host[some] * width + relays.team[some]
    keys = different(key)
    host, team = np.divmod(keys, width)
    held = np.full(len(keys), counts.held)
    entry, other = counts.at(host, counts.rows_by_host(counts.holders, counts.held % terms))
    cells = counts.cells(other, team[entry])
    whole = counts.target.volumes(team // terms) - totals(cells, entry, len(keys))
    ahead = counts.overlaps.before(held // terms, team // terms)
    ahead = ahead - totals(cells * (other < counts.held), entry, len(keys))
    at = keys.searchsorted(key)
    inside[some] += ahead[at]
    alone[some] = whole[at]
    return inside, alone
