"""Which wire a call goes over: one for every process group, kept as long as the group lives."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any
from weakref import WeakKeyDictionary

import torch.distributed as dist

from shardwise.dtensor import default_group
from shardwise.errors import ExchangeError
from shardwise.tensor.kinds import Kind, outside
from shardwise.wires import GroupWire

_wires = WeakKeyDictionary[dist.ProcessGroup, dict[tuple[int, ...], GroupWire]]()


def wire_for(
    group: dist.ProcessGroup | None, source: Kind | None, target: Callable[[tuple[int, ...]], Kind]
) -> GroupWire | None:
    """The wire of the group that was given; else of the one that the source lives in, if the target does too; else of
    the default group. None for a rank that is not among those that the source lives on."""
    if not (dist.is_available() and dist.is_initialized()):
        raise ExchangeError("there is no process group: call torch.distributed.init_process_group first")
    if group is not None:
        return _wire(group, None)
    found = source and source.group
    if source and found and _lies_in(source, target, found[1]):
        return _wire(*found) if dist.get_rank() in found[1] else None
    return _wire(default_group(), None)


def _lies_in(source: Kind, target: Callable[[tuple[int, ...]], Kind], ranks: tuple[int, ...]) -> bool:
    try:
        wanted = target(source.layout.shape)
    except Exception:  # it will be raised again, where all ranks hear of it
        return True
    return wanted.layout is source.layout or not outside(wanted.layout, ranks)


def _wire(group: Any, owners: Sequence[int] | None) -> GroupWire:
    if group is None or group == dist.GroupMember.NON_GROUP_MEMBER:
        raise ExchangeError(f"rank {dist.get_rank()} is not in the group: only ranks of the group may call")
    known = _wires.setdefault(group, {})
    key = () if owners is None else tuple(owners)
    if key not in known:
        wire = GroupWire(group, owners or None)
        known[key] = known[wire.owners] = known.get(wire.owners, wire)
    return known[key]


def release_staging() -> int:
    """Give back the memory that exchanges keep for the next ones; how many bytes it was.

    >>> release_staging()
    0
    """
    staging = {wire.staging for wires in _wires.values() for wire in wires.values()}
    kept = sum(one.bytes for one in staging)
    for one in staging:
        one.release()
    return kept
