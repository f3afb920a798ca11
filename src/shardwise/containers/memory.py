"""Whether tensors have memory that can be read and written, and whether they share it."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch

from shardwise.containers.container import is_sharded
from shardwise.errors import ExchangeError


def check_memory(tensor: torch.Tensor, what: str) -> None:
    """Refuse what has no elements that could be read or written."""
    if is_sharded(tensor):
        raise ExchangeError(f"{what} is a sharded tensor inside another: flatten_sharded_tensors makes one of them")
    if tensor.layout != torch.strided or tensor.is_meta or tensor.is_quantized:
        kind = "quantized" if tensor.is_quantized else tensor.layout
        remedy = "; module.to_empty(device=...) gives it some" if tensor.is_meta else ""
        raise ExchangeError(f"{what} has no memory to read or write: it is {kind} on {tensor.device}{remedy}")
    if tensor.numel() and _range(tensor)[1] - tensor.data_ptr() > _bytes_from(tensor):
        raise ExchangeError(f"the memory of {what} was given back (its storage is too short for {tuple(tensor.shape)})")


def check_written(tensor: torch.Tensor, what: str) -> None:
    """Refuse what must not be written."""
    if tensor.is_conj() or tensor.is_neg():
        raise ExchangeError(f"{what} must not be a conjugate or negative view: write into a tensor of its own")
    if tensor.is_inference() and not torch.is_inference_mode_enabled():
        raise ExchangeError(f"{what} was made in inference mode, and can only be written there")
    if _overlaps_itself(tensor.stride(), tensor.shape):
        raise ExchangeError(f"elements of {what} share memory: shape {tuple(tensor.shape)}, strides {tensor.stride()}")


def shared(written: Sequence[torch.Tensor], read: Sequence[torch.Tensor]) -> Iterator[tuple[int, int]]:
    """Pairs of tensors with common elements, at least one of them written: numbers in the one list after the other."""
    everything = [*written, *read]
    order = sorted((tensor.device.type, *_range(tensor), at) for at, tensor in enumerate(everything) if tensor.numel())
    open_ones = list[tuple[str, int, int, int]]()  # those that reach past where the next one starts
    for one in order:
        open_ones = [other for other in open_ones if other[0] == one[0] and other[2] > one[1]]
        for other in open_ones:
            a, b = sorted((other[3], one[3]))
            if a < len(written) and _meet(everything[a], everything[b]):
                yield a, b
        open_ones.append(one)


def _meet(a: torch.Tensor, b: torch.Tensor) -> bool:
    """True if they have elements in common, or if that is not known."""
    if a.dtype != b.dtype or a.stride() != b.stride() or _overlaps_itself(a.stride(), _larger(a, b)):
        return True
    apart, odd = divmod(b.data_ptr() - a.data_ptr(), a.element_size())
    dims = sorted(zip(a.stride(), a.shape, b.shape, strict=True), reverse=True)
    dims = [dim for dim in dims if dim[1:] != (1, 1)]
    return bool(odd) or not all(stride for stride, _, _ in dims) or _reached(apart, dims)


def _reached(apart: int, dims: Sequence[tuple[int, int, int]]) -> bool:
    """True where two blocks of these strides and sizes, that start so many elements apart, have some in common."""
    if not dims:
        return apart == 0
    (stride, ours, theirs), rest = dims[0], dims[1:]
    steps = apart // stride  # the other dims together do not reach as far as one more or less
    return any(-theirs < at < ours and _reached(apart - at * stride, rest) for at in (steps, steps + 1))


def _larger(a: torch.Tensor, b: torch.Tensor) -> tuple[int, ...]:
    """The sizes of a block that contains both."""
    return tuple(map(max, a.shape, b.shape))


def _overlaps_itself(strides: Sequence[int], sizes: Sequence[int]) -> bool:
    """True where a stride does not pass over all that the smaller ones reach."""
    reach = 0
    for stride, size in sorted(zip(strides, sizes, strict=True)):
        if size > 1 and stride <= reach:
            return True
        reach += (size - 1) * stride
    return False


def _range(tensor: torch.Tensor) -> tuple[int, int]:
    """The addresses between the first and the last element."""
    if not tensor.numel():
        return tensor.data_ptr(), tensor.data_ptr()
    last = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    return tensor.data_ptr(), tensor.data_ptr() + (last + 1) * tensor.element_size()


def _bytes_from(tensor: torch.Tensor) -> int:
    """What the storage has from the first element on."""
    return int(tensor.untyped_storage().nbytes()) - int(tensor.storage_offset()) * tensor.element_size()
