"""safetensors files: a JSON header with dtype, shape and byte range of every tensor, then the bytes.

A checkpoint has one or several, with an index as Hugging Face writes it.
"""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from math import prod
from typing import NamedTuple, TypeGuard, cast

import torch

from shardwise.checkpoint.entry import Checkpoint, Entry, whole_entry
from shardwise.checkpoint.files import Files
from shardwise.checkpoint.formats.writers import Contents, TensorPart, Writer, check_dotted
from shardwise.checkpoint.segments import Data, size_of, write_segments
from shardwise.checkpoint.unpickle_stubs import MAX_DIMS, MAX_SIZE
from shardwise.checkpoint.values import JsonObject, JsonValue
from shardwise.errors import CheckpointError
from shardwise.quoting import brief
from shardwise.storage.folders import OutputFolder
from shardwise.storage.paths import inside
from shardwise.storage.sums import ALGORITHM

INDEX, SINGLE = "model.safetensors.index.json", "model.safetensors"
OUTPUT_NAME = re.compile(r"model(-\d+-of-\d+)?\.safetensors")  # of the files that SafetensorsWriter writes
MOST_HEADER = 100_000_000  # bytes; the limit of the format itself
DTYPES = {
    name: getattr(torch, attribute)
    for name, attribute in {
        "BOOL": "bool",
        "U8": "uint8",
        "I8": "int8",
        "I16": "int16",
        "U16": "uint16",
        "F16": "float16",
        "BF16": "bfloat16",
        "I32": "int32",
        "U32": "uint32",
        "F32": "float32",
        "F64": "float64",
        "I64": "int64",
        "U64": "uint64",
        "C64": "complex64",
        "F8_E4M3": "float8_e4m3fn",
        "F8_E5M2": "float8_e5m2",
        "F8_E8M0": "float8_e8m0fnu",
        "F8_E4M3FNUZ": "float8_e4m3fnuz",
        "F8_E5M2FNUZ": "float8_e5m2fnuz",
    }.items()
    if hasattr(torch, attribute)
}
NAMES = {dtype: name for name, dtype in DTYPES.items()}


class HeaderTensor(NamedTuple):
    """A tensor in a header; bytes are counted from the start of the file."""

    dtype: torch.dtype
    shape: tuple[int, ...]
    start: int
    stop: int


class Header(NamedTuple):
    """The contents of a file."""

    tensors: dict[str, HeaderTensor]
    metadata: dict[str, str]


def read_header(files: Files, name: str, begin: int = 0) -> Header:
    """The header of a file from a byte on; refused if it is damaged, or does not match the size of the file."""
    where, size, data = files.label(name), files.size(name), begin + 8
    if size < data:
        raise CheckpointError(f"{where} has {size} bytes, too few for a safetensors file")
    start = files.read(name, begin, data)
    if start == b"version ":
        raise CheckpointError(f"{where} is a pointer of Git LFS: fetch the file itself with git lfs pull")
    length = int.from_bytes(start, "little")
    if length > min(size - data, MOST_HEADER):
        raise CheckpointError(f"{where}: a header of {length} bytes in a file of {size}: it is truncated or damaged")
    fields = parse_json(files.read(name, data, data + length), where)
    metadata = fields.pop("__metadata__", {})
    if not isinstance(metadata, dict) or not all(isinstance(value, str) for value in metadata.values()):
        raise CheckpointError(f"{where}: __metadata__ must map names to strings")
    tensors = {key: _tensor(key, where, value, data + length, size) for key, value in fields.items()}
    _check_order(where, tensors, data + length, size)
    return Header(tensors, cast("dict[str, str]", metadata))


def parse_json(text: bytes, where: object) -> JsonObject:
    """A JSON object, in which no name comes twice."""

    def unique(pairs: list[tuple[str, JsonValue]]) -> JsonObject:
        fields = dict(pairs)
        if len(fields) < len(pairs):
            (twice, _), *_ = Counter(name for name, _ in pairs).most_common(1)
            raise ValueError(f"{twice!r} comes twice")
        return fields

    try:
        value = json.loads(text.decode("utf-8"), object_pairs_hook=unique)
    except (ValueError, RecursionError) as error:
        raise CheckpointError(f"{where}: not the JSON of a checkpoint: {error}") from error
    if not isinstance(value, dict):
        raise CheckpointError(f"{where}: expected a JSON object, but found {type(value).__name__}")
    return value


