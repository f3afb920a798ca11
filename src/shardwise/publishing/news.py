"""Calls a function of the user when there is a new version."""

from __future__ import annotations

import logging
from collections.abc import Callable

from shardwise.publishing.client import Client
from shardwise.publishing.presence import EverySecond

log = logging.getLogger("shardwise")


class NewVersions(EverySecond):
    """Calls `on_commit` with the number of each new version, once, in a thread of its own that looks once a second."""

    def __init__(self, client: Client, on_commit: Callable[[int], object]) -> None:
        self._client, self._on_commit = client, on_commit
        self._told = "", -1  # the publisher and the number of the last call
        # not at once: the function may use a variable that the caller of `subscribe` has not assigned yet
        super().__init__(self._look, "shardwise on_commit", at_once=False)

    def _look(self) -> None:
        newest = self._client.newest()
        if newest is None:
            return
        publisher, (_, number) = newest
        if publisher == self._told[0] and number <= self._told[1]:
            return
        self._told = publisher, number
        try:
            self._on_commit(number)
        except Exception:
            log.exception("shardwise: on_commit failed for version %s. It is called again for the next one", number)
