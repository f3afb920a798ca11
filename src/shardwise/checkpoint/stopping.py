"""Signals that ask a job to stop, such as the SIGTERM of a scheduler that takes its machines back."""

from __future__ import annotations

import signal
from collections.abc import Callable
from threading import current_thread, main_thread
from types import FrameType
from typing import Any

Handler = Callable[[int, FrameType | None], Any] | int | None


class StopSignals:
    """Remembers that a signal has come. Its handler does nothing else: a save may be running."""

    def __init__(self) -> None:
        self.received: signal.Signals | None = None
        self._before = dict[int, Handler]()

    def watch(self, *numbers: int) -> None:
        """From now on remember these signals."""
        for number in numbers:
            before = signal.signal(number, self._receive)
            self._before.setdefault(number, before)

    def _receive(self, number: int, frame: FrameType | None) -> None:
        self.received = signal.Signals(number)

    def restore(self) -> None:
        """Put the handlers back that were there before; only the main thread may."""
        while self._before and current_thread() is main_thread():
            number, handler = self._before.popitem()
            if signal.getsignal(number) == self._receive:
                signal.signal(number, signal.SIG_DFL if handler is None else handler)
