"""Proof that copies do what a plan says, from both layouts and the copies alone. Uses nothing of the planner."""

from __future__ import annotations

import numpy as np

from shardwise.errors import PlanError
from shardwise.geometry import Boxes, Ints, different, ints, join, totals, uncancelled
from shardwise.layout import Layout
from shardwise.planning.copies import Copies


def verify(
    source: Layout,
    target: Layout,
    copies: Copies,
    *,
    reducing: bool,
    edges: tuple[int, ...] | None = None,
) -> None:
    """Raise a PlanError unless every target cell is written exactly once, from owners that have it by then.

    With `edges`, term n of the target is the sum of the terms edges[n] to edges[n + 1] of
    the source; otherwise whatever is reduced has all terms.
    """
    if copies.step.min(initial=0) < 0 or copies.round.min(initial=0) < 0:
        raise PlanError("steps and rounds are counted from 0")
    owners = different(np.concatenate([source.form.owners, target.form.owners, copies.source, copies.target]))
    term = np.zeros(len(copies), np.int64) if edges is None else target.form.holders.term_of(copies.target)
    first, last = (ints(edges or (0, source.terms))[term + end] for end in (0, 1))
    results = copies.take((copies.step > 0) | (copies.term == first)) if reducing else copies
    carrying = not reducing and (source.op, source.terms) == (target.op, target.terms)
    owner, wanted = _wanted(target, every_term=carrying or edges is not None)
    _same_cells(owners, (results.target, results.boxes), (owner, wanted), "its cells")
    if reducing:
        _terms_arrive_together(owners, copies, first, last)
    else:
        _terms_stay(source, target, copies)
    _senders_have(owners, source, copies, reducing=reducing)
    for step in range(1, int(copies.step.max(initial=0)) + 1):
        now, before = copies.take(copies.step == step), copies.take((copies.step < step) & (copies.term == 0))
        _inside(owners, (now.source, now.boxes), (before.target, before.boxes))


def _wanted(target: Layout, *, every_term: bool) -> tuple[Ints, Boxes]:
    """Whose cells the copies must bring: (owner, box) for everybody who is to hold a value."""
    first_only = not every_term and target.op in ("sum", "product", "bxor")
    cells, block = target.form.cells
    entries = [
        target.form.holders.expand(block * target.terms + term) for term in range(1 if first_only else target.terms)
    ]
    rows = np.concatenate([entry for entry, _ in entries])
    return np.concatenate([owner for _, owner in entries]), cells.take(rows)


def _same_cells(owners: Ints, got: tuple[Ints, Boxes], wanted: tuple[Ints, Boxes], what: str) -> None:
    """Both lists of (owner, box) cover the same cells equally often."""
    first, second = (owners.searchsorted(side[0]) for side in (got, wanted))
    bad = uncancelled(got[1], first, wanted[1], second)
    if bad is not None:
        raise PlanError(f"owner {owners[bad]} does not get {what} exactly once")


def _terms_arrive_together(owners: Ints, copies: Copies, first: Ints, last: Ints) -> None:
    """In every round, every owner gets all terms of the cells that it reduces: from `first` on, before `last`."""
    reduced, nth, count = copies.step == 0, copies.term - first, last - first
    strange = np.flatnonzero(reduced & ((nth < 0) | (nth >= count)))
    if len(strange):
        copy = copies[int(strange[0])]
        raise PlanError(f"owner {copy.target} gets term {copy.term} of {copy.box}, which it does not reduce")
    for stage in range(int(copies.round[reduced].max(initial=0)) + 1):
        now = reduced & (copies.round == stage)
        for term in range(1, int(count[now].max(initial=0))):
            begun, this = copies.take(now & (nth == 0) & (count > term)), copies.take(now & (nth == term))
            what = f"term {term} of what it reduces"
            _same_cells(owners, (this.target, this.boxes), (begun.target, begun.boxes), what)


def _terms_stay(source: Layout, target: Layout, copies: Copies) -> None:
    """Where terms are carried over, each comes from a holder of the same term."""
    if source.terms == target.terms:
        there, relayed = target.form.holders.term_of(copies.target), target.form.holders.term_of(copies.source)
        here = np.where(copies.step > 0, relayed, source.form.holders.term_of(copies.source))
        wrong = np.flatnonzero(here != there)
        if len(wrong):
            copy = copies[int(wrong[0])]
            reason = f"owner {copy.source} holds another"
            raise PlanError(f"owner {copy.target} does not get its own term of {copy.box}: {reason}")


def _senders_have(owners: Ints, source: Layout, copies: Copies, *, reducing: bool) -> None:
    """In step 0 every sender holds what it sends, and the term that it is said to be."""
    cells, block = source.form.cells
    terms = source.terms
    entry, owner = source.form.holders.expand((block[:, None] * terms + np.arange(terms)).reshape(-1))
    first = copies.take(copies.step == 0)
    _inside(owners, (first.source, first.boxes), (owner, cells.take(entry // terms)))
    wrong = np.flatnonzero(source.form.holders.term_of(first.source) != first.term) if reducing else ints([])
    if len(wrong):
        copy = first[int(wrong[0])]
        raise PlanError(f"owner {copy.source} is to send term {copy.term} of {copy.box}, but it holds another")


def _inside(owners: Ints, sent: tuple[Ints, Boxes], had: tuple[Ints, Boxes]) -> None:
    """Every box lies in the (disjoint) boxes that its owner has: what it shares with them adds up to itself."""
    mine, theirs = (_with_owner(owners.searchsorted(who), boxes) for who, boxes in (sent, had))
    i, j = join(mine, theirs)
    shared = totals(mine.take(i).overlap(theirs.take(j)).volumes(), i, mine.count)
    bad = np.flatnonzero(shared != mine.volumes())
    if len(bad):
        row = int(bad[0])
        raise PlanError(f"owner {sent[0][row]} is to send {sent[1].box(row)}, which it does not have at that time")


def _with_owner(number: Ints, boxes: Boxes) -> Boxes:
    """Boxes in a space with one more axis, along which owners lie apart."""
    return Boxes(np.column_stack([number, boxes.lo]), np.column_stack([number + 1, boxes.hi]))
