"""torch.distributed.checkpoint: a pickle lists the boxes of every tensor, and the bytes of files that hold them.

Every box is a torch.save archive of its own, which is read when its cells are needed.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import cache, lru_cache
from math import prod
from pickle import UnpicklingError
from typing import NamedTuple

import numpy as np
import torch

from shardwise.checkpoint.entry import Checkpoint, Entry, HashableBoxes, LazyMapping, Positions
from shardwise.checkpoint.files import ByteRange, FileLabel, Files
from shardwise.checkpoint.formats.archives import BEGIN, Archive, ArchiveTemplates, read_archives, tensor_reader
from shardwise.checkpoint.formats.dcp_variants import ZSTD, CompressedFiles, EmbeddedTensors
from shardwise.checkpoint.pickles import MAX_DEPTH, Budget, unpickle, without_stubs
from shardwise.checkpoint.unpickle_stubs import MAX_SIZE, FunctionStub, NameStub, RecordStub, sizes
from shardwise.containers.torch_private import OLD_SHARD_MODULE
from shardwise.errors import CheckpointError
from shardwise.geometry import Boxes, Ints, exact_sum, ints
from shardwise.quoting import brief
from shardwise.state.traverse import OBJ_PATH, PATH_ITEM, Key, Place, get_element
from shardwise.storage.paths import inside
from shardwise.storage.sums import damaged, without_trailer

METADATA, TIED, SUMS = ".metadata", "shardwise_tied", "shardwise_sums"
ABSENT = object()
WHOLE = -1  # the stop of bytes that end where their file does
DcpPath = tuple[str | int | float | tuple[int], ...]  # a path as `.metadata` has it
ChunkKey = tuple[tuple[int, ...], tuple[int, ...]]  # offsets and sizes


class Metadata(RecordStub):
    """Of the whole checkpoint."""

    __slots__ = ()


class TensorMetadata(RecordStub):
    """Of a tensor."""

    __slots__ = ()


class BytesMetadata(RecordStub):
    """Of another value."""

    __slots__ = ()


NAMES = {
    **{
        ("torch.distributed.checkpoint.metadata", name): kind
        for name, kind in {
            "Metadata": Metadata,
            "TensorStorageMetadata": TensorMetadata,
            "BytesStorageMetadata": BytesMetadata,
            "ChunkStorageMetadata": RecordStub,
            "MetadataIndex": RecordStub,
            "TensorProperties": RecordStub,  # a tuple that begins with the dtype
            "StorageMeta": RecordStub,
            "_MEM_FORMAT_ENCODING": FunctionStub(NameStub),
        }.items()
    },
    **{  # of the plans that Megatron leaves in the metadata
        ("torch.distributed.checkpoint.planner", name): kind
        for name, kind in {
            "SavePlan": RecordStub,
            "WriteItem": RecordStub,
            "TensorWriteData": RecordStub,
            "BytesIOWriteData": RecordStub,
            "WriteItemType": FunctionStub(NameStub),
        }.items()
    },
    ("megatron.core.dist_checkpointing.strategies.torch", "MCoreMetadata"): Metadata,
    ("megatron.core.dist_checkpointing.strategies.torch", "MCoreSavePlan"): RecordStub,
    (OLD_SHARD_MODULE, "TensorProperties"): RecordStub,
    (OLD_SHARD_MODULE, "MEM_FORMAT_ENCODING"): FunctionStub(NameStub),
    ("torch.distributed.checkpoint.filesystem", "_StorageInfo"): RecordStub,
    ("torch.distributed.checkpoint.filesystem", "_StoragePrefix"): RecordStub,
    ("torch", "Size"): FunctionStub(sizes),
}


class StorageTable(NamedTuple):
    """Where everything is: row `rows[name, lo]` of the columns; `lo` is None for values that are not tensors."""

    rows: dict[tuple[str, tuple[int, ...] | None], int]
    file: Ints
    start: Ints
    stop: Ints
    paths: list[str]
    files: Files

    def uncompressed(self, rows: list[int]) -> StorageTable:
        """The same with some rows as files of their own."""
        if not rows:
            return self
        files, paths, file, start, stop = CompressedFiles(self.files), [*self.paths], *map(np.copy, self[1:4])
        for row in rows:
            where = ByteRange(self.paths[self.file[row]], int(self.start[row]), int(self.stop[row]))
            file[row], start[row], stop[row] = len(paths), 0, WHOLE
            paths.append(files.add(where))
        return StorageTable(self.rows, file, start, stop, paths, files)

    def ranges(self, rows: Ints, names: Sequence[str]) -> list[ByteRange]:
        """The bytes of some rows; refused if the file is shorter."""
        files, columns = self.files, (column[rows].tolist() for column in (self.file, self.start, self.stop))
        ranges = [ByteRange(self.paths[file], start, stop) for file, start, stop in zip(*columns, strict=True)]
        ranges = [one._replace(stop=files.size(one.file)) if one.stop == WHOLE else one for one in ranges]
        for one, name in zip(ranges, names, strict=True):
            size = files.size(one.file)
            if one.stop > size:
                raise CheckpointError(
                    f"{files.label(one.file)} has {size} bytes, but {name!r} should be at bytes {one.start} to "
                    f"{one.stop}: it is truncated, or belongs to another checkpoint"
                )
        return ranges


class Index(NamedTuple):
    """The contents of `.metadata`. `intact`: a digest of it proves that; without one, it is None."""

    where: FileLabel
    metadata: Metadata
    budget: Budget
    intact: bool | None

    @property
    def has_paths(self) -> bool:
        """True where torch's planner wrote the paths of nested names."""
        return bool(self.metadata.get("planner_data"))


