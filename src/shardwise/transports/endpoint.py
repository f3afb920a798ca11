"""What all transports have in common, made of messages between two owners."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from itertools import count
from typing import TypeVar
from weakref import WeakSet
from zlib import crc32

import numpy as np
import numpy.typing as npt
import torch

from shardwise.exchange.buffers import Staging, ViewCache
from shardwise.exchange.transport import PeerBuffer, PostedMessages, PostedRound, Receive, ReduceOp, Send
from shardwise.transports import collectives

EARLY_BYTES = 2**22  # of a round that is worth posting before all have agreed, although it needs staging
CPU = torch.device("cpu")
T = TypeVar("T")


class Endpoint:
    """One owner's end of a transport: what all transports have in common, made of `post_messages`."""

    name: str
    tagged: bool

    def __init__(self, me: int, owners: Sequence[int]) -> None:
        self.assign_owners(me, owners)
        self.numbers: Iterator[int] = count()
        self.agreed = set[bytes]()
        self.staging = Staging()
        self.views = WeakSet[ViewCache]()
        self._resources = dict[type[object], object]()

    def assign_owners(self, me: int, owners: Sequence[int]) -> None:
        """Set who is on this transport."""
        self.me, self.owners = me, tuple(owners)
        self.rows = {owner: row for row, owner in enumerate(self.owners)}

    def post_messages(self, receives: Sequence[PeerBuffer], sends: Iterable[PeerBuffer], tag: int) -> PostedMessages:
        """Every transport has its own."""
        raise NotImplementedError

    def collective_tag(self, kind: str, number: int | None = None) -> int:
        """The tag of messages outside rounds: they meet only those of the same owners and kind."""
        return crc32(f"{self.name} {kind} {number}".encode()) >> 1

    def resource(self, kind: type[T], make: Callable[[], T]) -> T:
        """The one object of this type that belongs to the transport, made at first use."""
        if kind not in self._resources:
            self._resources[kind] = make()
        kept = self._resources[kind]
        assert isinstance(kept, kind), "made by another function"
        return kept

    def budget(self) -> AbstractContextManager[None]:
        """By default a transport has no timeout."""
        return nullcontext()

    def early_limit(self, device: torch.device, *, direct: bool) -> int:
        """Nothing where messages cannot be told apart."""
        return EARLY_BYTES if self.tagged else -1

    def all_to_all(
        self, rows: npt.NDArray[np.uint8], sizes: Sequence[int], number: int, *, in_order: bool = True
    ) -> Callable[[], Sequence[memoryview]]:
        """Whole rows, by messages."""
        wait = collectives.all_to_all(self, torch.from_numpy(rows), self.collective_tag("all_to_all", number))
        return lambda: [memoryview(row) for row in wait().numpy()]

    def all_reduce(
        self, numbers: torch.Tensor, op: ReduceOp, number: int, *, in_order: bool = True
    ) -> Callable[[], torch.Tensor]:
        """By messages."""
        return lambda: collectives.all_reduce(self, numbers, op, self.collective_tag("all_reduce", number))

    def all_gather(self, value: T) -> list[T]:
        """By messages."""
        return collectives.all_gather(self, value, self.collective_tag("all_gather"), CPU)

    def post_round(
        self,
        receives: Sequence[Receive],
        sends: Sequence[Send],
        tag: int,
        device: torch.device,
        align: int,
        *,
        direct: bool = True,
    ) -> PostedRound:
        """Post the messages of a round; those that cannot stay in place go through staging."""
        sizes = [one.bytes for one in receives if one.into is None] + [one.bytes for one in sends if one.outof is None]
        staged = iter(self.staging.take(sizes, device, align=align))
        rooms = [next(staged) if one.into is None else one.into for one in receives]

        def messages() -> Iterator[PeerBuffer]:
            for one in sends:
                room = next(staged) if one.outof is None else one.outof
                if one.outof is None:
                    one.pack(room)
                yield one.peer, room

        buffers = [(one.peer, room) for one, room in zip(receives, rooms, strict=True)]
        return MessageRound(self.post_messages(buffers, messages(), tag), receives, rooms)

    def abandon(self, posted: PostedRound) -> None:
        """By default nothing is posted early."""

    def release(self) -> int:
        """Give back staging and the views of repeated exchanges; the number of bytes of staging."""
        kept = self.staging.bytes
        self.staging.release()
        for views in list(self.views):
            views.release()
        return kept


class MessageRound:
    """A round by messages."""

    def __init__(self, messages: PostedMessages, receives: Sequence[Receive], rooms: Sequence[torch.Tensor]) -> None:
        self._messages, self._receives, self._rooms = messages, receives, rooms

    def arrivals(self) -> Iterator[tuple[int, torch.Tensor | None]]:
        """In the order of arrival."""
        for at in self._messages.arrivals():
            yield at, self._rooms[at] if self._receives[at].into is None else None

    def finish(self) -> None:
        """All was sent when the last message had arrived."""
