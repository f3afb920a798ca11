"""One dimension cut into parts that share cells: replicas of some parts, or of some cells of a part."""

from __future__ import annotations

from collections.abc import Sequence
from math import prod
from typing import NamedTuple

import numpy as np

from shardwise.geometry.axis import Spans
from shardwise.geometry.boxes import Boxes
from shardwise.geometry.ragged import Ints, different, heads, running, spread, starts


class Folded(NamedTuple):
    """Equal parts as one: the spans of the different parts. Row p of `copies` names the parts that are now part p."""

    spans: Spans
    copies: Ints


def overlap(spans: Spans, size: int) -> bool:
    """True where parts that cover a dimension share cells."""
    return int((spans.stop - spans.start).sum()) > size


def merge_spans(spans: Spans) -> Spans:
    """Part after part, neighbouring intervals of a part as one.

    >>> m = merge_spans(Spans(np.array([0, 0, 2]), np.array([2, 3, 3]), np.array([0, 1, 0])))
    >>> m.start.tolist(), m.stop.tolist(), m.part.tolist()
    ([0, 0], [3, 3], [0, 1])
    """
    order = np.lexsort((spans.start, spans.part))
    start, stop, part = (column[order][(spans.stop > spans.start)[order]] for column in spans)
    first = heads(part)
    first[1:] |= start[1:] != stop[:-1]
    return Spans(start[first], stop[np.roll(first, -1)], part[first])


def refine_spans(spans: Spans) -> Spans:
    """The same, cut where any part begins or ends: intervals of different parts are then equal or disjoint.

    >>> refine_spans(Spans(np.array([0, 2]), np.array([4, 6]), np.array([0, 1]))).start.tolist()
    [0, 2, 2, 4]
    """
    start, stop, part = merge_spans(spans)
    cuts = different(np.concatenate([start, stop]))
    low, high = cuts.searchsorted(start), cuts.searchsorted(stop)
    row, nth = spread(high - low)
    return Spans(cuts[low[row] + nth], cuts[low[row] + nth + 1], part[row])


def fold(spans: Spans, parts: int) -> Folded | None:
    """Equal parts as one, where parts are equal or disjoint and all have as many copies; otherwise None.

    >>> fold(Spans(np.array([0, 0, 4, 4]), np.array([4, 4, 8, 8]), np.arange(4)), 4).copies.tolist()
    [[0, 1], [2, 3]]
    """
    start, stop, part = refine_spans(spans)
    intervals = different(start)
    number, least = intervals.searchsorted(start), np.full(len(intervals), parts)
    np.minimum.at(least, number, part)  # the first part with each interval
    first = heads(part)
    present, like = part[first], least[number[first]]  # parts with cells, and the first part that each must equal
    original = like[np.cumsum(first) - 1]
    count, copies = np.bincount(part, minlength=parts), np.bincount(like, minlength=parts)[different(like)]
    if (least[number] != original).any() or (count[present] != count[like]).any():
        return None  # some cells of a part are shared, others are not
    if (copies != copies[0]).any():
        return None
    table = present[np.lexsort((present, like))].reshape(-1, copies[0])
    kept = np.flatnonzero(part == original)
    kept = kept[np.argsort(start[kept], kind="stable")]
    return Folded(Spans(start[kept], stop[kept], different(like).searchsorted(part[kept])), table)


def boxes_of_blocks(spans: Sequence[Spans], parts: Sequence[Ints]) -> tuple[Ints, Boxes, Ints]:
    """The boxes of many blocks, row-major: the block of each, the box, and its first cell in the block's buffer.

    `parts` names the part of every block on each axis.
    """
    rows = [refine_spans(one) for one in spans]
    edges = [
        starts(np.bincount(one.part, minlength=int(mine.max()) + 1)) for one, mine in zip(rows, parts, strict=True)
    ]
    counts = [np.diff(edge)[mine] for edge, mine in zip(edges, parts, strict=True)]
    block, nth = spread(prod(counts[1:], start=counts[0]))
    lo, hi, corner = (np.empty((len(block), len(spans)), dtype=np.int64) for _ in range(3))
    for axis in reversed(range(len(spans))):
        start, stop, part = rows[axis]
        nth, mine = np.divmod(nth, counts[axis][block])
        at = edges[axis][parts[axis][block]] + mine
        lo[:, axis], hi[:, axis], corner[:, axis] = start[at], stop[at], running(stop - start, part)[at]
    return block, Boxes(lo, hi), corner
