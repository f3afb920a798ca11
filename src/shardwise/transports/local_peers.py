"""Which owners of a transport are processes of this host, and reading their memory: one copy (process_vm_readv)."""

from __future__ import annotations

import ctypes
import os
import secrets
import socket
import time
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from functools import lru_cache
from hashlib import blake2b
from typing import Any, NamedTuple, Protocol, TypeVar

import numpy as np
import torch

from shardwise.errors import ExchangeError
from shardwise.geometry import Ints, ints
from shardwise.planning import Hosts
from shardwise.transports.segments import this_process
from shardwise.transports.unix_packets import PATIENCE, PeerEndedError

SHORT = 0.2  # seconds to wait for peers that this process may have refused
T = TypeVar("T")
HostId = tuple[str, str, int, int]  # host name, boot, network namespace, user


class Gather(Protocol):
    """The values of some owners, which all call."""

    def __call__(self, value: T, among: Sequence[int], /) -> list[T]: ...


Told = Sequence[Any] | None  # what a process tells others of itself, as plain values; None if it has nothing to tell


class PeerCard(NamedTuple):
    """What a process tells all others of a transport, so that those of its host can reach it."""

    host: HostId
    address: str
    probe: MemoryProbe
    nonce: str  # differs between transports: groups of the same processes are told apart by it

    def plain(self) -> Sequence[Any]:
        """As plain values, for JSON."""
        return [list(self.host), self.address, self.probe.address, self.probe.content.hex(), self.nonce]

    @staticmethod
    def of(told: Sequence[Any]) -> PeerCard:
        """The inverse."""
        (name, boot, namespace, user), address, place, content, nonce = told
        host = str(name), str(boot), int(namespace), int(user)
        return PeerCard(host, str(address), MemoryProbe(int(place), bytes.fromhex(content)), str(nonce))


class LocalPeers(NamedTuple):
    """The owners on this host, by number: their addresses, and which of them can read the memory of this process.

    `transport` is the number that packets of this transport carry. `all`: everybody is on one host. `hosts`: the owners
    of each host, the same for all.
    """

    transport: int = 0
    addresses: Mapping[int, str] = {}
    readers: frozenset[int] = frozenset()
    all: bool = False
    hosts: Sequence[Sequence[int]] = ()

    @staticmethod
    def find(me: int, owners: Sequence[int], told: Sequence[Told], gather: Gather) -> LocalPeers:
        """Everybody calls, inside of `introduced`, with what all were told.

        Each tries to connect to the next one of its host, and to read from its memory. Those for whom both ways work
        are local peers, which all know: they connect to the others when they need to. Owners of one host ask each
        other, and nobody else: other hosts may be far.
        """
        cards = {owner: PeerCard.of(card) if card else None for owner, card in zip(owners, told, strict=True)}
        hosts = _hosts(cards)
        here = next(some for some in hosts if me in some)
        near = _alone_in_their_processes(me, cards)
        after, before = _neighbours(me, list(near), owners)
        pid = None if after is None else _connect(near[after].address)
        called = dict(zip(here, gather(pid is not None, here), strict=True))
        heard = before is not None and called[before] and _accepted(near[before].address)
        reads = pid is not None and after is not None and near[after].probe.is_readable(pid)
        reports = dict(zip(here, gather((called[me] and heard, reads), here), strict=True))
        peers = [owner for owner in near if reports[owner][0] and reports[me][0]]
        return LocalPeers(
            _number(cards.values()),
            {owner: near[owner].address for owner in peers},
            _readers(before, peers, {me: reads, **{owner: reports[owner][1] for owner in near}}),
            len(owners) == 1 or (len(near) == len(owners) - 1 and all(met for met, _ in reports.values())),
            hosts,
        )

    def renumbered(self, token: str) -> LocalPeers:
        """The same peers on another transport of theirs, whose packets carry another number."""
        return self._replace(transport=_digest(f"{self.transport} {token}"))


