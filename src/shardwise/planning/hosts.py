"""Where owners live: a number for the host of every owner. Hosts matter only in that they are the same or not."""

from __future__ import annotations

from collections.abc import Hashable, Mapping
from dataclasses import dataclass

import numpy as np

from shardwise.errors import PlanError
from shardwise.geometry import Ints, different, ints
from shardwise.layout import Mesh


@dataclass(frozen=True)
class Network:
    """The network between hosts: `latency` in seconds for each message, and `bandwidth` in bytes per second.

    Another step costs one latency. It is used if it saves more bytes than a link carries in that time.

    >>> Network(latency=20e-3, bandwidth=125e6).bytes_of_a_step
    2500000
    """

    latency: float = 20e-6
    bandwidth: float = 10e9

    def __post_init__(self) -> None:
        for name, value in vars(self).items():
            if not isinstance(value, int | float) or isinstance(value, bool) or not 0 <= value < float("inf"):
                raise PlanError(f"{name}= of Network must be a number that is not negative, not {value!r}")

    @property
    def bytes_of_a_step(self) -> int:
        """What a link carries in the time that one more step takes."""
        return round(self.latency * self.bandwidth)


@dataclass(frozen=True)
class Hosts:
    """Owner `owners[i]` (rising) lives on host number `numbers[i]`; hosts are numbered as they first appear."""

    owners: tuple[int, ...]
    numbers: tuple[int, ...]

    @staticmethod
    def of(given: int | Mapping[int, Hashable] | Mesh | Hosts, owners: Ints) -> Hosts:
        """From a number of owners per host, from owner -> host, from a mesh that knows, or from hosts of more owners.

        >>> Hosts.of({4: "a", 7: "b", 9: "a"}, ints([4, 7, 9])).numbers
        (0, 1, 0)
        """
        if isinstance(given, Hosts) and np.array_equal(given._table[0], owners):  # type: ignore[attr-defined]
            return given
        known = _by_owner(given, owners.tolist())
        missing = [owner for owner in owners.tolist() if owner not in known]
        if missing:
            share = f"{len(missing)} of {len(owners)} are missing"
            raise PlanError(f"hosts= names no host for owner {missing[0]} ({share})")
        names = [known[owner] for owner in owners.tolist()]
        try:
            numbers = {name: n for n, name in enumerate(dict.fromkeys(names))}
        except TypeError:
            raise PlanError(f"hosts must be names or numbers, not {names[0]!r}") from None
        return Hosts(tuple(owners.tolist()), tuple(numbers[name] for name in names))

    def __post_init__(self) -> None:
        object.__setattr__(self, "_table", (ints(self.owners), ints(self.numbers)))
        object.__setattr__(self, "_count", max(self.numbers, default=-1) + 1)
        object.__setattr__(self, "_hash", hash((self.owners, self.numbers)))

    def __hash__(self) -> int:
        return self._hash  # type: ignore[attr-defined]

    def __contains__(self, owner: int) -> bool:
        known, _ = self._table  # type: ignore[attr-defined]
        at = int(known.searchsorted(owner))
        return at < len(known) and int(known[at]) == owner

    def on(self, host: int) -> Ints:
        """The owners on a host, rising."""
        known, numbers = self._table  # type: ignore[attr-defined]
        return known[numbers == host]

    def host(self, owners: Ints) -> Ints:
        """The host of each owner."""
        known, numbers = self._table  # type: ignore[attr-defined]
        gapless = len(known) and known[-1] - known[0] + 1 == len(known)  # as most are: looked up without a search
        return numbers[owners - known[0] if gapless else np.searchsorted(known, owners)]

    def matter(self, owners: Ints) -> bool:
        """True if these owners live on several hosts, and two of them on one."""
        return 1 < len(different(self.host(owners))) < len(owners)

    @property
    def count(self) -> int:
        """How many hosts."""
        return self._count  # type: ignore[attr-defined]


def _by_owner(given: object, owners: list[int]) -> Mapping[int, Hashable]:
    if isinstance(given, int | np.integer) and not isinstance(given, bool) and given > 0:
        return {owner: owner // int(given) for owner in owners}
    if isinstance(given, Hosts):
        return dict(zip(given.owners, given.numbers, strict=True))
    known = given.hosts if isinstance(given, Mesh) else given
    if known is None:
        raise PlanError(f"{given!r} knows no hosts: make it with hosts=, a number of owners per host or a list")
    if not isinstance(known, Mapping):
        raise PlanError(f"hosts must be a number of owners per host, or owner -> host, or a mesh, not {given!r}")
    return known
