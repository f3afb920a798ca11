"""Which wire a call goes over: one for every process group, kept as long as the group lives."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import Any
from weakref import WeakKeyDictionary

import torch.distributed as dist

from shardwise.dtensor import OnMesh, default_group, home_of, mesh_of
from shardwise.errors import ExchangeError
from shardwise.tensor.held import Held
from shardwise.wires import GroupWire
from shardwise.wires.members import has_default_group, job_rank

_wires = WeakKeyDictionary[dist.ProcessGroup, dict[tuple[int, ...], GroupWire]]()


def wire_for(group: dist.ProcessGroup | None, held: Held, to: Any) -> GroupWire | None:
    """The wire of a call. All ranks that call must come to the same, and one that passes None knows little:

    the group that was given; else that of a ShardedTensor that has one; else, for a DTensor that stays on its mesh (or
    what was meant to be one), the ranks of that mesh (None on others: they have no part in it); else the default group.
    """
    if group is not None:
        return _wire(group)
    mesh = mesh_of(to)
    if mesh is not None and (held.error or (isinstance(held.kind, OnMesh) and held.kind.mesh == mesh)):
        _check_initialized()
        home, ranks = home_of(mesh)
        return _mesh_wire(home, ranks) if dist.get_rank() in ranks else None
    return group_wire(held.kind.group if held.kind else None)


def group_wire(group: dist.ProcessGroup | None) -> GroupWire:
    """The wire of a group, the default one unless given."""
    if group is None:
        _check_initialized()
    return _wire(group or default_group())


def _check_initialized() -> None:
    if not has_default_group():
        raise ExchangeError(
            "there is no process group: call torch.distributed.init_process_group first, or give group="
        )


def _mesh_wire(group: dist.ProcessGroup, ranks: Sequence[int]) -> GroupWire:
    wire = _wire(group, ranks)
    if wire.members.joined:
        raise ExchangeError(
            "a DTensor cannot lie on a mesh over several jobs: torch numbers the ranks of a mesh by one job. "
            "Give every job a mesh of its own, and group= to this call"
        )
    return wire


def _wire(group: Any, owners: Sequence[int] | None = None) -> GroupWire:
    """Made at first use, which is a call of all its ranks. `owners`, of some, are ranks of the group's only job."""
    if group == dist.GroupMember.NON_GROUP_MEMBER:
        raise ExchangeError(f"rank {job_rank()} is not in the group: only ranks of the group may call")
    if not isinstance(group, dist.ProcessGroup):
        raise ExchangeError(f"group= must be a process group of torch.distributed, not {group!r}")
    known = _wires.setdefault(group, {})
    key = () if owners is None else tuple(owners)
    if key not in known:
        wire = _new(group, owners)
        same = next((one for one in known.values() if one.ranks == wire.ranks), None)
        known[key] = same or wire
        if same is None:
            wire.meet()
    return known[key]


def _new(group: dist.ProcessGroup, owners: Sequence[int] | None) -> GroupWire:
    if sys.platform != "linux":
        return GroupWire(group, owners)
    from shardwise.wires.shared import SharedWire  # which needs Linux

    return SharedWire(group, owners)


def release_staging() -> int:
    """Give back the memory that exchanges keep for the next ones; how many bytes it was.

    >>> release_staging()
    0
    """
    wires = {wire for wires in _wires.values() for wire in wires.values()}
    return sum(wire.release() for wire in wires)
