"""Time against size as a picture: one line for every way."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import matplotlib

matplotlib.use("Agg")
from matplotlib import pyplot

from benchmarks.table import binary
from shardwise.bench.moves import GROUP, OUT, REDISTRIBUTE, SHARDED_TENSOR, SHARED
from shardwise.bench.table import seconds

if TYPE_CHECKING:
    from matplotlib.axes import Axes

    from benchmarks.sizes import Point

INK, PALE = "#333333", "#dddddd"
LINES = 24  # of labels that fit above each other


class Look(NamedTuple):
    """How a way is drawn. The colours are told apart by everybody (Okabe and Ito's); ours are drawn in full."""

    label: str
    colour: str
    line: str = "-"
    width: float = 2.0


LOOKS = {
    REDISTRIBUTE: Look("torch redistribute", "#D55E00", "--"),
    SHARDED_TENSOR: Look("torch ShardedTensor", "#E69F00", "--"),
    str(GROUP): Look("shardwise, over the group", "#56B4E9"),
    str(OUT): Look("shardwise", "#0072B2", width=3.0),
    str(SHARED): Look("shardwise, source shared", "#009E73"),
    "limit": Look("limit: memory copies", "#777777", ":"),
}


def draw(points: Sequence[Point], path: Path) -> None:
    """Of points of one number of ranks."""
    figure, axes = pyplot.subplots(figsize=(9, 5.4), dpi=144)
    ends = dict[str, tuple[float, float]]()
    for way, look in LOOKS.items():
        line = [(point.bytes, point.seconds[way]) for point in points if way in point.seconds]
        axes.plot(
            *zip(*line, strict=True), look.line, color=look.colour, linewidth=look.width, marker="o", markersize=4
        )
        ends[way] = line[-1]
    _scales(axes, points)
    _labels(axes, ends)
    axes.set_title(
        f"Rows to columns, float32, {points[0].ranks} processes of one machine: time by size",
        loc="left", color=INK, fontsize=11, pad=14,
    )  # fmt: skip
    figure.subplots_adjust(left=0.09, right=0.76, top=0.9, bottom=0.11)
    figure.savefig(path, facecolor="white")
    pyplot.close(figure)


def _scales(axes: Axes, points: Sequence[Point]) -> None:
    axes.set_xscale("log", base=2)
    axes.set_yscale("log")
    axes.set_xticks([point.bytes for point in points], [binary(point.bytes) for point in points])
    axes.yaxis.set_major_formatter(lambda value, _: seconds(value))
    axes.minorticks_off()
    axes.grid(color=PALE, linewidth=0.6)
    axes.set_axisbelow(True)
    axes.tick_params(colors=INK, length=0, labelsize=9)
    axes.set_xlabel("size of the whole tensor", color=INK, fontsize=9.5)
    for side in axes.spines.values():
        side.set_visible(False)


def _labels(axes: Axes, ends: dict[str, tuple[float, float]]) -> None:
    """At the ends of lines, all in one column, moved up where they would meet."""
    right, below = max(size for size, _ in ends.values()), 0.0
    bottom, top = axes.get_ylim()
    apart = (top / bottom) ** (1 / LINES)
    for way, (size, time) in sorted(ends.items(), key=lambda end: end[1][1]):
        height = max(time, below * apart)
        below = height
        axes.annotate(
            LOOKS[way].label,
            (size, time),
            xytext=(right * 1.6, height),
            color=LOOKS[way].colour,
            fontsize=9.5,
            va="center",
            annotation_clip=False,
            arrowprops={"arrowstyle": "-", "color": PALE, "linewidth": 0.8, "shrinkB": 4},
        )
