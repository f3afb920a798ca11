"""Files that have whole tensors: safetensors, one or several with an index as Hugging Face has them, and torch.save."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from math import prod
from typing import IO, Any

from shardwise.checkpoint.formats.safetensors import INDEX, header_bytes
from shardwise.checkpoint.formats.torch_archive import Stored, write_archive
from shardwise.checkpoint.formats.writers import Contents, Part
from shardwise.checkpoint.writing import Folder
from shardwise.errors import CheckpointError
from shardwise.state.traverse import unflatten_state_dict


class SafetensorsWriter:
    """One file for every owner; an index where there are several. `name` is that of the only one."""

    def __init__(self, folder: Folder, owners: Sequence[int], token: str, name: str = "model.safetensors") -> None:
        self._folder, self._owners, self._token, self._name = folder, list(owners), token, name

    def file(self, owner: int) -> str:
        """The name of an owner's file."""
        count = len(self._owners)
        if count == 1:
            return self._name
        return f"model-{self._owners.index(owner) + 1:05d}-of-{count:05d}.safetensors"

    def write(self, me: int, parts: Sequence[Part], contents: Contents) -> None:
        """The file of an owner, unless it is there from an earlier try at the same."""
        listed = {part.name: (part.dtype, part.shape) for part in parts}
        header = header_bytes(listed, {"format": "pt", "shardwise": self._token})
        if self._folder.has(self.file(me), header, len(header) + sum(part.bytes for part in parts)):
            return
        with self._folder.write(self.file(me)) as file:
            file.write(header)
            for part in parts:
                part.write(file)

    def finish(self, told: Mapping[int, Any], contents: Contents) -> None:
        """The index, where there are several files."""
        if len(self._owners) == 1:
            return
        where = {name: self.file(next(iter(layout.owners()))) for name, (_, layout) in contents.tensors.items()}
        total = sum(prod(layout.shape) * dtype.itemsize for dtype, layout in contents.tensors.values())
        with self._folder.write(INDEX) as file:
            file.write(json.dumps({"metadata": {"total_size": total}, "weight_map": where}, indent=2).encode())

    def undo(self, me: int) -> None:
        """What is whole stays: a later try goes on from there."""


class TorchSaveWriter:
    """One file, with values and nested names as they were."""

    def __init__(self, folder: Folder, owners: Sequence[int], token: str, name: str = "model.pt") -> None:
        if len(owners) != 1:
            raise CheckpointError(f"torch.save writes one file, not {len(owners)}: choose another format")
        self._folder, self._name = folder, name

    def write(self, me: int, parts: Sequence[Part], contents: Contents) -> None:
        """All of it."""
        stored = {part.name: Stored(str(at), part.dtype, part.shape) for at, part in enumerate(parts)}
        records: dict[str, tuple[int, Callable[[IO[bytes]], None]]] = {
            stored[part.name].key: (part.bytes, part.write) for part in parts
        }
        flat = {**stored, **contents.values}
        paths = {name: contents.paths.get(name, (name,)) for name in flat}
        with self._folder.write(self._name) as file:
            write_archive(file, unflatten_state_dict(flat, paths), records)

    def finish(self, told: Mapping[int, Any], contents: Contents) -> None:
        """There is no index."""

    def undo(self, me: int) -> None:
        """It appears whole or not at all."""
