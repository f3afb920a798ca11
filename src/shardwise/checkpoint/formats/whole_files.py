"""Files that have whole tensors: safetensors, one or several with an index as Hugging Face has them, and torch.save."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from math import prod
from typing import Any

from shardwise.checkpoint.formats.safetensors import INDEX, check_storable
from shardwise.checkpoint.formats.torch_archive import Records, Stored, write_archive
from shardwise.checkpoint.formats.writers import Contents, Part, check_alone, write_parts
from shardwise.checkpoint.structure import check_dotted, check_inside, check_keys
from shardwise.checkpoint.writing import Folder
from shardwise.errors import CheckpointError
from shardwise.state.traverse import unflatten_state_dict

ALONE = "model.safetensors"
NAMED = re.compile(r"model(-\d+-of-\d+)?\.safetensors")


class SafetensorsWriter:
    """One file for every owner; an index where there are several. `name` is that of the only one."""

    def __init__(self, folder: Folder, owners: Sequence[int], token: str, name: str | None = None) -> None:
        self.folder, self._owners, self._token, self._name = folder, list(owners), token, name
        self.main = self.file(self._owners[0]) if len(self._owners) == 1 else INDEX
        self._unfinished = list[str]()  # files of another conversion, which was interrupted

    @staticmethod
    def fits(contents: Contents) -> None:
        """Tensors of the dtypes that safetensors has a name for, each under a name of its own."""
        check_dotted(contents)
        for name, (dtype, _) in contents.tensors.items():
            check_storable(name, dtype)

    def check(self, contents: Contents) -> None:
        """Files of whole tensors have fixed names: only this conversion, or an unfinished one, may be there.

        What an unfinished one left goes, so that it is never taken for a part of this.
        """
        if self._name is not None:
            return  # one file, which is replaced when the new one is whole
        check_alone(self.folder, INDEX)
        names = [name for name in self.folder.names() if name == INDEX or name.endswith(".safetensors")]
        starts = {name: self.folder.read(name, 512) for name in sorted(names, key=lambda name: name != INDEX)}
        for name, start in starts.items():
            if b'"shardwise"' not in start or not (name == INDEX or NAMED.fullmatch(name)):
                raise CheckpointError(
                    f"{self.folder.shown(name)} is no part of a conversion to here: give another path"
                )
        others = [name for name, start in starts.items() if self._token.encode() not in start]
        whole = [name for name in others if name == INDEX or (name == ALONE and len(self._owners) > 1)]
        if whole:
            raise CheckpointError(
                f"{self.folder.shown(whole[0])} is there, of another conversion that is finished: give another path"
            )
        if len(self._owners) == 1:
            self._unfinished = [name for name in others if name != ALONE]
            return
        for name in others:
            self.folder.remove(name)

    def file(self, owner: int) -> str:
        """The name of an owner's file."""
        count = len(self._owners)
        if count == 1:
            return self._name or ALONE
        return f"model-{self._owners.index(owner) + 1:05d}-of-{count:05d}.safetensors"

    def write(self, me: int, parts: Sequence[Part], contents: Contents) -> None:
        """The file of an owner."""
        write_parts(self.folder, self.file(me), {part.name: part for part in parts}, self._token)

    def finish(self, told: Mapping[int, Any], contents: Contents) -> list[str]:
        """The index, where there are several files; then what unfinished ones left may go."""
        if len(self._owners) > 1:
            with self.folder.write(INDEX) as file:
                file.write(self._index_of(contents))
        return self._unfinished

    def _index_of(self, contents: Contents) -> bytes:
        where = {name: self.file(next(iter(layout.owners()))) for name, (_, layout) in contents.tensors.items()}
        total = sum(prod(layout.shape) * dtype.itemsize for dtype, layout in contents.tensors.values())
        about = {"total_size": total, "shardwise": self._token}
        return json.dumps({"metadata": about, "weight_map": where}, indent=2).encode()


class TorchSaveWriter:
    """One file, with values and nested names as they were."""

    def __init__(self, folder: Folder, owners: Sequence[int], token: str, name: str | None = None) -> None:
        if len(owners) != 1:
            raise CheckpointError(f"torch.save writes one file, not {len(owners)}: choose another format")
        self.folder, self.main = folder, name or "model.pt"

    @staticmethod
    def fits(contents: Contents) -> None:
        """Whatever does not lie in one another, under keys that can be written."""
        check_inside(contents)
        check_keys(contents)

    def check(self, contents: Contents) -> None:
        """A file of that name is replaced when the new one is whole."""

    def file(self, owner: int) -> str:
        """There is only one."""
        return self.main

    def write(self, me: int, parts: Sequence[Part], contents: Contents) -> None:
        """All of it."""
        keys = {part.name: str(at) for at, part in enumerate(parts)}
        records: Records = {keys[part.name]: (part.bytes, part.write) for part in parts}
        stored = {
            name: Stored(keys[contents.tied.get(name, name)], dtype, layout.shape)
            for name, (dtype, layout) in contents.tensors.items()
        }
        flat = {**stored, **contents.values}
        paths = {name: contents.path_of(name) for name in flat}
        with self.folder.write(self.main) as file:
            write_archive(file, unflatten_state_dict(flat, paths), records)

    def finish(self, told: Mapping[int, Any], contents: Contents) -> list[str]:
        """There is no index."""
        return []