def _tensor(name: str, where: object, value: JsonValue, data: int, size: int) -> HeaderTensor:
    try:
        fields = cast("JsonObject", value)
        dtype, shape, offsets = DTYPES.get(cast("str", fields["dtype"])), fields["shape"], fields["data_offsets"]
    except (KeyError, TypeError):
        raise CheckpointError(f"{name!r} in {where} has no dtype, shape and data_offsets") from None
    if dtype is None:
        raise CheckpointError(
            f"{name!r} in {where} has the unknown dtype {brief(fields['dtype'])}: known are {', '.join(DTYPES)}"
        )
    if not are_sizes(shape) or not are_sizes(offsets) or len(offsets) != 2:
        raise CheckpointError(
            f"{name!r} in {where} has shape {brief(shape)} and data_offsets {brief(offsets)}: both must be whole "
            f"numbers, and the shape one of at most {MAX_DIMS} dims"
        )
    start, stop, needed = data + offsets[0], data + offsets[1], prod(shape) * dtype.itemsize
    if not data <= start <= stop <= size:
        raise CheckpointError(
            f"{name!r} in {where} should be at bytes {start} to {stop}, but the file has {size}: it is truncated"
        )
    if stop - start != needed:
        raise CheckpointError(
            f"{name!r} in {where} has {stop - start} bytes, but {fields['dtype']} of shape {tuple(shape)} needs "
            f"{needed}"
        )
    return HeaderTensor(dtype, tuple(shape), start, stop)


def are_sizes(values: object) -> TypeGuard[list[int]]:
    """True for a list of sizes: whole numbers, not negative, not huge."""
    if not isinstance(values, list) or len(values) > MAX_DIMS:
        return False
    for value in values:  # noqa: SIM110  # runs for every tensor of every file: a generator takes twice as long
        if type(value) is not int or not 0 <= value < MAX_SIZE:
            return False
    return True


def _check_order(where: object, tensors: Mapping[str, HeaderTensor], data: int, size: int) -> None:
    """Every byte belongs to exactly one tensor."""
    at, before = data, ""
    for name, tensor in sorted(tensors.items(), key=lambda item: (item[1].start, item[1].stop)):
        if tensor.start < at:
            raise CheckpointError(f"{where}: bytes {tensor.start} to {at} belong to both {before!r} and {name!r}")
        if tensor.start > at:
            raise CheckpointError(f"{where}: bytes {at} to {tensor.start} belong to no tensor")
        at, before = tensor.stop, name
    if at != size:
        raise CheckpointError(f"{where}: bytes {at} to {size} belong to no tensor")


def header_bytes(tensors: Mapping[str, tuple[torch.dtype, Sequence[int]]], metadata: Mapping[str, str]) -> bytes:
    """The start of a file with these tensors in order: the length of the header, and the header."""
    fields: dict[str, object] = {"__metadata__": dict(metadata)} if metadata else {}
    at = 0
    for name, (dtype, shape) in tensors.items():
        stop = at + prod(shape) * dtype.itemsize
        fields[name] = {"dtype": dtype_name(dtype, name), "shape": list(shape), "data_offsets": [at, stop]}
        at = stop
    text = json.dumps(fields, separators=(",", ":")).encode()
    if len(text) > MOST_HEADER:
        raise CheckpointError(f"a header of {len(text)} bytes is larger than the format allows: write more files")
    text += b" " * (-(8 + len(text)) % 64)  # aligns the elements of all dtypes
    return len(text).to_bytes(8, "little") + text


def check_storable(name: str, dtype: torch.dtype) -> None:
    """Refuse what a header cannot hold."""
    if name == "__metadata__":
        raise CheckpointError(f"a safetensors tensor cannot be called {name!r}: rename it with rename=")
    dtype_name(dtype, name)


def dtype_name(dtype: torch.dtype, tensor: str) -> str:
    """The name of a dtype in headers."""
    if dtype not in NAMES:
        raise CheckpointError(
            f"{tensor!r} is {dtype}, which safetensors cannot hold: cast it, or choose another format"
        )
    return NAMES[dtype]


class Index(NamedTuple):
    """An index as Hugging Face writes it: the file of each tensor. `sums`: the files have checksums beside them."""

    files: dict[str, str]
    sums: bool


def read_index(files: Files, name: str) -> Index:
    """The index of a checkpoint."""
    where, fields = files.label(name), parse_json(files.read(name), files.label(name))
    weight_map, metadata = fields.get("weight_map"), fields.get("metadata")
    if not isinstance(weight_map, dict):
        raise CheckpointError(f"{where} has no weight_map")
    ours = isinstance(metadata, dict) and "shardwise" in metadata and "sums" in metadata
    return Index({tensor: inside(file, where) for tensor, file in weight_map.items()}, ours)


def open_files(files: Files, names: Sequence[str], expected: Mapping[str, str] | None = None) -> Checkpoint:
    """The tensors of some files; `expected`: the file of each, by an index."""
    return open_headers(files, read_headers(files, names), expected)


def read_headers(files: Files, names: Sequence[str]) -> dict[str, Header]:
    """The header of every file."""
    return {name: read_header(files, name) for name in names}


def open_headers(files: Files, headers: Mapping[str, Header], expected: Mapping[str, str] | None = None) -> Checkpoint:
    """The tensors of files with these headers."""
    entries, metadata, first = dict[str, Entry](), dict[str, str](), dict[str, str]()
    names = list(headers)
    for number, (file, header) in enumerate(headers.items()):
        metadata |= header.metadata
        for name, tensor in header.tensors.items():
            if expected is not None and expected.get(name, file) != file:
                continue  # another file has it, too
            if first.setdefault(name, file) != file:
                both = f"{files.label(first[name])} and {files.label(file)}"
                raise CheckpointError(f"{name!r} is in both {both}: add an index that says which one counts")
            entries[name] = whole_entry(name, tensor.shape, tensor.dtype, number, tensor.start, names, files)
    for name, file in (expected or {}).items():
        if name not in entries:
            raise CheckpointError(f"{files.label(file)} does not have {name!r}, although the index says so")
    return Checkpoint(files, "safetensors", entries, metadata=metadata)


