"""A job whose sources are mapped into this process: every rank copies what it needs, and nobody sends anything."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import numpy as np

from shardwise.exchange import view_of
from shardwise.exchange.buffers import copy_all
from shardwise.exchange.messages import Tensors, across
from shardwise.exchange.overflow import Losses, refuse_loss
from shardwise.job.job import local_subtensors
from shardwise.job.plan import ModelPlan, PlannedLink
from shardwise.job.side import Side

MappedSources = Callable[[int, str], Tensors]  # the local tensors of an owner, by the name of the whole


class MappedJob:
    """This owner's part of a plan, from the memory of all source owners. Partial sums are not for it."""

    def __init__(self, plan: ModelPlan, me: int, sources: MappedSources, target: Side) -> None:
        if any(info.layout.op for info in (*plan.sources.values(), *plan.targets.values())):
            raise ValueError("partial sums are reduced by an exchange: they cannot be copied")
        self._plan, self._me, self._sources, self._target = plan, me, sources, target

    def refuse_losses(self) -> None:
        """Refuse casts that lose values, before anything is written."""
        losses = Losses()
        for at in self._plan.overflowing:
            planned = self._plan.links[at]
            _, theirs = self._views(planned)
            losses.look(repr(planned.link.target), theirs, self._plan.targets[planned.link.target].dtype)
        refuse_loss(losses.per_tensor())

    def run(self) -> None:
        """Copy all cells of this owner, tensor by tensor."""
        last = {planned.link.target: at for at, planned in enumerate(self._plan.links)}
        for at, planned in enumerate(self._plan.links):
            copy_all(*self._views(planned))
            if last[planned.link.target] == at:
                self._target.filled([planned.link.target])

    def _views(self, planned: PlannedLink) -> tuple[Tensors, Tensors]:
        """The cells of a link here, and in the memory of their owners."""
        here, there = list[Tensors](), list[Tensors]()
        for ours, theirs in self._pairs(planned):
            here.append(ours)
            there.append(theirs)
        return [one for some in here for one in some], [one for some in there for one in some]

    def _pairs(self, planned: PlannedLink) -> Iterator[tuple[Tensors, Tensors]]:
        link, me = planned.link, self._me
        whole = self._plan.sources[link.source]
        if me not in planned.plan.target:
            return
        memory = self._target.memory(link.target)
        ours = local_subtensors(memory, self._plan.targets[link.target], link.target_view, me)
        strides = tuple(tensor.stride() for tensor in ours)
        for step, round_, copies in planned.plan.for_owner(me).copies.stages():
            for owner in np.unique(copies.source[copies.target == me]).tolist():
                theirs = local_subtensors(self._sources(owner, link.source), whole, link.source_view, owner)
                there = tuple(tensor.stride() for tensor in theirs)
                pairs = across(planned.plan, (step, round_), (owner, me), there, strides)
                yield (
                    [view_of(pair.there, ours) for pair in pairs],
                    [view_of(pair.here, theirs) for pair in pairs],
                )
