"""Packets between the processes of one host, over unix sockets: small things, and descriptors of shared memory.

Every process has one address, whatever groups it is in, and a connection to every process that it writes to. A process
that ends is seen at once: its connections close. The kernel orders what is in a packet after what was written before.
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

HEADER = struct.Struct("<Qqii")  # of a packet: transport, tag, kind, and whether its payload lies in a file
LARGE = 2**15  # bytes from which on a payload travels as a file: socket buffers are small
MOST = LARGE + HEADER.size
MOST_FILES = 2  # in a packet: a segment, and the file of a payload
HELLO = -1  # the kind of the first packet of a connection: who writes
FAILED = -2  # the kind of a packet that ends a transport: why
FULL = (errno.EAGAIN, errno.ETOOMANYREFS)  # no room in its box, or for descriptors under way: others have to read first
PATIENCE = 5.0  # seconds to wait at a full door: it is answered while ranks meet, unless somebody floods it
MOST_PACKETS = 2**14  # to look through for the one that says why: a stranger may send without end
MOST_SILENT = 256  # connections that have not said who they are: strangers, if they are so many
SPIN = 50e-6  # seconds to look again and again before to sleep, where every rank has a core


class Key(NamedTuple):
    """What a packet is for: those with equal keys come in the order in which they were sent."""

    sender: str
    transport: int
    kind: int
    tag: int


class Packet(NamedTuple):
    """What came: bytes, and descriptors, which are now this process's own; not `whole` where some could not be had."""

    payload: bytes
    files: tuple[int, ...]
    whole: bool = True


class GoneError(Exception):
    """A process that something was expected of has ended, or closed its address."""

    def __init__(self, address: str) -> None:
        super().__init__(address)
        self.address = address


class BrokenError(Exception):
    """Another end of the transport has told that it broke there."""


