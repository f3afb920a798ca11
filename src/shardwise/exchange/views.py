"""The views that an exchange copies between, kept by who repeats one: they cost more than a small copy."""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Sequence

import torch

from shardwise.exchange.program import Pair
from shardwise.exchange.schedule import Parcel, Tensors

Kept = tuple[Hashable, list[torch.Tensor], list[torch.Tensor]]  # what they depend on, and the views of both sides


class Views:
    """Of one exchange, or of one that is repeated with the same moves: then only messages may lie elsewhere."""

    def __init__(self) -> None:
        self._kept = dict[Hashable, Kept]()
        self._slots: tuple[torch.Tensor, torch.Tensor] | None = None

    def slots(self, rows: int, size: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Room for what goes with the agreement, to and from everybody."""
        if self._slots is None:
            with torch.inference_mode(False):  # it may be used again outside of that mode
                self._slots = torch.empty(rows, size, dtype=torch.uint8), torch.empty(rows, size, dtype=torch.uint8)
        return self._slots

    def pack(self, parcel: Parcel, message: torch.Tensor, tensors: Sequence[Tensors]) -> None:
        """Copy our cells into the message."""
        ours, cells = self._of(parcel, message, tensors)
        _copy(cells, ours)

    def unpack(self, parcel: Parcel, message: torch.Tensor, tensors: Sequence[Tensors]) -> None:
        """Copy the cells of the message to where they belong. (Terms belong nowhere yet.)"""
        ours, cells = self._of(parcel, message, tensors)
        _copy(ours, cells)

    def copy(self, key: Hashable, pairs: Iterable[tuple[Pair, Tensors, Tensors]]) -> None:
        """Copy what stays with its owner, between tensors. `key` tells the turns apart."""
        if key not in self._kept:
            views = [(pair.here.of(source), pair.there.of(target)) for pair, source, target in pairs]
            self._kept[key] = None, [here for here, _ in views], [there for _, there in views]
        _, here, there = self._kept[key]
        _copy(there, here)

    def _of(
        self, parcel: Parcel, message: torch.Tensor, tensors: Sequence[Tensors]
    ) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
        at, known = message.data_ptr(), self._kept.get(id(parcel))
        if known is None or known[0] != (parcel, at):  # which also keeps the parcel, and so its id, alive
            with torch.inference_mode(False):  # they may be used again outside of that mode
                known = self._kept[id(parcel)] = (parcel, at), *parcel.views(message, tensors)
        return known[1], known[2]


def _copy(targets: list[torch.Tensor], sources: list[torch.Tensor]) -> None:
    """All of them in one call: what a call costs is more than what a small copy does."""
    if targets:
        torch._foreach_copy_(targets, sources)
