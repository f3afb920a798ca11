"""For tests of your own: layouts drawn by hypothesis, sharded numpy arrays, plans carried out in one process, ranks."""

from shardwise.testing.arrays import gather, scatter, simulate
from shardwise.testing.ranks import RankError, on_ranks

__all__ = ["RankError", "gather", "on_ranks", "scatter", "simulate"]
