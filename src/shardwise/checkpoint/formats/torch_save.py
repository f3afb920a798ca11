"""torch.save files: one archive with nested dicts of tensors and other values, or several with an index.

`archive_of` describes an archive; its tensors are written one after the other, so that none has to be in memory.
"""

from __future__ import annotations

import io
import pickle
import re
from collections import OrderedDict
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from functools import lru_cache, partial
from itertools import chain
from math import prod
from typing import IO, Any

import numpy as np
import torch

from shardwise.checkpoint.entry import Checkpoint, Entry, Positions, whole_box
from shardwise.checkpoint.files import ByteRange, Files
from shardwise.checkpoint.formats.archives import BEGIN, Archive, data_starts, read_archives, tensor_reader
from shardwise.checkpoint.formats.partitioned import check_has_weights
from shardwise.checkpoint.formats.rank_shards import shard_entry
from shardwise.checkpoint.formats.safetensors import open_indexed as open_by_index
from shardwise.checkpoint.formats.writers import Contents, TensorPart, Writer, check_keys, check_overlaps
from shardwise.checkpoint.formats.zips import archive_segments
from shardwise.checkpoint.opaque import Opaque, OpaqueError, UnknownObject, is_unknown_class, opaque_in
from shardwise.checkpoint.pickles import count_tensors, refuse, without_stubs
from shardwise.checkpoint.segments import Checksum, Data, Segment, write_segments, write_tensor
from shardwise.checkpoint.shard_stubs import ShardStub
from shardwise.checkpoint.unpickle_stubs import TensorStub
from shardwise.containers.sharded import is_sharded
from shardwise.containers.torch_private import rebuild_tensor, rebuild_typed_tensor
from shardwise.errors import CheckpointError
from shardwise.geometry import Ints, ints, row_major
from shardwise.state.traverse import OBJ_PATH, flatten_state_dict, unflatten_state_dict
from shardwise.storage.folders import OutputFolder

Reduction = tuple[Callable[..., object], tuple[object, ...]]
IMPORTABLE = re.compile(r"\w+(\.\w+)*")
TYPED_STORAGES = {
    torch.float32: torch.FloatStorage,
    torch.float64: torch.DoubleStorage,
    torch.float16: torch.HalfStorage,
    torch.bfloat16: torch.BFloat16Storage,
    torch.int64: torch.LongStorage,
    torch.int32: torch.IntStorage,
    torch.int16: torch.ShortStorage,
    torch.int8: torch.CharStorage,
    torch.uint8: torch.ByteStorage,
    torch.bool: torch.BoolStorage,
    torch.complex64: torch.ComplexFloatStorage,
    torch.complex128: torch.ComplexDoubleStorage,
}
LEGACY = b"\x80\x02\x8a\nl\xfc\x9cF\xf9 j\xa8P\x19"  # how files of torch before 1.6 begin
RESAVE = "load it with torch.load and save it again with torch.save"
ENDINGS = (".pt", ".pth", ".bin", ".ckpt")


def looks_like_one(files: Files, name: str) -> bool:
    """True for a file that begins as one, whatever its name; also for old ones, which are refused with a reason."""
    start = files.read(name, 0, min(512, files.size(name)))
    known = name.endswith(ENDINGS) or b"/data.pkl" in start
    return start.startswith(LEGACY) or (start.startswith(BEGIN) and known)


