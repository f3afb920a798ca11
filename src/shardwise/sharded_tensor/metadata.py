"""What is known about the shards of a tensor: the familiar names of torch.distributed._shard."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from operator import index
from typing import Any

import torch

from shardwise.sharded_tensor.instances import Familiar
from shardwise.torch_internals import RemoteDevice, torchs_metadata

FORMATS = {
    "contiguous": torch.contiguous_format,
    "channels_last": torch.channels_last,
    "channels_last_3d": torch.channels_last_3d,
    "preserve": torch.preserve_format,
}


@dataclass(slots=True)
class ShardMetadata(metaclass=Familiar):
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
        self.shard_offsets = _numbers(shard_offsets, "shard_offsets", "shard_offsets should be >=0")  # torch's texts
        self.shard_sizes = _numbers(shard_sizes, "shard_sizes", "shard_sizes should be >= 0")
        self.placement = remote_device(placement)
        if len(self.shard_offsets) != len(self.shard_sizes):
            raise ValueError(
                f"shard_offsets and shard_sizes should have the same number of elements, found "
                f"{len(self.shard_offsets)} ({self.shard_offsets}) and {len(self.shard_sizes)} ({self.shard_sizes})"
            )

    @staticmethod
    def of(other: Any) -> ShardMetadata:
        """From one of torch's, or as it is."""
        if issubclass(type(other), ShardMetadata):
            return other
        return ShardMetadata(other.shard_offsets, other.shard_sizes, other.placement)

    def __hash__(self) -> int:
        return hash((*self.shard_offsets, *self.shard_sizes, self.placement))


@dataclass
class TensorProperties(metaclass=Familiar):
    """What a tensor is beside its shape. The dtype is the default one of when it is made."""

    dtype: torch.dtype = field(default_factory=torch.get_default_dtype)
    layout: torch.layout = torch.strided
    requires_grad: bool = False
    memory_format: torch.memory_format = torch.contiguous_format
    pin_memory: bool = False

    @staticmethod
    def create_from_tensor(tensor: Any) -> TensorProperties:
        """Those of a tensor, or of a sharded tensor inside of another."""
        if not isinstance(tensor.layout, torch.layout):
            return TensorProperties(tensor.dtype, requires_grad=tensor.requires_grad)
        return TensorProperties(tensor.dtype, tensor.layout, tensor.requires_grad, pin_memory=tensor.is_pinned())

    @staticmethod
    def of(other: Any) -> TensorProperties:
        """From torch's, or as they are."""
        if issubclass(type(other), TensorProperties):
            return other
        return TensorProperties(other.dtype, other.layout, other.requires_grad, other.memory_format, other.pin_memory)

    def __getstate__(self) -> dict[str, Any]:
        """Memory formats have names here: torch cannot pickle them."""
        name = next(name for name, known in FORMATS.items() if known == self.memory_format)
        return {**vars(self), "memory_format": name}

    def __setstate__(self, state: dict[str, Any]) -> None:
        vars(self).update({**state, "memory_format": FORMATS[state["memory_format"]]})


@dataclass
class ShardedTensorMetadata(metaclass=Familiar):
    """All shards of a tensor, its size and its properties."""

    shards_metadata: list[ShardMetadata] = field(default_factory=list)
    size: torch.Size = field(default_factory=lambda: torch.Size([]))
    tensor_properties: TensorProperties = field(default_factory=TensorProperties)

    @staticmethod
    def of(other: Any) -> ShardedTensorMetadata:
        """From one of torch's, or as it is."""
        if issubclass(type(other), ShardedTensorMetadata):
            return other
        shards = [ShardMetadata.of(shard) for shard in other.shards_metadata]
        return ShardedTensorMetadata(shards, torch.Size(other.size), TensorProperties.of(other.tensor_properties))

    def to_torch(self) -> Any:
        """The same as torch's own."""
        return torchs_metadata(self)


@dataclass(slots=True)
class Shard(metaclass=Familiar):
    """A local tensor, and which part of the whole it is.

    >>> Shard.from_tensor_and_offsets(torch.zeros(2, 4), [2, 0], rank=1).metadata
    ShardMetadata(shard_offsets=[2, 0], shard_sizes=[2, 4], placement=rank:1/cpu)
    """

    tensor: torch.Tensor
    metadata: ShardMetadata

    def __post_init__(self) -> None:
        found, said = list(self.tensor.shape), list(self.metadata.shard_sizes)
        if found != said:
            raise ValueError(
                f"Shard tensor size does not match with metadata.shard_lengths! Found shard tensor size: {found}, "
                f"metadata.shard_lengths: {said}"
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


def remote_device(placement: Any) -> RemoteDevice | None:
    """A placement from its text, or as it is."""
    if placement is None or isinstance(placement, RemoteDevice):
        return placement
    return RemoteDevice(placement)


def same_device(said: torch.device, found: torch.device) -> bool:
    """True for one and the same device; the CPU has no numbers that matter."""
    return said == found or said.type == found.type == "cpu"


def _numbers(values: Any, what: str, bound: str) -> list[int]:
    try:
        found = [index(value) for value in values]
    except TypeError:
        raise TypeError(f"{what} should be a sequence of ints, found {values!r}") from None
    if min(found, default=0) < 0:
        raise ValueError(f"{bound}, found {found}")
    if max(found, default=0) >= 2**62:
        raise ValueError(f"{what} should be below 2**62, found {found}")
    return found
