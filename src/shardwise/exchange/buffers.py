"""Copies between tensors and messages: the views that are copied between, and the memory of messages."""

from __future__ import annotations

import ctypes
import mmap
from collections.abc import Callable, Hashable, Iterable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any, TypeVar

import numpy as np
import numpy.typing as npt
import torch

from shardwise.exchange.messages import Message, Pair, Tensors, view_of

PAGE = 2**21
CPU = torch.device("cpu")
_libc = ctypes.CDLL(None)


def fresh(shape: Sequence[int], dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """A tensor that is not filled."""
    tensor = torch.empty(tuple(shape), dtype=dtype, device=device)
    if device.type == "cpu" and tensor.nbytes >= 2 * PAGE:
        _ask_for_large_pages(tensor.data_ptr(), tensor.nbytes)
    return tensor


def bytes_at(address: int, size: int) -> npt.NDArray[np.uint8]:
    """Memory of a tensor that lives on. (Once `tensor.numpy()` was called, its storage can never be resized again.)"""
    memory: Any = (ctypes.c_uint8 * size).from_address(address)
    return np.frombuffer(memory, np.uint8)


def give_back(shared: torch.Tensor) -> None:
    """The pages of shared memory, whoever else has it mapped: what is read there from now on is zeros."""
    _libc.madvise(ctypes.c_void_p(shared.data_ptr()), ctypes.c_size_t(shared.nbytes), mmap.MADV_REMOVE)


def outside_inference() -> AbstractContextManager[Any]:
    """For what is kept: it may be used again outside of that mode. (To leave a mode that is not on takes its time.)"""
    return torch.inference_mode(False) if torch.is_inference_mode_enabled() else nullcontext()


def on_the_cpu() -> AbstractContextManager[Any]:
    """New tensors are on the CPU inside, whatever the default is. (A context of torch slows every call down.)"""
    return nullcontext() if torch.get_default_device().type == "cpu" else torch.device("cpu")


def _ask_for_large_pages(address: int, size: int) -> None:
    """Where the system gives them to who asks; else nothing changes."""
    start = -(-address // PAGE) * PAGE
    stop = (address + size) // PAGE * PAGE
    if hasattr(mmap, "MADV_HUGEPAGE") and start < stop:
        _libc.madvise(ctypes.c_void_p(start), ctypes.c_size_t(stop - start), mmap.MADV_HUGEPAGE)


class Staging:
    """One buffer per device and use, as large as the largest exchange so far needed it."""

    def __init__(self) -> None:
        self._buffers = dict[tuple[torch.device, str], torch.Tensor]()

    def take(self, sizes: list[int], device: torch.device, *, align: int, use: str = "messages") -> Tensors:
        """Room of these sizes, each from a multiple of `align` on. What was taken before for this use is free again."""
        total = sum(_up(size, align) for size in sizes)
        key = device, use
        buffer = self._buffers.get(key)
        if buffer is None or buffer.numel() < total:
            self._buffers.pop(key, None)
            del buffer  # given back before the larger one is asked for
            with outside_inference():
                buffer = self._buffers[key] = fresh([total], torch.uint8, device)
        rooms, start = list[torch.Tensor](), 0
        for size in sizes:
            rooms.append(buffer[start : start + size])
            start += _up(size, align)
        return rooms

    @property
    def bytes(self) -> int:
        """How much is kept."""
        return sum(buffer.numel() for buffer in self._buffers.values())

    def release(self) -> None:
        """Give the memory back."""
        self._buffers.clear()


def _up(size: int, align: int) -> int:
    return -(-size // align) * align


T = TypeVar("T")
Sides = tuple[Tensors, Tensors]  # views of the same cells


class ViewCache:
    """Of one exchange, or of one that is repeated with the same moves: then only messages may lie elsewhere."""

    def __init__(self) -> None:
        # by the id of the message: where it came from the last two times, and what was made for that
        self._views = dict[int, list[tuple[Message, Hashable, Any]]]()
        self._spare: torch.Tensor | None = None
        self._local = dict[Hashable, Sides]()
        self._rooms = dict[int, torch.Tensor]()

    def room(self, message: Message) -> torch.Tensor:
        """Where a small message is kept: always in the same place, so that views of it can be, too."""
        if id(message) not in self._rooms:
            with outside_inference():
                self._rooms[id(message)] = torch.empty(message.bytes, dtype=torch.uint8, device="cpu")
        return self._rooms[id(message)]

    def pack(self, message: Message, buffer: torch.Tensor, tensors: Sequence[Tensors]) -> None:
        """Copy our cells into the message."""
        near = self._near(message, buffer, tensors)
        ours, cells = self._of(message, near, tensors)
        copy_all(cells, ours)
        if near is not buffer:
            buffer.copy_(near)

    def unpack(self, message: Message, buffer: torch.Tensor, tensors: Sequence[Tensors]) -> None:
        """Copy the cells of the message to where they belong. (Terms belong nowhere yet.)"""
        near = self._near(message, buffer, tensors)
        if near is not buffer:
            near.copy_(buffer)
        ours, cells = self._of(message, near, tensors)
        copy_all(ours, cells)

    def _near(self, message: Message, buffer: torch.Tensor, tensors: Sequence[Tensors]) -> torch.Tensor:
        """The message itself, or room for it on the device of our tensors, so that one copy brings all pieces over."""
        device = message.device_of(tensors)
        if device is None or device == buffer.device or message.pieces < 2:
            return buffer
        return self.spare(message.bytes, device)

    def copy(self, key: Hashable, pairs: Iterable[tuple[Pair, Tensors, Tensors]]) -> None:
        """Copy what stays with its owner, between tensors. `key` tells the rounds apart."""
        if key not in self._local:
            views = [(view_of(pair.here, source), view_of(pair.there, target)) for pair, source, target in pairs]
            self._local[key] = [there for _, there in views], [here for here, _ in views]
        copy_all(*self._local[key])

    def spare(self, size: int, device: torch.device = CPU) -> torch.Tensor:
        """Room for a message that is packed or unpacked at once."""
        room = self._spare
        if room is None or room.numel() < size or room.device != device:
            self._spare = room = None  # given back before the larger one is asked for
            with outside_inference():
                self._spare = room = torch.empty(size, dtype=torch.uint8, device=device)
        return room[:size]

    def release(self) -> None:
        """Forget where messages lay, all but the small ones: to have views of memory keeps it. Another thread may."""
        self._spare = None
        for at in [at for at in list(self._views) if at not in self._rooms]:
            self._views.pop(at, None)

    def get_or_make(self, message: Message, where: Hashable, make: Callable[[], T]) -> T:
        """What was made for a message that comes from there. Two places take turns: staging has two halves."""
        entries = self._views.get(id(message), ())
        for kept, place, views in entries:
            if place == where and kept is message:  # which also keeps the message, and so its id, alive
                made: T = views
                return made
        with outside_inference():
            new = make()
        self._views[id(message)] = [(message, where, new), *entries[:1]]
        return new

    def _of(self, message: Message, buffer: torch.Tensor, tensors: Sequence[Tensors]) -> Sides:
        return self.get_or_make(message, buffer.data_ptr(), lambda: message.views(buffer, tensors))


def copy_all(targets: Tensors, sources: Tensors) -> None:
    """All of them in one call: what a call costs is more than what a small copy does."""
    if all(tensor.device.type == "cpu" for tensor in (*targets[:1], *sources[:1])):
        if targets:
            torch._foreach_copy_(targets, sources)
        return
    together = dict[tuple[torch.dtype, ...], list[tuple[torch.Tensor, torch.Tensor]]]()
    for target, source in zip(targets, sources, strict=True):
        pair = _alike(target, source)
        if pair is None:
            target.copy_(source)
        else:
            together.setdefault((target.dtype, source.dtype), []).append(pair)
    for pairs in together.values():
        torch._foreach_copy_([target for target, _ in pairs], [source for _, source in pairs])


def _alike(target: torch.Tensor, source: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor] | None:
    """A pair that CUDA copies with many others in one launch; None if it cannot, and one such pair stops all others.

    Both must have the same strides, also of dims of size 1, and no gaps.
    """
    if target.device != source.device:
        return None
    if 1 in target.shape:
        target, source = target.squeeze(), source.squeeze()
    dense = target.stride() == source.stride() and target.is_contiguous()
    return (target, source) if dense else None


Words = npt.NDArray[Any]


class ElementGather:
    """The tensors of one side of an exchange, as elements that are picked by number."""

    def __init__(self, tensors: Sequence[Tensors]) -> None:
        self._tensors = tensors
        self._flat = dict[tuple[int, int], Words | None]()

    def take(self, message: Message, room: npt.NDArray[np.uint8]) -> bool:
        """Write a message; False where this is not the way."""
        flat = self._elements(message)
        if flat is None:
            return False
        room.view(flat.dtype)[:] = flat[message.picks[1]]
        return True

    def put(self, message: Message, buffer: memoryview) -> bool:
        """Write the cells of a message; False where this is not the way."""
        flat = self._elements(message)
        if flat is None:
            return False
        flat[message.picks[1]] = np.frombuffer(buffer, flat.dtype)
        return True

    def _elements(self, message: Message) -> Words | None:
        """All elements of the tensor that the message is of, as they lie in memory."""
        number, picks = message.picks
        if not len(picks):
            return None
        part = message.parts[0]
        key = part.move, number
        if key not in self._flat:
            self._flat[key] = _flat(self._tensors[part.move][number], part.dtype)
        return self._flat[key]


def _flat(tensor: torch.Tensor, dtype: torch.dtype) -> Words | None:
    if tensor.dtype != dtype or tensor.device.type != "cpu":
        return None
    reach = 1 + sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    return bytes_at(tensor.data_ptr(), reach * dtype.itemsize).view(f"V{dtype.itemsize}")
