"""The callers of an operation: all ranks of a group, or one process without a group."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from typing import TypeVar

import torch
import torch.distributed as dist

from shardwise.job.agree import refusals, tell_all
from shardwise.job.plan import TensorInfo
from shardwise.job.session import group_transport
from shardwise.transports.members import has_default_group, job_rank

S = TypeVar("S")
K = TypeVar("K")


class Callers:
    """All ranks that call an operation together."""

    def __init__(self, operation: str, group: dist.ProcessGroup | None, *, alone: bool = False) -> None:
        self.operation, self.group = operation, group
        self.alone = alone or (group is None and not has_default_group())
        self.transport = None if self.alone else group_transport(group)
        self.me = job_rank() if self.transport is None else self.transport.me
        self.owners: tuple[int, ...] = (self.me,) if self.transport is None else self.transport.owners

    @property
    def broken(self) -> bool:
        """True if the ranks can no longer communicate; others may have continued."""
        return self.transport is not None and self.transport.broken

    @property
    def first(self) -> bool:
        """True for the rank that does what is done once."""
        return self.me == self.owners[0]

    def highest(self, numbers: torch.Tensor) -> torch.Tensor:
        """The elementwise maximum over all callers."""
        if self.transport is None:
            return numbers
        return self.transport.all_reduce(numbers, "max", next(self.transport.numbers))()

    def check(self, tensors: Mapping[str, TensorInfo]) -> None:
        """Refuse tensors of which others than the callers hold a part."""
        for layout in {tensor.layout for tensor in tensors.values()}:
            outside = sorted(set(layout.owners()) - set(self.owners))
            if outside:
                name = next(name for name, tensor in tensors.items() if tensor.layout == layout)
                raise ValueError(
                    f"{name!r} is on rank {outside[0]} too ({layout!r}), which does not call: "
                    f"the callers are {list(self.owners[:8])}"
                )

    def tell(self, say: Callable[[], tuple[K, S]], same: Mapping[str, object] | None = None) -> tuple[K, dict[int, S]]:
        """As `tell_all`: the kept value, and the shared values by rank. An error of one is raised for all."""
        return tell_all(self.transport, self.operation, say, same)

    def refusals(self) -> AbstractContextManager[None]:
        """As `refusals` of job.agree."""
        return nullcontext() if self.alone else refusals(self.operation)

    def from_first(self, say: Callable[[], S]) -> S:
        """The first caller's value. An error of one is raised for all."""
        _, answers = self.tell(lambda: (None, say()))
        return next(iter(answers.values()))
