"""Carries out the plan of a model: the tensors of a bucket in one exchange."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from shardwise.dtensor import local_of
from shardwise.exchange import Exchange, Move, Terms, Views, in_words
from shardwise.layout import Layout
from shardwise.state.plan import ModelPlan
from shardwise.state.view import seen
from shardwise.tensor.kinds import kind_of
from shardwise.tensor.lane import Lane
from shardwise.tensor.output import check_memory, local_shapes
from shardwise.wires import GroupWire

Tensors = list[torch.Tensor]


def memory_of(value: Any, *, apart: bool = True) -> Tensors:
    """This rank's memory of a tensor of any kind, apart from autograd; none where it holds nothing."""
    if value is None:
        return []
    if isinstance(value, torch.Tensor) and not hasattr(value, "local_shards"):
        local, spec = local_of(value)
        found = [local] if spec is None or spec.mesh.get_coordinate() is not None else []
    else:
        found = list(kind_of(value).taken(value))
    return [tensor.detach() for tensor in found] if apart else found


def check_local(name: str, side: str, tensors: Tensors, shapes: Sequence[tuple[int, ...]], dtype: torch.dtype) -> None:
    """Refuse memory that is not what the layout gives this rank."""
    found = [(tuple(t.shape), t.dtype) for t in tensors]
    if not tensors and all(0 in shape for shape in shapes):
        return
    if found != [(shape, dtype) for shape in shapes]:
        raise ValueError(f"{name!r} of the {side} should have {list(shapes)} of {dtype} on this rank, but has {found}")
    for tensor in tensors:
        check_memory(tensor, repr(name))


def check_owners(owners: Sequence[int], side: str, layouts: Mapping[str, Layout]) -> None:
    """Refuse tensors on ranks that do not call."""
    known = set(owners)
    for name, layout in layouts.items():
        strange = [owner for owner in layout.owners() if owner not in known]
        if strange:
            where = f"{in_words(strange)}, but those who call are {in_words(owners)}"
            raise ValueError(f"{name!r} of the {side} lies on {where}")


class Mover:
    """This rank's part in the plan of a model."""

    def __init__(self, wire: GroupWire, plan: ModelPlan, operation: str) -> None:
        self.wire, self.plan, self.operation = wire, plan, operation
        self.buckets = list(plan.buckets())
        self._bytes = [sum(plan.entries[at].bytes for at in bucket) for bucket in self.buckets]
        self._views = dict[int, tuple[Sequence[Move], Views]]()  # of buckets that are moved again and again

    @property
    def total(self) -> int:
        """Bytes of all tensors: what progress is measured by."""
        return sum(self._bytes)

    def move(self, at: int, source: Tensors, target: Tensors) -> Move:
        """Of entry number `at`, between these local tensors of the whole source and target."""
        entry, me = self.plan.entries[at], self.wire.me
        ours, theirs = self.plan.sources[entry.link.source], self.plan.targets[entry.link.target]
        return Move.of(
            entry.plan,
            me,
            _seen(source, ours, entry.link.source_view, me),
            _seen(target, theirs, entry.link.target_view, me),
            entry.dtype,
        )

    def _exchange(
        self, bucket: int, check: Callable[[], None], moves_of: Callable[[list[int]], Sequence[Move]], *, fresh: bool
    ) -> None:
        """One bucket. All ranks are in the same one, of the same plan; what goes wrong on one is raised on all."""
        moves, error = list[Move](), None
        try:
            if not bucket:
                check()
            moves.extend(moves_of(self.buckets[bucket]))
        except Exception as found:
            error = found
        fields = {"operation": self.operation, "plan": self.plan.fingerprint, "bucket": bucket}
        terms = Terms(fields, error=error)
        device = torch.device(self.plan.entries[self.buckets[bucket][0]].device)
        views = Views() if fresh else self._kept_views(bucket, moves)
        started = Exchange(self.wire, terms, moves, device=device, fresh=fresh, views=views)
        lane = Lane.of(self.wire)
        started.start(alone=lane.idle)
        lane.run(started.finish)

    def _kept_views(self, bucket: int, moves: Sequence[Move]) -> Views:
        """Those of the last time, unless a move is another one now."""
        before, views = self._views.get(bucket, ((), Views()))
        if len(before) != len(moves) or any(a is not b for a, b in zip(before, moves, strict=True)):
            views = Views()
        self._views[bucket] = moves, views
        return views

    def run(
        self,
        check: Callable[[], None],
        moves_of: Callable[[list[int]], Sequence[Move]],
        *,
        fresh: bool,
        progress: Any = None,
    ) -> None:
        """All buckets, one after the other, once all ranks have checked what they have."""
        done = 0
        for number in range(len(self.buckets)):
            self._exchange(number, check, moves_of, fresh=fresh)
            done += self._bytes[number]
            if progress is not None:
                progress(done, self.total)


def _seen(tensors: Tensors, whole: Any, view: Any, me: int) -> Tensors:
    if not tensors:  # nothing, or only tensors without cells
        return [torch.empty(shape, dtype=whole.dtype, device=whole.device) for shape in local_shapes(whole.layout, me)]
    return seen(tensors, whole.layout, view, me)
