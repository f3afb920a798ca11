"""The formats that can be written, each rank a part of it."""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import IO, Any, NamedTuple, Protocol

import torch

from shardwise.checkpoint.formats.safetensors import header_bytes
from shardwise.checkpoint.writing import Folder
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


INDEXES = ("shardwise.json", ".metadata", "model.safetensors.index.json", "pytorch_model.bin.index.json")


def check_alone(folder: Folder, index: str) -> None:
    """Refuse a directory that has a checkpoint of another format: it would be two at once."""
    others = [name for name in folder.names() if name in INDEXES and name != index]
    if others:
        raise CheckpointError(
            f"{folder.path} has a checkpoint of another format ({others[0]}): give another path, or remove it"
        )


def commit(folder: Folder, index: str, data: bytes, files: Collection[str], named: re.Pattern[str]) -> list[str]:
    """Write the index of these files; returns others of such names, which are not needed any more."""
    _check_there(folder, files)
    with folder.write(index) as file:
        file.write(data)
    _check_there(folder, files)
    return folder.others(named, files)


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

    def check(self, contents: Contents) -> None:
        """Refuse a directory that it must not write to, and what it cannot write."""
        ...

    def write(self, me: int, parts: Sequence[Part], contents: Contents) -> Any:
        """Write the parts of an owner; returns what the one who writes the index has to know of it."""
        ...

    def finish(self, told: Mapping[int, Any], contents: Contents) -> list[str]:
        """Write the index: from now on this is the checkpoint. Returns the files that are not needed any more."""
        ...


class Saver(Writer, Protocol):
    """A writer whose earlier checkpoint stays whole until the new one is: what failed is taken back."""

    def undo(self, me: int) -> None:
        """Remove what `write` wrote."""
        ...
