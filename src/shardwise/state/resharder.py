"""Resharder: plan once, then move the current values of one model into another, step after step."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch.autograd.graph import increment_version

from shardwise.containers.memory import check_written, shared
from shardwise.exchange import Move
from shardwise.exchange.overflow import Overflow, check_overflow
from shardwise.job.agree import agreed, together
from shardwise.job.casting import Change, check_changes
from shardwise.job.casts import Cast, Into
from shardwise.job.job import Mover, Tell, check_local, check_verifiable, memory_of
from shardwise.job.names import Rename
from shardwise.job.plan import ModelPlan, Tensor
from shardwise.job.progress import Progress, check_progress, shown
from shardwise.job.remap import Remap, links
from shardwise.job.session import group_transport
from shardwise.job.side import Said, is_tensor, refuse_several_jobs, said, tensors_of
from shardwise.job.work import check_owners
from shardwise.state.traverse import dotted, flatten_state_dict
from shardwise.transports import GroupTransport, TransportChoice

StateDict = Mapping[Any, Any]


class Resharder:
    """Moves the values of a source state dict into the tensors of a target state dict, in place.

    Every rank of the group makes one, and calls `run` together. A rank that has nothing of one side passes None for it;
    a tensor of which it has nothing may be None, too. `rename`: the names that source tensors have in the target, by a
    mapping or rules with stars, or a function. `remap`: Concat, Stack and Transposed, where tensors are put together or
    apart. `cast=True`: float64, float32, float16 and bfloat16 become what the target has; other dtypes, such as those
    of quantised codes, only by rules [(name, dtype), ...] with the full name of the target. `overflow="refuse"`: write
    nothing where a value is beyond the range of its target; "allow" casts it. `strict=False`: sources without a target
    are left out. `max_bytes`: stage no more than this at a time. `verify`: compare, and write only if all is well.
    `plan`: a file that must be of this plan. `transport`: as in `reshard`.
    """

    def __init__(
        self,
        source: StateDict | None,
        target: StateDict | None,
        *,
        group: dist.ProcessGroup | None = None,
        rename: Rename = None,
        remap: Iterable[Remap] = (),
        cast: bool | Cast = False,
        overflow: Overflow = "refuse",
        strict: bool = True,
        max_bytes: int | None = None,
        hosts: Any = None,
        verify: bool = False,
        plan: str | None = None,
        progress: Progress = None,
        transport: TransportChoice = "auto",
    ) -> None:
        self._verify, self._progress, self._transport = verify, progress, group_transport(group)
        self._source, self._target = dict[str, Any](), dict[str, Any]()

        def say() -> tuple[Said | None, Said | None]:
            for tensors, given in (self._source, source), (self._target, target):
                tensors.update({} if given is None else _tensors(given))
            return tuple(
                None if given is None else said(tensors, self._transport)
                for tensors, given in ((self._source, source), (self._target, target))
            )  # type: ignore[return-value]

        def sides(told: Mapping[int, tuple[Said | None, Said | None]]) -> Sides:
            sources, targets = ({rank: both[side] for rank, both in told.items()} for side in (0, 1))
            refuse_several_jobs(sources, self._transport)
            return tensors_of(sources, "source"), tensors_of(targets, "target")

        known = together("Resharder", say, sides, group=group)

        def make() -> ModelPlan:
            check_progress(progress)
            self._transport.check_choice(transport)
            check_overflow(overflow)
            self.plan = _plan(self._transport, known, rename, remap, Into.of(cast), strict, max_bytes, hosts)
            if verify:
                check_verifiable(self.plan)
            if plan is not None:
                self.plan.check(plan)
            self._check()
            return self.plan

        same = {"verify": verify, "cast": str(cast), "overflow": overflow, "strict": strict, "max_bytes": max_bytes}
        same |= {"transport": transport}
        agreed("Resharder", make, group=group, **same)
        self._mover = Mover(self._transport, self.plan, "sync", transport, overflow=overflow)
        self._moves = dict[int, tuple[list[Any], Move]]()  # by entry, with where its memory was
        self._written, self._inference = list[torch.Tensor](), False

    plan: ModelPlan

    def __repr__(self) -> str:
        return f"Resharder({self.plan!r})"

    def run(self) -> None:
        """Move the current values. Every rank of the group calls."""
        first = self._transport.me == self._transport.owners[0]
        with torch.no_grad(), shown(self._progress, self._mover.total, "sync", here=first) as progress:
            if self._verify:
                self._verified(progress)
                return
            try:
                self._mover.run(self._bucket, check=self._ready, fresh=False, again=True, progress=progress)
            finally:
                increment_version(self._written)  # autograd does not see it

    def _ready(self) -> None:
        """All moves, before the first is made: anew where the memory of a tensor has changed since the last time."""
        changed = False
        for at, entry in enumerate(self.plan.entries):
            source = memory_of(self._source.get(entry.link.source), apart=False)
            target = memory_of(self._target.get(entry.link.target), apart=False)
            now = [(t.data_ptr(), t.dtype, t.shape, t.stride()) for t in (*source, *target)]
            if at in self._moves and self._moves[at][0] == now:
                continue
            if not changed:  # all of them: what was apart may not be so any more
                self._check()
            source, target = ([t.detach() for t in side] for side in (source, target))
            self._moves[at], changed = (now, self._mover.move(at, source, target)), True
        if changed:
            self._written = [t for _, move in self._moves.values() for t in move.target]
            self._inference = any(tensor.is_inference() for tensor in self._written)
        if self._inference:  # whether they may be written depends on the mode of this call
            self._check()
        self._mover.refuse_losses(self._memory)

    def _bucket(self, entries: Sequence[int]) -> list[Move]:
        return [self._moves[at][1] for at in entries]

    def _verified(self, progress: Tell) -> None:
        """Into tensors of our own first: those of the target are written once all ranks have found them right."""

        def check() -> None:
            self._check()
            self._mover.refuse_losses(self._memory)

        found = self._mover.into_fresh(
            self._memory,
            lambda name: next((t.device for t in memory_of(self._target.get(name))), torch.device("cpu")),
            check=check,
            verify=True,
            progress=progress,
        )
        try:
            for name in self.plan.targets:
                for ours, theirs in zip(memory_of(self._target.get(name)), found[name], strict=False):
                    ours.copy_(theirs)  # which autograd does see
        except BaseException as error:
            error.add_note("in a sync: its target may be partly written")
            raise

    def _memory(self, source: str) -> list[torch.Tensor]:
        return memory_of(self._source.get(source))

    def _check(self) -> None:
        """Refuse what this rank has, where it is not what the layouts say, or cannot be read and written apart."""
        me, sides = self._transport.me, list[dict[str, list[torch.Tensor]]]()
        for side, values, tensors in (
            ("target", self._target, self.plan.targets),
            ("source", self._source, self.plan.sources),
        ):
            found = {name: memory_of(values.get(name)) for name in tensors}
            for name, memory in found.items():
                check_local(f"{name!r} of the {side}", memory, tensors[name], me)
            sides.append(found)
        for name, memory in sides[0].items():
            for tensor in memory:
                check_written(tensor, f"{name!r} of the target")
        self._check_apart(*sides)

    def _check_apart(self, targets: dict[str, list[torch.Tensor]], sources: dict[str, list[torch.Tensor]]) -> None:
        """Refuse memory that would be written twice, or read after it was written.

        But tied targets have all in common, and what becomes itself may do so where it is.
        """
        written = [("target", name, tensor) for name, memory in targets.items() for tensor in memory]
        read = [("source", name, tensor) for name, memory in sources.items() for tensor in memory]
        both = [*written, *([] if self._verify else read)]  # verified values are written once all are read
        for a, b in shared([tensor for *_, tensor in written], [tensor for *_, tensor in both[len(written) :]]):
            (_, name, ours), (side, other, theirs) = both[a], both[b]
            same = ours.data_ptr() == theirs.data_ptr() and ours.shape == theirs.shape
            if not same or (side == "source" and (other, name) not in self.plan.kept):
                raise ValueError(f"{name!r} of the target shares memory with {other!r} of the {side}: give it its own")


def _tensors(state_dict: StateDict) -> dict[str, Any]:
    """The tensors of a state dict by name; None stands for one of which this rank has nothing."""
    flat, paths = flatten_state_dict(state_dict)
    found = {name: value for name, value in flat.items() if value is None or is_tensor(value)}
    several = next((dotted(paths[name]) for name in found if dotted(paths[name]) != name), None)
    if several is not None:  # which of them is meant by the name would depend on the order of the dicts
        raise ValueError(f"two leaves of a state dict are both called {several!r}: give one of them another key")
    return found


Sides = tuple[dict[str, Tensor], dict[str, Tensor]]


def _plan(
    transport: GroupTransport,
    known: Sides,
    rename: Rename,
    remap: Iterable[Remap],
    cast: Into,
    strict: bool,
    max_bytes: int | None,
    hosts: Any,
) -> ModelPlan:
    for side, tensors in zip(("source", "target"), known, strict=True):
        for name, tensor in tensors.items():
            check_owners(transport, f"{name!r} of the {side},", tensor.layout)
    sources, targets = known
    shapes = ({name: tensor.shape for name, tensor in side.items()} for side in known)
    found = links(*shapes, rename=rename, remap=remap, strict=strict)
    cast.check_used(targets)
    pairs = ((link.source, link.target) for link in found)
    changes = [Change(one, other, sources[one].dtype, targets[other].dtype) for one, other in pairs]
    check_changes(changes, lambda change: cast.check(change, sources, targets))
    return ModelPlan.of(found, sources, targets, max_bytes=max_bytes, hosts=hosts)
