"""Partial sums: who brings the terms of a cell to whom, who reduces them, and who gives the result to whom."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from shardwise.geometry import Bools, Boxes, Ints, ints, spread
from shardwise.layout import Holders
from shardwise.planning.choose import Among, Need, nearest
from shardwise.planning.copies import Copies
from shardwise.planning.given import given
from shardwise.planning.hosts import Hosts
from shardwise.planning.reducers import Parts
from shardwise.planning.regions import Regions


class Span(NamedTuple):
    """The terms from `first` on, before `last`, for every taker."""

    first: Ints
    last: Ints


def reduce(regions: Regions, takers: Holders, holders: Holders, among: Among, order: Ints) -> list[Copies]:
    """Regions whose value is a reduction over `holders.terms` contributions, which the number of terms puts in order.

    `order` has all owners that may be takers, rising. For one owner, regions are those that it holds terms of or takes.
    """
    parts = Parts.of(regions, takers, holders, among.hosts)
    mine = parts if among.only is None else parts.take(_bears_on(regions, parts, holders, among.only))
    item, boxes = mine.cut(regions)
    target = mine.owner[item]
    row = regions.source[mine.region[item]] * holders.terms
    every = Span(np.zeros_like(row), np.full_like(row, holders.terms))
    brought = _bring_terms(boxes, target, row, every, holders, among, ints(order.searchsorted(target)))
    return [brought, *given(regions, parts, takers, among)]


def _bears_on(regions: Regions, parts: Parts, holders: Holders, only: int) -> Bools:
    """The parts that an owner reduces or holds a term of."""
    held = holders.rows_with(only) // holders.terms
    return (parts.owner == only) | np.isin(regions.source[parts.region], held)


def add_up(boxes: Boxes, row: Ints, need: Need, holders: Holders, among: Among, turn: Ints, span: Span) -> Copies:
    """Every taker adds up the terms of its span, which become one term of the target."""
    return _bring_terms(boxes.take(need.region), need.target, row[need.region], span, holders, among, turn)


def _bring_terms(
    parts: Boxes, target: Ints, row: Ints, span: Span, holders: Holders, among: Among, turn: Ints
) -> Copies:
    """All terms of its span come to the target of each part."""
    part, term = _contributions(target, row, span, holders, among.only)
    by = supplier(row[part] + term, target[part], holders, among.hosts, turn[part])
    return Copies.of(parts.take(part), by, target[part], term=term)


def _contributions(target: Ints, row: Ints, span: Span, holders: Holders, only: int | None) -> tuple[Ints, Ints]:
    """Pairs of a part and a term: all; or for one owner all terms of what it reduces, and its own term of the rest."""
    if only is None:
        part, nth = spread(span.last - span.first)
        return part, span.first[part] + nth
    own = int(holders.row_of(ints([only]))[0])
    block, term = divmod(own, holders.terms)
    mine = target == only
    gives = (row // holders.terms == block) & (own >= 0) & (span.first <= term) & (term < span.last)
    part, nth = spread(np.where(mine, span.last - span.first, gives))
    return part, np.where(mine[part], span.first[part] + nth, term)


def supplier(row: Ints, target: Ints, holders: Holders, hosts: Hosts | None, turn: Ints) -> Ints:
    """One holder for all that a target takes of a row: itself, one on its host, or one elsewhere, in turn.

    Never split between replicas, so that all contributions to a cell can be cut into rounds alike.
    """
    owner = holders.pick(row, turn)
    if hosts is not None and not holders.single:
        group, near = nearest(row, target, holders, hosts)
        owner = np.where(near.counts[group] > 0, near.pick(group, turn), owner)
    return np.where(holders.hold(row, target), target, owner)
