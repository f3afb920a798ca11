"""reshard_state_dict: reshard all tensors of a state dict, in as few exchanges as the memory limit allows."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from shardwise.containers.container import Container
from shardwise.containers.description import Descriptions, describe_all, is_tensor, memory_of
from shardwise.containers.memory import storage_of
from shardwise.exchange.messages import Tensors
from shardwise.exchange.overflow import Overflow, check_overflow
from shardwise.job.agree import agree_on, refusals, tell_all
from shardwise.job.casts import Cast, CastRequest, Casts, Change, check_change, check_changes
from shardwise.job.job import Job
from shardwise.job.names import Rename
from shardwise.job.plan import HostsOfGroup, HostsOption, ModelPlan, TensorInfo
from shardwise.job.progress import Progress, check_progress, reporter
from shardwise.job.remap import Link, Remap, Shapes, links, shapes_after
from shardwise.job.remap_rules import list_rules
from shardwise.job.session import accepts_wire, check_owners, group_transport
from shardwise.job.side import FreshSide, LiveSide, combine_descriptions, refuse_several_jobs
from shardwise.job.zeros import zeros_infos, zeros_memory
from shardwise.state.targets import Targets, containers_for
from shardwise.state.traverse import (
    FLATTEN_MAPPING,
    STATE_DICT_TYPE,
    StateDict,
    flatten_state_dict,
    unflatten_state_dict,
)
from shardwise.transports import GroupTransport, TransportChoice

OPERATION = "reshard_state_dict"


@accepts_wire
def reshard_state_dict(
    state_dict: StateDict | None,
    to: Targets,
    *,
    mesh: DeviceMesh | None = None,
    group: dist.ProcessGroup | None = None,
    rename: Rename = None,
    remap: Iterable[Remap] = (),
    dtype: Cast = None,
    overflow: Overflow = "refuse",
    max_bytes: int | None = None,
    hosts: HostsOption = "auto",
    free: bool = False,
    verify: bool = False,
    progress: Progress = None,
    transport: TransportChoice = "auto",
) -> STATE_DICT_TYPE:
    """Reshard the tensors of a state dict. Every rank of the group calls; a rank that holds nothing of it passes None.

    `to` gives the target of every tensor, as `reshard` takes it: a mapping from names, rules [(pattern, target), ...]
    of which the first match wins (* ? [abc] match as in file names), a function of the name, or a state dict to look
    like. None leaves a tensor as it is; a target may be a function of the tensor's shape. With `mesh`, placements are
    enough: [("*.q_proj.weight", "S0"), ("*", "R")].

    DTensors, ShardedTensors and plain tensors (equal on all ranks) are moved; other values are kept. Names of nested
    dicts and lists are joined with dots. `rename` and `remap` rename, join, split or rearrange tensors, as in
    `Resharder`; `to` has the new names then, which become keys of the result as they are. `dtype`: cast floating point
    tensors, or some of them by rules, as `cast` of `checkpoint.convert` does. `free`: release the memory of each source
    tensor once it is sent (with `verify`, once it is compared). `overflow`, `verify`, `max_bytes`, `hosts`,
    `transport`: as in `reshard`. `progress`: a function of (bytes done, bytes in total), or "bar".
    """
    over, rules = group_transport(group), list_rules(remap)
    flat, paths, sources = _describe(state_dict, over)

    def make() -> tuple[ModelPlan, dict[str, Container]]:
        check_progress(progress)
        over.check_choice(transport)
        shapes = shapes_after({name: one.shape for name, one in sources.items()}, rename=rename, remap=rules)
        containers = containers_for(shapes, to, mesh, over, group)
        check_overflow(overflow)
        becomes = _Becomes(sources, containers, rename, rules)
        _check_stays([name for name in shapes if name not in containers], becomes)
        return _plan(over, becomes, Casts.of(dtype, "dtype="), max_bytes, hosts), containers

    same = {"verify": verify, "free": free, "max_bytes": max_bytes, "dtype": str(dtype), "overflow": overflow}
    made, containers = agree_on(over, OPERATION, make, same | {"transport": transport})
    job = Job(over, made, OPERATION, transport, overflow=overflow)
    zeros = zeros_memory({name: one for name, one in made.sources.items() if name not in sources}, over.me)
    source = (FreedSide if free else LiveSide)({**flat, **zeros}, made.sources)
    target = FreshSide(made.targets, lambda n: containers[n].device or torch.device(made.targets[n].device), over.me)

    def check() -> None:
        source.checked("state dict", made.sources, over.me)
        if isinstance(source, FreedSide):
            source.look(made)

    first = over.me == over.owners[0]
    with over.budget(), torch.no_grad(), reporter(progress, job.total, "reshard", here=first) as tell:
        job.run(source, target, check=check, verify=verify, progress=tell)
    moved = {name: containers[name].assemble(containers[name].from_local(target.memory(name))) for name in made.targets}
    paths = {name: path for name, path in paths.items() if name in moved or name not in made.sources}
    paths |= {name: (name,) for name in moved if name not in paths}
    return unflatten_state_dict({name: moved.get(name, flat.get(name)) for name in paths}, paths)


def _describe(
    state_dict: StateDict | None, transport: GroupTransport
) -> tuple[dict[str, object], FLATTEN_MAPPING, dict[str, TensorInfo]]:
    """This rank's flat state dict and the paths of its names, and the descriptions of all ranks' tensors."""

    def say() -> tuple[tuple[dict[str, object], FLATTEN_MAPPING], Descriptions | None]:
        if state_dict is None:
            return ({}, {}), None
        flat, paths = flatten_state_dict(state_dict)
        return (flat, paths), describe_all(flat, transport)

    (flat, paths), by_rank = tell_all(transport, OPERATION, say)
    with refusals(OPERATION):
        refuse_several_jobs(by_rank, transport)
        sources = combine_descriptions(by_rank, "state dict")
    if None in by_rank.values():  # ranks without the state dict get its other values from a rank that has it
        holder = next(rank for rank, one in by_rank.items() if one is not None)
        rest = _others(flat, paths) if transport.me == holder else ({}, {})
        _, others = tell_all(transport, OPERATION, lambda: (None, rest))
        flat, paths = others[holder] if state_dict is None else (flat, paths)
    return flat, paths, sources


def _others(flat: Mapping[str, object], paths: FLATTEN_MAPPING) -> tuple[dict[str, object], FLATTEN_MAPPING]:
    """All but the tensors."""
    return {name: value for name, value in flat.items() if not is_tensor(value)}, paths


class _Becomes(NamedTuple):
    """The tensors there are, the containers of those they become, and the rules between them."""

    sources: Mapping[str, TensorInfo]
    containers: Mapping[str, Container]
    rename: Rename
    remap: Sequence[Remap]

    def links(self, targets: Shapes) -> list[Link]:
        """To targets of these shapes. What stays as it is has no link."""
        shapes = {name: one.shape for name, one in self.sources.items()}
        return links(shapes, targets, rename=self.rename, remap=self.remap, strict=False, empty=True)


def _check_stays(names: Sequence[str], becomes: _Becomes) -> None:
    """Refuse None as the target of a tensor that the rules make."""
    for name in names:
        shape = becomes.sources[name].shape if name in becomes.sources else None
        made = shape is None or becomes.links({name: shape})[0].source != name
        if made:
            raise ValueError(f"the target of {name!r} is None, which leaves a tensor as it is, but rules make it")


def _plan(
    transport: GroupTransport, becomes: _Becomes, casts: Casts, max_bytes: int | None, hosts: HostsOption
) -> ModelPlan:
    sources, containers, targets, named = becomes.sources, becomes.containers, dict[str, TensorInfo](), set[str]()
    casts = casts.among(containers)
    planned = becomes.links({name: one.layout.shape for name, one in containers.items()})
    first = {link.target: sources[link.source] for link in reversed(planned) if not link.zeros}
    used = dict.fromkeys(link.source for link in planned if not link.zeros)
    check_owners(transport.owners, {f"{name!r}, as it is,": sources[name].layout for name in used})
    check_owners(transport.owners, {f"{name!r}, as it is to be,": one.layout for name, one in containers.items()})
    for name, container in containers.items():
        source = first[name]
        request = casts.request(name, source.dtype) or CastRequest(source.dtype, named=False)
        named |= {name} if request.named else set()
        device = (container.device or torch.device(source.device)).type
        targets[name] = TensorInfo(container.layout.shape, request.dtype, container.layout, device)
    sources = {**sources, **zeros_infos(planned, targets)}
    changes = [Change(o.source, o.target, sources[o.source].dtype, targets[o.target].dtype) for o in planned]
    check_changes(changes, lambda change: check_change(change, sources, named=change.target in named))
    if unused := casts.unused(targets):
        raise ValueError(f"dtype= has {unused[0]!r}, which matches no tensor that is moved")
    return ModelPlan.of(planned, sources, targets, max_bytes=max_bytes, hosts=HostsOfGroup.of(hosts, transport.hosts))


class FreedSide(LiveSide):
    """Releases the memory of source tensors once nothing reads it any more: tied weights share it."""

    def look(self, plan: ModelPlan) -> None:
        """Record the last reader of every storage. Tensors that are not moved keep their memory."""
        self._plan = plan
        self._last = dict[int, int]()  # by storage, the last link that reads it
        self._waiting = dict[int, Tensors]()  # sent tensors, by storage, until its last reader is done
        for at, planned in enumerate(plan.links):
            for tensor in memory_of(self.values.get(planned.link.source), apart=False):
                self._last[storage_of(tensor)] = at
        for name, value in self.values.items():
            if is_tensor(value) and name not in plan.sources:
                for tensor in memory_of(value):
                    if tensor.layout == torch.strided:
                        self._last[storage_of(tensor)] = len(plan.links)

    def sent(self, links: Sequence[int]) -> None:
        """Release what nothing reads any more."""
        for at in links:
            for tensor in memory_of(self.values.get(self._plan.links[at].link.source), apart=False):
                storage = storage_of(tensor)
                self._waiting.setdefault(storage, []).append(tensor)
                if self._last[storage] <= at:
                    _release(self._waiting.pop(storage))


def _release(tensors: Tensors) -> None:
    """Empty tensors that were sent, and release their storage unless other tensors use a part of it."""
    storage = tensors[0].untyped_storage()
    parts = {t.data_ptr(): t.numel() * t.element_size() for t in tensors if t.is_contiguous()}
    if storage.resizable() and sum(parts.values()) >= storage.nbytes():  # views of it keep it alive
        storage.resize_(0)
    for tensor in tensors:
        tensor.data = tensor.data.new_empty(0)
