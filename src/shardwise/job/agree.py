"""What every rank of a group says, known to all of them; what goes wrong on one, raised on all."""

from __future__ import annotations

import pickle
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Protocol, TypeVar

import torch.distributed as dist

from shardwise.errors import CheckpointError, RefusedTypeError, RefusedValueError
from shardwise.exchange import Exchange, Terms
from shardwise.job.session import SerialQueue, group_transport
from shardwise.transports import GroupTransport
from shardwise.transports.members import has_default_group, job_rank

S = TypeVar("S")
T = TypeVar("T")


class Made(Protocol):
    """What ranks make for themselves, and must all make alike."""

    @property
    def fingerprint(self) -> str:
        """Tells apart what differs."""
        ...

    def listed(self) -> dict[str, object]:
        """All that it depends on, by name."""
        ...


M = TypeVar("M", bound=Made)
K = TypeVar("K")


def agree_on(
    transport: GroupTransport,
    operation: str,
    make: Callable[[], tuple[M, K]],
    same: Mapping[str, object] | None = None,
) -> tuple[M, K]:
    """What `make` returns: first what must be the same on every rank, then what is this rank's own.

    Where it raises on any rank, all raise that. All ranks must give the `same` values, too.
    """

    def say() -> tuple[tuple[M, K], str]:
        made = make()
        return made, made[0].fingerprint

    (made, own), prints = tell_all(transport, operation, say, same)
    if len(set(prints.values())) > 1:  # say more, now that it is an error anyhow
        _, contents = tell_all(transport, operation, lambda: (None, made.listed()))
        with refusals(operation):
            _differ(contents)
    return made, own


def _differ(by_rank: Mapping[int, dict[str, object]]) -> None:
    (first, one), *others = by_rank.items()
    for rank, other in others:
        difference = first_difference(one, other, f"on rank {first}", f"on rank {rank}")
        if difference:
            raise ValueError(f"the ranks ask for different things: {difference}")


def first_difference(one: object, other: object, here: str, there: str, where: str = "") -> str | None:
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


def tell_all(
    transport: GroupTransport | None,
    operation: str,
    say: Callable[[], tuple[K, S]],
    same: Mapping[str, object] | None = None,
) -> tuple[K, dict[int, S]]:
    """What `say` keeps for this rank, and what it tells all: that of every rank. Where it raises on any, all raise that.

    What is told must not be changed: equal values are one object. All ranks must give the `same` values. Without a
    transport this process is alone.
    """
    if transport is None:
        mine, telling = say()
        return mine, {job_rank(): telling}
    text, error = b"", None
    mine_and_told: tuple[K, S] | None = None
    try:
        mine_and_told = say()
        text = pickle.dumps(mine_and_told[1])
    except Exception as failure:  # the others have to hear of it first
        error = failure
    exchange = Exchange(transport, Terms({"operation": operation, **(same or {})}, error=error)).start()

    def tell() -> list[bytes]:
        exchange.finish()
        return transport.tell(text)

    texts = SerialQueue.of(transport).run(tell)
    assert mine_and_told is not None, "or all have raised"
    mine, telling = mine_and_told
    values = {one: telling if one == text else pickle.loads(one) for one in set(texts)}  # most say the same
    return mine, {owner: values[one] for owner, one in zip(transport.owners, texts, strict=True)}


@contextmanager
def refusals(operation: str) -> Iterator[None]:
    """What all ranks find out alike is refused in the same words on all of them."""
    try:
        yield
    except CheckpointError:
        raise
    except ValueError as error:
        raise RefusedValueError(f"{operation}: {error}") from error
    except TypeError as error:
        raise RefusedTypeError(f"{operation}: {error}") from error


def together(
    operation: str,
    say: Callable[[], S],
    conclude: Callable[[dict[int, S]], T],
    *,
    group: dist.ProcessGroup | None = None,
    **same: object,
) -> T:
    """What follows from what `say` returns on every rank of the group, by rank: the same everywhere."""
    _, answers = tell_all(group_transport(group), operation, lambda: (None, say()), same)
    with refusals(operation):
        return conclude(answers)


def together_or_alone(
    operation: str, say: Callable[[], S], conclude: Callable[[dict[int, S]], T], *, group: dist.ProcessGroup | None
) -> T:
    """The same; a process that has no group at all is rank 0 of one."""
    if group is None and not has_default_group():
        return conclude({0: say()})
    return together(operation, say, conclude, group=group)
