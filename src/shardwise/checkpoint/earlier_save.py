"""What an incremental save is compared with: the checkpoint before it."""

from __future__ import annotations

import os
from pathlib import Path

from shardwise.checkpoint.formats import sharded
from shardwise.errors import CheckpointError
from shardwise.job.agree import Callers
from shardwise.storage.folders import OURS_IN_BYTES, OutputFolder
from shardwise.storage.paths import PathLike, file_system, own_name

START = 4096  # bytes of an index: it begins with the names of its files
Earlier = tuple[str, str, int]  # the name of a folder, the token of its files, and their number


def location_in(callers: Callers, path: PathLike, incremental: bool | str) -> str | None:
    """This rank's file in the checkpoint that is compared with: "" if there is none, None if all is written anyway."""
    if incremental is False:
        return None
    earlier = None if incremental is True else callers.by_first(lambda: _earlier(path, incremental))
    if earlier is None or earlier[2] != len(callers.owners):
        return ""
    folder, token, count = earlier
    return f"{folder}/{sharded.file_name(callers.owners.index(callers.me), count, token)}"


def _earlier(path: PathLike, incremental: str) -> Earlier:
    """The checkpoint at a path; refused if it is not one of ours, beside the new one."""
    folder = OutputFolder(incremental)
    if _parent(path) != _parent(incremental) or own_name(os.fspath(path)) == own_name(incremental):
        raise CheckpointError(
            f"incremental={incremental!r} is not beside {os.fspath(path)!r}: a checkpoint refers to earlier ones by "
            f"their names in the same directory. Give the path of another checkpoint there, or save with "
            f"incremental=True, which writes everything"
        )
    if not folder.exists(sharded.INDEX):
        raise CheckpointError(
            f"incremental={incremental!r} has no {sharded.INDEX}: give a checkpoint that save has written with "
            f"format='safetensors', or incremental=True for the first one"
        )
    first = OURS_IN_BYTES.search(folder.read(sharded.INDEX, START))
    if first is None:
        raise CheckpointError(f"{folder.path_of(sharded.INDEX)} names no files of ours: it is damaged")
    return own_name(incremental), first[1].decode(), int(first[0].split(b"-")[3])


def _parent(path: PathLike) -> str:
    system, place = file_system(path)
    if system is None:
        return str(Path(os.path.realpath(place)).parent)
    return f"{system.protocol}{place.rstrip('/').rpartition('/')[0]}"
