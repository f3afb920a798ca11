"""Metadata of shards and of whole tensors, under torch's names."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from operator import index
from typing import TYPE_CHECKING, SupportsIndex, TypeGuard, TypeVar

import torch

from shardwise.containers.torch_sharded import (
    MetadataLike,
    PropertiesLike,
    RemoteDevice,
    ShardMetadataLike,
    torchs_metadata,
)
from shardwise.sharded_tensor.instances import TorchNamed

if TYPE_CHECKING:
    from shardwise.containers.torch_sharded import TorchMetadata

Ours = TypeVar("Ours")
FORMATS = {
    "contiguous": torch.contiguous_format,
    "channels_last": torch.channels_last,
    "channels_last_3d": torch.channels_last_3d,
    "preserve": torch.preserve_format,
}


@dataclass(slots=True)
class ShardMetadata(metaclass=TorchNamed):
    """Where one shard lies in its tensor, and where it lives: `placement` is "rank:1/cpu", "worker3/cpu" or None.

    >>> ShardMetadata([0, 4], [8, 4], "rank:1/cpu")
    ShardMetadata(shard_offsets=[0, 4], shard_sizes=[8, 4], placement=rank:1/cpu)
    """

    shard_offsets: list[int]
    shard_sizes: list[int]
    placement: RemoteDevice | None = None

    def __init__(
        self, shard_offsets: Sequence[int], shard_sizes: Sequence[int], placement: str | RemoteDevice | None = None
    ) -> None:
        self.shard_offsets = _numbers(shard_offsets, "shard_offsets", "shard_offsets should be >=0")  # torch's words
        self.shard_sizes = _numbers(shard_sizes, "shard_sizes", "shard_sizes should be >= 0")
        self.placement = remote_device(placement)
        if len(self.shard_offsets) != len(self.shard_sizes):
            raise ValueError(
                f"shard_offsets and shard_sizes should have the same number of elements, found "
                f"{len(self.shard_offsets)} ({self.shard_offsets}) and {len(self.shard_sizes)} ({self.shard_sizes})"
            )

    @staticmethod
    def of(other: ShardMetadataLike) -> ShardMetadata:
        """From one of torch's, or as it is."""
        if _is_ours(other, ShardMetadata):
            return other
        return ShardMetadata(other.shard_offsets, other.shard_sizes, other.placement)

    def __hash__(self) -> int:
        return hash((*self.shard_offsets, *self.shard_sizes, self.placement))


@dataclass
class TensorProperties(metaclass=TorchNamed):
    """What a tensor is beside its shape. The dtype is the default one of when it is made."""

    dtype: torch.dtype = field(default_factory=torch.get_default_dtype)
    layout: torch.layout = torch.strided
    requires_grad: bool = False
    memory_format: torch.memory_format = torch.contiguous_format
    pin_memory: bool = False

    @staticmethod
    def create_from_tensor(tensor: torch.Tensor) -> TensorProperties:
        """Those of a tensor, or of a sharded tensor inside another."""
        layout: object = tensor.layout  # of ShardedTensors, a Layout
        if not isinstance(layout, torch.layout):
            return TensorProperties(tensor.dtype, requires_grad=tensor.requires_grad)
        return TensorProperties(tensor.dtype, layout, tensor.requires_grad, pin_memory=tensor.is_pinned())

    @staticmethod
    def of(other: PropertiesLike) -> TensorProperties:
        """From torch's, or as they are."""
        if _is_ours(other, TensorProperties):
            return other
        return TensorProperties(other.dtype, other.layout, other.requires_grad, other.memory_format, other.pin_memory)

    def __getstate__(self) -> dict[str, object]:
        """Memory formats have names here: torch cannot pickle them."""
        name = next(name for name, known in FORMATS.items() if known == self.memory_format)
        return {**vars(self), "memory_format": name}

    def __setstate__(self, state: dict[str, object]) -> None:
        vars(self).update({**state, "memory_format": FORMATS[str(state["memory_format"])]})


@dataclass
class ShardedTensorMetadata(metaclass=TorchNamed):
    """All shards of a tensor, its size and its properties."""

    shards_metadata: list[ShardMetadata] = field(default_factory=list)
    size: torch.Size = field(default_factory=lambda: torch.Size([]))
    tensor_properties: TensorProperties = field(default_factory=TensorProperties)

    @staticmethod
    def of(other: MetadataLike) -> ShardedTensorMetadata:
        """From one of torch's, or as it is."""
        if _is_ours(other, ShardedTensorMetadata):
            return other
        shards = [ShardMetadata.of(shard) for shard in other.shards_metadata]
        return ShardedTensorMetadata(shards, torch.Size(other.size), TensorProperties.of(other.tensor_properties))

    def to_torch(self) -> TorchMetadata:
        """The same as torch's own."""
        return torchs_metadata(self)


@dataclass(slots=True)
class Shard(metaclass=TorchNamed):
    """A local tensor, and which part of the whole it is.

    >>> Shard.from_tensor_and_offsets(torch.zeros(2, 4), [2, 0], rank=1).metadata
    ShardMetadata(shard_offsets=[2, 0], shard_sizes=[2, 4], placement=rank:1/cpu)
    """

    tensor: torch.Tensor
    metadata: ShardMetadata

    def __post_init__(self) -> None:
        shape, sizes = list(self.tensor.shape), list(self.metadata.shard_sizes)
        if shape != sizes:
            raise ValueError(
                f"Shard tensor size does not match with metadata.shard_lengths! Found shard tensor size: {shape}, "
                f"metadata.shard_lengths: {sizes}"
            )
        placement = self.metadata.placement
        if placement is not None and not same_device(placement.device(), self.tensor.device):
            raise ValueError(
                f"Local shard tensor device does not match with local Shard's placement! Found local shard tensor "
                f"device: {self.tensor.device}, local shard metadata placement device: {placement.device()}"
            )

    @classmethod
    def from_tensor_and_offsets(cls, tensor: torch.Tensor, shard_offsets: Sequence[int], rank: int) -> Shard:
        """A shard of that rank, of the tensor's own size and device."""
        return cls(tensor, ShardMetadata(shard_offsets, list(tensor.shape), f"rank:{rank}/{tensor.device}"))


def remote_device(placement: str | RemoteDevice | None) -> RemoteDevice | None:
    """A placement from its string, or as it is."""
    if placement is None or isinstance(placement, RemoteDevice):
        return placement
    return RemoteDevice(placement)


def same_device(one: torch.device, other: torch.device) -> bool:
    """True for one and the same device; numbers of CPU devices do not matter."""
    return one == other or one.type == other.type == "cpu"


def _is_ours(value: object, ours: type[Ours]) -> TypeGuard[Ours]:
    """As isinstance, which is also True for torch's classes here."""
    return issubclass(type(value), ours)


def _numbers(values: Iterable[SupportsIndex], what: str, bound: str) -> list[int]:
    try:
        numbers = [index(value) for value in values]
    except TypeError:
        raise TypeError(f"{what} should be a sequence of ints, found {values!r}") from None
    if min(numbers, default=0) < 0:
        raise ValueError(f"{bound}, found {numbers}")
    if max(numbers, default=0) >= 2**62:
        raise ValueError(f"{what} should be below 2**62, found {numbers}")
    return numbers
