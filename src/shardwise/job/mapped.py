"""A job whose sources are mapped into this process: every rank copies what it needs, and nobody sends anything."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import NamedTuple

import numpy as np
import torch

from shardwise.exchange import view_of
from shardwise.exchange.buffers import copy_all
from shardwise.exchange.messages import Tensors, across
from shardwise.exchange.overflow import Losses, refuse_loss
from shardwise.geometry import Window
from shardwise.job.job import local_subtensors
from shardwise.job.plan import ModelPlan
from shardwise.job.side import Side

MappedSources = Callable[[int, str], Tensors]  # the local tensors of an owner, by the name of the whole


class Part(NamedTuple):
    """The cells of a link that come from one owner: views of the target, and where they lie in the owner's tensors."""

    owner: int
    targets: Tensors
    windows: list[Window]


class MappedJob:
    """This owner's part of a plan, from the memory of all source owners. Partial sums are not for it.

    It can run often, if the sources have the same strides every time. `keep`: the target is where it was in the last
    run, unless its stamp differs.
    """

    def __init__(self, plan: ModelPlan, me: int, target: Side, *, keep: bool = False) -> None:
        if any(info.layout.op for info in (*plan.sources.values(), *plan.targets.values())):
            raise ValueError("partial sums are reduced by an exchange: they cannot be copied")
        self.plan, self._me, self._target, self._keep = plan, me, target, keep
        self._last = {planned.link.target: at for at, planned in enumerate(plan.links)}
        self._parts, self._stamp = dict[int, list[Part]](), None

    _stamp: object  # of the memory that the parts are of

    def refuse_losses(self, sources: MappedSources) -> None:
        """Refuse casts that lose values, before anything is written."""
        self._forget_what_moved()
        losses = Losses()
        for at in self.plan.overflowing:
            name = self.plan.links[at].link.target
            losses.look(repr(name), self._views(at, sources)[1], self.plan.targets[name].dtype)
        refuse_loss(losses.per_tensor())

    def run(self, sources: MappedSources) -> None:
        """Copy all cells of this owner, tensor by tensor."""
        self._forget_what_moved()
        for at, planned in enumerate(self.plan.links):
            copy_all(*self._views(at, sources))
            if self._last[planned.link.target] == at:
                self._target.filled([planned.link.target])

    def _forget_what_moved(self) -> None:
        stamp = self._target.stamp()
        if not self._keep or stamp != self._stamp:
            self._parts.clear()
        self._stamp = stamp

    def _views(self, at: int, sources: MappedSources) -> tuple[Tensors, Tensors]:
        """The cells of a link here, and in the memory of their owners."""
        link = self.plan.links[at].link
        here, there, whole = list[torch.Tensor](), list[torch.Tensor](), self.plan.sources[link.source]
        if at not in self._parts:
            self._parts[at] = list(self._parts_of(at, sources))
        for owner, targets, windows in self._parts[at]:
            theirs = local_subtensors(sources(owner, link.source), whole, link.source_view, owner)
            here += targets
            there += [view_of(window, theirs) for window in windows]
        return here, there

    def _parts_of(self, at: int, sources: MappedSources) -> Iterator[Part]:
        planned, me = self.plan.links[at], self._me
        link, whole = planned.link, self.plan.sources[planned.link.source]
        if me not in planned.plan.target:
            return
        memory = self._target.memory(link.target)
        ours = local_subtensors(memory, self.plan.targets[link.target], link.target_view, me)
        strides = tuple(tensor.stride() for tensor in ours)
        for step, round_, copies in planned.plan.for_owner(me).copies.stages():
            for owner in np.unique(copies.source[copies.target == me]).tolist():
                theirs = local_subtensors(sources(owner, link.source), whole, link.source_view, owner)
                there = tuple(tensor.stride() for tensor in theirs)
                pairs = across(planned.plan, (step, round_), (owner, me), there, strides)
                yield Part(owner, [view_of(pair.there, ours) for pair in pairs], [pair.here for pair in pairs])
