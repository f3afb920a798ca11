"""Finds out what lies at a path, and opens it."""

from __future__ import annotations

import gc
import re
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from shardwise.checkpoint.entry import Checkpoint
from shardwise.checkpoint.files import Files
from shardwise.checkpoint.formats import dcp, ranks, safetensors, sharded, torch_save
from shardwise.checkpoint.formats.writers import LOCK, token_of
from shardwise.checkpoint.places import files_at
from shardwise.checkpoint.writing import ASIDE
from shardwise.errors import CheckpointError

NUMBERED = re.compile(r"(.*)-(\d+)-of-(\d+)\.safetensors")
KNOWN = (
    "safetensors (a file, several with an index, or sharded by shardwise), torch.distributed.checkpoint (.metadata), "
    "torch.save (.pt, .pth, .bin), or a directory of torch.save files of ranks with rules= (in convert source_rules=)"
)


def open(path: Any, *, rules: Any = None) -> Checkpoint:
    """The checkpoint at a path or URL: a mapping from names to entries. No values are read yet.

    `rules` (a rules file, or what `read_rules` returns) say how the files of ranks in a directory belong together.
    """
    files, name = files_at(path)
    with _uncollected():
        found = _opened(files, name, rules)
    files.opened()
    return found


def _opened(files: Files, name: str | None, rules: Any) -> Checkpoint:
    if rules is not None:
        return ranks.open_ranks(files, rules)
    if name is None:
        return _open_directory(files)
    found = _open_file(files, name)
    found.path = files.shown(name)
    return found


@contextmanager
def _uncollected() -> Iterator[None]:
    """Without the collector, which would look at a million small objects again and again while they are made."""
    was = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was:
            gc.enable()


def _open_directory(files: Files) -> Checkpoint:
    for index in (sharded.INDEX, dcp.METADATA, safetensors.INDEX):  # before a large directory is listed
        if files.has(index):
            return _open_file(files, index)
    there = files.names()
    here = [name for name in there if name != LOCK and not ASIDE.fullmatch(name)]
    indexes = [name for name in here if name.endswith((".safetensors.index.json", ".bin.index.json"))]
    if len(indexes) == 1:
        return _open_file(files, indexes[0])
    tensors = [name for name in here if name.endswith(".safetensors")]
    if tensors and len(indexes) == 0:
        _check_whole(files, tensors)
        return safetensors.open_files(files, tensors)
    saved = [name for name in here if torch_save.looks_like_one(files, name)]
    if len(saved) == 1:
        return torch_save.open_files(files, saved)
    if len(here) < len(there):
        raise CheckpointError(f"{files.root} is unfinished: a save or a conversion to it was interrupted, or goes on")
    found = f"it has {', '.join(here[:6])}{' ...' if len(here) > 6 else ''}" if here else "there are no files in it"
    raise CheckpointError(f"{files.root} is no checkpoint that is known here ({KNOWN}): {found}")


def _check_whole(files: Files, names: list[str]) -> None:
    """Refuse what is only a part of a checkpoint: what an interrupted save or conversion left."""
    unfinished = [name for name in names if token_of(name)]
    if unfinished:
        raise CheckpointError(f"{files.root} has {unfinished[0]}, but no {sharded.INDEX}: its save did not end")
    numbered = [found for name in names if (found := NUMBERED.fullmatch(name))]
    there = Counter((found[1], found[3]) for found in numbered)
    for found in numbered:
        if int(found[3]) != there[found[1], found[3]]:
            raise CheckpointError(f"{files.root} has {found[0]}, but not all {int(found[3])} files, and no index")


def _open_file(files: Files, name: str) -> Checkpoint:
    if name == sharded.INDEX:
        return sharded.open_sharded(files)
    if name == dcp.METADATA:
        return dcp.open_dcp(files)
    if name.endswith(".safetensors.index.json"):
        return safetensors.open_indexed(files, name)
    if name.endswith(".bin.index.json"):
        return torch_save.open_indexed(files, name)
    if torch_save.looks_like_one(files, name):
        return torch_save.open_files(files, [name])
    if name.endswith(".safetensors") or safetensors.looks_like_one(files, name):
        return safetensors.open_files(files, [name])
    raise CheckpointError(f"{files.shown(name)} is no checkpoint that is known here: {KNOWN}")
