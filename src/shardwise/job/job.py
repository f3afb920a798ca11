"""The job: tensors of a source side become tensors of a target side. This rank's part of it, by one plan."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cached_property, partial
from math import prod
from typing import Literal

import torch

from shardwise.exchange import Delta, Exchange, Move, Proposal, ViewCache
from shardwise.exchange.delta_round import DeltaTraffic
from shardwise.exchange.messages import Tensors
from shardwise.exchange.moves import crosses_link, keeps
from shardwise.exchange.overflow import Losses, Lost, Overflow, refuse_loss
from shardwise.job.agree import tell_all
from shardwise.job.deltas import Changed, Masks
from shardwise.job.plan import ModelPlan, TensorInfo
from shardwise.job.side import Side
from shardwise.job.subtensor import Subtensor, subtensor_views
from shardwise.job.verify import key_part, worst_of_all
from shardwise.job.verify import verify as verify_moves
from shardwise.layout import local_shapes
from shardwise.planning import plan_parts
from shardwise.transports import GroupTransport, TransportChoice

Tell = Callable[[int, int], None] | None


class Job:
    """Carries out a plan, once or often: the links of a bucket in one exchange.

    `overflow`: "refuse" refuses casts that lose values, before anything is written where that can be; "count" leaves
    them to be looked up in `losses`; "allow" does not look. `shown` is how names stand in errors.
    """

    def __init__(
        self,
        transport: GroupTransport,
        plan: ModelPlan,
        operation: str,
        choice: TransportChoice = "auto",
        *,
        overflow: Overflow | Literal["count"] = "allow",
        shown: Callable[[str], str] = repr,
    ) -> None:
        self.transport, self.plan, self.operation, self._choice, self._shown = transport, plan, operation, choice, shown
        watched = () if overflow == "allow" else plan.overflowing
        self._reducing = [at for at in watched if plan.links[at].plan.reducing]
        self._reading = [at for at in watched if at not in self._reducing]
        self._counts = overflow == "count"
        self._moves = dict[int, Move]()  # of links that are moved again and again
        self._views = dict[int, tuple[Sequence[Move], ViewCache]]()  # of their buckets
        self._stamp: object = None  # of the memory that they are of
        self._written_buckets = 0  # of the last run: each from when all have agreed on it
        self.traffic = DeltaTraffic()  # of the last run
        self._delta_ends = dict[Delta, tuple[frozenset[int], frozenset[str]]]()

    @cached_property
    def losses(self) -> Losses:
        """What casts lost, as far as it was looked for."""
        return Losses()

    @property
    def written(self) -> Tensors:
        """The tensors that kept moves write to."""
        return [tensor for move in self._moves.values() for tensor in move.target]

    @property
    def touched(self) -> list[str]:
        """The targets of which the last run may have written cells on this rank."""
        begun = [self.plan.links[at] for bucket in self.plan.buckets()[: self._written_buckets] for at in bucket]
        return list(dict.fromkeys(one.link.target for one in begun if self.transport.me in one.plan.target))

    @property
    def total(self) -> int:
        """Bytes of all tensors: what progress is measured by."""
        return sum(planned.bytes for planned in self.plan.links)

    @cached_property
    def delivers(self) -> bool:
        """True where targets are handed over once they are filled, on any rank."""
        return any(tensor.delivered for tensor in self.plan.targets.values())

    def deliver(self, hand_over: Callable[[], None]) -> None:
        """Hand over what was filled last. Where ranks deliver, an error of one is raised on all."""

        def say() -> tuple[None, None]:
            hand_over()
            return None, None

        if self.delivers:
            tell_all(self.transport, self.operation, say)
        else:
            hand_over()

    @cached_property
    def _filled_by(self) -> list[list[str]]:
        """The targets that are complete after each bucket."""
        buckets = self.plan.buckets()
        last = {self.plan.links[at].link.target: number for number, bucket in enumerate(buckets) for at in bucket}
        return [[name for name, when in last.items() if when == number] for number in range(len(buckets))]

    def move(self, at: int, source: Tensors, target: Tensors) -> Move:
        """Of link number `at`, between these local tensors of the whole source and target."""
        planned, me = self.plan.links[at], self.transport.me
        ours, theirs = self.plan.sources[planned.link.source], self.plan.targets[planned.link.target]
        look = None
        if at in self._reducing:
            look = partial(self.losses.look, self._shown(planned.link.target), becomes=theirs.dtype)
        return Move.of(
            planned.plan,
            me,
            local_subtensors(source, ours, planned.link.source_view, me),
            local_subtensors(target, theirs, planned.link.target_view, me),
            planned.dtype,
            look,
        )

    def refuse_losses(self, memory: Callable[[str], Tensors]) -> None:
        """Refuse casts that lose values of this rank. What terms come to is known only later."""
        if self._counts or not self._reading:
            return
        losses = Losses()
        for at in self._reading:
            link = self.plan.links[at].link
            ours, theirs = self.plan.sources[link.source], self.plan.targets[link.target]
            tensors = local_subtensors(memory(link.source), ours, link.source_view, self.transport.me)
            losses.look(self._shown(link.target), tensors, theirs.dtype)
        refuse_loss(losses.per_tensor())

    def exchange(
        self,
        bucket: int,
        moves: Sequence[Move],
        proposal: Proposal,
        *,
        fresh: bool,
        views: ViewCache | None = None,
        part_of: Exchange | None = None,
        delta: Delta = False,
        changed: Sequence[Tensors | None] = (),
        verify: bool = False,
    ) -> Exchange:
        """The exchange of a bucket, not started yet.

        `changed`: what has changed in each move, if that is known. `verify`: both sides may be compared after it.
        """
        kind = torch.device(self.plan.links[self.plan.buckets()[bucket][0]].device)
        tensors = [tensor for move in moves for tensor in (*move.source, *move.target)]
        device = next((tensor.device for tensor in tensors if tensor.device.type == kind.type), kind)
        return Exchange(
            self.transport,
            proposal,
            [move._replace(changed=mask) for move, mask in zip(moves, changed, strict=True)] if any(changed) else moves,
            device=device,
            fresh=fresh,
            views=views,
            part_of=part_of,
            direct=self._direct,
            delta=delta,
            note=key_part() if verify else (),
        )

    @property
    def _direct(self) -> bool:
        """True if other ways than messages of the group may be used."""
        return self._choice != "group"

    def delta_ends(self, delta: Delta) -> tuple[frozenset[int], frozenset[str]]:
        """The numbers of links that this rank may send as deltas, and the targets that it may receive so."""
        if delta not in self._delta_ends:
            sending, receiving = set[int](), set[str]()
            for at, planned in enumerate(self.plan.links):
                if delta and keeps(planned.plan) and not self.plan.targets[planned.link.target].delivered:
                    peers = planned.peers(self.transport.me)
                    far = [any(crosses_link(self.transport, p, delta, direct=self._direct) for p in s) for s in peers]
                    sending.update([at] if far[0] else [])
                    receiving.update([planned.link.target] if far[1] else [])
            self._delta_ends[delta] = frozenset(sending), frozenset(receiving)
        return self._delta_ends[delta]

    def delta_bytes(self, delta: Delta) -> int:
        """Of copies of all that this rank may send as deltas: of each source once for every dtype that travels."""
        links = [self.plan.links[at] for at in self.delta_ends(delta)[0]]
        kept, me = {(one.link.source, one.dtype) for one in links}, self.transport.me
        shapes = {name: local_shapes(self.plan.sources[name].layout, me) for name, _ in kept}
        return sum(dtype.itemsize * prod(shape) for name, dtype in kept for shape in shapes[name])

    def conclude(self, moves: Sequence[Move], written: str, within: Exchange, *, verify: bool) -> None:
        """Once all is moved: refuse casts that lost what terms came to, on any rank; compare both sides."""
        links = self.plan.links
        if self._reducing:
            lost = [self._lost(links[at].link.source, links[at].link.target) for at in self._reducing]
            refuse_loss(worst_of_all(self.transport, lost, within.number), written)
        if verify:
            names = [planned.link.target for planned in links]
            labels = [self._label(planned.link.target) for planned in links]
            dtypes = [self.plan.targets[name].dtype for name in names]
            verify_moves(self.transport, moves, labels, dtypes, within, written)

    def _lost(self, source: str, target: str) -> Lost:
        name, dtypes = self._shown(target), (self.plan.sources[source].dtype, self.plan.targets[target].dtype)
        return Lost(name, *dtypes, self.losses[name])

    def _label(self, name: str) -> str:
        return self._shown(name) if self._shown is repr else self.plan.described(name)

    def run(
        self,
        source: Side,
        target: Side,
        *,
        check: Callable[[], None],
        fresh: bool = True,
        keep: bool = False,
        verify: bool = False,
        progress: Tell = None,
        delta: Delta = False,
        changed: Changed | None = None,
    ) -> None:
        """All buckets, one after the other, once every rank has checked its memory.

        `check` refuses memory that does not fit; it is called again when memory has moved since the last run. `fresh`:
        nobody sees the targets before all is done. `keep`: the next run will find the memory where it is now. `verify`:
        compare both sides at the end. Who calls tells progress of the end. `delta`, the same on all ranks: messages go
        as deltas, on links between hosts or "always". Then `changed` is asked once for each source that this rank sends
        on such links, by its name and the dtype that travels. It returns bool tensors like `source.memory(name)`, not 0
        where an element may differ from what the targets hold, or None if any may. See `changed_cells`.
        """
        self._written_buckets, self.traffic = 0, DeltaTraffic()
        masks = Masks(changed if delta else None, self.delta_ends(delta)[0], self.plan)

        def prepare() -> None:
            stamp = source.stamp(), target.stamp()
            if stamp != self._stamp:
                self._moves.clear()
                check()
            self._stamp = stamp if keep else None
            self.refuse_losses(source.memory)

        try:
            self._run(
                source, target, prepare, progress, fresh=fresh, keep=keep, verify=verify, delta=delta, masks=masks
            )
        except BaseException as error:  # also an interrupt
            if self._written_buckets and not fresh:
                error.add_note(f"in a {self.operation}: its target may be partly written")
            raise

    def _run(
        self,
        source: Side,
        target: Side,
        prepare: Callable[[], None],
        progress: Tell,
        *,
        fresh: bool,
        keep: bool,
        verify: bool,
        delta: Delta,
        masks: Masks,
    ) -> None:
        done, before, all_moves, exchange = 0, list[int](), list[Move](), None
        self.losses.clear()
        for number, bucket in enumerate(self.plan.buckets()):
            moves, changed, error = list[Move](), list[Tensors | None](), None
            try:  # the others have to hear of what goes wrong
                if number == 0:
                    prepare()
                elif progress is not None:
                    progress(done, self.total)
                source.sent([] if verify else before)  # verifying reads the sources again
                target.filled(self._filled_by[number - 1] if number else ())
                moves = self._moves_of(bucket, source, target, keep=keep)
                changed = [self._changed(at, masks) for at in bucket]
            except Exception as failure:
                error = failure
            exchange = self._carry_out(
                number, moves, error, changed, fresh=fresh, keep=keep, delta=delta, verify=verify
            )
            masks.drop(bucket)
            done, before = done + sum(self.plan.links[at].bytes for at in bucket), bucket
            all_moves += moves if verify else ()
        if exchange is not None:
            written = "Nothing was written" if fresh else "All tensors of the target were written"
            self.transport.queue.run(partial(self.conclude, all_moves, written, exchange, verify=verify))
        source.sent(range(len(self.plan.links)) if verify else before)
        self.deliver(lambda: target.filled(self._filled_by[-1] if self._filled_by else ()))

    def _moves_of(self, bucket: Sequence[int], source: Side, target: Side, *, keep: bool) -> list[Move]:
        moves = list[Move]()
        plan_parts([self.plan.links[at].plan for at in bucket if at not in self._moves], self.transport.me)
        for at in bucket:
            link = self.plan.links[at].link
            move = self._moves.get(at) or self.move(at, source.memory(link.source), target.memory(link.target))
            moves.append(move)
            if keep:
                self._moves[at] = move
            if self._counts and at in self._reading:
                self.losses.look(self._shown(link.target), move.source, self.plan.targets[link.target].dtype)
        return moves

    def _changed(self, at: int, masks: Masks) -> Tensors | None:
        """What has changed of the cells of link number `at`."""
        planned, me = self.plan.links[at], self.transport.me
        found = masks.of(at)
        if found is None:
            return None
        return local_subtensors(found, self.plan.sources[planned.link.source], planned.link.source_view, me)

    def _carry_out(
        self,
        bucket: int,
        moves: Sequence[Move],
        error: Exception | None,
        changed: Sequence[Tensors | None],
        *,
        fresh: bool,
        keep: bool,
        delta: Delta,
        verify: bool,
    ) -> Exchange:
        """One bucket. All ranks are in the same one, of the same plan; what goes wrong on one is raised on all."""
        fields = {"operation": self.operation, "plan": self.plan.fingerprint, "bucket": bucket, "delta": delta}
        views = self._views_of(bucket, moves) if keep else None
        proposal = Proposal(fields, error=error)
        exchange = self.exchange(
            bucket, moves, proposal, fresh=fresh, views=views, delta=delta, changed=changed, verify=verify
        )
        exchange.start(alone=self.transport.queue.idle)
        try:
            self.transport.queue.run(exchange.finish)
        finally:
            self._written_buckets += exchange.writing
            self.traffic += exchange.traffic
        return exchange

    def _views_of(self, bucket: int, moves: Sequence[Move]) -> ViewCache:
        """Those of the last time, unless a move is another one now."""
        before, views = self._views.get(bucket, ((), ViewCache()))
        if len(before) != len(moves) or any(a is not b for a, b in zip(before, moves, strict=True)):
            views = ViewCache()
        self._views[bucket] = moves, views
        return views


def local_subtensors(tensors: Tensors, whole: TensorInfo, view: Subtensor, me: int) -> Tensors:
    """The cells of a view in the local tensors of an owner of the whole."""
    if not tensors:  # nothing, or only tensors without cells
        return [torch.empty(shape, dtype=whole.dtype, device=whole.device) for shape in local_shapes(whole.layout, me)]
    return subtensor_views(tensors, whole.layout, view, me)
