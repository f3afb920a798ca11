"""Who is in a process group: the numbers that its ranks have as owners, and the ranks that they have in their own jobs.

A job is what has one default group. The ranks of a group of one job are known by their ranks in that job, everywhere.
A group may also join several jobs, or stand on its own: there owners are ranks of the group.
"""

from __future__ import annotations

import secrets
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary

import torch.distributed as dist

from shardwise.errors import ExchangeError, RefusedValueError
from shardwise.exchange import in_words
from shardwise.layout import Layout

TOKEN = "shardwise/job"  # in the store of a job: tells it apart from other jobs


class Member(NamedTuple):
    """What a process tells the others of its group: its job, its rank there, and whether torch numbers the group by it.

    Or the error that keeps it from telling.
    """

    job: str = ""
    rank: int = 0
    registered: bool = False
    error: str | None = None

    @staticmethod
    def here(group: dist.ProcessGroup) -> Member:
        """This process."""
        try:
            if _is_world(group):
                return Member("world", job_rank(), registered=True)
            return Member(_token(), job_rank(), _registered(group))
        except Exception as error:  # the others have to hear of it
            return Member(error=f"the store of its job cannot be used: {type(error).__name__}: {error}")


@dataclass(frozen=True)
class Members:
    """The owners of a group, by their ranks in it; and the owners that the ranks of this process's job are.

    `ranks` is None where both are the same numbers: the group is of one job. Otherwise `jobs` tells the jobs of the
    owners apart, by numbers.
    """

    owners: tuple[int, ...]
    ranks: tuple[tuple[int, int], ...] | None = None
    jobs: tuple[int, ...] = ()

    @staticmethod
    def of(told: Sequence[Member], me: int) -> Members:
        """From what all of them told. The same everywhere, but for `ranks`."""
        errors = {at: one.error for at, one in enumerate(told) if one.error is not None}
        if errors:
            raise ExchangeError(
                f"{in_words(list(errors))} of the group cannot take part: {next(iter(errors.values()))}"
            )
        if len({one.job for one in told}) == 1 and all(one.registered for one in told):
            return Members(tuple(one.rank for one in told))
        if len({(one.job, one.rank) for one in told}) < len(told):
            raise ExchangeError("two ranks of the group have the same rank in the same job: each must be one process")
        ranks = tuple((one.rank, at) for at, one in enumerate(told) if one.job == told[me].job)
        numbers = {job: at for at, job in enumerate(dict.fromkeys(one.job for one in told))}
        return Members(tuple(range(len(told))), ranks, tuple(numbers[one.job] for one in told))

    @property
    def joined(self) -> bool:
        """True where owners are ranks of the group, and not of a job."""
        return self.ranks is not None

    def renumbered(self, layout: Layout) -> Layout:
        """A layout over ranks of this process's job, over the owners of the group."""
        return layout if self.ranks is None else _renumbered(layout, self.ranks)


@lru_cache(maxsize=4096)
def _renumbered(layout: Layout, ranks: tuple[tuple[int, int], ...]) -> Layout:
    """Kept by value: the same tensors come step after step."""
    owners = dict(ranks)
    outside = [rank for rank in layout.owners() if rank not in owners]
    if outside:
        raise RefusedValueError(
            f"{layout!r} is over ranks of its own job, and names {in_words(outside)}, but of that job only "
            f"{in_words(list(owners))} joined the group. A DTensor cannot lie on a mesh over several jobs; "
            f"a ShardedTensor over ranks of the group needs the group: ShardedTensor(shards, layout, group)"
        )
    return layout.relabel({rank: owners[rank] for rank in layout.owners()})


_known = WeakKeyDictionary[dist.ProcessGroup, Members]()  # of groups whose ranks have met


def remember(group: dist.ProcessGroup, members: Members) -> None:
    """The ranks of a group have met."""
    _known[group] = members


def of_job(group: Any) -> bool:
    """True where the owners of a group are ranks of this process's job, as far as it knows without asking others."""
    if not isinstance(group, dist.ProcessGroup):
        return True  # none was given
    members = _known.get(group)
    return _registered(group) if members is None else not members.joined


def owner_here(group: Any) -> int:
    """The owner that this process is in a group; in the default group where none is given."""
    return job_rank() if of_job(group) else int(group.rank())


def owners_of(group: Any) -> Sequence[int]:
    """The owners of a group, as far as this process knows without asking others; the default group unless given."""
    if not isinstance(group, dist.ProcessGroup):
        return range(dist.get_world_size() if has_default_group() else 1)
    if group in _known:
        return _known[group].owners
    ranks = registered_ranks(group) if _registered(group) else None
    return range(group.size()) if ranks is None else ranks


def job_rank() -> int:
    """The rank of this process in its job: 0 where it has no default group, and so is a job of its own."""
    return dist.get_rank() if has_default_group() else 0


def has_default_group() -> bool:
    """True where this process is part of a job."""
    return dist.is_available() and dist.is_initialized()


def registered_ranks(group: dist.ProcessGroup) -> list[int] | None:
    """The ranks in the job that torch's registry has for those of a group; None where it does not know the group."""
    try:
        return dist.get_process_group_ranks(group) if has_default_group() else None
    except KeyError:
        return None


def _registered(group: dist.ProcessGroup) -> bool:
    """True where torch's registry has this process by its rank in the job. Frameworks write there what they like."""
    if _is_world(group):
        return True
    ranks = registered_ranks(group)
    return ranks is not None and group.rank() < len(ranks) and ranks[group.rank()] == dist.get_rank()


def _is_world(group: dist.ProcessGroup) -> bool:
    return has_default_group() and group is dist.group.WORLD


_tokens = WeakKeyDictionary[dist.ProcessGroup, str]()  # of jobs, by their default groups


def _token() -> str:
    """The first of a job to ask writes it into the job's own store: not all of a job need be in the group."""
    world = dist.group.WORLD if has_default_group() else None
    if world is None:
        return secrets.token_hex(16)  # a process without a default group is a job of its own
    if world not in _tokens:
        _tokens[world] = _stored(world)
    return _tokens[world]


def _stored(world: dist.ProcessGroup) -> str:
    if dist.get_backend(world) == "mpi":
        return "mpi"  # which starts all its ranks as one job, and has no store
    found: bytes | str = world.get_group_store().compare_set(TOKEN, "", secrets.token_hex(16))
    return found.decode() if isinstance(found, bytes) else found
