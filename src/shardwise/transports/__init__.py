"""Transports: what moves bytes between owners."""

from shardwise.transports.in_memory import in_memory_transports
from shardwise.transports.process_group import GroupTransport, TransportChoice

__all__ = ["GroupTransport", "TransportChoice", "in_memory_transports"]
