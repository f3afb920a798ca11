"""The container of our ShardedTensor."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist

from shardwise.exchange.messages import Tensors
from shardwise.layout import Layout
from shardwise.transports.members import owner_here

if TYPE_CHECKING:
    from shardwise.containers.sharded import ShardedTensor


@dataclass(frozen=True)
class OwnContainer:
    """The container of our ShardedTensor: it can have any layout."""

    layout: Layout
    group: dist.ProcessGroup | None = None

    @property
    def device(self) -> torch.device | None:
        """Any device."""
        return None

    def disassemble(self, x: ShardedTensor) -> Tensors:
        """Its shards."""
        return list(x.shards)

    def local(self, tensors: Tensors) -> Tensors:
        """They are plain tensors."""
        return [t.detach() for t in tensors]

    def from_local(self, local: Tensors) -> Tensors:
        """They are plain tensors."""
        return list(local)

    def assemble(self, tensors: Tensors) -> ShardedTensor | None:
        """A ShardedTensor, on the ranks that the layout knows."""
        from shardwise.containers.sharded import ShardedTensor  # which has such a container

        return ShardedTensor(tensors, self.layout, self.group) if owner_here(self.group) in self.layout else None

    def gradient(self, arrived: object = None) -> OwnContainer:
        """Whole where the value was partial: every term has the gradient of the value."""
        return replace(self, layout=self.layout.whole())

    def gradient_of(self, grads: Tensors) -> OwnContainer:
        """As `gradient`."""
        return self.gradient()

    def __deepcopy__(self, memo: dict[int, object]) -> OwnContainer:
        """Itself: it is frozen, and a process group cannot be copied."""
        return self
