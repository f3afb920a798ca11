"""Room for a result: fresh, or what was given as out=."""

from __future__ import annotations

from functools import lru_cache
from typing import Any

import torch

from shardwise.errors import ExchangeError, RefusedTypeError, RefusedValueError
from shardwise.layout import Layout
from shardwise.tensor.kinds import Kind, is_sharded, kind_of


def room(
    out: Any,
    target: Kind,
    me: int,
    dtype: torch.dtype,
    *,
    device: torch.device,
    source: list[torch.Tensor],
    followed: bool,
) -> list[torch.Tensor]:
    """This rank's local tensors of the target, to be written."""
    shapes = local_shapes(target.layout, me)
    if out is None:
        return [torch.empty(shape, dtype=dtype, device=device) for shape in shapes]
    if followed:
        raise ExchangeError(
            "out= cannot be written while autograd follows the source: on the ranks that hold it, "
            "call under torch.no_grad() or pass x.detach()"
        )
    given = _given(out, target)
    found = [(tuple(t.shape), t.dtype) for t in given]
    if given and not shapes:
        raise ExchangeError(f"rank {me} holds nothing of the target: pass out=None there")
    if found != [(shape, dtype) for shape in shapes]:
        raise ExchangeError(
            f"out= must have tensors of shapes {list(shapes)} and {dtype} on rank {me}, but has {found}"
        )
    _check_out(given, source)
    return given


@lru_cache(maxsize=4096)
def local_shapes(layout: Layout, owner: int) -> tuple[tuple[int, ...], ...]:
    """The shapes of an owner's tensors, none for who is no owner. Kept by value: they are asked for at every call."""
    return layout.local_shapes(owner) if owner in layout else ()


def _given(out: Any, target: Kind) -> list[torch.Tensor]:
    if is_sharded(out):
        kind = kind_of(out)
        if kind.layout != target.layout:
            raise ExchangeError(f"out= lies as {kind.layout!r}, but the target is {target.layout!r}")
        taken = kind.taken(out)
        for tensor in taken:
            _check_leaf(tensor)
        tensors = kind.local(taken)
    else:
        tensors = list(out) if isinstance(out, list | tuple) else [out]
    for tensor in tensors:
        if not isinstance(tensor, torch.Tensor):
            raise RefusedTypeError(f"out= must be a tensor, tensors or a sharded tensor, not {tensor!r}")
        _check_leaf(tensor)
        if tensor.is_conj() or tensor.is_neg():
            raise ExchangeError("out= must not be a conjugate or negative view: write into a tensor of its own")
    return [tensor.detach() for tensor in tensors]


def _check_leaf(tensor: torch.Tensor) -> None:
    if tensor.requires_grad and tensor.is_leaf and torch.is_grad_enabled():
        raise ExchangeError("out= is a leaf that autograd follows: write into it under torch.no_grad()")


def check_whole(out: Any, shape: tuple[int, ...], dtype: torch.dtype | None, *, here: bool) -> None:
    """Refuse what a whole tensor of that shape and dtype cannot be copied to, on a rank that gets it or not."""
    if not here:
        raise RefusedValueError("out= must only be given on the rank that gets the tensor")
    if not isinstance(out, torch.Tensor):
        raise RefusedTypeError(f"out= must be a tensor, not {out!r}")
    if tuple(out.shape) != shape:
        raise RefusedValueError(f"out= has size {tuple(out.shape)}, but should be {shape}")
    if dtype is not None and dtype.is_complex and not out.dtype.is_complex:
        raise RefusedValueError(f"out= is {out.dtype}: the imaginary part of {dtype} would be lost")
    _check_leaf(out)
    _check_out([out], [])


def check_memory(tensor: torch.Tensor, what: str) -> None:
    """Refuse what has no elements that could be read or written."""
    if is_sharded(tensor):
        raise ExchangeError(f"{what} is a sharded tensor inside of another: flatten_sharded_tensors makes one of them")
    if tensor.layout != torch.strided or tensor.is_meta:
        raise ExchangeError(f"{what} has no memory to read or write: it is {tensor.layout} on {tensor.device}")
    if tensor.numel() and _range(tensor)[1] - tensor.data_ptr() > _bytes_from(tensor):
        raise ExchangeError(f"the memory of {what} was given back (its storage is too short for {tuple(tensor.shape)})")


def _check_out(out: list[torch.Tensor], source: list[torch.Tensor]) -> None:
    """Refuse what would be read after it was written, what would be written twice, and what must not be written."""
    for number, tensor in enumerate(out):
        check_memory(tensor, "out=")
        if tensor.is_inference() and not torch.is_inference_mode_enabled():
            raise ExchangeError("out= was made in inference mode, and can only be written there")
        if _overlaps_itself(tensor):
            raise ExchangeError(
                f"elements of out= share memory: shape {tuple(tensor.shape)}, strides {tensor.stride()}"
            )
        if any(_overlap(tensor, other) for other in [*source, *out[:number]]):
            raise ExchangeError("out= shares memory with the source or with itself: give tensors of their own")


def _overlaps_itself(tensor: torch.Tensor) -> bool:
    """True where a stride does not pass over all that the smaller ones reach."""
    reach = 0
    for stride, size in sorted(zip(tensor.stride(), tensor.shape, strict=True)):
        if size > 1 and stride <= reach:
            return True
        reach += (size - 1) * stride
    return False


def _overlap(a: torch.Tensor, b: torch.Tensor) -> bool:
    (a_start, a_end), (b_start, b_end) = _range(a), _range(b)
    return a.device == b.device and max(a_start, b_start) < min(a_end, b_end)


def _range(tensor: torch.Tensor) -> tuple[int, int]:
    """The addresses between the first and the last element."""
    if not tensor.numel():
        return tensor.data_ptr(), tensor.data_ptr()
    last = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    return tensor.data_ptr(), tensor.data_ptr() + (last + 1) * tensor.element_size()


def _bytes_from(tensor: torch.Tensor) -> int:
    """What the storage has from the first element on."""
    return int(tensor.untyped_storage().nbytes()) - int(tensor.storage_offset()) * tensor.element_size()