def read_index(files: Files) -> Index:
    """Read `.metadata`."""
    where = files.label(METADATA)
    data, intact = without_trailer(files.read(METADATA))
    if intact is False:
        raise damaged(where)
    metadata, budget = unpickle(data, where, NAMES), Budget(len(data))
    if not isinstance(metadata, Metadata):
        raise _not_dcp(where)
    if metadata.get(SUMS) is not None and not intact:
        raise damaged(where)
    return Index(where, metadata, budget, intact)


def open_dcp(files: Files, index: Index | None = None) -> Checkpoint:
    """The tensors and values that `.metadata` lists."""
    where, metadata, budget, intact = index or read_index(files)
    described, stored = _described(where, metadata)
    paths = _paths(where, metadata, len(described))
    with _well_formed(where, "storage_data"):
        tied = _tied(metadata.get(TIED))
        table = _table(files, stored, tied)
    entries, values, contents = dict[str, Entry](), dict[str, int](), BoxContents(table.files)
    for name, kind in described.items():
        with _well_formed(where, name):
            if isinstance(kind, TensorMetadata):
                entries[name] = _entry(name, kind, table, contents, budget, tied.get(name, name))
            elif isinstance(kind, BytesMetadata):
                values[name] = table.rows[name, None]
            elif isinstance(kind, dict):
                continue  # a skeleton, for torch
            else:
                raise TypeError("it is neither a tensor nor a value")
    inner = _inner_leaves(paths, values)
    whole = values.keys() - {leaf.outer for leaf in inner.values()}
    nested = {name: path for name, path in paths.items() if name in entries or name in inner or name in whole}
    checkpoint = Checkpoint(files, "dcp", entries, paths=nested, objects=lambda: _lazy_values(table, values, inner))
    checkpoint.sums = intact is True
    return checkpoint


def _not_dcp(where: object) -> CheckpointError:
    return CheckpointError(f"{where} does not describe a checkpoint of torch.distributed in files")


def _described(where: object, metadata: Metadata) -> tuple[dict[str, object], dict[RecordStub, RecordStub]]:
    """What the checkpoint has, and where it is stored."""
    described, stored = metadata.get("state_dict_metadata"), metadata.get("storage_data")
    if not isinstance(described, dict) or not isinstance(stored, dict) or not all(type(n) is str for n in described):
        raise _not_dcp(where)
    return described, stored


def _paths(where: object, metadata: Metadata, count: int) -> dict[str, OBJ_PATH]:
    """The paths of nested names. Other planners write something else there, which is ignored."""
    nested = metadata.get("planner_data")
    pairs = nested.items() if isinstance(nested, dict) else ()
    paths = {name: path for name, path in pairs if type(name) is str and isinstance(path, tuple) and path}
    if any(len(path) > MAX_DEPTH for path in paths.values()):
        raise CheckpointError(f"{where}: its planner_data has paths of more than {MAX_DEPTH} names and numbers")
    names = max(count, len(paths))
    return {name: tuple(_step_of(key, names, where) for key in path) for name, path in paths.items()}


def _step_of(key: object, names: int, where: object) -> PATH_ITEM:
    """A key of a path: floats are int keys of dicts, 1-tuples are positions in tuples, ints are positions in lists.

    An int that is larger than any list of so few names is a key.
    """
    if type(key) is float and key.is_integer():
        return Key(int(key))
    if type(key) is tuple and len(key) == 1 and type(key[0]) is int:
        if not 0 <= key[0] < names:
            raise CheckpointError(f"{where}: its planner_data has positions in tuples that {names} names cannot have")
        return Place(key[0])
    if type(key) is int and not 0 <= key < names:
        return Key(key)
    if type(key) is str or type(key) is int:
        return key
    raise CheckpointError(f"{where}: its planner_data has paths with something else than names and numbers")