class Post:
    """The address of this process. Made by `here`; threads may use it at a time."""

    _here: Post | None = None
    _making = Lock()

    @staticmethod
    def here() -> Post:
        """That of this process: one that was forked has its own, and threads that come at a time get the same."""
        with Post._making:
            Post._here = Post._here or Post()
        return Post._here

    def __init__(self) -> None:
        self.address = f"shardwise-{os.getuid()}-{os.getpid()}-{secrets.token_hex(16)}"
        self._door = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET | socket.SOCK_NONBLOCK)
        self._door.bind("\0" + self.address)
        self._door.listen(4096)
        self._poll = select.poll()
        self._poll.register(self._door, select.POLLIN)
        self._out = dict[str, socket.socket]()
        self._in = dict[int, tuple[socket.socket, str | None]]()  # by descriptor: with the address that said hello
        self._queues = defaultdict[Key, deque[Packet]](deque)
        self._gone, self._failed = set[str](), dict[int, str]()
        self._news, self._boxes, self._reading = Condition(), Lock(), False
        self._connecting = Lock()
        self.turned_away = False  # True once somebody could not be let in: too many files are open
        self._spare = _spare()  # a descriptor, to turn others away when there is no other

    # --- connections -------------------------------------------------------------------------------------------------

    def connect(self, address: str) -> int:
        """Be able to write there; the process id that has this address, as it is seen from here."""
        with self._connecting:  # one that threads make twice is closed once, which looks like the end of this process
            if address not in self._out:
                self._out[address] = self._connected(address)
                self.send(address, Key(self.address, 0, HELLO, 0), self.address.encode())
            return _credentials(self._out[address])[0]

    def _connected(self, address: str) -> socket.socket:
        sock = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET | socket.SOCK_NONBLOCK)
        end = time.monotonic() + PATIENCE
        while True:
            try:
                sock.connect("\0" + address)
                break
            except BlockingIOError:  # many are at its door, as they may be at ours
                if time.monotonic() > end:
                    raise
                self._turn(lambda: False, 1e-3)
        if _credentials(sock)[1] != os.getuid():
            sock.close()
            raise PermissionError(errno.EPERM, "the address belongs to another user")
        return sock

    @contextmanager
    def attending(self) -> Iterator[None]:
        """Answer the door meanwhile: those who are to be met come, and strangers may stand in their way."""
        done = Event()

        def attend() -> None:
            while not done.is_set():
                self._turn(done.is_set, 0.02)

        thread = Thread(target=attend, name="shardwise door", daemon=True)
        thread.start()
        try:
            yield
        finally:
            done.set()
            thread.join()

    def hears(self, address: str) -> bool:
        """True where the process with that address has come in, and said so."""
        return any(sender == address for _, sender in list(self._in.values()))

    def leave(self) -> None:
        """Of a forked process: what it has got is its parent's."""
        for sock in (self._door, *self._out.values(), *(sock for sock, _ in self._in.values())):
            sock.close()
        spare, self._spare = self._spare, None
        close([] if spare is None else [spare])

    # --- packets -----------------------------------------------------------------------------------------------------

    def send(
        self,
        to: str,
        key: Key,
        payload: bytes | bytearray | memoryview = b"",
        files: Sequence[int] = (),
        *,
        seconds: float = 60.0,
        transport: int | None = None,
    ) -> None:
        """Leave a packet there. Where its box is full, this takes what has come here until it is not.

        Or until somebody tells that the `transport` that it is sent for, that of the key unless given, has failed.
        """
        transport = key.transport if transport is None else transport
        end, large = time.monotonic() + seconds, len(payload) > LARGE
        if large:
            files = (*files, _file_of(payload))
        head = HEADER.pack(key.transport, key.tag, key.kind, large)
        sock = self._out[to]
        try:
            while True:
                try:
                    _send(sock, (head, b"" if large else payload), files)
                    return
                except OSError as error:
                    if error.errno not in FULL:
                        raise
                    self._check_unbroken(transport)
                    if time.monotonic() > end:
                        raise TimeoutError(f"nothing was taken within {seconds:g} s") from None
                    self._make_room(sock)
        except ConnectionError as error:
            self.failure(transport)  # it may have told why, before it ended
            self._check_unbroken(transport)
            raise GoneError(to) from error
        finally:
            if large:
                os.close(files[-1])

    def try_to_send(self, to: str, key: Key, payload: bytes) -> None:
        """The same, where it does not matter whether it comes."""
        with suppress(GoneError, BrokenError, OSError):
            self.send(to, key, payload, seconds=1.0)

    def _make_room(self, sock: socket.socket) -> None:
        """Others may wait for room here, as this waits for room there."""
        self._turn(lambda: False, 0.0)
        writable = select.poll()
        writable.register(sock, select.POLLOUT)
        writable.poll(1)

    def take(self, key: Key) -> Packet | None:
        """The next packet of a key that has come; None where none has."""
        packet = self._next(key)
        if packet is not None and not packet.whole:
            raise ExchangeError("this process has too many files open to receive shared memory: raise `ulimit -n`")
        return packet

    def _next(self, key: Key) -> Packet | None:
        with self._boxes:
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
        """Until it is ready, which something `expected` of these addresses makes it. Others are not waited for."""
        end, begun = time.monotonic() + seconds, time.monotonic()
        while not ready():
            now = time.monotonic()
            self._check_unbroken(transport)
            gone = next((address for address in expected() if address in self._gone), None)
            if gone is not None and not ready():
                raise GoneError(gone)
            if now > end:
                raise TimeoutError(f"nothing came within {seconds:g} s")
            self._turn(ready, 0.0 if spin and now - begun < SPIN else end - now)

    def discard(self, key: Key) -> None:
        """What came and will not be taken."""
        while (packet := self._next(key)) is not None:
            close(packet.files)

    def discard_all(self, those: Callable[[Key], bool]) -> None:
        """The same for all of such keys."""
        for key in filter(those, list(self._queues)):
            self.discard(key)

    def has_ended(self, address: str) -> bool:
        """True where a process has, and nothing that it sent over transports is left to be taken."""
        if address not in self._gone:
            return False
        return not any(key.sender == address and key.transport for key in list(self._queues))

    def failure(self, transport: int) -> str | None:
        """Why a transport has failed elsewhere, if anybody has told so by now."""
        for _ in range(MOST_PACKETS):
            if transport in self._failed or not self._turn(lambda: False, 0.0):
                break
        return self._failed.get(transport)

    def _check_unbroken(self, transport: int) -> None:
        if transport in self._failed:
            raise BrokenError(self._failed[transport])

    def _turn(self, ready: Callable[[], bool], seconds: float) -> bool:
        """Read what has come, or sleep until something does. One thread reads at a time; the others hear of it.

        True where this thread has read something.
        """
        with self._news:
            if self._reading and not ready():
                self._news.wait(max(seconds, 1e-3))
            if self._reading or ready():
                return False
            self._reading = True
        try:
            came = self._poll.poll(1000 * min(seconds, 3600))
            for descriptor, _ in came:
                if descriptor == self._door.fileno():
                    self._accept()
                else:
                    self._read(descriptor)
            return bool(came)
        finally:
            with self._news:
                self._reading = False
                self._news.notify_all()

    def _accept(self) -> None:
        try:
            sock, _ = self._door.accept()
        except (BlockingIOError, ConnectionError):  # who came has left again
            return
        except OSError:  # too many files are open
            self._turn_away()
            return
        if _credentials(sock)[1] != os.getuid():
            sock.close()
            return
        sock.setblocking(False)
        self._in[sock.fileno()] = sock, None
        self._poll.register(sock, select.POLLIN)
        silent = [descriptor for descriptor, (_, sender) in self._in.items() if sender is None]
        if len(silent) > MOST_SILENT:
            self._hang_up(silent[0])

    def _turn_away(self) -> None:
        """Let somebody in by the descriptor that is kept for this, and out again: nobody waits at the door for good."""
        self.turned_away = True
        if self._spare is None:
            time.sleep(1e-3)
            return
        close([self._spare])
        with suppress(OSError):
            self._door.accept()[0].close()
        self._spare = _spare()

    def _read(self, descriptor: int) -> None:
        sock, sender = self._in[descriptor]
        try:
            data, files, whole = _receive(sock)
            transport, tag, kind, payload, files = _opened(data, files, whole)
        except BlockingIOError:
            return
        except (OSError, ValueError):  # it has ended, or is none of us
            self._hang_up(descriptor)
            return
        if kind == HELLO and sender is None and not files:
            self._in[descriptor] = sock, payload.decode(errors="replace")
        elif sender is None:
            close(files)
            self._hang_up(descriptor)
        elif kind == FAILED:
            self._failed[transport] = payload.decode(errors="replace")
        else:
            with self._boxes:
                self._queues[Key(sender, transport, kind, tag)].append(Packet(payload, files, whole))

    def _hang_up(self, descriptor: int) -> None:
        self._poll.unregister(descriptor)
        sock, sender = self._in.pop(descriptor)
        sock.close()
        if sender is not None:
            self._gone.add(sender)


