"""Copies of device tensors in CPU memory, many in one transfer, so that the host does not wait for each of them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch

from shardwise.checkpoint.segments import CHUNK
from shardwise.exchange.buffers import copy_all

ALIGN = 16  # bytes: every dtype can be viewed from there on


class HostCopies:
    """CPU copies of tensors, to be taken once each, best in order: each copies many of those after it, too.

    CPU tensors, and those of more than CHUNK bytes, are returned as they are.
    """

    def __init__(self, tensors: Sequence[torch.Tensor]) -> None:
        self._tensors = tensors
        self._copied = dict[int, torch.Tensor]()

    def take(self, number: int) -> torch.Tensor:
        """A copy of one of them, row-major, which is not kept."""
        tensor = self._tensors[number]
        if not _is_copied(tensor):
            return tensor
        if number not in self._copied:
            numbers = list(self._batch(number))
            self._copied.update(zip(numbers, _copies([self._tensors[at] for at in numbers]), strict=True))
        return self._copied.pop(number)

    def _batch(self, first: int) -> Iterator[int]:
        """The numbers of what is copied together: on one device, and at most CHUNK bytes."""
        total, device = 0, self._tensors[first].device
        for number in range(first, len(self._tensors)):
            tensor = self._tensors[number]
            if tensor.device != device or not _is_copied(tensor):
                continue
            total += _room(tensor)
            if number > first and total > CHUNK:
                return
            yield number


def _is_copied(tensor: torch.Tensor) -> bool:
    return not tensor.is_cpu and tensor.nbytes <= CHUNK


def _room(tensor: torch.Tensor) -> int:
    return -(-tensor.nbytes // ALIGN) * ALIGN


def _copies(tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """Packed on the device, and brought over in one transfer."""
    packed = torch.empty(sum(map(_room, tensors)), dtype=torch.uint8, device=tensors[0].device)
    copy_all(_views(packed, tensors), [tensor.detach() for tensor in tensors])
    return _views(packed.cpu(), tensors)


def _views(packed: torch.Tensor, tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    parts = torch.split(packed, [_room(tensor) for tensor in tensors])
    return [
        part[: tensor.nbytes].view(tensor.dtype).view(tensor.shape) for part, tensor in zip(parts, tensors, strict=True)
    ]
