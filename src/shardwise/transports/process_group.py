"""The transport over a process group of torch.distributed: gloo, nccl, mpi, by the same public calls."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import cached_property, partial
from typing import Literal, Self, TypeVar, get_args

import numpy as np
import numpy.typing as npt
import torch
import torch.distributed as dist

from shardwise.errors import ExchangeError, RefusedValueError
from shardwise.exchange import PeerBuffer, in_words
from shardwise.exchange.transport import PostedMessages, PostedRound, ReduceOp
from shardwise.planning import Hosts
from shardwise.transports import collectives, direct
from shardwise.transports.guarded_group import GuardedGroup
from shardwise.transports.members import GroupMember, Members, registered_ranks, remember
from shardwise.transports.torch_groups import asynchronous, post_as_batch

TransportChoice = Literal["auto", "group", "shared"]  # shared memory if possible, never, or required
T = TypeVar("T")


class GroupTransport(GuardedGroup):
    """A process group, or some ranks of one. Messages are addressed by ranks in the group.

    Owners are ranks in the job, if the group is of one job; otherwise they are ranks in the group (see `members`).
    """

    def __init__(self, group: dist.ProcessGroup, owners: Sequence[int] | None = None) -> None:
        everybody = tuple(range(group.size()))
        self.members = Members(everybody if owners is None else tuple(owners))  # until the rendezvous
        super().__init__(group, everybody if owners is None else _ranks_of(group, owners), self.members.owners)
        self._abandoned = list[PostedRound]()

    def rendezvous(self) -> None:
        """Everybody on the transport calls, before anything else."""
        self.meet(None)

    def meet(self, said: T) -> list[T]:
        """Find out whether the group is of one job; what everybody on the transport said."""
        told = self.all_gather((GroupMember.here(self.group) if self._whole_group else None, said))
        self._rendezvous_done = True
        if self._whole_group:
            self.members = Members.of([one for one, _ in told if one is not None], self.group.rank())
            self.assign_owners(self.members.owners[self.ranks.index(self.group.rank())], self.members.owners)
            remember(self.group, self.members)
        return [one for _, one in told]

    def twin(self, group: dist.ProcessGroup, token: str) -> Self:
        """A transport of the same owners over another group, whose ranks are these owners in their order.

        All of them call, with one token that no other twin has. They know each other: there is no rendezvous.
        """
        twin = type(self)(group)
        twin.members, twin._rendezvous_done = self.members, True
        twin.assign_owners(self.me, self.owners)
        return twin

    @property
    def on_one_host(self) -> bool:
        """True if all ranks share memory. All know the same."""
        return len(self.owners) == 1

    @property
    def hosts(self) -> Hosts | None:
        """Where owners live, the same on all ranks; None where that is not known, or makes no difference."""
        return None

    def check_choice(self, choice: object) -> None:
        """Refuse a transport= that does not exist, or that this group does not have."""
        if choice not in get_args(TransportChoice):
            raise RefusedValueError(f'transport= must be "auto", "group" or "shared", not {choice!r}')
        if choice == "shared" and len(self.owners) > 1:
            raise RefusedValueError(
                f'transport="shared": {self._why_not_shared()}; transport="auto" uses what there is'
            )

    def _why_not_shared(self) -> str:
        return "this system has no shared memory for it"

    def message_device(self, device: torch.device) -> torch.device:
        """The device itself, if the group has a backend that moves its memory; otherwise that of small messages."""
        backend = self._backends.get(device.type)
        usable = backend is not None and (backend != "gloo" or device.type == "cpu")
        return device if usable else self._small_device

    @cached_property
    def _small_device(self) -> torch.device:
        """Where headers and other small messages lie."""
        if "cpu" in self._backends and self._backends["cpu"] != "nccl":
            return torch.device("cpu")
        kind = next(iter(self._backends))
        return torch.device(kind, torch.get_device_module(kind).current_device())

    # --- collectives -------------------------------------------------------------------------------------------------
    # Over gloo, a small exchange that agrees by an all-to-all took less than half the time of messages (decision
    # 12). But collective calls have no tags: calls out of order, and those of some ranks of the group, need messages.

    def all_to_all(
        self, rows: npt.NDArray[np.uint8], sizes: Sequence[int], number: int, *, in_order: bool = True
    ) -> Callable[[], Sequence[memoryview]]:
        """One all-to-all of the whole group, if possible; otherwise messages between each two."""
        ours = torch.from_numpy(rows).to(self._small_device)
        if in_order and self._whole_group:
            wait = self._collective_all_to_all(ours)
        else:
            wait = collectives.all_to_all(self, ours, self.collective_tag("all_to_all", number))
        return lambda: [memoryview(row) for row in wait().cpu().numpy()]

    def _collective_all_to_all(self, rows: torch.Tensor) -> Callable[[], torch.Tensor]:
        result = torch.empty_like(rows)
        with self.guard("starting to agree"):
            work = self.group.alltoall_base(result, rows, [], [], asynchronous(dist.AllToAllOptions()))
        return self._result_of(work, result, rows)

    def all_reduce(
        self, numbers: torch.Tensor, op: ReduceOp, number: int, *, in_order: bool = True
    ) -> Callable[[], torch.Tensor]:
        """By messages along a tree; where only their order tells them apart, one all-reduce of the whole group.

        gloo would send numbers round a ring: as many steps as there are ranks.
        """
        result = numbers.to(self._small_device, copy=True)
        if self.tagged or not self._whole_group or not in_order:
            return partial(collectives.all_reduce, self, result, op, self.collective_tag("all_reduce", number))
        with self.guard("starting to agree"):
            options = asynchronous(dist.AllreduceOptions())
            options.reduceOp = dist.ReduceOp(dist.ReduceOp.MAX if op == "max" else dist.ReduceOp.SUM)
            work = self.group.allreduce([result], options)
        return self._result_of(work, result)

    def _result_of(self, work: dist.Work, result: torch.Tensor, *inputs: torch.Tensor) -> Callable[[], torch.Tensor]:
        """Wait for a collective call; its inputs are kept until then."""
        alive = list(inputs)

        def wait() -> torch.Tensor:
            with self.guard(self._waiting_for_all):
                self.wait_for_collective(work)
            alive.clear()
            return result

        return wait

    def all_gather(self, value: T) -> list[T]:
        """By messages, because other ranks may make other collective calls meanwhile."""
        return collectives.all_gather(self, value, self.collective_tag("all_gather"), self._small_device)

    # --- messages ----------------------------------------------------------------------------------------------------

    def post_messages(self, receives: Sequence[PeerBuffer], sends: Iterable[PeerBuffer], tag: int) -> GroupMessages:
        """Receives first. If the backend runs messages in the order of one queue, all are posted as one batch."""
        with self.guard("posting messages"):
            works = self._post(receives, sends, tag) if self.tagged else self._post_batch(receives, list(sends), tag)
        return GroupMessages(self, receives, works)

    def post_small(self, receives: Sequence[PeerBuffer], sends: Sequence[PeerBuffer], tag: int) -> PostedMessages:
        """As other messages; who waits for one waits for all to call."""
        messages = self.post_messages(receives, sends, tag)
        if len(self.owners) > direct.MOST:  # in a tree, a neighbour that is silent may only wait for others
            messages.doing = self._waiting_for_all
        return messages

    def _post(self, receives: Sequence[PeerBuffer], sends: Iterable[PeerBuffer], tag: int) -> list[dist.Work]:
        works = [self.group.recv([room], self._rank_of(peer), tag) for peer, room in receives]
        return works + [self.group.send([message], self._rank_of(peer), tag) for peer, message in sends]

    def _post_batch(self, receives: Sequence[PeerBuffer], sends: Sequence[PeerBuffer], tag: int) -> list[dist.Work]:
        device = next((tensor.device for _, tensor in (*receives, *sends)), None)
        if device is None:
            return []
        return post_as_batch(self.group, device, partial(self._post, receives, sends, tag))

    def _rank_of(self, owner: int) -> int:
        """The rank of an owner in the group."""
        return self.ranks[self.rows[owner]]

    def abandon(self, posted: PostedRound) -> None:
        """Keep memory that messages may still be written into for as long as the group lives."""
        self._abandoned.append(posted)
        self.staging.release()


class GroupMessages:
    """Messages that are posted to a group."""

    def __init__(self, transport: GroupTransport, receives: Sequence[PeerBuffer], works: Sequence[dist.Work]) -> None:
        self._transport, self._receives, self._works = transport, receives, works
        self.doing: str | None = None

    def arrivals(self) -> Iterator[int]:
        """In the order of the receives."""
        wait = self._transport.wait_in_order(self._works)
        for at, (peer, room) in enumerate(self._receives):
            with self._transport.guard(self.doing or f"waiting for {room.numel()} bytes from rank {peer}"):
                wait(at)
            yield at
        with self._transport.guard(self.doing or "waiting for its messages to be taken"):
            for at in range(len(self._receives), len(self._works)):
                wait(at)


def _ranks_of(group: dist.ProcessGroup, owners: Sequence[int]) -> tuple[int, ...]:
    """The ranks in a group of some ranks of its job."""
    ranks = {rank: at for at, rank in enumerate(registered_ranks(group) or ())}
    unknown = [owner for owner in owners if owner not in ranks]
    if unknown:
        raise ExchangeError(f"{in_words(unknown)} cannot be reached: the group has {in_words(list(ranks))} of this job")
    return tuple(ranks[owner] for owner in owners)
