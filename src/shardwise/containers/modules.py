"""Modules: their classes before fully_shard, their non-persistent buffers, and copies that may be changed."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch.distributed.fsdp import FSDPModule

from shardwise.containers.memory import is_meta


def without_fsdp(kind: type) -> type:
    """The class that a module had before fully_shard gave it a new one."""
    return next(one for one in kind.__mro__ if not issubclass(one, FSDPModule))


def unsaved_meta_buffers(module: torch.nn.Module) -> list[str]:
    """The module's own buffers that are on the meta device and in no state dict."""
    unsaved = module._non_persistent_buffers_set
    return [name for name, buffer in module._buffers.items() if is_meta(buffer) and name in unsaved]


def meta_attributes(module: torch.nn.Module) -> list[str]:
    """The module's own tensors on the meta device that are neither parameters nor buffers."""
    return [name for name, value in vars(module).items() if is_meta(value)]


def put_buffers(module: torch.nn.Module, buffers: dict[str, torch.Tensor]) -> None:
    """Replace buffers without running the module's own code."""
    module._buffers.update(buffers)


def buffers_of(module: torch.nn.Module) -> dict[str, torch.Tensor | None]:
    """The module's own buffers, persistent or not."""
    return module._buffers


def copy_without_parameters(module: torch.nn.Module) -> torch.nn.Module:
    """A deep copy whose parameters have no memory: running its code changes nothing in the module itself."""
    made: torch.nn.Module = object.__new__(without_fsdp(type(module)))
    state = vars(made)
    state.update(vars(module))
    state["_parameters"] = {name: _without_memory(value) for name, value in module._parameters.items()}
    state["_buffers"] = {name: None if value is None else value.clone() for name, value in module._buffers.items()}
    state["_modules"] = {name: one and copy_without_parameters(one) for name, one in module._modules.items()}
    return made


def _without_memory(value: torch.nn.Parameter | None) -> torch.nn.Parameter | None:
    if value is None:
        return None
    return torch.nn.Parameter(torch.empty(value.shape, dtype=value.dtype, device="meta"), requires_grad=False)


def with_parents(module: torch.nn.Module) -> Iterator[tuple[str, torch.nn.Module, list[torch.nn.Module]]]:
    """Every module in a module, with its name and the modules around it, the nearest first."""
    named = dict(module.named_modules())
    for name, one in named.items():
        steps = name.split(".") if name else []
        around = [".".join(steps[:depth]) for depth in reversed(range(len(steps)))]
        yield name, one, [named[outer] for outer in around if outer in named]
