"""What an exchange needs of a transport. Transports themselves are in `shardwise.transports`."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from itertools import count
from typing import Any, Literal, NamedTuple, Protocol, TypeVar
from weakref import WeakSet

import numpy as np
import numpy.typing as npt
import torch

from shardwise.exchange.buffers import Staging, ViewCache
from shardwise.geometry import Ints, Strides

AHEAD = 2**22  # bytes of messages that it pays to send before all have agreed, although they need staging
T = TypeVar("T")
PeerBuffer = tuple[int, torch.Tensor]  # a peer, and the bytes for it or the room for its bytes


class Receive(NamedTuple):
    """Bytes to come from a peer; `into` is where they belong, where they lie there as in the message."""

    peer: int
    bytes: int
    into: torch.Tensor | None


class Send(NamedTuple):
    """Bytes for a peer; `outof` is where they lie already, where that is as in the message; else `pack` writes them.

    `tensors` are those that the cells lie in, where the peer could read them there itself, in runs of about `run`
    bytes. `same` is the number of the first send of the turn with the same bytes.
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

    key: bytes  # tells apart what lies elsewhere
    attached: bool  # its memory is not mapped here, but can be read

    @property
    def strides(self) -> Sequence[Strides]:
        """Of each tensor."""
        ...

    def mapped(self) -> list[torch.Tensor]:
        """The bytes of each from its first element on, where they are mapped."""
        ...

    def read(self, here: Ints, tensor: Ints, offset: Ints, sizes: Ints) -> None:
        """Copy ranges of bytes from offsets of its tensors to addresses here."""
        ...


class PostedRound(Protocol):
    """The messages of a turn under way."""

    def arrivals(self) -> Iterator[tuple[int, torch.Tensor | PeerTensors | None]]:
        """The number of each receive once it is there, and its bytes; None where they are where they belong."""
        ...

    def finish(self) -> None:
        """What came is read no more; when this returns, others have read what was sent."""
        ...


class Swap(Protocol):
    """Messages under way."""

    def arrivals(self) -> Iterator[int]:
        """The numbers of the receives, each once it is filled; when it ends, all sends are done too."""
        ...


class Endpoint:
    """One rank's end of a transport: who is on it, and what exchanges leave for later ones."""

    def __init__(self, me: int, owners: Sequence[int]) -> None:
        self.number(me, owners)
        self.numbers: Iterator[int] = count()  # of its exchanges, the same for everybody
        self.agreed = set[bytes]()  # the terms that all have agreed on before
        self.staging = Staging()
        self.views = WeakSet[ViewCache]()  # of exchanges that are repeated
        self._attached = dict[type[Any], Any]()

    def attached(self, kind: type[T], make: Callable[[], T]) -> T:
        """The one object of this type that belongs to the transport, made when it is first asked for."""
        if kind not in self._attached:
            self._attached[kind] = make()
        found: T = self._attached[kind]
        return found

    def budget(self) -> AbstractContextManager[None]:
        """All waits inside share one timeout. This transport has none."""
        return nullcontext()

    def number(self, me: int, owners: Sequence[int]) -> None:
        """Everybody on this transport, and so everybody who takes part in its exchanges."""
        self.me, self.owners = me, tuple(owners)
        self.rows = {owner: row for row, owner in enumerate(self.owners)}

    def ahead(self: Transport, device: torch.device, *, direct: bool) -> int:
        """None where messages cannot be told apart."""
        return AHEAD if self.tagged else -1

    def turn(
        self: Transport,
        receives: Sequence[Receive],
        sends: Sequence[Send],
        tag: int,
        device: torch.device,
        align: int,
        *,
        direct: bool = True,
    ) -> PostedRound:
        """Post the messages of a turn, those that have no place of their own by way of staging."""
        sizes = [one.bytes for one in receives if one.into is None] + [one.bytes for one in sends if one.outof is None]
        staged = iter(self.staging.take(sizes, device, align=align))
        rooms = [next(staged) if one.into is None else one.into for one in receives]

        def messages() -> Iterator[PeerBuffer]:
            for one in sends:
                room = next(staged) if one.outof is None else one.outof
                if one.outof is None:
                    one.pack(room)
                yield one.peer, room

        taken = [(one.peer, room) for one, room in zip(receives, rooms, strict=True)]
        return Staged(self.swap(taken, messages(), tag), receives, rooms)


