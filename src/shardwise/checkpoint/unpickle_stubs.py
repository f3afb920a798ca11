"""What a pickle may name: stubs that it cannot change, and that call nothing but the functions in this file."""

from __future__ import annotations

import pickle
import re
from collections import Counter, OrderedDict, defaultdict, deque
from collections.abc import Callable, Iterable, Mapping
from datetime import date, datetime, time, timedelta, timezone
from functools import partial
from math import prod
from pathlib import Path, PurePosixPath
from typing import Any, cast
from uuid import UUID

import numpy as np
import torch

from shardwise.checkpoint.opaque import UnknownObject, is_unknown_class, unknown_class
from shardwise.containers.torch_private import REBUILD_MODULE, TENSOR_MODULE
from shardwise.quoting import brief

FACTORIES: dict[str | None, Callable[[], object] | None] = {  # of defaultdicts
    None: None,
    **{kind.__name__: kind for kind in (dict, list, tuple, set, int, float, bool, str)},
}
MAX_SIZE = 2**62  # of any number that is a size, an offset or a stride
MAX_DIMS = 64  # as in numpy and torch


class Stateless:
    """What a pickle cannot set attributes of."""

    __slots__ = ()

    def __setstate__(self, state: object) -> None:
        raise pickle.UnpicklingError(f"{type(self).__name__} has no state")


class Stub(Stateless):
    """Takes the place of something that the pickle names or makes."""

    __slots__ = ()

    def __repr__(self) -> str:
        return f"<{type(self).__name__}>"  # without its address: it may become a part of a name


class FunctionStub(Stub):
    """A function that a pickle may call."""

    __slots__ = ("_work",)

    def __init__(self, work: Callable[..., object]) -> None:
        self._work = work

    def __call__(self, *args: object) -> object:
        return self._work(*args)


class NameStub(Stub):
    """Something that a pickle may name, and no more."""

    __slots__ = ("name",)

    def __init__(self, name: str) -> None:
        self.name = name


class ValueStub(Stub):
    """Wraps a value that a pickle could change."""

    __slots__ = ("value",)

    def __init__(self, value: object) -> None:
        self.value = value


class RecordStub:
    """An object of a known class: its state is stored as it is, for others to check."""

    __slots__ = ("state",)
    state: Any

    def __setstate__(self, state: object) -> None:
        self.state = state

    def get(self, field: str) -> object:
        """A field of its state, or None."""
        state = getattr(self, "state", None)
        return state.get(field) if isinstance(state, dict) else None


class StorageType(Stub):
    """A class of storages: the dtype of their elements."""

    __slots__ = ("dtype",)

    def __init__(self, dtype: torch.dtype) -> None:
        self.dtype = dtype


class StorageStub(Stub):
    """Bytes beside the pickle, by a key."""

    __slots__ = ("bytes", "dtype", "key")

    def __init__(self, key: str, dtype: torch.dtype, bytes: int) -> None:
        self.key, self.dtype, self.bytes = key, dtype, bytes


class TensorStub(Stub):
    """A tensor in a storage: offset and strides are counted in elements."""

    __slots__ = ("dtype", "offset", "shape", "storage", "strides")
    shards = ()  # tells traverse_state_dict that it is a tensor, in lists, too

    def __init__(
        self, storage: StorageStub, dtype: torch.dtype, offset: int, shape: tuple[int, ...], strides: tuple[int, ...]
    ) -> None:
        self.storage, self.dtype, self.offset, self.shape, self.strides = storage, dtype, offset, shape, strides

    @property
    def elements(self) -> int:
        """The elements of its storage up to its last one."""
        steps = zip(self.shape, self.strides, strict=True)
        return self.offset + sum((size - 1) * step for size, step in steps) + 1 if prod(self.shape) else 0


class OrderedDictStub(OrderedDict[object, object]):
    """An OrderedDict; the attributes that torch sets on it are ignored."""

    def __setstate__(self, state: object) -> None:
        pass


class UnhashableTuple(tuple[object, ...]):
    """A tuple with too much in it to be a key: hashing it could take forever."""

    __slots__ = ()
    __hash__ = None  # type: ignore[assignment]


class UnhashableFrozenset(frozenset[object]):
    """A frozenset that cannot be a key, or in another one: comparing such could take forever."""

    __slots__ = ()
    __hash__ = None  # type: ignore[assignment]


