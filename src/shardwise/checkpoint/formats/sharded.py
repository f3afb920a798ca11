"""Our own format: a safetensors file for every rank, and an index with the boxes of every tensor.

A part of tensor `w` that begins at row 4 is stored under `w@4,0`. The index, `shardwise.json`, is written last: without
it there is no checkpoint. For every tensor it has dtype, shape and layout, in layout notation with file numbers as
owners. It also has the values that are not tensors, and nested names. A tensor that is `tied` to another one shares the
parts under that name.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from functools import lru_cache, partial
from math import prod
from operator import sub
from typing import Any, NamedTuple, cast

import torch

from shardwise.checkpoint.entry import Checkpoint, Entry, HashableBoxes, LazyMapping, Positions
from shardwise.checkpoint.files import Files
from shardwise.checkpoint.formats.earlier import EarlierFiles, Moved, file_numbers
from shardwise.checkpoint.formats.safetensors import (
    DTYPES,
    Header,
    dtype_name,
    parse_json,
    parts_header,
    read_header,
    write_parts,
)
from shardwise.checkpoint.formats.writers import Contents, TensorPart, Writer, check_key_types
from shardwise.checkpoint.values import STORED, JsonObject, JsonValue, decode, encode
from shardwise.errors import CheckpointError
from shardwise.geometry import Boxes, Ints, ints
from shardwise.layout import Grid, Layout, from_spelling
from shardwise.notation import read
from shardwise.quoting import brief, in_line
from shardwise.state.traverse import OBJ_PATH, Key, is_step
from shardwise.storage.paths import inside
from shardwise.storage.sums import ALGORITHM, damaged, has_digest, with_digest

INDEX = "shardwise.json"
VERSION = 1
FEW_PARTS, LINE = 4096, 32  # parts that need no check; bytes of a part in a header


def key_of(name: str, lo: Sequence[int]) -> str:
    """The name of a part in its file.

    >>> key_of("layers.0.weight", (4, 0)), key_of("step", ())
    ('layers.0.weight@4,0', 'step@')
    """
    return f"{name}@{','.join(map(str, lo))}"


def file_name(number: int, count: int, token: str) -> str:
    """The name of one of several files.

    >>> file_name(0, 2, "0123456789abcdef")
    'shard-00000-of-00002-0123456789abcdef.safetensors'
    """
    return f"shard-{number:05d}-of-{count:05d}-{token}.safetensors"


class ShardedWriter(Writer):
    """Writes a file for every owner, even if it is empty, then the index."""

    index_name = INDEX

    @staticmethod
    def fits(contents: Contents) -> None:
        """Refuse unknown dtypes, and values that JSON cannot hold."""
        contents.once("sharded fits", lambda: _check_tensors(contents))
        for name, value in contents.values.items():
            encode(value, name, STORED)

    def file(self, owner: int) -> str:
        """The file name of an owner."""
        return file_name(self.numbers[owner], len(self.numbers), self.token)

    def write(self, me: int, parts: Sequence[TensorPart], contents: Contents) -> None:
        """Write the file of an owner."""

        def make() -> bytes:
            return parts_header({key_of(part.name, part.box.lo): part for part in parts}, self.token)

        write_parts(self.folder, self.file(me), self.marked(contents, "safetensors header", make), parts)

    def index(self, results: Mapping[int, None], contents: Contents) -> bytes:
        """In JSON, with a digest of itself at the end."""
        return index_bytes(self.files, contents, self.numbers, sums=self.folder.sums)


def _check_tensors(contents: Contents) -> None:
    check_key_types(contents)
    for name, (dtype, _) in contents.tensors.items():
        dtype_name(dtype, name)


def index_bytes(files: Sequence[str], contents: Contents, numbers: Mapping[int, int], *, sums: bool = False) -> bytes:
    """The index file. `sums`: it says that its files have checksums, and has a digest of itself."""
    index = {
        "shardwise": _value(VERSION),
        "files": _value(list(files)),
        "tensors": contents.once("sharded tensors", lambda: _value(_described(contents, numbers))),
        "values": _value({name: encode(value, name, STORED) for name, value in contents.values.items()}),
        "paths": contents.once("sharded paths", lambda: _value(_nested(contents))),
    }
    return with_digest(_in_lines({**index, "sums": _value(ALGORITHM)})) if sums else _in_lines(index)


def _described(contents: Contents, numbers: Mapping[int, int]) -> dict[str, dict[str, object]]:
    texts = {  # many tensors have the same layout
        layout: str(layout.relabel({owner: numbers[owner] for owner in layout.owners()}))
        for layout in {layout for _, layout in contents.tensors.values()}
    }
    described: dict[str, dict[str, object]] = {
        name: {"dtype": dtype_name(dtype, name), "shape": list(layout.shape), "layout": texts[layout]}
        for name, (dtype, layout) in contents.tensors.items()
    }
    for name, one in contents.tied.items():
        described[name]["tied"] = one
    return described


def _nested(contents: Contents) -> dict[str, object]:
    return {name: encode(list(path), name) for name, path in contents.paths.items() if path != (name,)}


def _in_lines(texts: Mapping[str, str]) -> bytes:
    """JSON with a line for each entry. (json itself writes lines ten times as slowly.)"""
    return f"{{\n{_entries(texts, 1)}\n}}".encode()


def _value(value: object) -> str:
    if not isinstance(value, dict) or not value:
        return json.dumps(value)
    return f"{{\n{_entries({key: json.dumps(one) for key, one in value.items()}, 2)}\n }}"


def _entries(texts: Mapping[str, str], indent: int) -> str:
    return ",\n".join(f"{' ' * indent}{json.dumps(key)}: {text}" for key, text in texts.items())


def open_sharded(files: Files) -> Checkpoint:
    """Reads only the index; other files are read when needed."""
    where = files.label(INDEX)
    text = files.read(INDEX)
    index, whole = parse_json(text, where), has_digest(text)
    if not whole and ("sums" in index or "digest" in index):
        raise damaged(where)
    if index.get("shardwise") != VERSION:
        raise CheckpointError(
            f"{where} has version {brief(index.get('shardwise'))}, but only version {VERSION} is supported"
        )
    file_names, tensors, values, paths = map(index.get, ("files", "tensors", "values", "paths"))
    if not isinstance(file_names, list) or not (
        isinstance(tensors, dict) and isinstance(values, dict) and isinstance(paths, dict)
    ):
        raise CheckpointError(f"{where} lacks files, tensors, values or paths")
    names = [inside(name, where) for name in file_names]
    nested = {name: _path(path, name, where, len(paths)) for name, path in paths.items()}
    headers = Headers(files, names, EarlierFiles.of(index, len(names), where))
    entries = LazyMapping(tensors, partial(_entry, headers, where, tensors))
    checkpoint = Checkpoint(
        files,
        "sharded",
        entries,
        paths={name: (name,) for name in (*tensors, *values)} | nested,  # the index lists only nested ones
        objects=lambda: {name: _decode(value, name, where) for name, value in values.items()},
    )
    checkpoint.sums = whole
    return checkpoint


def _path(value: JsonValue, name: str, where: object, names: int) -> OBJ_PATH:
    path = _decode(value, name, where)
    if not isinstance(path, list) or not path or not all(map(is_step, path)):
        raise CheckpointError(f"{name!r} in {where} has the path {brief(path)}: expected a list of names and numbers")
    if any(not isinstance(key, str | Key) and not 0 <= key < names for key in path):
        raise CheckpointError(f"{name!r} in {where} has the path {brief(path)}: no list of {names} names is so long")
    return tuple(path)


def _decode(value: JsonValue, name: str, where: object) -> object:
    try:
        return decode(value)
    except Exception as error:  # whatever a damaged index leads to
        raise CheckpointError(f"{name!r} in {where} is not a recognized value: {error}") from error


class Headers:
    """The headers of files, read when first needed."""

    def __init__(self, files: Files, own: Sequence[str], earlier: EarlierFiles) -> None:
        self.files, self.names = files, [*own, *earlier.names]
        self.earlier, self._count = earlier, len(own)
        self._read = dict[int, Header]()
        self._parts = dict[tuple[str, tuple[int, ...], str, tuple[Moved, ...]], StoredParts]()

    def parts(self, name: str, dtype: str, shape: tuple[int, ...], layout: str) -> StoredParts:
        """How a tensor with these fields is stored. Checked and made once: many tensors have the same."""
        moved = self.earlier.moved(name)
        key = dtype, shape, layout, moved
        if key not in self._parts:
            self._check_room(_file_layout(layout, self._count))
            parts = _stored_parts(dtype, shape, layout, self._count)
            file = file_numbers(parts.file, moved, self._count)
            self._parts[key] = parts._replace(file=file, known={}) if moved else parts
        return self._parts[key]

    def _check_room(self, layout: Layout) -> None:
        """Refuse more parts than the files can have: each takes at least LINE bytes of a header."""
        parts = prod(len(axis.part) for axis in layout.form.axes) if isinstance(layout.form, Grid) else 0
        if parts > FEW_PARTS and parts > sum(self.files.size(self._there(at)) for at in range(len(self.names))) // LINE:
            raise ValueError(f"the layout {layout} has {parts} parts, more than its files can hold")

    def of(self, number: int) -> Header:
        """Of a file."""
        if number not in self._read:
            self._read[number] = read_header(self.files, self._there(number))
        return self._read[number]

    def _there(self, number: int) -> str:
        """The name of a file; refused if it is that of an earlier checkpoint, which is not there."""
        name = self.names[number]
        if number >= self._count and not self.files.has(name):
            folder = name.split("/")[1]
            raise CheckpointError(
                f"{self.files.label(name)} is missing: the checkpoint {in_line(self.files.root)} was saved with "
                f"incremental=, and what had not changed lies in {folder!r} beside it. Remedy: copy both folders, or "
                f"convert it where both are, which writes a checkpoint of its own"
            )
        return name


def _entry(headers: Headers, where: object, tensors: JsonObject, name: str) -> Entry:
    try:
        fields = cast("dict[str, Any]", tensors[name])
        dtype, shape, layout = fields["dtype"], tuple(fields["shape"]), str(fields["layout"])
    except (KeyError, TypeError) as error:
        raise CheckpointError(f"{name!r} in {where} lacks dtype, shape or layout") from error
    try:
        own = _own_name(tensors, name, fields, where)
        parts = headers.parts(own, dtype, shape, layout)
    except CheckpointError:
        raise
    except (ValueError, TypeError) as error:
        raise CheckpointError(f"{name!r} in {where}: {error}") from error
    locate = partial(_locate, headers, own, parts)
    return Entry(name, parts.shape, parts.dtype, parts.stored, parts.file, locate, headers.names, headers.files, own)


def _own_name(tensors: JsonObject, name: str, fields: JsonObject, where: object) -> str:
    """The name of a tensor in its files: that of the one that it is tied to."""
    if "tied" not in fields:
        return name
    one, same = fields["tied"], {key: value for key, value in fields.items() if key != "tied"}
    if one == name:
        raise CheckpointError(f"{name!r} in {where} is tied to itself")
    if not isinstance(one, str) or tensors.get(one) != same:
        raise CheckpointError(
            f"{name!r} in {where} is tied to {one!r}, which is not an untied tensor with the same layout"
        )
    return one


class StoredParts(NamedTuple):
    """How tensors of one layout are stored: their boxes, and the file and key of each."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    stored: HashableBoxes
    file: Ints
    known: dict[int, tuple[int, str, tuple[int, ...]]]  # a cache for `part`

    def part(self, row: int) -> tuple[int, str, tuple[int, ...]]:
        """The file, the end of the key, and the shape of a box."""
        part = self.known.get(row)
        if part is None:
            lo, hi = (side[row].tolist() for side in self.stored.boxes)
            part = self.known[row] = int(self.file[row]), key_of("", lo), tuple(map(sub, hi, lo))
        return part


