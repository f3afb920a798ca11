"""Local shards from one spec to another: the names of torch's sharded_tensor.reshard, with gradients."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from shardwise.containers.torch_sharded import RemoteDevice, SpecLike, owner_of
from shardwise.sharded_tensor.metadata import Shard, ShardMetadata, TensorProperties, remote_device
from shardwise.sharded_tensor.spec_container import Group, SpecContainer, SpecTarget, inside
from shardwise.tensor import ShardedTensor
from shardwise.tensor.call import Options, Source
from shardwise.tensor.resharding import result_of, start_call
from shardwise.transports.members import owner_here, owners_of

Local = torch.Tensor | Sequence[torch.Tensor] | None


def get_idx_from_placements(placements: Sequence[str | RemoteDevice], current_rank: int) -> int:
    """Which of the placements is that of a rank: the first one.

    >>> get_idx_from_placements(["rank:2/cpu", "rank:0/cpu"], 0)
    1
    """
    ranks = [placement.rank() for placement in map(remote_device, placements) if placement is not None]
    if current_rank not in ranks:
        raise RuntimeError(f"current_rank not in the placement: rank {current_rank} is not among {ranks}")
    return ranks.index(current_rank)


def build_reshard_metadata(
    st_size: Sequence[int], sharding_spec: SpecLike, world_size: int
) -> tuple[list[ShardMetadata | None], list[int]]:
    """The shards of a spec by rank, None for ranks without one, and the ranks in the order of the placements.

    Where ranks have several shards, or numbers beyond the world size (those of a sub-group), the list has all shards
    in the order of their ranks instead.
    """
    built = sharding_spec.build_metadata(torch.Size(st_size), TensorProperties()).shards_metadata
    shards = [inside(m, st_size) for m in built]
    ranks = [owner_of(shard) for shard in shards]
    if len(set(ranks)) < len(ranks) or max(ranks) >= world_size:
        return [*sorted(shards, key=owner_of)], ranks
    by_rank: list[ShardMetadata | None] = [None] * world_size
    for rank, shard in zip(ranks, shards, strict=True):
        by_rank[rank] = shard
    return by_rank, ranks


def reshard_local_shard(
    local_tensor: Local, st_size: Sequence[int], sharding_spec: SpecLike, resharding_spec: SpecLike, pg: Group
) -> tuple[list[Shard], list[ShardMetadata | None]]:
    """This rank's shards by another spec, and the metadata of all. Every rank of the group calls; autograd follows.

    Any spec to any other, ours or torch's. A rank with several shards gives a list of tensors, in the order of its
    placements; one with none gives None.
    """

    def source() -> ShardedTensor | None:
        layout = SpecContainer.by(sharding_spec, st_size, pg).layout
        return None if local_tensor is None else ShardedTensor(local_tensor, layout, pg)

    call = start_call(Source.of(source), SpecTarget(resharding_spec, TensorProperties()), Options(), group=pg)
    assert call is not None, "every rank of the group has a part in it"
    tensors = result_of(call.run())[0].shards
    metadata, _ = build_reshard_metadata(st_size, resharding_spec, len(owners_of(pg)))
    mine = [shard for shard in metadata if shard is not None and owner_of(shard) == owner_here(pg)]
    return [Shard(tensor, shard) for tensor, shard in zip(tensors, mine, strict=True)], metadata


def reshuffle_local_shard(
    local_shard: Local, st_size: Sequence[int], sharding_spec: SpecLike, resharding_spec: SpecLike, pg: Group
) -> tuple[list[Shard], list[ShardMetadata | None]]:
    """The same, under the name that torch has for specs that differ only in the order of their placements."""
    return reshard_local_shard(local_shard, st_size, sharding_spec, resharding_spec, pg)
