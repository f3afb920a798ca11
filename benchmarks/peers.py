"""torch's own planner and validation, with their objects made from plain corners: the only file here with torch."""

from __future__ import annotations

import pickle
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch.distributed._shard.metadata import ShardMetadata
from torch.distributed._shard.sharded_tensor.metadata import ShardedTensorMetadata
from torch.distributed._shard.sharded_tensor.metadata import TensorProperties as ShardProperties
from torch.distributed._shard.sharded_tensor.utils import build_global_metadata
from torch.distributed._shard.sharding_spec._internals import validate_non_overlapping_shards_metadata
from torch.distributed.checkpoint import FileSystemReader
from torch.distributed.checkpoint.default_planner import create_default_local_load_plan
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import ReadItem
from torch.distributed.checkpoint.planner_helpers import create_read_items_for_chunk_list
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.testing._internal.distributed.fake_pg import FakeStore

from benchmarks.tilings import Corners
from shardwise import Mesh


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


def gathered(shape: Sequence[int], corners: Corners) -> list[ShardedTensorMetadata]:
    """What ranks with one shard each tell each other."""
    properties = ShardProperties()
    return [ShardedTensorMetadata([shard], torch.Size(shape), properties) for shard in shards(corners)]


def global_metadata(told: list[ShardedTensorMetadata]) -> ShardedTensorMetadata:
    """What torch makes of it."""
    return build_global_metadata(told)


def shards(corners: Corners) -> list[ShardMetadata]:
    """The objects that torch's validation takes."""
    return [
        ShardMetadata(lo, [b - a for a, b in zip(lo, hi, strict=True)], f"rank:{owner}/cpu")
        for owner, (lo, hi) in enumerate(corners)
    ]


def validate(asked: list[ShardMetadata]) -> None:
    """torch's own: raises where two shards overlap."""
    validate_non_overlapping_shards_metadata(asked)


class Model(NamedTuple):
    """A rank's state dict of DTensors without data, and what a checkpoint says of it."""

    state: dict[str, DTensor]
    saved: Metadata


def model(tensors: Sequence[tuple[Load, Sequence[int], str]], mesh: Mesh, rank: int) -> Model:
    """Tensors (as saved, the rank's local shape, placement on the last axis) in a world that is only pretended."""
    if not dist.is_initialized():
        dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=64)
    devices = DeviceMesh("cpu", mesh.ranks.tolist())
    state = {
        f"weight{n}": DTensor.from_local(
            torch.empty(local, device="meta"),
            devices,
            [Shard(int(word[1:])) if word != "R" else Replicate() for word in ("S0", placement)],
            run_check=False,
            shape=load.saved.size,
            stride=torch.empty(load.saved.size, device="meta").stride(),
        )
        for n, (load, local, placement) in enumerate(tensors)
    }
    return Model(state, Metadata({name: load.saved for name, (load, *_) in zip(state, tensors, strict=True)}))


def written(asked: Model, folder: Path, files: int) -> Model:
    """The same, once its metadata is in a file, as if chunk n of every tensor lay in file n."""
    places = {
        MetadataIndex(name, chunk.offsets, n): _StorageInfo(f"__{n % files}_0.distcp", 1_000_000 * at, 1_000_000)
        for at, (name, saved) in enumerate(asked.saved.state_dict_metadata.items())
        for n, chunk in enumerate(saved.chunks)
    }
    folder.mkdir()
    (folder / ".metadata").write_bytes(pickle.dumps(replace(asked.saved, storage_data=places)))
    return asked


def read_and_plan(state: dict[str, DTensor], folder: Path) -> int:
    """How many items torch's local load plan has, from the file on."""
    metadata = FileSystemReader(folder).read_metadata()
    return len(create_default_local_load_plan(state, metadata, True).items)


def local_load_plan(asked: Model) -> int:
    """How many items torch's local load plan has."""
    return len(create_default_local_load_plan(asked.state, asked.saved, True).items)
