"""The meeting point: a store of torch.distributed where jobs that were started separately find each other.

Small signed entries and mailboxes lie there. Weights never do: they travel between the jobs themselves.
"""

from __future__ import annotations

import errno
import json
import os
import secrets
import socket
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from datetime import timedelta
from hashlib import sha256
from os import PathLike
from pathlib import Path
from queue import Empty, SimpleQueue
from typing import TypeVar

import torch.distributed as dist
from torch.distributed import Store, TCPStore  # type: ignore[attr-defined]

from shardwise.errors import ExchangeError, RefusedTypeError, RefusedValueError
from shardwise.publishing.sealing import Key, Seal, secret_of
from shardwise.publishing.sockets import is_loopback, limit_silence, listen, write_private

At = str | PathLike[str]
T = TypeVar("T")
PART = 2**22  # bytes of an entry; the store takes no more than 8 MiB
CONNECTING = timedelta(seconds=10)
FOREVER = timedelta(days=365)
ABSENT = "-"  # not an entry
WAITS = 1000  # for messages, on one connection
SHORTEST = 0.0002  # seconds between two looks at an entry, at first
CHECKING = 0.2  # seconds between two looks whether a wait should end
LOST = (dist.DistNetworkError, dist.DistStoreError, dist.DistBackendError)


class MeetingLostError(ExchangeError):
    """The meeting point cannot be reached now."""


@dataclass(frozen=True)
class Address:
    """Where jobs meet: a host and a port; or a file of one host, which names a port and holds the secret."""

    host: str = ""
    port: int = 0
    file: Path | None = None

    @staticmethod
    def of(at: At) -> Address:
        """From what users write.

        >>> Address.of("node7:29600")
        Address(host='node7', port=29600, file=None)
        """
        given: object = at
        if not isinstance(given, str | PathLike):
            raise RefusedTypeError(f'at= is "host:port" or the path of a file, not a {type(given).__name__}')
        text = os.fspath(at)
        if isinstance(at, PathLike) or "/" in text or text.startswith("file:"):
            return Address(file=Path(text.removeprefix("file://").removeprefix("file:")).absolute())
        host, colon, port = text.rpartition(":")
        if not colon or not host or not port.isdigit() or not 0 < int(port) < 2**16:
            raise RefusedValueError(
                f'at={text!r} is not a meeting point: give "host:port", as in "node7:29600", or the path of a file '
                f'(with a "/") for jobs of one host'
            )
        return Address(host.strip("[]"), int(port))

    def __str__(self) -> str:
        return str(self.file) if self.file else f"{self.host}:{self.port}"


