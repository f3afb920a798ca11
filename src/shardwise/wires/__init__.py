"""Wires: what moves bytes between owners."""

from shardwise.wires.group import GroupWire
from shardwise.wires.memory import memory_wires

__all__ = ["GroupWire", "memory_wires"]
