"""Shared memory without a name: nothing is left behind, and only processes that are sent the descriptor can read it.

Also which segments peers have of this process, and which of theirs are mapped here. `this_process` holds all of it.
"""

from __future__ import annotations

import ctypes
import errno
import fcntl
import mmap
import os
import weakref
from collections import defaultdict, deque
from collections.abc import Callable
from itertools import count
from threading import Lock, RLock
from typing import NamedTuple
from weakref import finalize

import torch

from shardwise.errors import ExchangeError
from shardwise.exchange.buffers import available, give_back
from shardwise.transports.torch_groups import move_to_shared_memory, storage_id
from shardwise.transports.unix_packets import PacketKey, PacketSocket, close_files

SEALS = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL  # truncating it would crash its readers
SHM = "/dev/shm"
LARGE = 2**26  # bytes; from here on allocating takes longer than asking how much memory is left

_numbers = count(1)


class SharedMemoryError(ExchangeError):
    """Shared memory that could not be allocated or mapped."""


class SharedSegment:
    """Memory that peers may map. `file` is its descriptor; `number` identifies it among those of this process."""

    def __init__(self, file: int, size: int, *, own: bool = True) -> None:
        self.file, self.size, self.number = file, size, next(_numbers)
        if own:
            weakref.finalize(self, os.close, file).atexit = False

    @staticmethod
    def allocate(size: int) -> SharedSegment:
        """A new segment. All its pages are allocated, so that no write into it can fail."""
        size = max(size, 1)
        if size > LARGE and size > (most := available()):  # the system would try, and kill a process for it
            raise SharedMemoryError(
                f"{size} bytes of shared memory cannot be allocated: {most} bytes of memory are left"
            )
        try:
            file = os.memfd_create("shardwise", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        except OSError as error:
            raise SharedMemoryError(f"the system refuses shared memory: {_with_remedy(error)}") from error
        try:
            os.fchmod(file, 0o600)
            os.posix_fallocate(file, 0, size)
            fcntl.fcntl(file, fcntl.F_ADD_SEALS, SEALS)
        except OSError as error:
            os.close(file)
            raise SharedMemoryError(f"{size} bytes of shared memory cannot be allocated: {error.strerror}") from error
        return SharedSegment(file, size)

    def mapped(self, when_unmapped: Callable[[], None] | None = None) -> torch.Tensor:
        """Its bytes, mapped into this process."""
        return map_file(self.file, self.size, when_unmapped)


def map_file(file: int, size: int, when_unmapped: Callable[[], None] | None = None) -> torch.Tensor:
    """Map the bytes of a descriptor, which may be closed afterwards. `when_unmapped` is called before they go.

    (Python's own mmap keeps a descriptor of every mapping, and a model has many tensors.)
    """
    address = _libc.mmap(None, size, mmap.PROT_READ | mmap.PROT_WRITE, mmap.MAP_SHARED, file, 0)
    if address == MAP_FAILED:
        why = os.strerror(ctypes.get_errno())
        raise SharedMemoryError(f"{size} bytes of shared memory cannot be mapped: {why}")
    memory = (ctypes.c_uint8 * size).from_address(address)
    weakref.finalize(memory, _unmap, address, size, when_unmapped).atexit = False
    with torch.inference_mode(False):  # it is kept, and may be used again outside that mode
        return torch.frombuffer(memory, dtype=torch.uint8)


def _unmap(address: int, size: int, when_unmapped: Callable[[], None] | None) -> None:
    if when_unmapped is not None:  # before other memory can take this address
        when_unmapped()
    _libc.munmap(address, size)


def _load_libc() -> ctypes.CDLL:
    libc = ctypes.CDLL(None, use_errno=True)
    pointer, size, number, offset = ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_longlong
    libc.mmap.restype, libc.mmap.argtypes = pointer, (pointer, size, number, number, number, offset)
    libc.munmap.argtypes = pointer, size
    return libc


_libc, MAP_FAILED = _load_libc(), ctypes.c_void_p(-1).value


class SegmentPlace(NamedTuple):
    """Where a tensor begins: at this byte of a segment."""

    segment: SharedSegment
    start: int


class SharedTensors:
    """The segments that tensors of this process lie in, by the address of their storage.

    The id of the storage is kept too: a storage that was emptied may live on while other memory takes its address.
    There is no lock: every step is atomic, and storages may be collected in the middle of any of them.
    """

    def __init__(self) -> None:
        self._segments = dict[int, tuple[int, SharedSegment]]()

    def place(self, tensor: torch.Tensor) -> SegmentPlace | None:
        """Where a tensor lies; None if that is not shared memory of this process."""
        if not self._segments:
            return None
        segment = self._of(tensor.untyped_storage())
        return None if segment is None else SegmentPlace(segment, int(tensor.storage_offset()) * tensor.element_size())

    def _of(self, storage: torch.UntypedStorage) -> SharedSegment | None:
        owner, segment = self._segments.get(storage.data_ptr(), (0, None))
        return segment if owner == storage_id(storage) else None

    def new(self, size: int) -> torch.Tensor:
        """New bytes that peers read in place."""
        segment, addresses = SharedSegment.allocate(size), list[int]()
        number = segment.number  # the callback must not keep the segment alive
        memory = segment.mapped(lambda: self._remove(addresses[0], number))
        addresses.append(memory.data_ptr())
        self._keep(memory.untyped_storage(), segment)
        return memory

    def move(self, storage: torch.UntypedStorage) -> None:
        """Move a storage to shared memory, and so all tensors that use it."""
        if self._of(storage) is not None or not storage.nbytes():
            return
        if not storage.is_shared():
            _check_free_space(storage.nbytes())
        try:
            file, size = move_to_shared_memory(storage)
        except RuntimeError as error:
            raise SharedMemoryError(
                f"{storage.nbytes()} bytes cannot be moved to shared memory: {_with_remedy(error)}"
            ) from error
        segment = SharedSegment(file, size, own=False)  # the storage closes it
        self._keep(storage, segment)
        weakref.finalize(storage, self._remove, storage.data_ptr(), segment.number).atexit = False

    def _keep(self, storage: torch.UntypedStorage, segment: SharedSegment) -> None:
        self._segments[storage.data_ptr()] = storage_id(storage), segment

    def _remove(self, address: int, number: int) -> None:
        """Forget the segment at an address, unless another one has taken it."""
        _, segment = self._segments.get(address, (0, None))
        if segment is not None and segment.number == number:
            del self._segments[address]


def _check_free_space(size: int) -> None:
    """Refuse a size that does not fit into /dev/shm, and name the remedy."""
    filesystem = os.statvfs(SHM)
    free = filesystem.f_bavail * filesystem.f_frsize
    if free < size:
        raise SharedMemoryError(
            f"{size} bytes do not fit into {SHM}, which has {free} left: make it larger (docker run --shm-size), "
            f"or allocate with empty(shared=True), which does not need it"
        )


def _with_remedy(error: OSError | RuntimeError) -> str:
    """Why it failed, and the remedy where too many files are open."""
    why = error.strerror if isinstance(error, OSError) else str(error)
    return f"{why}; raise `ulimit -n`" if os.strerror(errno.EMFILE) in str(why) else str(why)


class SharedStaging:
    """The segment that this process packs messages into, as large as the largest round so far needed.

    Another thread may release it at any time.
    """

    def __init__(self) -> None:
        self._current: tuple[SharedSegment, torch.Tensor] | None = None
        self._read, self._lock = True, RLock()

    def take(self, size: int) -> tuple[SharedSegment, torch.Tensor]:
        """A segment of at least that many bytes. What was packed before is overwritten."""
        with self._lock:
            if self._current is None or self._current[0].size < size:
                self.give_back()  # before a larger one is allocated
                segment = SharedSegment.allocate(size)
                self._current = segment, segment.mapped()
            self._read = False
            return self._current

    def mark_read(self) -> None:
        """All peers have read what was packed."""
        self._read = True

    def give_back(self) -> None:
        """Release the segment, and its pages at once if no peer reads it: peers unmap it only when they are told."""
        with self._lock:
            if self._current is not None and self._read:
                give_back(self._current[1])
            self.release()

    @property
    def bytes(self) -> int:
        """The size of the segment that is kept."""
        current = self._current
        return current[0].size if current else 0

    def release(self) -> None:
        """Pack into this segment no more; peers may still read it."""
        with self._lock:
            self._current, self._read = None, True


SEGMENT, FREED = range(2)  # kinds of packets of transport 0: a segment, tagged by its number; numbers of freed segments


class PeerSegments:
    """Segments by the address of the peer and their number. `tidy` drops those that are freed, or whose owner ended."""

    def __init__(self, packets: PacketSocket) -> None:
        self._packets, self._lock = packets, Lock()
        self._sent = defaultdict[str, set[int]](set)
        self._freed = defaultdict[str, deque[int]](deque)  # segments that are gone here, and that the peer still has
        self._mapped = defaultdict[str, dict[int, torch.Tensor]](dict)

    def send(self, address: str, segment: SharedSegment, *, seconds: float, transport: int) -> None:
        """Send a segment to a peer, once. It has to arrive before a message that names it."""
        with self._lock:
            if segment.number not in self._sent[address]:
                key = PacketKey("", 0, SEGMENT, segment.number)
                self._packets.send(address, key, files=[segment.file], seconds=seconds, transport=transport)
                self._sent[address].add(segment.number)
                finalize(segment, self._freed[address].append, segment.number).atexit = False

    def mapping(self, address: str, number: int, size: int) -> torch.Tensor:
        """The bytes of a peer's segment, mapped at first use."""
        with self._lock:
            mapped = self._mapped[address]
            if number not in mapped:
                mapped[number] = self._map(address, number, size)
            return mapped[number]

    def _map(self, address: str, number: int, size: int) -> torch.Tensor:
        """Packets of a process arrive in order, so its segment is here before a message names it."""
        packet = self._packets.take(PacketKey(address, 0, SEGMENT, number))
        if packet is None:
            raise ExchangeError(f"segment {number} of {address} was named, but has not arrived")
        try:
            return map_file(packet.files[0], size)
        finally:
            close_files(packet.files)

    def tidy(self) -> None:
        """Tell peers which segments are freed here, and unmap those that peers have freed, or left when they ended."""
        with self._lock:
            for address in filter(self._packets.has_ended, {*self._sent, *self._mapped}):
                self._forget_peer(address)
            self._send_freed()
            for address, mapped in self._mapped.items():
                while (packet := self._packets.take(PacketKey(address, 0, FREED, 0))) is not None:
                    for number in map(int, packet.payload.split(b",")):
                        mapped.pop(number, None)
                        self._packets.discard(PacketKey(address, 0, SEGMENT, number))  # sent, but never named

    def disconnect(self, address: str) -> None:
        """Close the connection to a process that nothing more is sent to, unless a transport uses it."""
        with self._lock:
            if self._packets.disconnect(address):
                self._sent.pop(address, None)
                self._freed.pop(address, None)

    def _forget_peer(self, address: str) -> None:
        """It will not report what it has freed: its segments would stay mapped for ever."""
        for segments in (self._sent, self._freed, self._mapped):
            segments.pop(address, None)
        self._packets.discard_all(lambda key: key.sender == address)

    def _send_freed(self) -> None:
        for address, freed in self._freed.items():
            numbers = sorted({freed.popleft() for _ in range(len(freed))})
            self._sent[address].difference_update(numbers)
            if numbers:
                key = PacketKey("", 0, FREED, 0)
                self._packets.try_to_send(address, key, ",".join(map(str, numbers)).encode())


class ThisProcess:
    """One per process. A forked child keeps its tensors, and gets a socket and peers of its own at first use."""

    def __init__(self) -> None:
        self.shared_tensors = SharedTensors()
        self._lock, self._packets, self._peer_segments = Lock(), None, None

    _packets: PacketSocket | None
    _peer_segments: PeerSegments | None

    @property
    def packets(self) -> PacketSocket:
        """Its socket, opened at first use. Not every system allows one: an OSError."""
        with self._lock:  # threads that come at the same time get the same one
            if self._packets is None:
                self._packets = PacketSocket()
            return self._packets

    @property
    def peer_segments(self) -> PeerSegments:
        """Segments that go to peers, and come from them, over its socket."""
        packets = self.packets
        with self._lock:
            if self._peer_segments is None:
                self._peer_segments = PeerSegments(packets)
            return self._peer_segments

    def after_fork(self) -> None:
        """Sockets and mappings of peers are the parent's: close them. A thread of the parent may have held the lock."""
        packets = self._packets
        self._lock, self._packets, self._peer_segments = Lock(), None, None
        if packets is not None:
            packets.close()


this_process = ThisProcess()
os.register_at_fork(after_in_child=this_process.after_fork)
