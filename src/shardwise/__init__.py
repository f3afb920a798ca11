"""Any sharding of a tensor to any other: where every cell lives (`Layout`), how to move it (`Plan`), and `reshard`."""

import importlib
import typing

from shardwise.errors import (
    CheckpointError,
    ExchangeError,
    LayoutError,
    NotationError,
    PlanError,
    ShardwiseError,
    UnsupportedError,
)
from shardwise.geometry import Box
from shardwise.layout import Layout, Mesh, Partial, Piece, Replicate, Shard, StridedShard, parse
from shardwise.planning import Copies, Copy, Part, Plan, plan

if typing.TYPE_CHECKING:
    from shardwise.activation import input_reshard, input_reshard_handle
    from shardwise.state import (
        Concat,
        ModelPlan,
        Resharder,
        Stack,
        Transposed,
        empty,
        flatten_sharded_tensors,
        reshard_state_dict,
        share_,
    )
    from shardwise.tensor import Handle, ShardedTensor, fingerprint, layout_of, release_staging, reshard

__version__ = "0.1.0"

__all__ = [
    "Box",
    "CheckpointError",
    "Concat",
    "Copies",
    "Copy",
    "ExchangeError",
    "Handle",
    "Layout",
    "LayoutError",
    "Mesh",
    "ModelPlan",
    "NotationError",
    "Part",
    "Partial",
    "Piece",
    "Plan",
    "PlanError",
    "Replicate",
    "Resharder",
    "Shard",
    "ShardedTensor",
    "ShardwiseError",
    "Stack",
    "StridedShard",
    "Transposed",
    "UnsupportedError",
    "empty",
    "fingerprint",
    "flatten_sharded_tensors",
    "input_reshard",
    "input_reshard_handle",
    "layout_of",
    "parse",
    "plan",
    "release_staging",
    "reshard",
    "reshard_state_dict",
    "share_",
]

_WITH_TORCH = {  # where the names that need torch are
    **dict.fromkeys(("input_reshard", "input_reshard_handle"), "activation"),
    **dict.fromkeys(("Concat", "ModelPlan", "Resharder", "Stack", "Transposed"), "state"),
    **dict.fromkeys(("empty", "flatten_sharded_tensors", "reshard_state_dict", "share_"), "state"),
    **dict.fromkeys(("Handle", "ShardedTensor", "fingerprint", "layout_of", "release_staging", "reshard"), "tensor"),
}
_MODULES = ("activation", "checkpoint", "sharded_tensor", "state", "testing")


def __getattr__(name: str) -> typing.Any:
    """What is imported only when it is used: the names that need torch, which takes seconds, and some modules."""
    if name in _WITH_TORCH:
        return getattr(importlib.import_module(f"shardwise.{_WITH_TORCH[name]}"), name)
    if name in _MODULES:
        return importlib.import_module(f"shardwise.{name}")
    raise AttributeError(f"module 'shardwise' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *_WITH_TORCH})