def make_frozenset(items: Iterable[object] = ()) -> frozenset[object]:
    """A frozenset; hashable if it has no containers in it."""
    made = frozenset(items)
    return UnhashableFrozenset(made) if any(isinstance(item, tuple | frozenset) for item in made) else made


class CounterStub(Stateless, Counter[object]):
    """A Counter without attributes."""

    __slots__ = ()


class DequeStub(Stateless, deque[object]):
    """A deque without attributes."""

    __slots__ = ()


class DefaultDictStub(Stateless, defaultdict[object, object]):
    """A defaultdict that makes nothing yet."""

    __slots__ = ("factory",)

    def __init__(self, factory: object = None) -> None:
        self.factory = getattr(factory, "name", None)
        known = factory is None or isinstance(factory, NameStub) or is_unknown_class(factory)
        if not known or self.factory not in FACTORIES:
            raise pickle.UnpicklingError("a defaultdict makes something else than empty values")


class UuidStub(ValueStub):
    """A UUID."""

    __slots__ = ()

    def __new__(cls) -> UuidStub:
        made = super().__new__(cls)
        made.value = None
        return made

    def __init__(self) -> None:
        pass

    def __setstate__(self, state: object) -> None:
        self.value = UUID(int=cast("dict[str, int]", state)["int"])


def numpy_dtype(code: object) -> np.dtype[np.generic]:
    """A dtype of plain numbers.

    >>> numpy_dtype("f4")
    dtype('float32')
    """
    if not _is_plain(code):
        raise pickle.UnpicklingError(f"numpy's dtype {brief(code)} is not one of plain numbers")
    return np.dtype(f"<{code}")


def _is_plain(code: object) -> bool:
    return isinstance(code, str) and re.fullmatch("[biufc][0-9]{1,2}", code) is not None


class NumpyDtypeStub(ValueStub):
    """A numpy dtype: of little-endian plain numbers, otherwise an object like those of unknown classes."""

    __slots__ = ("_args",)

    def __init__(self, code: object, *rest: object) -> None:
        self._args = (code, *rest)
        unknown = is_unknown_class(code) or (type(code) is str and not _is_plain(code))
        super().__init__(NUMPY_TYPE(*self._args) if unknown else numpy_dtype(code))

    def __setstate__(self, state: object) -> None:
        if cast("tuple[object, ...]", state)[1] not in ("<", "|", "=") or isinstance(self.value, UnknownObject):
            self.value = unknown = NUMPY_TYPE(*self._args)
            unknown.state = state

    @property
    def dtype(self) -> np.dtype[np.generic] | None:
        """None if it is not of plain numbers."""
        return self.value if isinstance(self.value, np.dtype) else None


NUMPY_TYPE = unknown_class("numpy", "dtype")


class NumpyArrayStub(ValueStub):
    """A numpy array: of plain numbers, otherwise an object like those of unknown classes."""

    __slots__ = ()

    def __init__(self, unknown: type[UnknownObject], *args: object) -> None:
        super().__init__(unknown(*args))

    def __setstate__(self, state: object) -> None:
        _, shape, kind, fortran, data = cast("tuple[object, ...]", state)
        dtype = kind.dtype if isinstance(kind, NumpyDtypeStub) else None
        if isinstance(kind, NumpyDtypeStub) and dtype is None and isinstance(self.value, UnknownObject):
            self.value.state = state
            return
        if dtype is None or type(data) is not bytes:
            raise pickle.UnpicklingError("a numpy array is not one of plain numbers")
        if len(data) != prod(sizes(shape)) * dtype.itemsize:
            raise pickle.UnpicklingError(f"an array of shape {shape} has {len(data)} bytes")
        self.value = np.frombuffer(bytearray(data), dtype).reshape(sizes(shape), order="F" if fortran else "C")


def sizes(values: object) -> tuple[int, ...]:
    """A tuple of sizes: whole numbers, not negative, not huge."""
    if type(values) is tuple and len(values) <= MAX_DIMS:
        for value in values:
            if type(value) is not int or not 0 <= value < MAX_SIZE:
                break
        else:
            return values
    raise pickle.UnpicklingError(f"sizes, offsets and strides must be tuples of at most {MAX_DIMS} whole numbers")


