"""Our own format: a safetensors file for every rank, and an index that says where all boxes of every tensor are.

The tensor `w` of a file is stored under `w@4,0` where its part begins at row 4. The index, `shardwise.json`, is written
last: without it there is no checkpoint. For every tensor it has the dtype, the shape and the layout, in the notation of
layouts, whose owners are numbers of files; beside them values that are no tensors, and nested names. A tensor that is
`tied` to another one has its parts under that one's name.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import lru_cache, partial
from math import prod
from typing import Any, NamedTuple

import torch

from shardwise.checkpoint.entry import Alike, Checkpoint, Entry, Located
from shardwise.checkpoint.files import Files, inside
from shardwise.checkpoint.formats.safetensors import (
    DTYPES,
    Header,
    name_of,
    parsed,
    read_header,
)
from shardwise.checkpoint.formats.writers import Contents, Part, check_alone, commit, write_parts
from shardwise.checkpoint.structure import check_steps
from shardwise.checkpoint.values import STORED, decoded, encoded
from shardwise.checkpoint.writing import Folder
from shardwise.errors import CheckpointError
from shardwise.geometry import Boxes, Ints, ints
from shardwise.layout import Grid, Layout, parse
from shardwise.notation import read
from shardwise.quoting import brief
from shardwise.state.traverse import Key, is_step

INDEX = "shardwise.json"
VERSION = 1
FEW_PARTS, LINE = 4096, 32


def key_of(name: str, lo: Sequence[int]) -> str:
    """The name of a part in its file.

    >>> key_of("layers.0.weight", (4, 0)), key_of("step", ())
    ('layers.0.weight@4,0', 'step@')
    """
    return f"{name}@{','.join(map(str, lo))}"


class ShardedWriter:
    """Writes it: a file for every owner, then the index."""

    def __init__(self, folder: Folder, owners: Sequence[int], token: str) -> None:
        self.folder, self._owners, self._token = folder, list(owners), token
        self._numbers = {owner: number for number, owner in enumerate(self._owners)}
        self.main = INDEX

    @staticmethod
    def fits(contents: Contents) -> None:
        """Any tensor of a known dtype, and any value that JSON can spell."""
        check_steps(contents)
        for name, (dtype, _) in contents.tensors.items():
            name_of(dtype, name)
        for name, value in contents.values.items():
            encoded(value, name, STORED)

    def check(self, contents: Contents) -> None:
        """An earlier one stays whole until this one is."""
        check_alone(self.folder, INDEX)

    def file(self, owner: int) -> str:
        """The name of the file of an owner."""
        return f"shard-{self._numbers[owner]:05d}-of-{len(self._owners):05d}-{self._token}.safetensors"

    def write(self, me: int, parts: Sequence[Part], contents: Contents) -> None:
        """The file of an owner, also where it has nothing: the index names one for each."""
        stored = {key_of(part.name, part.box.lo): part for part in parts}
        write_parts(self.folder, self.file(me), stored, self._token)

    def finish(self, told: Mapping[int, Any], contents: Contents) -> list[str]:
        """The index; then files of the checkpoint that it replaces may go."""
        files = [self.file(owner) for owner in self._owners]
        return commit(self.folder, INDEX, index_bytes(files, contents, self._numbers), files)

    def undo(self, me: int) -> None:
        """Remove the file of an owner."""
        self.folder.remove(self.file(me))


def index_bytes(files: Sequence[str], contents: Contents, numbers: Mapping[int, int]) -> bytes:
    """The index as a file."""
    texts = {  # most tensors lie as others do
        layout: str(layout.relabel({owner: numbers[owner] for owner in layout.owners()}))
        for layout in {layout for _, layout in contents.tensors.values()}
    }
    listed = {
        name: {"dtype": name_of(dtype, name), "shape": list(layout.shape), "layout": texts[layout]}
        for name, (dtype, layout) in contents.tensors.items()
    }
    for name, one in contents.tied.items():
        listed[name]["tied"] = one
    said = {
        "shardwise": VERSION,
        "files": list(files),
        "tensors": listed,
        "values": {name: encoded(value, name, STORED) for name, value in contents.values.items()},
        "paths": {name: encoded(list(path), name) for name, path in contents.paths.items() if path != (name,)},
    }
    return json.dumps(said, indent=1).encode()


def open_sharded(files: Files) -> Checkpoint:
    """By its index alone; files are looked at when something of them is needed."""
    where = files.shown(INDEX)
    said = parsed(files.read(INDEX), where)
    if said.get("shardwise") != VERSION:
        raise CheckpointError(f"{where} is of version {brief(said.get('shardwise'))}: version {VERSION} is known here")
    parts: list[Any] = [said.get(name) for name in ("files", "tensors", "values", "paths")]
    if not isinstance(parts[0], list) or not all(isinstance(part, dict) for part in parts[1:]):
        raise CheckpointError(f"{where} has no files, tensors, values and paths")
    names, (tensors, values, paths) = [inside(name, where) for name in parts[0]], parts[1:]
    nested = {name: _path(path, name, where, len(paths)) for name, path in paths.items()}
    headers = Headers(files, names)
    entries = Lazy(tensors, partial(_entry, headers, where, tensors))
    return Checkpoint(
        files,
        "sharded",
        entries,
        paths={name: (name,) for name in (*tensors, *values)} | nested,  # the index leaves out what is not nested
        objects=lambda: {name: _decoded(value, name, where) for name, value in values.items()},
    )


def _path(said: Any, name: str, where: str, names: int) -> tuple[Any, ...]:
    found = _decoded(said, name, where)
    if not isinstance(found, list) or not found or not all(map(is_step, found)):
        raise CheckpointError(f"{name!r} in {where} has the path {brief(found)}: a list of names and numbers is one")
    if any(not isinstance(key, str | Key) and not 0 <= key < names for key in found):
        raise CheckpointError(f"{name!r} in {where} has the path {brief(found)}: no list of {names} names is so long")
    return tuple(found)


def _decoded(said: Any, name: str, where: str) -> Any:
    try:
        return decoded(said)
    except Exception as error:  # whatever a damaged index leads to
        raise CheckpointError(f"{name!r} in {where} is no value that is known here: {error}") from error


class Lazy(Mapping[str, Entry]):
    """Entries that are made when they are first looked at: a large checkpoint has very many."""

    def __init__(self, said: Mapping[str, Any], make: Callable[[str, Any], Entry]) -> None:
        self._said, self._make, self._made = said, make, dict[str, Entry]()

    def __getitem__(self, name: str) -> Entry:
        found = self._made.get(name)
        if found is None:
            found = self._made[name] = self._make(name, self._said[name])
        return found

    def __contains__(self, name: object) -> bool:
        return name in self._said

    def __iter__(self) -> Iterator[str]:
        return iter(self._said)

    def __len__(self) -> int:
        return len(self._said)


class Headers:
    """The headers of files, read when they are first needed."""

    def __init__(self, files: Files, names: Sequence[str]) -> None:
        self.files, self.names = files, names
        self._read = dict[int, Header]()

    def check_room(self, layout: Layout) -> None:
        """Refuse more parts than the files can have: a line of a header takes so many bytes at least."""
        parts = prod(len(axis.part) for axis in layout.form.axes) if isinstance(layout.form, Grid) else 0
        if parts > FEW_PARTS and parts > sum(self.files.size(name) for name in self.names) // LINE:
            raise ValueError(f"the layout {layout} has {parts} parts, more than its files can hold")

    def of(self, number: int) -> Header:
        """Of a file."""
        if number not in self._read:
            self._read[number] = read_header(self.files, self.names[number])
        return self._read[number]


def _entry(headers: Headers, where: str, all_said: Mapping[str, Any], name: str, said: Any) -> Entry:
    try:
        dtype, shape, layout = said["dtype"], tuple(said["shape"]), str(said["layout"])
    except (KeyError, TypeError) as error:
        raise CheckpointError(f"{name!r} in {where} has no dtype, shape and layout") from error
    try:
        headers.check_room(_laid_out(layout, len(headers.names)))
        stored = _stored(dtype, shape, layout, len(headers.names))
    except (ValueError, TypeError) as error:
        raise CheckpointError(f"{name!r} in {where}: {error}") from error
    own = _own(all_said, name, said, where)
    locate = partial(_locate, headers, own, stored)
    return Entry(name, stored.shape, stored.dtype, stored.alike, stored.file, locate, headers.names, headers.files, own)


def _own(tensors: Mapping[str, Any], name: str, said: Mapping[str, Any], where: str) -> str:
    """The name that a tensor has in its files: that of the one that it is tied to."""
    one = said.get("tied", name)
    alike = {key: value for key, value in said.items() if key != "tied"}
    if one != name and (not isinstance(one, str) or tensors.get(one) != alike):
        raise CheckpointError(
            f"{name!r} in {where} is tied to {one!r}, which is not a tensor of its own that lies alike"
        )
    if one == name and "tied" in said:
        raise CheckpointError(f"{name!r} in {where} is tied to {one!r}: to itself")
    return str(one)


class Stored(NamedTuple):
    """How tensors of one layout are stored: their boxes, the file of each, and what it is called there."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    alike: Alike
    file: Ints
    known: dict[int, tuple[int, str, tuple[int, ...]]]  # of boxes that were asked for

    def part(self, row: int) -> tuple[int, str, tuple[int, ...]]:
        """Of a box: its file, how its key ends, and its shape."""
        found = self.known.get(row)
        if found is None:
            box = self.alike.boxes.box(row)
            found = self.known[row] = int(self.file[row]), key_of("", box.lo), box.shape
        return found


