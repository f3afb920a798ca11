"""The session of a process group: which transport a call uses, and what is kept for it."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping, Sequence
from functools import wraps
from typing import ParamSpec, TypeVar
from weakref import WeakKeyDictionary

import torch.distributed as dist

from shardwise.containers.container import Container
from shardwise.containers.dtensor import DTensorContainer, default_group, home_of, mesh_of
from shardwise.errors import ExchangeError, RefusedValueError
from shardwise.exchange import in_words
from shardwise.layout import Layout
from shardwise.transports import GroupTransport
from shardwise.transports.endpoint import Releasing
from shardwise.transports.members import has_default_group, job_rank

P = ParamSpec("P")
T = TypeVar("T")


def accepts_wire(call: Callable[P, T]) -> Callable[P, T]:
    """`wire=` as another spelling of the keyword `transport=`."""

    @wraps(call)
    def with_transport(*args: P.args, **kwargs: P.kwargs) -> T:
        if "wire" in kwargs:
            if "transport" in kwargs:
                raise TypeError("transport= and wire= are two spellings of one option: give transport= alone")
            kwargs["transport"] = kwargs.pop("wire")
        return call(*args, **kwargs)

    return with_transport


_transports = WeakKeyDictionary[dist.ProcessGroup, dict[tuple[int, ...], GroupTransport]]()


def transport_for(
    group: dist.ProcessGroup | None, container: Container | None, to: object, *, failed: bool
) -> GroupTransport | None:
    """The transport of a call. All ranks must choose the same, although one that passes None knows little.

    The first of these wins: `group`; the group of a ShardedTensor; for a DTensor that stays on its mesh (or `failed` to
    become one), the ranks of that mesh, with None on other ranks, which have no part in it; the default group.
    """
    if group is not None:
        return _transport(group)
    mesh = mesh_of(to)
    if mesh is not None and (failed or (isinstance(container, DTensorContainer) and container.mesh == mesh)):
        _check_initialized()
        home, ranks = home_of(mesh)
        return _mesh_transport(home, ranks) if dist.get_rank() in ranks else None
    return group_transport(container.group if container else None)


def group_transport(group: dist.ProcessGroup | None) -> GroupTransport:
    """The transport of a group, by default of the default group."""
    if group is None:
        _check_initialized()
    return _transport(group or default_group())


def _check_initialized() -> None:
    if not has_default_group():
        raise ExchangeError(
            "there is no process group: call torch.distributed.init_process_group first, or give group="
        )


def _mesh_transport(group: dist.ProcessGroup, ranks: Sequence[int]) -> GroupTransport:
    transport = _transport(group, ranks)
    if transport.members.joined:
        raise ExchangeError(
            "a DTensor cannot lie on a mesh over several jobs: torch numbers the ranks of a mesh by one job. "
            "Give every job a mesh of its own, and group= to this call"
        )
    return transport


def _transport(group: object, owners: Sequence[int] | None = None) -> GroupTransport:
    """Created at first use, a call of all its ranks. `owners`: some ranks of the group's only job."""
    if group == dist.GroupMember.NON_GROUP_MEMBER:
        raise ExchangeError(f"rank {job_rank()} is not in the group: only ranks of the group may call")
    if not isinstance(group, dist.ProcessGroup):
        raise ExchangeError(f"group= must be a process group of torch.distributed, not {group!r}")
    known = _transports.setdefault(group, {})
    key = () if owners is None else tuple(owners)
    if key not in known:
        transport = _new(group, owners)
        same = next((one for one in known.values() if one.ranks == transport.ranks), None)
        known[key] = same or transport
        if same is None:
            transport.rendezvous()
    return known[key]


def _new(group: dist.ProcessGroup, owners: Sequence[int] | None) -> GroupTransport:
    if sys.platform != "linux":
        return GroupTransport(group, owners)
    from shardwise.transports.shared_memory import SharedMemoryTransport  # which needs Linux

    return SharedMemoryTransport(group, owners)


def register(group: dist.ProcessGroup, transport: GroupTransport) -> None:
    """A transport of a group that the library made itself, for as long as the group lives."""
    _transports[group] = {(): transport}


def release_staging() -> int:
    """Release the memory that exchanges keep for reuse. Returns how many bytes it was.

    >>> _ = release_staging()
    >>> release_staging()
    0
    """
    transports = {transport for transports in _transports.values() for transport in transports.values()}
    alone = sum(one.release() for one in _alone.values() if isinstance(one, Releasing))
    return alone + sum(transport.release() for transport in transports)


_alone = dict[type, object]()  # the resources of this process for calls without a group


def resource_of(transport: GroupTransport | None, kind: type[T], make: Callable[[], T]) -> T:
    """The one object of this type that belongs to a transport, or to calls of this process alone."""
    if transport is not None:
        return transport.resource(kind, make)
    resource = _alone.setdefault(kind, make())
    assert isinstance(resource, kind), "made by another function"
    return resource


def check_owners(callers: Sequence[int], layouts: Mapping[str, Layout]) -> None:
    """Refuse layouts with owners that are not callers. The first of them is reported, by its name here."""
    known, calling = set[int](), set(callers)  # a model has thousands of tensors, but few different layouts
    for side, layout in layouts.items():
        missing = [] if id(layout) in known else [owner for owner in layout.owners() if owner not in calling]
        known.add(id(layout))
        if not missing:
            continue
        raise RefusedValueError(
            f"{side} {layout!r} names {in_words(missing)}, but those who call are {in_words(callers)}: "
            f"use a group that has all of them, or other owners"
        )
