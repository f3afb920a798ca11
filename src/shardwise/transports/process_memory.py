"""Reads the memory of another process of the same user, where the kernel allows it: one copy (process_vm_readv)."""

from __future__ import annotations

import ctypes
import os
import secrets
from typing import NamedTuple

import numpy as np
import torch

from shardwise.errors import ExchangeError
from shardwise.geometry import Ints

MAX_RANGES = 1024  # of one call
MAX_BYTES = 2**30  # of a range, and about as many of a call

_token = torch.tensor(list(secrets.token_bytes(16)), dtype=torch.uint8)


class MemoryProbe(NamedTuple):
    """An address of a process and the bytes there: a peer that can read them can read the process's memory."""

    address: int
    content: bytes

    @staticmethod
    def of_this_process() -> MemoryProbe:
        """A random token, the same for all groups."""
        return MemoryProbe(_token.data_ptr(), _token.numpy().tobytes())

    def is_readable(self, pid: int) -> bool:
        """True if this process can read the probe in the memory of process `pid`."""
        room = torch.zeros(len(self.content), dtype=torch.uint8)
        try:
            read(pid, *np.array([[room.data_ptr()], [self.address], [len(self.content)]], np.int64))
        except (ExchangeError, AttributeError):  # the system may not have the call
            return False
        return room.numpy().tobytes() == self.content


def read(pid: int, here: Ints, there: Ints, sizes: Ints) -> None:
    """Copy ranges of bytes from addresses of process `pid` to addresses of this process."""
    if sizes.max(initial=0) > MAX_BYTES:
        here, there, sizes = _split(here, there, sizes)
    ours, theirs = np.stack([here, sizes], axis=1), np.stack([there, sizes], axis=1)
    ends, start = np.cumsum(sizes), 0
    while start < len(sizes):
        done = int(ends[start] - sizes[start])
        stop = min(start + MAX_RANGES, max(int(ends.searchsorted(done + MAX_BYTES, "right")), start + 1))
        count = _call(pid, ours[start:stop], theirs[start:stop])
        if count != ends[stop - 1] - done:
            why = (
                os.strerror(ctypes.get_errno()) if count < 0 else f"{count} of {ends[stop - 1] - done} bytes were read"
            )
            raise ExchangeError(f"the memory of process {pid} cannot be read: {why}")
        start = stop


def _call(pid: int, ours: Ints, theirs: Ints) -> int:
    count = ctypes.c_ulong(len(ours))
    local, remote = ctypes.c_void_p(ours.ctypes.data), ctypes.c_void_p(theirs.ctypes.data)
    return int(_libc.process_vm_readv(pid, local, count, remote, count, ctypes.c_ulong(0)))


def _split(here: Ints, there: Ints, sizes: Ints) -> tuple[Ints, Ints, Ints]:
    parts = -(-sizes // MAX_BYTES)
    row = np.repeat(np.arange(len(sizes)), parts)
    offset = MAX_BYTES * (np.arange(len(row)) - np.repeat(np.cumsum(parts) - parts, parts))
    return here[row] + offset, there[row] + offset, np.minimum(sizes[row] - offset, MAX_BYTES)


_libc = ctypes.CDLL(None, use_errno=True)
