"""Writes what torch.distributed.checkpoint loads: a file of torch.save archives for every rank, then `.metadata`.

Behind its archives, where torch does not look, a file has a list of them: an interrupted conversion goes on from there.
"""

from __future__ import annotations

import io
import json
import pickle
from collections import defaultdict
from collections.abc import Mapping, Sequence
from contextlib import suppress
from struct import Struct
from typing import Any, NamedTuple

import torch

from shardwise.checkpoint.formats.dcp import METADATA, TIED
from shardwise.checkpoint.formats.dcp_nesting import nesting
from shardwise.checkpoint.formats.torch_archive import Stored, saved, write_archive
from shardwise.checkpoint.formats.writers import Contents, Part, check_alone, commit
from shardwise.checkpoint.structure import check_inside, check_steps
from shardwise.checkpoint.values import CARRIED, encoded
from shardwise.checkpoint.writing import Folder

END, MAGIC = Struct("<Q16s"), b"shardwise items\n"


class Item(NamedTuple):
    """An archive in a file: a box of a tensor, or a value."""

    name: str
    lo: tuple[int, ...] | None
    shape: tuple[int, ...]
    file: str
    start: int
    size: int


class DcpWriter:
    """Every owner writes a file; the first one also has the values."""

    def __init__(self, folder: Folder, owners: Sequence[int], token: str) -> None:
        self.folder, self._owners, self._token = folder, list(owners), token
        self._numbers = {owner: number for number, owner in enumerate(self._owners)}
        self.main = METADATA

    @staticmethod
    def fits(contents: Contents) -> None:
        """What torch's own reader rebuilds as it was."""
        check_inside(contents)
        check_steps(contents)
        nesting(contents)
        for name, value in contents.values.items():
            encoded(value, name, CARRIED)

    def check(self, contents: Contents) -> None:
        """An earlier one stays whole until this one is."""
        check_alone(self.folder, METADATA)

    def file(self, owner: int) -> str:
        """The name of the file of an owner."""
        return f"__{self._numbers[owner]}_{self._token}.distcp"

    def write(self, me: int, parts: Sequence[Part], contents: Contents) -> list[Item]:
        """Its archives, one after the other, unless an earlier try at the same has written them."""
        items, at, name = list[Item](), 0, self.file(me)
        values = nesting(contents).values if me == self._owners[0] else {}
        earlier = _listed(self.folder, name)
        if [item[:3] for item in earlier] == _asked(parts, values) and earlier:
            self.folder.reused.append(name)
            return earlier
        with self.folder.write(name) as file:
            for part in parts:
                size = write_archive(file, Stored("0", part.dtype, part.shape), {"0": (part.bytes, part.write)})
                items.append(Item(part.name, part.box.lo, part.shape, name, at, size))
                at += size
            for key, value in values.items():
                data = saved(value)
                file.write(data)
                items.append(Item(key, None, (), name, at, len(data)))
                at += len(data)
            file.write(_list(items))
        return items

    def finish(self, told: Mapping[int, list[Item]], contents: Contents) -> list[str]:
        """The metadata; then files of the checkpoint that it replaces may go."""
        items = [item for listed in told.values() for item in listed]
        text = io.BytesIO()
        pickle.dump(_metadata(items, contents), text)
        files = {self.file(owner) for owner in self._owners}
        return commit(self.folder, METADATA, text.getvalue(), files)

    def undo(self, me: int) -> None:
        """Remove the file of an owner."""
        self.folder.remove(self.file(me))


def _list(items: Sequence[Item]) -> bytes:
    """The end of a file: its items, how long that is, and what it is."""
    text = json.dumps(items).encode()
    return text + END.pack(len(text), MAGIC)


def _listed(folder: Folder, name: str) -> list[Item]:
    """The items of a file; none where they do not fill it, or cannot be read."""
    end = folder.tail(name, END.size)
    if len(end) < END.size or END.unpack(end)[1] != MAGIC:
        return []
    text = folder.tail(name, END.size + END.unpack(end)[0])[: -END.size]
    with suppress(ValueError, TypeError):
        items = [
            Item(key, None if lo is None else tuple(lo), tuple(shape), *where)
            for key, lo, shape, *where in json.loads(text)
        ]
        if folder.has(name, b"PK", sum(item.size for item in items) + len(text) + END.size):
            return items
    return []


def _asked(parts: Sequence[Part], values: Mapping[str, Any]) -> list[tuple[Any, ...]]:
    """What a file is to have, as its list begins."""
    return [(part.name, part.box.lo, part.shape) for part in parts] + [(key, None, ()) for key in values]


def _metadata(items: Sequence[Item], contents: Contents) -> Any:
    from torch.distributed.checkpoint import metadata as torchs
    from torch.distributed.checkpoint.filesystem import _StorageInfo

    listed, places = dict[str, Any](), dict[Any, Any]()
    chunks = {name: list[Any]() for name in contents.tensors}
    again = defaultdict[str, list[str]](list)
    for name, one in contents.tied.items():
        again[one].append(name)
    for item in items:
        lo, place = None if item.lo is None else torch.Size(item.lo), _StorageInfo(item.file, item.start, item.size)
        for name in (item.name, *again[item.name]):
            places[torchs.MetadataIndex(name, lo)] = place
            if lo is not None:
                chunks[name].append(torchs.ChunkStorageMetadata(lo, torch.Size(item.shape)))
            else:
                listed[name] = torchs.BytesStorageMetadata()
    for name, (dtype, layout) in contents.tensors.items():
        properties = torchs.TensorProperties(dtype=dtype)
        listed[name] = torchs.TensorStorageMetadata(properties, torch.Size(layout.shape), chunks[name])
    nested = nesting(contents)
    version = getattr(torchs, "CURRENT_DCP_VERSION", None)
    found = torchs.Metadata(
        {**nested.skeletons, **listed}, dict(nested.paths), places, **({"version": version} if version else {})
    )
    if contents.tied:
        found.__dict__[TIED] = dict(contents.tied)  # torch leaves it alone: without it, shared bytes are an error to us
    return found
