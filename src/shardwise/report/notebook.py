"""Values at a glance, for notebooks: static HTML without scripts."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from html import escape
from itertools import islice

from shardwise.geometry import Box
from shardwise.layout import Layout
from shardwise.planning import Plan, count, size
from shardwise.quoting import in_line
from shardwise.report.groups import Groups
from shardwise.report.tiles import COLOURS, TileHolders, Tiles, tiles

WIDTH, HEIGHT = 220, 130
MOST_GROUPS, MOST_TILES, MOST_ROWS = 64, 256, 50
STYLE = "font:12px system-ui,sans-serif;display:inline-block;margin:4px 18px 4px 0;vertical-align:top"


def glance(shown: Layout | Plan, words: str = "") -> str:
    """The layout, or both layouts and the totals of a plan; with some words below.

    >>> from shardwise.layout import parse
    >>> glance(parse("8x6/S0@2")).count("<rect")
    2
    """
    layouts = [shown.source, shown.target] if isinstance(shown, Plan) else [shown]
    owners = Groups.of(shown.owners if isinstance(shown, Plan) else shown.form.owners, MOST_GROUPS)
    drawn = "".join(_layout(layout, owners) for layout in layouts)
    caption = words or (_totals(shown) if isinstance(shown, Plan) else count(len(owners.owners), "owner"))
    return f'<div>{drawn}<div style="font:12px system-ui,sans-serif">{escape(caption)}</div></div>'


def listed(words: str, titles: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """A table of the first rows, with some words above and the number of the rest below.

    >>> listed("1 tensor", ["name"], [["w"]]).count("<td")
    1
    """
    rest = iter(rows)
    head, body = _cells("th", titles), "".join(_cells("td", row) for row in islice(rest, MOST_ROWS))
    left = sum(1 for _ in rest)
    more = f"<div>... and {left:,} more</div>" if left else ""
    return (
        f'<div style="font:12px system-ui,sans-serif"><div>{escape(words)}</div><table>{head}{body}</table>{more}</div>'
    )


def _cells(kind: str, row: Sequence[str]) -> str:
    cells = "".join(f'<{kind} style="text-align:left">{escape(in_line(cell))}</{kind}>' for cell in row)
    return f"<tr>{cells}</tr>"


def _totals(plan: Plan) -> str:
    """From the layouts alone where there are many owners: a notebook must not wait for all copies."""
    if len(plan.owners) > 1024:
        return f"{len(plan.owners):,} owners; no owner stages more than {size(plan.most_bytes)}"
    return (
        f"moves {size(plan.bytes_moved)}, {size(plan.bytes_local)} stay; {count(plan.messages, 'message')} in "
        f"{count(plan.rounds, 'round')}; an owner stages at most {size(plan.peak_bytes)}"
    )


def _layout(layout: Layout, owners: Groups) -> str:
    """Its notation, what the picture leaves out in words, and the tiles; of more than two dims those of one slice."""
    drawn, dims = tiles(layout, owners, MOST_TILES), layout.ndim
    marks = "".join(
        _tile(layout, Box(tuple(row[:dims]), tuple(row[dims : 2 * dims])), drawn["sets"][row[-1]])
        for row in drawn["tiles"]
        if not any(row[: max(dims - 2, 0)])
    )
    name, note, high = escape(layout.brief(60)), escape(_note(layout, drawn)), HEIGHT if dims > 1 else HEIGHT // 3
    box = f'width="{WIDTH}" height="{high}" viewBox="0 0 {WIDTH} {high}"'
    svg = f'<svg role="img" aria-label="{name}" {box}>{marks}</svg>' if marks else ""
    return f'<div style="{STYLE}"><div style="margin-bottom:3px"><code>{name}</code>{note}</div>{svg}</div>'


def _note(layout: Layout, drawn: Tiles) -> str:
    replicas = max((holders["replicas"] for holders in drawn["sets"]), default=0)
    words = {
        "no cells": not drawn["tiles"],
        "first slice": layout.ndim > 2 and bool(drawn["tiles"]),
        f"{len(drawn['tiles'])} tiles for {drawn['total']:,}": drawn["total"] > len(drawn["tiles"]),
        f"{layout.op} of {layout.terms} terms": layout.terms > 1,
        f"{replicas} replicas": replicas > 1,
    }
    note = ", ".join(word for word, holds in words.items() if holds)
    return f" ({note})" if note else ""


def _tile(layout: Layout, box: Box, holders: TileHolders) -> str:
    """A rectangle with its holders written into it, where there is room."""
    who, colour = holders["who"], COLOURS[holders["groups"][0] % len(COLOURS)]
    (left, wide), (top, high) = _side(layout, box, -1, WIDTH), _side(layout, box, -2, HEIGHT)
    title = f"<title>{escape(f'{box}: {who}')}</title>"
    rect = (
        f'<rect x="{left:.1f}" y="{top:.1f}" width="{wide:.1f}" height="{high:.1f}" '
        f'fill="{colour}" stroke="#fff" stroke-width="0.7">{title}</rect>'
    )
    if wide < 7 * len(who) + 2 or high < 12:
        return rect
    x, y = left + wide / 2, top + high / 2
    style = 'text-anchor="middle" dominant-baseline="central" font-size="11" fill="#111" pointer-events="none"'
    return f'{rect}<text x="{x:.1f}" y="{y:.1f}" {style}>{escape(who)}</text>'


def _side(layout: Layout, box: Box, dim: int, length: int) -> tuple[float, float]:
    """Where a box begins along a side of the picture, and how long it is."""
    if layout.ndim < -dim:
        return 0, length if dim == -1 else length / 3
    scale = length / layout.shape[dim]
    return box.lo[dim] * scale, (box.hi[dim] - box.lo[dim]) * scale