class MeetingPoint:
    """Connections to the store, one for each call at a time: a thread that waits must not hold up others.

    They are used again: torch looks up the name of the host for each new one, which may take seconds. What cannot be
    reached raises a MeetingLostError; the next call tries again.
    """

    def __init__(self, address: Address, key: Key, patience: float = 10.0) -> None:
        self.address, self._key, self._patience = address, secret_of(key), patience
        self._held: TCPStore | None = None  # the store itself, if this process holds it
        self._idle = deque[Store]()  # connections that nobody uses now
        self._waiting = dict[str, tuple[Store, int]]()  # connections that wait for messages, and how often still
        self._check_key()

    def _check_key(self) -> None:
        if self.address.file is None and not self._key and not is_loopback(self.address.host):
            raise RefusedValueError(
                f"the meeting point {self.address} can be reached from other hosts: give key=, a secret that all jobs "
                f"know, or a Path of a file with it"
            )

    def hold(self) -> bool:
        """Open the meeting point in this process, unless a process listens there. True if this one holds it now."""
        with suppress(MeetingLostError):
            self._probe()
            return False
        host, port = ("127.0.0.1", 0) if self.address.file else (self.address.host, self.address.port)
        try:
            listener = listen(host, port)
        except OSError as error:
            if error.errno == errno.EADDRINUSE:  # somebody was faster
                return False
            where = f"the meeting point {self.address} cannot be opened here: {error.strerror or error}"
            remedy = f"start one on that host (shardwise hub --port {port}), or give an address of this host"
            raise ExchangeError(f"{where}; {remedy}") from error
        port = listener.getsockname()[1]
        self._held = TCPStore(
            host, port, is_master=True, wait_for_workers=False, master_listen_fd=listener.detach(), timeout=CONNECTING
        )
        if self.address.file:
            self._key = self._key or secrets.token_bytes(32)
            try:
                write_private(self.address.file, json.dumps({"port": port, "key": self._key.hex()}))
            except OSError as error:
                self._held = None
                raise ExchangeError(
                    f"the meeting point {self.address} cannot be written: {error.strerror}; give a file in a folder "
                    f"that exists"
                ) from error
        return True

    @property
    def secret_digest(self) -> str:
        """Equal for equal secrets."""
        return sha256(self._key).hexdigest()

    @property
    def seal(self) -> Seal:
        """What entries are signed with."""
        if self.address.file and not self._key:
            self._where()
        return Seal(self._key)

    def _where(self) -> tuple[str, int]:
        """Host and port; those of a file are read again at every connection."""
        if self.address.file is None:
            return self.address.host, self.address.port
        try:
            entry = json.loads(self.address.file.read_text())
            port, key = int(entry["port"]), bytes.fromhex(entry["key"])
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise MeetingLostError(
                f"the meeting point {self.address} is not open: no publisher or hub holds it"
            ) from error
        self._key = key
        return "127.0.0.1", port

    def _probe(self) -> tuple[str, int]:
        """Host and port, if somebody listens there. (A client of the store prints pages of text where nobody does.)"""
        host, port = self._where()
        try:
            socket.create_connection((host, port), timeout=CONNECTING.total_seconds()).close()
        except OSError as error:
            raise MeetingLostError(f"no process listens at the meeting point {self.address}: {error}") from error
        return host, port

    def local_address(self) -> str:
        """The address of this host that others at the meeting point can reach."""
        host, port = self._where()
        with self._errors(), socket.create_connection((host, port), timeout=CONNECTING.total_seconds()) as sock:
            name: str = sock.getsockname()[0]
            return name

    def new_client(self) -> Store:
        """A connection of its own."""
        host, port = self._probe()
        with self._errors():
            store = _in_time(lambda: TCPStore(host, port, is_master=False, wait_for_workers=False, timeout=CONNECTING))
            limit_silence(host, port, self._patience)
            return store

    @contextmanager
    def _errors(self) -> Iterator[None]:
        try:
            yield
        except (*LOST, OSError) as error:
            self._idle.clear()  # they are of the same store
            first = str(error).partition("\n")[0]
            raise MeetingLostError(f"the meeting point {self.address} cannot be reached: {first}") from error

    @contextmanager
    def connection(self) -> Iterator[Store]:
        """A connection that nobody else uses meanwhile."""
        try:
            store = self._idle.pop()
        except IndexError:
            store = self.new_client()
        yield store
        self._idle.append(store)  # unless that failed

    def _do(self, work: Callable[[Store], T]) -> T:
        with self.connection() as store:
            return self._on(store, work)

    def _on(self, store: Store, work: Callable[[Store], T]) -> T:
        with self._errors():
            return work(store)

    # --- entries -----------------------------------------------------------------------------------------------------

    def put(self, path: str, value: object) -> None:
        """Write an entry."""

        def write(store: Store) -> None:  # the secret of a file is known once there is a connection
            entry = self.seal.close(path, value).decode()
            parts = [entry[start : start + PART] for start in range(0, len(entry), PART)]
            for number, part in list(enumerate(parts))[1:]:
                store.set(f"{path}#{number}", part)
            store.set(path, f"{len(parts)}|{parts[0]}")

        self._do(write)

    def has(self, path: str) -> bool:
        """True if there is an entry, whoever signed it."""
        return bool(self._do(lambda store: store.check([path])))

    def get(self, path: str) -> object:
        """The entry; None if there is none, or one that is not signed with the secret."""

        def read(store: Store) -> bytes:
            count, _, entry = _now_at(store, path).partition(b"|")
            parts = [entry]
            for number in range(1, int(count) if count.isdigit() and len(count) < 6 else 1):  # or others wrote it
                parts.append(_now_at(store, f"{path}#{number}"))
                if not parts[-1]:
                    return b""
            return b"".join(parts)

        return self.seal.open(path, self._do(read))

    def replace(self, path: str, before: object, value: object) -> bool:
        """Write an entry if the one there is still `before` (None: there is none). True if it was."""

        def swap(store: Store) -> bool:
            old = "" if before is None else f"1|{self.seal.close(path, before).decode()}"
            new = f"1|{self.seal.close(path, value).decode()}"
            return bytes(store.compare_set(path, old, new)) == new.encode()

        return self._do(swap)

    def wait(self, path: str, seconds: float, check: Callable[[], None]) -> object:
        """The entry, once there is one. `check` raises if the wait is to end; it is called every `CHECKING` seconds."""
        now, pause = time.monotonic(), SHORTEST
        end, next_check = now + seconds, now
        while (value := self.get(path)) is None:
            now = time.monotonic()
            if now >= next_check:
                check()
                next_check = now + CHECKING
            if now > end:
                raise ExchangeError(f"no entry {path} at the meeting point within {seconds:g} s")
            time.sleep(pause)
            pause = min(2 * pause, 0.002)
        return value

    def write_plain(self, path: str, text: str) -> None:
        """Write a text that is not signed, for others than this package's own readers."""
        self._do(lambda store: store.compare_set(path, "", text))

    def delete(self, path: str) -> None:
        """Remove an entry."""
        self._do(lambda store: store.delete_key(path))

    def delete_all(self, prefix: str) -> None:
        """Remove all entries of a prefix."""

        def remove(store: Store) -> None:
            for key in store.list_keys():
                if key.startswith(prefix):
                    store.delete_key(key)

        self._do(remove)

    # --- mailboxes ---------------------------------------------------------------------------------------------------

    def post(self, mailbox: str, message: object) -> None:
        """Put a message into a mailbox."""
        self._do(lambda store: store.queue_push(mailbox, self.seal.close(mailbox, message)))

    def take(self, mailbox: str) -> object:
        """The next message; None if there is none, or one that is not signed with the secret."""

        def pop(store: Store) -> bytes:
            try:
                return bytes(store.queue_pop(mailbox, False))
            except dist.QueueEmptyError:
                return b""

        return self.seal.open(mailbox, self._do(pop))

    def take_or_wait(self, mailbox: str) -> object:
        """The next message, once it comes: for a thread that does nothing else. None as in `take`.

        The store remembers who has ever waited for a mailbox, and may tell them instead of who waits now: a connection
        waits for one mailbox only, and is given up before that list is long.
        """

        def pop(store: Store) -> bytes:
            try:
                return bytes(store.queue_pop(mailbox))
            except dist.QueueEmptyError:
                return b""

        store, left = self._waiting.pop(mailbox, (None, WAITS))
        if store is None:
            store = self.new_client()
            store.set_timeout(FOREVER)
        message = self._on(store, pop)
        if left > 0:
            self._waiting[mailbox] = store, left - 1
        return self.seal.open(mailbox, message)

    def close(self) -> None:
        """Forget the connections that nobody uses, and the store if it is held here."""
        self._idle.clear()
        self._waiting.clear()
        if self._held is not None and self.address.file:
            with suppress(OSError, MeetingLostError):
                if self._where()[1] == self._held.port:
                    self.address.file.unlink()
        self._held = None


def _now_at(store: Store, path: str) -> bytes:
    """What is at a path now, or nothing. (A plain get would wait for it to come.)"""
    found = bytes(store.compare_set(path, ABSENT, ABSENT))
    return b"" if found == ABSENT.encode() else found


def _in_time(connect: Callable[[], Store]) -> Store:
    """Connect in another thread: a subscription that listens and says nothing would hold this one up for ever."""
    made = SimpleQueue[Store | Exception]()

    def run() -> None:
        try:
            made.put(connect())
        except Exception as error:
            made.put(error)

    threading.Thread(target=run, name="shardwise connects", daemon=True).start()
    try:
        store = made.get(timeout=CONNECTING.total_seconds())
    except Empty:
        raise TimeoutError("the process that listens there does not answer, or is not a torch store") from None
    if isinstance(store, Exception):
        raise store
    return store
