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
from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import count
from threading import Lock, RLock
from typing import NamedTuple
from weakref import finalize

import torch

from shardwise.errors import ExchangeError
from shardwise.exchange.buffers import give_back
from shardwise.storage.available_memory import available_memory
from shardwise.transports import torch_groups
from shardwise.transports.torch_groups import move_to_shared_memory, storage_id, swap_memory
from shardwise.transports.unix_packets import PacketKey, PacketSocket, close_files

SEALS = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL  # truncating it would crash its readers
SHM = "/dev/shm"
LARGE = 2**26  # bytes; from here on allocating takes longer than asking how much memory is left
SMALL = 2**20  # bytes of staging up to which two rounds have room in it
WORD, LINE = 8, 64  # bytes of a number, and of what a processor fetches at a time
PAGE = mmap.PAGESIZE

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
    def allocate(size: int, *, filled: bool = True) -> SharedSegment:
        """A new segment. All its pages are allocated, so that no write into it can fail; or by `fill` later."""
        size = max(size, 1)
        if filled:
            _check_memory(size)
        try:
            file = os.memfd_create("shardwise", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        except OSError as error:
            raise SharedMemoryError(f"the system refuses shared memory: {_with_remedy(error)}") from error
        try:
            os.fchmod(file, 0o600)
            if filled:
                os.posix_fallocate(file, 0, size)
            else:
                os.ftruncate(file, size)
            fcntl.fcntl(file, fcntl.F_ADD_SEALS, SEALS)
        except OSError as error:
            os.close(file)
            raise SharedMemoryError(f"{size} bytes of shared memory cannot be allocated: {error.strerror}") from error
        return SharedSegment(file, size)

    def fill(self, start: int, size: int) -> None:
        """Allocate the pages of a part."""
        _check_memory(size)
        try:
            os.posix_fallocate(self.file, start, size)
        except OSError as error:
            raise SharedMemoryError(f"{size} bytes of shared memory cannot be allocated: {error.strerror}") from error

    def mapped(self, when_unmapped: Callable[[], None] | None = None) -> torch.Tensor:
        """Its bytes, mapped into this process."""
        return map_file(self.file, self.size, when_unmapped)


def _check_memory(size: int) -> None:
    """Refuse what the system would try to give, and kill a process for it."""
    if size > LARGE and size > (most := available_memory()):
        raise SharedMemoryError(f"{size} bytes of shared memory cannot be allocated: {most} bytes of memory are left")


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
        self._places = dict[int, tuple[int, SegmentPlace]]()  # with the id of the storage
        self._kept = 0  # of segments up to this number pages are not freed one by one

    def place(self, tensor: torch.Tensor) -> SegmentPlace | None:
        """Where a tensor lies; None if that is not shared memory of this process."""
        if not self._places:
            return None
        place = self._of(tensor.untyped_storage())
        return place and place._replace(start=place.start + int(tensor.storage_offset()) * tensor.element_size())

    def _of(self, storage: torch.UntypedStorage) -> SegmentPlace | None:
        owner, place = self._places.get(storage.data_ptr(), (0, None))
        return place if owner == storage_id(storage) else None

    def new(self, size: int) -> torch.Tensor:
        """New bytes that peers read in place."""
        segment, addresses = SharedSegment.allocate(size), list[int]()
        number = segment.number  # the callback must not keep the segment alive
        memory = segment.mapped(lambda: self._remove(addresses[0], number))
        addresses.append(memory.data_ptr())
        self._keep(memory.untyped_storage(), SegmentPlace(segment, 0))
        return memory

    def move(self, storages: Iterable[torch.UntypedStorage]) -> None:
        """Move storages to shared memory, and so all tensors that use them: to one segment, which has one descriptor.

        Each is copied and released before the next one is. Where torch cannot exchange their memory, each is moved to
        a segment of its own.
        """
        moving = [one for one in {storage_id(one): one for one in storages}.values() if one.nbytes()]
        moving = [one for one in moving if self._of(one) is None]
        if not torch_groups.CAN_SWAP:
            for storage in moving:
                self._move_alone(storage)
        elif moving:
            self._move_together(moving)

    def _move_together(self, storages: Sequence[torch.UntypedStorage]) -> None:
        starts, size = _packed([storage.nbytes() for storage in storages])
        segment = SharedSegment.allocate(size, filled=False)
        whole = segment.mapped()
        for storage, start in zip(storages, starts, strict=True):
            segment.fill(start, storage.nbytes())
            part = self._part(whole, segment.number, start, storage.nbytes())
            part.copy_(torch.empty(0, dtype=torch.uint8, device="cpu").set_(storage))
            swap_memory(storage, part.untyped_storage())
            self._keep(storage, SegmentPlace(segment, start))

    def _part(self, whole: torch.Tensor, number: int, start: int, size: int) -> torch.Tensor:
        """Bytes of a mapped segment, with a storage of their own. The segment stays mapped as long as one of these."""
        address = whole.data_ptr() + start
        memory = (ctypes.c_uint8 * size).from_address(address)
        weakref.finalize(memory, self._free_part, whole, number, address, size).atexit = False
        with torch.inference_mode(False):
            return torch.frombuffer(memory, dtype=torch.uint8)

    def _free_part(self, whole: torch.Tensor, number: int, address: int, size: int) -> None:
        """Forget a part, and give its pages back: those that no other part lies in."""
        self._remove(address, number)
        if number > self._kept and size >= PAGE:
            _libc.madvise(ctypes.c_void_p(address), ctypes.c_size_t(_up(size, PAGE)), mmap.MADV_REMOVE)

    def keep_pages(self) -> None:
        """Free pages of the segments so far with their segment only: others may read what is no longer used here.

        After a failure peers may still read, and after a fork the child has the same memory.
        """
        self._kept = next(_numbers)

    def _move_alone(self, storage: torch.UntypedStorage) -> None:
        if not storage.is_shared():
            _check_free_space(storage.nbytes())
        try:
            file, size = move_to_shared_memory(storage)
        except RuntimeError as error:
            raise SharedMemoryError(
                f"{storage.nbytes()} bytes cannot be moved to shared memory: {_with_remedy(error)}"
            ) from error
        segment = SharedSegment(file, size, own=False)  # the storage closes it
        self._keep(storage, SegmentPlace(segment, 0))
        weakref.finalize(storage, self._remove, storage.data_ptr(), segment.number).atexit = False

    def _keep(self, storage: torch.UntypedStorage, place: SegmentPlace) -> None:
        self._places[storage.data_ptr()] = storage_id(storage), place

    def _remove(self, address: int, number: int) -> None:
        """Forget the segment at an address, unless another one has taken it."""
        _, place = self._places.get(address, (0, None))
        if place is not None and place.segment.number == number:
            del self._places[address]


def _packed(sizes: Sequence[int]) -> tuple[list[int], int]:
    """Where parts of these sizes start, and the size of all. Those of a page or more share no page with others.

    >>> _packed([100, 4096, 1, 5000])
    ([12288, 0, 12416, 4096], 12480)
    """
    starts, total = [0] * len(sizes), 0
    for large in (True, False):
        for at, size in enumerate(sizes):
            if (size >= PAGE) == large:
                starts[at] = total
                total += _up(size, PAGE if large else LINE)
    return starts, total


def _up(size: int, align: int) -> int:
    return -(-size // align) * align


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


class StagingSegment:
    """A segment to pack into. It begins with a number for each owner: the last round that this owner has read of it."""

    def __init__(self, size: int, owners: int) -> None:
        self.start, self.bytes = _up(owners * WORD, LINE), size
        self.segment = SharedSegment.allocate(self.start + size)
        self.memory = self.segment.mapped()
        self.read = (ctypes.c_int64 * owners).from_address(self.memory.data_ptr())
        self.given_back = False

    def give_back(self) -> None:
        """Free the pages at once. Nobody reads any more, and what readers have written is gone."""
        self.given_back = True
        give_back(self.memory)


class StagedRound(NamedTuple):
    """The messages of a round, packed from byte `start` of a segment on. `readers`: the addresses of the owners by row.

    Nobody waits for the readers: each writes the number of the round into the segment once it has read its message.
    """

    staging: StagingSegment
    start: int
    stop: int
    number: int
    readers: Mapping[int, str]
    transport: int

    @property
    def room(self) -> torch.Tensor:
        """Where the messages are packed."""
        return self.staging.memory[self.start : self.stop]

    def late(self) -> list[str]:
        """The readers that have not read their messages yet."""
        read, number = self.staging.read, self.number
        if self.staging.given_back:
            return []
        return [address for row, address in self.readers.items() if read[row] < number]


class Readers(NamedTuple):
    """The addresses of readers by row, of how many owners, and the number of their transport."""

    addresses: Mapping[int, str]
    owners: int
    transport: int


def mark_read(staging: torch.Tensor, row: int, number: int) -> None:
    """Tell the sender that the owner in this row has read its message of a round."""
    between = Lock()
    for _ in range(2):  # to release a lock and take it again orders memory: all was read before this is written
        with between:
            pass
    ctypes.c_int64.from_address(staging.data_ptr() + WORD * row).value = number


class SharedStaging:
    """The segment that this process packs messages into, as large as the largest round so far needed.

    Small rounds take turns in two halves, so that one is packed while peers still read the one before. Another thread
    may release it at any time.
    """

    def __init__(self) -> None:
        self._current: StagingSegment | None = None
        self._rounds = list[StagedRound]()  # that peers may still read
        self._numbers, self._lock = count(1), RLock()

    def take(self, size: int, most: int, readers: Readers, wait: Callable[[StagedRound], None]) -> StagedRound:
        """Room for a round, and for a second one where both together have at most `most` bytes and are small.

        `wait` returns when a round is read; it is called where that has to be waited for.
        """
        while True:
            with self._lock:
                staged = self._take(size, most, readers)
                if staged is not None:
                    return staged
                oldest = self._rounds[0]
            wait(oldest)

    def _take(self, size: int, most: int, readers: Readers) -> StagedRound | None:
        """None where an earlier round has to be read first."""
        self._rounds = [one for one in self._rounds if one.late()]
        if self._current is None or self._current.bytes < size:
            self.give_back()  # before a larger one is allocated
            if self._rounds:
                return None
            self._current = StagingSegment(2 * size if 2 * size <= min(most, SMALL) else size, readers.owners)
        start = self._free(self._current, size)
        if start is None:
            return None
        number = next(self._numbers)
        staged = StagedRound(self._current, start, start + size, number, readers.addresses, readers.transport)
        self._rounds.append(staged)
        return staged

    def _free(self, staging: StagingSegment, size: int) -> int | None:
        """Where so many bytes are free."""
        end = staging.start + staging.bytes
        for start in (staging.start, *(one.stop for one in self._rounds)):
            meets = (one.start < start + size and start < one.stop for one in self._rounds)
            if start + size <= end and not any(meets):
                return start
        return None

    def forget(self, staged: StagedRound) -> None:
        """Nobody will read this round, or its memory is kept elsewhere."""
        with self._lock:
            self._rounds = [one for one in self._rounds if one is not staged]

    def end(self) -> None:
        """The transport has failed: there will be no other round."""
        with self._lock:
            self._current, self._rounds = None, []

    def give_back(self) -> None:
        """Release the segment, and its pages at once if no peer reads it: peers unmap it only when they are told."""
        with self._lock:
            if self._current is not None and not any(one.late() for one in self._rounds):
                self._current.give_back()
            self.release()

    @property
    def bytes(self) -> int:
        """The size of the segment that is kept."""
        current = self._current
        return current.bytes if current else 0

    def release(self) -> None:
        """Pack into this segment no more; peers may still read it."""
        with self._lock:
            self._current = None


SEGMENT, FREED = range(2)  # kinds of packets of transport 0: a segment, tagged by its number; numbers of freed segments


class PeerSegments:
    """Segments by the address of the peer and their number. `tidy` drops those that are freed, or whose owner ended."""

    def __init__(self, packets: PacketSocket) -> None:
        self._packets, self._lock = packets, Lock()
        self._sent = defaultdict[str, set[int]](set)
        self._freed = defaultdict[str, deque[int]](deque)  # segments that are gone here, and that the peer still has
        self._mapped = defaultdict[str, dict[int, torch.Tensor]](dict)
        self._unread = list[StagedRound]()
        self._told = 0  # how much peers had told when this was tidied

    def keep_until_read(self, staged: StagedRound) -> None:
        """Peers must not be told that a segment is freed before they have mapped it, whatever ends here meanwhile."""
        with self._lock:
            self._unread = [*(one for one in self._unread if one.late()), staged]

    def forget(self, staged: StagedRound) -> None:
        """Nobody will read this round."""
        with self._lock:
            self._unread = [one for one in self._unread if one is not staged]

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
            told = self._packets.told
            if told == self._told and not self._packets.any_ended and not any(self._freed.values()):
                return  # which is said of most rounds
            self._told = told
            self._unread = list(filter(self._may_be_read, self._unread))
            for address in filter(self._packets.has_ended, {*self._sent, *self._mapped}):
                self._forget_peer(address)
            self._send_freed()
            for address, mapped in self._mapped.items():
                while (packet := self._packets.take(PacketKey(address, 0, FREED, 0))) is not None:
                    for number in map(int, packet.payload.split(b",")):
                        mapped.pop(number, None)
                        self._packets.discard(PacketKey(address, 0, SEGMENT, number))  # sent, but never named

    def _may_be_read(self, staged: StagedRound) -> bool:
        return not all(self._packets.reads_no_more(address, staged.transport) for address in staged.late())

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
        if self._packets is None:
            with self._lock:  # threads that come at the same time get the same one
                if self._packets is None:
                    self._packets = PacketSocket()
        return self._packets

    @property
    def peer_segments(self) -> PeerSegments:
        """Segments that go to peers, and come from them, over its socket."""
        if self._peer_segments is None:
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
os.register_at_fork(before=this_process.shared_tensors.keep_pages, after_in_child=this_process.after_fork)
