"""Rounds under a byte limit: a rule that every owner can apply to its own copies alone.

Let no owner stage more than L cells in a step. Every message is cut into N = ceil(L / (B - D)) equal slices, slice n in
round n, where B is the limit in cells and D twice the number of peers. A slice is at most its message / N plus one
cell, so an owner stages at most L / N + D <= B in any round. L is a bound from the two layouts, not a sum over copies.

What this leaves of the limit is spent on larger grains than cells: cuts then fall between rows of boxes, and a slice is
one box and not several.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from shardwise.errors import PlanError
from shardwise.geometry import Boxes, Ints, cut, ints, numbered, running, spread, totals
from shardwise.planning.copies import Copies

MOST_ROUNDS = 1_000_000


def rounds_of_steps(max_bytes: int, itemsize: int, loads: tuple[int, ...], owners: int) -> tuple[int, ...]:
    """How many rounds each step takes, when an owner stages at most `loads[s]` cells in step s."""
    cells, slack = max_bytes // itemsize, 2 * (owners - 1)
    if cells <= slack:
        raise PlanError(
            f"max_bytes={max_bytes} is too little for {owners} owners and {itemsize} bytes per element: an owner may "
            f"have to stage an element for and from each of its peers, and one more; give at least "
            f"{(slack + 1) * itemsize}"
        )
    rounds = tuple(1 if load <= cells else -(-load // (cells - slack)) for load in loads)
    if max(rounds) > MOST_ROUNDS:
        raise PlanError(f"max_bytes={max_bytes} would take {max(rounds):,} rounds: give more")
    return rounds


def grains_of_steps(
    max_bytes: int, itemsize: int, loads: tuple[int, ...], rounds: tuple[int, ...], owners: int
) -> tuple[int, ...]:
    """By how many cells a slice of each step may be larger than its share of the message, so that the limit holds.

    >>> grains_of_steps(1000, 1, (1500, 4000), rounds_of_steps(1000, 1, (1500, 4000), 3), 3)
    (62, 50)
    """
    slack = max(1, 2 * (owners - 1))
    shares = (-(-load // count) for load, count in zip(loads, rounds, strict=True))
    return tuple(max(1, (max_bytes // itemsize - share) // slack) for share in shares)


def in_rounds(copies: Copies, rounds: tuple[int, ...], grains: tuple[int, ...], *, reducing: bool) -> Copies:
    """The copies cut into slices. Local copies stage nothing and stay whole, unless they are terms of a reduction."""
    count = np.array(rounds)[copies.step]
    whole = (count == 1) | ~(copies.remote | (reducing & (copies.step == 0)))
    if whole.all():
        return copies
    most = np.array(grains)[copies.step]
    return Copies.concat([copies.take(whole), _sliced(copies.take(~whole), count[~whole], most[~whole])])


def _sliced(copies: Copies, count: Ints, most: Ints) -> Copies:
    order = np.lexsort((copies.term, copies.target, copies.source, copies.step))
    copies, count, volume = copies.take(order), count[order], copies.volumes[order]
    grain = _grains(copies.boxes, most[order])
    message = numbered(copies.step, copies.source, copies.target, copies.term)
    before = running(volume, message)
    size = -(-totals(volume, message, len(volume))[message] // count)
    row, nth = spread((before + volume - 1) // size - before // size + 1)
    nth += (before // size)[row]
    start = np.maximum(nth * size[row] - before[row], 0)
    stop = np.minimum((nth + 1) * size[row] - before[row], volume[row])
    start = start // grain[row] * grain[row]
    stop = np.where(stop == volume[row], stop, stop // grain[row] * grain[row])
    part, boxes = cut(copies.boxes.take(row), start, stop)
    return replace(copies.take(row[part]), boxes=boxes, round=nth[part])


def _grains(boxes: Boxes, most: Ints) -> Ints:
    """The cells of the last axes of each box: of as many as do not exceed the most."""
    cells = np.cumprod((boxes.hi - boxes.lo)[:, ::-1], axis=1)
    return ints(np.where(cells <= most[:, None], cells, 1).max(axis=1, initial=1))
