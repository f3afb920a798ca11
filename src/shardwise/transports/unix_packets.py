"""Packets between the processes of one host, over unix sockets: small payloads, and descriptors of shared memory.

A process has one address, whatever groups it is in, and one connection to every process that it writes to. When a
process ends, its peers see it at once: its connections close. A packet also orders memory: what the sender wrote to
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
from collections import defaultdict, deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from threading import Condition, Event, Lock, Thread
from typing import NamedTuple

from shardwise.errors import ExchangeError

HEADER = struct.Struct("<Qqii")  # of a packet: transport, tag, kind, and whether the payload is in a file
LARGE = 2**15  # bytes; a larger payload travels as a file, because socket buffers are small
MAX_BYTES = LARGE + HEADER.size
MAX_FILES = 2  # in a packet: a segment, and the file of a payload
HELLO = -1  # the kind of the first packet of a connection: the sender's address
FAILED = -2  # the kind of a packet that ends a transport: the cause
FULL = (errno.EAGAIN, errno.ETOOMANYREFS)  # the peer's queue, or the limit of descriptors in flight: it must read first
PATIENCE = 5.0  # seconds to wait for a full listener: peers accept during rendezvous, unless somebody floods them
MAX_PACKETS = 2**14  # to read in search of a FAILED packet: a stranger may send without end
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
        self._outgoing, self._kept = dict[str, socket.socket](), set[str]()
        self._incoming = dict[int, tuple[socket.socket, str | None]]()  # by descriptor, with its HELLO
        self._queues = defaultdict[PacketKey, deque[Packet]](deque)
        self._ended, self._failures = set[str](), dict[int, str]()
        self._arrival, self._queues_lock, self._polling = Condition(), Lock(), False
        self._connecting = Lock()
        self.refused_a_peer = False  # True once a peer could not be accepted: too many open files
        self._reserve = _reserve_descriptor()  # freed to refuse peers when no descriptor is left

    # --- connections -------------------------------------------------------------------------------------------------

    def connect(self, address: str) -> int:
        """Connect to an address, once; the process id behind it, in this process's namespace."""
        with self._connecting:  # closing one of two connections would look like the end of this process
            if address not in self._outgoing:
                self._outgoing[address] = self._open_connection(address)
                self.send(address, PacketKey(self.address, 0, HELLO, 0), self.address.encode())
            return _credentials(self._outgoing[address])[0]

    def _open_connection(self, address: str) -> socket.socket:
        sock = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET | socket.SOCK_NONBLOCK)
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
            sock.close()
            raise PermissionError(errno.EPERM, "the address belongs to another user")
        return sock

    def keep(self, addresses: Iterable[str]) -> None:
        """The connections to these are used for as long as this process lives."""
        with self._connecting:
            self._kept.update(addresses)

    def disconnect(self, address: str) -> bool:
        """Close the connection to an address: the process there takes this one to have ended. False if it is kept."""
        with self._connecting:
            if address in self._kept:
                return False
            sock = self._outgoing.pop(address, None)
            if sock is not None:
                sock.close()
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
        return any(sender == address for _, sender in list(self._incoming.values()))

    def close(self) -> None:
        """Close all sockets. (A forked child does: they are its parent's.)"""
        for sock in (self._listener, *self._outgoing.values(), *(sock for sock, _ in self._incoming.values())):
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
    ) -> None:
        """Send a packet. While the peer's queue is full, read what arrives here: the peer may be waiting for that.

        Raises if a peer reports that `transport` (by default the key's) has failed.
        """
        transport = key.transport if transport is None else transport
        end, large = time.monotonic() + seconds, len(payload) > LARGE
        if large:
            files = (*files, _file_of(payload))
        head = HEADER.pack(key.transport, key.tag, key.kind, large)
        sock = self._outgoing[to]
        try:
            while True:
                try:
                    _send(sock, (head, b"" if large else payload), files)
                    return
                except OSError as error:
                    if error.errno not in FULL:
                        raise
                    self._check_not_failed(transport)
                    if time.monotonic() > end:
                        raise TimeoutError(f"nothing was taken within {seconds:g} s") from None
                    self._make_room(sock)
        except ConnectionError as error:
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

    def take(self, key: PacketKey) -> Packet | None:
        """The next packet of a key; None if none has arrived."""
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
    ) -> None:
        """Read packets until `ready()`. Raises if a process whose address is in `expected()` has ended."""
        end, begun = time.monotonic() + seconds, time.monotonic()
        while not ready():
            now = time.monotonic()
            self._check_not_failed(transport)
            ended = next((address for address in expected() if address in self._ended), None)
            if ended is not None and not ready():
                raise PeerEndedError(ended)
            if now > end:
                raise TimeoutError(f"nothing came within {seconds:g} s")
            self._poll_once(ready, 0.0 if spin and now - begun < SPIN else end - now)

    def discard(self, key: PacketKey) -> None:
        """Drop packets that nobody will take."""
        while (packet := self._next(key)) is not None:
            close_files(packet.files)

    def discard_all(self, matches: Callable[[PacketKey], bool]) -> None:
        """Drop the packets of all matching keys."""
        for key in filter(matches, list(self._queues)):
            self.discard(key)

    def has_ended(self, address: str) -> bool:
        """True if a process has ended and none of its packets for transports is left in a queue."""
        if address not in self._ended:
            return False
        return not any(key.sender == address and key.transport for key in list(self._queues))

    def expect_again(self, address: str) -> None:
        """A process that has closed its connection may live, and connect again. One that has ended does not answer."""
        if address in self._ended:
            with suppress(OSError), self._open_connection(address):
                self._ended.discard(address)

    def failure(self, transport: int) -> str | None:
        """Why a transport failed on a peer, if a FAILED packet has arrived."""
        for _ in range(MAX_PACKETS):
            if transport in self._failures or not self._poll_once(lambda: False, 0.0):
                break
        return self._failures.get(transport)

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
        self._incoming[sock.fileno()] = sock, None
        self._poll.register(sock, select.POLLIN)
        anonymous = [descriptor for descriptor, (_, sender) in self._incoming.items() if sender is None]
        if len(anonymous) > MAX_ANONYMOUS:
            self._disconnect(anonymous[0])

    def _refuse_peer(self) -> None:
        """Accept a peer with the reserved descriptor and close the connection, so that it does not wait for ever."""
        self.refused_a_peer = True
        if self._reserve is None:
            time.sleep(1e-3)
            return
        close_files([self._reserve])
        with suppress(OSError):
            self._listener.accept()[0].close()
        self._reserve = _reserve_descriptor()

    def _read(self, descriptor: int) -> None:
        sock, sender = self._incoming[descriptor]
        try:
            data, files, complete = _receive(sock)
            transport, tag, kind, payload, files = _parse_packet(data, files, complete)
        except BlockingIOError:
            return
        except (OSError, ValueError):  # the process has ended, or is a stranger
            self._disconnect(descriptor)
            return
        if kind == HELLO and sender is None and not files:
            self._incoming[descriptor] = sock, payload.decode(errors="replace")
            self._ended.discard(payload.decode(errors="replace"))  # it had closed a connection, and lives
        elif sender is None:
            close_files(files)
            self._disconnect(descriptor)
        elif kind == FAILED:
            self._failures[transport] = payload.decode(errors="replace")
        else:
            with self._queues_lock:
                self._queues[PacketKey(sender, transport, kind, tag)].append(Packet(payload, files, complete))

    def _disconnect(self, descriptor: int) -> None:
        self._poll.unregister(descriptor)
        sock, sender = self._incoming.pop(descriptor)
        sock.close()
        if sender is not None:
            self._ended.add(sender)


