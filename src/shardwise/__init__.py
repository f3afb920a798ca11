"""Any sharding of a tensor to any other."""

from shardwise.errors import LayoutError, NotationError, PlanError, ShardwiseError
from shardwise.geometry import Box
from shardwise.layout import Layout, Mesh, Partial, Piece, Replicate, Shard, StridedShard, parse
from shardwise.plan import Copies, Copy, Part, Plan, plan
