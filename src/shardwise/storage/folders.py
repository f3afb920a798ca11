"""Files that appear complete or not at all.

A file is written under a random hidden name, flushed to the disk, then renamed. It is always created anew: links and
pipes are never written to.

The checksums of a file lie beside it (`sums.py`), and never beside other data:
- A new name: the checksums get their name first, then the data. So data is never without them, and if the writer dies
  in between, they lie alone and are written over by the next one. Both are flushed to the disk at the same time.
- A name that is there already: its checksums are removed, then the data is replaced, then the new checksums get their
  name. If the writer dies in between, there is whole data, old or new, without checksums.
"""

from __future__ import annotations

import os
import re
import stat
from collections.abc import Callable, Collection, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext, suppress
from functools import partial
from hashlib import blake2b
from pathlib import Path
from secrets import token_hex
from typing import TYPE_CHECKING, cast

from shardwise.errors import CheckpointError
from shardwise.storage.appending import AppendOnlyFile, OutputFile, pages_of
from shardwise.storage.paths import PathLike, beside, file_system, join_path, readable
from shardwise.storage.sums import BLOCK, BlockSums, Parts, Summing, data_name, sums_name

if TYPE_CHECKING:
    from io import FileIO as RawFile

Flushed = Callable[[], object]  # waits until a file is on the disk
FLAGS = os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC  # links are not followed, pipes do not block
LONGEST_NAME = 200  # bytes of a name that become part of a sidecar's name: systems allow 255
# indexes of all formats, and the files of ours that they list
INDEXES = ("shardwise.json", ".metadata", "model.safetensors.index.json", "pytorch_model.bin.index.json")
NAMES = r"(?:shard-[0-9]+-of-[0-9]+-([0-9a-f]{16})\.safetensors|__[0-9]+_([0-9a-f]{16})\.distcp)"
OURS, OURS_IN_BYTES = re.compile(NAMES), re.compile(NAMES.encode())


def sidecar_name(name: str, ending: str) -> str:
    """The name of a hidden file that belongs to another one in the same directory.

    >>> sidecar_name("m.safetensors", "0123456789abcdef.part")
    '.m.safetensors.0123456789abcdef.part'
    """
    stem = name if len(os.fsencode(name)) <= LONGEST_NAME else blake2b(os.fsencode(name), digest_size=16).hexdigest()
    return f".{stem}.{ending}"


ASIDE = {index: sidecar_name(index, "removed") for index in INDEXES[:2]}  # indexes of steps that are being removed


