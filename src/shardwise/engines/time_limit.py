"""A time limit for foreign code that runs in this thread."""

from __future__ import annotations

import ctypes
import threading
from collections.abc import Iterator
from contextlib import contextmanager

from shardwise.errors import EngineError


@contextmanager
def time_limit(seconds: float, reason: str) -> Iterator[None]:
    """Raise an EngineError in this thread if the block takes longer.

    The error is raised between two Python instructions: a call that waits inside C code is not interrupted.
    """
    over, done, lock = False, False, threading.Lock()

    def expire() -> None:
        nonlocal over
        with lock:
            if not done:
                over = True
                _raise_in(thread, _OverError)

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
            _raise_in(thread, None)


def _raise_in(thread: int, error: type[BaseException] | None) -> None:
    """Raise an error in a thread at its next instruction; None takes back an error that is not raised yet."""
    given = None if error is None else ctypes.py_object(error)
    ctypes.pythonapi.PyThreadState_SetAsyncExc(ctypes.c_ulong(thread), given)


class _OverError(BaseException):
    """Ends the code that took too long; a loader's `except Exception` does not catch it."""
