"""Proof that a plan does what it says, from both layouts and its copies alone. Shares no code with the planner."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import product

import numpy as np

from shardwise.errors import PlanError
from shardwise.geometry import Boxes, Ints, ints, positions, run_of
from shardwise.layout import Layout
from shardwise.plan.copies import Copies


def verify(source: Layout, target: Layout, copies: Copies, *, reducing: bool) -> None:
    """Raise a PlanError unless every target cell is written exactly once, from owners that have it by then."""
    results = copies.take((copies.step > 0) | (copies.term == 0)) if reducing else copies
    owner, wanted = _wanted(source, target)
    _same_cells(results.target, results.boxes, owner, wanted, "its cells")
    if reducing:
        _terms_arrive_together(copies, source.terms)
    _senders_have(source, copies, reducing=reducing)
    _steps_follow(copies)


def _wanted(source: Layout, target: Layout) -> tuple[Ints, Boxes]:
    """Whose cells the copies must bring: (owner, box) for everybody who is to hold a value."""
    whole = (source.op, source.terms) != (target.op, target.terms)
    first_only = whole and target.op in ("sum", "product", "bxor")
    cells, block = target.form.cells
    terms = range(1 if first_only else target.terms)
    found = [target.form.holders.expand(block * target.terms + term) for term in terms]
    rows = np.concatenate([entry for entry, _ in found])
    return np.concatenate([owner for _, owner in found]), cells.take(rows)


def _same_cells(group: Ints, boxes: Boxes, other_group: Ints, other: Boxes, what: str, width: int = 2**62) -> None:
    """Both cover the same cells equally often in every group: their signed corners cancel (see geometry.tiles).

    The owner of a group is its number modulo `width`.
    """
    groups, places, signs = [], [], []
    extent = (np.concatenate([boxes.hi, other.hi]).max(axis=0, initial=0) + 1).tolist()
    for who, which, sign in (group, boxes, 1), (other_group, other, -1):
        for corner in product((False, True), repeat=boxes.ndim):
            groups.append(who)
            places.append(positions(np.where(corner, which.hi, which.lo), extent))
            signs.append(np.full(len(who), sign * (-1) ** sum(corner)))
    of, at = np.concatenate(groups), np.concatenate(places)
    order = np.lexsort((at, of))
    of, at = of[order], at[order]
    new = np.ones(len(of), dtype=np.bool_)
    new[1:] = (of[1:] != of[:-1]) | (at[1:] != at[:-1])
    sums = np.add.reduceat(np.concatenate(signs)[order], np.flatnonzero(new)) if len(of) else ints([])
    if sums.any():
        row = np.flatnonzero(new)[np.flatnonzero(sums)[0]]
        point = _point(int(at[row]), extent)
        raise PlanError(f"owner {int(of[row]) % width} does not get {what} exactly once: see the cells at {point}")


def _point(position: int, extent: Sequence[int]) -> tuple[int, ...]:
    found = list[int]()
    for size in reversed(extent):
        position, coordinate = divmod(position, size + 1)
        found.append(coordinate)
    return tuple(reversed(found))


def _terms_arrive_together(copies: Copies, terms: int) -> None:
    """In every round, every owner gets all terms of the cells that it reduces."""
    reduced = copies.take(copies.step == 0)
    width = int(reduced.target.max(initial=0)) + 1
    stage = reduced.round * width + reduced.target
    first = reduced.term == 0
    for term in range(1, terms):
        this = reduced.term == term
        boxes = reduced.boxes.take(first), reduced.boxes.take(this)
        _same_cells(stage[first], boxes[0], stage[this], boxes[1], f"term {term} of what it reduces", width)


def _senders_have(source: Layout, copies: Copies, *, reducing: bool) -> None:
    """In step 0 every sender holds what it sends, and the term that it is said to be."""
    cells, block = source.form.cells
    terms = source.terms
    entry, owner = source.form.holders.expand((block[:, None] * terms + np.arange(terms)).reshape(-1))
    row, term = entry // terms, entry % terms
    first = copies.take(copies.step == 0)
    sends = first.term if reducing else np.zeros(len(first), dtype=np.int64)
    holds = term if reducing else np.zeros(len(owner), dtype=np.int64)
    width = max(terms, 1)
    _inside(first.source * width + sends, first.boxes, owner * width + holds, cells.take(row), width)


def _steps_follow(copies: Copies) -> None:
    """In later steps a sender passes on what earlier steps brought it."""
    for step in range(1, int(copies.step.max(initial=0)) + 1):
        now, before = copies.take(copies.step == step), copies.take((copies.step < step) & (copies.term == 0))
        _inside(now.source, now.boxes, before.target, before.boxes, 1)


def _inside(group: Ints, boxes: Boxes, having_group: Ints, having: Boxes, width: int) -> None:
    """Every box lies in the (disjoint) boxes that its group has: what it shares with them adds up to itself."""
    order, have_order = np.argsort(group, kind="stable"), np.argsort(having_group, kind="stable")
    whose, had_by, volume = group[order], having_group[have_order], boxes.volumes()
    for who in np.unique(group).tolist():
        mine, theirs = order[run_of(whose, who)], have_order[run_of(had_by, who)]
        shared = np.zeros(len(mine), dtype=np.int64)
        for part in np.array_split(theirs, max(1, len(mine) * len(theirs) // 2**20)):
            lo = np.maximum(boxes.lo[mine, None], having.lo[None, part])
            hi = np.minimum(boxes.hi[mine, None], having.hi[None, part])
            shared += np.prod(np.maximum(hi - lo, 0), axis=2, dtype=np.int64).sum(axis=1)
        if (shared != volume[mine]).any():
            bad = boxes.box(int(mine[np.flatnonzero(shared != volume[mine])[0]]))
            raise PlanError(f"owner {who // width} is to send {bad}, which it does not have at that time")
