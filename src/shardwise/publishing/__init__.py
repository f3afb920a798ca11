"""Weights between jobs that were started separately: published versions, which subscribers pull."""

from shardwise.publishing.publisher import Publisher, publish
from shardwise.publishing.subscriber import Subscriber, subscribe

__all__ = ["Publisher", "Subscriber", "publish", "subscribe"]
