"""Packets between the processes of one host, over unix sockets: small payloads, and descriptors of shared memory.

A process has one address, whatever groups it is in, and a connection to every process that it exchanges packets with,
made when the first is sent, or waited for, by either. When a process ends, its peers see it at once: its connections
close. A packet also orders memory: what the sender wrote to
shared memory before the packet is visible to the receiver after it.
"""

from __future__ import annotations

import errno
import os
import secrets
import select
import socket
import struct
import time
from collections import Counter, defaultdict, deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from threading import Condition, Event, Lock, Thread
from typing import NamedTuple

from shardwise.errors import ExchangeError

HEADER = struct.Struct("<Qqii")  # of a packet: transport, tag, kind, and the size of the payload
IN_FILE = -1  # in place of that size: the payload is in a file
LARGE = 2**15  # bytes; a larger payload travels as a file, because socket buffers are small
MAX_BYTES = 2 * (LARGE + HEADER.size)  # two packets may travel as one
MAX_FILES = 2  # in a packet: a segment, and the file of a payload
ANCILLARY, CUT = socket.CMSG_SPACE(4 * MAX_FILES), int(socket.MSG_CTRUNC)  # (an enum of flags is slow)
HELLO = -1  # the kind of the first packet of a connection: the sender's address
FAILED = -2  # the kind of a packet that ends a transport: the cause
ASK, HERE = -3, -4  # kinds: who waits for packets of a transport answers
GRACE = 1.0  # seconds to wait for answers
FULL = (errno.EAGAIN, errno.ETOOMANYREFS)  # the peer's queue, or the limit of descriptors in flight: it must read first
PATIENCE = 5.0  # seconds to wait for a full listener: peers accept during rendezvous, unless somebody floods them
MAX_PACKETS = 2**14  # to read before a connection is made, or in search of a FAILED packet: a stranger may never stop
MAX_ANONYMOUS = 256  # connections that have not sent HELLO; the oldest are closed beyond that
LOOK = 1.0  # seconds after which a wait looks whether its transport has failed meanwhile
SPIN = 50e-6  # seconds to poll without sleeping, where every rank has a core


Payload = bytes | bytearray | memoryview


class PacketKey(NamedTuple):
    """What a packet is for. Packets with equal keys arrive in the order in which they were sent."""

    sender: str
    transport: int
    kind: int
    tag: int


class Packet(NamedTuple):
    """A packet that arrived. Its descriptors belong to this process; `complete` is False where some were lost."""

    payload: bytes
    files: tuple[int, ...]
    complete: bool = True


class PeerEndedError(Exception):
    """A process that this one waits for has ended, or has closed its socket."""

    def __init__(self, address: str) -> None:
        super().__init__(address)
        self.address = address


class TransportFailedError(Exception):
    """A peer reports that the transport failed there."""


