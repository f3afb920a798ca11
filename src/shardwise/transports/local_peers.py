"""Which owners of a transport are processes of this host, and reading their memory: one copy (process_vm_readv)."""

from __future__ import annotations

import ctypes
import os
import secrets
import socket
import time
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from contextlib import nullcontext
from hashlib import blake2b
from typing import Any, NamedTuple, Protocol, TypeVar

import numpy as np
import torch

from shardwise.errors import ExchangeError
from shardwise.geometry import Ints
from shardwise.transports.segments import this_process
from shardwise.transports.unix_packets import PATIENCE, PeerEndedError

SHORT = 0.2  # seconds to wait for peers that this process may have refused
T = TypeVar("T")
HostId = tuple[str, str, int, int]  # host name, boot, network namespace, user


class AllGather(Protocol):
    """Everybody's values, in the order of the owners."""

    def __call__(self, value: T, /) -> list[T]: ...


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
    """The owners on this host, by number: their addresses, and the process of each whose memory this one can read.

    `readers` can read the memory of this process; these may be others. `transport` is the number that packets of this
    transport carry. `all`: everybody is on one host. `hosts`: the owners of each host, the same for all.
    """

    transport: int = 0
    addresses: Mapping[int, str] = {}
    processes: Mapping[int, int] = {}
    readers: frozenset[int] = frozenset()
    all: bool = False
    hosts: Sequence[Sequence[int]] = ()

    @staticmethod
    def find(me: int, owners: Sequence[int], all_gather: AllGather) -> LocalPeers:
        """Everybody calls. Two owners are local peers if each connects to the other; both know the result."""
        mine = _card()
        with nullcontext() if mine is None else this_process.packets.accept_in_background():
            told = all_gather(None if mine is None else mine.plain())
            cards = {owner: PeerCard.of(card) if card else None for owner, card in zip(owners, told, strict=True)}
            near = _alone_in_their_processes(me, cards)
            pids = {owner: pid for owner, card in near.items() if (pid := _connect(card.address)) is not None}
            callers = [owner for owner, others in zip(owners, all_gather(sorted(pids)), strict=True) if me in others]
            peers = _accepted({owner: near[owner].address for owner in callers if owner in pids})
            readable = {owner: pids[owner] for owner in peers if near[owner].probe.is_readable(pids[owner])}
            reports = dict(zip(owners, all_gather((peers, sorted(readable))), strict=True))
        peers = [owner for owner in peers if me in reports[owner][0]]
        return LocalPeers(
            _number(cards.values()),
            {owner: near[owner].address for owner in peers},
            {owner: readable[owner] for owner in peers if owner in readable},
            frozenset(owner for owner in peers if me in reports[owner][1]),
            all(len(others) == len(owners) - 1 for others, _ in reports.values()),
            _hosts(cards),
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


def _connect(address: str) -> int | None:
    """The process at an address of this host; None if it cannot be reached."""
    try:
        return this_process.packets.connect(address)
    except (OSError, PeerEndedError):
        return None


def _accepted(callers: Mapping[int, str]) -> list[int]:
    """The owners among these whose connection was accepted here. All have connected, but some may have been refused."""
    if not callers:
        return []
    packets, start = this_process.packets, time.monotonic()
    while not all(map(packets.has_hello_from, callers.values())):
        if time.monotonic() - start > (SHORT if packets.refused_a_peer else PATIENCE):
            break
        time.sleep(1e-3)
    return [owner for owner, address in callers.items() if packets.has_hello_from(address)]


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
