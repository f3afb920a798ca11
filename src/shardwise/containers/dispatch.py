"""torch's operations as they are dispatched: what their schemas say, and the tensors in their arguments."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import cache
from typing import TypeVar, cast

import torch
from torch._ops import OpOverload
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_map_only

from shardwise.exchange.messages import Tensors

__all__ = [
    "OpOverload",
    "TorchDispatchMode",
    "TorchFunctionMode",
    "is_view",
    "tensors_in",
    "with_tensors",
    "written_tensors",
]


T = TypeVar("T")


def tensors_in(arguments: object) -> Tensors:
    """All tensors in nested arguments."""
    if isinstance(arguments, torch.Tensor):
        return [arguments]
    if isinstance(arguments, dict):
        arguments = tuple(arguments.values())
    if not isinstance(arguments, tuple | list):
        return []
    return [tensor for one in arguments for tensor in tensors_in(one)]


def with_tensors(change: Callable[[torch.Tensor], torch.Tensor], arguments: T) -> T:
    """The same arguments with every tensor changed."""
    return cast(T, tree_map_only(torch.Tensor, change, arguments))


@cache
def is_view(operation: OpOverload) -> bool:
    """True if results share the memory of arguments, and nothing is written."""
    if operation is torch.ops.aten._unsafe_view.default:  # its schema does not say so
        return True
    schema = operation._schema
    written = any(one.alias_info is not None and one.alias_info.is_write for one in schema.arguments)
    return not written and any(one.alias_info is not None for one in schema.returns)


def written_tensors(
    operation: OpOverload, args: Sequence[object], kwargs: Mapping[str, object]
) -> Iterator[torch.Tensor]:
    """The tensors that an operation writes to, by its schema."""
    for number, name in _written(operation):
        yield from tensors_in(args[number] if number < len(args) else kwargs.get(name))


@cache
def _written(operation: OpOverload) -> list[tuple[int, str]]:
    """The numbers and names of the arguments that an operation writes to."""
    arguments = enumerate(operation._schema.arguments)
    return [(number, one.name) for number, one in arguments if one.alias_info is not None and one.alias_info.is_write]
