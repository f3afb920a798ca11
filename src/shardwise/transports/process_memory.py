"""Straight from the memory of another process of this user into ours, where the kernel allows it: one copy."""

from __future__ import annotations

import ctypes
import os
import secrets

import numpy as np
import torch

from shardwise.errors import ExchangeError
from shardwise.geometry import Ints, ints

AT_ONCE = 1024  # ranges that one call takes
LARGEST = 2**30  # bytes of a range, and about as many in a call

_token = torch.tensor(list(secrets.token_bytes(16)), dtype=torch.uint8)  # what others read to see that they can


def trial() -> tuple[int, bytes]:
    """An address of this process, and what is there."""
    return _token.data_ptr(), _token.numpy().tobytes()


def allowed(pid: int, address: int, there: bytes) -> bool:
    """True where that can be read from here."""
    room = torch.zeros(len(there), dtype=torch.uint8)
    try:
        read(pid, ints([room.data_ptr()]), ints([address]), ints([len(there)]))
    except (ExchangeError, AttributeError):  # the system may not have it
        return False
    return room.numpy().tobytes() == there


def read(pid: int, here: Ints, there: Ints, sizes: Ints) -> None:
    """Copy ranges of bytes from addresses of a process to addresses of ours."""
    if sizes.max(initial=0) > LARGEST:
        here, there, sizes = _split(here, there, sizes)
    ours, theirs = np.stack([here, sizes], axis=1), np.stack([there, sizes], axis=1)
    ends, start = np.cumsum(sizes), 0
    while start < len(sizes):
        done = int(ends[start] - sizes[start])
        stop = min(start + AT_ONCE, max(int(ends.searchsorted(done + LARGEST, "right")), start + 1))
        got = _call(pid, ours[start:stop], theirs[start:stop])
        if got != ends[stop - 1] - done:
            why = os.strerror(ctypes.get_errno()) if got < 0 else f"{got} of {ends[stop - 1] - done} bytes were read"
            raise ExchangeError(f"the memory of process {pid} cannot be read: {why}")
        start = stop


def _call(pid: int, ours: Ints, theirs: Ints) -> int:
    count = ctypes.c_ulong(len(ours))
    local, remote = ctypes.c_void_p(ours.ctypes.data), ctypes.c_void_p(theirs.ctypes.data)
    return int(_libc.process_vm_readv(pid, local, count, remote, count, ctypes.c_ulong(0)))


def _split(here: Ints, there: Ints, sizes: Ints) -> tuple[Ints, Ints, Ints]:
    parts = -(-sizes // LARGEST)
    row = np.repeat(np.arange(len(sizes)), parts)
    offset = LARGEST * (np.arange(len(row)) - np.repeat(np.cumsum(parts) - parts, parts))
    return here[row] + offset, there[row] + offset, np.minimum(sizes[row] - offset, LARGEST)


_libc = ctypes.CDLL(None, use_errno=True)
