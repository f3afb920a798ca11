"""Checks of shards and metadata, on one rank and across ranks: the names of torch's sharded_tensor.utils."""

from __future__ import annotations

from collections.abc import Sequence
from copy import copy
from operator import attrgetter, index
from typing import cast

import torch
import torch.distributed as dist

from shardwise.containers.torch_sharded import RemoteDevice, ShardLike, owner_of, worker_rank
from shardwise.exchange import in_words
from shardwise.layout import Layout
from shardwise.sharded_tensor.metadata import ShardedTensorMetadata, ShardMetadata, TensorProperties, same_device
from shardwise.sharded_tensor.sharding_spec import Group, check_shards
from shardwise.transports.members import owners_of

SAME_ON_ALL = {
    "global_size": "size",
    "dtype": "tensor_properties.dtype",
    "requires_grad": "tensor_properties.requires_grad",
    "pin_memory": "tensor_properties.pin_memory",
}
_same_on_all = attrgetter(*SAME_ON_ALL.values())


def _parse_and_validate_remote_device(pg: Group, remote_device: RemoteDevice | None) -> tuple[int | None, torch.device]:
    """The global rank and the device of a placement; a worker's name is looked up among those of torch's RPC."""
    if remote_device is None:
        raise ValueError("remote device is None: a shard needs a placement such as 'rank:0/cpu'")
    rank, name, device = remote_device.rank(), remote_device.worker_name(), remote_device.device()
    if name is not None:
        return worker_rank(name), device
    outside: object = dist.GroupMember.NON_GROUP_MEMBER
    if rank is not None and pg is not None and pg != outside:
        known = list(owners_of(pg))
        if rank not in known:
            raise ValueError(f"Global rank {rank} does not exist in input process group: {known}")
    return rank, device


def _validate_output_tensor_for_gather(
    my_rank: int, dst_rank: int, size: Sequence[int], dst_tensor: torch.Tensor | None
) -> None:
    """The rank that gathers gives a tensor of the whole size, the others give none."""
    if my_rank != dst_rank:
        if dst_tensor is not None:
            raise ValueError("Argument ``dst_tensor`` must NOT be specified on non-destination ranks.")
        return
    if dst_tensor is None:
        raise ValueError(f"Argument ``dst_tensor`` must be specified on destination rank {dst_rank}")
    if tuple(size) != tuple(dst_tensor.size()):
        given = tuple(dst_tensor.size())
        raise ValueError(f"Argument ``dst_tensor`` have size {given}, but should be {tuple(size)}")


def _flatten_tensor_size(size: Sequence[int | Sequence[int]]) -> torch.Size:
    """A size from numbers, or from one sequence of them.

    >>> _flatten_tensor_size((2, 3)) == _flatten_tensor_size(([2, 3],)) == torch.Size([2, 3])
    True
    """
    dims = cast(Sequence[int], size[0] if len(size) == 1 and isinstance(size[0], Sequence | torch.Size) else size)
    if any(isinstance(dim, bool) for dim in dims):
        raise TypeError(f"size has to be a sequence of ints, found: {list(dims)}")
    try:
        return torch.Size([index(dim) for dim in dims])
    except TypeError:
        raise TypeError(f"size has to be a sequence of ints, found: {list(dims)}") from None


def _raise_if_mismatch(
    expected: object, actual: object, prop_name: str, ranks: int | Sequence[int], is_local: bool = True
) -> None:
    """Raise a ValueError where a property differs between shards of one rank, or between two ranks."""
    if expected == actual:
        return
    if is_local:
        raise ValueError(
            f"Local shards' tensor {prop_name} property need to be the same on rank:{ranks}! Found one local shard "
            f"tensor {prop_name}={expected}, the other local shard tensor {prop_name}={actual}."
        )
    first, second = ranks if isinstance(ranks, Sequence) else (ranks, ranks)
    raise ValueError(
        f"ShardedTensor {prop_name} property does not match from different ranks! "
        f"Found {prop_name}={expected} on rank:{first}, and {prop_name}={actual} on rank:{second}."
    )


