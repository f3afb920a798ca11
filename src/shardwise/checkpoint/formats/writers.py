"""What the writers of all formats share: the contents, checks, the index at the end, and the write lock."""

from __future__ import annotations

import re
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from os import geteuid
from pathlib import Path
from typing import IO, Any, NamedTuple

import torch

from shardwise.checkpoint.atomic_files import DAY, PARTIAL, FileLock, OutputFolder, WriterRecord, sidecar_name, writable
from shardwise.checkpoint.opaque import UnknownObject, is_unknown_class
from shardwise.checkpoint.unpickle_stubs import RecordStub, Stub
from shardwise.errors import CheckpointError
from shardwise.geometry import Box
from shardwise.layout import Layout
from shardwise.quoting import brief
from shardwise.state.traverse import OBJ_PATH, PATH_ITEM, Key, Place, dotted


class TensorPart(NamedTuple):
    """A box of a tensor; `write` writes its elements, row-major, to a file."""

    name: str
    box: Box
    dtype: torch.dtype
    write: Callable[[IO[bytes]], None]

    @property
    def shape(self) -> tuple[int, ...]:
        """Of the box."""
        return self.box.shape

    @property
    def bytes(self) -> int:
        """Of its elements."""
        return self.box.volume * self.dtype.itemsize


class Contents(NamedTuple):
    """What a checkpoint has."""

    tensors: Mapping[str, tuple[torch.dtype, Layout]]  # the owners are the writers
    values: Mapping[str, object]
    paths: Mapping[str, OBJ_PATH]
    tied: Mapping[str, str] = {}  # names without parts of their own: they share those of another name

    def path_of(self, name: str) -> OBJ_PATH:
        """The path of a leaf; names without one are keys of the outermost dict."""
        return self.paths.get(name, (name,))

    def path_items(self) -> Iterator[tuple[str, PATH_ITEM]]:
        """Every key on the path of every leaf, with the name of the leaf."""
        return ((name, key) for name in (*self.tensors, *self.values) for key in self.path_of(name))


INDEXES = ("shardwise.json", ".metadata", "model.safetensors.index.json", "pytorch_model.bin.index.json")
NAMES = r"(?:shard-[0-9]+-of-[0-9]+-([0-9a-f]{16})\.safetensors|__[0-9]+_([0-9a-f]{16})\.distcp)"
OURS, OURS_IN_BYTES = re.compile(NAMES), re.compile(NAMES.encode())
LOCK, TRIES = ".shardwise.lock", 1000


def check_overlaps(contents: Contents) -> None:
    """Refuse a leaf inside another leaf, or at the same path."""
    names = dict[OBJ_PATH, str]()
    for name in (*contents.tensors, *contents.values):
        other = names.setdefault(contents.path_of(name), name)
        if other != name:
            raise CheckpointError(
                f"{name!r} and {other!r} would have the same path: leave one of them out with select="
            )
    for path, name in names.items():
        around = next((names[path[:end]] for end in range(1, len(path)) if path[:end] in names), None)
        if around is not None:
            raise CheckpointError(f"{name!r} would be inside {around!r}: rename it with rename=")


def check_key_types(contents: Contents) -> None:
    """Refuse keys of other types than str and int: an index cannot hold them."""
    for name, key in contents.path_items():
        if type(key) not in (str, int, Key, Place):
            raise CheckpointError(
                f"{name!r} has the key {brief(key)} ({type(key).__name__}): keys must be str or int. "
                f"Remedy: give it another key, or convert to format='torch.save'"
            )


def check_keys(contents: Contents) -> None:
    """Refuse keys that are objects of unknown classes."""
    for name, key in contents.path_items():
        if isinstance(key, UnknownObject | Stub | RecordStub) or is_unknown_class(key):
            raise CheckpointError(
                f"{name!r} has the key {brief(key)}, which cannot be written: leave it out with select="
            )


def check_dotted(contents: Contents) -> None:
    """Refuse two tensors of one dotted name, for formats that have no other name."""
    for name in contents.tensors:
        plain = dotted(contents.path_of(name))
        if plain != name and plain in contents.tensors:
            raise CheckpointError(
                f"{name!r} and another leaf are both called {plain!r}: rename= one, or choose another format"
            )


def token_of(name: str) -> str | None:
    """The token in the name of a file that shardwise wrote; None for other files.

    >>> token_of("__0_0123456789abcdef.distcp"), token_of("__0_0.distcp")
    ('0123456789abcdef', None)
    """
    match = OURS.fullmatch(name)
    return match and (match[1] or match[2])


def _indexed_files(folder: OutputFolder, indexes: Collection[str]) -> set[str]:
    """The files of ours that the indexes in a directory list."""
    files = set[str]()
    for index in set(indexes) & set(folder.names()):
        files |= {match[0].decode() for match in OURS_IN_BYTES.finditer(folder.read(index))}
    return files


class WriteClaim:
    """The right to write to a directory or a file. `unfinished`: keep a record of the files for the next writer."""

    unfinished = False


