"""For tests of your own: layouts drawn by hypothesis, sharded numpy arrays, and plans carried out in one process."""

from shardwise.testing.arrays import gather, scatter, simulate

__all__ = ["gather", "scatter", "simulate"]