def _tensor(storage: object, offset: object, shape: object, strides: object, *rest: object) -> TensorStub:
    """_rebuild_tensor, and _rebuild_tensor_v2, which adds requires_grad, hooks and metadata."""
    if not isinstance(storage, StorageStub):
        raise pickle.UnpicklingError("a tensor has no storage")
    return _typed_tensor(storage, offset, shape, strides, None, None, storage.dtype, *rest[2:])


def _typed_tensor(
    storage: object,
    offset: object,
    shape: object,
    strides: object,
    grad: object,
    hooks: object,
    dtype: object,
    metadata: object = None,
) -> TensorStub:
    """_rebuild_tensor_v3."""
    if (
        not isinstance(storage, StorageStub)
        or not isinstance(dtype, torch.dtype)
        or len(sizes(shape)) != len(sizes(strides))
    ):
        raise pickle.UnpicklingError("a tensor has no storage, no dtype, or another number of strides than of sizes")
    if metadata:
        raise pickle.UnpicklingError("a tensor is a conjugate or negative view: call resolve_conj() before saving")
    return TensorStub(storage, dtype, sizes((offset,))[0], sizes(shape), sizes(strides))


def _parameter(data: object, *_: object) -> TensorStub:
    if not isinstance(data, TensorStub):
        raise pickle.UnpicklingError("a parameter has no data")
    return data


def tensor_of_type(rebuild: object, kind: object, args: object, *_: object) -> object:
    """Tensors with attributes, which are ignored; for an unknown class, an object with the tensor in it."""
    known = isinstance(kind, NameStub) or is_unknown_class(kind)
    if not isinstance(rebuild, FunctionStub) or not known or type(args) is not tuple:
        raise pickle.UnpicklingError("a tensor is of an unknown type")
    if is_unknown_class(kind):
        return unknown_class(kind.module, f"{kind.qualname} (a kind of tensor)")(rebuild(*args))
    return _parameter(rebuild(*args))


def _scalar(unknown: type[UnknownObject], kind: object, data: object) -> object:
    dtype = kind.dtype if isinstance(kind, NumpyDtypeStub) else None
    if isinstance(kind, NumpyDtypeStub) and dtype is None:
        return unknown(kind, data)
    if dtype is None or type(data) is not bytes or len(data) != dtype.itemsize:
        raise pickle.UnpicklingError("a numpy scalar is not a plain number")
    return cast("object", np.frombuffer(data, dtype)[0])


def _path(*parts: str) -> ValueStub:
    return ValueStub(Path(*parts) if issubclass(type(Path()), PurePosixPath) else PurePosixPath(*parts))


def _pure_path(*parts: str) -> ValueStub:
    return ValueStub(PurePosixPath(*parts))


def _moment(kind: Callable[..., object], size: int) -> FunctionStub:
    """A date or a time: its bytes, and perhaps its zone, which may be of an unknown class."""
    unknown = unknown_class("datetime", kind.__name__)

    def make(data: object, *zone: object) -> object:
        if len(zone) == 1 and isinstance(zone[0], UnknownObject):
            return unknown(data, *zone)
        if type(data) is not bytes or len(data) != size or not all(type(one) is timezone for one in zone):
            raise pickle.UnpicklingError(f"a {kind.__name__} is not described as Python does it")
        return kind(data, *zone)

    return FunctionStub(make)


def _whole_numbers(kind: Callable[..., object]) -> FunctionStub:
    """What is made of whole numbers."""

    def make(*args: object) -> object:
        if not all(type(arg) is int for arg in args):
            raise pickle.UnpicklingError(f"a {kind.__name__} is not made of whole numbers")
        return kind(*args)

    return FunctionStub(make)


def _zone(*args: object) -> timezone:
    if [type(arg) for arg in args] not in ([timedelta], [timedelta, str]):
        raise pickle.UnpicklingError("a timezone is not described as Python does it")
    return timezone(*cast("tuple[timedelta]", args))


def _complex(real: float, imaginary: float) -> complex:
    return complex(float(real), float(imaginary))


def _device(kind: str, index: int | None = None) -> torch.device:
    return torch.device(kind) if index is None else torch.device(kind, index)


def _latin(text: object = b"", encoding: object = None) -> bytes:
    """How old protocols write bytes."""
    if type(text) is bytes:
        return text
    if type(text) is not str or encoding not in ("latin1", "latin-1"):
        raise pickle.UnpicklingError(f"a string in encoding {brief(encoding)} is not how bytes are written")
    return text.encode("latin1")


