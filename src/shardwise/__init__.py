"""Reshard any PyTorch tensor, model or checkpoint from any layout to any other: `Layout`, `Plan`, `reshard`."""

from __future__ import annotations

import typing as _typing

from shardwise.errors import (
    CheckpointError,
    EngineError,
    ExchangeError,
    LayoutError,
    NotationError,
    PlanError,
    ShardwiseError,
    UnsupportedError,
)
from shardwise.geometry import Box
from shardwise.layout import (
    Cyclic,
    Experts,
    Fused,
    Heads,
    Layout,
    Mesh,
    Partial,
    Piece,
    Replicate,
    Shard,
    StridedShard,
    Zigzag,
    parse,
)
from shardwise.planning import Copies, Copy, Network, Part, Plan, plan

if _typing.TYPE_CHECKING:
    from shardwise import activation as activation
    from shardwise import checkpoint as checkpoint
    from shardwise import engines as engines
    from shardwise import publishing as publishing
    from shardwise import quantized as quantized
    from shardwise import report as report
    from shardwise import sharded_tensor as sharded_tensor
    from shardwise import state as state
    from shardwise import testing as testing
    from shardwise.activation import input_reshard, input_reshard_handle
    from shardwise.checkpoint import Receipt, receipt
    from shardwise.publishing import Publisher, Subscriber, publish, subscribe
    from shardwise.quantized import Quantized
    from shardwise.state import (
        Concat,
        Interleaved,
        ModelPlan,
        Padded,
        Resharder,
        Rotary,
        RunHandle,
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
    "Cyclic",
    "EngineError",
    "ExchangeError",
    "Experts",
    "Fused",
    "Handle",
    "Heads",
    "Interleaved",
    "Layout",
    "LayoutError",
    "Mesh",
    "ModelPlan",
    "Network",
    "NotationError",
    "Padded",
    "Part",
    "Partial",
    "Piece",
    "Plan",
    "PlanError",
    "Publisher",
    "Quantized",
    "Receipt",
    "Replicate",
    "Resharder",
    "Rotary",
    "RunHandle",
    "Shard",
    "ShardedTensor",
    "ShardwiseError",
    "Stack",
    "StridedShard",
    "Subscriber",
    "Transposed",
    "UnsupportedError",
    "Zigzag",
    "empty",
    "fingerprint",
    "flatten_sharded_tensors",
    "input_reshard",
    "input_reshard_handle",
    "layout_of",
    "parse",
    "plan",
    "publish",
    "receipt",
    "release_staging",
    "reshard",
    "reshard_state_dict",
    "share_",
    "subscribe",
]

_WITH_TORCH = {  # where the names that need torch are
    **dict.fromkeys(("input_reshard", "input_reshard_handle"), "activation"),
    **dict.fromkeys(("Receipt", "receipt"), "checkpoint"),
    **dict.fromkeys(("Concat", "Interleaved", "Padded", "Rotary", "Stack", "Transposed"), "state"),
    **dict.fromkeys(("ModelPlan", "Resharder", "RunHandle"), "state"),
    **dict.fromkeys(("empty", "flatten_sharded_tensors", "reshard_state_dict", "share_"), "state"),
    **dict.fromkeys(("Publisher", "Subscriber", "publish", "subscribe"), "publishing"),
    **dict.fromkeys(("Quantized",), "quantized"),
    **dict.fromkeys(("Handle", "ShardedTensor", "fingerprint", "layout_of", "release_staging", "reshard"), "tensor"),
}
_MODULES = (
    "activation",
    "checkpoint",
    "engines",
    "publishing",
    "quantized",
    "report",
    "sharded_tensor",
    "state",
    "testing",
)

if not _typing.TYPE_CHECKING:  # type checkers see the imports above, and nothing else

    def __getattr__(name: str) -> object:
        """Import a name that needs torch, which takes seconds, or a module when it is first used."""
        from importlib import import_module

        if name in _WITH_TORCH:
            return getattr(import_module(f"shardwise.{_WITH_TORCH[name]}"), name)
        if name in _MODULES:
            return import_module(f"shardwise.{name}")
        raise AttributeError(f"module 'shardwise' has no attribute {name!r}")


def __dir__() -> list[str]:
    """The public names and modules, and what every module has."""
    return sorted({*__all__, *_MODULES, *(name for name in globals() if name.startswith("__"))})
