"""Progress of a long move: reported to a function, or shown as a bar."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from threading import Lock
from typing import TYPE_CHECKING, Literal

if TYPE_CHECKING:
    from rich.progress import Progress as Bar

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
            task = bar.add_task(what, total=total)
            yield lambda done, _: bar.update(task, completed=done)
            bar.update(task, completed=total)


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
    from rich.progress import BarColumn, DownloadColumn, TimeRemainingColumn, TransferSpeedColumn
    from rich.progress import Progress as Bar

    return Bar(
        "{task.description}",
        BarColumn(),
        DownloadColumn(binary_units=True),
        TransferSpeedColumn(),
        TimeRemainingColumn(),
    )
