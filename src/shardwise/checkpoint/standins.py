"""What a pickle may name: stand-ins that it cannot change, and that call nothing but what is written here."""

from __future__ import annotations

import pickle
import re
from collections import Counter, OrderedDict, defaultdict, deque
from collections.abc import Callable, Iterator, Mapping
from datetime import date, datetime, time, timedelta, timezone
from functools import partial
from math import prod
from pathlib import Path, PurePosixPath
from typing import Any
from uuid import UUID

import numpy as np
import torch

from shardwise.checkpoint.foreign import Foreign, foreign_class, is_foreign_class, is_sharding
from shardwise.quoting import brief

FACTORIES: dict[str | None, Callable[[], Any] | None] = {  # of defaultdicts
    None: None,
    **{kind.__name__: kind for kind in (dict, list, tuple, set, int, float, bool, str)},
}
MOST = 2**62  # of any number that is a size, an offset or a stride
MOST_CLASSES = 10_000  # that are not known, in a pickle
RECONSTRUCTORS = (("copyreg", "_reconstructor"), ("copy_reg", "_reconstructor"))
ATTRIBUTES = (("builtins", "getattr"), ("__builtin__", "getattr"))
LONGEST = 1000  # characters of the name of a class inside of others
MOST_DIMS = 64  # as in numpy and torch


class Sealed:
    """A stand-in that a pickle cannot change: what it says of its state is refused."""

    __slots__ = ()

    def __setstate__(self, state: Any) -> None:
        raise pickle.UnpicklingError(f"{type(self).__name__} has no state")

    def __repr__(self) -> str:
        return f"<{type(self).__name__}>"  # without its address: it may become a part of a name


class Call(Sealed):
    """A function that a pickle may call."""

    __slots__ = ("_work",)

    def __init__(self, work: Callable[..., Any]) -> None:
        self._work = work

    def __call__(self, *args: Any) -> Any:
        return self._work(*args)


class Name(Sealed):
    """Something that a pickle may name, and no more."""

    __slots__ = ("name",)

    def __init__(self, name: str) -> None:
        self.name = name


class Holder(Sealed):
    """A value that a pickle could change, kept from it."""

    __slots__ = ("value",)

    def __init__(self, value: Any) -> None:
        self.value = value


class Record:
    """An object of a known class: its state is kept as it was written, for others to check."""

    __slots__ = ("state",)

    def __setstate__(self, state: Any) -> None:
        self.state = state

    def get(self, field: str) -> Any:
        """A field of its state, or None."""
        state = getattr(self, "state", None)
        return state.get(field) if isinstance(state, dict) else None


class Foreigners(Mapping[tuple[str, str], Any]):
    """A class of its own for every name that is not known; but for sharded tensors, which are no plain values."""

    def __init__(self) -> None:
        self._made = dict[tuple[str, str], Any]()

    def __contains__(self, key: object) -> bool:
        return key not in KNOWN and key not in COPIES and not (isinstance(key, tuple) and is_sharding(*key))

    def __getitem__(self, key: tuple[str, str]) -> Any:
        if key in RECONSTRUCTORS:
            return Call(_reconstructed)
        return Call(self._attribute) if key in ATTRIBUTES else self._class(*key)

    def _class(self, module: str, qualname: str) -> type[Foreign]:
        if (module, qualname) not in self._made:
            if len(self._made) >= MOST_CLASSES:
                raise pickle.UnpicklingError(f"it names more than {MOST_CLASSES} classes")
            self._made[module, qualname] = foreign_class(module, qualname)
        return self._made[module, qualname]

    def _attribute(self, owner: Any, name: Any) -> Any:
        """How old protocols name what is inside of a class: another class, a method, a member of an Enum."""
        if is_foreign_class(owner) and type(name) is str:
            if len(owner.qualname) + len(name) > LONGEST:  # each is longer than the one before, for a few bytes
                raise pickle.UnpicklingError(f"it names a class with more than {LONGEST} characters")
            return self._class(owner.module, f"{owner.qualname}.{name}")
        return self._class("builtins", "getattr")(owner, name)

    def __iter__(self) -> Iterator[tuple[str, str]]:
        return iter(self._made)

    def __len__(self) -> int:
        return len(self._made)


def _reconstructed(kind: Any, base: Any, state: Any) -> Foreign:
    """How old protocols make an object."""
    if not is_foreign_class(kind) or not is_foreign_class(base) or base.qualname != "object" or state is not None:
        raise pickle.UnpicklingError("an object is not made as Python does it")
    made: Foreign = kind.__new__(kind)
    return made


