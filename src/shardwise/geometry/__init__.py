"""Boxes of cells. All index arithmetic of the library lives here; nothing here knows that owners exist."""

from shardwise.geometry.axis import Axis, Spans, axes_of, block_numbers, block_shape, boxes_of_block, cross_grids, outer
from shardwise.geometry.boxes import Box, Boxes, cut, distinct, merge, positions, row_major, tiles, uncancelled
from shardwise.geometry.join import gaps, join
from shardwise.geometry.places import Places, Strides, Window
from shardwise.geometry.ragged import (
    Bools,
    Ints,
    different,
    exact_sum,
    heads,
    ints,
    numbered,
    run_of,
    running,
    spread,
    starts,
    totals,
)
from shardwise.geometry.shared import boxes_of_blocks, fold, overlap
from shardwise.geometry.strided import Step, StridedBox, StridedPair, strided_boxes

__all__ = [
    "Axis",
    "Bools",
    "Box",
    "Boxes",
    "Ints",
    "Places",
    "Spans",
    "Step",
    "StridedBox",
    "StridedPair",
    "Strides",
    "Window",
    "axes_of",
    "block_numbers",
    "block_shape",
    "boxes_of_block",
    "boxes_of_blocks",
    "cross_grids",
    "cut",
    "different",
    "distinct",
    "exact_sum",
    "fold",
    "gaps",
    "heads",
    "ints",
    "join",
    "merge",
    "numbered",
    "outer",
    "overlap",
    "positions",
    "row_major",
    "run_of",
    "running",
    "spread",
    "starts",
    "strided_boxes",
    "tiles",
    "totals",
    "uncancelled",
]
