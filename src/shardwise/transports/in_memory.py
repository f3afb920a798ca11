"""The in-memory transport: owners are threads of one process. For tests and simulation."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from queue import Empty, Queue

import torch

from shardwise.errors import ExchangeError
from shardwise.exchange import PeerBuffer
from shardwise.transports.endpoint import Endpoint

Queues = dict[tuple[int, int, int], "Queue[torch.Tensor]"]  # by sender, receiver and tag


def in_memory_transports(owners: int | Sequence[int], *, timeout: float = 60.0) -> list[InMemoryTransport]:
    """A transport for every owner, each to be used by a thread of its own."""
    numbers = tuple(range(owners) if isinstance(owners, int) else owners)
    queues: Queues = {}
    return [InMemoryTransport(me, numbers, queues, timeout) for me in numbers]


class InMemoryTransport(Endpoint):
    """One end of it."""

    name, tagged = "memory", False

    def __init__(self, me: int, owners: tuple[int, ...], queues: Queues, timeout: float) -> None:
        super().__init__(me, owners)
        self._queues, self._timeout = queues, timeout

    def message_device(self, device: torch.device) -> torch.device:
        """Any device: all owners share it."""
        return device

    def post_messages(self, receives: Sequence[PeerBuffer], sends: Iterable[PeerBuffer], tag: int) -> InMemoryMessages:
        """Messages are put into the queues at once."""
        for peer, message in sends:
            self._queue(self.me, peer, tag).put(message.clone())
        return InMemoryMessages(self, receives, tag)

    def fail(self, reason: str) -> None:
        """Drop messages that a later exchange could meet."""
        for key in [key for key in list(self._queues) if key[1] == self.me]:
            self._queues[key] = Queue()

    def _queue(self, source: int, target: int, tag: int) -> Queue[torch.Tensor]:
        return self._queues.setdefault((source, target, tag), Queue())  # atomic: other threads do the same

    def take(self, peer: int, tag: int) -> torch.Tensor:
        """The next message of a peer."""
        try:
            return self._queue(peer, self.me, tag).get(timeout=self._timeout)
        except Empty:
            raise ExchangeError(f"owner {self.me} waited {self._timeout} s for owner {peer}") from None


class InMemoryMessages:
    """Receives that wait for their messages."""

    def __init__(self, transport: InMemoryTransport, receives: Sequence[PeerBuffer], tag: int) -> None:
        self._transport, self._receives, self._tag = transport, receives, tag

    def arrivals(self) -> Iterator[int]:
        """In the order of the receives."""
        for at, (peer, room) in enumerate(self._receives):
            room.copy_(self._transport.take(peer, self._tag))
            yield at
