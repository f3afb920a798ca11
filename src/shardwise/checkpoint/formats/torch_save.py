"""torch.save: a zip archive with a pickle that describes everything, and a member per storage."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from math import prod
from typing import Any, NamedTuple

import numpy as np
import torch

from shardwise.checkpoint.entry import Checkpoint, Entry, Located, whole_box
from shardwise.checkpoint.files import WORDS, Files, Span
from shardwise.checkpoint.foreign import Foreign, is_foreign_class
from shardwise.checkpoint.formats.safetensors import read_index
from shardwise.checkpoint.pickles import check_tree, refuse, settled, tensors_in, unpickle
from shardwise.checkpoint.standins import MOST, Foreigners, SavedTensor
from shardwise.checkpoint.zips import BEGIN, Directory, Member, contents, directories, starts
from shardwise.errors import CheckpointError
from shardwise.geometry import Ints, ints, row_major
from shardwise.state.traverse import OBJ_PATH, flatten_state_dict

LEGACY = b"\x80\x02\x8a\nl\xfc\x9cF\xf9 j\xa8P\x19"  # how files began before torch 1.6
AGAIN = "load it with torch.load and save it again with torch.save"
EXPANDED = 64  # the most MiB that a few bytes can be repeated to, or times that they can be
ENDINGS = (".pt", ".pth", ".bin", ".ckpt")


class Archive(NamedTuple):
    """What torch.save wrote into some bytes of a file: the pickle, and the members beside it."""

    span: Span
    where: str
    pickle: bytes
    members: Directory
    folder: str

    def root(self) -> Any:
        """What was saved, with stand-ins for its tensors."""
        value = unpickle(self.pickle, self.where, Foreigners())
        check_tree(value, self.where, 8 * len(self.pickle) + 1000)
        return value

    def told_before(self, storage: Member) -> bool:
        """True where all that says what a storage has lies before it."""
        told = (self.members.get(f"{self.folder}{name}") for name in ("data.pkl", "byteorder"))
        return all(member is None or member.stop <= storage.header for member in told)

    def storage(self, tensor: SavedTensor, what: str) -> Member:
        """The member that has the elements of a tensor; refused where it has too few."""
        member = self.members.get(f"{self.folder}data/{tensor.storage.key}")
        if member is None:
            raise CheckpointError(f"{self.where} has no storage {tensor.storage.key!r}, which {what} is in")
        needed, size = tensor.elements * tensor.dtype.itemsize, tensor.dtype.itemsize
        if not needed <= tensor.storage.bytes == member.size or prod(tensor.shape) * size >= MOST:
            raise CheckpointError(
                f"{self.where}: {what} (shape {tensor.shape}, strides {tensor.strides}) needs {needed} bytes of "
                f"storage {tensor.storage.key!r}, which should have {tensor.storage.bytes} and has {member.size}"
            )
        if prod(tensor.shape) * size > EXPANDED * (member.size + 2**20):
            raise CheckpointError(
                f"{self.where}: {what} (shape {tensor.shape}, strides {tensor.strides}) repeats {member.size} bytes "
                f"of its storage to {prod(tensor.shape) * size}. Remedy: save it after clone(), or before expand()"
            )
        return member


def read_archives(files: Files, spans: Sequence[Span]) -> list[Archive]:
    """What torch.save wrote into these bytes; nothing of the pickles is run yet."""
    found = directories(files, spans)
    where = [f"{files.shown(span.file)}, bytes {span.start} to {span.stop}" for span in spans]
    folders = list(map(_folder, where, found))
    pickles = [members[f"{folder}data.pkl"] for members, folder in zip(found, folders, strict=True)]
    orders = [(at, f"{folder}byteorder") for at, folder in enumerate(folders) if f"{folder}byteorder" in found[at]]
    texts = contents(files, pickles + [found[at][name] for at, name in orders])
    for (at, _), order in zip(orders, texts[len(spans) :], strict=True):
        if order != b"little":
            raise CheckpointError(f"{where[at]}: its byte order is {order[:16]!r}; only 'little' can be read")
    return list(map(Archive, spans, where, texts, found, folders))


def _folder(where: str, members: Directory) -> str:
    """The folder in the archive that all its members are in."""
    folder = next(
        (name[: -len("data.pkl")] for name in members if name.count("/") == 1 and name.endswith("/data.pkl")), ""
    )
    if not folder:
        raise CheckpointError(f"{where}: this archive has no data.pkl: it was not written by torch.save")
    if f"{folder}constants.pkl" in members:
        raise CheckpointError(
            f"{where}: this is a TorchScript program, no checkpoint. Remedy: load it with torch.jit.load, and save its "
            f"state_dict() with torch.save"
        )
    return folder


def looks_like_one(files: Files, name: str) -> bool:
    """True for a file that begins as one does, whatever its name; also for those that are refused with a reason."""
    start = files.read(name, 0, min(512, files.size(name)))
    known = name.endswith(ENDINGS) or b"/data.pkl" in start
    return start.startswith(LEGACY) or (start.startswith(BEGIN) and known)


def open_files(files: Files, names: Sequence[str], expected: Mapping[str, str] | None = None) -> Checkpoint:
    """The tensors and values of some files; `expected` says in which of them each should be."""
    entries, paths, values = dict[str, Entry](), dict[str, OBJ_PATH](), dict[str, tuple[Archive, Any]]()
    for number, file in enumerate(names):
        archive = _open(files, file)
        flat, nested = _flat(archive)
        for name, value in flat.items():
            if expected is not None and expected.get(name, file) != file:
                continue  # as it is in another file, too
            if name in paths:
                raise CheckpointError(
                    f"{name!r} is in {files.shown(file)} and in another of these files: an index must "
                    f"say which of them counts"
                )
            paths[name] = nested[name]
            if isinstance(value, SavedTensor):
                entries[name] = _entry(name, value, archive, number, names, files)
            else:
                values[name] = archive, value
    _check_hidden(values.values() if not entries else ())
    for name, file in (expected or {}).items():
        if name not in paths:
            raise CheckpointError(f"{files.shown(file)} should have {name!r}, by the index, but does not")
    return Checkpoint(files, "torch.save", entries, paths=paths, objects=lambda: _settled(files, values))


def _check_hidden(values: Iterable[tuple[Archive, Any]]) -> None:
    """Refuse files whose tensors all lie in objects of unknown classes, such as whole models."""
    for archive, value in values:
        if isinstance(value, Foreign) and tensors_in(value):
            refuse(archive.where, value.module, value.qualname)


def open_indexed(files: Files, index: str) -> Checkpoint:
    """As an index says."""
    expected = read_index(files, index)
    return open_files(files, sorted(set(expected.values())), expected)


def _open(files: Files, name: str) -> Archive:
    size = files.size(name)
    start = files.read(name, 0, min(len(LEGACY), size))
    if start.startswith(LEGACY):
        raise CheckpointError(f"{files.shown(name)} is from before torch 1.6. Remedy: {AGAIN}")
    if not start.startswith(BEGIN):
        raise CheckpointError(f"{files.shown(name)} is no archive of torch.save. Remedy: {AGAIN}")
    return read_archives(files, [Span(name, 0, size)])[0]


def _flat(archive: Archive) -> tuple[dict[str, Any], dict[str, OBJ_PATH]]:
    """One level of names with dots; what is no dict gets names."""
    root = archive.root()
    if isinstance(root, Foreign) or is_foreign_class(root):  # something that was never a checkpoint
        refuse(archive.where, root.module, root.qualname)
    if isinstance(root, SavedTensor):
        root = {"tensor": root}
    elif isinstance(root, list | tuple):
        root = {str(at): item for at, item in enumerate(root)}
    elif not isinstance(root, dict):
        root = {"value": root}
    try:
        return flatten_state_dict(root)
    except Exception as error:  # keys that are nothing like names
        raise CheckpointError(f"{archive.where}: its values cannot be given names: {error}") from error


def _entry(name: str, tensor: SavedTensor, archive: Archive, number: int, names: Sequence[str], files: Files) -> Entry:
    shape, size = tensor.shape, tensor.dtype.itemsize
    member = archive.storage(tensor, repr(name))
    alike = whole_box(shape)

    def locate(rows: Ints) -> Located:
        start = starts(files, [member])[0] + tensor.offset * size if len(rows) else 0
        strides = None if tensor.strides == row_major(shape) else ints([tensor.strides])[: len(rows)]
        return Located(np.full(len(rows), start), strides)

    shared = number, tensor.storage.key, tensor.offset, tensor.strides
    return Entry(name, shape, tensor.dtype, alike, np.full(alike.boxes.count, number), locate, names, files, shared)


def _settled(files: Files, values: Mapping[str, tuple[Archive, Any]]) -> dict[str, Any]:
    return {
        name: settled(value, f"{name!r} in {archive.where}", reader(files, archive, name))
        for name, (archive, value) in values.items()
    }


def reader(files: Files, archive: Archive, name: str) -> Callable[[SavedTensor], torch.Tensor]:
    """Makes real tensors of those that lie inside a value; such as share a storage go on sharing it."""
    storages = dict[str, torch.Tensor]()

    def read(tensor: SavedTensor) -> torch.Tensor:
        member, key = archive.storage(tensor, f"a tensor in {name!r}"), tensor.storage.key
        if not prod(tensor.shape):
            return torch.empty(tensor.shape, dtype=tensor.dtype, device="cpu")
        if key not in storages:
            storages[key] = torch.frombuffer(bytearray(contents(files, [member])[0]), dtype=torch.uint8)
        size, whole = tensor.dtype.itemsize, storages[key]
        words = whole[: whole.numel() // size * size].view(WORDS[size])
        return words.as_strided(tensor.shape, tensor.strides, tensor.offset).view(tensor.dtype)

    return read
