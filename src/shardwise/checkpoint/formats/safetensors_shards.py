"""Shards as torch's HuggingFaceStorageWriter writes them: every safetensors file has boxes of tensors.

The header of a file says where each of its boxes begins. No file has the shape of a tensor: it ends where its last box
does.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Mapping, Sequence
from math import prod
from typing import NamedTuple, cast

from shardwise.checkpoint.entry import Checkpoint, Entry, HashableBoxes, Positions
from shardwise.checkpoint.files import Files
from shardwise.checkpoint.formats.safetensors import Header, HeaderTensor, are_sizes, parse_json
from shardwise.checkpoint.values import JsonObject
from shardwise.errors import CheckpointError
from shardwise.geometry import Box, Boxes, ints
from shardwise.quoting import brief

SHARDING, OFFSETS = "DCP_SHARDING_INFO", "saved_offsets"
SHARD_NAME = re.compile(r"shard-\d+-model-(\d+)-of-(\d+)\.safetensors")


class Shard(NamedTuple):
    """A box of a tensor in file number `file`: it begins at the cell `lo`."""

    file: int
    lo: tuple[int, ...]
    tensor: HeaderTensor

    @property
    def hi(self) -> tuple[int, ...]:
        """The cell after its last one."""
        return tuple(first + size for first, size in zip(self.lo, self.tensor.shape, strict=True))


def are_shards(headers: Mapping[str, Header]) -> bool:
    """True if files have boxes of tensors."""
    return any(SHARDING in header.metadata for header in headers.values())


def open_shards(files: Files, headers: Mapping[str, Header]) -> Checkpoint:
    """The tensors whose boxes these files have; refused if cells are missing."""
    _check_files(files, list(headers))
    shards, names = defaultdict[str, list[Shard]](list), list(headers)
    for number, (file, header) in enumerate(headers.items()):
        offsets = saved_offsets(header, files.label(file))
        for name, tensor in header.tensors.items():
            shards[name].append(Shard(number, offsets.get(name, (0,) * len(tensor.shape)), tensor))
    entries = {name: _entry(name, several, names, files) for name, several in shards.items()}
    return Checkpoint(files, "safetensors", entries)


def saved_offsets(header: Header, where: object) -> dict[str, tuple[int, ...]]:
    """The first cell of every box in a file, by the name of its tensor; none in a file of whole tensors."""
    if SHARDING not in header.metadata:
        return {}
    said = parse_json(header.metadata[SHARDING].encode(), where)
    return {name: _offset(name, said.get(name), len(tensor.shape), where) for name, tensor in header.tensors.items()}


def _offset(name: str, said: object, dims: int, where: object) -> tuple[int, ...]:
    offset = cast("JsonObject", said).get(OFFSETS) if isinstance(said, dict) else None
    if not are_sizes(offset) or len(offset) != dims:
        raise CheckpointError(f"{where}: {SHARDING} has no {OFFSETS} of {dims} numbers for {name!r}: {brief(said)}")
    return tuple(offset)


def _entry(name: str, shards: Sequence[Shard], paths: Sequence[str], files: Files) -> Entry:
    first, *others = shards
    for shard in others:
        if (shard.tensor.dtype, len(shard.lo)) != (first.tensor.dtype, len(first.lo)):
            raise CheckpointError(
                f"{name!r} is {_kind(first)} in {files.label(paths[first.file])}, but {_kind(shard)} in "
                f"{files.label(paths[shard.file])}: these files belong to different checkpoints"
            )
    shape = tuple(map(max, zip(*(shard.hi for shard in shards), strict=True)))
    stored = [shard for shard in shards if prod(shard.tensor.shape)]
    boxes = HashableBoxes.of(*(Box(shard.lo, shard.hi) for shard in shards))
    file, begins = ints([shard.file for shard in stored]), ints([shard.tensor.start for shard in stored])
    entry = Entry(name, shape, first.tensor.dtype, boxes, file, lambda rows: Positions(begins[rows]), paths, files)
    if prod(shape):
        entry.check(Boxes.of([Box.whole(shape)], len(shape)))
    if sum(prod(shard.tensor.shape) for shard in stored) > prod(shape):
        some = ", ".join(dict.fromkeys(paths[shard.file] for shard in stored[:4]))
        raise CheckpointError(
            f"{files.root}: {name!r} has cells in several shards ({some} ...), but a save writes each cell once: "
            f"remove the shards of other saves"
        )
    return entry


def _kind(shard: Shard) -> str:
    return f"{shard.tensor.dtype} with {len(shard.lo)} dims"


def _check_files(files: Files, names: Sequence[str]) -> None:
    """Refuse shards that are not all there, as far as their names tell: they have no number of ranks."""
    numbered = [match for name in names if (match := SHARD_NAME.fullmatch(name))]
    if (
        len(names) == len(numbered) == 1
        and (beside := [name for name in files.names() if SHARD_NAME.fullmatch(name)])[1:]
    ):
        raise CheckpointError(f"{files.label(names[0])} is one of {len(beside)} shards: open the folder {files.root}")
    there = {(int(match[1]), match[2]) for match in numbered}
    for _, count in sorted(there):
        lacking = [number for number in range(1, int(count) + 1) if (number, count) not in there]
        if lacking:
            raise CheckpointError(
                f"{files.root} has {numbered[0][0]}, but no shard of model-{lacking[0]:05d}-of-{count}"
            )
