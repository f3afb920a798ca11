"""A thread that handles the messages of one mailbox, one after the other."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from contextlib import suppress
from typing import Any

from shardwise.publishing.meeting import MeetingLostError, MeetingPoint
from shardwise.publishing.presence import BEAT

log = logging.getLogger("shardwise")
STOP = {"kind": "stop"}  # ends the wait for a message; handlers never see it


class MailboxThread:
    """Hands every message to `handle`. An error there is logged: the next message may be fine."""

    def __init__(self, meeting: MeetingPoint, mailbox: str, handle: Callable[[Any], None], name: str) -> None:
        self._meeting, self._mailbox, self._handle = meeting, mailbox, handle
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    def _run(self) -> None:
        while not self._stopped.is_set():
            try:
                message = self._meeting.take_or_wait(self._mailbox)
                if message is not None and message != STOP:
                    self._handle(message)
            except MeetingLostError:
                self._stopped.wait(BEAT)  # it may come back
            except Exception:
                log.exception("shardwise: a message could not be handled")

    def stop(self) -> None:
        """Handle no more messages."""
        self._stopped.set()
        with suppress(MeetingLostError):
            self._meeting.post(self._mailbox, STOP)
        if self._thread is not threading.current_thread():
            self._thread.join(timeout=2 * BEAT)
