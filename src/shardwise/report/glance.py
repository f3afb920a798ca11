"""A layout or a plan at a glance, for notebooks: static HTML without scripts."""

from __future__ import annotations

from html import escape
from math import prod

from shardwise.geometry import Box
from shardwise.layout import Layout
from shardwise.planning import Plan, count, size
from shardwise.report.groups import Groups
from shardwise.report.tiles import tiles

WIDTH, HEIGHT = 220, 130
MOST_TILES = 256
HUES = ("#9dbcf0", "#f6bd8c", "#7fc3a4", "#ecacd8", "#ece08f", "#b9a5ea", "#8fdcec", "#e59a94")
STYLE = "font:12px system-ui,sans-serif;display:inline-block;margin:4px 18px 4px 0;vertical-align:top"


def glance(shown: Layout | Plan, words: str = "") -> str:
    """The layout, or both layouts and the totals of a plan; with some words below.

    >>> from shardwise.layout import parse
    >>> glance(parse("8x6/S0@2")).count("<rect")
    2
    """
    layouts = [shown.source, shown.target] if isinstance(shown, Plan) else [shown]
    owners = Groups.of(shown.owners if isinstance(shown, Plan) else shown.form.owners, 2**31)
    drawn = "".join(_layout(layout, owners) for layout in layouts)
    said = words or (_totals(shown) if isinstance(shown, Plan) else count(len(owners.owners), "owner"))
    return f'<div>{drawn}<div style="font:12px system-ui,sans-serif">{escape(said)}</div></div>'


def _totals(plan: Plan) -> str:
    """From the layouts alone where there are many owners: a notebook is not to wait for all copies."""
    if len(plan.owners) > 1024:
        return f"{len(plan.owners):,} owners; no owner stages more than {size(plan.most_bytes)}"
    return (
        f"moves {size(plan.bytes_moved)}, {size(plan.bytes_local)} stay; {count(plan.messages, 'message')} in "
        f"{count(plan.rounds, 'round')}; an owner stages at most {size(plan.peak_bytes)}"
    )


def _layout(layout: Layout, owners: Groups) -> str:
    found = tiles(layout, owners, MOST_TILES)
    dims = layout.ndim
    flat = [
        (Box(tuple(row[:dims]), tuple(row[dims : 2 * dims])), found["sets"][row[2 * dims]])
        for row in found["tiles"]
        if not any(row[: max(dims - 2, 0)])  # of more than two dims the first slice
    ]
    marks = "".join(_tile(layout, box, who["who"], who["groups"][0]) for box, who in flat)
    notes = [
        *["first slice"] * (dims > 2 and prod(layout.shape) > 0),
        *[f"{found['total']:,} tiles, put together" if found["merged"] else "not all tiles"]
        * (found["total"] > len(found["tiles"])),
        *[f"{layout.op} of {layout.terms} terms"] * (layout.terms > 1),
        *["no cells"] * (not found["tiles"]),
    ]
    note = f" ({', '.join(notes)})" if notes else ""
    head = f'<div style="margin-bottom:3px"><code>{escape(layout.brief(60))}</code>{escape(note)}</div>'
    return (
        f'<div style="{STYLE}">{head}<svg role="img" aria-label="{escape(layout.brief(60))}" '
        f'width="{WIDTH}" height="{HEIGHT}" viewBox="0 0 {WIDTH} {HEIGHT}">{marks}</svg></div>'
    )


def _tile(layout: Layout, box: Box, who: str, number: int) -> str:
    """A rectangle with its holders written into it, where there is room."""
    (left, wide), (top, high) = _side(layout, box, -1, WIDTH), _side(layout, box, -2, HEIGHT)
    title = f"<title>{escape(f'{box}: {who}')}</title>"
    rect = (
        f'<rect x="{left:.1f}" y="{top:.1f}" width="{wide:.1f}" height="{high:.1f}" '
        f'fill="{HUES[number % len(HUES)]}" stroke="#fff">{title}</rect>'
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
