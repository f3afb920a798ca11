"""torch.save files that every rank wrote, with sharded tensors in them: the boxes of a tensor are in several files."""

from __future__ import annotations

from collections.abc import Sequence
from math import prod

from shardwise.checkpoint.entry import Entry, HashableBoxes, Positions
from shardwise.checkpoint.files import Files
from shardwise.checkpoint.formats.archives import Archive, data_starts
from shardwise.checkpoint.shard_stubs import ShardStub
from shardwise.checkpoint.unpickle_stubs import TensorStub
from shardwise.errors import CheckpointError
from shardwise.geometry import Box, Boxes, Ints, ints

Found = Sequence[tuple[int, Archive, ShardStub]]  # the number of a file, and what it has of a tensor


def shard_entry(name: str, found: Found, paths: Sequence[str], files: Files) -> Entry:
    """The tensor whose boxes some files have; refused if cells are missing."""
    _, _, first = found[0]
    for _, archive, other in found:
        if (other.dtype, other.shape) != (first.dtype, first.shape):
            raise CheckpointError(
                f"{archive.where}: {name!r} is {other.dtype} of shape {other.shape}, but in "
                f"{files.label(paths[found[0][0]])} {first.dtype} of shape {first.shape}: these files belong to "
                f"different checkpoints"
            )
    boxes = [
        (number, archive, lo, one) for number, archive, shard in found for lo, one in shard.boxes if prod(one.shape)
    ]
    stored = HashableBoxes(Boxes.of([_box(lo, one) for _, _, lo, one in boxes], len(first.shape)))
    members = [archive.storage(one, name) for _, archive, _, one in boxes]

    def locate(rows: Ints) -> Positions:
        some = [boxes[row][3] for row in rows.tolist()]
        begins = data_starts(files, [members[row] for row in rows.tolist()])
        starts = [begin + one.offset * one.dtype.itemsize for begin, one in zip(begins, some, strict=True)]
        return Positions(ints(starts), ints([one.strides for one in some]).reshape(len(some), len(first.shape)))

    entry = Entry(name, first.shape, first.dtype, stored, ints([one[0] for one in boxes]), locate, paths, files)
    if prod(first.shape):
        _check(entry, paths)
    return entry


def _box(lo: tuple[int, ...], tensor: TensorStub) -> Box:
    return Box(lo, tuple(first + size for first, size in zip(lo, tensor.shape, strict=True)))


def _check(entry: Entry, paths: Sequence[str]) -> None:
    try:
        entry.check(Boxes.of([Box.whole(entry.shape)], len(entry.shape)))
    except CheckpointError as error:
        alone = f". {paths[0]} is the file of one rank: open the folder that has all" if len(paths) == 1 else ""
        raise CheckpointError(f"{error}{alone}") from None