def open_indexed(
    files: Files,
    index: str,
    opener: Callable[[Files, Sequence[str], Mapping[str, str]], Checkpoint] = open_files,
) -> Checkpoint:
    """The files that an index lists."""
    listed = read_index(files, index)
    checkpoint = opener(files, sorted(set(listed.files.values())), listed.files)
    checkpoint.sums = listed.sums
    return checkpoint


def looks_like_one(files: Files, name: str) -> bool:
    """True for a file that begins as one, whatever its name."""
    start = files.read(name, 0, min(9, files.size(name)))
    return len(start) == 9 and start[8:] == b"{" and 2 <= int.from_bytes(start[:8], "little") <= MOST_HEADER


def parts_header(parts: Mapping[str, TensorPart], token: str) -> bytes:
    """The start of a file of these parts."""
    fields = {key: (part.dtype, part.shape) for key, part in parts.items()}
    return header_bytes(fields, {"format": "pt", "shardwise": token})


def write_parts(folder: OutputFolder, file: str, header: bytes, parts: Sequence[TensorPart]) -> None:
    """Write a safetensors file of these parts, unless an earlier try has written it."""
    data = [Data(part.bytes, part.write) for part in parts]
    if folder.has(file, header, len(header) + size_of(data)):
        folder.reuse(file)
        return
    with folder.write(file) as opened:
        write_segments(opened, [header, *data])


class SafetensorsWriter(Writer):
    """Writes a file for every owner, and an index if there are several."""

    index_name = INDEX

    def __init__(self, folder: OutputFolder, owners: Sequence[int], token: str, name: str | None = None) -> None:
        super().__init__(folder, owners, token, name)
        self.main = INDEX if len(owners) > 1 else self.file(owners[0])
        self._unfinished = list[str]()  # files of another conversion that was interrupted

    @staticmethod
    def fits(contents: Contents) -> None:
        """Refuse dtypes that safetensors has no name for, and two tensors of one name."""
        check_dotted(contents)
        for name, (dtype, _) in contents.tensors.items():
            check_storable(name, dtype)

    def check(self, contents: Contents) -> None:
        """File names are fixed: the directory may only have files of this conversion, or of an unfinished one.

        Files of an unfinished one are removed, so that they are never mistaken for a part of this one.
        """
        if self.name is not None:
            return  # a single file is replaced when the new one is complete
        super().check(contents)
        names = [name for name in self.folder.names() if name == INDEX or name.endswith(".safetensors")]
        starts = {name: self.folder.read(name, 512) for name in sorted(names, key=lambda name: name != INDEX)}
        for name, start in starts.items():
            if b'"shardwise"' not in start or not (name == INDEX or OUTPUT_NAME.fullmatch(name)):
                raise CheckpointError(
                    f"{self.folder.path_of(name)} is not a part of this conversion: give another path"
                )
        others = [name for name, start in starts.items() if self.token.encode() not in start]
        complete = [name for name in others if name == INDEX or (name == SINGLE and len(self.numbers) > 1)]
        if complete:
            raise CheckpointError(
                f"{self.folder.path_of(complete[0])} belongs to another, complete conversion: give another path"
            )
        if len(self.numbers) == 1:
            self._unfinished = [name for name in others if name != SINGLE]
            return
        for name in others:
            self.folder.remove(name)

    def file(self, owner: int) -> str:
        """The file name of an owner."""
        count = len(self.numbers)
        return f"model-{self.numbers[owner] + 1:05d}-of-{count:05d}.safetensors" if count > 1 else self.name or SINGLE

    def write(self, me: int, parts: Sequence[TensorPart], contents: Contents) -> None:
        """Write the file of an owner."""
        header = parts_header({part.name: part for part in parts}, self.token)
        write_parts(self.folder, self.file(me), header, parts)

    def finish(self, results: Mapping[int, None], contents: Contents) -> list[str]:
        """Write the index, if there are several files. Returns files of unfinished conversions."""
        if len(self.numbers) > 1:
            with self.folder.write(INDEX) as file:
                file.write(self.index(results, contents))
        return self._unfinished

    def index(self, results: Mapping[int, None], contents: Contents) -> bytes:
        """As Hugging Face has it."""
        where = {name: self.file(next(iter(layout.owners()))) for name, (_, layout) in contents.tensors.items()}
        total = sum(prod(layout.shape) * dtype.itemsize for dtype, layout in contents.tensors.values())
        metadata = {"total_size": total, "shardwise": self.token, **({"sums": ALGORITHM} if self.folder.sums else {})}
        return json.dumps({"metadata": metadata, "weight_map": where}, indent=2).encode()
