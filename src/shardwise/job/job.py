"""Carries out the plan of a model: the tensors of a bucket in one exchange."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch

from shardwise.containers.container import is_sharded, kind_of
from shardwise.containers.local_parts import local_shapes
from shardwise.containers.memory import check_memory
from shardwise.exchange import Exchange, Move, Terms, ViewCache
from shardwise.exchange.host_memory import fresh
from shardwise.exchange.overflow import Losses, Lost, Overflow, refuse_loss
from shardwise.job.plan import ModelPlan, Tensor
from shardwise.job.serial_queue import SerialQueue
from shardwise.job.side import lists_chunks
from shardwise.job.subtensor import View, seen
from shardwise.job.verify import compared, worst_of_all
from shardwise.torch_internals import is_dtensor
from shardwise.torch_internals.memory import chunks_in, local_of
from shardwise.transports import GroupTransport, TransportChoice

Tensors = list[torch.Tensor]
Tell = Callable[[int, int], None] | None


def memory_of(value: Any, *, apart: bool = True) -> Tensors:
    """This rank's memory of a tensor of any kind, apart from autograd; none where it holds nothing."""
    if value is None:
        return []
    if lists_chunks(value):
        found = [tensor for _, tensor in chunks_in(value)]
    elif is_dtensor(value) or not is_sharded(value):
        local, spec = local_of(value)
        found = [local] if spec is None or spec.mesh.get_coordinate() is not None else []
    else:
        found = list(kind_of(value).taken(value))
    return [tensor.detach() for tensor in found] if apart else found


def check_local(what: str, tensors: Tensors, tensor: Tensor, me: int) -> None:
    """Refuse memory that is not what the layout gives this rank."""
    shapes, found = local_shapes(tensor.layout, me), [(tuple(t.shape), t.dtype) for t in tensors]
    if not tensors and all(0 in shape for shape in shapes):
        return
    if found != [(shape, tensor.dtype) for shape in shapes]:
        raise ValueError(f"{what} should have {list(shapes)} of {tensor.dtype} on this rank, but has {found}")
    for one in tensors:
        check_memory(one, what)
        if one.is_conj() or one.is_neg():
            raise ValueError(f"{what} is a conjugate or negative view: resolve_conj() and resolve_neg() make it plain")


