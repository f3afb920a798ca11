"""Exchange: runs plans over a transport."""

from shardwise.exchange.agreement import Terms, in_words
from shardwise.exchange.collectives import PeerBuffer, PostedMessages
from shardwise.exchange.exchange import Exchange, Move
from shardwise.exchange.staging import Staging
from shardwise.exchange.transport import Transport
from shardwise.exchange.view_cache import ViewCache

__all__ = ["Exchange", "Move", "PeerBuffer", "PostedMessages", "Staging", "Terms", "ViewCache", "Transport", "in_words"]
