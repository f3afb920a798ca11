"""What changed since an earlier save: parts of a file that have the same bytes there are not written again.

A part is a box of a tensor, under its key in the header of a safetensors file. The checksums beside a file also have a
128-bit hash of every part of this rank, by its location: "" for the file itself, or `FOLDER/FILE` for that of an
earlier checkpoint beside this one. A location is where the bytes are: it leads to no further one. A rank uses the parts
of a tensor again only if all that it has of the tensor are unchanged, and have one location.
"""

from __future__ import annotations

import json
import re
from collections import defaultdict
from collections.abc import Collection, Mapping
from contextlib import suppress
from dataclasses import dataclass
from typing import NamedTuple

from xxhash import xxh3_128

from shardwise.errors import CheckpointError
from shardwise.storage.folders import NAMES, OutputFolder
from shardwise.storage.paths import own_name
from shardwise.storage.sums import BlockSums, sums_name, with_field

FIELD = "earlier"  # of an index: the files of earlier checkpoints, and the tensors that lie there
LOCATION = re.compile(rf"(?!\.\.?/)([^/\\]+)/({NAMES})")
HEADER, ALIGNED = 8, 64  # bytes of a header's length; a header fills a multiple of so many
References = Mapping[str, list[str]]  # locations, and the tensors that this rank has there


class Written(NamedTuple):
    """Bytes of files that were written, and bytes of parts that lie in files of earlier checkpoints instead."""

    written: int
    referenced: int


class Part(NamedTuple):
    """A box of a tensor in a staged file, and the hash of its kind and bytes."""

    start: int
    stop: int
    hash: str


@dataclass(frozen=True)
class Increment:
    """What is written of a staged file: these pieces, one after the other. The rest is where `locations` say."""

    pieces: list[memoryview]
    locations: Mapping[str, Mapping[str, str]]
    references: References
    report: Written

    @property
    def whole(self) -> bool:
        """True if all of the file is written."""
        return not self.references


def increment_of(memory: memoryview, size: int, folder: OutputFolder, earlier: str) -> Increment:
    """Compare a safetensors file in memory with the location of an earlier one, "" if there is none."""
    end, fields = _header(memory)
    parts = {key: _part(memory, end, value) for key, value in fields.items() if key != "__metadata__"}
    found = _unchanged(parts, _earlier_parts(folder, earlier))
    there = {location: location_exists(folder, location) for location in {*found.values()}}
    found = {key: location for key, location in found.items() if there[location]}
    locations, references = defaultdict[str, dict[str, str]](dict), defaultdict[str, set[str]](set)
    for key, part in parts.items():
        locations[found.get(key, "")][key] = part.hash
    for key, location in found.items():
        references[location].add(_tensor(key))
    pieces = _pieces(memory, size, fields, parts, found)
    referenced = sum(parts[key].stop - parts[key].start for key in found)
    report = Written(sum(map(len, pieces)), referenced)
    return Increment(pieces, locations, {location: sorted(names) for location, names in references.items()}, report)


def _header(memory: memoryview) -> tuple[int, dict[str, dict[str, object]]]:
    """Where the header of a file ends, and what it has."""
    end = HEADER + int.from_bytes(memory[:HEADER], "little")
    return end, json.loads(bytes(memory[HEADER:end]))


def _part(memory: memoryview, data: int, field: Mapping[str, object]) -> Part:
    start, stop = (data + int(offset) for offset in field["data_offsets"])  # type: ignore[attr-defined]
    hash = xxh3_128(f"{field['dtype']} {field['shape']} ".encode())
    hash.update(memory[start:stop])
    return Part(start, stop, hash.hexdigest())


def _tensor(key: str) -> str:
    """The tensor that a part belongs to."""
    return key.rpartition("@")[0]


def _earlier_parts(folder: OutputFolder, earlier: str) -> dict[str, tuple[str, str]]:
    """The hash of every part that an earlier save of this rank had, and its location. None if that cannot be read."""
    match = LOCATION.fullmatch(earlier)
    if match is None:
        return {}
    with suppress(CheckpointError, AttributeError):
        found = _sums(folder.beside(match[1]), match[2]).parts or {}
        return {key: (hash, location or earlier) for location, parts in found.items() for key, hash in parts.items()}
    return {}