def build_metadata_from_local_shards(
    local_shards: Sequence[ShardLike], global_size: Sequence[int], current_rank: int, pg: Group
) -> ShardedTensorMetadata:
    """The metadata of one rank's shards, checked against each other and against their tensors."""
    if not local_shards:
        raise AssertionError("must have local shards!")
    first = TensorProperties.create_from_tensor(local_shards[0].tensor)
    for shard in local_shards:
        rank, device = _parse_and_validate_remote_device(pg, shard.metadata.placement)
        tensor, properties = shard.tensor, TensorProperties.create_from_tensor(shard.tensor)
        if properties.layout != torch.strided:
            raise ValueError(
                f"Only torch.strided layout is currently supported, but found {properties.layout} on "
                f"rank:{current_rank}!"
            )
        if rank != current_rank:
            raise ValueError(
                f"Local shard metadata's rank does not match with the rank in its process group! Found current rank in "
                f"the process group: {current_rank}, local ShardMetadata placement's rank: {rank}"
            )
        if not same_device(device, tensor.device):
            raise ValueError(
                f"Local shard tensor device does not match with local Shard's placement! Found local shard tensor "
                f"device: {tensor.device}, local shard metadata placement device: {device}"
            )
        _raise_if_mismatch(list(shard.metadata.shard_sizes), list(tensor.shape), "size", current_rank)
        for name in ("pin_memory", "dtype", "requires_grad"):
            _raise_if_mismatch(getattr(first, name), getattr(properties, name), name, current_rank)
    shards = [ShardMetadata.of(shard.metadata) for shard in local_shards]
    return ShardedTensorMetadata(shards, torch.Size(global_size), first)


def build_global_metadata(
    gathered_metadatas: Sequence[ShardedTensorMetadata | None], recalc_metadata: bool = False, sharded_dim: int = 0
) -> ShardedTensorMetadata:
    """All ranks' metadata as one, checked across ranks; a rank without shards gives None.

    `recalc_metadata` takes the shards to lie one after the other along `sharded_dim`, whatever their offsets say.
    """
    known = [(rank, metadata) for rank, metadata in enumerate(gathered_metadatas) if metadata is not None]
    if not known:
        raise ValueError("ShardedTensor have no local shards on all ranks!")
    first_rank, first = known[0]
    expected = _same_on_all(first)
    for rank, other in known[1:]:
        actual = _same_on_all(other)
        if actual != expected:
            for name, one, two in zip(SAME_ON_ALL, expected, actual, strict=True):
                _raise_if_mismatch(one, two, name, (first_rank, rank), is_local=False)
    combined: ShardedTensorMetadata = copy(first)
    combined.shards_metadata = [shard for _, other in known for shard in other.shards_metadata]
    if recalc_metadata:
        combined.shards_metadata = [copy(shard) for shard in combined.shards_metadata]
        recalc_global_sharded_tensor_metadata(combined, sharded_dim)
    check_shards(combined.shards_metadata, combined.size)
    return combined


def recalc_global_sharded_tensor_metadata(
    global_sharded_tensor_metadata: ShardedTensorMetadata, sharded_dim: int
) -> None:
    """Lay the shards one after the other along a dim, by rank and within a rank as they are listed; in place.

    The size along that dim becomes their sum, along the others it is that of the shards.
    """
    shards = global_sharded_tensor_metadata.shards_metadata
    ndim = len(shards[0].shard_sizes)
    if not -ndim <= sharded_dim < ndim:
        raise ValueError(f"Invalid sharding dim: {sharded_dim} of shards with {ndim} dims")
    dim, start = sharded_dim % ndim, 0
    for shard in sorted(shards, key=owner_of):
        shard.shard_offsets = [0] * ndim  # a new list: copies of the metadata may share the old one
        shard.shard_offsets[dim] = start
        start += shard.shard_sizes[dim]
    size = list(shards[0].shard_sizes)
    size[dim] = start
    global_sharded_tensor_metadata.size = torch.Size(size)


def check_owners(layout: Layout, group: Group) -> None:
    """Refuse a layout with ranks that are not in the group."""
    known = list(owners_of(group))
    strange = sorted(set(layout.owners()).difference(known))
    if strange:
        raise ValueError(f"Global {in_words(strange)} does not exist in input process group: it has {in_words(known)}")


def check_local_tensor(tensor: torch.Tensor, shard: ShardMetadata, properties: TensorProperties, rank: int) -> None:
    """Refuse a tensor that is not what the metadata of its shard and the properties of all say."""
    own = TensorProperties.create_from_tensor(tensor)
    device = shard.placement.device() if shard.placement else tensor.device
    lies = device if same_device(device, tensor.device) else tensor.device
    metadata, tensor_property = "local ShardMetadata", "tensor property"
    for where, name, expected, actual in [
        (tensor_property, "layout", properties.layout, own.layout),
        (metadata, "size", shard.shard_sizes, list(tensor.size())),
        (tensor_property, "pin_memory", properties.pin_memory, own.pin_memory),
        (metadata, "device", device, lies),
        (tensor_property, "dtype", properties.dtype, own.dtype),
        (tensor_property, "requires_grad", properties.requires_grad, own.requires_grad),
    ]:
        if expected != actual:
            raise ValueError(
                f"Local shards' tensor {name} property is incompatible with {where} on rank {rank}: "
                f"{where} {name}={expected}, local shard tensor {name}={actual}."
            )
