"""Where every cell of a tensor lives. Nothing here knows dtypes, data, processes or files."""

from shardwise.layout.diagnosis import Diagnosis, Overlap
from shardwise.layout.form import Cells, Form, Holders, Piece
from shardwise.layout.grid import Grid
from shardwise.layout.layout import Layout, from_spelling, parse
from shardwise.layout.listing import Listing
from shardwise.layout.mesh import Mesh
from shardwise.layout.placements import (
    Cyclic,
    Experts,
    Fused,
    Heads,
    Partial,
    Placement,
    Replicate,
    Shard,
    StridedShard,
    Zigzag,
)
from shardwise.layout.placing import local_boxes, local_shapes, places_of

__all__ = [
    "Cells",
    "Cyclic",
    "Diagnosis",
    "Experts",
    "Form",
    "Fused",
    "Grid",
    "Heads",
    "Holders",
    "Layout",
    "Listing",
    "Mesh",
    "Overlap",
    "Partial",
    "Piece",
    "Placement",
    "Replicate",
    "Shard",
    "StridedShard",
    "Zigzag",
    "from_spelling",
    "local_boxes",
    "local_shapes",
    "parse",
    "places_of",
]
