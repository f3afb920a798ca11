"""Tensors on a device of their own, as those of a GPU: only copies cross over, and nothing else takes both kinds."""

import torch
from torch.utils._pytree import tree_map
from torch.utils.backend_registration import _setup_privateuseone_for_python_backend

aten = torch.ops.aten
CROSSING = {aten.copy_.default, aten._foreach_copy_.default, aten._to_copy.default}


class Far(torch.Tensor):
    """A tensor whose memory, that of a CPU tensor, is reached by operations on the device alone."""

    @staticmethod
    def __new__(cls, memory):
        shown = {"strides": memory.stride(), "storage_offset": memory.storage_offset(), "dtype": memory.dtype}
        return torch.Tensor._make_wrapper_subclass(cls, memory.shape, device="far", **shown)

    def __init__(self, memory):
        self.memory = memory

    @classmethod
    def __torch_dispatch__(cls, func, types, args=(), kwargs=None):
        """On the memory; refused where a tensor lies elsewhere, as every device does."""
        kwargs = dict(kwargs or {})
        flat = [t for t in torch.utils._pytree.tree_leaves((args, kwargs)) if isinstance(t, torch.Tensor)]
        if func not in CROSSING and {type(t) for t in flat if t.ndim or type(t) is Far} == {Far, torch.Tensor}:
            raise RuntimeError(f"Expected all tensors to be on the same device, but {func} got far and cpu")
        leaves = kwargs.get("device") is not None and torch.device(kwargs.pop("device")).type != "far"
        found = func(*tree_map(_memory, args), **tree_map(_memory, kwargs))
        written = kwargs.get("out") if "out" in kwargs else args[0] if func._schema.is_mutable and args else None
        if written is not None:
            return written if func._schema.returns else None
        return found if leaves else tree_map(lambda x: Far(x) if type(x) is torch.Tensor else x, found)

    __torch_function__ = torch._C._disabled_torch_function_impl


def _memory(x):
    return x.memory if isinstance(x, Far) else x


def set_up():
    """Make the device known, once in a process."""
    _setup_privateuseone_for_python_backend("far")
    lib = torch.library.Library("aten", "IMPL")
    lib.impl("empty.memory_format", lambda size, **k: Far(torch.empty(size, dtype=k.get("dtype"))), "PrivateUse1")
    lib.impl("_copy_from", lambda a, b, *_: b.copy_(a), "PrivateUse1")
    lib.impl("_to_copy", lambda x, dtype=None, **_: Far(x.to(dtype or x.dtype, copy=True)), "PrivateUse1")
    return lib
