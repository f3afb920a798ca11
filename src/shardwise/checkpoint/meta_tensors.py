"""Targets on the meta device have no memory: they are replaced by tensors that do."""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Mapping

import torch

from shardwise.torch_internals.memory import is_meta, local_of, storage_of, with_memory


def replacements(flat: Mapping[str, object]) -> dict[str, torch.Tensor]:
    """Tensors with memory for those on the meta device, by name. Tied names get one tensor."""
    made, replaced = dict[Hashable, torch.Tensor](), dict[str, torch.Tensor]()
    for name, value in flat.items():
        if isinstance(value, torch.Tensor) and is_meta(value):
            local, spec = local_of(value)
            key = storage_of(local), local.storage_offset(), local.shape, local.stride(), local.dtype, spec
            replaced[name] = made[key] if key in made else made.setdefault(key, with_memory(value))
    return replaced


def filled(replaced: Mapping[str, torch.Tensor], names: Iterable[str]) -> dict[str, torch.Tensor]:
    """The replacements that have values after these names were filled, with those that are tied to them."""
    memory = {id(replaced[name]) for name in names if name in replaced}
    return {name: tensor for name, tensor in replaced.items() if id(tensor) in memory}
