"""reshard_state_dict: all tensors of a state dict to other shardings, in as few exchanges as the memory allows."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist

from shardwise.containers.container import Kind
from shardwise.exchange.overflow import Overflow, check_overflow
from shardwise.job.agree import agreed, together
from shardwise.job.casting import Change, check_change, check_changes
from shardwise.job.casts import Asked, Cast, Casts
from shardwise.job.job import Mover, check_local, check_verifiable, memory_of
from shardwise.job.plan import ModelPlan, Tensor
from shardwise.job.progress import Progress, check_progress, shown
from shardwise.job.remap import Link
from shardwise.job.session import group_transport
from shardwise.job.side import Said, is_tensor, refuse_several_jobs, said, tensors_of
from shardwise.job.subtensor import View
from shardwise.job.work import check_owners
from shardwise.state.targets import Targets, kinds_for
from shardwise.state.traverse import FLATTEN_MAPPING, flatten_state_dict, unflatten_state_dict
from shardwise.torch_internals.memory import storage_of
from shardwise.transports import GroupTransport, TransportChoice

StateDict = Mapping[Any, Any]
OPERATION = "reshard_state_dict"


def reshard_state_dict(
    state_dict: StateDict | None,
    to: Targets,
    *,
    mesh: Any = None,
    group: dist.ProcessGroup | None = None,
    dtype: Cast = None,
    overflow: Overflow = "refuse",
    max_bytes: int | None = None,
    hosts: Any = None,
    free: bool = False,
    verify: bool = False,
    progress: Progress = None,
    transport: TransportChoice = "auto",
) -> dict[str, Any]:
    """A state dict with its tensors in other shardings. Every rank of the group calls; None where it has nothing of it.

    `to` says for every tensor what `reshard` takes as a target: as a mapping from names, as rules [(pattern, target),
    ...] of which the first that fits holds (* ? [abc] match as in file names), as a function of the name, or as a state
    dict to look like. None leaves a tensor as it is. With `mesh`, placements will do: [("*.q_proj.weight", "S0"), ("*",
    "R")].

    DTensors, ShardedTensors and plain tensors (which all ranks have alike) are moved; everything else keeps its place.
    Names are those of nested dicts and lists with dots. `dtype`: cast floating point tensors, or some of them by rules,
    as `cast` of `checkpoint.convert` does. `free`: give the memory of each source tensor back as soon as it was sent
    (after the comparison with `verify`). `overflow`, `verify`, `max_bytes`, `hosts`, `transport`: as in `reshard`.
    `progress`: a function of (bytes done, bytes in all), or "bar".
    """
    flat, paths, sources = _heard(state_dict, group)
    over, kinds = group_transport(group), dict[str, Kind]()

    def make() -> ModelPlan:
        check_progress(progress)
        over.check_choice(transport)
        kinds.update(kinds_for(sources, to, mesh, over, group))
        check_overflow(overflow)
        made = _plan(over, sources, kinds, Casts.of(dtype, "dtype="), max_bytes, hosts)
        if verify:
            check_verifiable(made)
        return made

    same = {"verify": verify, "free": free, "max_bytes": max_bytes, "dtype": str(dtype), "overflow": overflow}
    same |= {"transport": transport}
    made = agreed(OPERATION, make, group=group, **same)
    mover = Mover(over, made, OPERATION, transport, overflow=overflow)
    freeing = Freeing(mover, flat) if free else None

    def check() -> None:
        for name, source in made.sources.items():
            check_local(f"{name!r} of the state dict", memory_of(flat.get(name)), source, over.me)
        mover.refuse_losses(lambda name: memory_of(flat.get(name)))
        if freeing is not None:
            freeing.look()

    with torch.no_grad(), shown(progress, mover.total, "reshard", here=over.me == over.owners[0]) as tell:
        found = mover.into_fresh(
            lambda name: memory_of(flat.get(name)),
            lambda name: kinds[name].device or torch.device(made.targets[name].device),
            check=check,
            sent=None if freeing is None else freeing.sent,
            verify=verify,
            progress=tell,
        )
    moved = {name: kinds[name].closed(kinds[name].dressed(local)) for name, local in found.items()}
    return unflatten_state_dict({name: moved.get(name, flat.get(name)) for name in paths}, paths)


def _heard(
    state_dict: StateDict | None, group: dist.ProcessGroup | None
) -> tuple[dict[str, Any], FLATTEN_MAPPING, dict[str, Tensor]]:
    """The flat state dict of this rank, its nested names, and what is known of the tensors of all ranks."""
    flat, paths = dict[str, Any](), FLATTEN_MAPPING()

    def say() -> Said | None:
        if state_dict is None:
            return None
        found = flatten_state_dict(state_dict)
        flat.update(found[0])
        paths.update(found[1])
        return said(flat, group_transport(group))

    def sides(told: Mapping[int, Said | None]) -> tuple[dict[str, Tensor], int, bool]:
        holder = next((rank for rank, one in told.items() if one is not None), -1)
        refuse_several_jobs(told, group_transport(group))
        return tensors_of(told, "state dict"), holder, None in told.values()

    sources, holder, lacking = together(OPERATION, say, sides, group=group)
    if lacking:  # somebody has to learn the rest from one who has it
        rest = together(
            OPERATION,
            lambda: _others(flat, paths) if group_transport(group).me == holder else ({}, {}),
            lambda told: told[holder],
            group=group,
        )
        flat, paths = rest if state_dict is None else (flat, paths)
    return flat, paths, sources


def _others(flat: Mapping[str, Any], paths: FLATTEN_MAPPING) -> tuple[dict[str, Any], FLATTEN_MAPPING]:
    """All but the tensors."""
    return {name: value for name, value in flat.items() if not is_tensor(value)}, paths


def _plan(
    transport: GroupTransport,
    sources: Mapping[str, Tensor],
    kinds: Mapping[str, Kind],
    casts: Casts,
    max_bytes: int | None,
    hosts: Any,
) -> ModelPlan:
    targets, named, casts = dict[str, Tensor](), set[str](), casts.among(kinds)
    for name, kind in kinds.items():
        source = sources[name]
        check_owners(transport, f"{name!r}, as it is,", source.layout)
        check_owners(transport, f"{name!r}, as it is to be,", kind.layout)
        asked = casts.asked(name, source.dtype) or Asked(source.dtype, named=False)
        named |= {name} if asked.named else set()
        becomes = asked.dtype
        targets[name] = Tensor(source.shape, becomes, kind.layout, (kind.device or torch.device(source.device)).type)
    changes = [Change(name, name, sources[name].dtype, target.dtype) for name, target in targets.items()]
    check_changes(changes, lambda change: check_change(change, sources, named=change.target in named))
    if unused := casts.unused(targets):
        raise ValueError(f"dtype= has {unused[0]!r}, which fits no tensor that is moved")
    found = [Link(name, name, View.whole(t.shape), View.whole(t.shape)) for name, t in targets.items()]
    moved = {name: sources[name] for name in targets}
    return ModelPlan.of(found, moved, targets, max_bytes=max_bytes, hosts=hosts)


class Freeing:
    """Gives the memory of sources back, once nothing will read it any more: tied weights share it."""

    def __init__(self, mover: Mover, flat: Mapping[str, Any]) -> None:
        self._plan, self._flat = mover.plan, flat
        self._last = dict[int, int]()  # by storage, the last entry that reads it
        self._held = dict[int, list[torch.Tensor]]()  # what was sent of a storage that is still to be read

    def look(self) -> None:
        """Find out who reads what. What stays as it is, is never given back."""
        for at, entry in enumerate(self._plan.entries):
            for tensor in memory_of(self._flat.get(entry.link.source), apart=False):
                self._last[storage_of(tensor)] = at
        for name, value in self._flat.items():
            if is_tensor(value) and name not in self._plan.sources:
                for tensor in memory_of(value):
                    if tensor.layout == torch.strided:
                        self._last[storage_of(tensor)] = len(self._plan.entries)

    def sent(self, entries: Sequence[int]) -> None:
        """These will not be read again."""
        for at in entries:
            for tensor in memory_of(self._flat.get(self._plan.entries[at].link.source), apart=False):
                storage = storage_of(tensor)
                self._held.setdefault(storage, []).append(tensor)
                if self._last[storage] <= at:
                    _give_back(self._held.pop(storage))


def _give_back(tensors: list[torch.Tensor]) -> None:
    """The memory of tensors that were sent, unless it is a part of something else; the tensors are empty then."""
    storage = tensors[0].untyped_storage()
    parts = {t.data_ptr(): t.numel() * t.element_size() for t in tensors if t.is_contiguous()}
    if storage.resizable() and sum(parts.values()) >= storage.nbytes():  # views of it keep it alive
        storage.resize_(0)
    for tensor in tensors:
        tensor.data = tensor.data.new_empty(0)
