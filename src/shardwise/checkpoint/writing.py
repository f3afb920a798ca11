"""Files that appear whole or not at all: written aside, flushed to the disk, renamed.

What is aside has a random name that nobody can foresee, and is made anew: links and pipes are never written to.
"""

from __future__ import annotations

import errno
import fcntl
import os
import re
import stat
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from functools import cached_property
from hashlib import blake2b
from pathlib import Path
from secrets import token_hex
from typing import IO, Any

import torch

from shardwise.checkpoint.files import Descriptor, below, readable
from shardwise.checkpoint.locking import FLAGS
from shardwise.checkpoint.places import place_of
from shardwise.errors import CheckpointError
from shardwise.exchange.buffers import bytes_at

CHUNK = 2**23  # bytes that are packed at a time where they do not lie one after the other
PIPE = 2**20  # bytes that are copied from file to file at a time
ELSEWHERE = (errno.EXDEV, errno.EINVAL, errno.ENOSYS, errno.EOPNOTSUPP, errno.EPERM)  # then it has to be done here
ASIDE = re.compile(r"\..+\.([0-9a-f]{16})\.part", re.DOTALL)  # of a write that is under way, or was interrupted
LONGEST = 200  # bytes of a file's name that are part of the one aside: systems allow 255


def hidden(name: str, ending: str) -> str:
    """The name of a file that belongs to another one, beside it.

    >>> hidden("m.safetensors", "0123456789abcdef.part")
    '.m.safetensors.0123456789abcdef.part'
    """
    known = name if len(os.fsencode(name)) <= LONGEST else blake2b(os.fsencode(name), digest_size=16).hexdigest()
    return f".{known}.{ending}"


class Folder:
    """A directory that is written to, here or where fsspec reaches. `run` tells what one writer has aside."""

    def __init__(self, path: Any, *, durable: bool = True, run: str | None = None) -> None:
        (self._system, self._place), self._durable = place_of(path), durable
        self.path = self._place if self._system is None else self._system.unstrip_protocol(self._place)
        self.run = run or token_hex(8)
        self.reused = list[str]()  # files of an earlier try that were whole

    @property
    def local(self) -> Path | None:
        """Where it is on this machine."""
        return Path(self._place) if self._system is None else None

    def shown(self, name: str) -> str:
        """A file, as people know it."""
        return below(self.path, name)

    def _at(self, name: str) -> str:
        """A file, as the system knows it."""
        return below(self._place, name)

    def make(self) -> list[Path]:
        """The directory, and those above it; returns the new ones, the innermost first."""
        here = Path(self._place)
        with writable(self.path):
            made = [folder for folder in (here, *here.parents) if not folder.exists()]
            here.mkdir(parents=True, exist_ok=True)
            for folder in made:
                self._sync(folder.parent)
        return made

    @contextmanager
    def write(self, name: str) -> Iterator[IO[bytes]]:
        """A file of that name, once all is written; before that, and after any error, what was there before."""
        target = self.shown(name)
        if self._system is not None:  # of its own, since its transaction has all files that it opens
            own = type(self._system)(**self._system.storage_options, skip_instance_cache=True)
            with writable(target), own.transaction, own.open(self._at(name), "wb") as file:
                yield file
            return
        self.make()
        aside = Path(self._place, hidden(name, f"{self.run}.part"))
        with writable(target):
            number = os.open(aside, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, 0o666)
        try:
            with writable(target):
                with open(number, "wb", buffering=0) as raw:
                    yield Appended(raw)  # type: ignore[misc]
                    if self._durable:
                        os.fsync(raw.fileno())
                os.replace(aside, target)
        except BaseException:
            with suppress(OSError):
                aside.unlink()
            raise
        try:
            self._sync(aside.parent)
        except OSError as error:
            raise CheckpointError(
                f"{aside.parent} was written, but the disk may lose it: {error.strerror or error}"
            ) from error

    def _sync(self, folder: Path) -> None:
        """The names in a directory reach the disk, too."""
        if not self._durable:
            return
        at = os.open(folder, os.O_RDONLY)
        try:
            os.fsync(at)
        finally:
            os.close(at)

    def has(self, name: str, start: bytes, size: int) -> bool:
        """True for a file that begins so and has that size: it was written before, and files appear only when whole."""
        if self._system is not None:
            self._system.invalidate_cache(self._place)
            known = self._system.exists(self._at(name)) and self._system.size(self._at(name)) == size
            return bool(known) and self._system.cat_file(self._at(name), 0, len(start)) == start
        with readable(self.path), self._plain(name) as file:
            return file is not None and os.fstat(file).st_size == size and os.pread(file, len(start), 0) == start

    @contextmanager
    def _plain(self, name: str) -> Iterator[int | None]:
        """A file that only its own name leads to, open; None for links, pipes and all else, and for none at all."""
        try:
            file = os.open(Path(self._place, name), os.O_RDONLY | FLAGS)
        except OSError:
            yield None
            return
        try:
            status = os.fstat(file)
            yield file if stat.S_ISREG(status.st_mode) and status.st_nlink == 1 else None
        finally:
            os.close(file)

    def read(self, name: str, most: int | None = None) -> bytes:
        """A small file, or the start of one."""
        with readable(self.shown(name)):
            if self._system is not None:
                return bytes(self._system.cat_file(self._at(name), 0, most))
            with Path(self.shown(name)).open("rb") as file:
                return file.read(-1 if most is None else most)

    def tail(self, name: str, count: int) -> bytes:
        """The last bytes of a file; none where there is no such file."""
        with readable(self.shown(name)), suppress(FileNotFoundError, NotADirectoryError):
            if self._system is not None:
                return bytes(self._system.cat_file(self._at(name), start=-count))
            with self._plain(name) as file:
                size = 0 if file is None else os.fstat(file).st_size
                return b"" if file is None else os.pread(file, min(count, size), max(0, size - count))
        return b""

    def names(self) -> list[str]:
        """The files in it."""
        with readable(self.path), suppress(FileNotFoundError, NotADirectoryError):  # which writing will tell
            if self._system is None:
                return sorted(entry.name for entry in os.scandir(self.path) if entry.is_file())
            self._system.invalidate_cache(self._place)  # others write, too
            return sorted(str(path).rpartition("/")[2] for path in self._system.ls(self._place, detail=False))
        return []

    def lost(self, files: Iterable[str]) -> list[str]:
        """Those of some files that are known not to be there."""
        with suppress(CheckpointError):
            return sorted(set(files) - set(self.names()))
        return []

    def remove(self, name: str) -> None:
        """A file that is not needed any more, if it is there."""
        with suppress(OSError):
            if self._system is None:
                os.unlink(self.shown(name))
            else:
                self._system.rm_file(self._at(name))

    def discard(self, name: str, owner: int) -> None:
        """A plain file of that user, if it is there."""
        with suppress(OSError):
            status = os.lstat(self.shown(name))
            if stat.S_ISREG(status.st_mode) and status.st_uid == owner:
                os.unlink(self.shown(name))


