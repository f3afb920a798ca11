"""Bytes that messages are packed into and arrive in, kept between exchanges: fresh memory costs more than the copy."""

from __future__ import annotations

import torch

from shardwise.exchange.host_memory import fresh, outside_inference


class Staging:
    """One buffer per device, as large as the largest exchange so far needed it."""

    def __init__(self) -> None:
        self._buffers = dict[torch.device, torch.Tensor]()

    def take(self, sizes: list[int], device: torch.device, *, align: int) -> list[torch.Tensor]:
        """Room for messages of these sizes, each from a multiple of `align` on. What was taken before is free again."""
        total = sum(_up(size, align) for size in sizes)
        buffer = self._buffers.get(device)
        if buffer is None or buffer.numel() < total:
            self._buffers.pop(device, None)
            del buffer  # given back before the larger one is asked for
            with outside_inference():
                buffer = self._buffers[device] = fresh([total], torch.uint8, device)
        found, start = list[torch.Tensor](), 0
        for size in sizes:
            found.append(buffer[start : start + size])
            start += _up(size, align)
        return found

    @property
    def bytes(self) -> int:
        """How much is kept."""
        return sum(buffer.numel() for buffer in self._buffers.values())

    def release(self) -> None:
        """Give the memory back."""
        self._buffers.clear()


def _up(size: int, align: int) -> int:
    return -(-size // align) * align
