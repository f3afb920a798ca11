"""Small messages of one tensor: elements picked by their numbers, in two steps whatever their shape.

ViewCache cost more than the copy of a few kilobytes. Numbers of elements are found once for all messages of a kind.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from shardwise.exchange.host_memory import bytes_at
from shardwise.exchange.schedule import Message, Tensors

Words = npt.NDArray[Any]


class ElementGather:
    """The tensors of one side of an exchange, as elements that are picked by number."""

    def __init__(self, tensors: Sequence[Tensors]) -> None:
        self._tensors = tensors
        self._flat = dict[tuple[int, int], Words | None]()

    def take(self, parcel: Message, room: npt.NDArray[np.uint8]) -> bool:
        """Write a message; False where this is not the way."""
        flat = self._elements(parcel)
        if flat is None:
            return False
        room.view(flat.dtype)[:] = flat[parcel.picks[1]]
        return True

    def put(self, parcel: Message, message: memoryview) -> bool:
        """Write the cells of a message; False where this is not the way."""
        flat = self._elements(parcel)
        if flat is None:
            return False
        flat[parcel.picks[1]] = np.frombuffer(message, flat.dtype)
        return True

    def _elements(self, parcel: Message) -> Words | None:
        """All elements of the tensor that the message is of, as they lie in memory."""
        number, picks = parcel.picks
        if not len(picks):
            return None
        part = parcel.parts[0]
        key = part.move, number
        if key not in self._flat:
            self._flat[key] = _flat(self._tensors[part.move][number], part.dtype)
        return self._flat[key]


def _flat(tensor: torch.Tensor, dtype: torch.dtype) -> Words | None:
    if tensor.dtype != dtype or tensor.device.type != "cpu":
        return None
    reach = 1 + sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    return bytes_at(tensor.data_ptr(), reach * dtype.itemsize).view(f"V{dtype.itemsize}")