def _sums(folder: OutputFolder, file: str) -> BlockSums:
    return BlockSums.read(folder.read(sums_name(file)), folder.path_of(sums_name(file)))


def _unchanged(parts: Mapping[str, Part], before: Mapping[str, tuple[str, str]]) -> dict[str, str]:
    """The parts that are as they were, and their locations."""
    found = {key: before[key][1] for key, part in parts.items() if key in before and before[key][0] == part.hash}
    locations = defaultdict[str, set[str]](set)
    for key in parts:
        locations[_tensor(key)].add(found.get(key, ""))
    return {key: location for key, location in found.items() if locations[_tensor(key)] == {location}}


def location_exists(folder: OutputFolder, location: str) -> bool:
    """True if a file of an earlier checkpoint is there, as long as its checksums say. Never one in this folder."""
    match = LOCATION.fullmatch(location)
    if match is None or match[1] == own_name(folder.path):
        return False
    with suppress(CheckpointError):
        earlier = folder.beside(match[1])
        return earlier.has(match[2], b"", _sums(earlier, match[2]).size)
    return False


def _pieces(
    memory: memoryview,
    size: int,
    fields: Mapping[str, Mapping[str, object]],
    parts: Mapping[str, Part],
    found: Collection[str],
) -> list[memoryview]:
    """The file without some of its parts: a header, and the parts that are left."""
    if not found:
        return [memory[:size]]
    at, kept, pieces = 0, dict[str, Mapping[str, object]](), list[memoryview]()
    for key, field in fields.items():
        part = parts.get(key)
        if part is None:
            kept[key] = field
        elif key not in found:
            kept[key] = {**field, "data_offsets": [at, at + part.stop - part.start]}
            pieces.append(memory[part.start : part.stop])
            at += part.stop - part.start
    text = json.dumps(kept, separators=(",", ":")).encode()
    text += b" " * (-(HEADER + len(text)) % ALIGNED)
    return [memoryview(len(text).to_bytes(HEADER, "little") + text), *pieces]


# --- the index --------------------------------------------------------------------------------------------------------


def index_with(index: bytes, by_number: Mapping[int, References]) -> bytes:
    """An index that says which tensors lie in files of earlier checkpoints: of which ranks, by their numbers."""
    files = defaultdict[str, dict[int, str]](dict)
    numbers = defaultdict[tuple[str, str], list[int]](list)
    for number, references in sorted(by_number.items()):
        for location, names in references.items():
            folder, _, file = location.partition("/")
            files[folder][number] = file
            for name in names:
                numbers[folder, name].append(number)
    if not files:
        return index
    tensors = defaultdict[str, dict[tuple[int, ...], list[str]]](lambda: defaultdict(list))
    for (folder, name), some in numbers.items():  # many tensors have the same numbers
        tensors[folder][tuple(some)].append(name)
    value = {folder: {"files": some, "tensors": list(tensors[folder].items())} for folder, some in files.items()}
    return with_field(index, FIELD, value)


def earlier_files(index: bytes) -> dict[str, list[str]]:
    """The files of earlier checkpoints that an index names, by their folders."""
    if f'"{FIELD}"'.encode() not in index:
        return {}
    with suppress(ValueError, AttributeError, RecursionError):
        earlier = json.loads(index).get(FIELD, {})
        return {folder: sorted(fields["files"].values()) for folder, fields in earlier.items()}
    return {}


def check_earlier(folder: OutputFolder, index: bytes) -> None:
    """Refuse an index whose files of earlier checkpoints do not exist any more."""
    for name, files in earlier_files(index).items():
        earlier = folder.beside(name)
        missing = earlier.missing([*files, *map(sums_name, files)])
        if missing:
            raise CheckpointError(
                f"{earlier.path_of(missing[0])} was removed while {folder.path} was saved, which needs it: save again"
            )