class PacketSocket:
    """The address of a process, and its connections. Threads may share it. (`this_process` holds the only one.)"""

    def __init__(self) -> None:
        self.address = f"shardwise-{os.getuid()}-{os.getpid()}-{secrets.token_hex(16)}"
        self._listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET | socket.SOCK_NONBLOCK)
        self._listener.bind("\0" + self.address)
        self._listener.listen(4096)
        self._poll = select.poll()
        self._poll.register(self._listener, select.POLLIN)
        self._outgoing, self._kept = dict[str, socket.socket](), set[str]()  # by address: what is sent there takes it
        self._sockets = dict[int, tuple[socket.socket, str | None]]()  # all, by descriptor, with the address
        self._queues = defaultdict[PacketKey, deque[Packet]](deque)
        self._ended, self._failures = set[str](), dict[int, str]()
        self._gave_up = set[tuple[str, int]]()  # who has told that which transport has failed there
        self._waits = Counter[int]()  # of threads here, by transport
        self._arrival, self._queues_lock, self._polling = Condition(), Lock(), False
        self._connecting = Lock()
        self._room = memoryview(bytearray(MAX_BYTES))  # for what is read: one thread reads at a time
        self.told = 0  # packets that came outside transports, and those that ended one
        self.refused_peers = 0  # that could not be accepted: too many open files
        self._reserve = _reserve_descriptor()  # freed to refuse peers when no descriptor is left

    # --- connections -------------------------------------------------------------------------------------------------

    def connect(self, address: str) -> int:
        """Connect to an address, once; the process id behind it, in this process's namespace."""
        return _credentials(self._connection(address))[0]

    def _connection(self, address: str) -> socket.socket:
        """The connection that the peer has made, or a new one. (Each may make one at the same time: both are used.)"""
        sock = self._outgoing.get(address)
        if sock is not None:
            return sock
        self._read_until(lambda: address in self._outgoing)  # it may have called
        with self._connecting:
            sock = self._outgoing.get(address)
            if sock is None:
                sock = self._open_connection(address)
                hello = self.address.encode()
                _send(sock, (_head(PacketKey(self.address, 0, HELLO, 0), hello), hello), ())
                self._add(sock, address)
        return sock

    def _add(self, sock: socket.socket, address: str | None) -> None:
        self._sockets[sock.fileno()] = sock, address
        if address is not None:
            self._outgoing.setdefault(address, sock)
        self._poll.register(sock, select.POLLIN)

    def _open_connection(self, address: str) -> socket.socket:
        try:
            sock = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET | socket.SOCK_NONBLOCK)
        except OSError as error:
            raise OSError(error.errno, f"{error.strerror}: raise `ulimit -n`") from error
        try:
            self._connect_to(address, sock)
        except BaseException:
            sock.close()
            raise
        return sock

    def _connect_to(self, address: str, sock: socket.socket) -> None:
        end = time.monotonic() + PATIENCE
        while True:
            try:
                sock.connect("\0" + address)
                break
            except BlockingIOError:  # its backlog is full, and so may be ours
                if time.monotonic() > end:
                    raise
                self._poll_once(lambda: False, 1e-3)
        if _credentials(sock)[1] != os.getuid():
            raise PermissionError(errno.EPERM, "the address belongs to another user")

    def keep(self, addresses: Iterable[str]) -> None:
        """The connections to these are used for as long as this process lives."""
        with self._connecting:
            self._kept.update(addresses)

    def disconnect(self, address: str) -> bool:
        """Close the connection to an address: the process there takes this one to have ended. False if it is kept."""
        with self._connecting:
            if address in self._kept:
                return False
            for descriptor in [number for number, (_, peer) in list(self._sockets.items()) if peer == address]:
                self._drop(descriptor)
            return True

    @contextmanager
    def accept_in_background(self) -> Iterator[None]:
        """Accept connections in a thread meanwhile, so that no peer finds the backlog full."""
        done = Event()

        def accept() -> None:
            while not done.is_set():
                self._poll_once(done.is_set, 0.005)

        thread = Thread(target=accept, name="shardwise accept", daemon=True)
        thread.start()
        try:
            yield
        finally:
            done.set()
            thread.join()

    def has_hello_from(self, address: str) -> bool:
        """True if the process with that address has connected to this one."""
        return any(sender == address for _, sender in list(self._sockets.values()))

    def close(self) -> None:
        """Close all sockets. (A forked child does: they are its parent's.)"""
        for sock in (self._listener, *(sock for sock, _ in self._sockets.values())):
            sock.close()
        spare, self._reserve = self._reserve, None
        close_files([] if spare is None else [spare])

    # --- packets -----------------------------------------------------------------------------------------------------

    def send(
        self,
        to: str,
        key: PacketKey,
        payload: Payload = b"",
        files: Sequence[int] = (),
        *,
        seconds: float = 60.0,
        transport: int | None = None,
        first: tuple[PacketKey, Payload] | None = None,
    ) -> None:
        """Send a packet. While the peer's queue is full, read what arrives here: the peer may be waiting for that.

        `first` is a packet that travels with it, and arrives before it: the peer is woken once for both. Raises if a
        peer reports that `transport` (by default the key's) has failed.
        """
        transport = key.transport if transport is None else transport
        if first is not None and len(first[1]) > LARGE:
            self.send(to, *first, seconds=seconds, transport=transport)
            first = None
        end, large = time.monotonic() + seconds, len(payload) > LARGE
        if large:
            files = (*files, _file_of(payload))
        parts = (*(() if first is None else (_head(*first), first[1])), _head(key, payload), b"" if large else payload)
        try:
            sock = self._connection(to)
            while True:
                try:
                    _send(sock, parts, files)
                    return
                except OSError as error:
                    if error.errno not in FULL:
                        raise
                    self._check_not_failed(transport)
                    if time.monotonic() > end:
                        raise TimeoutError(f"nothing was taken within {seconds:g} s") from None
                    self._make_room(sock)
        except OSError as error:
            if not isinstance(error, ConnectionError) and error.errno != errno.EBADF:  # closed by another thread
                raise
            self.failure(transport)  # the peer may have sent the cause before it ended
            self._check_not_failed(transport)
            raise PeerEndedError(to) from error
        finally:
            if large:
                os.close(files[-1])

    def try_to_send(self, to: str, key: PacketKey, payload: bytes) -> None:
        """Send a packet if possible, and ignore failures."""
        with suppress(PeerEndedError, TransportFailedError, OSError):
            self.send(to, key, payload, seconds=1.0)

    def _make_room(self, sock: socket.socket) -> None:
        """Read what has arrived, then wait up to 1 ms for room: the peer may be waiting for room here."""
        self._poll_once(lambda: False, 0.0)
        writable = select.poll()
        writable.register(sock, select.POLLOUT)
        writable.poll(1)

    def has(self, key: PacketKey) -> bool:
        """True if a packet of a key has arrived."""
        return key in self._queues

    def take(self, key: PacketKey) -> Packet | None:
        """The next packet of a key; None if none has arrived."""
        if key not in self._queues:
            return None
        packet = self._next(key)
        if packet is not None and not packet.complete:
            raise ExchangeError("this process has too many files open to receive shared memory: raise `ulimit -n`")
        return packet

    def _next(self, key: PacketKey) -> Packet | None:
        with self._queues_lock:
            queue = self._queues.get(key)
            if not queue:
                return None
            packet = queue.popleft()
            if not queue:
                del self._queues[key]
        return packet

    def wait(
        self,
        ready: Callable[[], bool],
        *,
        transport: int,
        expected: Callable[[], Iterable[str]],
        seconds: float,
        spin: bool,
        every: float = LOOK,
    ) -> None:
        """Read packets until `ready()`, which is asked when some have come, and `every` so many seconds.

        Raises if a process whose address is in `expected()` has ended.
        """
        end, begun, refused = time.monotonic() + seconds, time.monotonic(), self.refused_peers
        if ready():
            return
        self._watch(expected())
        self._count(transport, 1)
        try:
            while not ready():
                now = time.monotonic()
                self._check_not_failed(transport)
                ended = next((address for address in expected() if address in self._ended), None)
                if ended is not None and not ready():
                    raise PeerEndedError(ended)
                if self.refused_peers > refused:
                    raise OSError(errno.EMFILE, f"{os.strerror(errno.EMFILE)} to accept a peer: raise `ulimit -n`")
                if now > end:
                    raise TimeoutError(f"nothing came within {seconds:g} s")
                self._poll_once(ready, 0.0 if spin and now - begun < SPIN else min(end - now, every))
        finally:
            self._count(transport, -1)

    def _count(self, transport: int, change: int) -> None:
        """How many threads wait here."""
        with self._queues_lock:
            self._waits[transport] += change

    def silent(self, addresses: Iterable[str], transport: int) -> list[str]:
        """The processes among these that do not wait for packets of a transport: they do not answer."""
        missing, end = dict.fromkeys(addresses), time.monotonic() + GRACE
        self._count(transport, 1)  # others may ask, too
        try:
            for address in missing:
                self.try_to_send(address, PacketKey("", transport, ASK, 0), b"")
            while missing and time.monotonic() < end:
                self._poll_once(lambda: False, 0.01)
                for address in list(missing):
                    if self.take(PacketKey(address, transport, HERE, 0)) is not None:
                        del missing[address]
        finally:
            self._count(transport, -1)
        return list(missing)

    def _watch(self, addresses: Iterable[str]) -> None:
        """Be connected to processes, to see when they end."""
        for address in addresses:
            if address not in self._outgoing and address not in self._ended:
                try:
                    self._connection(address)
                except ConnectionError as error:
                    raise PeerEndedError(address) from error

    def discard(self, key: PacketKey) -> None:
        """Drop packets that nobody will take."""
        while (packet := self._next(key)) is not None:
            close_files(packet.files)

    def discard_all(self, matches: Callable[[PacketKey], bool]) -> None:
        """Drop the packets of all matching keys."""
        for key in filter(matches, list(self._queues)):
            self.discard(key)

    @property
    def any_ended(self) -> bool:
        """True if a process has ended that was connected to this one."""
        return bool(self._ended)

    def has_ended(self, address: str) -> bool:
        """True if a process has ended and none of its packets for transports is left in a queue."""
        if address not in self._ended:
            return False
        return not any(key.sender == address and key.transport for key in list(self._queues))

    def reads_no_more(self, address: str, transport: int) -> bool:
        """True if a process has ended, or a transport has failed there."""
        return (address, transport) in self._gave_up or self.has_ended(address)

    def expect_again(self, address: str) -> None:
        """A process that has closed its connection may live, and connect again. One that has ended does not answer."""
        if address in self._ended:
            with suppress(OSError), self._open_connection(address):
                self._ended.discard(address)

    def failure(self, transport: int) -> str | None:
        """Why a transport failed on a peer, if a FAILED packet has arrived."""
        self._read_until(lambda: transport in self._failures)
        return self._failures.get(transport)

    def _read_until(self, enough: Callable[[], bool]) -> None:
        """Read what has arrived, at most until it is enough: every packet may take a descriptor."""
        for _ in range(MAX_PACKETS):
            if enough() or not self._poll_once(lambda: False, 0.0):
                break

    def end(self, transport: int, cause: str) -> None:
        """Waits for packets of a transport end: it has failed here."""
        self._failures.setdefault(transport, cause)

    def _check_not_failed(self, transport: int) -> None:
        if transport in self._failures:
            raise TransportFailedError(self._failures[transport])

    def _poll_once(self, ready: Callable[[], bool], seconds: float) -> bool:
        """Read what has arrived, or sleep until something does. One thread reads at a time, and wakes the others.

        True if this thread has read something.
        """
        with self._arrival:
            if self._polling and not ready():
                self._arrival.wait(max(seconds, 1e-3))
            if self._polling or ready():
                return False
            self._polling = True
        try:
            came = self._poll.poll(1000 * min(seconds, LOOK))
            for descriptor, _ in came:
                if descriptor == self._listener.fileno():
                    self._accept()
                else:
                    self._read(descriptor)
            return bool(came)
        finally:
            with self._arrival:
                self._polling = False
                self._arrival.notify_all()

    def _accept(self) -> None:
        try:
            sock, _ = self._listener.accept()
        except (BlockingIOError, ConnectionError):  # the peer has gone again
            return
        except OSError:  # too many files are open
            self._refuse_peer()
            return
        if _credentials(sock)[1] != os.getuid():
            sock.close()
            return
        sock.setblocking(False)
        self._add(sock, None)
        anonymous = [descriptor for descriptor, (_, sender) in self._sockets.items() if sender is None]
        if len(anonymous) > MAX_ANONYMOUS:
            self._disconnect(anonymous[0])

    def _refuse_peer(self) -> None:
        """Accept a peer with the reserved descriptor and close the connection, so that it does not wait for ever."""
        self.refused_peers += 1
        if self._reserve is None:
            time.sleep(1e-3)
            return
        close_files([self._reserve])
        with suppress(OSError):
            self._listener.accept()[0].close()
        self._reserve = _reserve_descriptor()

    def _read(self, descriptor: int) -> None:
        if descriptor not in self._sockets:  # closed since it was found to be readable
            return
        sock, sender = self._sockets[descriptor]
        try:
            data, files, complete = _receive(sock, self._room)
            packets = _parse_packets(data, files, complete)
        except (BlockingIOError, ConnectionResetError):  # it has ended and has not read all; what it sent follows
            return
        except (OSError, ValueError):  # the process has ended, or is a stranger
            self._disconnect(descriptor)
            return
        for transport, tag, kind, packet in packets:
            if sender is None:
                if kind != HELLO or packet.files:
                    close_files(packet.files)
                    self._disconnect(descriptor)
                    return
                sender = packet.payload.decode(errors="replace")
                self._sockets[descriptor] = sock, sender
                self._outgoing.setdefault(sender, sock)
                self._ended.discard(sender)  # it had closed a connection, and lives
            elif kind == ASK:
                if self._waits[transport]:
                    self.try_to_send(sender, PacketKey("", transport, HERE, 0), b"")
            elif kind == FAILED:
                self._failures[transport] = packet.payload.decode(errors="replace")
                self._gave_up.add((sender, transport))
                self.told += 1
            else:
                self.told += not transport
                with self._queues_lock:
                    self._queues[PacketKey(sender, transport, kind, tag)].append(packet)

    def _disconnect(self, descriptor: int) -> None:
        """The process at the other end has closed it."""
        sender = self._drop(descriptor)
        if sender is not None:
            self._ended.add(sender)

    def _drop(self, descriptor: int) -> str | None:
        sock, address = self._sockets.pop(descriptor)
        self._poll.unregister(sock)
        sock.close()
        if address is not None and self._outgoing.get(address) is sock:
            del self._outgoing[address]
        return address