def _inner_leaves(paths: Mapping[str, OBJ_PATH], values: Mapping[str, int]) -> dict[str, InnerLeaf]:
    """The leaves inside values."""
    outer, leaves = {paths[name]: name for name in values if name in paths}, dict[str, InnerLeaf]()
    for name, path in paths.items():
        ends = range(1, min(len(path), MAX_DEPTH))
        around = next((path[:end] for end in ends if path[:end] in outer), None) if name not in values else None
        if around is not None:
            leaves[name] = InnerLeaf(outer[around], path[len(around) :])
    return leaves


@contextmanager
def _well_formed(where: object, what: str) -> Iterator[None]:
    """Turn errors about missing or wrong fields into a CheckpointError that names the item."""
    try:
        yield
    except (LookupError, AttributeError, TypeError, ValueError, ArithmeticError, UnpicklingError) as error:
        why = f"no file has {error.args[0]!r}" if isinstance(error, KeyError) else str(error)
        raise CheckpointError(f"{where}: the description of {what!r} is invalid: {why}") from error


def _tied(field: object) -> dict[str, str]:
    """The names that share the bytes of another one; only our writer notes them. torch writes every name's bytes."""
    tied = {} if field is None else field
    if type(tied) is not dict or not all(type(name) is str for pair in tied.items() for name in pair):
        raise TypeError(f"{TIED} is {brief(field)}")
    return tied


def _table(files: Files, stored: Mapping[RecordStub, RecordStub], tied: Mapping[str, str]) -> StorageTable:
    indexes, infos = [index.state for index in stored], [info.state for info in stored.values()]
    keys = [(index["fqn"], index.get("offset")) for index in indexes]
    rows = {key: row for row, key in enumerate(keys)}
    if len(rows) < len(keys):
        twice = next(key for row, key in enumerate(keys) if rows[key] != row)
        raise ValueError(f"{twice[0]!r} is stored twice from {twice[1]} on")
    names = [info["relative_path"] for info in infos]
    number = {name: at for at, name in enumerate(sorted(set(names)))}
    start, length = (_numbers([info[field] for info in infos]) for field in ("offset", "length"))
    paths = [inside(name, files.label(METADATA)) for name in number]
    table = StorageTable(rows, ints([number[name] for name in names]), start, start + length, paths, files)
    again = [row for row, (name, _) in enumerate(keys) if name in tied] if tied else []
    other = next((keys[row][0] for row in again if not _is_again(table, row, tied[keys[row][0]], keys[row][1])), None)
    if other is not None:
        raise ValueError(f"{other!r} is tied to {tied[other]!r}, but has other bytes")
    _check_apart(files, table, keys, np.delete(np.arange(len(keys)), ints(again)))
    return table.uncompressed(_compressed(files, keys, infos))


def _compressed(files: Files, keys: Sequence[tuple[str, object]], infos: Sequence[Mapping[str, object]]) -> list[int]:
    """The rows that are compressed."""
    transformed = [row for row, info in enumerate(infos) if info.get("transform_descriptors")]
    for row in transformed:
        how = infos[row]["transform_descriptors"]
        if not isinstance(how, list | tuple) or [str(one).partition(".") for one in how] != [ZSTD.partition(".")]:
            raise CheckpointError(
                f"{files.label(METADATA)}: {keys[row][0]!r} went through {brief(how)} when saved, which shardwise "
                f"cannot read. Remedy: load it with torch.distributed.checkpoint, and save it without transforms"
            )
    return transformed


def _is_again(table: StorageTable, row: int, other: str, lo: tuple[int, ...] | None) -> bool:
    """True if a box has the bytes of the same box of another tensor."""
    first = None if lo is None else table.rows.get((other, lo))
    if first is None or first == row:
        return False
    return all(column[row] == column[first] for column in (table.file, table.start, table.stop))


def _numbers(values: list[int]) -> Ints:
    if not all(type(value) is int and 0 <= value < MAX_SIZE for value in values):
        raise ValueError("positions in files must be whole numbers")
    return ints(values)


def _check_apart(files: Files, table: StorageTable, keys: Sequence[tuple[str, object]], rows: Ints) -> None:
    """Refuse bytes that belong to two boxes."""
    order = rows[np.lexsort((table.start[rows], table.file[rows]))]
    file, start, stop = table.file[order], table.start[order], table.stop[order]
    both = np.flatnonzero((file[1:] == file[:-1]) & (start[1:] < stop[:-1]))
    if not len(both):
        return
    same = both[start[both] == start[both + 1]]  # tensors in safetensors form begin where the first one does
    places = {(table.paths[file[at]], int(start[at])) for at in same.tolist()}
    embedded = {place for place in places if not _is_archive(files, *place)}
    at = next((at for at in both.tolist() if (table.paths[file[at]], int(start[at])) not in embedded), None)
    if at is None:
        return
    name, first, second = table.paths[file[at]], keys[order[at]][0], keys[order[at + 1]][0]
    raise ValueError(
        f"{files.label(name)}: bytes {start[at + 1]} to {stop[at]} belong to both {first!r} and {second!r}: "
        f"one of them was overwritten"
    )


