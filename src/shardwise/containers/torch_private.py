"""Private names of torch that are not about sharded tensors: autograd's state, nested arguments, names in files."""

from __future__ import annotations

import platform
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import cache
from typing import TYPE_CHECKING

import torch
from torch._utils import _rebuild_tensor_v2 as rebuild_tensor
from torch._utils import _rebuild_tensor_v3 as rebuild_typed_tensor
from torch.utils._pytree import keystr, tree_flatten_with_path

if TYPE_CHECKING:
    from torch.distributed.checkpoint.filesystem import _StorageInfo as StorageInfo

__all__ = [
    "MESH_LAYOUT_MODULE",
    "OLD_SHARD_MODULE",
    "REBUILD_MODULE",
    "SHARD_MODULE",
    "SPEC_MODULE",
    "TENSOR_MODULE",
    "after_backward",
    "argument_leaves",
    "backward_task",
    "byte_product",
    "exact_byte_products",
    "random_state",
    "rebuild_tensor",
    "rebuild_typed_tensor",
    "saved_tensors_hooks_on",
    "storage_info",
    "transforming",
]

# modules whose functions and classes are named in files
REBUILD_MODULE, TENSOR_MODULE = "torch._utils", "torch._tensor"
SHARD_MODULE, MESH_LAYOUT_MODULE = "torch.distributed._shard", "torch.distributed._mesh_layout"
SPEC_MODULE = "torch.distributed.tensor._dtensor_spec"
OLD_SHARD_MODULE = f"{SHARD_MODULE}.sharded_tensor.metadata"  # of DCP metadata up to torch 2.2


Pack = Callable[[torch.Tensor], object]


def byte_product(rows: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
    """The product of two matrices of int8, in int32."""
    return torch._int_mm(rows, weights)


@cache
def exact_byte_products() -> bool:
    """Whether this CPU makes byte products fast, and without rounding for weights of -64 to 64.

    oneDNN adds up pairs of products in 16 bits on CPUs without VNNI: larger weights overflow there.
    """
    if platform.machine().lower() not in ("x86_64", "amd64") or not torch._C._has_mkldnn:
        return False
    pairs = torch.tensor([[0, 0], [0, 1], [1, 0], [1, 1]], device="cpu")
    rows, weights = (255 * pairs - 128).repeat(16, 128), (128 * pairs - 64).T.repeat(128, 4)
    return torch.equal(byte_product(rows.to(torch.int8), weights.to(torch.int8)).to(torch.int64), rows @ weights)


def storage_info(file: str, start: int, size: int) -> StorageInfo:
    """The bytes of a file, as DCP metadata describe them."""
    from torch.distributed.checkpoint.filesystem import _StorageInfo  # slow to import

    return _StorageInfo(file, start, size)


def saved_tensors_hooks_on() -> Pack | None:
    """The innermost hook that packs saved tensors, if there is any."""
    hooks: tuple[Pack, object] | None = torch._C._autograd._top_saved_tensors_default_hooks(True)
    return hooks[0] if hooks else None


def backward_task() -> int | None:
    """The number of the backward pass that this thread is in."""
    task = torch._C._current_graph_task_id()
    return None if task == -1 else task


def random_state(device: str) -> torch.Tensor:
    """That of the generator from which random numbers on this kind of device are drawn."""
    state: torch.Tensor = torch.get_rng_state() if device == "cpu" else torch.get_device_module(device).get_rng_state()
    return state


def transforming() -> bool:
    """True inside torch.func's transforms, whose tensors have no memory of their own."""
    return bool(torch._C._are_functorch_transforms_active())


def after_backward(call: Callable[[], None]) -> None:
    """Call it when the backward pass that this thread is in has ended."""
    torch.autograd.Variable._execution_engine.queue_callback(call)


def argument_leaves(args: Sequence[object], kwargs: Mapping[str, object]) -> Iterator[tuple[str, object]]:
    """The leaves of a call's arguments, and where each is.

    >>> list(argument_leaves([5, [6]], {"mask": 7}))
    [('[0]', 5), ('[1][0]', 6), ("['mask']", 7)]
    """
    for path, leaf in tree_flatten_with_path((args, kwargs))[0]:
        yield keystr(path[1:]), leaf
