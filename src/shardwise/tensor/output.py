"""Room for a result: fresh, or what was given as out=."""

from __future__ import annotations

from functools import lru_cache
from typing import Any

import torch

from shardwise.errors import ExchangeError
from shardwise.layout import Layout
from shardwise.tensor.kinds import Kind, kind_of


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
            "out= cannot be written while autograd follows the source: use torch.no_grad(), or detach it"
        )
    given = _given(out, target)
    found = [(tuple(t.shape), t.dtype) for t in given]
    if found != [(shape, dtype) for shape in shapes]:
        raise ExchangeError(
            f"out= must have tensors of shapes {list(shapes)} and {dtype} on rank {me}, but has {found}"
        )
    _check_memory(given, source)
    return given


@lru_cache(maxsize=4096)
def local_shapes(layout: Layout, owner: int) -> tuple[tuple[int, ...], ...]:
    """The shapes of an owner's tensors, none for who is no owner. Kept by value: they are asked for at every call."""
    return layout.local_shapes(owner) if owner in layout else ()


def _given(out: Any, target: Kind) -> list[torch.Tensor]:
    if is_container(out):
        kind = kind_of(out)
        if kind.layout != target.layout:
            raise ExchangeError(f"out= lies as {kind.layout!r}, but the target is {target.layout!r}")
        tensors = kind.local(kind.taken(out))
    else:
        tensors = [out] if isinstance(out, torch.Tensor) else list(out)
    for tensor in tensors:
        if not isinstance(tensor, torch.Tensor):
            raise ExchangeError(f"out= must be a tensor, tensors or a sharded tensor, not {tensor!r}")
        if tensor.is_conj() or tensor.is_neg():
            raise ExchangeError("out= must not be a conjugate or negative view: write into a tensor of its own")
    return [tensor.detach() for tensor in tensors]


def is_container(out: Any) -> bool:
    """True where out= is a sharded tensor itself, not only the memory for one."""
    return not (out is None or isinstance(out, list | tuple | torch.nn.Parameter) or type(out) is torch.Tensor)


def _check_memory(out: list[torch.Tensor], source: list[torch.Tensor]) -> None:
    """Refuse what would be read after it was written, and what would be written twice."""
    for tensor in out:
        if any(stride == 0 and size > 1 for size, stride in zip(tensor.shape, tensor.stride(), strict=True)):
            raise ExchangeError(
                f"several elements of out= share memory: shape {tuple(tensor.shape)}, {tensor.stride()}"
            )
    for number, tensor in enumerate(out):
        if any(_overlap(tensor, other) for other in [*source, *out[:number]]):
            raise ExchangeError("out= shares memory with the source or with itself: give tensors of their own")


def _overlap(a: torch.Tensor, b: torch.Tensor) -> bool:
    (a_start, a_end), (b_start, b_end) = _range(a), _range(b)
    return a.device == b.device and max(a_start, b_start) < min(a_end, b_end)


def _range(tensor: torch.Tensor) -> tuple[int, int]:
    """The addresses between the first and the last element."""
    if not tensor.numel():
        return 0, 0
    last = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    return tensor.data_ptr(), tensor.data_ptr() + (last + 1) * tensor.element_size()
