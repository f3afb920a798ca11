"""How much memory this process has, and how far it rises while something runs."""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from pathlib import Path
from threading import Event, Thread
from typing import Any

_libc = ctypes.CDLL(None)


def resident(*fields: str) -> int:
    """Lines of this process's status, such as RssAnon, in bytes."""
    lines = (line.split() for line in Path("/proc/self/status").read_text().splitlines())
    return 1024 * sum(int(words[1]) for words in lines if words[0].rstrip(":") in fields)


def rise(work: Callable[[], Any], *fields: str) -> int:
    """How far they rise above where they were, looked at every millisecond."""
    _libc.malloc_trim(0)  # what was freed before is not to be had for nothing
    before, most, done = resident(*fields), 0, Event()

    def watch() -> None:
        nonlocal most
        while not done.wait(0.001):
            most = max(most, resident(*fields))

    thread = Thread(target=watch)
    thread.start()
    try:
        kept = work()
        most = max(most, resident(*fields))
        del kept
    finally:
        done.set()
        thread.join()
    return max(0, most - before)
