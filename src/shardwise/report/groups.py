"""Owners in groups: one each where they are few, runs of equal length where they are many."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from shardwise.geometry import Ints, ints


@dataclass(frozen=True, eq=False)
class Groups:
    """Owners, rising, in runs of `length`; the last may be shorter.

    >>> found = Groups.of(range(100), most=64)
    >>> found.count, found.labels()[:2]
    (50, ['0-1', '2-3'])
    """

    owners: Ints
    length: int

    @staticmethod
    def of(owners: object, most: int) -> Groups:
        """At most so many groups."""
        numbers = ints(owners)  # type: ignore[arg-type]
        return Groups(numbers, max(1, -(-len(numbers) // most)))

    @property
    def count(self) -> int:
        """How many groups."""
        return -(-len(self.owners) // self.length)

    @property
    def single(self) -> bool:
        """True where every group is one owner."""
        return self.length == 1

    def sizes(self) -> list[int]:
        """How many owners each has."""
        return np.diff([*range(0, len(self.owners), self.length), len(self.owners)]).tolist()

    def labels(self) -> list[str]:
        """The owner, or the first and the last."""
        ends = [(at, min(at + self.length, len(self.owners)) - 1) for at in range(0, len(self.owners), self.length)]
        return [
            str(self.owners[a]) if a == b else f"{self.owners[a]}{self._joint(a, b)}{self.owners[b]}" for a, b in ends
        ]

    def _joint(self, first: int, last: int) -> str:
        """Some numbers may be missing between two owners."""
        return "-" if self.owners[last] - self.owners[first] == last - first else "…"

    def of_owners(self, owners: Ints) -> Ints:
        """The group of each."""
        return self.owners.searchsorted(owners) // self.length

    def add(self, values: Ints) -> list[int]:
        """Values by owner, added up by group."""
        return np.add.reduceat(values, np.arange(0, len(values), self.length)).tolist() if len(values) else []

    def most(self, values: Ints) -> list[int]:
        """The largest value of each group."""
        return np.maximum.reduceat(values, np.arange(0, len(values), self.length)).tolist() if len(values) else []
