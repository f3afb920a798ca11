"""A time limit for code of others that runs in this thread."""

from __future__ import annotations

import ctypes
import threading
from collections.abc import Iterator
from contextlib import contextmanager

from shardwise.errors import EngineError


@contextmanager
def time_limit(seconds: float, reason: str) -> Iterator[None]:
    """Raise an EngineError in this thread if the block takes longer.

    The error is raised between two Python instructions: a call that waits inside of C code is not ended.
    """
    over, done, lock = False, False, threading.Lock()

    def expire() -> None:
        nonlocal over
        with lock:
            if not done:
                over = True
                ctypes.pythonapi.PyThreadState_SetAsyncExc(ctypes.c_ulong(thread), ctypes.py_object(_OverError))

    thread, timer = threading.get_ident(), threading.Timer(seconds, expire)
    timer.daemon = True
    timer.start()
    try:
        yield
    except _OverError:
        raise EngineError(reason) from None
    finally:
        with lock:
            done = True
        timer.cancel()
        if over:  # it may not have been raised yet
            ctypes.pythonapi.PyThreadState_SetAsyncExc(ctypes.c_ulong(thread), None)


class _OverError(BaseException):
    """Ends the code that took too long; a loader's `except Exception` does not catch it."""
