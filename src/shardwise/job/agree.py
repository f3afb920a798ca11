"""Share a value of every rank with all of them; an error on one rank is raised on all."""

from __future__ import annotations

import pickle
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Protocol, TypeVar

import torch
import torch.distributed as dist

from shardwise.errors import CheckpointError, RefusedTypeError, RefusedValueError
from shardwise.exchange import Exchange, Proposal
from shardwise.job.session import group_transport
from shardwise.transports import GroupTransport
from shardwise.transports.members import has_default_group, job_rank

S = TypeVar("S")
T = TypeVar("T")


class Fingerprinted(Protocol):
    """What every rank makes on its own, and must be the same on all."""

    @property
    def fingerprint(self) -> str:
        """Different for different contents."""
        ...

    def contents(self) -> dict[str, object]:
        """All that it depends on, by name."""
        ...


M = TypeVar("M", bound=Fingerprinted)
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
        both = make()
        return both, both[0].fingerprint

    (common, own), prints = tell_all(transport, operation, say, same)
    if len(set(prints.values())) > 1:  # find the difference, for the error
        _, contents = tell_all(transport, operation, lambda: (None, common.contents()))
        with refusals(operation):
            _differ(contents)
    return common, own


def _differ(by_rank: Mapping[int, dict[str, object]]) -> None:
    (first, one), *others = by_rank.items()
    for rank, other in others:
        difference = first_difference(one, other, f"on rank {first}", f"on rank {rank}")
        if difference:
            raise ValueError(f"the ranks' arguments differ: {difference}")


def first_difference(one: object, other: object, here: str, there: str, where: str = "") -> str | None:
    """The first difference between two nested dicts, in words.

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
    """`say` returns a value to keep and a value to share: returns the kept value, and the shared ones of all ranks.

    An error on any rank is raised on all. Do not change shared values: equal ones are one object. All ranks must give
    the `same` values. Without a transport, this process is the only rank.
    """
    if transport is None:
        own, shared = say()
        return own, {job_rank(): shared}
    message, error = b"", None
    both: tuple[K, S] | None = None
    try:
        both = say()
        message = pickle.dumps(both[1])
    except Exception as failure:  # raised after the other ranks know of it
        error = failure
    exchange = Exchange(transport, Proposal({"operation": operation, **(same or {})}, error=error)).start()

    def tell() -> list[bytes]:
        exchange.finish()
        return transport.all_gather(message)

    messages = transport.queue.run(tell)
    assert both is not None, "or all have raised"
    own, shared = both
    values = {one: shared if one == message else pickle.loads(one) for one in set(messages)}  # most ranks send the same
    return own, {owner: values[one] for owner, one in zip(transport.owners, messages, strict=True)}


def total_of_all(transport: GroupTransport, operation: str, numbers: Sequence[int]) -> list[int]:
    """The sums of up to 8 numbers of all ranks. Quicker than `tell_all`: they travel with the agreement."""
    proposal = Proposal({"operation": operation, "numbers": len(numbers)})
    exchange = Exchange(transport, proposal, note=list(map(int, numbers))).start()

    def tell() -> list[int]:
        exchange.finish()
        totals: list[int] = exchange.noted().tolist()
        return totals

    return transport.queue.run(tell)


@contextmanager
def refusals(operation: str) -> Iterator[None]:
    """Raise what all ranks find out as one error, with the same words on all of them."""
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
    """The conclusion from the values of `say` on all ranks, by rank: the same on all of them."""
    _, answers = tell_all(group_transport(group), operation, lambda: (None, say()), same)
    with refusals(operation):
        return conclude(answers)


def together_or_alone(
    operation: str, say: Callable[[], S], conclude: Callable[[dict[int, S]], T], *, group: dist.ProcessGroup | None
) -> T:
    """The same; a process without any group is rank 0 of a group of one."""
    if group is None and not has_default_group():
        return conclude({0: say()})
    return together(operation, say, conclude, group=group)


class Callers:
    """All ranks that call an operation together."""

    def __init__(self, operation: str, group: dist.ProcessGroup | None, *, alone: bool = False) -> None:
        self.operation, self.group = operation, group
        self.alone = alone or (group is None and not has_default_group())
        self.transport = None if self.alone else group_transport(group)
        self.me = job_rank() if self.transport is None else self.transport.me
        self.owners: tuple[int, ...] = (self.me,) if self.transport is None else self.transport.owners

    @property
    def broken(self) -> bool:
        """True if the ranks can no longer communicate; others may have continued."""
        return self.transport is not None and self.transport.broken

    @property
    def first(self) -> bool:
        """True for the rank that does what is done once."""
        return self.me == self.owners[0]

    def highest(self, numbers: torch.Tensor) -> torch.Tensor:
        """The elementwise maximum over all callers."""
        if self.transport is None:
            return numbers
        return self.transport.all_reduce(numbers, "max", next(self.transport.numbers))()

    def total(self, numbers: torch.Tensor) -> torch.Tensor:
        """The elementwise sum over all callers."""
        if self.transport is None:
            return numbers
        return self.transport.all_reduce(numbers, "sum", next(self.transport.numbers))()

    def tell(self, say: Callable[[], tuple[K, S]], same: Mapping[str, object] | None = None) -> tuple[K, dict[int, S]]:
        """As `tell_all`: the kept value, and the shared values by rank. An error of one is raised for all."""
        return tell_all(self.transport, self.operation, say, same)

    def all_do(self, work: Callable[[], object], **same: object) -> None:
        """Returns once all have done it. An error of one is raised for all."""

        def say() -> tuple[None, None]:
            work()
            return None, None

        self.tell(say, same)

    def refusals(self) -> AbstractContextManager[None]:
        """As `refusals`."""
        return nullcontext() if self.alone else refusals(self.operation)

    def from_first(self, say: Callable[[], S]) -> S:
        """The first caller's value. An error of one is raised for all."""
        _, answers = self.tell(lambda: (None, say()))
        return next(iter(answers.values()))

    def by_first(self, work: Callable[[], S]) -> S:
        """What only the first caller does: its result, on all. An error there is raised for all."""
        _, answers = self.tell(lambda: (None, work() if self.first else None))
        result: S = next(iter(answers.values()))  # type: ignore[assignment]
        return result
