"""Whether a checkpoint is damaged, as far as its index, the headers and the sizes of its files tell.

Whether the bytes of its tensors are as they were written is not looked at: `load` checks that.
"""

from __future__ import annotations

from collections.abc import Sequence

from shardwise.checkpoint.checking import read_sums
from shardwise.checkpoint.entry import Checkpoint
from shardwise.checkpoint.opening import open
from shardwise.errors import CheckpointError
from shardwise.geometry import Box, Boxes
from shardwise.job.agree import Callers
from shardwise.storage.paths import PathLike


def structural_damage(path: PathLike, callers: Callers) -> str | None:
    """Why a checkpoint is damaged, by all callers together: each opens it, and checks its share of the tensors."""
    share = callers.owners.index(callers.me), len(callers.owners)
    _, found = callers.tell(lambda: (None, _damage(path, *share)))
    return next((f"{why} (rank {rank})" if len(found) > 1 else why for rank, why in found.items() if why), None)


def _damage(path: PathLike, first: int, every: int) -> str | None:
    try:
        checkpoint = open(path)
        _check(checkpoint, list(checkpoint)[first::every])
    except CheckpointError as error:
        return str(error)
    return None


def _check(checkpoint: Checkpoint, names: Sequence[str]) -> None:
    """Refuse values that cannot be read, cells or bytes that no file has, and checksums that are missing."""
    dict(checkpoint.objects)  # values are read on demand
    for name in names:
        entry = checkpoint[name]
        entry.check(Boxes.of([Box.whole(entry.shape)], len(entry.shape)))
        for _, bytes in entry.ranges():
            entry.files.check(bytes)
    used = {file for name in names for file in checkpoint[name].used()}
    for file in sorted(used) if checkpoint.sums else ():
        read_sums(checkpoint.files, file, required=True)
