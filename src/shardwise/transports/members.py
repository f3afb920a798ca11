"""Who is in a process group: its ranks as owners of layouts, and their ranks in their own jobs.

A job is a set of processes with one default group. If a group is of one job, its owners are ranks in that job.
A group may also join several jobs, or processes without one: then its owners are ranks in the group.
"""

from __future__ import annotations

import secrets
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from typing import NamedTuple
from weakref import WeakKeyDictionary

import torch.distributed as dist

from shardwise.errors import ExchangeError, RefusedValueError
from shardwise.exchange import in_words
from shardwise.layout import Layout

TOKEN = "shardwise/job"  # in the store of a job: tells it apart from other jobs


class GroupMember(NamedTuple):
    """What a process sends to the others of its group: its job, its rank there, whether torch's registry agrees.

    Or the error that keeps it from knowing.
    """

    job: str = ""
    rank: int = 0
    registered: bool = False
    error: str | None = None

    @staticmethod
    def here(group: dist.ProcessGroup) -> GroupMember:
        """This process."""
        try:
            if _is_world(group):
                return GroupMember("world", job_rank(), registered=True)
            return GroupMember(_token(), job_rank(), _registered(group))
        except Exception as error:  # the others have to know
            return GroupMember(error=f"the store of its job cannot be used: {type(error).__name__}: {error}")


@dataclass(frozen=True)
class Members:
    """The owners of a group, in the order of its ranks.

    `ranks` are pairs of a rank in this process's job and its owner; None if the group is of one job, where both are the
    same. Otherwise `jobs` has a number for the job of every owner.
    """

    owners: tuple[int, ...]
    ranks: tuple[tuple[int, int], ...] | None = None
    jobs: tuple[int, ...] = ()

    @staticmethod
    def of(members: Sequence[GroupMember], me: int) -> Members:
        """From what all of them sent. The same on all ranks, except `ranks`."""
        errors = {at: one.error for at, one in enumerate(members) if one.error is not None}
        if errors:
            raise ExchangeError(
                f"{in_words(list(errors))} of the group cannot take part: {next(iter(errors.values()))}"
            )
        if len({one.job for one in members}) == 1 and all(one.registered for one in members):
            return Members(tuple(one.rank for one in members))
        if len({(one.job, one.rank) for one in members}) < len(members):
            raise ExchangeError("two ranks of the group have the same rank in the same job: each must be one process")
        ranks = tuple((one.rank, at) for at, one in enumerate(members) if one.job == members[me].job)
        numbers = {job: at for at, job in enumerate(dict.fromkeys(one.job for one in members))}
        return Members(tuple(range(len(members))), ranks, tuple(numbers[one.job] for one in members))

    @cached_property
    def joined(self) -> bool:
        """True if owners are ranks in the group, and not in a job."""
        return self.ranks is not None

    def renumbered(self, layout: Layout) -> Layout:
        """A layout over ranks in this process's job, as one over the owners of the group."""
        return layout if self.ranks is None else _renumbered(layout, self.ranks)


@lru_cache(maxsize=4096)
def _renumbered(layout: Layout, ranks: tuple[tuple[int, int], ...]) -> Layout:
    """Cached: the same tensors come step after step."""
    owners = dict(ranks)
    outside = [rank for rank in layout.owners() if rank not in owners]
    if outside:
        raise RefusedValueError(
            f"{layout!r} is over ranks of its own job, and names {in_words(outside)}, but of that job only "
            f"{in_words(list(owners))} joined the group. A DTensor cannot lie on a mesh over several jobs; "
            f"a ShardedTensor over ranks of the group needs the group: ShardedTensor(shards, layout, group)"
        )
    return layout.relabel({rank: owners[rank] for rank in layout.owners()})


_members_of_group = WeakKeyDictionary[dist.ProcessGroup, Members]()  # after their rendezvous


def remember(group: dist.ProcessGroup, members: Members) -> None:
    """Keep the members of a group for as long as it lives."""
    _members_of_group[group] = members


def of_job(group: object) -> bool:
    """True if the owners of a group are ranks of this process's job, as far as it knows without asking others."""
    if not isinstance(group, dist.ProcessGroup):
        return True  # no group was given
    members = _members_of_group.get(group)
    return _registered(group) if members is None else not members.joined


def owner_here(group: object) -> int:
    """The owner that this process is in a group; by default in the default group."""
    return group.rank() if isinstance(group, dist.ProcessGroup) and not of_job(group) else job_rank()


def owners_of(group: object) -> Sequence[int]:
    """The owners of a group, as far as this process knows without asking others; by default of the default group."""
    if not isinstance(group, dist.ProcessGroup):
        return range(dist.get_world_size() if has_default_group() else 1)
    if group in _members_of_group:
        return _members_of_group[group].owners
    ranks = registered_ranks(group) if _registered(group) else None
    return range(group.size()) if ranks is None else ranks


def job_rank() -> int:
    """The rank of this process in its job: 0 if it has no default group, and so is a job of its own."""
    return dist.get_rank() if has_default_group() else 0


def has_default_group() -> bool:
    """True if this process has a default group."""
    return dist.is_available() and dist.is_initialized()


def registered_ranks(group: dist.ProcessGroup) -> list[int] | None:
    """The ranks in the job of the ranks of a group, by torch's registry; None if it does not know the group."""
    try:
        return dist.get_process_group_ranks(group) if has_default_group() else None
    except KeyError:
        return None


def _registered(group: dist.ProcessGroup) -> bool:
    """True if torch's registry has this process by its rank in the job. (Frameworks may write other numbers there.)"""
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
    token: bytes | str = world.get_group_store().compare_set(TOKEN, "", secrets.token_hex(16))
    return token.decode() if isinstance(token, bytes) else token
