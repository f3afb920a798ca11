"""One owner's part of a plan between two grids with replicas, where hosts do not matter: counted, not listed.

Who serves an owner depends on what others ask before it. How much that is follows from how many cells blocks share
along each axis (`Overlaps`), how often a block is asked for, and what those who ask hold already. So an owner looks at
its own regions, at the holders and takers of these, and at nothing else; the result is what `deliver` makes of a list
of everybody's needs.
"""

from __future__ import annotations

import numpy as np

from shardwise.geometry import Ints, different, running, starts, totals
from shardwise.planning.choose import Asked, Need, serve
from shardwise.planning.copies import Copies
from shardwise.planning.counts import Counts


def received_of_replicas(counts: Counts) -> list[Copies]:
    """What an owner keeps and receives."""
    if counts.taken < 0:
        return []
    boxes, row, term = counts.wanted()
    held = row == counts.held
    kept, boxes, row = counts.kept(boxes.take(held)), boxes.take(~held), row[~held]
    if not len(row):
        return [kept]
    need, asked = Need(np.arange(len(row)), np.full(len(row), counts.owner)), _asked(counts, boxes.volumes(), row, term)
    return [kept, serve(boxes, need, row, counts.holders, asked)]


def _asked(counts: Counts, volume: Ints, row: Ints, term: int) -> Asked:
    """What takers ask of rows, in the order of their numbers."""
    holders, takers, terms, owner = counts.holders, counts.takers, counts.holders.terms, counts.owner
    rows = different(row)
    earlier = np.diff(starts((takers.owners < owner).astype(np.int64))[takers.edges])
    total, before = counts.overlaps.weighed(rows // terms, [takers.counts[term::terms], earlier[term::terms]])
    entry, holder = holders.expand(rows)  # who asks for nothing of what it holds
    took = takers.row_of(holder)
    some = np.flatnonzero((took >= 0) & (took % terms == term))
    entry, holder = entry[some], holder[some]
    cells = counts.cells(rows[entry], took[some])
    total = total - totals(cells, entry, len(rows))
    before = before - totals(cells * (holder < owner), entry, len(rows))
    at = rows.searchsorted(row)
    return Asked(before[at] + running(volume, row), total[at], counts.overlaps.most(row // terms))


def sent_by_replica(counts: Counts) -> list[Copies]:
    """What an owner sends of its own block."""
    if counts.held < 0:
        return []
    boxes, _, need = counts.offered()
    first, last = counts.holders.edges[counts.held : counts.held + 2]
    return [counts.given(boxes, need, counts.holders.owners[first:last])] if len(need.region) else []