def _is_archive(files: Files, name: str, start: int) -> bool:
    return files.read(name, start, start + len(BEGIN)) == BEGIN


class BoxContents:
    """Finds elements in the bytes of boxes: archives, or tensors in safetensors form, which have no byte more."""

    def __init__(self, files: Files) -> None:
        self._archives, self._embedded = ArchiveTemplates(files), EmbeddedTensors(files)

    def locate(self, ranges: Sequence[ByteRange], boxes: Boxes, name: str, dtype: torch.dtype) -> Positions:
        """The elements of boxes of a tensor, each in some bytes."""
        least = (boxes.volumes() * dtype.itemsize).tolist()
        embedded = all(one.stop - one.start == size for one, size in zip(ranges, least, strict=True))
        return (self._embedded if embedded else self._archives).locate(ranges, boxes, name, dtype)


def _entry(
    name: str,
    metadata: TensorMetadata,
    table: StorageTable,
    contents: BoxContents,
    budget: Budget,
    own: str,
) -> Entry:
    fields = metadata.state
    shape, dtype = sizes(fields["size"]), fields["properties"].state[0]
    if not isinstance(dtype, torch.dtype) or prod(shape) * dtype.itemsize >= MAX_SIZE:
        raise ValueError(f"its dtype is {brief(dtype)}, its shape {shape}")
    budget.spend(len(fields["chunks"]))
    chunks = tuple((chunk.state["offsets"], chunk.state["sizes"]) for chunk in fields["chunks"])
    stored = _boxes(shape, chunks)
    rows = ints([table.rows[name, lo] for lo, size in chunks if 0 not in size])

    def locate(some: Ints) -> Positions:
        ranges = table.ranges(rows[some], [name] * len(some))
        return contents.locate(ranges, stored.boxes.take(some), name, dtype)

    return Entry(name, shape, dtype, stored, table.file[rows], locate, table.paths, table.files, own)


@lru_cache(maxsize=1024)
def _boxes(shape: tuple[int, ...], chunks: tuple[ChunkKey, ...]) -> HashableBoxes:
    """The chunks that have cells. torch saves every cell once. Cached: many tensors have the same chunks."""
    both = np.array(chunks, dtype=np.int64).reshape(len(chunks), 2, len(shape)).swapaxes(0, 1)
    lo, hi, whole = both[0], both.sum(axis=0), ints(shape)
    if prod(size + 1 for size in shape) >= MAX_SIZE or ((both < 0) | (both > whole)).any() or (hi > whole).any():
        raise ValueError(f"a box is outside its shape {shape}")
    boxes = Boxes(lo, hi) if both[1].all() else Boxes(lo, hi).take(both[1].all(axis=1))
    cells = exact_sum(boxes.volumes())
    if cells != prod(shape):
        raise ValueError(f"its boxes have {cells} cells, but its shape {shape} has {prod(shape)}")
    return HashableBoxes(boxes)


class InnerLeaf(NamedTuple):
    """A leaf inside a value."""

    outer: str
    path: OBJ_PATH


def _lazy_values(table: StorageTable, rows: Mapping[str, int], inner: Mapping[str, InnerLeaf]) -> LazyMapping[object]:
    """Values that are not tensors, with the leaves inside values in their place: fetched together, made one by one."""
    leaves, files = defaultdict[str, list[str]](list), table.files
    for name, leaf in inner.items():
        leaves[leaf.outer].append(name)

    @cache
    def archives() -> dict[str, Archive]:
        return dict(zip(rows, read_archives(files, table.ranges(ints([*rows.values()]), [*rows])), strict=True))

    def whole(name: str) -> object:
        archive = archives()[name]
        return without_stubs(archive.root(), f"{name!r} in {archive.where}", tensor_reader(files, archive, name))

    wholes = LazyMapping(rows, whole)

    def value(name: str) -> object:
        if name not in inner:
            return wholes[name]
        outer, path = inner[name]
        value = get_element({outer: wholes[outer]}, (outer, *path), ABSENT)
        if value is ABSENT:
            raise CheckpointError(f"{files.label(METADATA)}: the value {outer!r} has no {name!r}")
        return value

    return LazyMapping(dict.fromkeys(leaf for name in rows for leaf in leaves.get(name, [name])), value)
