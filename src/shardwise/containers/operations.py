"""Which of torch's functions a ShardedTensor answers: those of the whole, its own methods, those of every shard."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, NoReturn

import torch

from shardwise.errors import UnsupportedError

COMPUTE = (
    "Compute with its shards (.shards, .local_tensor()), or with a DTensor: shardwise.reshard(x, (mesh, placements))"
)


def refuse(name: str, case: str = "", remedy: str = COMPUTE) -> NoReturn:
    """Raise for an operation that ShardedTensors do not have."""
    raise UnsupportedError(f"torch function {name!r}{case} is not supported for ShardedTensor! {remedy}")


def name_of(func: Callable[..., object]) -> str:
    """What it is called; of what reads or sets a property, the property."""
    owner = func.__self__ if func.__name__ in ("__get__", "__set__") else func  # type: ignore[attr-defined]
    return str(owner.__name__)


def _functions(names: str) -> Iterator[tuple[str, Any]]:
    """torch's functions of these names, with each name: of tensors (methods, what reads a property) and of torch."""
    for name in names.split():
        member = getattr(torch.Tensor, name, None)
        if member is not None:
            yield name, member if callable(member) else member.__get__
        if hasattr(torch, name):
            yield name, getattr(torch, name)


OF_THE_WRAPPER = {
    func: needs_dtype
    for needs_dtype, names in (
        (False, "shape size dim ndim ndimension stride numel nelement storage_offset data_ptr layout __hash__ __dir__"),
        (False, "is_sparse is_sparse_csr is_quantized is_nested is_mkldnn is_conj is_neg is_inference"),
        (False, "_version output_nr retains_grad _is_view _backward_hooks"),
        (True, "is_floating_point is_complex is_signed element_size itemsize nbytes"),
    )
    for _, func in _functions(names)
}
"""What the tensor without memory can say; True for what it says by its dtype."""

OWN = {
    func: name
    for name, func in _functions(
        "requires_grad_ to cpu cuda type_as detach clone contiguous is_contiguous copy_ new_empty equal allclose "
        "share_memory_ is_shared"
    )
} | {torch._has_compatible_shallow_copy_type: "_fits_in_place"}
"""What is a method of ShardedTensor. (torch.gather is not: it is another thing than the method.)"""

OF_SHARDS = {func for _, func in _functions("zeros_like empty_like half bfloat16 float double pin_memory")}
"""What is done to every shard, whatever the layout: nothing here moves a cell, or differs between replicas."""


def call_on_wrapper(func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Call a function of OF_THE_WRAPPER on the tensor without memory."""
    x = args[0]
    if OF_THE_WRAPPER[func] and x.dtype is None:
        raise UnsupportedError(f"{func.__name__} of {x!r}: this rank holds no shard, and so does not know the dtype")
    with torch._C.DisableTorchFunctionSubclass():
        return func(*args, **kwargs)
