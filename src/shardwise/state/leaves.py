"""The tensors of a state dict: where they lie, and what is known of them on ranks that hold nothing."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch

from shardwise.layout import Layout
from shardwise.tensor.kinds import is_sharded, kind_of

Tensors = Sequence[torch.Tensor]


@dataclass(frozen=True)
class Plain:
    """How a plain tensor lies: whole, on every rank that has it."""

    layout: Layout
    group: None = None
    device: torch.device | None = None

    def taken(self, x: torch.Tensor) -> list[torch.Tensor]:
        """Itself."""
        return [x]

    def local(self, tensors: Tensors) -> list[torch.Tensor]:
        """Apart from autograd."""
        return [tensor.detach() for tensor in tensors]

    def dressed(self, local: Tensors) -> list[torch.Tensor]:
        """As they are."""
        return list(local)

    def closed(self, tensors: Tensors) -> torch.Tensor | None:
        """The tensor; None on a rank that has none."""
        return tensors[0] if tensors else None

    def gradient(self) -> Plain:
        """As the value."""
        return self

    def gradient_of(self, grads: Tensors) -> Plain:
        """As the value."""
        return self


class Known(NamedTuple):
    """What all ranks must know of a tensor. `layout` is None for a plain one: all have it who have the state dict."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    layout: Layout | None
    device: str


def is_tensor(value: Any) -> bool:
    """True for what can be moved."""
    return isinstance(value, torch.Tensor) or is_sharded(value)


def known_of(value: Any) -> Known:
    """What a rank knows of one of its tensors."""
    if not is_sharded(value):
        return Known(tuple(value.shape), value.dtype, None, value.device.type)
    kind = kind_of(value)
    tensors = kind.taken(value)
    device = tensors[0].device.type if tensors else (kind.device or torch.device("cpu")).type
    return Known(kind.layout.shape, value.dtype, kind.layout, device)


def merged(
    told: Mapping[int, Mapping[str, Known | None] | None], side: str
) -> dict[str, tuple[Known, tuple[int, ...]]]:
    """What is known of all tensors, and which ranks have the state dict; raises where ranks do not say the same."""
    holders = {rank: known for rank, known in told.items() if known is not None}
    if not holders:
        raise ValueError(f"no rank has a {side}: at least one must")
    first, names = next(iter(holders.items()))
    for rank, other in holders.items():
        if list(other) != list(names):
            strange = sorted(set(names) ^ set(other)) or [a for a, b in zip(names, other, strict=True) if a != b]
            raise ValueError(
                f"the {side} has other names on rank {rank} than on rank {first}: {', '.join(map(repr, strange[:5]))}"
            )
    return {name: _one(name, holders, side) for name in names}


def _one(name: str, holders: Mapping[int, Mapping[str, Known | None]], side: str) -> tuple[Known, tuple[int, ...]]:
    said = {rank: known[name] for rank, known in holders.items() if known[name] is not None}
    if not said:
        raise ValueError(f"{name!r} of the {side} is None on all ranks: at least one must have it")
    first, known = next(iter(said.items()))
    assert known is not None, "left out above"
    for rank, other in said.items():
        for field, a, b in zip(Known._fields, known, other or known, strict=True):
            if a != b:
                raise ValueError(f"{name!r} of the {side} has {field} {a} on rank {first}, but {b} on rank {rank}")
    return known, tuple(said)


def layout_for(known: Known, holders: Sequence[int]) -> Layout:
    """Where the cells of a tensor are: of a plain one, on all ranks that have it."""
    return Layout.replicated(known.shape, holders) if known.layout is None else known.layout