class Staged:
    """A turn by messages."""

    def __init__(self, swap: Swap, receives: Sequence[Receive], rooms: Sequence[torch.Tensor]) -> None:
        self._swap, self._receives, self._rooms = swap, receives, rooms

    def arrivals(self) -> Iterator[tuple[int, torch.Tensor | None]]:
        """As they come."""
        for at in self._swap.arrivals():
            yield at, self._rooms[at] if self._receives[at].into is None else None

    def finish(self) -> None:
        """All was sent when the last had come."""


class Transport(Protocol):
    """Moves bytes between owners. Everybody makes the same calls in the same order."""

    me: int
    owners: tuple[int, ...]
    rows: dict[int, int]
    numbers: Iterator[int]
    agreed: set[bytes]
    staging: Staging
    views: WeakSet[ViewCache]
    name: str  # tells transports with common owners apart
    tagged: bool  # messages with different tags never meet

    def attached(self, kind: type[T], make: Callable[[], T]) -> T:
        """The one object of this type that belongs to the transport, made when it is first asked for."""
        ...

    def budget(self) -> AbstractContextManager[None]:
        """All waits inside share one timeout: a call never takes longer than that, however many waits it has."""
        ...

    def serves(self, device: torch.device) -> torch.device:
        """Where the bytes of tensors on this device are to lie: the same device, or one that the transport can reach."""
        ...

    def slots(
        self, mine: npt.NDArray[np.uint8], sizes: Sequence[int], *, apart: int | None = None
    ) -> Callable[[], Sequence[memoryview]]:
        """Start to swap rows of bytes: row i goes to `owners[i]`; what is returned waits for the rows of the others.

        `sizes` says how many bytes of each row matter: others need not come. `apart`, a number that all know, is given
        where this may happen between other calls of the owners.
        """
        ...

    def reduced(
        self, numbers: torch.Tensor, op: Literal["max", "sum"], *, apart: int | None = None
    ) -> Callable[[], torch.Tensor]:
        """Start to reduce everybody's numbers (int64), element by element. `apart` as in `slots`."""
        ...

    def swap(self, receives: Sequence[PeerBuffer], sends: Iterable[PeerBuffer], tag: int) -> Swap:
        """Post the receives, then the sends as they come. Both sides know all sizes beforehand."""
        ...

    def ahead(self, device: torch.device, *, direct: bool) -> int:
        """The bytes of a turn up to which it may be posted before all have agreed, and pays. As in `turn`."""
        ...

    def turn(
        self,
        receives: Sequence[Receive],
        sends: Sequence[Send],
        tag: int,
        device: torch.device,
        align: int,
        *,
        direct: bool = True,
    ) -> PostedRound:
        """Post the messages of a turn of an exchange, which lie on a device that the transport serves.

        `direct` allows for other ways than messages of the group.
        """
        ...

    def tell(self, value: Any) -> list[Any]:
        """Everybody's values, in the order of the owners. Slow, for small things that happen seldom."""
        ...

    def abandon(self, posted: Any) -> None:
        """Messages that nobody will wait for: keep their memory, and stage elsewhere from now on."""
        ...

    def fail(self, reason: str) -> None:
        """An exchange broke in the middle: later ones must never meet what it left behind."""
        ...


def combined(a: torch.Tensor, b: torch.Tensor, op: str) -> torch.Tensor:
    """Two rows of numbers as one."""
    return torch.maximum(a, b) if op == "max" else a + b
