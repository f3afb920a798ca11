"""A meeting point that outlives publishers and subscribers: it holds small entries, and no weights."""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable

from shardwise.errors import RefusedValueError
from shardwise.publishing.meeting import Address, MeetingPoint
from shardwise.publishing.sealing import Key


def hub(address: Address, key: Key, opened: Callable[[str], None]) -> None:
    """Hold a meeting point until the process is interrupted or ended. `opened` is told where it is."""
    meeting = MeetingPoint(address, key)
    if not meeting.hold():
        raise RefusedValueError(f"a process already listens at {address}: stop it, or give another --port")
    ended = threading.Event()
    signal.signal(signal.SIGTERM, lambda *_: ended.set())
    opened(str(address))
    try:
        while not ended.wait(3600):
            pass
    finally:
        meeting.close()