class StorageKind(Sealed):
    """A class of storages: what their elements are."""

    __slots__ = ("dtype",)

    def __init__(self, dtype: torch.dtype) -> None:
        self.dtype = dtype


class Storage(Sealed):
    """Bytes beside the pickle, by a key."""

    __slots__ = ("bytes", "dtype", "key")

    def __init__(self, key: str, dtype: torch.dtype, bytes: int) -> None:
        self.key, self.dtype, self.bytes = key, dtype, bytes


class SavedTensor(Sealed):
    """A tensor in a storage: offset and strides are counted in elements."""

    __slots__ = ("dtype", "offset", "shape", "storage", "strides")
    shards = ()  # lets traverse_state_dict see that it is a tensor, in lists, too

    def __init__(
        self, storage: Storage, dtype: torch.dtype, offset: int, shape: tuple[int, ...], strides: tuple[int, ...]
    ) -> None:
        self.storage, self.dtype, self.offset, self.shape, self.strides = storage, dtype, offset, shape, strides

    @property
    def elements(self) -> int:
        """How many of its storage lie before its last one and with it."""
        steps = zip(self.shape, self.strides, strict=True)
        return self.offset + sum((size - 1) * step for size, step in steps) + 1 if prod(self.shape) else 0


class Ordered(OrderedDict[Any, Any]):
    """A dict in order; the attributes that torch hangs on it are left out."""

    def __setstate__(self, state: Any) -> None:
        pass


class Wide(tuple[Any, ...]):
    """A tuple with too much in it to be a key: to hash it could take forever."""

    __slots__ = ()
    __hash__ = None  # type: ignore[assignment]


class Frozen(frozenset[Any]):
    """A frozenset that is no key, nor in another one: to compare such could take forever."""

    __slots__ = ()
    __hash__ = None  # type: ignore[assignment]


def frozen(items: Any = ()) -> frozenset[Any]:
    """A frozenset, which can be a key where it has no containers in it."""
    found = frozenset(items)
    return Frozen(found) if any(isinstance(item, tuple | frozenset) for item in found) else found


class Tally(Counter[Any]):
    """A Counter without attributes."""

    __slots__ = ()

    def __setstate__(self, state: Any) -> None:
        raise pickle.UnpicklingError("a Counter has no state")


class Default(defaultdict[Any, Any]):
    """A defaultdict that makes nothing yet."""

    __slots__ = ("factory",)

    def __init__(self, factory: Any = None) -> None:
        self.factory = getattr(factory, "name", None)
        known = factory is None or isinstance(factory, Name) or is_foreign_class(factory)
        if not known or self.factory not in FACTORIES:
            raise pickle.UnpicklingError("a defaultdict makes something else than empty values")

    def __setstate__(self, state: Any) -> None:
        raise pickle.UnpicklingError("a defaultdict has no state")


class Window(deque[Any]):
    """A deque without attributes."""

    __slots__ = ()

    def __setstate__(self, state: Any) -> None:
        raise pickle.UnpicklingError("a deque has no state")


class Unique(Holder):
    """A UUID."""

    __slots__ = ()

    def __new__(cls) -> Unique:
        made = super().__new__(cls)
        made.value = None
        return made

    def __init__(self) -> None:
        pass

    def __setstate__(self, state: Any) -> None:
        self.value = UUID(int=state["int"])


def numpy_dtype(code: Any) -> np.dtype[Any]:
    """A dtype of plain numbers.

    >>> numpy_dtype("f4")
    dtype('float32')
    """
    if not _is_plain(code):
        raise pickle.UnpicklingError(f"numpy's dtype {brief(code)} is not one of plain numbers")
    return np.dtype("<" + code)


def _is_plain(code: Any) -> bool:
    return isinstance(code, str) and re.fullmatch("[biufc][0-9]{1,2}", code) is not None


class NumpyType(Holder):
    """A dtype of numpy: of plain numbers that are little, or else an object like those of unknown classes."""

    __slots__ = ("_args",)

    def __init__(self, code: Any, *rest: Any) -> None:
        self._args = (code, *rest)
        unknown = is_foreign_class(code) or (type(code) is str and not _is_plain(code))
        super().__init__(NUMPY_TYPE(*self._args) if unknown else numpy_dtype(code))

    def __setstate__(self, state: Any) -> None:
        if state[1] not in ("<", "|", "=") or isinstance(self.value, Foreign):
            self.value = NUMPY_TYPE(*self._args)
            self.value.state = state

    @property
    def dtype(self) -> np.dtype[Any] | None:
        """None where it is not of plain numbers."""
        return None if isinstance(self.value, Foreign) else self.value


