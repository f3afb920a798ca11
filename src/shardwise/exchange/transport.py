"""What an exchange needs of a transport. The transports themselves are in `shardwise.transports`."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager
from typing import Literal, NamedTuple, Protocol, TypeVar
from weakref import WeakSet

import numpy as np
import numpy.typing as npt
import torch

from shardwise.exchange.buffers import Staging, ViewCache
from shardwise.exchange.messages import Tensors
from shardwise.geometry import Ints, Strides

T = TypeVar("T")
ReduceOp = Literal["max", "sum"]
PeerBuffer = tuple[int, torch.Tensor]  # an owner, and the bytes for it or the room for its bytes


class PostedMessages(Protocol):
    """Messages in flight."""

    def arrivals(self) -> Iterable[int]:
        """The number of each receive once it is filled. When this ends, all sends are done too."""
        ...


class Receive(NamedTuple):
    """Bytes to come from a peer. `into` is their final place, if they lie there as in the message."""

    peer: int
    bytes: int
    into: torch.Tensor | None


class Send(NamedTuple):
    """Bytes for a peer. `outof` is where they lie, if they lie there as in the message; otherwise `pack` writes them.

    `tensors` hold the cells, if the peer may read them there itself, in runs of about `run` bytes. `same` is the number
    of the first send of the round with the same bytes.
    """

    peer: int
    bytes: int
    outof: torch.Tensor | None
    pack: Callable[[torch.Tensor], None]
    tensors: Sequence[torch.Tensor]
    run: float
    same: int


class PeerTensors(Protocol):
    """Tensors of a peer that are read where they lie, instead of a message."""

    key: bytes  # differs if they lie elsewhere
    mapped: bool  # into this process; otherwise `read` copies from the memory of the peer

    @property
    def strides(self) -> Sequence[Strides]:
        """The strides of each tensor."""
        ...

    def bytes_of_each(self) -> Tensors:
        """The bytes of each tensor from its first element on. Only where they are mapped."""
        ...

    def read(self, here: Ints, tensor: Ints, offset: Ints, sizes: Ints) -> None:
        """Copy ranges of bytes from offsets of its tensors to addresses of this process."""
        ...


class PostedRound(Protocol):
    """The messages of a round in flight."""

    def arrivals(self) -> Iterator[tuple[int, torch.Tensor | PeerTensors | None]]:
        """The number of each receive once it has arrived, and its bytes; None if they are in their final place."""
        ...

    def finish(self) -> None:
        """This owner has read what it received. Returns when the peers have read what it sent."""
        ...


class Transport(Protocol):
    """Moves bytes between owners. Everybody makes the same calls in the same order.

    A new transport derives from `Endpoint`, which has all of this but `message_device`, `post_messages` and `fail`.
    """

    me: int
    owners: tuple[int, ...]  # everybody takes part in every exchange
    rows: dict[int, int]  # the number of each owner in `owners`
    name: str  # tells transports with common owners apart
    tagged: bool  # a message can only meet one with the same tag
    numbers: Iterator[int]  # of exchanges: the same for everybody
    agreed: set[bytes]  # headers of proposals that all have agreed on before
    staging: Staging
    views: WeakSet[ViewCache]  # of exchanges that are repeated

    def message_device(self, device: torch.device) -> torch.device:
        """Where messages of tensors on this device lie: there, or on a device that the transport can reach."""
        ...

    def post_messages(self, receives: Sequence[PeerBuffer], sends: Iterable[PeerBuffer], tag: int) -> PostedMessages:
        """Post the receives, then the sends as the iterator yields them. Both sides know all sizes beforehand."""
        ...

    def post_stream(self, receives: Sequence[PeerBuffer], sends: Iterable[PeerBuffer], tag: int) -> PostedMessages:
        """As `post_messages`, for messages that follow one another: a peer may wait for any of them when this fails."""
        ...

    def shares_memory(self, peer: int) -> bool:
        """True if messages to and from a peer need no link. Both know the same."""
        ...

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
        """Post the messages of a round of an exchange. They lie on `device`, which is a `message_device`.

        `direct` allows other ways than messages: shared memory.
        """
        ...

    @property
    def most_slots(self) -> int:
        """Up to so many owners agree by an all-to-all, which carries small messages; more of them by an all-reduce."""
        ...

    @property
    def most_in_slot(self) -> int:
        """Bytes of a small message that the all-to-all may carry."""
        ...

    @property
    def most_unasked(self) -> int:
        """Bytes of a small message that may be sent before its receiver has agreed to it.

        The tag of such messages, above its lower 31 bits, is a number that all know.
        """
        ...

    def post_small(self, receives: Sequence[PeerBuffer], sends: Sequence[PeerBuffer], tag: int) -> PostedMessages:
        """As `post_messages`, for few bytes, which may go another way."""
        ...

    def discard_unasked(self, number: int) -> None:
        """Nobody will receive the messages that were sent with this number."""
        ...

    def early_limit(self, device: torch.device, *, direct: bool) -> int:
        """Post a round of up to so many bytes before all have agreed: it is possible, and pays. -1 if it is not."""
        ...

    def together(self) -> AbstractContextManager[None]:
        """Rows of an agreement that are sent inside may leave with the first messages of a round, or at the end."""
        ...

    def all_to_all(
        self, rows: npt.NDArray[np.uint8], sizes: Sequence[int], number: int, *, in_order: bool = True
    ) -> Callable[[], Sequence[memoryview]]:
        """Send row i to `owners[i]`; the function that is returned waits for the rows of the others.

        Only `sizes[i]` bytes of row i need to arrive. `number` is that of the exchange. `in_order`: all owners make
        this call in the same order as their other collective calls; otherwise the number is used as a tag.
        """
        ...

    def all_reduce(
        self, numbers: torch.Tensor, op: ReduceOp, number: int, *, in_order: bool = True
    ) -> Callable[[], torch.Tensor]:
        """Start to reduce everybody's numbers (int64), element by element. As in `all_to_all`."""
        ...

    def all_gather(self, value: T) -> list[T]:
        """Everybody's values, in the order of the owners. Slow: for small and rare things."""
        ...

    def resource(self, kind: type[T], make: Callable[[], T]) -> T:
        """The one object of this type that belongs to the transport, made at first use. It lives as long."""
        ...

    def budget(self) -> AbstractContextManager[None]:
        """All waits inside share one timeout: a call never takes longer than that, however often it waits."""
        ...

    def abandon(self, posted: PostedRound) -> None:
        """Nobody will wait for this round: keep its memory, and use other staging from now on."""
        ...

    def fail(self, reason: str) -> None:
        """An exchange broke in the middle: later ones must never meet its messages."""
        ...

    def release(self) -> int:
        """Give back all memory that is kept for later exchanges; the number of bytes of staging."""
        ...
