"""The messages of a plan and what they add up to: load, balance, staging, time."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from shardwise.geometry import Bools, Ints, ints, totals
from shardwise.planning.copies import Copies


@dataclass(frozen=True, eq=False)
class Traffic:
    """One entry per packed message: its stage (a round of a step), sender, receiver (numbers in `owners`), bytes."""

    owners: tuple[int, ...]
    stage: Ints
    source: Ints
    target: Ints
    size: Ints
    inside: Bools  # sender and receiver are on one host

    @staticmethod
    def of(copies: Copies, owners: tuple[int, ...], sizes: Ints, hosts: Ints | None) -> Traffic:
        """The messages of these copies, which have so many bytes."""
        sent, count = copies.take(copies.remote), len(owners)
        turn = sent.step * (int(sent.round.max(initial=0)) + 1) + sent.round
        used = np.bincount(turn) > 0
        stage = (np.cumsum(used) - 1)[turn]
        source, target = (np.searchsorted(ints(owners), side) for side in (sent.source, sent.target))
        key, size = _sums((stage * count + source) * count + target, sizes[copies.remote])
        stage, source, target = key // (count * count), key // count % count, key % count
        inside = np.zeros(len(key), dtype=np.bool_) if hosts is None else hosts[source] == hosts[target]
        return Traffic(owners, stage, source, target, size, inside)

    @property
    def stages(self) -> int:
        """How many rounds in all."""
        return int(self.stage.max(initial=-1)) + 1

    def total(self, side: Ints) -> dict[int, int]:
        """Bytes by owner, for senders or receivers."""
        return dict(zip(self.owners, totals(self.size, side, len(self.owners)).tolist(), strict=True))

    def peaks(self) -> Ints:
        """The most bytes that each owner sends and receives in one round."""
        both = np.concatenate([self.source, self.target])
        key, size = _sums(np.tile(self.stage, 2) * len(self.owners) + both, np.tile(self.size, 2))
        most = np.zeros(len(self.owners), dtype=np.int64)
        np.maximum.at(most, key % len(self.owners), size)
        return most

    def peak(self) -> int:
        """The most bytes that any owner sends and receives in one round."""
        return int(self.peaks().max(initial=0))

    def balance(self) -> float:
        """The mean load of an owner over the most of any."""
        load = _sums(np.concatenate([self.source, self.target]), np.tile(self.size, 2))[1]
        return float(load.sum() / len(self.owners) / load.max()) if load.any() else 1.0

    def flows(self) -> tuple[Ints, Ints, Ints]:
        """Sender, receiver (numbers in `owners`) and bytes of every pair that talks."""
        key, size = _sums(self.source * len(self.owners) + self.target, self.size)
        return *np.divmod(key, len(self.owners)), size

    def matrix(self) -> Ints:
        """Bytes from each owner (row) to each (column)."""
        table = np.zeros((len(self.owners), len(self.owners)), dtype=np.int64)
        np.add.at(table, (self.source, self.target), self.size)
        return table

    def estimate(self, **model: float) -> float:
        """Seconds of all rounds, one after the other."""
        return float(self.seconds(**model).sum())

    def seconds(
        self,
        *,
        latency: float = 20e-6,
        bandwidth: float = 10e9,
        host_latency: float = 5e-6,
        host_bandwidth: float = 50e9,
    ) -> npt.NDArray[np.float64]:
        """Of every round: the busiest owner pays for its messages and its bytes, sending and receiving at once.

        `latency` (s) and `bandwidth` (bytes/s, each way) hold between hosts, the other two inside one. Where hosts are
        not known every message counts as one between hosts.
        """
        near = host_latency + self.size / host_bandwidth
        cost = np.where(self.inside, near, latency + self.size / bandwidth)
        busiest = np.zeros(self.stages)
        for side in self.source, self.target:
            key, seconds = _sums(self.stage * len(self.owners) + side, cost)
            np.maximum.at(busiest, key // len(self.owners), seconds)
        return busiest


def _sums(key: Ints, values: npt.NDArray[Any]) -> tuple[Ints, npt.NDArray[Any]]:
    """The different keys, rising, and the sum of the values of each."""
    top = int(key.max(initial=-1)) + 1
    if top <= 4 * len(key):  # keys that lie close are counted, which takes less than sorting
        known = np.zeros(top, dtype=np.bool_)
        known[key] = True
        return np.flatnonzero(known), totals(values, key, top)[known]
    keys, place = np.unique(key, return_inverse=True)
    return keys, totals(values, place, len(keys))
