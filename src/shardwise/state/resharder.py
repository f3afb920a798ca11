"""Resharder: plan once, then move the current values of one model into another, step after step."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch.autograd.graph import increment_version

from shardwise.exchange import Move, in_words
from shardwise.state.leaves import Known, is_tensor, known_of, merged, tensor_for
from shardwise.state.links import Link, Remap, links
from shardwise.state.moving import Mover, check_local, check_owners, memory_of
from shardwise.state.names import Rename
from shardwise.state.plan import ModelPlan, Tensor
from shardwise.state.progress import Progress, check_progress, shown
from shardwise.state.traverse import flatten_state_dict
from shardwise.tensor.output import local_shapes
from shardwise.tensor.together import together
from shardwise.tensor.verify import compared
from shardwise.tensor.wiring import group_wire

StateDict = Mapping[Any, Any]
Told = tuple[dict[str, Known | None] | None, dict[str, Known | None] | None]


class Resharder:
    """Moves the values of a source state dict into the tensors of a target state dict, in place.

    Every rank of the group makes one, and calls `run` together. A rank that has nothing of one side passes None for it;
    a tensor of which it has nothing may be None, too. `rename`: the names that source tensors have in the target, by a
    mapping or rules with stars, or a function. `remap`: Concat, Stack and Transposed, where tensors are put together or
    apart. `cast`: dtypes may differ. `strict=False`: sources without a target are left out. `max_bytes`: stage no more
    than this at a time. `verify`: compare, and write only if all is well. `plan`: a file that must be of this plan.
    """

    def __init__(
        self,
        source: StateDict | None,
        target: StateDict | None,
        *,
        group: dist.ProcessGroup | None = None,
        rename: Rename = None,
        remap: Iterable[Remap] = (),
        cast: bool = False,
        strict: bool = True,
        max_bytes: int | None = None,
        hosts: Any = None,
        verify: bool = False,
        plan: str | None = None,
        progress: Progress = None,
    ) -> None:
        self._group, self._verify, self._progress = group, verify, progress
        self._source, self._target = _tensors(source), _tensors(target)
        known = together("Resharder", self._say, _sides, group=group)

        def make() -> ModelPlan:
            sources, targets = known
            for side, tensors in ("source", sources), ("target", targets):
                check_owners(group_wire(group).owners, side, {name: t.layout for name, t in tensors.items()})
            shapes = ({name: t.shape for name, t in side.items()} for side in known)
            check_progress(progress)
            found = links(*shapes, rename=rename, remap=list(remap), strict=strict)
            if not cast:
                _check_dtypes(found, sources, targets)
            made = ModelPlan.of(found, sources, targets, max_bytes=max_bytes, hosts=hosts)
            if plan is not None:
                made.check(plan)
            self.plan = made
            self._check_local()
            return made

        together("Resharder", lambda: make().fingerprint, _same_plan, group=group, verify=verify)
        self._mover = Mover(group_wire(group), self.plan, "sync")
        self._moves = dict[int, tuple[list[Any], Move]]()  # by entry, with where its memory was
        self._written = list[torch.Tensor]()

    plan: ModelPlan

    def run(self) -> None:
        """Move the current values. Every rank of the group calls."""
        with torch.no_grad(), shown(self._progress, self._mover.total, "sync") as progress:
            if self._verify:
                self._staged(progress)
            else:
                self._mover.run(self._ready, self._bucket, fresh=False, progress=progress)
                increment_version(self._written)  # autograd does not see it

    def _ready(self) -> None:
        """All moves, before the first is made: anew where the memory of a tensor has changed since the last time."""
        sources, targets, changed = self._source or {}, self._target or {}, False
        for at, entry in enumerate(self.plan.entries):
            link = entry.link
            source = memory_of(sources.get(link.source), apart=False)
            target = memory_of(targets.get(link.target), apart=False)
            now = [(t.data_ptr(), t.dtype, t.shape, t.stride()) for t in (*source, *target)]
            if at in self._moves and self._moves[at][0] == now:
                continue
            self._check(link.source, "source", source, self.plan.sources)
            self._check(link.target, "target", target, self.plan.targets)
            source, target = ([t.detach() for t in side] for side in (source, target))
            self._moves[at], changed = (now, self._mover.move(at, source, target)), True
        if changed:
            self._written = [t for _, move in self._moves.values() for t in move.target]

    def _bucket(self, entries: Sequence[int]) -> list[Move]:
        return [self._moves[at][1] for at in entries]

    def _staged(self, progress: Callable[[int, int], None] | None) -> None:
        """Into tensors of our own first: those of the target are written once all ranks have found them right."""
        me, fresh = self._mover.wire.me, dict[str, list[torch.Tensor]]()
        for name, t in self.plan.targets.items():
            shapes = local_shapes(t.layout, me)
            fresh[name] = [torch.empty(shape, dtype=t.dtype, device=t.device) for shape in shapes]
        moves = dict[int, Move]()

        def bucket(entries: Sequence[int]) -> list[Move]:
            for at in entries:
                link = self.plan.entries[at].link
                source = memory_of((self._source or {}).get(link.source))
                moves[at] = self._mover.move(at, source, fresh[link.target])
            return [moves[at] for at in entries]

        self._mover.run(self._check_local, bucket, fresh=True, progress=progress)
        names = [entry.link.target for entry in self.plan.entries]
        dtypes = [self.plan.targets[name].dtype for name in names]
        compared(self._mover.wire, [moves[at] for at in range(len(names))], names, dtypes)
        for name, value in (self._target or {}).items():
            for ours, theirs in zip(memory_of(value), fresh[name], strict=False):
                ours.copy_(theirs)  # which autograd does see

    # --- what is known -----------------------------------------------------------------------------------------------

    def _say(self) -> Told:
        return tuple(
            None if side is None else {name: None if v is None else known_of(v) for name, v in side.items()}
            for side in (self._source, self._target)
        )  # type: ignore[return-value]

    def _check_local(self) -> None:
        """Refuse what this rank has, where it is not what the layouts say."""
        sides = ("source", self._source, self.plan.sources), ("target", self._target, self.plan.targets)
        for side, values, tensors in sides:
            for name in tensors:
                self._check(name, side, memory_of((values or {}).get(name)), tensors)

    def _check(self, name: str, side: str, memory: list[torch.Tensor], tensors: Mapping[str, Tensor]) -> None:
        t = tensors[name]
        check_local(name, side, memory, local_shapes(t.layout, group_wire(self._group).me), t.dtype)


def _tensors(state_dict: StateDict | None) -> dict[str, Any] | None:
    """The tensors of a state dict by name; None stands for one of which this rank has nothing."""
    if state_dict is None:
        return None
    flat, _ = flatten_state_dict(state_dict)
    return {name: value for name, value in flat.items() if value is None or is_tensor(value)}


Sides = tuple[dict[str, Tensor], dict[str, Tensor]]


def _sides(told: Mapping[int, Told]) -> Sides:
    found = []
    for number, side in enumerate(("source", "target")):
        known = merged({rank: both[number] for rank, both in told.items()}, side)
        found.append({name: tensor_for(*one) for name, one in known.items()})
    return found[0], found[1]


def _same_plan(told: Mapping[int, str]) -> None:
    if len(set(told.values())) > 1:
        first = next(iter(told.values()))
        others = [rank for rank, fingerprint in told.items() if fingerprint != first]
        raise ValueError(
            f"{in_words(others)} plans something else than rank {next(iter(told))}: "
            f"give the same rename=, remap=, strict=, max_bytes= and hosts= on all ranks"
        )


def _check_dtypes(found: Iterable[Link], sources: Mapping[str, Tensor], targets: Mapping[str, Tensor]) -> None:
    for link in found:
        ours, theirs = sources[link.source].dtype, targets[link.target].dtype
        if ours != theirs:
            raise ValueError(f"{link.source!r} is {ours}, but {link.target!r} is {theirs}: cast=True casts")
