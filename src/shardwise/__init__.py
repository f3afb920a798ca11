"""Any sharding of a tensor to any other: where every cell lives (`Layout`), and how to move it (`Plan`)."""

from shardwise.errors import LayoutError, NotationError, PlanError, ShardwiseError
from shardwise.geometry import Box
from shardwise.layout import Layout, Mesh, Partial, Piece, Replicate, Shard, StridedShard, parse
from shardwise.planning import Copies, Copy, Part, Plan, plan

__version__ = "0.1.0"

__all__ = [
    "Box",
    "Copies",
    "Copy",
    "Layout",
    "LayoutError",
    "Mesh",
    "NotationError",
    "Part",
    "Partial",
    "Piece",
    "Plan",
    "PlanError",
    "Replicate",
    "Shard",
    "ShardwiseError",
    "StridedShard",
    "parse",
    "plan",
]