class Appended:
    """A file that is written from its start to its end."""

    def __init__(self, raw: Any) -> None:
        self._raw = raw

    def write(self, data: Any) -> int:
        """All of it: the system may take less at a time."""
        left = memoryview(data).cast("B")
        size = len(left)
        while len(left):
            left = left[self._raw.write(left) :]
        return size

    def take(self, source: Descriptor, start: int, count: int) -> None:
        """Bytes of another file, by the system alone where it can: through a pipe, they are never in our memory.

        That is about a third faster than copy_file_range, where neither is done by the disk itself.
        """
        while count:
            out, into = self._pipe
            with readable(source.name), _elsewhere() as here:
                done = os.splice(source.number, into.number, min(count, PIPE), offset_src=start)
            if here:
                with readable(source.name):
                    done = self.write(os.pread(source.number, min(count, PIPE), start))
            else:
                self._drain(out, done)
            if not done:
                raise CheckpointError(f"{source.name} became shorter while it was copied")
            start, count = start + done, count - done

    def _drain(self, out: Descriptor, left: int) -> None:
        while left:
            with _elsewhere() as here:
                left -= os.splice(out.number, self._raw.fileno(), left)
            if here:
                left -= self.write(os.read(out.number, left))

    @cached_property
    def _pipe(self) -> tuple[Descriptor, Descriptor]:
        out, into = os.pipe()
        with suppress(OSError, AttributeError):  # it is as large as the system allows
            fcntl.fcntl(into, fcntl.F_SETPIPE_SZ, PIPE)
        return Descriptor(out), Descriptor(into)


@contextmanager
def _elsewhere() -> Iterator[list[Exception]]:
    """Says why something has to be done here: not every system does it, for all its files."""
    why = list[Exception]()
    try:
        yield why
    except (OSError, AttributeError) as error:
        if isinstance(error, OSError) and error.errno not in ELSEWHERE:
            raise
        why.append(error)


@contextmanager
def writable(what: str) -> Iterator[None]:
    """Errors of the system as CheckpointErrors that name the file."""
    try:
        yield
    except OSError as error:
        raise CheckpointError(f"{what} cannot be written: {error.strerror or error}") from error


def write_tensor(tensor: torch.Tensor, file: IO[bytes]) -> None:
    """The elements of a tensor, row-major; packed a little at a time where they lie otherwise, or on another device."""
    if tensor.numel() == 0:
        return
    size = tensor.numel() * tensor.element_size()
    if (tensor.is_contiguous() and tensor.device.type == "cpu") or size <= CHUNK:
        flat = tensor.detach().cpu().contiguous()
        file.write(bytes_at(flat.data_ptr(), size).data)
        return
    rows = max(1, CHUNK * tensor.shape[0] // size)
    for part in torch.split(tensor, rows):
        write_tensor(part if rows > 1 else part[0], file)
