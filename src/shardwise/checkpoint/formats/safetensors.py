"""safetensors: a header in JSON that says for every tensor its dtype, shape and bytes, and then those bytes."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Mapping, Sequence
from math import prod
from typing import Any, NamedTuple

import torch

from shardwise.checkpoint.entry import Checkpoint, Entry, whole_entry
from shardwise.checkpoint.files import Files, inside
from shardwise.checkpoint.standins import MOST_DIMS
from shardwise.errors import CheckpointError
from shardwise.quoting import brief

INDEX = "model.safetensors.index.json"
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


class Tensor(NamedTuple):
    """What a header says of a tensor: its bytes are counted from the start of the file."""

    dtype: torch.dtype
    shape: tuple[int, ...]
    start: int
    stop: int


class Header(NamedTuple):
    """What a file has."""

    tensors: dict[str, Tensor]
    metadata: dict[str, str]


def read_header(files: Files, name: str) -> Header:
    """The header of a file; refused where it is not one, or does not fit the file."""
    where, size = files.shown(name), files.size(name)
    if size < 8:
        raise CheckpointError(f"{where} has {size} bytes: no safetensors file is so short")
    length = int.from_bytes(files.read(name, 0, 8), "little")
    if length > min(size - 8, MOST_HEADER):
        raise CheckpointError(f"{where}: a header of {length} bytes in a file of {size}: it is truncated or damaged")
    said = parsed(files.read(name, 8, 8 + length), f"{where}, bytes 8 to {8 + length}")
    metadata = said.pop("__metadata__", {})
    if not isinstance(metadata, dict) or not all(isinstance(value, str) for value in metadata.values()):
        raise CheckpointError(f"{where}: __metadata__ must map names to texts")
    tensors = {key: _tensor(key, where, value, 8 + length, size) for key, value in said.items()}
    _check_order(where, tensors, 8 + length, size)
    return Header(tensors, metadata)


def parsed(text: bytes, where: str) -> dict[str, Any]:
    """JSON that is an object, in which no name comes twice."""

    def once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        found = dict(pairs)
        if len(found) < len(pairs):
            (twice, _), *_ = Counter(name for name, _ in pairs).most_common(1)
            raise ValueError(f"{twice!r} comes twice")
        return found

    try:
        said = json.loads(text.decode("utf-8"), object_pairs_hook=once)
    except (ValueError, RecursionError) as error:
        raise CheckpointError(f"{where}: this is not the JSON of a checkpoint: {error}") from error
    if not isinstance(said, dict):
        raise CheckpointError(f"{where}: expected an object, but found {type(said).__name__}")
    return said


def _tensor(name: str, where: str, said: Any, data: int, size: int) -> Tensor:
    try:
        dtype, shape, offsets = DTYPES.get(said["dtype"]), said["shape"], said["data_offsets"]
    except (KeyError, TypeError):
        raise CheckpointError(f"{name!r} in {where} has no dtype, shape and data_offsets") from None
    if dtype is None:
        raise CheckpointError(
            f"{name!r} in {where} has dtype {brief(said['dtype'])}, which is not known here: known are "
            f"{', '.join(DTYPES)}"
        )
    if not are_sizes(shape) or not are_sizes(offsets) or len(offsets) != 2:
        raise CheckpointError(
            f"{name!r} in {where} has shape {brief(shape)} and data_offsets {brief(offsets)}: both must be whole "
            f"numbers, and the shape one of at most {MOST_DIMS} dims"
        )
    start, stop, needed = data + offsets[0], data + offsets[1], prod(shape) * dtype.itemsize
    if not data <= start <= stop <= size:
        raise CheckpointError(
            f"{name!r} in {where} should lie in bytes {start} to {stop}, but the file has {size}: it is truncated"
        )
    if stop - start != needed:
        raise CheckpointError(
            f"{name!r} in {where} has {stop - start} bytes, but {said['dtype']} of shape {tuple(shape)} takes {needed}"
        )
    return Tensor(dtype, tuple(shape), start, stop)


def are_sizes(values: Any) -> bool:
    """True for a list of whole numbers, none of them negative or absurd."""
    if not isinstance(values, list) or len(values) > MOST_DIMS:
        return False
    for value in values:  # noqa: SIM110  # of every tensor of every file: a generator takes twice as long
        if type(value) is not int or not 0 <= value < 2**62:
            return False
    return True


def _check_order(where: str, tensors: Mapping[str, Tensor], data: int, size: int) -> None:
    """Bytes are those of one tensor each, and none is left over."""
    at, before = data, ""
    for name, tensor in sorted(tensors.items(), key=lambda item: (item[1].start, item[1].stop)):
        if tensor.start < at:
            raise CheckpointError(f"{where}: bytes {tensor.start} to {at} belong both to {before!r} and to {name!r}")
        if tensor.start > at:
            raise CheckpointError(f"{where}: bytes {at} to {tensor.start} belong to no tensor")
        at, before = tensor.stop, name
    if at != size:
        raise CheckpointError(f"{where}: bytes {at} to {size} belong to no tensor")


def header_bytes(tensors: Mapping[str, tuple[torch.dtype, Sequence[int]]], metadata: Mapping[str, str]) -> bytes:
    """The header of a file that has these tensors one after the other, with the length before it."""
    said: dict[str, Any] = {"__metadata__": dict(metadata)} if metadata else {}
    at = 0
    for name, (dtype, shape) in tensors.items():
        stop = at + prod(shape) * dtype.itemsize
        said[name] = {"dtype": name_of(dtype, name), "shape": list(shape), "data_offsets": [at, stop]}
        at = stop
    text = json.dumps(said, separators=(",", ":")).encode()
    if len(text) > MOST_HEADER:
        raise CheckpointError(f"a header of {len(text)} bytes is more than the format allows: write more files")
    text += b" " * (-(8 + len(text)) % 64)  # so that the elements of all dtypes are aligned
    return len(text).to_bytes(8, "little") + text


def check_storable(name: str, dtype: torch.dtype) -> None:
    """Refuse what has no place in a header."""
    if name == "__metadata__":
        raise CheckpointError(f"a tensor of safetensors cannot be called {name!r}: rename= gives it another name")
    name_of(dtype, name)


def name_of(dtype: torch.dtype, what: str) -> str:
    """What the format calls a dtype."""
    if dtype not in NAMES:
        raise CheckpointError(f"{what!r} is {dtype}, which safetensors cannot hold: cast it, or choose another format")
    return NAMES[dtype]


def read_index(files: Files, name: str) -> dict[str, str]:
    """Which file each tensor is in, by an index as Hugging Face writes it."""
    where = files.shown(name)
    said = parsed(files.read(name), where).get("weight_map")
    if not isinstance(said, dict):
        raise CheckpointError(f"{where} has no weight_map")
    return {tensor: inside(file, where) for tensor, file in said.items()}


def open_files(files: Files, names: Sequence[str], expected: Mapping[str, str] | None = None) -> Checkpoint:
    """The tensors of some files; `expected` says in which of them each should be."""
    entries, metadata, first = dict[str, Entry](), dict[str, str](), dict[str, str]()
    for number, file in enumerate(names):
        header = read_header(files, file)
        metadata |= header.metadata
        for name, tensor in header.tensors.items():
            if expected is not None and expected.get(name, file) != file:
                continue  # as it is in another file, too
            if first.setdefault(name, file) != file:
                both = f"{files.shown(first[name])} and {files.shown(file)}"
                raise CheckpointError(f"{name!r} is both in {both}: an index must say which of them counts")
            entries[name] = whole_entry(name, tensor.shape, tensor.dtype, number, tensor.start, names, files)
    for name, file in (expected or {}).items():
        if name not in entries:
            raise CheckpointError(f"{files.shown(file)} should have {name!r}, by the index, but does not")
    return Checkpoint(files, "safetensors", entries, metadata=metadata)


def open_indexed(files: Files, index: str) -> Checkpoint:
    """As an index says."""
    expected = read_index(files, index)
    return open_files(files, sorted(set(expected.values())), expected)


def looks_like_one(files: Files, name: str) -> bool:
    """True for a file that begins as one does, whatever its name."""
    start = files.read(name, 0, min(9, files.size(name)))
    return len(start) == 9 and start[8:] == b"{" and 2 <= int.from_bytes(start[:8], "little") <= MOST_HEADER
