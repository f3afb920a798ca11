"""The formats that can be written, each rank a part of it."""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from os import geteuid
from pathlib import Path
from typing import IO, Any, NamedTuple, Protocol

import torch

from shardwise.checkpoint.formats.safetensors import header_bytes
from shardwise.checkpoint.locking import DAY, Lock, Record
from shardwise.checkpoint.writing import ASIDE, Folder, hidden, writable
from shardwise.errors import CheckpointError
from shardwise.geometry import Box
from shardwise.layout import Layout


class Part(NamedTuple):
    """A box of a tensor; `write` writes its values, row-major, to a file."""

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
        """Of its values."""
        return self.box.volume * self.dtype.itemsize


class Contents(NamedTuple):
    """What the index of a checkpoint says, but for where files have it."""

    tensors: Mapping[str, tuple[torch.dtype, Layout]]  # the owners are those who wrote
    values: Mapping[str, Any]
    paths: Mapping[str, tuple[Any, ...]]
    tied: Mapping[str, str] = {}  # names that have no parts of their own: those of another name are theirs, too

    def path_of(self, name: str) -> tuple[Any, ...]:
        """Where a leaf lies; names without a path are keys of the outermost dict."""
        return self.paths.get(name, (name,))


INDEXES = ("shardwise.json", ".metadata", "model.safetensors.index.json", "pytorch_model.bin.index.json")
NAMES = r"(?:shard-[0-9]+-of-[0-9]+-([0-9a-f]{16})\.safetensors|__[0-9]+_([0-9a-f]{16})\.distcp)"
OURS, OURS_IN_BYTES = re.compile(NAMES), re.compile(NAMES.encode())
LOCK, TRIES = ".shardwise.lock", 1000


def token_of(name: str) -> str | None:
    """The token in the name of a file of ours; None for those of others.

    >>> token_of("__0_0123456789abcdef.distcp"), token_of("__0_0.distcp")
    ('0123456789abcdef', None)
    """
    found = OURS.fullmatch(name)
    return found and (found[1] or found[2])


def check_alone(folder: Folder, index: str) -> None:
    """Refuse a directory that has a checkpoint of another format: it would be two at once."""
    others = [name for name in folder.names() if name in INDEXES and name != index]
    if others:
        raise CheckpointError(
            f"{folder.path} has a checkpoint of another format ({others[0]}): give another path, or remove it"
        )


def commit(folder: Folder, index: str, data: bytes, files: Collection[str]) -> list[str]:
    """Write the index of these files; returns those that the index before it named, which are not needed any more."""
    _check_there(folder, files)
    old = _named(folder, [index])
    with folder.write(index) as file:
        file.write(data)
    _check_there(folder, files)
    return sorted(old - set(files))


def _named(folder: Folder, indexes: Collection[str]) -> set[str]:
    """The files of ours that indexes in a directory name."""
    found = set[str]()
    for index in set(indexes) & set(folder.names()):
        found |= {match[0].decode() for match in OURS_IN_BYTES.finditer(folder.read(index))}
    return found


class Claim:
    """The right to write to a directory, or to one file. `unfinished`: the next writer must know what this one left."""

    unfinished = False


@contextmanager
def claimed(folder: Folder, token: str, name: str | None = None) -> Iterator[Claim]:
    """No other save or conversion writes to the directory, or to the file of that name, until this ends.

    What one that died has left aside goes, and so do its other files, unless they are of this `token` and can be used
    again. Object stores have no locks: there nobody is kept out.
    """
    claim = Claim()
    if folder.local is None:
        yield claim
        return
    lock, made = _lock(folder, folder.local, LOCK if name is None else hidden(name, "lock"))
    others = lock.records
    try:
        others = _cleared(folder, lock, token)
        old = sorted(_named(folder, INDEXES[:2])) if name is None else []
        lock.write([*others, Record.mine(folder.run, token, old)])
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


def _lock(folder: Folder, path: Path, name: str) -> tuple[Lock, list[Path]]:
    """And the directories that were made for it."""
    made = list[Path]()
    for _ in range(TRIES):
        made += folder.make()
        with writable(folder.shown(name)), suppress(FileNotFoundError):  # another writer failed, and took back all
            lock = Lock(path / name, folder.path if name == LOCK else folder.shown(name[1 : -len(".lock")]))
            if lock.current:
                return lock, made
            lock.release(keep=True)
    raise CheckpointError(f"{folder.shown(name)} cannot be locked: it disappears again and again")


def _cleared(folder: Folder, lock: Lock, token: str) -> list[Record]:
    """Remove what writers that died have left; returns the records of those that may live on another host."""
    mine = Record.mine(folder.run, token, [])
    dead = [one for one in lock.records if one.host == mine.host or mine.since - one.since > DAY]
    dead = dead if lock.owner == geteuid() else []
    runs, tokens = {one.run for one in dead}, {one.token for one in dead} - {token}
    old = {name for one in dead for name in one.old}
    needed = _named(folder, INDEXES[:2]) if dead else set[str]()
    for name in folder.names() if dead else ():
        aside, mark = ASIDE.fullmatch(name), token_of(name)
        unneeded = mark is not None and name not in needed and (mark in tokens or name in old)
        if unneeded or (aside and aside[1] in runs):
            folder.discard(name, lock.owner)
    return [one for one in lock.records if one not in dead]


def _check_there(folder: Folder, files: Iterable[str]) -> None:
    """Refuse to go on where files that were written are not there any more."""
    gone = folder.lost(files)
    if gone:
        raise CheckpointError(
            f"{folder.shown(gone[0])} was written, and is gone: is something else saved to the same place? "
            f"Give every checkpoint a path of its own"
        )


def names_token(folder: Folder, index: str, token: str) -> bool:
    """True where the index that is there names files of that token, or cannot be read."""
    try:
        return index in folder.names() and token.encode() in folder.read(index)
    except CheckpointError:
        return True


def write_parts(folder: Folder, file: str, parts: Mapping[str, Part], token: str) -> None:
    """A safetensors file of these parts, unless an earlier try at the same has written it."""
    header = header_bytes(
        {key: (part.dtype, part.shape) for key, part in parts.items()}, {"format": "pt", "shardwise": token}
    )
    if folder.has(file, header, len(header) + sum(part.bytes for part in parts.values())):
        folder.reused.append(file)
        return
    with folder.write(file) as opened:
        opened.write(header)
        for part in parts.values():
            part.write(opened)


class Writer(Protocol):
    """Writes a checkpoint: everybody its parts, then one of them the index. `token` tells it from earlier ones."""

    folder: Folder
    main: str  # the file that is opened to read it

    def __init__(self, folder: Folder, owners: Sequence[int], token: str) -> None: ...

    @staticmethod
    def fits(contents: Contents) -> None:
        """Refuse what the format cannot hold. It looks at no file: every rank finds the same."""
        ...

    def check(self, contents: Contents) -> None:
        """Refuse a directory that it must not write to."""
        ...

    def write(self, me: int, parts: Sequence[Part], contents: Contents) -> Any:
        """Write the parts of an owner; returns what the one who writes the index has to know of it."""
        ...

    def file(self, owner: int) -> str:
        """The name of the file of an owner."""
        ...

    def finish(self, told: Mapping[int, Any], contents: Contents) -> list[str]:
        """Write the index: from now on this is the checkpoint. Returns the files that are not needed any more."""
        ...


class Saver(Writer, Protocol):
    """A writer whose earlier checkpoint stays whole until the new one is: what failed is taken back."""

    def undo(self, me: int) -> None:
        """Remove what `write` wrote."""
        ...
