"""Snapshots: a copy of this rank's tensors in memory of its own, so that the originals may change while it is sent."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from functools import lru_cache
from math import prod
from typing import TYPE_CHECKING, NamedTuple

import torch

from shardwise.exchange.buffers import copy_all, fresh, on_the_cpu, outside_inference
from shardwise.exchange.messages import Tensors

if TYPE_CHECKING:
    from shardwise.transports.segments import SharedSegment

ALIGN = 64  # bytes: where any dtype may start, on a cache line of its own


class MemorySpec(NamedTuple):
    """Shape, dtype and device of a tensor that memory is made for."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    device: torch.device

    @staticmethod
    def of(tensor: torch.Tensor | MemorySpec) -> MemorySpec:
        """A tensor like this one."""
        return MemorySpec(tuple(tensor.shape), tensor.dtype, tensor.device)

    @property
    def bytes(self) -> int:
        """Of all elements."""
        return prod(self.shape) * self.dtype.itemsize


Like = Mapping[str, Sequence[torch.Tensor | MemorySpec]]


class Snapshot:
    """A side of a job whose memory is a copy. CPU tensors lie in one piece of shared memory, where there is some.

    The memory is allocated once and taken again and again: the first `take` of new memory costs much more than a copy.
    `constant` tensors never change: they are not copied.
    """

    def __init__(self, like: Like, constant: Mapping[str, Tensors] | None = None) -> None:
        specs, self._constant, self._identity = _specs(like), constant or {}, object()
        with outside_inference(), on_the_cpu():
            near = {name: all(one.device.type == "cpu" for one in several) for name, several in specs.items()}
            in_memory = {name: specs[name] for name in specs if near[name]}
            self._piece = shared_memory(bytes_in_one_piece(in_memory))
            self._memory = cut_up(self._piece, in_memory)
            for name in (name for name in specs if not near[name]):
                self._memory[name] = [fresh(*one) for one in specs[name]]

    def fits(self, like: Like) -> bool:
        """True if these tensors can be taken into this memory."""
        return _specs(like) == _specs(self._memory)

    @property
    def segment(self) -> SharedSegment | None:
        """The shared memory of all its tensors, as `cut_up` finds them there; None if some are elsewhere."""
        if any(tensor.device.type != "cpu" for several in self._memory.values() for tensor in several):
            return None
        return segment_of(self._piece)

    @property
    def bytes(self) -> int:
        """Of all its tensors."""
        return sum(tensor.nbytes for tensors in self._memory.values() for tensor in tensors)

    def take(self, tensors: Mapping[str, Tensors]) -> None:
        """Copy the current values."""
        with torch.no_grad():
            copy_all(
                [ours for name in tensors for ours in self._memory[name]],
                [theirs.detach() for name in tensors for theirs in tensors[name]],
            )

    def memory(self, name: str) -> Tensors:
        """The copies of this rank's local tensors."""
        return self._memory.get(name) or self._constant.get(name, [])

    def stamp(self) -> object:
        """Its memory never moves. (Not its id, which another one may have later.)"""
        return self._identity

    def sent(self, links: Sequence[int]) -> None:
        """The copies stay."""

    def filled(self, names: Sequence[str]) -> None:
        """As a target: they stay here until they are looked up."""


def _specs(like: Like) -> dict[str, list[MemorySpec]]:
    return {name: list(map(MemorySpec.of, several)) for name, several in like.items()}


def bytes_in_one_piece(specs: Mapping[str, Sequence[MemorySpec]]) -> int:
    """The size of memory that `cut_up` needs."""
    return max(sum(_padded(one.bytes) for several in specs.values() for one in several), 1)


def cut_up(piece: torch.Tensor, specs: Mapping[str, Sequence[MemorySpec]]) -> dict[str, Tensors]:
    """Tensors in a piece of memory, one after the other: who knows what they are knows where they are."""
    memory, start, whole = dict[str, Tensors](), 0, dict[torch.dtype, torch.Tensor]()
    for name, several in specs.items():
        memory[name] = []
        for one in several:
            if one.dtype not in whole:
                whole[one.dtype] = piece[: len(piece) // one.dtype.itemsize * one.dtype.itemsize].view(one.dtype)
            memory[name].append(_place_in(whole[one.dtype], start, one.shape))
            start += _padded(one.bytes)
    return memory


def _place_in(whole: torch.Tensor, start: int, shape: tuple[int, ...]) -> torch.Tensor:
    """A contiguous tensor that starts after so many bytes: one call of torch, for there may be thousands of them."""
    return whole.as_strided(shape, _strides(shape), int(whole.storage_offset()) + start // whole.itemsize)


@lru_cache(maxsize=4096)
def _strides(shape: tuple[int, ...]) -> tuple[int, ...]:
    return torch.empty(shape, device="meta").stride()


def _padded(size: int) -> int:
    return -(-size // ALIGN) * ALIGN


def segment_of(memory: torch.Tensor) -> SharedSegment | None:
    """The shared memory that a tensor lies in; None if it lies elsewhere."""
    if sys.platform != "linux":
        return None
    from shardwise.transports.segments import this_process

    place = this_process.shared_tensors.place(memory)
    return None if place is None else place.segment


def shared_memory(size: int) -> torch.Tensor:
    """Shared memory that peers of this host read in place; plain memory where the system has none to give."""
    if sys.platform == "linux":
        from shardwise.transports.segments import SharedMemoryError, this_process

        try:
            return this_process.shared_tensors.new(size)
        except SharedMemoryError:
            pass  # peers are sent messages instead
    return fresh([size], torch.uint8, torch.device("cpu"))
