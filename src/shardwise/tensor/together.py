"""What every rank of a group says, known to all of them; what goes wrong on one, raised on all."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import torch.distributed as dist

from shardwise.exchange import Exchange, Terms
from shardwise.tensor.held import Held
from shardwise.tensor.lane import Lane
from shardwise.tensor.wiring import wire_for

T = TypeVar("T")


def together(operation: str, say: Callable[[], T], group: dist.ProcessGroup | None = None) -> dict[int, T]:
    """What `say` returns on every rank of the group, by rank. Where it raises on any, all raise that."""
    wire = wire_for(group, Held(), None)
    assert wire is not None, "there is no mesh"
    error, mine = None, list[T]()
    try:
        mine.append(say())
    except Exception as found:  # the others have to hear of it first
        error = found
    exchange = Exchange(wire, Terms({"operation": operation}, error=error)).start()

    def told() -> list[Any]:
        exchange.finish()
        return wire.tell(mine[0])

    return dict(zip(wire.owners, Lane.of(wire).run(told), strict=True))
