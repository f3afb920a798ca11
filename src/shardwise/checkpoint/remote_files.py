"""Files that fsspec reaches, fetched in ranges."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

from shardwise.checkpoint.files import Bytes, Files, Span, readable
from shardwise.errors import CheckpointError

SMALL, GAP = 2**12, 2**18  # bytes between two ranges that are fetched along with them, where another request costs more


class RemoteFiles(Files):
    """Files that fsspec reaches: s3://, gs://, memory://, and whatever has a driver."""

    def __init__(self, system: Any, path: str, root: str) -> None:
        self._system, self._path, self.root = system, path.rstrip("/"), root
        self._sizes = dict[str, int]()

    def names(self, *, below: bool = False) -> list[str]:
        """As the driver lists them."""
        with readable(self.root):
            found = self._system.find(self._path, maxdepth=None if below else 1)
        return sorted(str(path)[len(self._path) :].lstrip("/") for path in found)

    def _at(self, name: str) -> str:
        """The file, as the driver knows it."""
        return f"{self._path}/{name}"

    def has(self, name: str) -> bool:
        """As the driver says."""
        with readable(self.shown(name)):
            return bool(self._system.isfile(self._at(name)))

    def size(self, name: str) -> int:
        """Asked for once."""
        if name not in self._sizes:
            with readable(self.shown(name)):
                self._sizes[name] = int(self._system.size(self._at(name)))
        return self._sizes[name]

    def stamp(self, name: str) -> str:
        """What the driver calls the state of the file."""
        with readable(self.shown(name)):
            return str(self._system.checksum(self._at(name)))

    def fetch(self, spans: Sequence[Span]) -> list[Bytes]:
        """Near ones together, all of them at once where the driver can."""
        for span in spans:
            self.check(span)
        joined, whole = list(_joined(spans)), list[Bytes]()
        paths, starts, stops = [self._at(s.file) for s in joined], [s.start for s in joined], [s.stop for s in joined]
        with readable(self.root):
            found = self._system.cat_ranges(paths, starts, stops, on_error="raise") if joined else []
        for span, text in zip(joined, found, strict=True):
            if len(text) != span.stop - span.start:
                raise CheckpointError(f"{self.shown(span.file)}: {len(text)} bytes came where {span} was asked for")
            whole.append(np.frombuffer(bytearray(text), dtype=np.uint8))  # torch warns of what cannot be written
        return [_part(joined, whole, span) for span in spans]


def _joined(spans: Sequence[Span]) -> Iterator[Span]:
    """As few as there can be without fetching much that nobody asked for."""
    before: Span | None = None
    for span in sorted(span for span in spans if span.stop > span.start):
        if (
            before is not None
            and span.file == before.file
            and worth_it(span.start - before.stop, span.stop - span.start)
        ):
            before = before._replace(stop=max(before.stop, span.stop))
        else:
            if before is not None:
                yield before
            before = span
    if before is not None:
        yield before


def worth_it(gap: int, size: int) -> bool:
    """True where bytes that nobody asked for are fetched along, to have the next range with the one before.

    They are few, or no more than what is asked for: no more than twice as much is fetched.
    """
    return gap <= SMALL or gap <= min(size, GAP)


def _part(joined: Sequence[Span], whole: Sequence[Bytes], span: Span) -> Bytes:
    if span.stop == span.start:
        return np.empty(0, np.uint8)
    at = bisect_right(joined, (span.file, span.start, float("inf"))) - 1
    return whole[at][span.start - joined[at].start : span.stop - joined[at].start]
