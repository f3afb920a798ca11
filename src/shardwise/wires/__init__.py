"""Wires: what moves bytes between owners."""

from shardwise.wires.group import GroupWire, Way
from shardwise.wires.memory import memory_wires

__all__ = ["GroupWire", "Way", "memory_wires"]
