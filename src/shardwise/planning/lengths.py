"""A line of cells cut into lengths that differ by at most one cell: where they begin, and which one a cell lies in."""

from __future__ import annotations

import numpy as np

from shardwise.geometry import Ints, spread


def begin(number: Ints, each: Ints, extra: Ints) -> Ints:
    """Where a length begins, when the first `extra` of them are one longer than `each`."""
    return number * each + np.minimum(number, extra)


def length_at(position: Ints, each: Ints, extra: Ints) -> Ints:
    """The length that a position lies in."""
    longer = extra * (each + 1)
    return np.where(position < longer, position // (each + 1), extra + (position - longer) // np.maximum(each, 1))


def split(before: Ints, start: Ints, stop: Ints, lengths: tuple[Ints, Ints]) -> tuple[Ints, Ints, Ints, Ints]:
    """Cells `start:stop` of things that lie on such a line, the first cell of each at `before`, cut where lengths end.

    Returns for every part the row of its thing, the number of its length, and its cells.
    """
    each, extra = lengths
    first, last = (length_at(before + at, each, extra) for at in (start, stop - 1))
    row, nth = spread(last - first + 1)
    number, each, extra = first[row] + nth, each[row], extra[row]
    low = np.maximum(begin(number, each, extra) - before[row], start[row])
    return row, number, low, np.minimum(begin(number + 1, each, extra) - before[row], stop[row])
