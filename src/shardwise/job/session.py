"""Which transport a call goes over: one for every process group, kept as long as the group lives."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import Any
from weakref import WeakKeyDictionary

import torch.distributed as dist

from shardwise.containers.container import Kind
from shardwise.errors import ExchangeError, RefusedValueError
from shardwise.exchange import in_words
from shardwise.layout import Layout
from shardwise.torch_internals import OnMesh, default_group, home_of, mesh_of
from shardwise.transports import GroupTransport
from shardwise.transports.members import has_default_group, job_rank

_transports = WeakKeyDictionary[dist.ProcessGroup, dict[tuple[int, ...], GroupTransport]]()


def transport_for(
    group: dist.ProcessGroup | None, container: Kind | None, to: Any, *, failed: bool
) -> GroupTransport | None:
    """The transport of a call. All ranks that call must come to the same, and one that passes None knows little:

    the group that was given; else that of a ShardedTensor that has one; else, for a DTensor that stays on its mesh (or
    what was meant to be one and `failed`), the ranks of that mesh (None on others: they have no part in it); else the
    default group.
    """
    if group is not None:
        return _transport(group)
    mesh = mesh_of(to)
    if mesh is not None and (failed or (isinstance(container, OnMesh) and container.mesh == mesh)):
        _check_initialized()
        home, ranks = home_of(mesh)
        return _mesh_transport(home, ranks) if dist.get_rank() in ranks else None
    return group_transport(container.group if container else None)


def group_transport(group: dist.ProcessGroup | None) -> GroupTransport:
    """The transport of a group, the default one unless given."""
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


def _transport(group: Any, owners: Sequence[int] | None = None) -> GroupTransport:
    """Made at first use, which is a call of all its ranks. `owners`, of some, are ranks of the group's only job."""
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


def release_staging() -> int:
    """Give back the memory that exchanges keep for the next ones; how many bytes it was.

    >>> release_staging()
    0
    """
    transports = {transport for transports in _transports.values() for transport in transports.values()}
    return sum(transport.release() for transport in transports)


def check_owners(transport: GroupTransport, side: str, layout: Layout) -> None:
    """Refuse owners that do not call."""
    missing = transport.missing_owners(layout)
    if missing:
        raise RefusedValueError(
            f"{side} {layout!r} names {in_words(missing)}, but those who call are {in_words(transport.owners)}: "
            f"use a group that has all of them, or other owners"
        )
