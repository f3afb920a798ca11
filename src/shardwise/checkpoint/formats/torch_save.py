"""torch.save files: one archive with nested dicts of tensors and other values, or several with an index."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

import numpy as np

from shardwise.checkpoint.atomic_files import OutputFolder
from shardwise.checkpoint.entry import Checkpoint, Entry, Positions, whole_box
from shardwise.checkpoint.files import ByteRange, Files
from shardwise.checkpoint.formats.safetensors import open_indexed as open_by_index
from shardwise.checkpoint.formats.torch_archive import (
    Archive,
    Records,
    TensorRecord,
    read_archives,
    tensor_reader,
    write_archive,
)
from shardwise.checkpoint.formats.writers import Contents, TensorPart, Writer, check_keys, check_overlaps
from shardwise.checkpoint.opaque import UnknownObject, is_unknown_class
from shardwise.checkpoint.pickles import count_tensors, refuse, without_stubs
from shardwise.checkpoint.unpickle_stubs import TensorStub
from shardwise.checkpoint.zips import BEGIN, data_starts
from shardwise.errors import CheckpointError
from shardwise.geometry import Ints, ints, row_major
from shardwise.state.traverse import OBJ_PATH, flatten_state_dict, unflatten_state_dict

LEGACY = b"\x80\x02\x8a\nl\xfc\x9cF\xf9 j\xa8P\x19"  # how files of torch before 1.6 begin
RESAVE = "load it with torch.load and save it again with torch.save"
ENDINGS = (".pt", ".pth", ".bin", ".ckpt")


def looks_like_one(files: Files, name: str) -> bool:
    """True for a file that begins as one, whatever its name; also for old ones, which are refused with a reason."""
    start = files.read(name, 0, min(512, files.size(name)))
    known = name.endswith(ENDINGS) or b"/data.pkl" in start
    return start.startswith(LEGACY) or (start.startswith(BEGIN) and known)


def open_files(files: Files, names: Sequence[str], expected: Mapping[str, str] | None = None) -> Checkpoint:
    """The tensors and values of some files; `expected`: the file of each, by an index."""
    entries, paths, values = dict[str, Entry](), dict[str, OBJ_PATH](), dict[str, tuple[Archive, object]]()
    for number, file in enumerate(names):
        archive = _open(files, file)
        flat, nested = _flat(archive)
        for name, value in flat.items():
            if expected is not None and expected.get(name, file) != file:
                continue  # another file has it, too
            if name in paths:
                raise CheckpointError(
                    f"{name!r} is in {files.label(file)} and in another file: add an index that says which one counts"
                )
            paths[name] = nested[name]
            if isinstance(value, TensorStub):
                entries[name] = _entry(name, value, archive, number, names, files)
            else:
                values[name] = archive, value
    _check_hidden(values.values() if not entries else ())
    for name, file in (expected or {}).items():
        if name not in paths:
            raise CheckpointError(f"{files.label(file)} does not have {name!r}, although the index says so")
    return Checkpoint(files, "torch.save", entries, paths=paths, objects=lambda: _objects(files, values))


def _check_hidden(values: Iterable[tuple[Archive, object]]) -> None:
    """Refuse files with all tensors inside objects of unknown classes, such as whole models."""
    for archive, value in values:
        if isinstance(value, UnknownObject) and count_tensors(value):
            refuse(archive.where, value.module, value.qualname)


def open_indexed(files: Files, index: str) -> Checkpoint:
    """The files that an index lists."""
    return open_by_index(files, index, open_files)


def _open(files: Files, name: str) -> Archive:
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
    if isinstance(root, TensorStub):
        root = {"tensor": root}
    elif isinstance(root, list | tuple):
        root = {str(at): item for at, item in enumerate(root)}
    elif not isinstance(root, dict):
        root = {"value": root}
    try:
        return flatten_state_dict(root)
    except Exception as error:  # keys that cannot be names
        raise CheckpointError(f"{archive.where}: cannot give names to its values: {error}") from error


def _entry(name: str, tensor: TensorStub, archive: Archive, number: int, names: Sequence[str], files: Files) -> Entry:
    shape, size = tensor.shape, tensor.dtype.itemsize
    member = archive.storage(tensor, name)
    stored = whole_box(shape)

    def locate(rows: Ints) -> Positions:
        start = data_starts(files, [member])[0] + tensor.offset * size if len(rows) else 0
        strides = None if tensor.strides == row_major(shape) else ints([tensor.strides])[: len(rows)]
        return Positions(np.full(len(rows), start), strides)

    shared = number, tensor.storage.key, tensor.offset, tensor.strides
    return Entry(name, shape, tensor.dtype, stored, np.full(stored.boxes.count, number), locate, names, files, shared)


def _objects(files: Files, values: Mapping[str, tuple[Archive, object]]) -> dict[str, object]:
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
        records: Records = {keys[part.name]: (part.bytes, part.write) for part in parts}
        tensors = {
            name: TensorRecord(keys[contents.tied.get(name, name)], dtype, layout.shape)
            for name, (dtype, layout) in contents.tensors.items()
        }
        flat = {**tensors, **contents.values}
        paths = {name: contents.path_of(name) for name in flat}
        with self.folder.write(self.main) as file:
            write_archive(file, unflatten_state_dict(flat, paths), records)

    def finish(self, results: Mapping[int, None], contents: Contents) -> list[str]:
        """Nothing to do."""
        return []

    def index(self, results: Mapping[int, None], contents: Contents) -> bytes:
        """None."""
        return b""
