"""Tensors that every rank has whole should be the same on all. Where they are not, one rank's are taken: no mixture."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from hashlib import blake2b
from typing import Any

import torch

from shardwise.state.leaves import is_tensor
from shardwise.tensor.kinds import is_sharded

SAMPLE = 1024  # elements that are compared, of every tensor

Marks = Mapping[str, str]


def marks(flat: Mapping[str, Any]) -> Marks:
    """Something of the values of every plain tensor, by name: of small ones all."""
    return {name: _mark(value) for name, value in flat.items() if is_tensor(value) and _is_plain(value)}


def _is_plain(value: Any) -> bool:
    if is_sharded(value) or value.layout != torch.strided or value.is_meta or value.is_quantized:
        return False
    return not (value.is_conj() or value.is_neg())


def _mark(tensor: torch.Tensor) -> str:
    flat = tensor.detach().reshape(-1)
    some = flat[:: max(1, len(flat) // SAMPLE)].contiguous().view(torch.uint8).cpu()
    return blake2b(some.numpy().data, digest_size=8).hexdigest()


def differing(told: Sequence[Marks]) -> list[str]:
    """The names of which ranks have other values."""
    first = dict[str, str]()
    for known in told:
        for name, mark in known.items():
            first.setdefault(name, mark)
    return [name for name, mark in first.items() if any(known.get(name, mark) != mark for known in told)]
