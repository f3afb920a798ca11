"""Exchange: runs plans over a wire."""

from shardwise.exchange.agreement import Terms, in_words
from shardwise.exchange.run import Exchange, Move
from shardwise.exchange.staging import Staging
from shardwise.exchange.views import Views
from shardwise.exchange.wire import Message, Swap, Wire

__all__ = ["Exchange", "Message", "Move", "Staging", "Swap", "Terms", "Views", "Wire", "in_words"]
