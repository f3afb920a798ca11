"""torch's own planner and validation, with their objects made from plain corners: the only file here with torch."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch.distributed._shard.metadata import ShardMetadata
from torch.distributed._shard.sharding_spec._internals import validate_non_overlapping_shards_metadata
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, TensorProperties, TensorStorageMetadata
from torch.distributed.checkpoint.planner import ReadItem
from torch.distributed.checkpoint.planner_helpers import create_read_items_for_chunk_list

from benchmarks.tilings import Corners


class Load(NamedTuple):
    """A saved tensor, and the chunks of it that are wanted."""

    saved: TensorStorageMetadata
    wanted: list[ChunkStorageMetadata]


def load(shape: Sequence[int], saved: Corners, wanted: Corners) -> Load:
    """The objects that torch's planner takes."""
    return Load(TensorStorageMetadata(TensorProperties(), torch.Size(shape), _chunks(saved)), _chunks(wanted))


def _chunks(corners: Corners) -> list[ChunkStorageMetadata]:
    return [
        ChunkStorageMetadata(torch.Size(lo), torch.Size([b - a for a, b in zip(lo, hi, strict=True)]))
        for lo, hi in corners
    ]


def read_items(asked: Load) -> list[ReadItem]:
    """What torch's planner answers."""
    return create_read_items_for_chunk_list("weight", asked.saved, asked.wanted)


def shards(corners: Corners) -> list[ShardMetadata]:
    """The objects that torch's validation takes."""
    return [
        ShardMetadata(lo, [b - a for a, b in zip(lo, hi, strict=True)], f"rank:{owner}/cpu")
        for owner, (lo, hi) in enumerate(corners)
    ]


def validate(asked: list[ShardMetadata]) -> None:
    """torch's own: raises where two shards overlap."""
    validate_non_overlapping_shards_metadata(asked)
