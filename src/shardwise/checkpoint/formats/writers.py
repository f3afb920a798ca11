"""What the writers of all formats share: the contents, checks, and the index at the end."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple, TypeVar

import torch

from shardwise.checkpoint.opaque import UnknownObject, is_unknown_class
from shardwise.checkpoint.unpickle_stubs import RecordStub, Stub
from shardwise.errors import CheckpointError
from shardwise.geometry import Box
from shardwise.layout import Layout
from shardwise.quoting import brief
from shardwise.state.traverse import OBJ_PATH, PATH_ITEM, Key, Place, dotted
from shardwise.storage.appending import OutputFile
from shardwise.storage.folders import INDEXES, OutputFolder
from shardwise.storage.orders import commit_index

T = TypeVar("T")


class TensorPart(NamedTuple):
    """A box of a tensor; `write` writes its elements, row-major, to a file."""

    name: str
    box: Box
    dtype: torch.dtype
    write: Callable[[OutputFile], None]

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
    made: dict[str, tuple[object, Any]] | None = None  # what writers have made, for saves of equal tensors

    def once(self, what: str, make: Callable[[], T], *, given: object = None) -> T:
        """What `make` returns, or returned in the last save of an equal state where as much was `given`.

        It may depend on tensors and paths, but not on values.
        """
        if self.made is None:
            return make()
        known = self.made.get(what)
        if known is None or known[0] != given:
            known = self.made[what] = given, make()
        made: T = known[1]
        return made

    def path_of(self, name: str) -> OBJ_PATH:
        """The path of a leaf; names without one are keys of the outermost dict."""
        return self.paths.get(name, (name,))

    def path_items(self) -> Iterator[tuple[str, PATH_ITEM]]:
        """Every key on the path of every leaf, with the name of the leaf."""
        return ((name, key) for name in (*self.tensors, *self.values) for key in self.path_of(name))


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

    def marked(self, contents: Contents, what: str, make: Callable[[], bytes], *, given: object = None) -> bytes:
        """As `once` of the contents: bytes that also have the token."""
        token, text = contents.once(what, lambda: (self.token.encode(), make()), given=given)
        return text.replace(token, self.token.encode())

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
        return commit_index(self.folder, self.main, self.index(results, contents), self.files)

    def names_token(self) -> bool:
        """True if the index lists files of this checkpoint, or cannot be read."""
        try:
            return self.main in self.folder.names() and self.token.encode() in self.folder.read(self.main)
        except CheckpointError:
            return True

    def undo(self, me: int) -> None:
        """Remove the file of an owner."""
        self.folder.remove(self.file(me))
