"""reshard_state_dict: all tensors of a state dict to other shardings, in as few exchanges as the memory allows."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist

from shardwise.dtensor import is_mesh, is_placement, storage_of
from shardwise.exchange import Move
from shardwise.layout import Layout, Partial, Replicate, Shard, StridedShard
from shardwise.state.leaves import Known, Plain, is_tensor, known_of, merged, tensor_for
from shardwise.state.links import Link
from shardwise.state.moving import Mover, check_local, check_owners, memory_of
from shardwise.state.names import matched, missing
from shardwise.state.plan import ModelPlan, Tensor
from shardwise.state.progress import Progress, check_progress, shown
from shardwise.state.traverse import FLATTEN_MAPPING, flatten_state_dict, unflatten_state_dict
from shardwise.state.view import View
from shardwise.tensor.kinds import Kind, is_sharded, target_kind
from shardwise.tensor.output import local_shapes
from shardwise.tensor.together import together
from shardwise.tensor.verify import compared
from shardwise.tensor.wiring import group_wire

StateDict = Mapping[Any, Any]
Targets = Mapping[Any, Any] | Sequence[tuple[str, Any]] | Callable[[str], Any]


def reshard_state_dict(
    state_dict: StateDict | None,
    to: Targets,
    *,
    mesh: Any = None,
    group: dist.ProcessGroup | None = None,
    dtype: torch.dtype | None = None,
    max_bytes: int | None = None,
    hosts: Any = None,
    free: bool = False,
    verify: bool = False,
    progress: Progress = None,
) -> dict[str, Any]:
    """A state dict with its tensors in other shardings. Every rank of the group calls; None where it has nothing of it.

    `to` says for every tensor what `reshard` takes as a target: as a mapping from names, as rules [(pattern, target),
    ...] of which the first that fits holds (stars match anything), as a function of the name, or as a state dict to
    look like. None leaves a tensor as it is. With `mesh`, placements will do: [("*.q_proj.weight", "S0"), ("*", "R")].

    DTensors, ShardedTensors and plain tensors (which all ranks have alike) are moved; everything else keeps its place.
    Names are those of nested dicts and lists with dots. `dtype`: cast floating point tensors. `free`: give the memory
    of each source tensor back as soon as it was sent. `verify`, `max_bytes`, `hosts`: as in `reshard`. `progress`: a
    function of (bytes done, bytes in all), or "bar".
    """
    wire = group_wire(group)
    flat, paths = flatten_state_dict(state_dict) if state_dict is not None else ({}, FLATTEN_MAPPING())

    def say() -> Said | None:
        if state_dict is None:
            return None
        others = {name: value for name, value in flat.items() if value is not None and not is_tensor(value)}
        known = {name: None if v is None else known_of(v) for name, v in flat.items() if v is None or is_tensor(v)}
        return known, others, paths

    sources, others, told = together("reshard_state_dict", say, _merged, group=group)
    if state_dict is None:
        flat, paths = others, told
    kinds = dict[str, Kind]()

    def make() -> str:
        check_progress(progress)
        asked = Asked(to, mesh, list(sources))
        for name, source in sources.items():
            target = asked.of(name)
            if target is not None:
                kinds[name] = _kind(target, source.shape, group, wire.owners)
        check_owners(wire.owners, "state dict", {name: source.layout for name, source in sources.items()})
        check_owners(wire.owners, "target", {name: kind.layout for name, kind in kinds.items()})
        made.append(_plan(sources, kinds, dtype, max_bytes, hosts))
        return made[0].fingerprint

    made = list[ModelPlan]()
    together("reshard_state_dict", make, _same, group=group, verify=verify, free=free)
    found = _moved(Mover(wire, made[0], "reshard_state_dict"), flat, kinds, free=free, verify=verify, progress=progress)
    return unflatten_state_dict({name: found.get(name, flat.get(name)) for name in paths}, paths)


def _targets(to: Mapping[Any, Any], prefix: str, names: set[str]) -> Iterator[tuple[str, Any]]:
    """What a mapping asks for, by name: nested as the state dict, or with dots. What asks for nothing is left out."""
    for key, value in to.items():
        name = f"{prefix}{key}"
        if name in names:
            yield name, value
        elif isinstance(value, Mapping):
            yield from _targets(value, f"{name}.", names)
        elif isinstance(value, list | tuple) and not (value and is_mesh(value[0])) and any(map(_asks, value)):
            yield from _targets(dict(enumerate(value)), f"{name}.", names)
        elif _asks(value):
            yield name, value


def _asks(value: Any) -> bool:
    """True for what can only be a target, or lead to one."""
    if isinstance(value, str):
        return "/" in value
    asks = isinstance(value, Layout | Mapping) or is_tensor(value) or hasattr(value, "build_metadata")
    return asks or (isinstance(value, tuple) and bool(value) and is_mesh(value[0]))


class Asked:
    """What is asked for, by name."""

    def __init__(self, to: Targets, mesh: Any, names: Sequence[str]) -> None:
        self._mesh, self._names = mesh, names
        if isinstance(to, Mapping):
            tensors = dict(_targets(to, "", set(names)))
            extra = [name for name in tensors if name not in names]
            if extra:
                raise ValueError(missing("the state dict has no", extra, names))
            left = [name for name in names if name not in tensors]
            if left:
                raise ValueError(missing("nothing is asked for", left, tensors) + "; None leaves a tensor as it is")
            self._of: Callable[[str], Any] = tensors.__getitem__
        elif callable(to):
            self._of = to
        else:
            self._rules = [(str(pattern), target) for pattern, target in to]
            self._of = self._by_rule

    def _by_rule(self, name: str) -> Any:
        for pattern, target in self._rules:
            if matched(pattern, name) is not None:
                return target
        rules = ", ".join(repr(pattern) for pattern, _ in self._rules)
        raise ValueError(f"no rule fits {name!r}: there are {rules}; end with '*'")

    def of(self, name: str) -> Any:
        """What `reshard` takes as a target, a plain tensor to look like, or None."""
        target = self._of(name)
        return (self._mesh, target) if self._mesh is not None and _are_placements(target) else target


def _are_placements(target: Any) -> bool:
    """True for what says nothing of a mesh: words, placements, or a sequence of those."""
    if isinstance(target, str):
        return "/" not in target  # as notation has
    if isinstance(target, list | tuple):
        return not (target and is_mesh(target[0]))
    if isinstance(target, Mapping):
        return True  # by the names of the axes
    return isinstance(target, Shard | Replicate | Partial | StridedShard) or is_placement(target)


Said = tuple[dict[str, Known | None], dict[str, Any], FLATTEN_MAPPING]
Merged = tuple[dict[str, Tensor], dict[str, Any], FLATTEN_MAPPING]


def _merged(told: Mapping[int, Said | None]) -> Merged:
    known = merged({rank: said and said[0] for rank, said in told.items()}, "state dict")
    _, others, paths = next(said for said in told.values() if said is not None)
    return {name: tensor_for(*one) for name, one in known.items()}, others, paths


def _kind(target: Any, shape: tuple[int, ...], group: dist.ProcessGroup | None, owners: Sequence[int]) -> Kind:
    if isinstance(target, torch.Tensor) and not is_sharded(target):
        if tuple(target.shape) != shape:
            raise ValueError(f"a tensor of shape {shape} cannot look like one of shape {tuple(target.shape)}")
        return Plain(Layout.replicated(shape, owners))
    return target_kind(target, shape, group)


def _plan(
    sources: Mapping[str, Tensor],
    kinds: Mapping[str, Kind],
    dtype: torch.dtype | None,
    max_bytes: int | None,
    hosts: Any,
) -> ModelPlan:
    targets = dict[str, Tensor]()
    for name, kind in kinds.items():
        source = sources[name]
        if kind.layout.shape != source.shape:
            raise ValueError(f"{name!r} has shape {source.shape}, but {kind.layout.shape} is asked for")
        becomes = dtype if dtype is not None and source.dtype.is_floating_point else source.dtype
        targets[name] = Tensor(source.shape, becomes, kind.layout, (kind.device or torch.device(source.device)).type)
    found = [Link(name, name, View.whole(t.shape), View.whole(t.shape)) for name, t in targets.items()]
    moved = {name: sources[name] for name in targets}
    return ModelPlan.of(found, moved, targets, max_bytes=max_bytes, hosts=hosts)


def _same(told: Mapping[int, str]) -> None:
    if len(set(told.values())) > 1:
        raise ValueError("the ranks ask for different shardings: give the same on all of them")


def _moved(
    mover: Mover, flat: Mapping[str, Any], kinds: Mapping[str, Kind], *, free: bool, verify: bool, progress: Progress
) -> dict[str, Any]:
    plan, me = mover.plan, mover.wire.me
    found = dict[str, list[torch.Tensor]]()
    moves = list[Move]()
    sent, sharing = list[int](), dict[int, list[torch.Tensor]]()
    last = _last_uses([memory_of(flat.get(entry.link.source), apart=False) for entry in plan.entries])

    def give_back() -> None:
        for at in sent:
            for tensor in memory_of(flat.get(plan.entries[at].link.source), apart=False):
                sharing.setdefault(storage_of(tensor), []).append(tensor)
                if last[storage_of(tensor)] <= at:
                    _give_back(sharing.pop(storage_of(tensor)))
        sent.clear()

    def check() -> None:
        for name, t in plan.sources.items():
            check_local(name, "state dict", memory_of(flat.get(name)), local_shapes(t.layout, me), t.dtype)

    def bucket(entries: Sequence[int]) -> list[Move]:
        if not verify:
            give_back()
        sent.extend(at for at in entries if free)
        for at in entries:
            name = plan.entries[at].link.target
            t = plan.targets[name]
            device = kinds[name].device or torch.device(t.device)
            found[name] = [torch.empty(s, dtype=t.dtype, device=device) for s in local_shapes(t.layout, me)]
            moves.append(mover.move(at, memory_of(flat.get(name)), found[name]))
        return moves[-len(entries) :]

    with torch.no_grad(), shown(progress, mover.total, "reshard") as tell:
        mover.run(check, bucket, fresh=True, progress=tell)
        if verify:
            names = list(plan.targets)
            compared(mover.wire, moves, names, [plan.targets[name].dtype for name in names])
        give_back()
    return {name: kinds[name].closed(kinds[name].dressed(local)) for name, local in found.items()}


def _last_uses(memory: Sequence[Sequence[torch.Tensor]]) -> dict[int, int]:
    """For every storage the last entry that reads it: tied weights share one."""
    return {storage_of(tensor): at for at, tensors in enumerate(memory) for tensor in tensors}


def _give_back(tensors: list[torch.Tensor]) -> None:
    """The memory of tensors that were sent, unless it is a part of something else; the tensors are empty then."""
    storage = tensors[0].untyped_storage()
    if storage.resizable() and any(storage.nbytes() == t.numel() * t.element_size() for t in tensors):
        storage.resize_(0)
    for tensor in tensors:
        tensor.data = tensor.data.new_empty(0)