def _credentials(sock: socket.socket) -> tuple[int, int, int]:
    """Process, user and group at the other end."""
    pid, user, group = struct.unpack("3i", sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12))
    return pid, user, group


def _send(sock: socket.socket, parts: Sequence[Payload], files: Sequence[int]) -> None:
    if files:
        socket.send_fds(sock, list(parts), files)
    else:
        sock.sendmsg(parts)


def _receive(sock: socket.socket) -> tuple[bytes, tuple[int, ...], bool]:
    """Bytes and descriptors; False if this process could not take all descriptors."""
    data, extra, flags, _ = sock.recvmsg(MAX_BYTES, socket.CMSG_SPACE(4 * MAX_FILES), socket.MSG_CMSG_CLOEXEC)
    files = tuple(number for *_, raw in extra for (number,) in struct.iter_unpack("i", raw))
    if flags & socket.MSG_CTRUNC and len(files) < MAX_FILES:  # otherwise it is a stranger: no packet has so many
        close_files(files)
        return data, (), False
    return data, files, True


def _parse_packet(data: bytes, files: tuple[int, ...], complete: bool) -> tuple[int, int, int, bytes, tuple[int, ...]]:
    """Transport, tag, kind, payload and descriptors of a packet; a ValueError if it is not one."""
    if len(data) < HEADER.size:
        close_files(files)
        raise ValueError("end of the connection, or not a packet")
    transport, tag, kind, large = HEADER.unpack_from(data)
    if not large or not complete:
        return transport, tag, kind, data[HEADER.size :], files
    if not files:
        raise ValueError("the file of the payload is missing")
    return transport, tag, kind, _read_file(files[-1]), files[:-1]


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
