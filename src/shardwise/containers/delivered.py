"""DeliveredTensor: a target that is handed to a function, whole, once it is filled."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Self

import torch
import torch.distributed as dist

from shardwise.containers.own_container import OwnContainer
from shardwise.containers.sharded import ShardedTensor
from shardwise.exchange.buffers import fresh
from shardwise.exchange.messages import Tensors
from shardwise.layout import Layout, local_shapes
from shardwise.transports.members import owner_here


@dataclass(frozen=True, eq=False)
class Delivery:
    """The names that are handed over in one call, and the function that takes this rank's tensors of each."""

    names: tuple[str, ...]
    take: Callable[[Mapping[str, Sequence[torch.Tensor]]], object]


class DeliveredTensor(ShardedTensor):
    """A target without memory of its own.

    Memory is allocated just before it is filled, handed over once all names of the delivery are filled, and then
    released. So a model with many such targets needs little memory at a time.
    """

    delivery: Delivery
    _dtype: torch.dtype
    _device: torch.device

    def __new__(
        cls,
        delivery: Delivery,
        layout: Layout,
        dtype: torch.dtype,
        *,
        device: torch.device | None = None,
        group: dist.ProcessGroup | None = None,
        owner: int | None = None,
    ) -> Self:
        target = cls._holding((), OwnContainer(layout, group), owner_here(group) if owner is None else owner)
        target.delivery, target._dtype, target._device = delivery, dtype, device or torch.device("cpu")
        return target

    @property
    def dtype(self) -> torch.dtype:  # type: ignore[override]
        """Of the tensor that is handed over."""
        return self._dtype

    @property
    def device(self) -> torch.device:  # type: ignore[override]
        """Of the tensor that is handed over."""
        return self._device

    def allocate(self) -> Tensors:
        """New memory for this rank's part."""
        return [fresh(shape, self.dtype, self.device) for shape in local_shapes(self.layout, self._owner)]
