"""Targets on the meta device: they have a shape and no memory, and are replaced by tensors that have some."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import torch

from shardwise.torch_internals.memory import is_meta, local_of, storage_of, with_memory


def replacements(flat: Mapping[str, Any]) -> dict[str, torch.Tensor]:
    """Tensors with memory for those on the meta device, by name. Names of one tensor get one tensor: they are tied."""
    made, found = dict[Any, torch.Tensor](), dict[str, torch.Tensor]()
    for name, value in flat.items():
        if is_meta(value):
            local, spec = local_of(value)
            key = storage_of(local), local.storage_offset(), local.shape, local.stride(), local.dtype, spec
            found[name] = made[key] if key in made else made.setdefault(key, with_memory(value))
    return found


def filled(replaced: Mapping[str, torch.Tensor], names: Iterable[str]) -> dict[str, torch.Tensor]:
    """Those with values, once these names were filled, and others that are tied to them."""
    memory = {id(replaced[name]) for name in names if name in replaced}
    return {name: tensor for name, tensor in replaced.items() if id(tensor) in memory}