@contextmanager
def claim_folder(folder: OutputFolder, token: str, name: str | None = None) -> Iterator[WriteClaim]:
    """No other save or conversion writes to the directory, or to the file `name`, until this ends.

    Partial files of dead writers are removed, and so are their other files, unless they have this `token` and can be
    reused. Object stores have no locks: concurrent writers are not detected there.
    """
    claim = WriteClaim()
    if folder.local is None:
        yield claim
        return
    lock, made = _lock(folder, folder.local, LOCK if name is None else sidecar_name(name, "lock"))
    others = lock.records
    try:
        others = _clean_up(folder, lock, token)
        old = sorted(_indexed_files(folder, INDEXES[:2])) if name is None else []
        lock.write([*others, WriterRecord.mine(folder.run, token, old)])
        claim.unfinished = True
        yield claim
        claim.unfinished, made = False, []
    finally:
        if others and not claim.unfinished:
            lock.write(others)
        lock.release(keep=claim.unfinished or bool(others))
        for one in made:
            with suppress(OSError):
                one.rmdir()


def _lock(folder: OutputFolder, path: Path, name: str) -> tuple[FileLock, list[Path]]:
    """The lock, and the directories that were made for it."""
    made = list[Path]()
    for _ in range(TRIES):
        made += folder.make()
        with (
            writable(folder.path_of(name)),
            suppress(FileNotFoundError),
        ):  # another writer failed, and removed the directory
            lock = FileLock(path / name, folder.path if name == LOCK else folder.path_of(name[1 : -len(".lock")]))
            if lock.current:
                return lock, made
            lock.release(keep=True)
    raise CheckpointError(f"{folder.path_of(name)} cannot be locked: other writers keep removing it")


def _clean_up(folder: OutputFolder, lock: FileLock, token: str) -> list[WriterRecord]:
    """Remove the files of dead writers; returns the records of writers that may still run on another host."""
    mine = WriterRecord.mine(folder.run, token, [])
    dead = [one for one in lock.records if one.host == mine.host or mine.since - one.since > DAY]
    dead = dead if lock.owner == geteuid() else []
    runs, tokens = {one.run for one in dead}, {one.token for one in dead} - {token}
    old = {name for one in dead for name in one.old}
    needed = _indexed_files(folder, INDEXES[:2]) if dead else set[str]()
    for name in folder.names() if dead else ():
        partial, mark = PARTIAL.fullmatch(name), token_of(name)
        unneeded = mark is not None and name not in needed and (mark in tokens or name in old)
        if unneeded or (partial and partial[1] in runs):
            folder.discard(name, lock.owner)
    return [one for one in lock.records if one not in dead]


class Writer(ABC):
    """Writes a checkpoint: every owner its parts, then one of them the index. `token` marks the files of this one.

    `main` is the file to open for reading, usually the index; `name` is that of a single file.
    """

    index_name = ""

    def __init__(self, folder: OutputFolder, owners: Sequence[int], token: str, name: str | None = None) -> None:
        self.folder, self.token, self.name, self.main = folder, token, name, self.index_name
        self.numbers = {owner: number for number, owner in enumerate(owners)}

    @property
    def files(self) -> list[str]:
        """The files of all owners."""
        return list(map(self.file, self.numbers))

    @staticmethod
    @abstractmethod
    def fits(contents: Contents) -> None:
        """Refuse what the format cannot hold. It reads no files, so every rank gets the same result."""

    def check(self, contents: Contents) -> None:
        """Refuse a directory with a checkpoint of another format. An earlier one stays until this one is complete."""
        others = [name for name in self.folder.names() if name in INDEXES and name != self.index_name]
        if others:
            raise CheckpointError(
                f"{self.folder.path} has a checkpoint of another format ({others[0]}): give another path, or remove it"
            )

    @abstractmethod
    def file(self, owner: int) -> str:
        """The file name of an owner."""

    @abstractmethod
    def write(self, me: int, parts: Sequence[TensorPart], contents: Contents) -> Any:
        """Write the parts of an owner, unless an earlier try has written them; returns what `index` needs."""

    @abstractmethod
    def index(self, results: Mapping[int, Any], contents: Contents) -> bytes:
        """The index, from what `write` returned for all owners."""

    def finish(self, results: Mapping[int, Any], contents: Contents) -> list[str]:
        """Write the index, which makes the checkpoint valid. Returns files that are not needed any more."""
        self._check_exist()
        old = _indexed_files(self.folder, [self.main])
        with self.folder.write(self.main) as file:
            file.write(self.index(results, contents))
        self._check_exist()
        return sorted(old - set(self.files))

    def _check_exist(self) -> None:
        """Refuse to continue if files that were written do not exist any more."""
        missing = self.folder.missing(self.files)
        if missing:
            raise CheckpointError(
                f"{self.folder.path_of(missing[0])} was written, but does not exist any more: does something else "
                f"write to the same path? Give every checkpoint a path of its own"
            )

    def names_token(self) -> bool:
        """True if the index lists files of this checkpoint, or cannot be read."""
        try:
            return self.main in self.folder.names() and self.token.encode() in self.folder.read(self.main)
        except CheckpointError:
            return True

    def undo(self, me: int) -> None:
        """Remove the file of an owner."""
        self.folder.remove(self.file(me))
