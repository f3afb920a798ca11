"""Frameworks that write one training state as several checkpoints: in folders, or as files beside another one.

Their names do not collide, so together they are one mapping. Where they do, each has to be opened alone.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import replace

from shardwise.checkpoint.entry import Checkpoint, Entry
from shardwise.checkpoint.files import Files
from shardwise.errors import CheckpointError

ACCELERATE = re.compile(r"(pytorch_model_fsdp|optimizer)_\d+")  # the folders of accelerate's FSDP plugin
LIGHTNING = "meta.pt"  # beside .metadata


def is_of_accelerate(folders: Sequence[str]) -> bool:
    """True for the folders that accelerate's `save_state` makes with FSDP and sharded state dicts."""
    return any(ACCELERATE.fullmatch(folder) for folder in folders)


def joined(files: Files, format: str, parts: Mapping[str, Checkpoint]) -> Checkpoint:
    """One checkpoint of several, each by its folder in `files` or by the name of a file."""
    entries, paths, owner = dict[str, Entry](), dict[str, tuple[str | int, ...]](), dict[str, str]()
    for where, part in parts.items():
        for name in (*part, *part.objects):
            if owner.setdefault(name, where) != where:
                raise CheckpointError(
                    f"{files.root} has {name!r} in both {owner[name]} and {where}: open one of them, as "
                    f"{files.path(where)}"
                )
        entries |= _moved(part, where, files)
        paths |= part.paths
    return Checkpoint(files, format, entries, paths=paths, objects=lambda: _values(parts))


def _values(parts: Mapping[str, Checkpoint]) -> dict[str, object]:
    return {name: value for part in parts.values() for name, value in part.objects.items()}


def _moved(part: Checkpoint, folder: str, files: Files) -> dict[str, Entry]:
    """The entries of a checkpoint in a folder, with the names that their files have from outside."""
    if part.files is files:
        return dict(part)
    tables: dict[int, Sequence[str]] = {}
    for entry in part.values():
        if id(entry.paths) not in tables:
            tables[id(entry.paths)] = [f"{folder}/{path}" for path in entry.paths]
    return {name: replace(entry, paths=tables[id(entry.paths)], files=files) for name, entry in part.items()}
