"""What the ranks of a group have saved in one forward pass, told to each other while they go on."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Hashable, Mapping, Sequence
from hashlib import blake2b
from typing import TYPE_CHECKING, Any

import torch

from shardwise.errors import ExchangeError
from shardwise.exchange import in_words
from shardwise.exchange.wire import Message

if TYPE_CHECKING:
    from shardwise.activation.kept import Home

WORDS = 16  # of 8 bytes: how many, a digest of each, and one of those for which there is no room
BLOCKS, BLOCK = 64, 64  # of bytes, out of which a digest is made


class Announcement:
    """Digests of what was saved. They are there long before backward needs them."""

    def __init__(self, home: Home, number: int, labels: Sequence[str], digests: Sequence[int]) -> None:
        self.home, self.labels = home, list(labels)
        self.mine = _words(digests)
        others = [owner for owner in home.wire.owners if owner != home.wire.me]
        self.theirs = {owner: torch.empty_like(self.mine) for owner in others}
        receives: list[Message] = [(owner, room.view(torch.uint8)) for owner, room in self.theirs.items()]
        sends: list[Message] = [(owner, self.mine.view(torch.uint8)) for owner in others]
        self._swap = home.wire.swap(receives, sends, home.tag("announcement", number))
        self._checked = False

    def check(self) -> None:
        """Raise the same error on every rank unless all have saved the same."""
        if self._checked:
            return
        for _ in self._swap.arrivals():
            pass
        told = {self.home.wire.me: self.mine, **self.theirs}
        if any(not torch.equal(words, self.mine) for words in self.theirs.values()):
            raise ExchangeError(self._difference({owner: words.tolist() for owner, words in told.items()}))
        self._checked = True

    def _difference(self, told: dict[int, list[int]]) -> str:
        at = next(at for at in range(WORDS) if len({words[at] for words in told.values()}) > 1)
        what = "the number of tensors" if at == 0 else self._label(at - 1)
        return difference(what, {owner: words[at] for owner, words in told.items()})

    def _label(self, at: int) -> str:
        return self.labels[at] if at < min(len(self.labels), WORDS - 2) else "one of the last tensors that were saved"

    def __del__(self) -> None:
        self.home.leave(self._swap, (self.mine, self.theirs))


def difference(what: str, told: Mapping[int, Hashable]) -> str:
    """In words, the same on every rank."""
    groups = defaultdict[Hashable, list[int]](list)
    for owner in sorted(told):
        groups[told[owner]].append(owner)
    who = ", other than ".join(in_words(owners) for owners in groups.values())
    return (
        f"input_reshard: {what} is not the same on all ranks of the mesh: {who}. What differs cannot be kept in parts: "
        f"are these inputs sharded, or did a rank take another way? (check=True compares all values in forward)"
    )


def digest(whole: torch.Tensor, *, sample: bool) -> int:
    """61 bits of the bytes, or of a sample of them."""
    if sample and len(whole) > BLOCKS * BLOCK:
        whole = whole[: len(whole) // BLOCKS * BLOCKS].view(BLOCKS, -1)[:, :BLOCK]
    data: Any = whole.cpu().contiguous().numpy()
    return int.from_bytes(blake2b(data, digest_size=8).digest(), "big") >> 3


def _words(digests: Sequence[int]) -> torch.Tensor:
    room = WORDS - 2
    rest = hash(tuple(digests[room:])) if len(digests) > room else 0
    return torch.tensor([len(digests), *digests[:room], *[0] * (room - len(digests)), rest])