STORAGE_TYPES = {
    "DoubleStorage": torch.float64,
    "FloatStorage": torch.float32,
    "HalfStorage": torch.float16,
    "BFloat16Storage": torch.bfloat16,
    "LongStorage": torch.int64,
    "IntStorage": torch.int32,
    "ShortStorage": torch.int16,
    "CharStorage": torch.int8,
    "ByteStorage": torch.uint8,
    "BoolStorage": torch.bool,
    "ComplexDoubleStorage": torch.complex128,
    "ComplexFloatStorage": torch.complex64,
    "QInt8Storage": torch.qint8,
    "QUInt8Storage": torch.quint8,
    "QInt32Storage": torch.qint32,
}
Names = Mapping[tuple[str, str], object]
KNOWN: Names = {
    **{("torch", name): StorageType(dtype) for name, dtype in STORAGE_TYPES.items()},
    **{("torch", name): value for name, value in vars(torch).items() if isinstance(value, torch.dtype)},
    ("torch.storage", "UntypedStorage"): StorageType(torch.uint8),
    ("torch", "UntypedStorage"): StorageType(torch.uint8),
    (REBUILD_MODULE, "_rebuild_tensor"): FunctionStub(_tensor),
    (REBUILD_MODULE, "_rebuild_tensor_v2"): FunctionStub(_tensor),
    (REBUILD_MODULE, "_rebuild_tensor_v3"): FunctionStub(_typed_tensor),
    (REBUILD_MODULE, "_rebuild_parameter"): FunctionStub(_parameter),
    (REBUILD_MODULE, "_rebuild_parameter_with_state"): FunctionStub(_parameter),
    (TENSOR_MODULE, "_rebuild_from_type_v2"): FunctionStub(tensor_of_type),
    ("torch", "Tensor"): NameStub("torch.Tensor"),
    ("torch.nn.parameter", "Parameter"): NameStub("torch.nn.Parameter"),
    ("torch", "device"): FunctionStub(_device),
    ("torch.serialization", "_get_layout"): FunctionStub(NameStub),
    ("collections", "defaultdict"): FunctionStub(DefaultDictStub),
    ("datetime", "datetime"): _moment(datetime, 10),
    ("datetime", "date"): _moment(date, 4),
    ("datetime", "time"): _moment(time, 6),
    ("datetime", "timedelta"): _whole_numbers(timedelta),
    ("datetime", "timezone"): FunctionStub(_zone),
    ("uuid", "UUID"): UuidStub,
    ("builtins", "range"): _whole_numbers(range),
    ("__builtin__", "xrange"): _whole_numbers(range),
    ("numpy", "dtype"): FunctionStub(NumpyDtypeStub),
    ("numpy", "ndarray"): NameStub("numpy.ndarray"),
    **{
        (module, name): FunctionStub(partial(make, unknown_class(module, name)))
        for module in ("numpy.core.multiarray", "numpy._core.multiarray")
        for name, make in (("scalar", _scalar), ("_reconstruct", NumpyArrayStub))
    },
    **{(module, "PosixPath"): FunctionStub(_path) for module in ("pathlib", "pathlib._local")},
    **{(module, "PurePosixPath"): FunctionStub(_pure_path) for module in ("pathlib", "pathlib._local")},
    **{(module, "complex"): FunctionStub(_complex) for module in ("builtins", "__builtin__")},
    ("__builtin__", "long"): NameStub("int"),  # as old protocols call them
    ("__builtin__", "unicode"): NameStub("str"),
    **{
        (module, name): NameStub(name)
        for module in ("builtins", "__builtin__")
        for name in ("dict", "list", "tuple", "set", "int", "float", "bool", "str")
    },
}
COPIES: Mapping[tuple[str, str], Callable[..., object]] = {  # what copies something that the pickle has
    **{(module, "set"): set for module in ("builtins", "__builtin__")},
    **{(module, "frozenset"): make_frozenset for module in ("builtins", "__builtin__")},
    **{(module, "bytearray"): lambda *args: bytearray(_latin(*args)) for module in ("builtins", "__builtin__")},
    **{(module, "bytes"): _latin for module in ("builtins", "__builtin__")},
    ("_codecs", "encode"): _latin,
    ("collections", "OrderedDict"): OrderedDictStub,
    ("collections", "Counter"): CounterStub,
    ("collections", "deque"): DequeStub,
    ("torch", "Size"): torch.Size,
}
