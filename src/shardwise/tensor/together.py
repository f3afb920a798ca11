"""What every rank of a group says, known to all of them; what goes wrong on one, raised on all."""

from __future__ import annotations

import pickle
from collections.abc import Callable
from typing import Any, TypeVar

import torch.distributed as dist

from shardwise.errors import RefusedTypeError, RefusedValueError
from shardwise.exchange import Exchange, Terms
from shardwise.tensor.lane import Lane
from shardwise.tensor.wiring import group_wire

S = TypeVar("S")
T = TypeVar("T")


def together(
    operation: str,
    say: Callable[[], S],
    conclude: Callable[[dict[int, S]], T],
    *,
    group: dist.ProcessGroup | None = None,
    **same: Any,
) -> T:
    """What follows from what `say` returns on every rank of the group, by rank. Where it raises on any, all raise that.

    `conclude` comes to the same everywhere. All ranks must give the `same` values.
    """
    wire = group_wire(group)
    told, error = b"", None
    try:
        told = pickle.dumps(say())
    except Exception as found:  # the others have to hear of it first
        error = found
    exchange = Exchange(wire, Terms({"operation": operation, **same}, error=error)).start()

    def tell() -> list[bytes]:
        exchange.finish()
        return wire.tell(told)

    everybody = dict(zip(wire.owners, map(pickle.loads, Lane.of(wire).run(tell)), strict=True))
    try:
        return conclude(everybody)
    except ValueError as error:
        raise RefusedValueError(f"{operation}: {error}") from error
    except TypeError as error:
        raise RefusedTypeError(f"{operation}: {error}") from error
