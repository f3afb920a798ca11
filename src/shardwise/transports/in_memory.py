"""The in-memory transport: owners are threads of one process. For tests and simulation."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import reduce
from queue import Empty, Queue
from typing import Any, Literal

import numpy as np
import numpy.typing as npt
import torch

from shardwise.errors import ExchangeError
from shardwise.exchange import PeerBuffer
from shardwise.exchange.transport import Endpoint, combined

Queues = dict[tuple[int, int, object], "Queue[Any]"]  # by sender, receiver and tag


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

    def serves(self, device: torch.device) -> torch.device:
        """Any device: the memory is one."""
        return device

    def slots(
        self, mine: npt.NDArray[np.uint8], sizes: Sequence[int], *, apart: int | None = None
    ) -> Callable[[], Sequence[memoryview]]:
        """Row by row through the queues."""
        for owner, row, size in zip(self.owners, mine, sizes, strict=True):
            self._queue(self.me, owner, "slots").put(row[:size].tobytes())
        return lambda: [memoryview(self._get(owner, "slots")) for owner in self.owners]

    def reduced(
        self, numbers: torch.Tensor, op: Literal["max", "sum"], *, apart: int | None = None
    ) -> Callable[[], torch.Tensor]:
        """Everybody tells everybody."""
        for owner in self.owners:
            self._put(owner, numbers, op)
        return lambda: reduce(lambda a, b: combined(a, b, op), [self._get(owner, op) for owner in self.owners])

    def swap(self, receives: Sequence[PeerBuffer], sends: Iterable[PeerBuffer], tag: int) -> InMemoryMessages:
        """Messages are put into the queues at once."""
        for peer, message in sends:
            self._put(peer, message, tag)
        return InMemoryMessages(self, receives, tag)

    def tell(self, value: Any) -> list[Any]:
        """Through the queues as well."""
        for owner in self.owners:
            self._queue(self.me, owner, "tell").put(value)
        return [self._get(owner, "tell") for owner in self.owners]

    def abandon(self, posted: Any) -> None:
        """Nothing is ever posted ahead."""

    def fail(self, reason: str) -> None:
        """Nothing is left behind that a later exchange could meet."""
        for key in [key for key in list(self._queues) if key[1] == self.me]:
            self._queues[key] = Queue()

    def _queue(self, source: int, target: int, tag: object) -> Queue[Any]:
        return self._queues.setdefault((source, target, tag), Queue())  # in one step: others ask at the same time

    def _put(self, peer: int, message: torch.Tensor, tag: object) -> None:
        self._queue(self.me, peer, tag).put(message.clone())

    def _get(self, peer: int, tag: object) -> Any:
        try:
            return self._queue(peer, self.me, tag).get(timeout=self._timeout)
        except Empty:
            raise ExchangeError(f"owner {self.me} waited {self._timeout} s for owner {peer}") from None


class InMemoryMessages:
    """Receives that wait for their message."""

    def __init__(self, transport: InMemoryTransport, receives: Sequence[PeerBuffer], tag: int) -> None:
        self._transport, self._receives, self._tag = transport, receives, tag

    def arrivals(self) -> Iterator[int]:
        """In the order of the receives."""
        for at, (peer, room) in enumerate(self._receives):
            room.copy_(self._transport._get(peer, self._tag))
            yield at
