"""torch.distributed.checkpoint: a pickle that says which boxes of which tensors lie in which bytes of which files.

Every box is a torch.save archive of its own. They are looked into when their cells are asked for, not before.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import cached_property, lru_cache
from math import prod
from pickle import UnpicklingError
from typing import Any, NamedTuple

import numpy as np
import torch

from shardwise.checkpoint.entry import Alike, Checkpoint, Entry, Located
from shardwise.checkpoint.files import Files, Span, inside
from shardwise.checkpoint.formats.dcp_nesting import step_of
from shardwise.checkpoint.formats.moulds import Moulds
from shardwise.checkpoint.formats.torch_save import Archive, read_archives, reader
from shardwise.checkpoint.pickles import DEEPEST, Budget, settled, unpickle
from shardwise.checkpoint.standins import MOST, Call, Name, Record, sizes
from shardwise.checkpoint.zips import BEGIN
from shardwise.errors import CheckpointError
from shardwise.geometry import Boxes, Ints, exact_sum, ints
from shardwise.quoting import brief
from shardwise.state.traverse import Key, Place, get_element

METADATA, TIED = ".metadata", "shardwise_tied"
LOST = object()


class Metadata(Record):
    """Of the whole checkpoint."""

    __slots__ = ()


class TensorMetadata(Record):
    """Of a tensor."""

    __slots__ = ()


class BytesMetadata(Record):
    """Of another value."""

    __slots__ = ()


class Chunk(Record):
    """A box of a tensor."""

    __slots__ = ()


class Index(Record):
    """A name, and the first cell of a box."""

    __slots__ = ()


class Properties(Record):
    """A tuple that begins with the dtype."""

    __slots__ = ()


class Stored(Record):
    """Which bytes of which file hold a box or a value."""

    __slots__ = ()


class Saved(Record):
    """When and where it was saved; not looked at."""

    __slots__ = ()


NAMES = {
    **{
        ("torch.distributed.checkpoint.metadata", name): kind
        for name, kind in {
            "Metadata": Metadata,
            "TensorStorageMetadata": TensorMetadata,
            "BytesStorageMetadata": BytesMetadata,
            "ChunkStorageMetadata": Chunk,
            "MetadataIndex": Index,
            "TensorProperties": Properties,
            "StorageMeta": Saved,
            "_MEM_FORMAT_ENCODING": Call(Name),
        }.items()
    },
    ("torch.distributed._shard.sharded_tensor.metadata", "TensorProperties"): Properties,  # up to torch 2.2
    ("torch.distributed._shard.sharded_tensor.metadata", "MEM_FORMAT_ENCODING"): Call(Name),
    ("torch.distributed.checkpoint.filesystem", "_StorageInfo"): Stored,
    ("torch", "Size"): Call(sizes),
}


class Table(NamedTuple):
    """Where everything is: row `rows[name, lo]` of the columns; `lo` is None for what is no tensor."""

    rows: dict[tuple[str, tuple[int, ...] | None], int]
    file: Ints
    start: Ints
    stop: Ints
    paths: list[str]

    def spans(self, files: Files, rows: Ints, names: Sequence[str]) -> list[Span]:
        """The bytes of some rows; refused where a file does not have them."""
        columns = (column[rows].tolist() for column in (self.file, self.start, self.stop))
        found = [Span(self.paths[file], start, stop) for file, start, stop in zip(*columns, strict=True)]
        for span, name in zip(found, names, strict=True):
            size = files.size(span.file)
            if span.stop > size:
                raise CheckpointError(
                    f"{files.shown(span.file)} has {size} bytes, but {name!r} should lie in bytes {span.start} to "
                    f"{span.stop}: it is truncated, or belongs to another checkpoint"
                )
        return found


def open_dcp(files: Files) -> Checkpoint:
    """The tensors and values that `.metadata` lists."""
    where = files.shown(METADATA)
    data = files.read(METADATA)
    said, budget = unpickle(data, where, NAMES), Budget(len(data))
    described, stored, paths = _parts(where, said)
    with _sound(where, "its storage_data"):
        tied = _tied(said.get(TIED))
        table = _table(files, stored, tied)
    entries, values, moulds = dict[str, Entry](), dict[str, int](), Moulds(files)
    for name, kind in described.items():
        with _sound(where, name):
            if isinstance(kind, TensorMetadata):
                entries[name] = _entry(files, name, kind, table, moulds, budget, tied.get(name, name))
            elif isinstance(kind, BytesMetadata):
                values[name] = table.rows[name, None]
            elif isinstance(kind, dict):
                continue  # a skeleton, for torch
            else:
                raise TypeError("it is neither a tensor nor a value")
    inner = _inner(paths, values)
    whole = values.keys() - {leaf.outer for leaf in inner.values()}
    nested = {name: path for name, path in paths.items() if name in entries or name in inner or name in whole}
    return Checkpoint(files, "dcp", entries, paths=nested, objects=lambda: Values(files, table, values, inner))


def _parts(where: str, said: Any) -> tuple[dict[str, Any], dict[Any, Any], dict[str, tuple[Any, ...]]]:
    """What is described, where it is stored, and the paths of nested names."""
    fields = ("state_dict_metadata", "storage_data", "planner_data")
    described, stored, nested = (said.get(field) if isinstance(said, Metadata) else None for field in fields)
    if not isinstance(described, dict) or not isinstance(stored, dict) or not all(type(n) is str for n in described):
        raise CheckpointError(f"{where} does not describe a checkpoint of torch.distributed in files")
    nested = nested if isinstance(nested, dict) else {}  # which planners of others write is theirs
    paths = {name: path for name, path in nested.items() if type(name) is str and isinstance(path, tuple) and path}
    if any(len(path) > DEEPEST for path in paths.values()):
        raise CheckpointError(f"{where}: its planner_data has paths of more than {DEEPEST} names and numbers")
    steps = {name: tuple(map(step_of, path)) for name, path in paths.items()}
    if any(key is None for path in steps.values() for key in path):
        raise CheckpointError(f"{where}: its planner_data has paths of other things than names and numbers")
    names = max(len(described), len(steps))
    if any(isinstance(key, Place) and not 0 <= key < names for path in steps.values() for key in path):
        raise CheckpointError(f"{where}: its planner_data has places in tuples that {names} names cannot have")
    return described, stored, {name: _in_lists(path, names) for name, path in steps.items()}


def _in_lists(path: tuple[Any, ...], names: int) -> tuple[Any, ...]:
    """Numbers are places in lists. Those that no list of so few names can have are keys."""
    return tuple(Key(key) if type(key) is int and not 0 <= key < names else key for key in path)


def _inner(paths: Mapping[str, tuple[Any, ...]], values: Mapping[str, int]) -> dict[str, Inner]:
    """The leaves that lie inside of values."""
    outer, found = {paths[name]: name for name in values if name in paths}, dict[str, Inner]()
    for name, path in paths.items():
        ends = range(1, min(len(path), DEEPEST))
        around = next((path[:end] for end in ends if path[:end] in outer), None) if name not in values else None
        if around is not None:
            found[name] = Inner(outer[around], path[len(around) :])
    return found


@contextmanager
def _sound(where: str, what: str) -> Iterator[None]:
    """What Python says of a field that is missing, or is something else, as an error that names it."""
    try:
        yield
    except (LookupError, AttributeError, TypeError, ValueError, ArithmeticError, UnpicklingError) as error:
        lost = f"no file has {error.args[0]!r}" if isinstance(error, KeyError) else str(error)
        raise CheckpointError(f"{where}: {what!r} is not described as it should be: {lost}") from error


def _tied(said: Any) -> dict[str, str]:
    """The names whose bytes are those of another one, as we note them: torch writes the bytes of every name apart."""
    found = {} if said is None else said
    if type(found) is not dict or not all(type(name) is str for pair in found.items() for name in pair):
        raise TypeError(f"{TIED} is {brief(said)}")
    return found


def _table(files: Files, stored: Mapping[Index, Stored], tied: Mapping[str, str]) -> Table:
    indexes, infos = [index.state for index in stored], [info.state for info in stored.values()]
    keys = [(index["fqn"], index.get("offset")) for index in indexes]
    for key, info in zip(keys, infos, strict=True):
        if info.get("transform_descriptors"):
            raise CheckpointError(
                f"{files.shown(METADATA)}: {key[0]!r} went through {brief(info['transform_descriptors'])} when saved, "
                f"which cannot be read here. Remedy: load it with torch.distributed.checkpoint, and save it without"
            )
    rows = {key: row for row, key in enumerate(keys)}
    if len(rows) < len(keys):
        twice = next(key for row, key in enumerate(keys) if rows[key] != row)
        raise ValueError(f"{twice[0]!r} is stored twice from {twice[1]} on")
    names = [info["relative_path"] for info in infos]
    number = {name: at for at, name in enumerate(sorted(set(names)))}
    start, length = (_numbers([info[field] for info in infos]) for field in ("offset", "length"))
    paths = [inside(name, files.shown(METADATA)) for name in number]
    table = Table(rows, ints([number[name] for name in names]), start, start + length, paths)
    again = [row for row, (name, _) in enumerate(keys) if name in tied] if tied else []
    other = next((keys[row][0] for row in again if not _is_again(table, row, tied[keys[row][0]], keys[row][1])), None)
    if other is not None:
        raise ValueError(f"{other!r} is tied to {tied[other]!r}, but has other bytes")
    _check_apart(files, table, keys, np.delete(np.arange(len(keys)), ints(again)))
    return table


def _is_again(table: Table, row: int, other: str, lo: tuple[int, ...] | None) -> bool:
    """True for a box whose bytes are those of the same box of another tensor."""
    first = None if lo is None else table.rows.get((other, lo))
    if first is None or first == row:
        return False
    return all(column[row] == column[first] for column in (table.file, table.start, table.stop))


def _numbers(values: list[Any]) -> Ints:
    if not all(type(value) is int and 0 <= value < MOST for value in values):
        raise ValueError("bytes of files are whole numbers")
    return ints(values)


def _check_apart(files: Files, table: Table, keys: Sequence[tuple[str, Any]], rows: Ints) -> None:
    """Bytes are those of one box each."""
    order = rows[np.lexsort((table.start[rows], table.file[rows]))]
    file, start, stop = table.file[order], table.start[order], table.stop[order]
    both = np.flatnonzero((file[1:] == file[:-1]) & (start[1:] < stop[:-1]))
    if not len(both):
        return
    at = int(both[0])
    name, first, second = table.paths[file[at]], keys[order[at]][0], keys[order[at + 1]][0]
    if start[at] == start[at + 1] and files.read(name, int(start[at]), int(start[at]) + 4) != BEGIN:
        why = "tensors in safetensors form are not read from .distcp files"
    else:
        why = "one of them was overwritten"
    raise ValueError(
        f"{files.shown(name)}: bytes {start[at + 1]} to {stop[at]} belong both to {first!r} and to {second!r}: {why}"
    )


def _entry(
    files: Files, name: str, said: TensorMetadata, table: Table, moulds: Moulds, budget: Budget, own: str
) -> Entry:
    shape, dtype = sizes(said.state["size"]), said.state["properties"].state[0]
    if not isinstance(dtype, torch.dtype) or prod(shape) * dtype.itemsize >= MOST:
        raise ValueError(f"its dtype is {brief(dtype)}, its shape {shape}")
    budget.spend(len(said.state["chunks"]))
    chunks = tuple((chunk.state["offsets"], chunk.state["sizes"]) for chunk in said.state["chunks"])
    alike = _boxes(shape, chunks)
    rows = ints([table.rows[name, lo] for lo, size in chunks if 0 not in size])

    def locate(some: Ints) -> Located:
        return moulds.located(table.spans(files, rows[some], [name] * len(some)), alike.boxes.take(some), name, dtype)

    return Entry(name, shape, dtype, alike, table.file[rows], locate, table.paths, files, own)


@lru_cache(maxsize=1024)
def _boxes(shape: tuple[int, ...], chunks: tuple[Any, ...]) -> Alike:
    """Of all chunks that have cells. What torch saves has every cell once. Kept: tensors of one shape lie alike."""
    both = np.array(chunks, dtype=np.int64).reshape(len(chunks), 2, len(shape)).swapaxes(0, 1)
    lo, hi, whole = both[0], both.sum(axis=0), ints(shape)
    if prod(size + 1 for size in shape) >= MOST or ((both < 0) | (both > whole)).any() or (hi > whole).any():
        raise ValueError(f"a box of it does not lie inside of its shape {shape}")
    boxes = Boxes(lo, hi) if both[1].all() else Boxes(lo, hi).take(both[1].all(axis=1))
    cells = exact_sum(boxes.volumes())
    if cells != prod(shape):
        raise ValueError(f"its boxes have {cells} cells, but its shape {shape} has {prod(shape)}")
    return Alike(boxes)


class Inner(NamedTuple):
    """A leaf inside of a value."""

    outer: str
    path: tuple[Any, ...]


class Values(Mapping[str, Any]):
    """What is no tensor: all of it is fetched together, and each value is made when it is asked for."""

    def __init__(self, files: Files, table: Table, rows: Mapping[str, int], inner: Mapping[str, Inner]) -> None:
        self._files, self._table, self._rows, self._inner = files, table, rows, inner
        self._made = dict[str, Any]()

    @cached_property
    def _names(self) -> dict[str, None]:
        """With the leaves of values in their place."""
        leaves = dict[str, list[str]]()
        for name, (outer, _) in self._inner.items():
            leaves.setdefault(outer, []).append(name)
        return dict.fromkeys(leaf for name in self._rows for leaf in leaves.get(name, [name]))

    @cached_property
    def _archives(self) -> dict[str, Archive]:
        names = list(self._rows)
        spans = self._table.spans(self._files, ints(list(self._rows.values())), names)
        return dict(zip(names, read_archives(self._files, spans), strict=True))

    def __getitem__(self, name: str) -> Any:
        if name not in self._inner:
            return self._value(name)
        outer, path = self._inner[name]
        value = get_element({outer: self._value(outer)}, (outer, *path), LOST)
        if value is LOST:
            raise CheckpointError(f"{self._files.shown(METADATA)}: {name!r} should lie in the value {outer!r}")
        return value

    def __repr__(self) -> str:
        return repr(dict(self))

    def _value(self, name: str) -> Any:
        if name in self._rows and name not in self._made:
            archive = self._archives[name]
            what, tensor = f"{name!r} in {archive.where}", reader(self._files, archive, name)
            self._made[name] = settled(archive.root(), what, tensor)
        return self._made[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._names)

    def __len__(self) -> int:
        return len(self._names)