@lru_cache(maxsize=4096)
def _file_layout(text: str, files: int) -> Layout:
    """A layout with file numbers as owners; more owners are refused before memory is used for each."""
    spelling = read(text)
    if max(spelling.owners or (prod(spelling.mesh) - 1,)) >= files:
        raise ValueError(f"the layout {text} has more owners than there are files: {files}")
    return from_spelling(spelling)


@lru_cache(maxsize=4096)
def _stored_parts(dtype: str, shape: tuple[int, ...], text: str, files: int) -> StoredParts:
    """From the fields of the index. Cached: many tensors have the same."""
    layout = _file_layout(text, files)
    if dtype not in DTYPES:
        raise ValueError(f"its dtype {dtype!r} is unknown: known are {', '.join(DTYPES)}")
    if layout.shape != shape or layout.op is not None:
        raise ValueError(f"the layout {text} does not fit a shape of {shape} in {files} files")
    if isinstance(layout.form, Grid):  # a fast path, for all owners at once
        row, owner = layout.form.holders.expand(layout.form.cells.block)
        return StoredParts(layout.shape, DTYPES[dtype], HashableBoxes(layout.form.cells.boxes.take(row)), owner, {})
    pieces = [(owner, piece) for owner in layout.owners() for piece in layout.pieces(owner)]
    boxes = Boxes.of([piece.box for _, piece in pieces], layout.ndim)
    owners = ints([owner for owner, _ in pieces])
    return StoredParts(layout.shape, DTYPES[dtype], HashableBoxes(boxes), owners, {})


def _locate(headers: Headers, name: str, parts: StoredParts, rows: Ints) -> Positions:
    starts = list[int]()
    for number, ending, shape in map(parts.part, rows.tolist()):
        key = name + ending
        tensor = headers.of(number).tensors.get(key)
        if tensor is None or tensor.dtype != parts.dtype or tensor.shape != shape:
            actual = "does not have it" if tensor is None else f"has {tensor.dtype} of shape {tensor.shape}"
            where = headers.files.label(headers.names[number])
            raise CheckpointError(
                f"{where} should have {key!r}, {parts.dtype} of shape {shape}, but {actual}: "
                f"it is not the file that the index was written for"
            )
        starts.append(tensor.start)
    return Positions(ints(starts))
