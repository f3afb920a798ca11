"""What a layout gives one rank: boxes, the shapes of tensors, and whether tensors are those."""

from __future__ import annotations

from functools import lru_cache
from typing import Any

import torch

from shardwise.errors import LayoutError
from shardwise.geometry import Box
from shardwise.layout import Layout


def local_boxes(layout: Layout, owner: int) -> list[Box]:
    """The cells of an owner, none for who is no owner."""
    return [piece.box for piece in layout.pieces(owner)] if owner in layout else []


@lru_cache(maxsize=4096)
def local_shapes(layout: Layout, owner: int) -> tuple[tuple[int, ...], ...]:
    """The shapes of an owner's tensors, none for who is no owner. Kept by value: they are asked for at every call."""
    return tuple(layout.local_shapes(owner)) if owner in layout else ()


def check_shards(shards: tuple[Any, ...], layout: Layout, me: int) -> None:
    """Refuse shards that are not what the layout gives this rank."""
    expected = local_shapes(layout, me)
    strange = [shard for shard in shards if not isinstance(shard, torch.Tensor)]
    if strange:
        raise LayoutError(f"a shard must be a tensor, not {strange[0]!r}")
    found = tuple(tuple(shard.shape) for shard in shards)
    if found != expected:
        raise LayoutError(
            f"{layout!r} gives rank {me} tensors of shapes {list(expected)}, but it brought {list(found)}"
        )
    if len(shards) > 1 and len({(shard.dtype, shard.device) for shard in shards}) > 1:
        kinds = sorted({f"{shard.dtype} on {shard.device}" for shard in shards})
        raise LayoutError(f"the shards of a rank must have one dtype and device, not {', '.join(kinds)}")
