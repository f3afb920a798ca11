"""ShardedTensors in files: loaded where they were saved, in the process group of `load_with_process_group`."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import replace
from typing import TYPE_CHECKING

import torch.distributed as dist

from shardwise.containers.dtensor import default_group
from shardwise.containers.torch_sharded import SpecLike, torchs_loading
from shardwise.exchange.messages import Tensors
from shardwise.sharded_tensor.metadata import ShardedTensorMetadata, ShardMetadata
from shardwise.sharded_tensor.spec_container import Group, SpecContainer

if TYPE_CHECKING:
    from shardwise.sharded_tensor.api import ShardedTensor

_loading = ContextVar[Group]("process group of loaded tensors", default=None)


@contextmanager
def load_with_process_group(process_group: Group) -> Iterator[Group]:
    """ShardedTensors that are loaded inside this context live in this process group, the one they were saved in."""
    if _loading.get() is not None:
        raise RuntimeError('ProcessGroup already set by previous "load_with_process_group" context manager')
    token = _loading.set(process_group)
    try:
        with torchs_loading(process_group):  # files may have torch's own
            yield process_group
    finally:
        _loading.reset(token)


def place(group: Group) -> dict[str, int]:
    """Where this rank is in the group."""
    known = group or default_group()
    return {
        "Local rank": known.rank(),
        "Global rank": dist.get_rank(),
        "Local world size": known.size(),
        "Global world size": dist.get_world_size(),
    }


def unplaced(
    metadata: ShardedTensorMetadata, spec: SpecLike, tensors: Tensors, own: tuple[ShardMetadata, ...]
) -> ShardedTensor:
    """What was pickled without a process group: it holds these shards wherever it is loaded."""
    return replace(SpecContainer.by_metadata(metadata, spec, None), own=own).holding(tensors)


def loaded(metadata: ShardedTensorMetadata, spec: SpecLike, tensors: Tensors, saved: dict[str, int]) -> ShardedTensor:
    """What was pickled, on the rank where it was."""
    if not dist.is_initialized():
        raise RuntimeError(
            'Need to initialize default process group using "init_process_group" before loading ShardedTensor'
        )
    group = _loading.get()
    for what, now in place(group).items():
        if saved[what] != now:
            raise RuntimeError(
                f"{what} at save time was {saved[what]}, but at load time was {now}: load it on the same rank, under "
                f"load_with_process_group where it had a group of its own"
            )
    return SpecContainer.by_metadata(metadata, spec, group).holding(tensors)
