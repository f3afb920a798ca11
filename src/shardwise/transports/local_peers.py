"""Which owners of a transport are processes of this host, and can be reached without the network: found once for a transport."""

from __future__ import annotations

import os
import secrets
import socket
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from hashlib import blake2b
from typing import Any, NamedTuple

from shardwise.transports.process_memory import allowed, trial
from shardwise.transports.unix_packets import PATIENCE, GoneError, Post

SHORT = 0.2  # seconds to wait for those who may have been turned away


class Card(NamedTuple):
    """What a process tells others: its host, its address there, and a place of its memory to see whether they can."""

    host: tuple[Any, ...]
    address: str
    trial: tuple[int, bytes]
    meeting: str  # another one for every transport: groups of the same processes are told apart by it


class LocalPeers(NamedTuple):
    """Owners on this host, by number: their addresses; the process of each whose memory can be read from here.

    `readers` are those who can read the memory of this process, which need not be the same ones. `transport` is a number
    that only packets of this transport have. `all` says that everybody on the transport is on one host; `hosts` are the owners of
    each, as everybody knows them.
    """

    transport: int
    addresses: dict[int, str]
    processes: dict[int, int]
    readers: frozenset[int]
    all: bool
    hosts: list[list[int]]

    @staticmethod
    def met(me: int, owners: Sequence[int], tell: Callable[[Any], list[Any]]) -> LocalPeers:
        """Everybody calls. Two are neighbours where both reach and hear each other: both know what is told."""
        mine = _card()
        with nullcontext() if mine is None else Post.here().attending():
            cards = dict(zip(owners, tell(mine), strict=True))
            near = [o for o, card in cards.items() if o != me and mine and card and card.host == mine.host]
            reached = {owner: pid for owner in near if (pid := _reached(cards[owner].address)) is not None}
            calling = [owner for owner, others in zip(owners, tell(sorted(reached)), strict=True) if me in others]
            heard = _heard({owner: cards[owner].address for owner in calling if owner in reached})
            readable = {owner: reached[owner] for owner in heard if allowed(reached[owner], *cards[owner].trial)}
            told = dict(zip(owners, tell((heard, sorted(readable))), strict=True))
        found = [owner for owner in heard if me in told[owner][0]]
        listed = str([card and card.meeting for card in cards.values()])
        return LocalPeers(
            int.from_bytes(blake2b(listed.encode(), digest_size=7).digest()),
            {owner: cards[owner].address for owner in found},
            {owner: readable[owner] for owner in found if owner in readable},
            frozenset(owner for owner in found if me in told[owner][1]),
            all(len(others) == len(owners) - 1 for others, _ in told.values()),
            _hosts(cards),
        )


def _reached(address: str) -> int | None:
    """The process at an address of this host, where it can be written to."""
    try:
        return Post.here().connect(address)
    except (OSError, GoneError):
        return None


def _heard(calling: Mapping[int, str]) -> list[int]:
    """Those of these owners who have come in. All are at the door, but some may have been turned away."""
    if not calling:
        return []
    begun = time.monotonic()
    while not all(map(Post.here().hears, calling.values())):
        if time.monotonic() - begun > (SHORT if Post.here().turned_away else PATIENCE):
            break
        time.sleep(1e-3)
    return [owner for owner, address in calling.items() if Post.here().hears(address)]


def _hosts(cards: Mapping[int, Card | None]) -> list[list[int]]:
    """One that told nothing of itself is alone."""
    found = dict[Any, list[int]]()
    for owner, card in cards.items():
        found.setdefault(owner if card is None else card.host, []).append(owner)
    return list(found.values())


def _card() -> Card | None:
    """None where this process cannot meet others of its host."""
    try:
        return Card(_host(), Post.here().address, trial(), secrets.token_hex(8))
    except OSError:
        return None


def _host() -> tuple[Any, ...]:
    """Equal where processes can meet: one running system, one network namespace (addresses are its), one user."""
    with open("/proc/sys/kernel/random/boot_id") as file:
        boot = file.read().strip()
    return socket.gethostname(), boot, os.stat("/proc/self/ns/net").st_ino, os.getuid()
