"""Who pulls which version, from whom, and when: what a publisher decides. Nothing is sent or waited for here."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from shardwise.publishing.orders import Order, Version

Message = dict[str, Any]


@dataclass
class Registration:
    """A subscriber: its ranks, what it wants, and the version that it can pass on to others of its host."""

    id: str
    rows: int
    subscription: str
    values: str
    host: str | None  # if all its ranks are there
    maps: bool  # the memory of servers of its host
    holds: Version | None = None  # in memory that others of its host can map
    tainted: bool = False  # a pull from it was broken off: that memory must not be written again

    @property
    def alike(self) -> tuple[str | None, str]:
        """Equal for subscribers that can pass versions on to each other."""
        return self.host, self.values


class Holder(NamedTuple):
    """A job that can serve a version. `subscription`: what it has, if it is a subscriber itself."""

    party: str
    rows: int
    subscription: str | None


@dataclass
class Active:
    """A pull that was ordered."""

    order: Order
    alike: tuple[str | None, str]  # of the subscriber


@dataclass
class PullSchedule:
    """What is held, and who reads it. The publisher is `holder`, on `host`.

    `keep` versions are held, and those that are being read. At most `serving` pulls from one job at a time.
    """

    holder: Holder
    host: str | None
    keep: int
    serving: int
    held: list[int] = field(default_factory=list)
    newest: int = -1
    tainted: set[int] = field(default_factory=set)  # versions of which a pull was broken off: somebody may read on
    sent: set[int] = field(default_factory=set)  # versions that cannot be mapped
    subscribers: dict[str, Registration] = field(default_factory=dict)
    waiting: list[Message] = field(default_factory=list)
    active: dict[str, Active] = field(default_factory=dict)
    ended: list[tuple[float, str]] = field(default_factory=list)  # pulls whose entries are to be removed

    def in_use(self) -> set[int]:
        """Versions that are being pulled from the publisher, and those that deltas of such pulls build on."""
        mine = [order for order in self.orders() if order.server == self.holder.party]
        return {order.version[1] for order in mine} | {order.base[1] for order in mine if order.base}

    def kept(self, numbers: list[int]) -> list[int]:
        """Of rising numbers, those that are held on: the newest ones, and those in use."""
        in_use = self.in_use()
        return [number for number in numbers[: -self.keep] if number in in_use] + numbers[-self.keep :]

    def orders(self, party: str | None = None) -> list[Order]:
        """The pulls that go on; those of one job, if it is given."""
        orders = [one.order for one in list(self.active.values())]
        return [order for order in orders if party is None or party in order.parties]

    def server_for(self, subscriber: Registration, version: Version) -> Holder | None:
        """Another subscriber of its host that has the version, or the publisher; None: it has to wait."""
        if self.orders(subscriber.id):
            return None  # what it holds is being read: it must not be written
        load = Counter(order.server for order in self.orders())
        if subscriber.maps and subscriber.host not in (None, self.host):
            near = [one for one in self.subscribers.values() if one.alike == subscriber.alike and one.holds == version]
            others = [one for one in near if one.id != subscriber.id]
            if others:
                least = min(others, key=lambda one: load[one.id])
                return Holder(least.id, least.rows, least.subscription) if load[least.id] < self.serving else None
            if any(one.alike == subscriber.alike and one.order.version == version for one in self.active.values()):
                return None  # it arrives on this host just now
        return self.holder if load[self.holder.party] < self.serving else None

    def maps(self, subscriber: Registration, holder: Holder, version: Version) -> bool:
        """True if a subscriber maps the memory of a holder; otherwise it is sent the version."""
        if holder is not self.holder:
            return True
        near = subscriber.host is not None and subscriber.host == self.host
        return near and subscriber.maps and version[1] not in self.sent

    def neighbours(self, gone: Registration) -> list[tuple[str, int]]:
        """Jobs that may have sent it memory of their host, and their numbers of ranks."""
        near = [(one.id, one.rows) for one in self.subscribers.values() if one.host == gone.host]
        return near if self.host != gone.host else [*near, (self.holder.party, self.holder.rows)]