def _alone_in_their_processes(me: int, cards: Mapping[int, PeerCard | None]) -> dict[int, PeerCard]:
    """Others of this host. Packets name processes, not owners: owners in one process, as of two jobs, use the group."""
    owners = Counter((card.host, card.address) for card in cards.values() if card)
    alone = {owner: card for owner, card in cards.items() if card and owners[card.host, card.address] == 1}
    mine = alone.get(me)
    return {owner: card for owner, card in alone.items() if owner != me and mine and card.host == mine.host}


def _neighbours(me: int, near: Sequence[int], owners: Sequence[int]) -> tuple[int | None, int | None]:
    """The next owner of this host, and the one before, in a circle."""
    if not near:
        return None, None
    team = [owner for owner in owners if owner == me or owner in near]
    at = team.index(me)
    return team[(at + 1) % len(team)], team[at - 1]


def _readers(before: int | None, peers: Sequence[int], reads: Mapping[int, bool]) -> frozenset[int]:
    """All, where each can read from the next one: who may is a matter of the process, or of where it runs.

    Otherwise only the one that has tried.
    """
    if all(reads.values()):
        return frozenset(peers)
    return frozenset(owner for owner in peers if owner == before and reads[owner])


def _connect(address: str) -> int | None:
    """The process at an address of this host; None if it cannot be reached."""
    try:
        return this_process.packets.connect(address)
    except (OSError, PeerEndedError):
        return None


def _accepted(address: str) -> bool:
    """True if the connection of a peer is accepted here. It has connected, but may have been refused."""
    packets, start = this_process.packets, time.monotonic()
    while not packets.has_hello_from(address):
        if time.monotonic() - start > (SHORT if packets.refused_peers else PATIENCE):
            return False
        time.sleep(1e-3)
    return True


def _number(cards: Iterable[PeerCard | None]) -> int:
    """A number for the transport of these processes, the same on all of them."""
    return _digest(str([card and card.nonce for card in cards]))


def _digest(text: str) -> int:
    return int.from_bytes(blake2b(text.encode(), digest_size=7).digest())


def _hosts(cards: Mapping[int, PeerCard | None]) -> list[list[int]]:
    """An owner without a card is alone."""
    hosts = dict[HostId | int, list[int]]()
    for owner, card in cards.items():
        hosts.setdefault(owner if card is None else card.host, []).append(owner)
    return list(hosts.values())


@lru_cache(maxsize=64)
def hosts_of(owners: tuple[tuple[int, ...], ...]) -> Hosts | None:
    """From the owners of each host; None if there is one host, or one owner on each."""
    by_owner = {owner: number for number, several in enumerate(owners) for owner in several}
    return Hosts.of(by_owner, ints(sorted(by_owner))) if 1 < len(owners) < len(by_owner) else None


@contextmanager
def introduced() -> Iterator[Told]:
    """What this process tells others of itself. Inside, those of its host can connect."""
    mine = _card()
    with nullcontext() if mine is None else this_process.packets.accept_in_background():
        yield None if mine is None else mine.plain()


def _card() -> PeerCard | None:
    """None if this process cannot have a socket for others of its host."""
    try:
        address = this_process.packets.address
        return PeerCard(host_id(), address, MemoryProbe.of_this_process(), secrets.token_hex(8))
    except OSError:
        return None


def host_id() -> HostId:
    """Equal for processes that can reach each other: one running system, network namespace (of addresses) and user."""
    with open("/proc/sys/kernel/random/boot_id") as file:
        boot = file.read().strip()
    return socket.gethostname(), boot, os.stat("/proc/self/ns/net").st_ino, os.getuid()


MAX_RANGES = 1024  # of one call
MAX_BYTES = 2**30  # of a range, and about as many of a call

_token = torch.tensor(list(secrets.token_bytes(16)), dtype=torch.uint8, device="cpu")


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
        room = torch.zeros(len(self.content), dtype=torch.uint8, device="cpu")
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
