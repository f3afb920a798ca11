"""A tensor that autograd saves, as a view of the bytes of a sharded activation."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from shardwise.activation.sharded_activation import ShardedActivation
from shardwise.containers.memory import DTensorSpec, version_of, with_spec

PLAIN = (torch.Tensor, torch.nn.Parameter)


@dataclass(frozen=True, slots=True)
class PackedTensor:
    """Which tensor is made of the bytes of a sharded activation."""

    activation: ShardedActivation
    dtype: torch.dtype
    shape: torch.Size
    stride: tuple[int, ...]
    start: int  # in elements
    spec: DTensorSpec | None  # of a DTensor

    def restore(self) -> torch.Tensor:
        """The tensor, with the same values."""
        whole = self.activation.whole()
        local = torch.empty(0, dtype=self.dtype, device=whole.device)
        local.set_(whole.untyped_storage(), self.start, self.shape, self.stride)
        return local if self.spec is None else with_spec(self.spec, local)


@dataclass(frozen=True, slots=True)
class UnshardedTensor:
    """A saved tensor that stays whole. torch does not look for changes in place where there are hooks."""

    tensor: torch.Tensor
    version: int

    @staticmethod
    def of(tensor: torch.Tensor) -> UnshardedTensor:
        """Without its history: an output that its own history refers to would never be freed."""
        detached = tensor.detach() if tensor.grad_fn is not None else tensor
        return UnshardedTensor(detached, version_of(detached))

    def restore(self) -> torch.Tensor:
        """The tensor; refused if it was changed in place since."""
        if version_of(self.tensor) != self.version:
            raise RuntimeError(
                f"one of the variables needed for gradient computation has been modified by an inplace operation: a "
                f"tensor of shape {tuple(self.tensor.shape)} is at version {version_of(self.tensor)}, "
                f"expected version {self.version}"
            )
        return self.tensor


@dataclass(frozen=True)
class StorageRegion:
    """The bytes of a storage that a tensor is made of: one dense range, or a dense copy where it has gaps."""

    key: tuple[object, ...]  # tensors of one storage with equal keys are made of the same bytes
    start: int | None  # in bytes; None for a copy
    count: int  # of elements
    stride: tuple[int, ...]  # in the saved bytes
    size: int  # in bytes

    @staticmethod
    def of(tensor: torch.Tensor) -> StorageRegion:
        """The region of a tensor. Dims that are only repeated count once.

        >>> x = torch.zeros(4, 6)
        >>> [StorageRegion.of(y).key for y in (x, x.t(), x.view(2, 12), x[1:])]
        [(0, 96), (0, 96), (0, 96), (24, 72)]
        """
        count, dense = 1, True
        for stride, size in sorted(zip(tensor.stride(), tensor.shape, strict=True)):
            if size > 1 and stride:
                dense = dense and stride == count
                count *= size
        if dense:
            start = int(tensor.storage_offset()) * tensor.element_size()
            size = count * tensor.element_size()
            return StorageRegion((start, size), start, count, tensor.stride(), size)
        key = tensor.dtype, tensor.storage_offset(), tuple(tensor.shape), tensor.stride()
        return StorageRegion(key, None, count, _dense(tensor), count * tensor.element_size())

    def offset_of(self, tensor: torch.Tensor) -> int | None:
        """The element of this region where a tensor of the same storage begins; None where it is not all inside."""
        if self.start is None:
            return 0 if StorageRegion.of(tensor).key == self.key else None
        size = tensor.element_size()
        first = int(tensor.storage_offset()) * size - self.start
        last = first + sum((n - 1) * stride for n, stride in zip(tensor.shape, tensor.stride(), strict=True)) * size
        inside = first >= 0 and last + size <= self.size and first % size == 0
        return first // size if inside else None

    def bytes(self, tensor: torch.Tensor) -> torch.Tensor:
        """All bytes of the region, as one row."""
        if self.start is None:
            return _once(tensor).permute(_order(tensor)).contiguous().view(-1).view(torch.uint8)
        flat = torch.empty(0, dtype=torch.uint8, device=tensor.device)
        return flat.set_(tensor.untyped_storage(), self.start, (self.size,), (1,))


def has_memory(tensor: torch.Tensor) -> bool:
    """True for a tensor made of bytes in memory: not for meta tensors, wrappers, or views negated when read."""
    plain = type(tensor) in PLAIN and tensor.layout == torch.strided and not tensor.is_meta and not tensor.is_nested
    return plain and not tensor.is_conj() and not tensor.is_neg()


def _order(tensor: torch.Tensor) -> list[int]:
    """Its dims from the outermost in memory to the innermost."""
    return sorted(range(tensor.ndim), key=tensor.stride().__getitem__, reverse=True)


def _dense(tensor: torch.Tensor) -> tuple[int, ...]:
    """The strides of a copy without gaps, in the same order of dims: operations look at that."""
    strides, step = [0] * tensor.ndim, 1
    for dim in reversed(_order(tensor)):
        if tensor.stride(dim):
            strides[dim] = step
            step *= tensor.size(dim)
    return tuple(strides)


def _once(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor without repeated cells."""
    for dim, stride in enumerate(tensor.stride()):
        if not stride:
            tensor = tensor.narrow(dim, 0, 1)
    return tensor