@lru_cache(maxsize=4096)
def _laid_out(text: str, files: int) -> Layout:
    """A layout whose owners are numbers of files: more of them are refused before there is a part for each."""
    spelling = read(text)
    if max(spelling.owners or (prod(spelling.mesh) - 1,)) >= files:
        raise ValueError(f"the layout {text} has more owners than there are files: {files}")
    return parse(text)


@lru_cache(maxsize=4096)
def _stored(dtype: str, shape: tuple[int, ...], text: str, files: int) -> Stored:
    """By what the index says. Kept: tensors of one shape lie alike."""
    layout = _laid_out(text, files)
    if dtype not in DTYPES:
        raise ValueError(f"its dtype {dtype!r} is not known here")
    if layout.shape != shape or layout.op is not None:
        raise ValueError(f"the layout {text} does not fit a shape of {shape} in {files} files")
    if isinstance(layout.form, Grid):  # the same, for all owners at once
        row, owner = layout.form.holders.expand(layout.form.cells.block)
        return Stored(layout.shape, DTYPES[dtype], Alike(layout.form.cells.boxes.take(row)), owner, {})
    found = [(owner, piece) for owner in layout.owners() for piece in layout.pieces(owner)]
    boxes = Boxes.of([piece.box for _, piece in found], layout.ndim)
    owners = ints([owner for owner, _ in found])
    return Stored(layout.shape, DTYPES[dtype], Alike(boxes), owners, {})


def _locate(headers: Headers, name: str, stored: Stored, rows: Ints) -> Located:
    starts = list[int]()
    for number, ending, shape in map(stored.part, rows.tolist()):
        key = name + ending
        tensor = headers.of(number).tensors.get(key)
        if tensor is None or tensor.dtype != stored.dtype or tensor.shape != shape:
            found = "does not have it" if tensor is None else f"has {tensor.dtype} of shape {tensor.shape}"
            where = headers.files.shown(headers.names[number])
            raise CheckpointError(
                f"{where} should have {key!r}, {stored.dtype} of shape {shape}, but {found}: "
                f"it is not the file that the index was written for"
            )
        starts.append(tensor.start)
    return Located(ints(starts))