def open_files(
    files: Files, names: Sequence[str], expected: Mapping[str, str] | None = None, *, ranks: bool = False
) -> Checkpoint:
    """The tensors and values of some files; `expected`: the file of each, by an index.

    `ranks`: they are of several ranks, and what is not sharded is in each of them.
    """
    entries, paths, values = dict[str, Entry](), dict[str, OBJ_PATH](), dict[str, tuple[Archive, object]]()
    shards = dict[str, list[tuple[int, Archive, ShardStub]]]()
    for number, file in enumerate(names):
        archive = read_archive(files, file)
        flat, nested = _flat(archive)
        for name, value in flat.items():
            if expected is not None and expected.get(name, file) != file:
                continue  # another file has it, too
            if isinstance(value, ShardStub) and (name in shards or name not in paths):
                shards.setdefault(name, []).append((number, archive, value))
                paths[name] = nested[name]
                continue
            if name in paths and ranks:
                continue
            if name in paths:
                raise CheckpointError(
                    f"{name!r} is in {files.label(file)} and in another file: add an index that says which one counts"
                )
            paths[name] = nested[name]
            if isinstance(value, TensorStub):
                entries[name] = tensor_entry(name, value, archive, number, names, files)
            else:
                values[name] = archive, value
    entries |= {name: shard_entry(name, found, names, files) for name, found in shards.items()}
    _check_hidden(values.values() if not entries else ())
    for name, file in (expected or {}).items():
        if name not in paths:
            raise CheckpointError(f"{files.label(file)} does not have {name!r}, although the index says so")
    return Checkpoint(files, "torch.save", entries, paths=paths, objects=lambda: objects_of(files, values))


def has_shards(files: Files, name: str) -> bool:
    """True for a file with parts of sharded tensors."""
    return any(isinstance(value, ShardStub) for value in _flat(read_archive(files, name))[0].values())


def _check_hidden(values: Iterable[tuple[Archive, object]]) -> None:
    """Refuse files with all tensors inside objects of unknown classes, such as whole models."""
    for archive, value in values:
        if isinstance(value, UnknownObject) and count_tensors(value):
            refuse(archive.where, value.module, value.qualname)


def open_indexed(files: Files, index: str) -> Checkpoint:
    """The files that an index lists."""
    return open_by_index(files, index, open_files)


def read_archive(files: Files, name: str) -> Archive:
    """What a file has, without the tensors."""
    size = files.size(name)
    start = files.read(name, 0, min(len(LEGACY), size))
    if start.startswith(LEGACY):
        raise CheckpointError(f"{files.label(name)} is from before torch 1.6. Remedy: {RESAVE}")
    if not start.startswith(BEGIN):
        raise CheckpointError(f"{files.label(name)} is not a torch.save archive. Remedy: {RESAVE}")
    return read_archives(files, [ByteRange(name, 0, size)])[0]


def _flat(archive: Archive) -> tuple[dict[str, object], dict[str, OBJ_PATH]]:
    """One level of dotted names; values outside dicts get names."""
    root = archive.root()
    if isinstance(root, UnknownObject) or is_unknown_class(root):  # not a checkpoint
        refuse(archive.where, root.module, root.qualname)
    check_has_weights(root, archive.where)
    if isinstance(root, TensorStub):
        root = {"tensor": root}
    elif isinstance(root, list | tuple):
        root = {str(at): item for at, item in enumerate(root)}
    elif not isinstance(root, dict):
        root = {"value": root}
    return flatten(root, archive.where)


def flatten(root: Mapping[str, object], where: object) -> tuple[dict[str, object], dict[str, OBJ_PATH]]:
    """The values of nested dicts by dotted names, and the path of each."""
    try:
        return flatten_state_dict(root)
    except Exception as error:  # keys that cannot be names
        raise CheckpointError(f"{where}: cannot give names to its values: {error}") from error


def tensor_entry(
    name: str, tensor: TensorStub, archive: Archive, number: int, names: Sequence[str], files: Files
) -> Entry:
    """A tensor of an archive, in the file with that number among `names`."""
    shape, size = tensor.shape, tensor.dtype.itemsize
    member = archive.storage(tensor, name)
    stored = whole_box(shape)

    def locate(rows: Ints) -> Positions:
        start = data_starts(files, [member])[0] + tensor.offset * size if len(rows) else 0
        strides = None if tensor.strides == row_major(shape) else ints([tensor.strides])[: len(rows)]
        return Positions(np.full(len(rows), start), strides)

    shared = number, tensor.storage.key, tensor.offset, tensor.strides
    return Entry(name, shape, tensor.dtype, stored, np.full(stored.boxes.count, number), locate, names, files, shared)


