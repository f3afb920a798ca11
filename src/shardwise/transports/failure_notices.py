"""Why a transport broke, for ranks that cannot be told by packets: in the store of their group, and by cut connections."""

from __future__ import annotations

import time
from contextlib import suppress
from datetime import timedelta

import torch
import torch.distributed as dist

AT_ONCE = timedelta(milliseconds=1)
GRACE = 1.0  # seconds in which ranks that live answer: all hear of a broken connection at once
MANY = 256  # ranks that nobody asks one by one


class CauseError(RuntimeError):
    """Why a transport broke, in words that name the rank: others are told it as it is."""


def publish(group: dist.ProcessGroup, transport: str, cause: str) -> None:
    """The first cause stays: what breaks later follows from it."""
    with suppress(Exception):  # the store may be gone, too
        group.get_group_store().compare_set(_key(transport), "", cause)


def published(group: dist.ProcessGroup, transport: str) -> str | None:
    """The cause that a rank has published, if any has."""
    with suppress(Exception):
        store = group.get_group_store()
        if store.check([_key(transport)]):
            return store.get(_key(transport)).decode(errors="replace")
    return None


def silent(group: dist.ProcessGroup, transport: str) -> list[int]:
    """The ranks of a group that do not answer, after its connections broke; until one of them has published a cause.

    None are named where that would say nothing: nobody answers, the store is gone, or the group is large.
    """
    others = [rank for rank in range(group.size()) if rank != group.rank()]
    if len(others) >= MANY:
        return []
    end, missing = time.monotonic() + GRACE, others
    with suppress(Exception):
        store = group.get_group_store()
        store.set(_answer(transport, group.rank()), "here")
        while missing and time.monotonic() < end and not store.check([_key(transport)]):
            time.sleep(0.01)
            missing = [rank for rank in missing if not store.check([_answer(transport, rank)])]
    return missing if len(missing) < len(others) or len(others) == 1 else []


def cut(group: dist.ProcessGroup, peer: int, tag: int) -> None:
    """Close the connections of this process in a group over gloo, so that nobody waits for it.

    gloo closes them when a wait runs out; nothing else that it offers does.
    """
    with suppress(RuntimeError):
        group.recv([torch.empty(1, dtype=torch.uint8)], peer, tag).wait(AT_ONCE)


def _answer(transport: str, rank: int) -> str:
    return f"shardwise/answers/{transport}/{rank}"


def _key(transport: str) -> str:
    return f"shardwise/broken/{transport}"