def _credentials(sock: socket.socket) -> tuple[int, int, int]:
    """Process, user and group at the other end."""
    pid, user, group = struct.unpack("3i", sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12))
    return pid, user, group


def _send(sock: socket.socket, parts: Sequence[Payload], files: Sequence[int]) -> None:
    if files:
        socket.send_fds(sock, list(parts), files)
    else:
        sock.sendmsg(parts)


def _receive(sock: socket.socket, room: memoryview) -> tuple[memoryview, tuple[int, ...], bool]:
    """Bytes and descriptors; False if this process could not take all descriptors."""
    size, extra, flags, _ = sock.recvmsg_into([room], ANCILLARY, socket.MSG_CMSG_CLOEXEC)
    files = tuple(number for *_, raw in extra for (number,) in struct.iter_unpack("i", raw)) if extra else ()
    if flags & CUT and len(files) < MAX_FILES:  # otherwise it is a stranger: no packet has so many
        close_files(files)
        return room[:size], (), False
    return room[:size], files, True


def _parse_packets(data: memoryview, files: tuple[int, ...], complete: bool) -> list[tuple[int, int, int, Packet]]:
    """Transport, tag and kind of packets that came as one; descriptors belong to the last. A ValueError if it is none.

    >>> _parse_packets(memoryview(HEADER.pack(7, 5, 1, 2) + b"hi" + HEADER.pack(7, 5, 2, 0)), (), True)[0]
    (7, 5, 1, Packet(payload=b'hi', files=(), complete=True))
    """
    packets, at = list[tuple[int, int, int, Packet]](), 0
    while at < len(data) or not packets:
        start = at + HEADER.size
        transport, tag, kind, size = HEADER.unpack_from(data, at) if start <= len(data) else (0, 0, 0, len(data))
        at = start if size < 0 else start + size
        last, in_file = at == len(data), size == IN_FILE and complete
        if at > len(data) or (in_file and not (files and last)):
            close_files(files)
            raise ValueError("end of the connection, not a packet, or the file of its payload is missing")
        if in_file:
            packet = Packet(_read_file(files[-1]), files[:-1])
        else:
            packet = Packet(bytes(data[start:at]), files, complete) if last else Packet(bytes(data[start:at]), ())
        packets.append((transport, tag, kind, packet))
    return packets


def _head(key: PacketKey, payload: Payload) -> bytes:
    size = IN_FILE if len(payload) > LARGE else len(payload)
    return HEADER.pack(key.transport, key.tag, key.kind, size)


def _file_of(payload: Payload) -> int:
    file = os.memfd_create("shardwise-packet")
    with open(file, "wb", closefd=False) as stream:
        stream.write(payload)
    return file


def _read_file(file: int) -> bytes:
    with open(file, "rb") as stream:
        stream.seek(0)
        return stream.read()


def _reserve_descriptor() -> int | None:
    with suppress(OSError):
        return os.open(os.devnull, os.O_RDONLY | os.O_CLOEXEC)
    return None


def close_files(files: Iterable[int]) -> None:
    """Close descriptors."""
    for file in files:
        os.close(file)