def objects_of(files: Files, values: Mapping[str, tuple[Archive, object]]) -> dict[str, object]:
    """Values of archives, with real objects in the place of stubs."""
    return {
        name: without_stubs(value, f"{name!r} in {archive.where}", tensor_reader(files, archive, name))
        for name, (archive, value) in values.items()
    }


class TorchSaveWriter(Writer):
    """Writes one file, with values and nested names; there is no index."""

    def __init__(self, folder: OutputFolder, owners: Sequence[int], token: str, name: str | None = None) -> None:
        if len(owners) != 1:
            raise CheckpointError(f"torch.save writes one file, not {len(owners)}: choose another format")
        super().__init__(folder, owners, token, name)
        self.main = name or "model.pt"

    @staticmethod
    def fits(contents: Contents) -> None:
        """Refuse leaves inside other leaves, and keys that cannot be written."""
        check_overlaps(contents)
        check_keys(contents)

    def check(self, contents: Contents) -> None:
        """Nothing to check: an old file is replaced when the new one is complete."""

    def file(self, owner: int) -> str:
        """The only file."""
        return self.main

    def write(self, me: int, parts: Sequence[TensorPart], contents: Contents) -> None:
        """Write everything."""
        keys = {part.name: str(at) for at, part in enumerate(parts)}
        records = {keys[part.name]: Data(part.bytes, part.write) for part in parts}
        tensors = {
            name: TensorRecord(keys[contents.tied.get(name, name)], dtype, layout.shape)
            for name, (dtype, layout) in contents.tensors.items()
        }
        flat = {**tensors, **contents.values}
        paths = {name: contents.path_of(name) for name in flat}
        with self.folder.write(self.main) as file:
            write_segments(file, archive_of(unflatten_state_dict(flat, paths), records))

    def finish(self, results: Mapping[int, None], contents: Contents) -> list[str]:
        """Nothing to do."""
        return []

    def index(self, results: Mapping[int, None], contents: Contents) -> bytes:
        """None."""
        return b""


# --- writing archives -------------------------------------------------------------------------------------------------


class TensorRecord:
    """Takes the place of a tensor in a pickle: row-major, in a zip member of its own."""

    def __init__(self, key: str, dtype: torch.dtype, shape: tuple[int, ...]) -> None:
        self.key, self.dtype, self.shape = key, dtype, shape

    def __reduce__(self) -> Reduction:
        hooks: OrderedDict[str, object] = OrderedDict()  # not OrderedDict[str, object](), which pickles its type
        args = (_StorageRecord(self), 0, self.shape, row_major(self.shape), False, hooks)
        if self.dtype in TYPED_STORAGES:
            return rebuild_tensor, args
        return rebuild_typed_tensor, (*args, self.dtype, None)


class _StorageRecord:
    """Takes the place of its storage."""

    def __init__(self, tensor: TensorRecord) -> None:
        self.tensor = tensor


Records = dict[str, Data]  # by key


class _Pickler(pickle.Pickler):
    """Tensors inside values become records, too."""

    def __init__(self, file: IO[bytes], records: Records) -> None:
        super().__init__(file, protocol=2)
        self._records = records

    def reducer_override(self, obj: object) -> Any:
        if not isinstance(obj, torch.Tensor):
            return NotImplemented
        if is_sharded(obj):
            raise CheckpointError(
                f"{obj!r} is inside a value that one rank saves whole: put it into a dict or list of the state dict"
            )
        key = f"value{len(self._records)}"
        self._records[key] = Data(obj.numel() * obj.element_size(), partial(write_tensor, obj))
        return TensorRecord(key, obj.dtype, tuple(obj.shape)).__reduce__()

    def persistent_id(self, obj: object) -> tuple[object, ...] | None:
        if not isinstance(obj, _StorageRecord):
            return None
        tensor, count = obj.tensor, prod(obj.tensor.shape)
        if tensor.dtype in TYPED_STORAGES:
            return "storage", TYPED_STORAGES[tensor.dtype], tensor.key, "cpu", count
        return "storage", torch.UntypedStorage, tensor.key, "cpu", count * tensor.dtype.itemsize


