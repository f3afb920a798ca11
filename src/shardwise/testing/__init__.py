"""For tests of your own: layouts drawn by hypothesis, sharded numpy arrays, plans run in one process, ranks, hosts.

Large worlds in one process are in `shardwise.testing.worlds`, which imports torch.
"""

from shardwise.testing.arrays import gather, scatter, simulate
from shardwise.testing.hosts import Host, HostError, HostProcess, hosts, why_no_hosts
from shardwise.testing.ranks import RankError, on_ranks

__all__ = [
    "Host",
    "HostError",
    "HostProcess",
    "RankError",
    "gather",
    "hosts",
    "on_ranks",
    "scatter",
    "simulate",
    "why_no_hosts",
]