class OutputFolder:
    """A directory that is written to, local or through fsspec. `run` marks the partial files of one writer.

    `sums`: keep checksums beside its files.
    """

    def __init__(self, path: PathLike, *, durable: bool = True, run: str | None = None, sums: bool = True) -> None:
        (self._system, self._place), self.durable, self.sums = file_system(path), durable, sums
        self.path = self._place if self._system is None else self._system.unstrip_protocol(self._place)
        self.run = run or token_hex(8)
        self.reused = list[str]()  # complete files of an earlier try

    @property
    def local(self) -> Path | None:
        """The local path; None if it is remote."""
        return Path(self._place) if self._system is None else None

    def path_of(self, name: str) -> str:
        """The path or URL of a file."""
        return join_path(self.path, name)

    def beside(self, name: str) -> OutputFolder:
        """Another directory in the same parent."""
        return OutputFolder(beside(self.path, name))

    def _at(self, name: str) -> str:
        """The path that the driver knows."""
        return join_path(self._place, name)

    def make(self) -> list[Path]:
        """Create the directory and its parents; returns the new ones, innermost first."""
        folder = Path(self._place)
        with writable(self.path):
            made = [one for one in (folder, *folder.parents) if not one.exists()]
            folder.mkdir(parents=True, exist_ok=True)
            for one in made:
                self._sync(one.parent)
        return made

    def sync_parents(self) -> None:
        """Flush the names of the directories that it lies in: others have made them, and did not wait for the disk."""
        if self._system is not None:
            return
        for parent in Path(self._place).absolute().parents:
            with suppress(OSError):  # we may not look into all of them
                self._sync(parent)

    @contextmanager
    def write(self, name: str, *, sums: bool = True, parts: Parts | None = None) -> Iterator[OutputFile]:
        """Write a file. It gets its name when it is complete; until then, and after an error, the old one stays.

        Its checksums come beside it, with `parts`; without them (`sums`), those of an earlier file are removed.
        """
        summing = Summing(parts) if sums and self.sums else None
        with self._write(name, summing, partial(self._naming, name, summing)) as file:
            yield file

    @contextmanager
    def _write(
        self, name: str, summing: Summing | None, naming: Callable[[Flushed], AbstractContextManager[None]]
    ) -> Iterator[OutputFile]:
        """Write a file that gets its name inside `naming`."""
        target = self.path_of(name)
        if self._system is not None:  # a driver of its own: its transaction has all files that it opens
            own = type(self._system)(**self._system.storage_options, skip_instance_cache=True)
            with writable(target), ExitStack() as named, own.transaction:
                with own.open(self._at(name), "wb") as file:
                    yield file if summing is None else cast("OutputFile", AppendOnlyFile(file, summing))
                named.enter_context(naming(_nothing))
            return
        self.make()
        unnamed = Path(self._place, sidecar_name(name, f"{self.run}.part"))
        with writable(target):
            number = os.open(unnamed, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, 0o666)
        try:
            with writable(target), open(number, "wb", buffering=0) as raw:
                yield cast("OutputFile", AppendOnlyFile(raw, summing))
                with self._flushing(raw) as flushed, naming(flushed):
                    flushed()
                    os.replace(unnamed, target)
        except BaseException:
            with suppress(OSError):
                unnamed.unlink()
            raise

    @contextmanager
    def _flushing(self, file: RawFile) -> Iterator[Flushed]:
        """Flush a file to the disk in another thread: one commit of the file system may do for its checksums, too."""
        if not self.durable:
            yield _nothing
            return
        with ThreadPoolExecutor(1) as pool:
            try:
                flushed: Flushed = pool.submit(os.fsync, file.fileno()).result
            except RuntimeError:  # the interpreter shuts down: there are no new threads
                flushed = partial(os.fsync, file.fileno())
            yield flushed

    @contextmanager
    def _naming(self, name: str, summing: Summing | None, flushed: Flushed) -> Iterator[None]:
        """The data gets its name inside, and its checksums before or after: see the top of this file."""
        sums, replaced = None if summing is None else summing.finish(), self.exists(name)
        if sums is not None and not replaced:
            self._write_sums(name, sums)
        elif self.exists(sums_name(name)):
            flushed()  # or those of the earlier data stay
            self._unlink(sums_name(name))
            self._sync_names()
        yield
        self._sync_names()
        if sums is not None and replaced:
            self._write_sums(name, sums)
            self._sync_names()

    def _write_sums(self, name: str, sums: BlockSums) -> None:
        with self._write(sums_name(name), None, lambda _: nullcontext()) as file:
            file.write(sums.to_json())

    def _sync_names(self) -> None:
        """Flush the names of its files to the disk."""
        if self._system is not None:
            return
        try:
            self._sync(Path(self._place))
        except OSError as error:
            raise CheckpointError(
                f"{self._place} was written, but could not be flushed to the disk: {error.strerror or error}"
            ) from error

    def write_memory(self, name: str, memory: memoryview, size: int, parts: Parts | None = None) -> None:
        """Write the first `size` bytes of memory, which begins at a page and fills whole pages, as a file.

        Past the page cache where the file system can: that hardly takes processor time from others.
        """
        with self.write(name, parts=parts) as file:
            if isinstance(file, AppendOnlyFile) and self.local is not None:
                file.write_pages(memory, size)
            else:
                file.write(memory[:size])

    def write_pieces(self, name: str, pieces: Iterable[memoryview], parts: Parts | None = None) -> None:
        """Write pieces of memory, one after the other, as a file. Past the page cache, too."""
        with self.write(name, parts=parts) as file:
            for memory, size in pages_of(pieces):
                if isinstance(file, AppendOnlyFile) and self.local is not None:
                    file.write_pages(memory, size)
                else:
                    file.write(memory[:size])

    def _sync(self, folder: Path) -> None:
        """Flush the names in a directory to the disk."""
        if not self.durable:
            return
        at = os.open(folder, os.O_RDONLY)
        try:
            os.fsync(at)
        finally:
            os.close(at)

    def reuse(self, name: str) -> None:
        """Keep a complete file of an earlier try. Its checksums are made again if they are missing or damaged."""
        self.reused.append(name)
        if not self.sums:
            return
        with suppress(CheckpointError):
            BlockSums.read(self.read(sums_name(name)), name)
            return
        summing = Summing()
        for data in self._pieces(name):
            summing.update(data)
        self._write_sums(name, summing.finish())

    def _pieces(self, name: str) -> Iterator[bytes]:
        """All bytes of a file, a few at a time."""
        with readable(self.path_of(name)), ExitStack() as stack:
            if self._system is None:
                file = stack.enter_context(Path(self.path_of(name)).open("rb"))
            else:
                file = stack.enter_context(self._system.open(self._at(name), "rb"))
            while data := file.read(BLOCK):
                yield data

    def has(self, name: str, start: bytes, size: int) -> bool:
        """True if the file exists with this start and size. Then it is complete: files appear only when they are."""
        if self._system is not None:
            self._system.invalidate_cache(self._place)
            same = self._system.exists(self._at(name)) and self._system.size(self._at(name)) == size
            return bool(same) and self._system.cat_file(self._at(name), 0, len(start)) == start
        with readable(self.path), self._plain(name) as file:
            return file is not None and os.fstat(file).st_size == size and os.pread(file, len(start), 0) == start

    @contextmanager
    def _plain(self, name: str) -> Iterator[int | None]:
        """An open regular file with a single name; None for links, pipes and so on, and if it does not exist."""
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

    def read(self, name: str, limit: int | None = None) -> bytes:
        """A small file, or its first `limit` bytes."""
        with readable(self.path_of(name)):
            if self._system is not None:
                return bytes(self._system.cat_file(self._at(name), 0, limit))
            with Path(self.path_of(name)).open("rb") as file:
                return file.read(-1 if limit is None else limit)

    def tail(self, name: str, count: int) -> bytes:
        """The last bytes of a file; none if it does not exist."""
        with readable(self.path_of(name)), suppress(FileNotFoundError, NotADirectoryError):
            if self._system is not None:
                return bytes(self._system.cat_file(self._at(name), start=-count))
            with self._plain(name) as file:
                size = 0 if file is None else os.fstat(file).st_size
                return b"" if file is None else os.pread(file, min(count, size), max(0, size - count))
        return b""

    def names(self) -> list[str]:
        """The names of its files."""
        with readable(self.path), suppress(FileNotFoundError, NotADirectoryError):  # writing will report it
            if self._system is None:
                return sorted(entry.name for entry in os.scandir(self.path) if entry.is_file())
            self._system.invalidate_cache(self._place)  # other writers change it, too
            return sorted(str(path).rpartition("/")[2] for path in self._system.ls(self._place, detail=False))
        return []

    def exists(self, name: str) -> bool:
        """True if there is such a file."""
        with readable(self.path_of(name)):
            if self._system is None:
                return os.path.lexists(self.path_of(name))
            self._system.invalidate_cache(self._place)
            return bool(self._system.exists(self._at(name)))

    def missing(self, files: Iterable[str]) -> list[str]:
        """The files that are known not to exist."""
        with suppress(CheckpointError):
            return sorted(set(files) - set(self.names()))
        return []

    def remove(self, name: str) -> None:
        """Remove a file and its checksums, if they exist."""
        self._unlink(sums_name(name))
        self._unlink(name)

    def _unlink(self, name: str) -> None:
        with suppress(OSError):
            if self._system is None:
                os.unlink(self.path_of(name))
            else:
                self._system.rm_file(self._at(name))

    def discard(self, name: str, owner: int) -> None:
        """Remove a regular file of that user, if it exists."""
        with suppress(OSError):
            status = os.lstat(self.path_of(name))
            if stat.S_ISREG(status.st_mode) and status.st_uid == owner:
                os.unlink(self.path_of(name))


def _nothing() -> None:
    """Where nothing is flushed."""


@contextmanager
def writable(what: str) -> Iterator[None]:
    """Turn errors of the system into CheckpointErrors that name the file."""
    try:
        yield
    except OSError as error:
        raise CheckpointError(f"{what} cannot be written: {error.strerror or error}") from error


def token_of(name: str) -> str | None:
    """The token in the name of a file that shardwise wrote, or of its checksums; None for other files.

    >>> token_of("__0_0123456789abcdef.distcp"), token_of("__0_0.distcp")
    ('0123456789abcdef', None)
    """
    match = OURS.fullmatch(data_name(name))
    return match and (match[1] or match[2])


def indexed_files(folder: OutputFolder, indexes: Collection[str]) -> set[str]:
    """The files of ours that the indexes in a directory list."""
    files = set[str]()
    for index in set(indexes) & set(folder.names()):
        files |= {match[0].decode() for match in OURS_IN_BYTES.finditer(folder.read(index))}
    return files
