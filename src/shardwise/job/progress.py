"""Progress of a long move: reported to a function, or shown as a bar."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from threading import Lock
from typing import TYPE_CHECKING, Literal

if TYPE_CHECKING:
    from rich.progress import Progress as Bar

MIB = 2**20
Progress = Callable[[int, int], None] | Literal["bar"] | None


@contextmanager
def reporter(progress: Progress, total: int, what: str, *, here: bool) -> Iterator[Callable[[int, int], None] | None]:
    """A function of (bytes done, bytes in total), called once more at the end. The bar is shown `here` only."""
    if callable(progress):
        yield progress
        progress(total, total)
    elif progress is None or not here:
        yield None
    else:
        with _bar() as bar:
            task, start = bar.add_task(what, total=total, told=""), time.monotonic()

            def show(done: int, total: int) -> None:
                bar.update(task, completed=done, told=in_numbers(done, total, time.monotonic() - start))

            yield show
            show(total, total)


class Count:
    """The bytes that all threads have done so far."""

    def __init__(self, tell: Callable[[int, int], None] | None, total: int) -> None:
        self._tell, self._total, self._done, self._lock = tell, total, 0, Lock()

    def add(self, size: int) -> None:
        """Count these bytes."""
        if self._tell is not None:
            with self._lock:
                self._done += size
                self._tell(self._done, self._total)


def check_progress(progress: object) -> None:
    """Refuse an invalid progress= option."""
    if progress is not None and progress != "bar" and not callable(progress):
        raise ValueError(f"progress= must be a function of (done, total), 'bar' or None, not {progress!r}")


def _bar() -> Bar:
    """On stderr, where a person looks at it."""
    from rich.console import Console
    from rich.progress import BarColumn, TextColumn
    from rich.progress import Progress as Bar

    console = Console(stderr=True)
    columns = TextColumn("{task.description}"), BarColumn(), TextColumn("{task.fields[told]}")
    return Bar(*columns, console=console, disable=not console.is_terminal)


def in_numbers(done: int, total: int, seconds: float) -> str:
    """How much is done, how fast, and how long the rest takes.

    >>> in_numbers(3 << 20, 12 << 20, 1.5)
    '3.0 of 12.0 MiB  2.0 MiB/s  4 s left'
    """
    rate = done / seconds if seconds > 0 else 0.0
    left = f"  {rate / MIB:.1f} MiB/s  {(total - done) / rate:.0f} s left" if rate else ""
    return f"{done / MIB:.1f} of {total / MIB:.1f} MiB{left}"