NUMPY_TYPE = foreign_class("numpy", "dtype")


class NumpyArray(Holder):
    """An array of numpy: of plain numbers, or else an object like those of unknown classes."""

    __slots__ = ()

    def __init__(self, unknown: type[Foreign], *args: Any) -> None:
        super().__init__(unknown(*args))

    def __setstate__(self, state: Any) -> None:
        _, shape, kind, fortran, data = state
        if isinstance(kind, NumpyType) and kind.dtype is None:
            self.value.state = state
            return
        if not isinstance(kind, NumpyType) or kind.dtype is None or type(data) is not bytes:
            raise pickle.UnpicklingError("an array of numpy is not one of plain numbers")
        if len(data) != prod(sizes(shape)) * kind.dtype.itemsize:
            raise pickle.UnpicklingError(f"an array of shape {shape} has {len(data)} bytes")
        self.value = np.frombuffer(bytearray(data), kind.dtype).reshape(shape, order="F" if fortran else "C")


def sizes(values: Any) -> tuple[int, ...]:
    """A tuple of whole numbers, none of them negative or absurd."""
    if type(values) is tuple and len(values) <= MOST_DIMS:
        for value in values:
            if type(value) is not int or not 0 <= value < MOST:
                break
        else:
            return values
    raise pickle.UnpicklingError(f"sizes, offsets and strides must be tuples of at most {MOST_DIMS} whole numbers")


def _tensor(storage: Any, offset: Any, shape: Any, strides: Any, *rest: Any) -> SavedTensor:
    """_rebuild_tensor, and _rebuild_tensor_v2 with whether it requires grad, hooks and metadata."""
    if not isinstance(storage, Storage):
        raise pickle.UnpicklingError("a tensor has no storage")
    return _typed_tensor(storage, offset, shape, strides, None, None, storage.dtype, *rest[2:])


def _typed_tensor(
    storage: Any, offset: Any, shape: Any, strides: Any, grad: Any, hooks: Any, dtype: Any, metadata: Any = None
) -> SavedTensor:
    """_rebuild_tensor_v3."""
    if not isinstance(storage, Storage) or not isinstance(dtype, torch.dtype) or len(sizes(shape)) != len(strides):
        raise pickle.UnpicklingError("a tensor has no storage, or no dtype, or other strides than sizes")
    if metadata:
        raise pickle.UnpicklingError("a tensor is a conjugate or negative view: call resolve_conj() before saving")
    return SavedTensor(storage, dtype, sizes((offset,))[0], sizes(shape), sizes(strides))


def _parameter(data: Any, *_: Any) -> SavedTensor:
    if not isinstance(data, SavedTensor):
        raise pickle.UnpicklingError("a parameter has no data")
    return data


def _of_type(rebuild: Any, kind: Any, args: Any, *_: Any) -> Any:
    """Tensors with attributes, which are left out; of a class that is not known, an object with the tensor in it."""
    known = isinstance(kind, Name) or is_foreign_class(kind)
    if not isinstance(rebuild, Call) or not known or type(args) is not tuple:
        raise pickle.UnpicklingError("a tensor is of an unknown type")
    if is_foreign_class(kind):
        return foreign_class(kind.module, f"{kind.qualname} (a kind of tensor)")(rebuild(*args))
    return _parameter(rebuild(*args))


def _scalar(unknown: type[Foreign], kind: Any, data: Any) -> Any:
    if isinstance(kind, NumpyType) and kind.dtype is None:
        return unknown(kind, data)
    if not isinstance(kind, NumpyType) or type(data) is not bytes or len(data) != kind.value.itemsize:
        raise pickle.UnpicklingError("a scalar of numpy is not a plain number")
    return np.frombuffer(data, kind.dtype)[0]


def _path(*parts: Any) -> Holder:
    return Holder(Path(*parts) if issubclass(type(Path()), PurePosixPath) else PurePosixPath(*parts))


def _pure_path(*parts: Any) -> Holder:
    return Holder(PurePosixPath(*parts))


def _moment(kind: Any, size: int) -> Call:
    """A date or a time, as pickles have it: its bytes, and perhaps its zone, which may be of an unknown class."""
    unknown = foreign_class("datetime", kind.__name__)

    def made(data: Any, *zone: Any) -> Any:
        if len(zone) == 1 and isinstance(zone[0], Foreign):
            return unknown(data, *zone)
        if type(data) is not bytes or len(data) != size or not all(type(one) is timezone for one in zone):
            raise pickle.UnpicklingError(f"a {kind.__name__} is not described as Python does it")
        return kind(data, *zone)

    return Call(made)


