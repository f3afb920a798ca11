"""Where owners live: a number for the host of every owner. Hosts matter only in that they are the same or not."""

from __future__ import annotations

from collections.abc import Hashable, Mapping
from dataclasses import dataclass

import numpy as np

from shardwise.errors import PlanError
from shardwise.geometry import Ints, ints
from shardwise.layout import Mesh


@dataclass(frozen=True)
class Hosts:
    """Owner `owners[i]` (rising) lives on host number `numbers[i]`; hosts are numbered as they first appear."""

    owners: tuple[int, ...]
    numbers: tuple[int, ...]

    @staticmethod
    def of(given: int | Mapping[int, Hashable] | Mesh, owners: Ints) -> Hosts:
        """From a number of owners per host, from owner -> host, or from a mesh that knows.

        >>> Hosts.of({4: "a", 7: "b", 9: "a"}, ints([4, 7, 9])).numbers
        (0, 1, 0)
        """
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
        object.__setattr__(self, "_hash", hash((self.owners, self.numbers)))

    def __hash__(self) -> int:
        return self._hash  # type: ignore[attr-defined]

    def host(self, owners: Ints) -> Ints:
        """The host of each owner."""
        known, numbers = self._table  # type: ignore[attr-defined]
        return numbers[np.searchsorted(known, owners)]

    @property
    def count(self) -> int:
        """How many hosts."""
        return max(self.numbers, default=-1) + 1


def _by_owner(given: object, owners: list[int]) -> Mapping[int, Hashable]:
    if isinstance(given, int | np.integer) and not isinstance(given, bool) and given > 0:
        return {owner: owner // int(given) for owner in owners}
    known = given.hosts if isinstance(given, Mesh) else given
    if known is None:
        raise PlanError(f"{given!r} knows no hosts: make it with hosts=, a number of owners per host or a list")
    if not isinstance(known, Mapping):
        raise PlanError(f"hosts must be a number of owners per host, or owner -> host, or a mesh, not {given!r}")
    return known
