"""Exchange: runs plans over a transport."""

from shardwise.exchange.agreement import Terms, in_words
from shardwise.exchange.buffers import Staging, ViewCache
from shardwise.exchange.exchange import Exchange, Move
from shardwise.exchange.transport import PeerBuffer, Swap, Transport

__all__ = ["Exchange", "PeerBuffer", "Move", "Staging", "Swap", "Terms", "ViewCache", "Transport", "in_words"]
