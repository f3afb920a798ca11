"""What an exchange needs of a wire. Wires themselves are in `shardwise.wires`."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import count
from typing import Any, Literal, Protocol

import torch

from shardwise.exchange.staging import Staging

Message = tuple[int, torch.Tensor]  # a peer, and the bytes for it or the room for its bytes


class Swap(Protocol):
    """Messages under way."""

    def arrivals(self) -> Iterator[int]:
        """The numbers of the receives, each once it is filled; when it ends, all sends are done too."""
        ...


class End:
    """One owner's end of a wire: who is on it, and what exchanges leave for later ones."""

    def __init__(self, me: int, owners: Sequence[int]) -> None:
        self.me = me
        self.owners = tuple(owners)  # everybody on this wire, and so everybody who takes part in its exchanges
        self.rows = {owner: row for row, owner in enumerate(self.owners)}
        self.numbers: Iterator[int] = count()  # of its exchanges, the same for everybody
        self.agreed = set[bytes]()  # the terms that all have agreed on before
        self.staging = Staging()
        self.memory = dict[Any, Any]()  # what earlier calls left for later ones


class Wire(Protocol):
    """Moves bytes between owners. Everybody makes the same calls in the same order."""

    me: int
    owners: tuple[int, ...]
    rows: dict[int, int]
    numbers: Iterator[int]
    agreed: set[bytes]
    staging: Staging
    memory: dict[Any, Any]
    name: str  # tells wires with common owners apart
    tagged: bool  # messages with different tags never meet

    def serves(self, device: torch.device) -> torch.device:
        """Where the bytes of tensors on this device are to lie: the same device, or one that the wire can reach."""
        ...

    def slots(
        self, mine: torch.Tensor, theirs: torch.Tensor, *, apart: int | None = None
    ) -> Callable[[], torch.Tensor]:
        """Start to swap rows of bytes: row i goes to `owners[i]`; what is returned waits for the rows of the others.

        `apart`, a number that all know, is given where this may happen between other calls of the owners.
        """
        ...

    def reduced(
        self, numbers: torch.Tensor, op: Literal["max", "sum"], *, apart: int | None = None
    ) -> Callable[[], torch.Tensor]:
        """Start to reduce everybody's numbers (int64), element by element. `apart` as in `slots`."""
        ...

    def swap(self, receives: Sequence[Message], sends: Iterable[Message], tag: int) -> Swap:
        """Post the receives, then the sends as they come. Both sides know all sizes beforehand."""
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
