"""Bytes of files: those of this machine are mapped, others are fetched in ranges through fsspec."""

from __future__ import annotations

import os
from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch

from shardwise.errors import CheckpointError
from shardwise.quoting import brief, in_line

Bytes = npt.NDArray[np.uint8]
WORDS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64, 16: torch.complex128}
PIECE = 2**22  # bytes of a range that are fetched at a time where they are only passed on


class Span(NamedTuple):
    """Bytes `start` to `stop` of a file."""

    file: str
    start: int
    stop: int


class Descriptor:
    """An open file of the system, which is closed when nobody uses it any more."""

    def __init__(self, number: int, name: str = "a pipe") -> None:
        self.number, self.name = number, name

    def __del__(self) -> None:
        os.close(self.number)


class Files(ABC):
    """The files of a checkpoint, by names relative to `root`, with / between their parts."""

    root: str

    @abstractmethod
    def names(self, *, below: bool = False) -> list[str]:
        """All of them, sorted; with those in directories `below`."""

    @abstractmethod
    def has(self, name: str) -> bool:
        """True for a file that is there."""

    @abstractmethod
    def size(self, name: str) -> int:
        """In bytes; a CheckpointError where there is no such file."""

    @abstractmethod
    def stamp(self, name: str) -> str:
        """Changes when the file does."""

    @abstractmethod
    def fetch(self, spans: Sequence[Span]) -> list[Bytes]:
        """The bytes of each, not to be written."""

    def check_unchanged(  # noqa: B027  # not every place can tell
        self, names: Iterable[str], *, within: float = 0
    ) -> None:
        """Refuse files that were written to after they were first looked at, where that can be seen."""

    def opened(self) -> None:  # noqa: B027
        """Refuse from now on files that changed after this was made, also when they are first looked at."""

    def copy(self, span: Span, file: Any) -> None:
        """Append the bytes to a file that is being written, a little at a time."""
        for start in range(span.start, span.stop, PIECE):
            file.write(self.fetch([Span(span.file, start, min(start + PIECE, span.stop))])[0].data)

    def read(self, name: str, start: int = 0, stop: int | None = None) -> bytes:
        """Some bytes, copied: for headers and the like."""
        return self.fetch([Span(name, start, self.size(name) if stop is None else stop)])[0].tobytes()

    def shown(self, name: str) -> str:
        """The file, as people know it and terminals may show it."""
        return in_line(below(self.root, name))

    def check(self, span: Span) -> None:
        """Refuse bytes that the file does not have."""
        size = self.size(span.file)
        if not 0 <= span.start <= span.stop <= size:
            raise CheckpointError(
                f"{self.shown(span.file)} has {size} bytes, but bytes {span.start} to {span.stop} are needed: "
                f"it is truncated, or belongs to another checkpoint"
            )


def inside(name: Any, where: str) -> str:
    """A file's name that an index gives; refused where it would lead out of the checkpoint."""
    text = name if isinstance(name, str) else ""
    parts = [part for part in text.split("/") if part not in {"", "."}]
    odd = "\\" in text or not text.isprintable()
    if not parts or text.startswith("/") or ".." in parts or odd:
        raise CheckpointError(f"{where} names the file {brief(name)}, which is not inside of the checkpoint")
    return "/".join(parts)


@contextmanager
def readable(what: str) -> Iterator[None]:
    """Errors of the system as CheckpointErrors that name the file."""
    try:
        yield
    except FileNotFoundError as error:
        raise CheckpointError(f"{what} is missing") from error
    except OSError as error:
        raise CheckpointError(f"{what} cannot be read: {error.strerror or error}") from error


def below(folder: str, name: str) -> str:
    """A file of a directory or URL.

    >>> below("a", "b"), below("/", "b"), below("memory://", "b")
    ('a/b', '/b', 'memory://b')
    """
    return f"{folder}{name}" if folder.endswith("/") else f"{folder}/{name}"


def elements(data: Bytes, start: int, dtype: torch.dtype, shape: Sequence[int], strides: Sequence[int]) -> torch.Tensor:
    """Elements that lie in bytes from a byte on, wherever that is; a view, where they can be read so."""
    count = (len(data) - start) // dtype.itemsize
    if dtype.itemsize < 16 or (data.ctypes.data + start) % 16 == 0:
        words = torch.frombuffer(data, dtype=WORDS[dtype.itemsize], count=count, offset=start)
        return words.view(dtype).as_strided(shape, strides)
    # what reads 16 bytes at once takes them to begin at a multiple of that
    halves = torch.frombuffer(data, dtype=torch.int64, count=2 * count, offset=start)
    pairs = halves.as_strided((*shape, 2), (*(2 * stride for stride in strides), 1))
    return pairs.clone(memory_format=torch.contiguous_format).view(dtype).reshape(tuple(shape))
