"""Room for a result: fresh, or what was given as out=."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch

from shardwise.errors import ExchangeError, RefusedTypeError, RefusedValueError
from shardwise.exchange.pages import fresh
from shardwise.tensor.casting import ONLY_PLAIN, PLAIN, check_cast
from shardwise.tensor.kinds import Kind, is_sharded, kind_of, on_wire
from shardwise.tensor.parts import local_shapes
from shardwise.wires import GroupWire


def room(
    out: Any,
    target: Kind,
    wire: GroupWire,
    dtype: torch.dtype,
    *,
    device: torch.device,
    source: list[torch.Tensor],
    followed: bool,
) -> list[torch.Tensor]:
    """This rank's local tensors of the target, to be written."""
    me, shapes = wire.me, local_shapes(target.layout, wire.me)
    if out is None:
        return [fresh(shape, dtype, device) for shape in shapes]
    if followed:
        raise ExchangeError(
            "out= cannot be written while autograd follows the source: on the ranks that hold it, "
            "call under torch.no_grad() or pass x.detach()"
        )
    given = _given(out, target, wire)
    found = [(tuple(t.shape), t.dtype) for t in given]
    if given and not shapes:
        raise ExchangeError(f"rank {me} holds nothing of the target: pass out=None there")
    if found != [(shape, dtype) for shape in shapes]:
        raise ExchangeError(
            f"out= must have tensors of shapes {list(shapes)} and {dtype} on rank {me}, but has {found}"
        )
    _check_out(given, source)
    return given


def _given(out: Any, target: Kind, wire: GroupWire) -> list[torch.Tensor]:
    if is_sharded(out):
        kind = on_wire(kind_of(out), wire)
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
    if dtype is not None and dtype != out.dtype:
        check_cast(dtype, out.dtype)
        if dtype not in PLAIN or out.dtype not in PLAIN:
            raise RefusedValueError(
                f"out= is {out.dtype}, but the tensor is {dtype}: {ONLY_PLAIN}; dtype={out.dtype} on all ranks names it"
            )
    _check_leaf(out)
    _check_out([out], [])


def check_memory(tensor: torch.Tensor, what: str) -> None:
    """Refuse what has no elements that could be read or written."""
    if is_sharded(tensor):
        raise ExchangeError(f"{what} is a sharded tensor inside of another: flatten_sharded_tensors makes one of them")
    if tensor.layout != torch.strided or tensor.is_meta or tensor.is_quantized:
        kind = "quantized" if tensor.is_quantized else tensor.layout
        remedy = "; module.to_empty(device=...) gives it some" if tensor.is_meta else ""
        raise ExchangeError(f"{what} has no memory to read or write: it is {kind} on {tensor.device}{remedy}")
    if tensor.numel() and _range(tensor)[1] - tensor.data_ptr() > _bytes_from(tensor):
        raise ExchangeError(f"the memory of {what} was given back (its storage is too short for {tuple(tensor.shape)})")


def _check_out(out: list[torch.Tensor], source: list[torch.Tensor]) -> None:
    """Refuse what would be read after it was written, what would be written twice, and what must not be written."""
    for tensor in out:
        check_memory(tensor, "out=")
        check_written(tensor, "out=")
    if next(shared(out, source), None):
        raise ExchangeError("out= shares memory with the source or with itself: give tensors of their own")


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
    """True where they have elements in common, and where that cannot be told."""
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
    """The sizes of a block that has room for either."""
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
