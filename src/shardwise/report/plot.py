"""A plan as a figure for papers: both layouts, and who sends to whom. Needs matplotlib, the extra `plot`."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from shardwise.planning import Plan, size
from shardwise.report.groups import Groups
from shardwise.report.tiles import COLOURS, Tiles, tiles

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

MOST_GROUPS, MOST_TILES = 64, 1024


def figure(plan: Plan) -> Figure:
    """A matplotlib figure: source, target, and the bytes from each sender to each receiver.

    Of tensors with more than two dims the first slice of the others is drawn. Save it with `savefig("plan.pdf")`.
    """
    try:
        from matplotlib.figure import Figure
    except ImportError:
        raise ImportError("a figure needs matplotlib: pip install 'shardwise[plot]'") from None
    groups = Groups.of(plan.owners, MOST_GROUPS)
    drawn = Figure(figsize=(10, 3.4), layout="constrained")
    source, target, flows = drawn.subplots(1, 3)
    for axes, name, layout in ((source, "source", plan.source), (target, "target", plan.target)):
        _draw_tiles(axes, tiles(layout, groups, MOST_TILES))
        axes.set_title(f"{name} {layout.brief(40)}", fontsize=9)
    _draw_flows(flows, plan, groups)
    return drawn


def _draw_tiles(axes: Axes, layout: Tiles) -> None:
    """Rectangles by holder, as a picture of the last two dims."""
    from matplotlib.patches import Rectangle

    dims, shape = len(layout["shape"]), [1, 1, *layout["shape"]][-2:]
    for row in layout["tiles"]:
        lo, hi, who = [0, 0, *row[:dims]], [1, 1, *row[dims : 2 * dims]], layout["sets"][row[2 * dims]]
        if any(row[: max(dims - 2, 0)]):
            continue
        hatch = "..." if layout["terms"] > 1 else "///" if who["replicas"] > 1 else None
        wide, high = hi[-1] - lo[-1], hi[-2] - lo[-2]
        colour = COLOURS[who["groups"][0] % len(COLOURS)]
        axes.add_patch(Rectangle((lo[-1], lo[-2]), wide, high, facecolor=colour, edgecolor="white", hatch=hatch))
        if wide / shape[1] > 0.018 * len(who["who"]) and high / shape[0] > 0.05:
            axes.text(lo[-1] + wide / 2, lo[-2] + high / 2, who["who"], ha="center", va="center", fontsize=8)
    axes.set_xlim(0, max(shape[1], 1))
    axes.set_ylim(max(shape[0], 1), 0)
    axes.tick_params(labelsize=7)


def _draw_flows(axes: Axes, plan: Plan, groups: Groups) -> None:
    """Bytes from row to column."""
    heat = np.zeros((groups.count, groups.count))
    source, target, amount = plan.traffic.flows()
    np.add.at(heat, (source // groups.length, target // groups.length), amount)
    axes.imshow(heat, cmap="Blues", aspect="auto")
    axes.set_title(f"{size(plan.bytes_moved)} move, {size(plan.bytes_local)} stay", fontsize=9)
    axes.set_xlabel("to", fontsize=8)
    axes.set_ylabel("from", fontsize=8)
    every = range(0, groups.count, max(1, -(-groups.count // 12)))
    labels = groups.labels()
    axes.set_xticks(list(every), [labels[at] for at in every], fontsize=7, rotation=0 if groups.single else 90)
    axes.set_yticks(list(every), [labels[at] for at in every], fontsize=7)
