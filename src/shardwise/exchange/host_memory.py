"""The memory under tensors: fresh in large pages (small ones, fault by fault, take longer than the copy), as bytes."""

from __future__ import annotations

import ctypes
import mmap
import os
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

PAGE = 2**21
_libc = ctypes.CDLL(None)


def fresh(shape: Sequence[int], dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """A tensor that is not filled."""
    found = torch.empty(tuple(shape), dtype=dtype, device=device)
    if device.type == "cpu" and found.nbytes >= 2 * PAGE:
        _ask_for_large_pages(found.data_ptr(), found.nbytes)
    return found


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


def available() -> int:
    """Bytes of memory that this machine can still give."""
    try:
        with open("/proc/meminfo") as lines:
            return 1024 * int(next(line for line in lines if line.startswith("MemAvailable")).split()[1])
    except OSError:  # not a Linux
        return int(os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE"))


def _ask_for_large_pages(address: int, size: int) -> None:
    """Where the system gives them to who asks; else nothing changes."""
    start = -(-address // PAGE) * PAGE
    stop = (address + size) // PAGE * PAGE
    if hasattr(mmap, "MADV_HUGEPAGE") and start < stop:
        _libc.madvise(ctypes.c_void_p(start), ctypes.c_size_t(stop - start), mmap.MADV_HUGEPAGE)
