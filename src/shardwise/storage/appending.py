"""Files that are written from start to end, and bytes that the kernel copies from file to file."""

from __future__ import annotations

import errno
import fcntl
import mmap
import os
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from functools import cached_property
from typing import IO, TYPE_CHECKING

from shardwise.errors import CheckpointError
from shardwise.storage.paths import readable, unreadable
from shardwise.storage.sums import BLOCK, Summing

if TYPE_CHECKING:
    from io import FileIO as RawFile

    from typing_extensions import Buffer

OutputFile = IO[bytes]
AT_A_TIME = 2**23  # bytes that are written past the page cache at a time
PIPE = 2**20  # bytes that are copied from file to file at a time
UNSUPPORTED = (errno.EXDEV, errno.EINVAL, errno.ENOSYS, errno.EOPNOTSUPP, errno.EPERM)  # splice does not work here


class Descriptor:
    """An open file descriptor. It is closed when the last reference goes."""

    def __init__(self, number: int, name: object = "a pipe") -> None:
        self.number, self.name = number, name

    @staticmethod
    def of_memory(name: str, data: bytes = b"") -> Descriptor:
        """A file in memory, which other processes can be sent."""
        made = Descriptor(os.memfd_create(name, os.MFD_CLOEXEC), name)
        with open(made.number, "wb", closefd=False) as file:
            file.write(data)
        return made

    def __del__(self, close: Callable[[int], None] = os.close) -> None:  # `os` may be gone when the process ends
        close(self.number)


class AppendOnlyFile:
    """A file that is written from start to end. It takes bytes of other files inside the kernel.

    `summing` makes the checksums of all that is written; then the bytes of other files come through memory.
    """

    def __init__(self, raw: RawFile | OutputFile, summing: Summing | None = None) -> None:
        self._raw, self._summing = raw, summing

    def write(self, data: Buffer) -> int:
        """Write all of it: the system may take less at a time."""
        left = memoryview(data).cast("B")
        size = len(left)
        while len(left):
            left = left[self._write_some(left) :]
        return size

    def write_pages(self, memory: memoryview, size: int) -> None:
        """Write `size` bytes of whole pages of memory past the page cache; through it where that is not supported.

        What was written before must be whole pages.
        """
        done, start = 0, self._raw.tell()
        try:
            with _direct(self._raw.fileno()):
                while done < size:
                    written = os.write(self._raw.fileno(), memory[done : min(done + AT_A_TIME, len(memory))])
                    if self._summing is not None:
                        self._summing.update(memory[done : min(done + written, size)])
                    done += written
                    if done % mmap.PAGESIZE:  # the disk took a part of a page
                        break
        except OSError as error:
            if error.errno not in UNSUPPORTED:
                raise
        if done < size:
            self._raw.seek(start + done)
            self.write(memory[done:size])
        self._raw.truncate(start + size)

    def _write_some(self, data: memoryview) -> int:
        if self._summing is None:
            return self._raw.write(data)
        written = self._raw.write(data[:BLOCK])
        self._summing.update(data[:written])  # while they are in the cache
        return written

    def copy_from(self, source: Descriptor, start: int, count: int) -> None:
        """Append bytes of another file, through a kernel pipe if possible: they never enter the memory of this process.

        That is about a third faster than copy_file_range, unless the disk does the copy.
        """
        copy = self._through_pipe if self._summing is None else self._through_memory
        while count:
            done = copy(source, start, min(count, PIPE))
            if not done:
                raise CheckpointError(f"{source.name} was truncated while it was copied")
            start, count = start + done, count - done

    def _through_pipe(self, source: Descriptor, start: int, count: int) -> int:
        out, into = self._pipe
        try:
            done = os.splice(source.number, into.number, count, offset_src=start)
        except (OSError, AttributeError) as error:
            _check_unsupported(error, source.name)
            return self._through_memory(source, start, count)
        self._drain(out, done)
        return done

    def _through_memory(self, source: Descriptor, start: int, count: int) -> int:
        with readable(source.name):
            data = os.pread(source.number, count, start)
        return self.write(data)

    def _drain(self, out: Descriptor, left: int) -> None:
        while left:
            try:
                left -= os.splice(out.number, self._raw.fileno(), left)
            except (OSError, AttributeError) as error:
                _check_unsupported(error)
                left -= self.write(os.read(out.number, left))

    @cached_property
    def _pipe(self) -> tuple[Descriptor, Descriptor]:
        out, into = os.pipe()
        with suppress(OSError, AttributeError):  # otherwise it has the default size
            fcntl.fcntl(into, fcntl.F_SETPIPE_SZ, PIPE)
        return Descriptor(out), Descriptor(into)


def pages_of(pieces: Iterable[memoryview]) -> Iterator[tuple[memoryview, int]]:
    """Pieces one after the other, copied to whole pages, a few at a time; and how many bytes of these count."""
    room, at = memoryview(mmap.mmap(-1, AT_A_TIME)), 0
    for piece in pieces:
        done = 0
        while done < len(piece):
            count = min(len(piece) - done, AT_A_TIME - at)
            room[at : at + count] = piece[done : done + count]
            done, at = done + count, at + count
            if at == AT_A_TIME:
                yield room, at
                at = 0
    if at:
        yield room, at


@contextmanager
def _direct(file: int) -> Iterator[None]:
    """Writes to the file go past the page cache. OSError if the file system cannot do that."""
    flags = fcntl.fcntl(file, fcntl.F_GETFL)
    fcntl.fcntl(file, fcntl.F_SETFL, flags | getattr(os, "O_DIRECT", 0))
    try:
        yield
    finally:
        fcntl.fcntl(file, fcntl.F_SETFL, flags)


def _check_unsupported(error: OSError | AttributeError, source: object = None) -> None:
    """Return if the system does not support splice for these files: then the bytes are copied by this process."""
    if isinstance(error, OSError) and error.errno not in UNSUPPORTED:
        raise error if source is None else unreadable(source, error) from error