def _forked() -> None:
    Post._making = Lock()  # another thread of the parent may have had it
    if Post._here is not None:
        Post._here.leave()
        Post._here = None


os.register_at_fork(after_in_child=_forked)


def _credentials(sock: socket.socket) -> tuple[int, int, int]:
    """Process, user and group at the other end."""
    found: tuple[int, int, int] = struct.unpack("3i", sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12))
    return found


def _send(sock: socket.socket, parts: Sequence[bytes | bytearray | memoryview], files: Sequence[int]) -> None:
    if files:
        socket.send_fds(sock, list(parts), files)
    else:
        sock.sendmsg(parts)


def _receive(sock: socket.socket) -> tuple[bytes, tuple[int, ...], bool]:
    """Bytes and descriptors; False where the process could not take all of them."""
    data, extra, flags, _ = sock.recvmsg(MOST, socket.CMSG_SPACE(4 * MOST_FILES), socket.MSG_CMSG_CLOEXEC)
    files = tuple(number for *_, raw in extra for (number,) in struct.iter_unpack("i", raw))
    if flags & socket.MSG_CTRUNC and len(files) < MOST_FILES:  # else more came than any of us would send
        close(files)
        return data, (), False
    return data, files, True


def _opened(data: bytes, files: tuple[int, ...], whole: bool) -> tuple[int, int, int, bytes, tuple[int, ...]]:
    """Transport, tag, kind, payload and descriptors of a packet; a ValueError for what is none."""
    if len(data) < HEADER.size:
        close(files)
        raise ValueError("nothing, or not from here")
    transport, tag, kind, large = HEADER.unpack_from(data)
    if not large or not whole:
        return transport, tag, kind, data[HEADER.size :], files
    if not files:
        raise ValueError("a payload without its file")
    return transport, tag, kind, _read_file(files[-1]), files[:-1]


def _file_of(payload: bytes | bytearray | memoryview) -> int:
    file = os.memfd_create("shardwise-packet")
    with open(file, "wb", closefd=False) as stream:
        stream.write(payload)
    return file


def _read_file(file: int) -> bytes:
    with open(file, "rb") as stream:
        stream.seek(0)
        return stream.read()


def _spare() -> int | None:
    with suppress(OSError):
        return os.open(os.devnull, os.O_RDONLY | os.O_CLOEXEC)
    return None


def close(files: Iterable[int]) -> None:
    for file in files:
        os.close(file)
