"""Plans looked at from outside: copies as plain rows, and what they carry, cell by cell."""

from collections import defaultdict

import numpy as np


def rows(copies):
    """The copies as plain values, in their order."""
    return [(c.source, c.target, c.box.lo, c.box.hi, c.term, c.step, c.round) for c in copies]


def carried(copies, shape, chosen):
    """How often each cell is carried by the copies for which `chosen(copy)` holds."""
    count = np.zeros(shape, dtype=np.int64)
    for copy in copies:
        if chosen(copy):
            count[(*copy.box.slices, ...)] += 1
    return count


def staged(plan):
    """Bytes that every owner sends and receives in each round of each step, added up from its own part."""
    found = defaultdict(int)
    for owner in plan.owners:
        part = plan.for_owner(owner)
        for copy in [*part.sends, *part.receives]:
            found[owner, copy.step, copy.round] += copy.box.volume * plan.itemsize
    return found
