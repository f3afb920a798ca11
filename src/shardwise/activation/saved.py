"""A tensor that autograd saves, as some of the bytes that are kept."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from shardwise.activation.kept import Kept
from shardwise.torch_internals.memory import dressed_as

PLAIN = (torch.Tensor, torch.nn.Parameter)


@dataclass(frozen=True, slots=True)
class Saved:
    """Which tensor is made of the bytes that are kept."""

    kept: Kept
    dtype: torch.dtype
    shape: torch.Size
    stride: tuple[int, ...]
    start: int  # in elements
    spec: Any  # of a DTensor

    def restored(self) -> torch.Tensor:
        """The same again."""
        whole = self.kept.whole()
        local = torch.empty(0, dtype=self.dtype, device=whole.device)
        local.set_(whole.untyped_storage(), self.start, self.shape, self.stride)
        return local if self.spec is None else dressed_as(self.spec, local)


@dataclass(frozen=True, slots=True)
class Untouched:
    """A saved tensor that stays as it is. torch does not look for changes in place where there are hooks."""

    tensor: torch.Tensor
    version: int

    @staticmethod
    def of(tensor: torch.Tensor) -> Untouched:
        """Apart from its history: an output that its own history holds would never be freed."""
        apart = tensor.detach() if tensor.grad_fn is not None else tensor
        return Untouched(apart, _version(apart))

    def restored(self) -> torch.Tensor:
        """The same, if it is."""
        if _version(self.tensor) != self.version:
            raise RuntimeError(
                f"one of the variables needed for gradient computation has been modified by an inplace operation: a "
                f"tensor of shape {tuple(self.tensor.shape)} is at version {_version(self.tensor)}, "
                f"expected version {self.version}"
            )
        return self.tensor


@dataclass(frozen=True)
class Cells:
    """How the elements of a tensor lie in memory: densely, in some order of dims, or as a copy that does."""

    key: tuple[Any, ...]  # tensors of a storage with equal keys are made of the same bytes
    start: int | None  # in bytes; None for a copy
    count: int  # of elements
    stride: tuple[int, ...]  # in what is kept

    @staticmethod
    def of(tensor: torch.Tensor) -> Cells:
        """Dims that are only repeated count once.

        >>> x = torch.zeros(4, 6)
        >>> Cells.of(x).key == Cells.of(x.t()).key == Cells.of(x.view(2, 12)).key, Cells.of(x[1:]).key
        (True, (24, 72))
        """
        count, dense = 1, True
        for stride, size in sorted(zip(tensor.stride(), tensor.shape, strict=True)):
            if size > 1 and stride:
                dense = dense and stride == count
                count *= size
        if dense:
            start = int(tensor.storage_offset()) * tensor.element_size()
            return Cells((start, count * tensor.element_size()), start, count, tensor.stride())
        key = tensor.dtype, tensor.storage_offset(), tuple(tensor.shape), tensor.stride()
        return Cells(key, None, count, _dense(tensor))

    def place_of(self, tensor: torch.Tensor) -> int | None:
        """Which element of these bytes a tensor of the same storage begins with; None where it is not all in there."""
        if self.start is None:
            return 0 if Cells.of(tensor).key == self.key else None
        size = tensor.element_size()
        first = int(tensor.storage_offset()) * size - self.start
        last = first + sum((n - 1) * stride for n, stride in zip(tensor.shape, tensor.stride(), strict=True)) * size
        inside = first >= 0 and last + size <= self.key[1] and first % size == 0
        return first // size if inside else None

    def bytes(self, tensor: torch.Tensor) -> torch.Tensor:
        """All of them, in a row."""
        if self.start is None:
            return _once(tensor).permute(_order(tensor)).contiguous().view(-1).view(torch.uint8)
        flat = torch.empty(0, dtype=torch.uint8, device=tensor.device)
        return flat.set_(tensor.untyped_storage(), self.start, (self.count * tensor.element_size(),), (1,))


def has_memory(tensor: torch.Tensor) -> bool:
    """True for what is made of bytes in memory: no meta tensors, wrappers, or views that are negated when read."""
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
    """Without what is only repeated."""
    for dim, stride in enumerate(tensor.stride()):
        if not stride:
            tensor = tensor.narrow(dim, 0, 1)
    return tensor


def _version(tensor: torch.Tensor) -> int:
    return 0 if tensor.is_inference() else tensor._version
