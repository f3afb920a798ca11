"""What jobs write to each other at the meeting point: where it lies, and the messages of a pull."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

from shardwise.errors import RefusedTypeError, RefusedValueError
from shardwise.exchange import Delta
from shardwise.publishing.meeting import MeetingPoint

Version = tuple[int, int]  # incarnation of the publisher, and number: later ones are larger


def check_number(version: object) -> None:
    """Refuse what cannot be the number of a version."""
    if not isinstance(version, int) or isinstance(version, bool):
        raise RefusedTypeError(
            f"version {version!r} is of type {type(version).__name__}: give a whole number, a Python int"
        )


@dataclass(frozen=True)
class Paths:
    """Where entries and mailboxes of a name lie."""

    name: str

    @staticmethod
    def of(name: str) -> Paths:
        """Of a name that users give."""
        given: object = name
        if not isinstance(given, str) or not given or "/" in name or "#" in name or len(name) > 200:
            raise RefusedValueError(f'name={name!r}: give a short name without "/" and "#", as in name="policy"')
        return Paths(name)

    @property
    def _prefix(self) -> str:
        return f"shardwise/{self.name}"

    @property
    def publisher(self) -> str:
        """Who publishes: the claim of the name."""
        return f"{self._prefix}/publisher"

    @property
    def versions(self) -> str:
        """The versions that are held."""
        return f"{self._prefix}/versions"

    def catalog(self, token: str) -> str:
        """The tensors of a publisher."""
        return f"{self._prefix}/catalog/{token}"

    def subscription(self, digest: str) -> str:
        """What subscribers want."""
        return f"{self._prefix}/subscription/{digest}"

    def beat(self, party: str, row: int) -> str:
        """The counter of a rank of a job, and where others of its host reach it."""
        return f"{self._prefix}/beat/{party}/{row}"

    def requests(self, token: str) -> str:
        """The mailbox of a publisher."""
        return f"{self._prefix}/requests/{token}"

    def orders(self, party: str, row: int) -> str:
        """The mailbox of a rank that serves."""
        return f"{self._prefix}/orders/{party}/{row}"

    def reply(self, party: str) -> str:
        """The mailbox of the answers to a subscriber. (One for all: the store keeps empty ones for ever.)"""
        return f"{self._prefix}/reply/{party}"

    def pull(self, order: str) -> str:
        """All that belongs to one pull."""
        return f"{self._prefix}/pull/{order}"


@dataclass(frozen=True)
class Claim:
    """Who publishes under a name. A restarted publisher has a larger incarnation."""

    token: str
    incarnation: int
    rows: int
    patience: float
    host: str | None  # if all its ranks are there, and others of that host can map what it holds
    backend: str = "gloo"  # of the groups that versions are sent over

    def to_json(self) -> dict[str, object]:
        """As it is sent."""
        return asdict(self)

    @staticmethod
    def of(entry: Any) -> Claim:
        """The inverse of `to_json`."""
        return Claim(**entry)

    @staticmethod
    def at(meeting: MeetingPoint, paths: Paths) -> Claim | None:
        """Who publishes now."""
        entry = meeting.get(paths.publisher)
        return None if entry is None else Claim.of(entry)


@dataclass(frozen=True)
class Order:
    """One pull: `subscriber` gets `version` from `server`.

    `mapped`: both are on one host, and the subscriber maps the memory of the server; otherwise the server sends it.
    `base`: the version that the subscriber has, for deltas.
    """

    id: str
    challenge: str
    server: str
    server_rows: int
    subscriber: str
    subscriber_rows: int
    subscription: str  # the digest of what the subscriber wants
    source: str | None  # the digest of what the server has, if it is a subscriber itself
    version: Version
    mapped: bool
    backend: str
    base: Version | None = None

    @property
    def delta(self) -> Delta:
        """Which messages send only what has changed."""
        return False if self.base is None else "between hosts"

    @property
    def parties(self) -> dict[str, int]:
        """Both jobs, and their numbers of ranks."""
        return {self.server: self.server_rows, self.subscriber: self.subscriber_rows}

    def to_json(self) -> dict[str, object]:
        """As it is sent."""
        return asdict(self)

    @staticmethod
    def of(entry: Any) -> Order:
        """The inverse of `to_json`."""
        base = entry["base"] and tuple(entry["base"])
        return Order(**{**entry, "version": tuple(entry["version"]), "base": base})
