"""The messages of a plan and what they add up to: load, balance, staging, time."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from shardwise.geometry import Bools, Ints, ints
from shardwise.plan.copies import Copies


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
    def of(copies: Copies, owners: tuple[int, ...], itemsize: int, hosts: Ints | None) -> Traffic:
        """The messages of these copies."""
        sent, count = copies.take(copies.remote), len(owners)
        stage = np.unique(sent.step * (int(sent.round.max(initial=0)) + 1) + sent.round, return_inverse=True)[1]
        source, target = (np.searchsorted(ints(owners), side) for side in (sent.source, sent.target))
        key, message = np.unique((stage * count + source) * count + target, return_inverse=True)
        size = np.zeros(len(key), dtype=np.int64)
        np.add.at(size, message, sent.volumes * itemsize)
        stage, source, target = key // (count * count), key // count % count, key % count
        inside = np.zeros(len(key), dtype=np.bool_) if hosts is None else hosts[source] == hosts[target]
        return Traffic(owners, stage, source, target, size, inside)

    @property
    def stages(self) -> int:
        """How many rounds in all."""
        return int(self.stage.max(initial=-1)) + 1

    def total(self, side: Ints) -> dict[int, int]:
        """Bytes by owner, for senders or receivers."""
        found = np.zeros(len(self.owners), dtype=np.int64)
        np.add.at(found, side, self.size)
        return dict(zip(self.owners, found.tolist(), strict=True))

    def staged(self) -> Ints:
        """Bytes that each owner (column) sends and receives in each round (row)."""
        found = np.zeros((self.stages, len(self.owners)), dtype=np.int64)
        np.add.at(found, (self.stage, self.source), self.size)
        np.add.at(found, (self.stage, self.target), self.size)
        return found

    def balance(self) -> float:
        """The mean load of an owner over the most of any."""
        load = self.staged().sum(axis=0)
        return float(load.mean() / load.max()) if load.any() else 1.0

    def matrix(self) -> Ints:
        """Bytes from each owner (row) to each (column)."""
        found = np.zeros((len(self.owners), len(self.owners)), dtype=np.int64)
        np.add.at(found, (self.source, self.target), self.size)
        return found

    def estimate(
        self,
        *,
        latency: float = 20e-6,
        bandwidth: float = 10e9,
        host_latency: float = 5e-6,
        host_bandwidth: float = 50e9,
    ) -> float:
        """Seconds: in every round the busiest owner pays for its messages and its bytes, sending and receiving at once.

        `latency` (s) and `bandwidth` (bytes/s, each way) hold between hosts, the other two inside one. Where hosts are
        not known every message counts as one between hosts.
        """
        near = host_latency + self.size / host_bandwidth
        cost = np.where(self.inside, near, latency + self.size / bandwidth)
        busy = np.zeros((2, self.stages, len(self.owners)))
        np.add.at(busy[0], (self.stage, self.source), cost)
        np.add.at(busy[1], (self.stage, self.target), cost)
        return float(busy.max(axis=(0, 2)).sum())
