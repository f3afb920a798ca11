"""The tensors of a state dict: where they lie, and what is known of them on ranks that hold nothing."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch

from shardwise.layout import Layout
from shardwise.state.plan import Tensor
from shardwise.tensor.kinds import is_sharded, kind_of
from shardwise.tensor.sharded import Own


class Plain(Own):
    """How a plain tensor lies: whole, on every rank that has it."""

    def taken(self, x: Any) -> list[torch.Tensor]:
        """Itself."""
        return [x]

    def closed(self, tensors: Sequence[torch.Tensor]) -> Any:
        """The tensor; None on a rank that has none."""
        return tensors[0] if tensors else None


class Known(NamedTuple):
    """What all ranks must know of a tensor. `layout` is None for a plain one: all have it who have the state dict."""

    shape: tuple[int, ...]
    dtype: torch.dtype | None  # not known to a rank that has none of its shards
    layout: Layout | None
    device: str | None


def is_tensor(value: Any) -> bool:
    """True for what can be moved."""
    return isinstance(value, torch.Tensor) or is_sharded(value)


def known_of(value: Any) -> Known:
    """What a rank knows of one of its tensors."""
    if not is_sharded(value):
        return Known(tuple(value.shape), value.dtype, None, value.device.type)
    kind = kind_of(value)
    tensors = kind.taken(value)
    device = tensors[0].device if tensors else kind.device
    return Known(kind.layout.shape, value.dtype, kind.layout, None if device is None else device.type)


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
    found = {name: _one(name, holders, side) for name in names}
    return {name: one for name, one in found.items() if one is not None}


def _one(
    name: str, holders: Mapping[int, Mapping[str, Known | None]], side: str
) -> tuple[Known, tuple[int, ...]] | None:
    """None where it is None on all ranks: a value like others."""
    said = {rank: known[name] for rank, known in holders.items()}
    known, who = dict[str, Any](), dict[str, int]()
    for rank, one in said.items():
        for field, value in one._asdict().items() if one is not None else ():
            if value is None and field in ("dtype", "device"):
                continue
            before = known.setdefault(field, value)
            who.setdefault(field, rank)
            if before == value or (field == "layout" and _covers(before, rank, value)):
                continue
            if field == "layout" and (both := _replicas(before, value)) is not None:
                known[field] = both
            else:
                there = f"{known[field]} on rank {who[field]}"
                raise ValueError(f"{name!r} of the {side} has {field} {there}, but {value} on rank {rank}")
    if not known:
        return None
    found = Known(known["shape"], known.get("dtype", torch.get_default_dtype()), known["layout"], known.get("device"))
    return found, tuple(rank for rank, one in said.items() if one is not None)


def _covers(layout: Layout | None, rank: int, other: Layout | None) -> bool:
    """True where what a rank has by the other layout is part of this one."""
    if layout is None or other is None or layout.shape != other.shape or rank not in layout:
        return False
    return layout.pieces(rank) == (other.pieces(rank) if rank in other else ())


def _replicas(layout: Layout | None, other: Layout | None) -> Layout | None:
    """Both together, where they are on different ranks: each group of ranks has the whole. None where they are not."""
    if layout is None or other is None or layout.shape != other.shape or layout.op or other.op:
        return None
    if set(layout.owners()) & set(other.owners()):
        return None
    pieces = [
        (o, piece.box.lo, piece.box.hi) for one in (layout, other) for o in one.owners() for piece in one.pieces(o)
    ]
    both = Layout.boxes(layout.shape, pieces, overlap="replicas")
    same = all(
        both.local_shapes(o) == one.local_shapes(o) for one in (layout, other) for o in one.owners() if o in both
    )
    return both if same else None


def tensor_for(known: Known, holders: Sequence[int]) -> Tensor:
    """What a plan has to know of it. A plain one is whole on all ranks that have it."""
    assert known.dtype is not None, "merged"
    layout = Layout.replicated(known.shape, holders) if known.layout is None else known.layout
    return Tensor(known.shape, known.dtype, layout, known.device or "cpu")
