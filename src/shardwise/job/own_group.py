"""A process group of one operation's own: its exchanges may run beside all else that the ranks do together."""

from __future__ import annotations

import secrets
from typing import NamedTuple

import torch.distributed as dist
from torch.distributed.distributed_c10d import PrefixStore

from shardwise.job.agree import tell_all
from shardwise.job.session import register
from shardwise.transports import GroupTransport
from shardwise.transports.torch_groups import alike


class OwnGroup(NamedTuple):
    """A group, which lives as long as this does, and its transport."""

    group: dist.ProcessGroup
    transport: GroupTransport


def own_group(transport: GroupTransport, operation: str, *, remedy: str) -> OwnGroup:
    """A group of the same ranks, backends and timeout. All ranks call; they meet in the store of the transport's group.

    `remedy`: what to do when it has failed.
    """
    # nobody connects before all are known to call: connecting would wait for the others, whatever they do
    _, tokens = tell_all(transport, operation, lambda: (None, secrets.token_hex(8)))
    token = tokens[transport.owners[0]]

    def make() -> tuple[OwnGroup, None]:
        group = transport.group
        store = PrefixStore(f"shardwise/{token}", group.get_group_store())
        rank, size = transport.rows[transport.me], len(transport.owners)
        own = alike(group, store, rank, size, seconds=transport.seconds)
        return OwnGroup(own, transport.twin(own, token)), None

    made, _ = tell_all(transport, operation, make)
    made.transport.remedy = remedy
    register(*made)
    return made
