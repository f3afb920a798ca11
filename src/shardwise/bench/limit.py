"""What no transport can beat: the copies of a move on memory of one's own, without messages."""

from __future__ import annotations

from collections.abc import Callable, Iterable

import torch

from shardwise.exchange.messages import Tensors, across, view_of
from shardwise.layout import Layout
from shardwise.planning import Plan


def strided_copies(rank: int, moves: Iterable[tuple[Plan, torch.dtype, Tensors | None]]) -> Callable[[], object] | None:
    """All boxes of this rank's targets, out of memory that is laid out as the pieces of the sources are.

    Every move has a plan, a dtype, and the rank's target tensors; None for new ones. They are overwritten. What is
    returned does the copying; all memory has been touched before. None for plans that do more than copy.
    """
    here, there = list[torch.Tensor](), list[torch.Tensor]()
    for plan, dtype, target in moves:
        if plan.reducing or plan.rounds > 1:
            return None
        for ours, theirs in _views(plan, rank, dtype, target):
            here.append(ours)
            there.append(theirs)
    for source in there:
        source.fill_(1)  # unwritten pages all map to one and the same page
    return lambda: torch._foreach_copy_(here, there) if here else None


def _views(
    plan: Plan, rank: int, dtype: torch.dtype, target: Tensors | None
) -> Iterable[tuple[torch.Tensor, torch.Tensor]]:
    if rank not in plan.target:
        return
    targets = _room(plan.target, rank, dtype) if target is None else target
    copies = plan.for_owner(rank).copies
    for peer in sorted({int(owner) for owner in copies.source[copies.target == rank]}):
        source = _room(plan.source, peer, dtype)
        for theirs, ours in across(plan, (0, 0), (peer, rank), _strides(source), _strides(targets)):
            yield view_of(ours, targets), view_of(theirs, source)


def _room(layout: Layout, owner: int, dtype: torch.dtype) -> Tensors:
    return [torch.empty(shape, dtype=dtype) for shape in layout.local_shapes(owner)]


def _strides(tensors: Tensors) -> tuple[tuple[int, ...], ...]:
    return tuple(tensor.stride() for tensor in tensors)
