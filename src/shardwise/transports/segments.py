"""Shared memory without a name: nothing is left behind, and only who is handed the descriptor can read it."""

from __future__ import annotations

import ctypes
import errno
import fcntl
import mmap
import os
import weakref
from collections import defaultdict
from collections.abc import Callable
from itertools import count
from threading import Lock, RLock
from typing import Any, NamedTuple

import torch

from shardwise.errors import ExchangeError
from shardwise.exchange.buffers import available, give_back, outside_inference
from shardwise.transports.unix_packets import Key, Post, close

SEALS = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL  # nobody can make others fault by cutting it
HANDED, DROPPED = range(2)  # kinds of packets of transport 0: a segment, by its number; which segments are no more
SHM = "/dev/shm"
LARGE = 2**26  # bytes that it takes longer to give than to ask whether they are there

_numbers = count(1)


class SharedMemoryError(ExchangeError):
    """Shared memory that could not be had."""


class Segment:
    """Memory that others may map: `file` is its descriptor, `number` tells it apart from others of this process."""

    def __init__(self, file: int, size: int, *, own: bool = True) -> None:
        self.file, self.size, self.number = file, size, next(_numbers)
        weakref.finalize(self, _forget, self.number, file if own else None).atexit = False

    @staticmethod
    def made(size: int) -> Segment:
        """A new one. All of it is there, so that no write into it can fail."""
        size = max(size, 1)
        if size > LARGE and size > (most := available()):  # the system would try, and kill somebody for it
            raise SharedMemoryError(f"{size} bytes of shared memory cannot be had: {most} bytes of memory are left")
        try:
            file = os.memfd_create("shardwise", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        except OSError as error:
            raise SharedMemoryError(f"the system gives no shared memory: {_remedied(error)}") from error
        try:
            os.fchmod(file, 0o600)
            os.posix_fallocate(file, 0, size)
            fcntl.fcntl(file, fcntl.F_ADD_SEALS, SEALS)
        except OSError as error:
            os.close(file)
            raise SharedMemoryError(f"{size} bytes of shared memory cannot be had: {error.strerror}") from error
        return Segment(file, size)

    def mapped(self, when_gone: Callable[[], Any] | None = None) -> torch.Tensor:
        """Its bytes here."""
        return _mapped(self.file, self.size, when_gone)


def _forget(number: int, file: int | None) -> None:
    if file is not None:
        os.close(file)
    hand.dropped.append(number)


def _mapped(file: int, size: int, when_gone: Callable[[], Any] | None = None) -> torch.Tensor:
    """The bytes of a descriptor, which may be closed then; `when_gone` is called once nothing uses them any more.

    (Python's own mmap keeps a descriptor of every mapping, and a model has many tensors.)
    """
    address = _libc.mmap(None, size, mmap.PROT_READ | mmap.PROT_WRITE, mmap.MAP_SHARED, file, 0)
    if address == MAP_FAILED:
        why = os.strerror(ctypes.get_errno())
        raise SharedMemoryError(f"{size} bytes of shared memory cannot be mapped: {why}")
    memory = (ctypes.c_uint8 * size).from_address(address)
    weakref.finalize(memory, _unmap, address, size, when_gone).atexit = False
    with outside_inference():
        return torch.frombuffer(memory, dtype=torch.uint8)


def _unmap(address: int, size: int, when_gone: Callable[[], Any] | None) -> None:
    if when_gone is not None:  # before other memory can come to that place
        when_gone()
    _libc.munmap(address, size)


def _system() -> Any:
    found = ctypes.CDLL(None, use_errno=True)
    words: list[Any] = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_int, ctypes.c_int, ctypes.c_longlong]
    found.mmap.restype, found.mmap.argtypes = ctypes.c_void_p, words
    found.munmap.argtypes = words[:2]
    return found


_libc, MAP_FAILED = _system(), ctypes.c_void_p(-1).value


class Hand:
    """Which segments of ours other processes have, and which of theirs are mapped here."""

    def __init__(self) -> None:
        self.dropped = list[int]()  # numbers of ours that are no more, and that others may still have
        self._handed = defaultdict[str, set[int]](set)
        self._taken = defaultdict[str, dict[int, torch.Tensor]](dict)
        self._lock = Lock()

    def out(self, post: Post, address: str, segment: Segment, *, seconds: float, transport: int) -> None:
        """Let a process have a segment, before it is named there for the first time, over a transport."""
        with self._lock:
            if segment.number not in self._handed[address]:
                key = Key("", 0, HANDED, segment.number)
                post.send(address, key, files=[segment.file], seconds=seconds, transport=transport)
                self._handed[address].add(segment.number)

    def of(self, post: Post, address: str, number: int, size: int) -> torch.Tensor:
        """The bytes of a segment that a process named here."""
        with self._lock:
            known = self._taken[address]
            if number not in known:
                known[number] = _taken(post, address, number, size)
            return known[number]

    def tidy(self, post: Post) -> None:
        """Tell others what is no more, and let go what they have told, or have left when they ended."""
        with self._lock:
            for address in filter(post.has_ended, {*self._handed, *self._taken}):
                self._bury(post, address)
            self._tell(post)
            for address, known in self._taken.items():
                while (packet := post.take(Key(address, 0, DROPPED, 0))) is not None:
                    for number in map(int, packet.payload.split(b",")):
                        known.pop(number, None)
                        post.discard(Key(address, 0, HANDED, number))  # what was handed, but not named since

    def _bury(self, post: Post, address: str) -> None:
        """It will not say what became of its segments: they would stay mapped here for good."""
        self._handed.pop(address, None)
        self._taken.pop(address, None)
        post.discard_all(lambda key: key.sender == address)

    def _tell(self, post: Post) -> None:
        gone, self.dropped = self.dropped, []
        for address, numbers in self._handed.items() if gone else ():
            listed = sorted(numbers.intersection(gone))
            numbers.difference_update(gone)
            if listed:
                post.try_to_send(address, Key("", 0, DROPPED, 0), ",".join(map(str, listed)).encode())


