"""What every rank of a group says, known to all of them; what goes wrong on one, raised on all."""

from __future__ import annotations

import pickle
from collections.abc import Callable, Mapping
from typing import Any, Protocol, TypeVar

import torch.distributed as dist

from shardwise.errors import CheckpointError, RefusedTypeError, RefusedValueError
from shardwise.exchange import Exchange, Terms
from shardwise.job.serial_queue import SerialQueue
from shardwise.job.session import group_transport
from shardwise.transports.members import has_default_group

S = TypeVar("S")
T = TypeVar("T")


class Made(Protocol):
    """What ranks make for themselves, and must all make alike."""

    @property
    def fingerprint(self) -> str:
        """Tells apart what differs."""
        ...

    def listed(self) -> dict[str, Any]:
        """All that it depends on, by name."""
        ...


M = TypeVar("M", bound=Made)


def agreed(operation: str, make: Callable[[], M], *, group: dist.ProcessGroup | None = None, **same: Any) -> M:
    """What `make` returns, once it is the same on every rank of the group. Where it raises on any, all raise that.

    All ranks must give the `same` values, too.
    """
    made = list[M]()

    def say() -> str:
        made.append(make())
        return made[0].fingerprint

    prints = together(operation, say, dict, group=group, **same)
    if len(set(prints.values())) > 1:  # say more, now that it is an error anyhow
        together(operation, lambda: made[0].listed(), _differ, group=group)
    return made[0]


def _differ(told: Mapping[int, dict[str, Any]]) -> None:
    (first, one), *others = told.items()
    for rank, other in others:
        difference = first_difference(one, other, f"on rank {first}", f"on rank {rank}")
        if difference:
            raise ValueError(f"the ranks ask for different things: {difference}")


def first_difference(one: Any, other: Any, here: str, there: str, where: str = "") -> str | None:
    """What differs first in two nested dicts, in words.

    >>> first_difference({"a": {"x": 1}}, {"a": {"x": 2}}, "here", "there")
    "'a' 'x' is 1 here, but 2 there"
    """
    if not (isinstance(one, Mapping) and isinstance(other, Mapping)):
        return None if one == other else f"{where.strip()} is {one} {here}, but {other} {there}"
    for name in [*one, *(name for name in other if name not in one)]:
        if name not in one or name not in other:
            return f"{where} {name!r} is only {here if name in one else there}".strip()
        difference = first_difference(one[name], other[name], here, there, f"{where} {name!r}")
        if difference:
            return difference
    order = next(((a, b) for a, b in zip(one, other, strict=True) if a != b), None)
    return order and f"{where} has {order[0]!r} {here} where {order[1]!r} is {there}: another order".strip()


def together(
    operation: str,
    say: Callable[[], S],
    conclude: Callable[[dict[int, S]], T],
    *,
    group: dist.ProcessGroup | None = None,
    **same: Any,
) -> T:
    """What follows from what `say` returns on every rank of the group, by rank. Where it raises on any, all raise that.

    `conclude` comes to the same everywhere, and changes nothing that it gets: equal values are one object. All ranks
    must give the `same` values.
    """
    transport = group_transport(group)
    told, error = b"", None
    mine: Any = None
    try:
        mine = say()
        told = pickle.dumps(mine)
    except Exception as found:  # the others have to hear of it first
        error = found
    exchange = Exchange(transport, Terms({"operation": operation, **same}, error=error)).start()

    def tell() -> list[bytes]:
        exchange.finish()
        return transport.tell(told)

    everything = SerialQueue.of(transport).run(tell)
    once = {text: mine if text == told else pickle.loads(text) for text in set(everything)}  # most say the same
    everybody = {owner: once[text] for owner, text in zip(transport.owners, everything, strict=True)}
    try:
        return conclude(everybody)
    except CheckpointError:
        raise
    except ValueError as error:
        raise RefusedValueError(f"{operation}: {error}") from error
    except TypeError as error:
        raise RefusedTypeError(f"{operation}: {error}") from error


def together_or_alone(
    operation: str, say: Callable[[], S], conclude: Callable[[dict[int, S]], T], *, group: dist.ProcessGroup | None
) -> T:
    """The same; a process that has no group at all is rank 0 of one."""
    if group is None and not has_default_group():
        return conclude({0: say()})
    return together(operation, say, conclude, group=group)
