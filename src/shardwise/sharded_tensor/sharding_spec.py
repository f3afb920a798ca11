"""How a tensor is to be sharded: torch's specs, as metadata and as layouts."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from math import prod
from operator import index
from typing import TYPE_CHECKING, SupportsIndex

import numpy as np
import torch
import torch.distributed as dist

from shardwise.containers.torch_sharded import RemoteDevice, ShardMetadataLike
from shardwise.geometry import Box, Boxes, gaps, ints, join
from shardwise.sharded_tensor.instances import TorchNamed
from shardwise.sharded_tensor.metadata import ShardedTensorMetadata, ShardMetadata, TensorProperties, remote_device

if TYPE_CHECKING:
    from shardwise.sharded_tensor.api import ShardedTensor
    from shardwise.sharded_tensor.spec_container import SpecContainer

Group = dist.ProcessGroup | None
SOME = 256  # shards among which overlaps are looked for first


class PlacementSpec(metaclass=TorchNamed):
    """Where something is to live."""


@dataclass
class DevicePlacementSpec(PlacementSpec):
    """On one device, which may be that of another worker."""

    device: str | RemoteDevice | None

    def __post_init__(self) -> None:
        self.device = remote_device(self.device)


class ShardingSpec(metaclass=TorchNamed):
    """How a tensor is to be sharded."""

    @abstractmethod
    def build_metadata(self, tensor_sizes: torch.Size, tensor_properties: TensorProperties) -> ShardedTensorMetadata:
        """The shards of a tensor of that size."""

    def shard(self, tensor: torch.Tensor | None, src_rank: int = 0, process_group: Group = None) -> ShardedTensor:
        """The tensor of one rank as a ShardedTensor: `shard_tensor` calls this where a subclass overrides it."""
        from shardwise.sharded_tensor.factories import shard_by_metadata  # which imports this

        return shard_by_metadata(tensor, self, src_rank, process_group)

    def container_for(self, shape: Sequence[int], group: Group) -> SpecContainer:
        """The container of a tensor of that shape: so a spec can be a target of `shardwise.reshard`."""
        from shardwise.sharded_tensor.spec_container import SpecContainer  # which imports this

        return SpecContainer.by(self, shape, group)


@dataclass
class ChunkShardingSpec(ShardingSpec):
    """One dim in chunks by torch.chunk's rule, one for every placement.

    >>> spec = ChunkShardingSpec(-1, ["rank:0/cpu", "rank:1/cpu"])
    >>> [m.shard_offsets for m in spec.build_metadata(torch.Size([4, 5]), TensorProperties()).shards_metadata]
    [[0, 0], [0, 3]]
    """

    dim: int  # names are refused, as in torch
    placements: list[RemoteDevice]

    if TYPE_CHECKING:  # placements may be given as strings

        def __init__(self, dim: int, placements: Sequence[str | RemoteDevice | None]) -> None: ...

    def __post_init__(self) -> None:
        self.dim = _whole_dim(self.dim)
        self.placements = [RemoteDevice(p) if isinstance(p, str) else p for p in self.placements]
        if not self.placements:
            raise ValueError("Sharding needs at least one placement, found none")

    def build_metadata(self, tensor_sizes: torch.Size, tensor_properties: TensorProperties) -> ShardedTensorMetadata:
        """A shard for every placement; the last ones may be empty."""
        size = torch.Size(tensor_sizes)
        if not -len(size) <= self.dim < len(size):
            raise ValueError(f"Invalid sharding dim: {self.dim} of a tensor of size {tuple(size)}")
        dim = self.dim % len(size)
        split = get_split_size(size[dim], len(self.placements))
        shards = list[ShardMetadata]()
        for number, placement in enumerate(self.placements):
            offsets, sizes = [0] * len(size), list(size)
            offsets[dim], sizes[dim] = split * number, get_chunked_dim_size(size[dim], split, number)
            shards.append(ShardMetadata(offsets, sizes, placement))
        return ShardedTensorMetadata(shards, size, tensor_properties)


def _whole_dim(dim: object) -> int:
    if isinstance(dim, str):
        raise NotImplementedError(f"ChunkShardingSpec does not support named dimension yet! Found {dim!r}")
    if not isinstance(dim, SupportsIndex):
        raise ValueError(f"Sharding dim needs to be an integer, found: {dim}")
    return index(dim)


@dataclass
class EnumerableShardingSpec(ShardingSpec):
    """Any rectangles that do not overlap, each with its placement. They are checked once, here."""

    shards: list[ShardMetadata]

    def __post_init__(self) -> None:
        if not self.shards:
            raise ValueError(f"Empty shard list provided: {self.shards}")
        ranks = sorted({len(shard.shard_offsets) for shard in self.shards})
        if len(ranks) > 1:
            raise ValueError(f"Found inconsistent ranks for shards: {ranks[0]} and {ranks[1]}")
        self.shards = [ShardMetadata.of(shard) for shard in self.shards]
        validate_non_overlapping_shards_metadata(self.shards)

    def build_metadata(self, tensor_sizes: torch.Size, tensor_properties: TensorProperties) -> ShardedTensorMetadata:
        """The shards themselves, if they cover a tensor of that size."""
        check_tensor(self.shards, tensor_sizes)
        return ShardedTensorMetadata(list(self.shards), torch.Size(tensor_sizes), tensor_properties)


def validate_non_overlapping_shards_metadata(shards: Sequence[ShardMetadataLike]) -> None:
    """Raise a ValueError that names two shards which hold the same cells, and these cells. Takes n log n."""
    boxes, number = _boxes(shards)
    overlap = _overlap(boxes)
    if overlap is not None:
        a, b = overlap
        shared = boxes.take(ints([a])).overlap(boxes.take(ints([b]))).box(0)
        raise ValueError(f"Shards {shards[number[a]]} and {shards[number[b]]} overlap in {shared}")


def _overlap(boxes: Boxes) -> tuple[int, int] | None:
    """Two boxes that share cells, if any do.

    Looked for among more and more of them, in mixed order: where very many overlap, a few of them tell.
    """
    mixed = ints(np.random.default_rng(0).permutation(boxes.count))
    count = min(boxes.count, SOME)
    while True:
        some = np.sort(mixed[:count])
        left, right = join(boxes.take(some), boxes.take(some))
        pairs = np.flatnonzero(left < right)
        if len(pairs):
            first = pairs[np.lexsort((right[pairs], left[pairs]))[0]]
            return int(some[left[first]]), int(some[right[first]])
        if count == boxes.count:
            return None
        count = min(4 * count, boxes.count)


def check_tensor(shards_metadata: Sequence[ShardMetadataLike], tensor_dims: Sequence[int]) -> None:
    """Raise a ValueError unless shards that do not overlap cover a tensor of these dims; it names what is missing."""
    _check_volume(shards_metadata, tensor_dims)
    validate_non_overlapping_shards_metadata(shards_metadata)  # else a gap may hide behind cells that are held twice


def check_shards(shards: Sequence[ShardMetadataLike], size: Sequence[int]) -> None:
    """The same, but overlaps are named before what is missing."""
    validate_non_overlapping_shards_metadata(shards)
    _check_volume(shards, size)


def _check_volume(shards_metadata: Sequence[ShardMetadataLike], tensor_dims: Sequence[int]) -> None:
    """Refuse shards that reach beyond a tensor of these dims, or have fewer or more cells."""
    shape = tuple(tensor_dims)
    ranks = {len(shard.shard_offsets) for shard in shards_metadata}
    if ranks != {len(shape)}:
        raise ValueError(f"Rank of tensor is {len(shape)}, but shards rank is {', '.join(map(str, sorted(ranks)))}")
    for shard in shards_metadata:
        for offset, size, most in zip(shard.shard_offsets, shard.shard_sizes, shape, strict=True):
            if size and offset + size > most:
                raise ValueError(
                    f"Shard offset {offset} and length {size} exceeds tensor dim: {most} for shard {shard}"
                )
    boxes, _ = _boxes(shards_metadata)
    volume, whole = int(boxes.volumes().sum()), Box.whole(shape)
    if volume != prod(shape):
        missing = ", ".join(str(box) for box in gaps(boxes, whole, np.ones(boxes.count, np.bool_))[:4])
        raise ValueError(
            f"Total volume of shards: {volume} does not match tensor volume: {prod(shape)}, in other words all the "
            f"individual shards do not cover the entire tensor: no shard holds {missing}"
        )


def get_split_size(dim_size: int, chunks: int) -> int:
    """The size of a chunk by torch.chunk's rule.

    >>> get_split_size(10, 4)
    3
    """
    return (dim_size + chunks - 1) // chunks


def get_chunked_dim_size(dim_size: int, split_size: int, idx: int) -> int:
    """The size of chunk number `idx`: the last ones are smaller, or empty.

    >>> [get_chunked_dim_size(10, 4, idx) for idx in range(4)]
    [4, 4, 2, 0]
    """
    return max(min(dim_size, split_size * (idx + 1)) - split_size * idx, 0)


def get_chunk_sharding_params(
    sharding_dim_size: int, world_size: int, spec: ChunkShardingSpec, rank: int
) -> tuple[int, int]:
    """Where the first chunk of a rank starts, and its size. There are as many chunks as the spec has placements.

    >>> get_chunk_sharding_params(8, 4, ChunkShardingSpec(0, ["rank:1/cpu", "rank:0/cpu"]), rank=0)
    (4, 4)
    """
    split = get_split_size(sharding_dim_size, len(spec.placements))
    for number, placement in enumerate(spec.placements):
        if placement.rank() == rank:
            return min(split * number, sharding_dim_size), get_chunked_dim_size(sharding_dim_size, split, number)
    ranks = [placement.rank() for placement in spec.placements]
    raise ValueError(f"rank {rank} has no chunk: the placements are those of ranks {ranks} (of {world_size})")


def narrow_tensor(tensor: torch.Tensor, metadata: ShardMetadataLike) -> torch.Tensor:
    """The part of a whole tensor that a shard is, as a view.

    >>> narrow_tensor(torch.arange(6).reshape(2, 3), ShardMetadata([0, 1], [2, 2])).tolist()
    [[1, 2], [4, 5]]
    """
    for dim, (offset, size) in enumerate(zip(metadata.shard_offsets, metadata.shard_sizes, strict=True)):
        tensor = tensor.narrow(dim, min(offset, tensor.size(dim) - size), size)  # empty shards may lie past the end
    return tensor


def _infer_sharding_spec_from_shards_metadata(shards_metadata: Sequence[ShardMetadataLike]) -> ShardingSpec:
    """A ChunkShardingSpec where the shards are the chunks of one dim, by offset, or else as they are."""
    shards = list(shards_metadata)
    moved = {dim for shard in shards for dim, offset in enumerate(shard.shard_offsets) if offset}
    if len(moved) == 1:
        dim = moved.pop()
        ordered = sorted(shards, key=lambda shard: shard.shard_offsets[dim])
        size = [max(shard.shard_sizes[d] for shard in shards) for d in range(len(shards[0].shard_sizes))]
        size[dim] = sum(shard.shard_sizes[dim] for shard in shards)
        spec = ChunkShardingSpec(dim, [shard.placement for shard in ordered])
        made = spec.build_metadata(torch.Size(size), TensorProperties()).shards_metadata
        if [_corner(m) for m in made] == [_corner(m) for m in ordered]:
            return spec
    return EnumerableShardingSpec([ShardMetadata.of(shard) for shard in shards])


def _corner(shard: ShardMetadataLike) -> tuple[list[int], list[int]]:
    return list(shard.shard_offsets), list(shard.shard_sizes)


def _boxes(shards: Sequence[ShardMetadataLike]) -> tuple[Boxes, list[int]]:
    """The shards that have cells, as boxes, and their numbers."""
    number = [n for n, shard in enumerate(shards) if prod(shard.shard_sizes)]
    ndim = len(shards[0].shard_offsets) if shards else 0
    lo = ints([shards[n].shard_offsets for n in number]).reshape(len(number), ndim)
    return Boxes(lo, lo + ints([shards[n].shard_sizes for n in number]).reshape(len(number), ndim)), number
