"""The views that an exchange copies between, kept by who repeats one: they cost more than a small copy."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Sequence
from typing import Any, TypeVar

import torch

from shardwise.exchange.host_memory import outside_inference
from shardwise.exchange.program import Pair
from shardwise.exchange.schedule import Message, Tensors

T = TypeVar("T")
Sides = tuple[list[torch.Tensor], list[torch.Tensor]]  # views of the same cells


class ViewCache:
    """Of one exchange, or of one that is repeated with the same moves: then only messages may lie elsewhere."""

    def __init__(self) -> None:
        self._made = dict[tuple[int, type], tuple[Message, Hashable, Any]]()  # by the id of the parcel, and how it came
        self._spare: torch.Tensor | None = None
        self._local = dict[Hashable, Sides]()
        self._rooms = dict[int, torch.Tensor]()

    def room(self, parcel: Message) -> torch.Tensor:
        """Where a small message is kept: always in the same place, so that views of it can be, too."""
        if id(parcel) not in self._rooms:
            with outside_inference():
                self._rooms[id(parcel)] = torch.empty(parcel.bytes, dtype=torch.uint8)
        return self._rooms[id(parcel)]

    def pack(self, parcel: Message, message: torch.Tensor, tensors: Sequence[Tensors]) -> None:
        """Copy our cells into the message."""
        ours, cells = self._of(parcel, message, tensors)
        _copy(cells, ours)

    def unpack(self, parcel: Message, message: torch.Tensor, tensors: Sequence[Tensors]) -> None:
        """Copy the cells of the message to where they belong. (Terms belong nowhere yet.)"""
        ours, cells = self._of(parcel, message, tensors)
        _copy(ours, cells)

    def copy(self, key: Hashable, pairs: Iterable[tuple[Pair, Tensors, Tensors]]) -> None:
        """Copy what stays with its owner, between tensors. `key` tells the turns apart."""
        if key not in self._local:
            views = [(pair.here.of(source), pair.there.of(target)) for pair, source, target in pairs]
            self._local[key] = [there for _, there in views], [here for here, _ in views]
        _copy(*self._local[key])

    def spare(self, size: int) -> torch.Tensor:
        """Room for a message that is unpacked at once."""
        room = self._spare
        if room is None or room.numel() < size:
            self._spare = room = None  # given back before the larger one is asked for
            with outside_inference():
                self._spare = room = torch.empty(size, dtype=torch.uint8)
        return room[:size]

    def release(self) -> None:
        """Forget where messages lay, all but the small ones: to have views of memory keeps it. Another thread may."""
        self._spare = None
        for at in [at for at in list(self._made) if at[0] not in self._rooms]:
            self._made.pop(at, None)

    def known(self, parcel: Message, where: Hashable, make: Callable[[], T]) -> T:
        """What was made for a message that comes from there, kept until it comes from elsewhere."""
        at = id(parcel), type(where)
        kept = self._made.get(at)
        if kept is None or kept[:2] != (parcel, where):  # which also keeps the parcel, and so its id, alive
            with outside_inference():
                kept = self._made[at] = parcel, where, make()
        found: T = kept[2]
        return found

    def copy_known(self, parcel: Message, where: Hashable, make: Callable[[], Sides]) -> None:
        """Copy between views that are made once: to ours, from theirs."""
        _copy(*self.known(parcel, where, make))

    def _of(self, parcel: Message, message: torch.Tensor, tensors: Sequence[Tensors]) -> Sides:
        return self.known(parcel, message.data_ptr(), lambda: parcel.views(message, tensors))


def _copy(targets: list[torch.Tensor], sources: list[torch.Tensor]) -> None:
    """All of them in one call: what a call costs is more than what a small copy does."""
    if targets:
        torch._foreach_copy_(targets, sources)
