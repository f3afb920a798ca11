"""Which owners of a wire are processes of this host, and can be reached without the network: found once for a wire."""

from __future__ import annotations

import os
import secrets
import socket
from collections.abc import Callable, Mapping, Sequence
from hashlib import blake2b
from typing import Any, NamedTuple

from shardwise.wires.attach import allowed, trial
from shardwise.wires.post import GoneError, Post


class Card(NamedTuple):
    """What a process tells others: its host, its address there, and a place of its memory to see whether they can."""

    host: tuple[Any, ...]
    address: str
    trial: tuple[int, bytes]
    meeting: str  # another one for every wire: groups of the same processes are told apart by it


class Neighbours(NamedTuple):
    """Owners on this host, by number: their addresses; the process of each whose memory can be read from here.

    `readers` are those who can read the memory of this process, which need not be the same ones. `wire` is a number
    that only packets of this wire have. `all` says that everybody on the wire is on one host; `hosts` are the owners of
    each, as everybody knows them.
    """

    wire: int
    addresses: dict[int, str]
    processes: dict[int, int]
    readers: frozenset[int]
    all: bool
    hosts: list[list[int]]

    @staticmethod
    def met(me: int, owners: Sequence[int], tell: Callable[[Any], list[Any]]) -> Neighbours:
        """Everybody calls. Two are neighbours where both reach each other: what is told twice is known to both."""
        cards = dict(zip(owners, tell(_card()), strict=True))
        reached, mine = dict[int, int](), cards[me]
        for owner, card in cards.items():
            if owner != me and mine is not None and card is not None and card.host == mine.host:
                try:
                    reached[owner] = Post.here().connect(card.address)
                except (OSError, GoneError):
                    continue
        readable = {owner: pid for owner, pid in reached.items() if allowed(pid, *cards[owner].trial)}
        told = dict(zip(owners, tell((sorted(reached), sorted(readable))), strict=True))
        found = [owner for owner in reached if me in told[owner][0]]
        listed = str([card and card.meeting for card in cards.values()])
        return Neighbours(
            int.from_bytes(blake2b(listed.encode(), digest_size=7).digest()),
            {owner: cards[owner].address for owner in found},
            {owner: readable[owner] for owner in found if owner in readable},
            frozenset(owner for owner in found if me in told[owner][1]),
            all(len(others) == len(owners) - 1 for others, _ in told.values()),
            _hosts(cards),
        )


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
