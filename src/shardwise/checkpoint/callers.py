"""Who calls: all ranks of a group, or one process where there is none."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, TypeVar

import torch.distributed as dist

from shardwise.tensor.together import together
from shardwise.tensor.wiring import group_wire

S = TypeVar("S")
T = TypeVar("T")


class Callers:
    """Everybody who calls an operation together."""

    def __init__(self, operation: str, group: dist.ProcessGroup | None) -> None:
        self.operation, self.group = operation, group
        self.alone = group is None and not (dist.is_available() and dist.is_initialized())
        self.me = 0 if self.alone else dist.get_rank()
        self.owners: tuple[int, ...] = (0,) if self.alone else group_wire(group).owners

    @property
    def first(self) -> bool:
        """True for the one who does what is to be done once."""
        return self.me == self.owners[0]

    def together(self, say: Callable[[], S], conclude: Callable[[Mapping[int, S]], T], **same: Any) -> T:
        """What follows from what all of them say. What goes wrong for one is raised for all."""
        if self.alone:
            return conclude({0: say()})
        return together(self.operation, say, conclude, group=self.group, **same)