PYTHON_PICKLER: Any = pickle._Pickler  # the slow one in Python can write any instruction


class _OpaquePickler(PYTHON_PICKLER):  # type: ignore[misc]
    """Also writes objects of unknown classes, by the name of the class, which is not imported."""

    def __init__(self, file: IO[bytes], records: Records) -> None:
        super().__init__(file, protocol=2)
        self._records = records

    reducer_override, persistent_id = _Pickler.reducer_override, _Pickler.persistent_id

    def save(self, obj: object, save_persistent_id: bool = True) -> None:
        """Write the instructions that made the object."""
        if not isinstance(obj, Opaque):
            super().save(obj, save_persistent_id)
            return
        if not IMPORTABLE.fullmatch(obj.module) or not IMPORTABLE.fullmatch(obj.qualname):
            raise CheckpointError(f"{obj!r} has no name that can be written: objects='drop' leaves it out")
        self._save_name(obj.module, obj.qualname)
        if obj.how != "name":
            self._save_parts(obj)

    def _save_name(self, module: str, qualname: str) -> None:
        """Protocol 2 names only what is at the top of a module; the rest are attributes."""
        owner, _, name = qualname.rpartition(".")
        if not owner:
            self.write(pickle.GLOBAL + f"{module}\n{name}\n".encode())
            return
        self.write(pickle.GLOBAL + b"builtins\ngetattr\n")
        self._save_name(module, owner)
        self.save(name)
        self.write(pickle.TUPLE2 + pickle.REDUCE)

    def _save_parts(self, obj: Opaque) -> None:
        self.save(obj.parts.args)
        self.write(pickle.REDUCE if obj.how == "call" else pickle.NEWOBJ)
        for code, items in (pickle.APPENDS, obj.parts.items), (pickle.SETITEMS, [*chain(*obj.parts.pairs)]):
            if items:
                self.write(pickle.MARK)
                for item in items:
                    self.save(item)
                self.write(code)
        if obj.parts.state is not None:
            self.save(obj.parts.state)
            self.write(pickle.BUILD)


def archive_of(value: object, records: Records) -> list[Segment]:
    """The archive of a value with a TensorRecord for each of `records`."""
    text, records = _pickle(value, records)
    data = [(f"archive/data/{key}", record) for key, record in records.items()]
    return archive_segments(
        [("archive/data.pkl", text), ("archive/byteorder", b"little"), *data, ("archive/version", b"3\n")]
    )


def tensor_archive(dtype: torch.dtype, shape: tuple[int, ...], data: Data) -> list[Segment]:
    """The archive of a tensor."""
    same = _tensor_archive(dtype, shape, data.bytes)
    return [one if isinstance(one, bytes) else data if isinstance(one, Data) else Checksum(data) for one in same]


@lru_cache(maxsize=4096)
def _tensor_archive(dtype: torch.dtype, shape: tuple[int, ...], size: int) -> list[Segment]:
    """The same for all tensors of a shape, but for the data."""
    return archive_of(TensorRecord("0", dtype, shape), {"0": Data(size, lambda _: None)})


def _pickle(value: object, records: Records) -> tuple[bytes, Records]:
    """The pickle; and the records, with those of tensors inside values."""
    for kind in (_Pickler, _OpaquePickler):  # the second one is slower
        text, extended = io.BytesIO(), dict(records)
        with suppress(OpaqueError):
            kind(text, extended).dump(value)
            break
    return text.getvalue(), extended


def torch_save_bytes(value: object) -> bytes:
    """What torch.save writes of a value without TensorRecords."""
    file = io.BytesIO()
    if opaque_in(value) is None:
        torch.save(value, file)
    else:
        write_segments(file, archive_of(value, {}))
    return file.getvalue()
