"""Exchange: runs plans over a transport."""

from shardwise.exchange.agreement import Proposal, in_words
from shardwise.exchange.buffers import Staging, ViewCache
from shardwise.exchange.exchange import Exchange
from shardwise.exchange.messages import view_of
from shardwise.exchange.moves import Delta, Move
from shardwise.exchange.transport import PeerBuffer, PostedMessages, Transport

__all__ = [
    "Delta",
    "Exchange",
    "Move",
    "PeerBuffer",
    "PostedMessages",
    "Staging",
    "Proposal",
    "ViewCache",
    "Transport",
    "in_words",
    "view_of",
]