def _taken(post: Post, address: str, number: int, size: int) -> torch.Tensor:
    """Packets of a process come in order: what it names has come before."""
    packet = post.take(Key(address, 0, HANDED, number))
    if packet is None:
        raise ExchangeError(f"segment {number} of {address} was named, but never handed over")
    try:
        return _mapped(packet.files[0], size)
    finally:
        close(packet.files)


hand = Hand()


class Place(NamedTuple):
    """Where a tensor begins: at this byte of a segment."""

    segment: Segment
    start: int


class Shared:
    """The tensors of this process that lie in shared memory, by where their storage begins, with that storage's number.

    One that was emptied may live on while other memory comes to its place. There is no lock: steps are whole, and
    storages may be collected in the middle of any of them.
    """

    def __init__(self) -> None:
        self._segments = dict[int, tuple[int, Segment]]()

    def place(self, tensor: torch.Tensor) -> Place | None:
        """Where it lies; None where that is not shared memory of ours."""
        if not self._segments:
            return None
        segment = self._of(tensor.untyped_storage())
        return None if segment is None else Place(segment, int(tensor.storage_offset()) * tensor.element_size())

    def _of(self, storage: torch.UntypedStorage) -> Segment | None:
        number, segment = self._segments.get(storage.data_ptr(), (0, None))
        return segment if number == storage._cdata else None

    def new(self, size: int) -> torch.Tensor:
        """Bytes that others read in place."""
        segment, at = Segment.made(size), list[int]()
        number = segment.number  # what is called once it is gone must not keep it
        found = segment.mapped(lambda: self._remove(at[0], number))
        at.append(found.data_ptr())
        self._keep(found.untyped_storage(), segment)
        return found

    def move(self, storage: torch.UntypedStorage) -> None:
        """Move storage there, for all tensors that have it."""
        if self._of(storage) is not None or not storage.nbytes():
            return
        if not storage.is_shared():
            _check_room(storage.nbytes())
        try:
            file, size = storage._share_fd_cpu_()
        except RuntimeError as error:
            raise SharedMemoryError(
                f"{storage.nbytes()} bytes cannot be moved to shared memory: {_remedied(error)}"
            ) from error
        segment = Segment(file, size, own=False)  # the storage closes it
        self._keep(storage, segment)
        weakref.finalize(storage, self._remove, storage.data_ptr(), segment.number).atexit = False

    def _keep(self, storage: torch.UntypedStorage, segment: Segment) -> None:
        self._segments[storage.data_ptr()] = storage._cdata, segment

    def _remove(self, address: int, number: int) -> None:
        """Unless another one is there by now."""
        _, kept = self._segments.get(address, (0, None))
        if kept is not None and kept.number == number:
            del self._segments[address]


def _check_room(size: int) -> None:
    """Refuse what does not fit, and name what would."""
    found = os.statvfs(SHM)
    free = found.f_bavail * found.f_frsize
    if free < size:
        raise SharedMemoryError(
            f"{size} bytes do not fit into {SHM}, which has {free} left: make it larger (docker run --shm-size), "
            f"or allocate with empty(shared=True), which does not need it"
        )


def _remedied(error: OSError | RuntimeError) -> str:
    """Why, and what to do about it where every tensor takes a file."""
    why = error.strerror if isinstance(error, OSError) else str(error)
    return f"{why}; raise `ulimit -n`" if os.strerror(errno.EMFILE) in str(why) else str(why)


shared = Shared()


class SharedStaging:
    """The segment that this process packs into, as large as the largest turn so far needed it.

    It may be given back by another thread at any time.
    """

    def __init__(self) -> None:
        self._kept: tuple[Segment, torch.Tensor] | None = None
        self._read, self._lock = True, RLock()

    def take(self, size: int) -> tuple[Segment, torch.Tensor]:
        """Room for that many bytes. What was taken before is free again."""
        with self._lock:
            if self._kept is None or self._kept[0].size < size:
                self.give_back()  # before the larger one is asked for
                segment = Segment.made(size)
                self._kept = segment, segment.mapped()
            self._read = False
            return self._kept

    def read(self) -> None:
        """All others have read what was packed."""
        self._read = True

    def give_back(self) -> None:
        """The memory itself, where nobody reads it any more: others let go of it only when they hear of it."""
        with self._lock:
            if self._kept is not None and self._read:
                give_back(self._kept[1])
            self.release()

    @property
    def bytes(self) -> int:
        """How much is kept."""
        kept = self._kept
        return kept[0].size if kept else 0

    def release(self) -> None:
        """Pack into this one no more; others may still read it."""
        with self._lock:
            self._kept, self._read = None, True


def _forked() -> None:
    hand.__init__()  # type: ignore[misc]  # those who know it keep it


os.register_at_fork(after_in_child=_forked)
