"""Layouts and plans as text pictures, for terminals."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from itertools import pairwise, product
from typing import NamedTuple

import numpy as np

from shardwise.geometry import Box, different, ints
from shardwise.layout import Layout
from shardwise.notation import write_ranges
from shardwise.planning import Plan, columns, size

MOST_ROWS, MOST_COLUMNS, MOST_SLICES = 16, 12, 8
MOST_OWNERS = 16


def draw(layout: Layout) -> str:
    """Who holds what: the last two dims as a plane, the others as slices; lines where the holders change.

    >>> print(draw(Layout.boxes((8, 6), [(0, (0, 0), (8, 2)), (1, (0, 2), (4, 6)), (2, (4, 2), (8, 6))])))
          0:2   2:6
        ┌─────┬─────┐
    0:4 │  0  │  1  │
        │     ├─────┤
    4:8 │  0  │  2  │
        └─────┴─────┘
    """
    cuts = [_cuts(layout, axis) for axis in range(layout.ndim)]
    if not all(len(c) > 1 for c in cuts):
        return f"no cells; owners {write_ranges(layout.owners())} hold empty buffers"
    leading = list(product(*(pairwise(c) for c in cuts[:-2])))
    planes = [_plane(layout, at, _shown(cuts[-2:])) for at in leading[:MOST_SLICES]]
    more = len(leading) - MOST_SLICES
    return "\n\n".join(planes + [f"... and {more} more slices"] * (more > 0))


def _cuts(layout: Layout, axis: int) -> list[int]:
    """Where a piece begins or ends along an axis."""
    boxes = layout.form.cells.boxes
    return different(np.concatenate([boxes.lo[:, axis], boxes.hi[:, axis]])).tolist()


def _shown(cuts: Sequence[list[int]]) -> list[list[tuple[int, int] | None]]:
    """The intervals of each axis to draw; None stands for those left out."""
    intervals = list[list[tuple[int, int] | None]]()
    for axis, most in zip(cuts, (MOST_ROWS, MOST_COLUMNS)[-len(cuts) :] if cuts else (), strict=True):
        sides: list[tuple[int, int] | None] = list(pairwise(axis))
        intervals.append(sides if len(sides) <= most else [*sides[: most - 2], None, sides[-1]])
    return intervals


def _plane(layout: Layout, at: tuple[tuple[int, int], ...], sides: list[list[tuple[int, int] | None]]) -> str:
    """One slice as a table of holders."""
    one: list[tuple[int, int] | None] = [(0, 1)]  # stands in for dims that a 1-d or 0-d tensor lacks
    rows, columns = [one, one, *sides][-2:]
    nothing = Label("…", "…")
    labels = [
        [nothing if r is None or c is None else label(layout, _box(layout, at, r, c)) for c in columns] for r in rows
    ]
    heads = ["…" if c is None else f"{c[0]}:{c[1]}" for c in columns] if sides else [""]
    names = ["…" if r is None else f"{r[0]}:{r[1]}" for r in rows] if len(sides) > 1 else [""]
    title = [f"[{', '.join(f'{a}:{b}' for a, b in at)}, :, :]"] if at else []
    return "\n".join(title + _table(labels, names, heads))


def _box(layout: Layout, at: Sequence[tuple[int, int]], row: tuple[int, int], column: tuple[int, int]) -> Box:
    sides = [*at, row, column][-layout.ndim :] if layout.ndim else []
    return Box(tuple(a for a, _ in sides), tuple(b for _, b in sides))


class Label(NamedTuple):
    """What is written into a cell, and all holders, which tell cells apart."""

    text: str
    holders: str


BLANK = Label("", "")


def label(layout: Layout, box: Box) -> Label:
    """The holders of a box that no piece ends inside: replicas with commas, the terms of a partial with plus signs."""
    cells, block = layout.form.cells
    inside = np.flatnonzero(((cells.lo <= ints(box.lo)) & (ints(box.hi) <= cells.hi)).all(axis=1))
    if not len(inside):
        return Label("-", "-")
    holders, terms = layout.form.holders, layout.terms
    first = int(block[inside[0]]) * terms
    words = [write_ranges(holders.expand(ints([first + t]))[1].tolist()) for t in range(terms)]
    text = "+".join(words)
    count = len(holders.expand(first + np.arange(terms))[1])
    return Label(text if len(text) <= 14 else f"{count} owners", text)


def _table(labels: list[list[Label]], names: list[str], heads: list[str]) -> list[str]:
    """A table with lines only between cells that differ."""
    widths = [max(len(heads[c]), *(len(row[c].text) for row in labels)) for c in range(len(heads))]
    margin = max(map(len, names))
    title = " ".join(f" {h:^{w}} " for h, w in zip(heads, widths, strict=True)).rstrip()
    lines = [" " * (margin + 2) + title] * any(heads)
    blank = [BLANK] * len(heads)
    for above, below, name in zip([blank, *labels], [*labels, blank], [*names, ""], strict=True):
        lines.append(" " * (margin + 1) + _rule(above, below, widths))
        if below is not blank:
            lines.append(f"{name:>{margin}} " + _row(below, widths))
    return lines


def _row(labels: list[Label], widths: list[int]) -> str:
    edges = ["│", *("│" if a != b else " " for a, b in pairwise(labels)), "│"]
    cells = [f" {label.text:^{width}} " for label, width in zip(labels, widths, strict=True)]
    return edges[0] + "".join(cell + edge for cell, edge in zip(cells, edges[1:], strict=True))


_JOINTS = dict(zip(product((0, 1), repeat=4), " ╴╷┐╵┘│┤╶─┌┬└┴├┼", strict=True))  # right, up, down, left


def _rule(above: list[Label], below: list[Label], widths: list[int]) -> str:
    """The line between two rows: drawn where they differ, with the joints that its neighbours ask for."""
    flat = [a != b for a, b in zip(above, below, strict=True)]
    line = ""
    for place in range(len(widths) + 1):
        left, right = place > 0 and flat[place - 1], place < len(widths) and flat[place]
        up, down = (_edge(row, place) for row in (above, below))
        line += _JOINTS[int(right), int(up), int(down), int(left)]
        line += ("─" if right else " ") * (widths[place] + 2) if place < len(widths) else ""
    return line.rstrip()


def _edge(row: list[Label], place: int) -> bool:
    """True where a row has a line at this place."""
    if row[0] == BLANK:
        return False
    return place in (0, len(row)) or row[place - 1] != row[place]


def matrix(*plans: Plan) -> str:
    """Bytes from each sender (row) to each receiver (column), of all plans; the largest flows where owners are many."""
    flows = Counter[tuple[int, int]]()
    for plan in plans:
        source, target, total = plan.traffic.flows()
        for at, to, count in zip(source.tolist(), target.tolist(), total.tolist(), strict=True):
            flows[plan.owners[at], plan.owners[to]] += count
    everybody = sorted({owner for plan in plans for owner in plan.owners})
    if len(everybody) > MOST_OWNERS:
        return _largest(flows)
    rows = [["from \\ to", *map(str, everybody)]]
    rows += [
        [str(owner), *(size(flows[owner, to]) if flows[owner, to] else "." for to in everybody)] for owner in everybody
    ]
    return "\n".join(columns(rows))


def _largest(flows: Mapping[tuple[int, int], int], most: int = 10) -> str:
    order = sorted(flows, key=lambda flow: (-flows[flow], flow))[:most]
    lines = [f"{source} -> {target}: {size(flows[source, target])}" for source, target in order]
    return "\n".join([f"the {len(lines)} largest of {len(flows):,} flows:", *lines])