class Mover:
    """This rank's part in the plan of a model."""

    def __init__(
        self,
        transport: GroupTransport,
        plan: ModelPlan,
        operation: str,
        way: TransportChoice = "auto",
        *,
        overflow: Overflow = "allow",
    ) -> None:
        self.transport, self.plan, self.operation, self._way = transport, plan, operation, way
        self._watched = [at for at in range(len(plan.entries)) if overflow == "refuse" and plan.may_overflow(at)]
        self._reducing, self._reduced = [at for at in self._watched if plan.entries[at].plan.reducing], Losses()
        self.buckets = list(plan.buckets())
        self._bytes = [sum(plan.entries[at].bytes for at in bucket) for bucket in self.buckets]
        self._views = dict[int, tuple[Sequence[Move], ViewCache]]()  # of buckets that are moved again and again
        self._writing = False  # into the target: from when all have agreed on the first bucket

    @property
    def total(self) -> int:
        """Bytes of all tensors: what progress is measured by."""
        return sum(self._bytes)

    def move(self, at: int, source: Tensors, target: Tensors) -> Move:
        """Of entry number `at`, between these local tensors of the whole source and target."""
        entry, me = self.plan.entries[at], self.transport.me
        ours, theirs = self.plan.sources[entry.link.source], self.plan.targets[entry.link.target]
        return Move.of(
            entry.plan,
            me,
            _seen(source, ours, entry.link.source_view, me),
            _seen(target, theirs, entry.link.target_view, me),
            entry.dtype,
            partial(self._reduced.look, repr(entry.link.target), becomes=theirs.dtype)
            if at in self._reducing
            else None,
        )

    def refuse_losses(self, source_of: Callable[[str], Tensors]) -> None:
        """Refuse casts that lose values of this rank. What terms come to is known only later."""
        losses = Losses()
        for at in self._watched:
            link, reducing = self.plan.entries[at].link, self.plan.entries[at].plan.reducing
            ours, theirs = self.plan.sources[link.source], self.plan.targets[link.target]
            seen = [] if reducing else _seen(source_of(link.source), ours, link.source_view, self.transport.me)
            losses.look(repr(link.target), seen, theirs.dtype)
        refuse_loss(losses.listed())

    def _refuse_reduced(self, *, fresh: bool) -> None:
        """Refuse casts that lost what terms came to, on any rank."""
        lost = list[Lost]()
        for link in (self.plan.entries[at].link for at in self._reducing):
            dtypes = self.plan.sources[link.source].dtype, self.plan.targets[link.target].dtype
            lost.append(Lost(repr(link.target), *dtypes, self._reduced[repr(link.target)]))
        written = "Nothing was written" if fresh else "All tensors of the target were written"
        refuse_loss(worst_of_all(self.transport, lost), written)

    def run(
        self,
        moves_of: Callable[[list[int]], Sequence[Move]],
        *,
        check: Callable[[], None],
        fresh: bool = True,
        again: bool = False,
        progress: Tell = None,
    ) -> None:
        """All buckets, one after the other, once all ranks have checked what they have.

        `fresh`: nobody sees the targets before all is done. `again`: it will be repeated with the same moves. Who calls
        tells progress of the end.
        """
        self._writing = False
        try:
            self._run(moves_of, check, progress, fresh=fresh, again=again)
        except BaseException as error:  # also an interrupt
            if self._writing and not fresh:
                error.add_note(f"in a {self.operation}: its target may be partly written")
            raise

    def _run(
        self,
        moves_of: Callable[[list[int]], Sequence[Move]],
        check: Callable[[], None],
        progress: Tell,
        *,
        fresh: bool,
        again: bool,
    ) -> None:
        done = 0
        self._reduced.clear()
        for number, bucket in enumerate(self.buckets):
            moves, error = list[Move](), None
            try:  # the others have to hear of what goes wrong
                if progress is not None and number:
                    progress(done, self.total)
                if not number:
                    check()
                moves.extend(moves_of(bucket))
            except Exception as found:
                error = found
            self._exchange(number, moves, error, fresh=fresh, again=again)
            done += self._bytes[number]
        if self._reducing:
            self._refuse_reduced(fresh=fresh)

    def _exchange(
        self, bucket: int, moves: Sequence[Move], error: Exception | None, *, fresh: bool, again: bool
    ) -> None:
        """One bucket. All ranks are in the same one, of the same plan; what goes wrong on one is raised on all."""
        fields = {"operation": self.operation, "plan": self.plan.fingerprint, "bucket": bucket}
        kind = torch.device(self.plan.entries[self.buckets[bucket][0]].device)
        device = next((t.device for move in moves for t in (*move.source, *move.target)), kind)
        views = self._kept_views(bucket, moves) if again else ViewCache()
        terms = Terms(fields, error=error)
        direct = self._way != "group"
        started = Exchange(self.transport, terms, moves, device=device, fresh=fresh, views=views, direct=direct)
        lane = SerialQueue.of(self.transport)
        started.start(alone=lane.idle)
        try:
            lane.run(started.finish)
        finally:
            self._writing |= started.writing

    def _kept_views(self, bucket: int, moves: Sequence[Move]) -> ViewCache:
        """Those of the last time, unless a move is another one now."""
        before, views = self._views.get(bucket, ((), ViewCache()))
        if len(before) != len(moves) or any(a is not b for a, b in zip(before, moves, strict=True)):
            views = ViewCache()
        self._views[bucket] = moves, views
        return views

    def into_fresh(
        self,
        source_of: Callable[[str], Tensors],
        device_of: Callable[[str], torch.device],
        *,
        check: Callable[[], None],
        sent: Callable[[Sequence[int]], None] | None = None,
        verify: bool = False,
        progress: Tell = None,
    ) -> dict[str, Tensors]:
        """This rank's tensors of all targets, made now. `sent` hears of entries whose source is read no more."""
        found, kept, before = dict[str, Tensors](), list[Move](), list[int]()

        def moves_of(bucket: list[int]) -> list[Move]:
            if sent is not None and not verify:
                sent(before)
                before[:] = bucket
            moves = list[Move]()
            for at in bucket:
                link = self.plan.entries[at].link
                if link.target not in found:
                    found[link.target] = self._room(self.plan.targets[link.target], device_of(link.target))
                moves.append(self.move(at, source_of(link.source), found[link.target]))
            if verify:  # which reads the sources again
                kept.extend(moves)
            return moves

        self.run(moves_of, check=check, progress=progress)
        if verify:
            names = [entry.link.target for entry in self.plan.entries]
            compared(self.transport, kept, names, [self.plan.targets[name].dtype for name in names])
        if sent is not None:
            sent(range(len(self.plan.entries)) if verify else before)
        for name, target in self.plan.targets.items():  # tensors without cells have no entry
            if name not in found:
                found[name] = self._room(target, device_of(name))
        return found

    def _room(self, tensor: Tensor, device: torch.device) -> Tensors:
        shapes = local_shapes(tensor.layout, self.transport.me)
        return [fresh(shape, tensor.dtype, device) for shape in shapes]


def check_verifiable(plan: ModelPlan) -> None:
    """Refuse terms: their fingerprints say nothing of the value."""
    reducing = [entry.link.source for entry in plan.entries if entry.plan.reducing]
    if reducing:
        raise ValueError(f"verify=True: {reducing[0]!r} is reduced on the way, which only reshard can verify")


def _seen(tensors: Tensors, whole: Tensor, view: View, me: int) -> Tensors:
    if not tensors:  # nothing, or only tensors without cells
        return [torch.empty(shape, dtype=whole.dtype, device=whole.device) for shape in local_shapes(whole.layout, me)]
    return seen(tensors, whole.layout, view, me)
