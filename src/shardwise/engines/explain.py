"""How each name gets into the engine: direct, through the engine's own loader, or not at all; and why."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from math import prod
from typing import Literal

import torch

from shardwise.geometry import Box
from shardwise.quoting import in_line

SHOWN = 4  # boxes of a rank in a line

Way = Literal["direct", "loader", "unused"]


@dataclass(frozen=True)
class RecordedName:
    """How a tensor of the checkpoint gets into the engine. `boxes`: what each rank receives, where it goes direct."""

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    way: Way
    boxes: Mapping[int, Sequence[Box]] = field(default_factory=dict)
    reason: str = ""

    def bytes(self, ranks: int) -> int:
        """The bytes of this name that all ranks together receive."""
        if self.way == "loader":
            return prod(self.shape) * self.dtype.itemsize * ranks
        return sum(box.volume for boxes in self.boxes.values() for box in boxes) * self.dtype.itemsize

    def __str__(self) -> str:
        size = "x".join(map(str, self.shape)) or "scalar"
        how = {"direct": self._direct(), "loader": f"through the loader: {self.reason}", "unused": "not used"}[self.way]
        return f"{in_line(self.name)}  {size} {str(self.dtype).removeprefix('torch.')}  {how}"

    def _direct(self) -> str:
        if len(self.boxes) > 1 and len({tuple(boxes) for boxes in self.boxes.values()}) == 1:
            return f"direct: every rank {_shown(next(iter(self.boxes.values())))}"
        return "direct: " + ", ".join(f"rank {rank} {_shown(boxes)}" for rank, boxes in self.boxes.items())


def _shown(boxes: Sequence[Box]) -> str:
    return " ".join(map(str, boxes[:SHOWN])) + (f" and {len(boxes) - SHOWN} more" if len(boxes) > SHOWN else "")


@dataclass(frozen=True)
class Explanation:
    """What a recording found. `problems`: cells that nothing fills, or that two names fill (with strict=False)."""

    names: tuple[RecordedName, ...]
    ranks: tuple[int, ...]
    problems: tuple[str, ...] = ()

    @property
    def direct(self) -> list[str]:
        """Names whose cells go straight to the parameters."""
        return [one.name for one in self.names if one.way == "direct"]

    @property
    def through_loader(self) -> dict[str, str]:
        """Names that are handed to the engine's loader, with the reason."""
        return {one.name: one.reason for one in self.names if one.way == "loader"}

    @property
    def unused(self) -> list[str]:
        """Names that the loader drops."""
        return [one.name for one in self.names if one.way == "unused"]

    @property
    def bytes(self) -> int:
        """The bytes that all ranks of the engine together receive."""
        return sum(one.bytes(len(self.ranks)) for one in self.names)

    @property
    def bytes_whole(self) -> int:
        """The bytes that they would receive if every rank got every tensor whole, as loaders expect it."""
        return sum(prod(one.shape) * one.dtype.itemsize for one in self.names) * len(self.ranks)

    def __str__(self) -> str:
        ways = f"{len(self.direct)} direct, {len(self.through_loader)} through the loader, {len(self.unused)} unused"
        head = f"names: {ways}; bytes to all ranks: {self.bytes:,} (whole tensors: {self.bytes_whole:,})"
        return "\n".join([head, *map(in_line, self.problems), *map(str, self.names)])