def _whole_numbers(kind: Any) -> Call:
    """What is made of whole numbers."""

    def made(*args: Any) -> Any:
        if not all(type(arg) is int for arg in args):
            raise pickle.UnpicklingError(f"a {kind.__name__} is not made of whole numbers")
        return kind(*args)

    return Call(made)


def _zone(*args: Any) -> timezone:
    if [type(arg) for arg in args] not in ([timedelta], [timedelta, str]):
        raise pickle.UnpicklingError("a timezone is not described as Python does it")
    return timezone(*args)


def _complex(real: Any, imaginary: Any) -> complex:
    return complex(float(real), float(imaginary))


def _device(kind: Any, index: Any = None) -> torch.device:
    return torch.device(kind) if index is None else torch.device(kind, index)


def _latin(text: Any = b"", encoding: Any = None) -> bytes:
    """How old protocols write bytes."""
    if type(text) is bytes:
        return text
    if type(text) is not str or encoding not in ("latin1", "latin-1"):
        raise pickle.UnpicklingError(f"text as {brief(encoding)} is not how bytes are written")
    return text.encode("latin1")


KINDS = {
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
Names = Mapping[tuple[str, str], Any]
KNOWN: Names = {
    **{("torch", name): StorageKind(dtype) for name, dtype in KINDS.items()},
    **{("torch", name): value for name, value in vars(torch).items() if isinstance(value, torch.dtype)},
    ("torch.storage", "UntypedStorage"): StorageKind(torch.uint8),
    ("torch", "UntypedStorage"): StorageKind(torch.uint8),
    ("torch._utils", "_rebuild_tensor"): Call(_tensor),
    ("torch._utils", "_rebuild_tensor_v2"): Call(_tensor),
    ("torch._utils", "_rebuild_tensor_v3"): Call(_typed_tensor),
    ("torch._utils", "_rebuild_parameter"): Call(_parameter),
    ("torch._utils", "_rebuild_parameter_with_state"): Call(_parameter),
    ("torch._tensor", "_rebuild_from_type_v2"): Call(_of_type),
    ("torch", "Tensor"): Name("torch.Tensor"),
    ("torch.nn.parameter", "Parameter"): Name("torch.nn.Parameter"),
    ("torch", "device"): Call(_device),
    ("torch.serialization", "_get_layout"): Call(Name),
    ("collections", "defaultdict"): Call(Default),
    ("datetime", "datetime"): _moment(datetime, 10),
    ("datetime", "date"): _moment(date, 4),
    ("datetime", "time"): _moment(time, 6),
    ("datetime", "timedelta"): _whole_numbers(timedelta),
    ("datetime", "timezone"): Call(_zone),
    ("uuid", "UUID"): Unique,
    ("builtins", "range"): _whole_numbers(range),
    ("__builtin__", "xrange"): _whole_numbers(range),
    ("numpy", "dtype"): Call(NumpyType),
    ("numpy", "ndarray"): Name("numpy.ndarray"),
    **{
        (module, name): Call(partial(make, foreign_class(module, name)))
        for module in ("numpy.core.multiarray", "numpy._core.multiarray")
        for name, make in (("scalar", _scalar), ("_reconstruct", NumpyArray))
    },
    **{(module, "PosixPath"): Call(_path) for module in ("pathlib", "pathlib._local")},
    **{(module, "PurePosixPath"): Call(_pure_path) for module in ("pathlib", "pathlib._local")},
    **{(module, "complex"): Call(_complex) for module in ("builtins", "__builtin__")},
    ("__builtin__", "long"): Name("int"),  # as old protocols call them
    ("__builtin__", "unicode"): Name("str"),
    **{
        (module, name): Name(name)
        for module in ("builtins", "__builtin__")
        for name in ("dict", "list", "tuple", "set", "int", "float", "bool", "str")
    },
}
COPIES: Names = {  # what makes a copy of something that the pickle has
    **{(module, "set"): set for module in ("builtins", "__builtin__")},
    **{(module, "frozenset"): frozen for module in ("builtins", "__builtin__")},
    **{(module, "bytearray"): lambda *args: bytearray(_latin(*args)) for module in ("builtins", "__builtin__")},
    **{(module, "bytes"): _latin for module in ("builtins", "__builtin__")},
    ("_codecs", "encode"): _latin,
    ("collections", "OrderedDict"): Ordered,
    ("collections", "Counter"): Tally,
    ("collections", "deque"): Window,
    ("torch", "Size"): torch.Size,
}
