"""Archives as torch.save writes them, streamed: tensors are written as they come, none has to be in memory."""

from __future__ import annotations

import io
import pickle
import re
import zipfile
from collections import OrderedDict
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from itertools import chain
from math import prod
from typing import IO, Any

import torch
from torch._utils import _rebuild_tensor_v2, _rebuild_tensor_v3  # names in the format

from shardwise.checkpoint.opaque import Opaque, OpaqueError, opaque_in
from shardwise.checkpoint.writing import write_tensor
from shardwise.containers.container import is_sharded
from shardwise.errors import CheckpointError
from shardwise.geometry import row_major

ALIGN = 64
NAMED = re.compile(r"\w+(\.\w+)*")
LEGACY = {
    torch.float32: torch.FloatStorage,
    torch.float64: torch.DoubleStorage,
    torch.float16: torch.HalfStorage,
    torch.bfloat16: torch.BFloat16Storage,
    torch.int64: torch.LongStorage,
    torch.int32: torch.IntStorage,
    torch.int16: torch.ShortStorage,
    torch.int8: torch.CharStorage,
    torch.uint8: torch.ByteStorage,
    torch.bool: torch.BoolStorage,
    torch.complex64: torch.ComplexFloatStorage,
    torch.complex128: torch.ComplexDoubleStorage,
}


class Stored:
    """Stands for a tensor in what is pickled: row-major, in a record of its own."""

    def __init__(self, key: str, dtype: torch.dtype, shape: tuple[int, ...]) -> None:
        self.key, self.dtype, self.shape = key, dtype, shape

    def __reduce__(self) -> tuple[Any, ...]:
        where: tuple[Any, ...] = (_Record(self), 0, self.shape, row_major(self.shape), False, OrderedDict())
        if self.dtype in LEGACY:
            return _rebuild_tensor_v2, where
        return _rebuild_tensor_v3, (*where, self.dtype, None)


class _Record:
    """Stands for its storage."""

    def __init__(self, stored: Stored) -> None:
        self.stored = stored


Records = dict[str, tuple[int, Callable[[IO[bytes]], None]]]  # by key: the bytes, and what writes them


class _Pickler(pickle.Pickler):
    """Tensors that values have in them become records, too."""

    def __init__(self, file: IO[bytes], records: Records) -> None:
        super().__init__(file, protocol=2)
        self._records = records

    def reducer_override(self, obj: Any) -> Any:
        if not isinstance(obj, torch.Tensor):
            return NotImplemented
        if is_sharded(obj):
            raise CheckpointError(
                f"{obj!r} is inside a value that one rank saves whole: put it into a dict or list of the state dict"
            )
        key = f"value{len(self._records)}"
        self._records[key] = obj.numel() * obj.element_size(), partial(write_tensor, obj)
        return Stored(key, obj.dtype, tuple(obj.shape)).__reduce__()

    def persistent_id(self, obj: Any) -> Any:
        if not isinstance(obj, _Record):
            return None
        stored, count = obj.stored, prod(obj.stored.shape)
        if stored.dtype in LEGACY:
            return "storage", LEGACY[stored.dtype], stored.key, "cpu", count
        return "storage", torch.UntypedStorage, stored.key, "cpu", count * stored.dtype.itemsize


SLOW: Any = pickle._Pickler  # in Python, and open to other instructions


class _Carrier(SLOW):  # type: ignore[misc]
    """Also writes objects of unknown classes, as they were: by the name of the class, which is not imported."""

    def __init__(self, file: IO[bytes], records: Records) -> None:
        super().__init__(file, protocol=2)
        self._records = records

    reducer_override, persistent_id = _Pickler.reducer_override, _Pickler.persistent_id

    def save(self, obj: Any, save_persistent_id: bool = True) -> None:
        """The instructions that made the object are written again."""
        if not isinstance(obj, Opaque):
            super().save(obj, save_persistent_id)
            return
        if not NAMED.fullmatch(obj.module) or not NAMED.fullmatch(obj.qualname):
            raise CheckpointError(f"{obj!r} has no name that can be written: objects='drop' leaves it out")
        self._save_name(obj.module, obj.qualname)
        if obj.how != "name":
            self._save_parts(obj)

    def _save_name(self, module: str, qualname: str) -> None:
        """This protocol has only names of modules; what is inside of a class is an attribute of it."""
        owner, _, name = qualname.rpartition(".")
        if not owner:
            self.write(pickle.GLOBAL + f"{module}\n{name}\n".encode())
            return
        self.write(pickle.GLOBAL + b"builtins\ngetattr\n")
        self._save_name(module, owner)
        self.save(name)
        self.write(pickle.TUPLE2 + pickle.REDUCE)

    def _save_parts(self, obj: Opaque) -> None:
        self.save(obj.parts.args)
        self.write(pickle.REDUCE if obj.how == "call" else pickle.NEWOBJ)
        for code, listed in (pickle.APPENDS, obj.parts.items), (pickle.SETITEMS, [*chain(*obj.parts.pairs)]):
            if listed:
                self.write(pickle.MARK)
                for item in listed:
                    self.save(item)
                self.write(code)
        if obj.parts.state is not None:
            self.save(obj.parts.state)
            self.write(pickle.BUILD)


class _Counted(io.RawIOBase):
    """A stream that begins here, and cannot go back: an archive may lie inside of a file."""

    def __init__(self, file: IO[bytes]) -> None:
        self._file, self._at = file, 0

    def writable(self) -> bool:
        return True

    def write(self, data: Any) -> int:
        self._file.write(data)
        self._at += memoryview(data).nbytes
        return memoryview(data).nbytes

    def tell(self) -> int:
        return self._at


def write_archive(file: IO[bytes], value: Any, records: Records) -> int:
    """Write a value that has `Stored` in it; `records` has for the key of each its bytes, and what writes them.

    Returns the bytes of the archive.
    """
    counted = _Counted(file)
    text, records = _pickled(value, records)
    with zipfile.ZipFile(counted, "w", zipfile.ZIP_STORED) as archive:
        for name, data in ("data.pkl", text), ("byteorder", b"little"):
            with _opened(archive, counted, name, len(data)) as record:
                record.write(data)
        for key, (size, write) in records.items():
            with _opened(archive, counted, f"data/{key}", size) as record:
                write(record)
        with _opened(archive, counted, "version", 2) as record:
            record.write(b"3\n")
    return counted.tell()


def _pickled(value: Any, records: Records) -> tuple[bytes, Records]:
    """The pickle, and the records with those of tensors in values."""
    for kind in (_Pickler, _Carrier):  # which is slower
        text, found = io.BytesIO(), dict(records)
        with suppress(OpaqueError):
            kind(text, found).dump(value)
            break
    return text.getvalue(), found


def _opened(archive: zipfile.ZipFile, counted: _Counted, name: str, size: int) -> IO[bytes]:
    """A record whose first byte is aligned, by a field of the header that nobody reads."""
    info, large = zipfile.ZipInfo(f"archive/{name}"), size >= zipfile.ZIP64_LIMIT
    start = counted.tell() + 30 + len(info.filename) + 4 + (20 if large else 0)
    padding = -start % ALIGN
    info.extra = b"FB" + padding.to_bytes(2, "little") + b"Z" * padding
    return archive.open(info, "w", force_zip64=large)


def saved(value: Any) -> bytes:
    """What torch.save writes of a value without tensors that are ours."""
    file = io.BytesIO()
    if opaque_in(value) is None:
        torch.save(value, file)
    else:
        write_archive(file, value, {})
    return file.getvalue()
