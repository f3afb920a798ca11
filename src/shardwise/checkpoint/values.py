"""The types of values beside tensors that every format can hold: what is loaded has the type of what was saved.

The index of our own format has them as JSON, by the table here. torch.save and DCP files have pickles, which
`pickles.py` reads back to the same types. Types that are not in the table are refused when saving.
"""

from __future__ import annotations

import json
from argparse import Namespace
from base64 import b64decode, b64encode
from collections import Counter, OrderedDict, defaultdict, deque
from collections.abc import Callable, Mapping
from dataclasses import is_dataclass
from datetime import date, datetime, time, timedelta, timezone
from enum import Enum
from io import BytesIO
from math import prod
from pathlib import Path, PurePath, PurePosixPath
from types import NoneType, SimpleNamespace, UnionType
from typing import Any, NamedTuple, TypeAlias, cast
from uuid import UUID

import numpy as np
import numpy.typing as npt
import torch

from shardwise.checkpoint.opaque import How, Opaque, Parts, attributes
from shardwise.checkpoint.segments import write_tensor
from shardwise.checkpoint.unpickle_stubs import FACTORIES, numpy_dtype
from shardwise.errors import CheckpointError
from shardwise.quoting import brief
from shardwise.state.traverse import Key, Place

JsonValue: TypeAlias = "bool | int | float | str | list[JsonValue] | dict[str, JsonValue] | None"
JsonObject = dict[str, JsonValue]


class ValueType(NamedTuple):
    """A type of values: its name in JSON, and how to turn it into simpler values and back."""

    name: str
    write: Callable[[Any], object]
    read: Callable[[Any], object]


ValueTypes = Mapping[type, ValueType]


def refuse_modules(flat: Mapping[str, object]) -> None:
    """Refuse models, optimizers and the like instead of their state dicts."""
    for name, value in flat.items():
        if callable(getattr(value, "state_dict", None)):
            raise TypeError(f"{name!r} is {type(value).__name__}: give its state_dict()")


def encode(value: object, where: str, types: ValueTypes | None = None) -> JsonValue:
    """The value as JSON, from which `decode` makes the same value again. `where` names the value in errors.

    >>> decode(encode({"betas": (0.9, 0.95), 3: [None, b"x"]}, "optimizer"))
    {'betas': (0.9, 0.95), 3: [None, b'x']}
    >>> encode([1, {"x": Namespace(lr=1)}], "args")
    Traceback (most recent call last):
    shardwise.errors.CheckpointError: 'args[1]['x']' is Namespace, which cannot be stored: give vars(value)
    """
    table = VALUE_TYPES if types is None else types

    def make(value: object, at: tuple[object, ...]) -> JsonValue:
        if type(value) in (NoneType, bool, str) or (type(value) is int and value.bit_length() <= 64):
            return cast("JsonValue", value)  # JSON readers refuse longer numbers
        if type(value) is list:
            return [make(item, (*at, place)) for place, item in enumerate(value)]
        kind = table.get(_table_key(value))
        if kind is None:
            steps = "".join(f"[{brief(key)}]" for key in at)
            raise CheckpointError(
                f"'{where}{steps}' is {type(value).__name__}, which cannot be stored: {remedy(value)}"
            )
        if isinstance(value, dict) and type(value) is not defaultdict:
            return {kind.name: [[make(key, at), make(item, (*at, key))] for key, item in value.items()]}
        if isinstance(value, set | frozenset):
            return {kind.name: [make(item, at) for item in cast("list[object]", kind.write(value))]}
        return {kind.name: make(kind.write(value), at)}

    return make(value, ())


def decode(json_value: JsonValue) -> object:
    """The value that was encoded."""
    if isinstance(json_value, list):
        return [decode(item) for item in json_value]
    if not isinstance(json_value, dict):
        return json_value
    if len(json_value) == 1:
        (name, item), *_ = json_value.items()
        if name in READ:
            return READ[name](decode(item))
    raise CheckpointError(f"{brief(json_value)} is not a recognized value")


def same_value(a: object, b: object) -> bool:
    """True for equal values of equal types, at every level: 1, 1.0 and True differ, 0.0 and -0.0 do, and a NaN equals
    itself. The order of dict keys is ignored.

    >>> same_value({"a": [1.0, float("nan")]}, {"a": [1.0, float("nan")]}), same_value([1], [True])
    (True, False)
    """
    return _text(a) == _text(b)


def _text(value: object) -> str:
    return json.dumps(_in_order(encode(value, "value", CARRIED)))


def _in_order(json_value: JsonValue) -> JsonValue:
    """With the pairs of dicts sorted."""
    if isinstance(json_value, list):
        return [_in_order(item) for item in json_value]
    if not isinstance(json_value, dict):
        return json_value
    return {
        name: sorted(made, key=json.dumps) if isinstance(made, list) and name in ("dict", "counter") else made
        for name, made in ((name, _in_order(item)) for name, item in json_value.items())
    }


def has_known_types(value: object) -> bool:
    """True if the value and all values in it have known types."""
    try:
        encode(value, "value", EVERY)
    except CheckpointError:
        return False
    return True


def _table_key(value: object) -> type:
    """The key of a value in the table; NoneType if it cannot be stored. numpy has a class for every dtype."""
    if isinstance(value, np.ndarray | np.generic):
        known = value.dtype.kind in "biufc" and value.dtype.isnative
        return NoneType if not known else np.generic if isinstance(value, np.generic) else type(value)
    if isinstance(value, np.dtype):
        return np.dtype if value.kind in "biufc" and value.isnative else NoneType
    if isinstance(value, datetime | time) and (value.fold or type(value.tzinfo) not in (NoneType, timezone)):
        return NoneType  # a zone with rules that are not stored; pickles of torch.save lose the fold
    if type(value) is defaultdict and value.default_factory not in FACTORIES.values():
        return NoneType
    return type(value)


REMEDIES: dict[type | UnionType, str] = {  # the first match wins
    Namespace | SimpleNamespace: "give vars(value)",
    Enum: "give value.name or value.value",
    PurePath: "give str(value)",
    np.ndarray | np.generic: "only plain numbers are; give value.tolist()",
    np.dtype: "give str(value)",
    datetime | time: "give value.astimezone(datetime.timezone.utc)",
    defaultdict: "give dict(value)",
    torch.Generator: "give value.get_state()",
    torch.Tensor: "tensors are stored in dicts, lists and tuples only",
    Mapping: "give dict(value)",
    str: "give str(value)",
    bool | int: "give int(value)",
    float: "give float(value)",
}


def remedy(value: object) -> str:
    """What to save instead."""
    if is_dataclass(value) and not isinstance(value, type):
        return "give dataclasses.asdict(value)"
    if isinstance(value, tuple):
        return "give value._asdict()" if hasattr(value, "_asdict") else "give tuple(value)"
    general = "leave it out, or make it of numbers, strings, lists, tuples and dicts"
    return next((text for kind, text in REMEDIES.items() if isinstance(value, kind)), general)


def _dtype(name: str) -> torch.dtype:
    dtype = getattr(torch, name, None)
    if not isinstance(dtype, torch.dtype):
        raise CheckpointError(f"this version of torch has no dtype {name!r}")
    return dtype


def _array(parts: tuple[str, tuple[int, ...], bytes]) -> npt.NDArray[np.generic]:
    code, shape, data = parts
    dtype = numpy_dtype(code)
    if len(data) != prod(shape) * dtype.itemsize:
        raise CheckpointError(f"an array of shape {shape} has {len(data)} bytes")
    return np.frombuffer(bytearray(data), dtype).reshape(shape)


def _opaque(module: str, name: str, how: How, *fields: Any) -> Opaque:
    parts = Parts(*fields)
    if how not in ("name", "call", "new") or any(type(p) is not tuple for p in (parts.args, parts.items, parts.pairs)):
        raise CheckpointError(f"the description of an object of {name} is invalid")
    return Opaque(str(module), str(name), how, lambda: parts, summary=attributes(parts.args, parts.state))


def _tensor_bytes(tensor: torch.Tensor) -> bytes:
    file = BytesIO()
    write_tensor(tensor, file)
    return file.getvalue()


def _moment(value: date | time) -> list[object]:
    """The fields of a date, a time or both."""
    names = ("year", "month", "day", "hour", "minute", "second", "microsecond", "tzinfo")
    return [getattr(value, name) for name in names if hasattr(value, name)]


_PATH = ValueType("path", str, Path if issubclass(type(Path()), PurePosixPath) else PurePosixPath)
VALUE_TYPES: dict[type, ValueType] = {
    int: ValueType("int", hex, lambda text: int(text, 16)),
    float: ValueType("float", float.hex, float.fromhex),  # exact, and JSON has no NaN or infinity
    complex: ValueType("complex", lambda c: [c.real.hex(), c.imag.hex()], lambda c: complex(*map(float.fromhex, c))),
    bytes: ValueType("bytes", lambda b: b64encode(b).decode(), lambda text: b64decode(text, validate=True)),
    bytearray: ValueType("bytearray", bytes, bytearray),
    tuple: ValueType("tuple", list, tuple),
    set: ValueType("set", lambda s: sorted(s, key=repr), set),
    frozenset: ValueType("frozenset", lambda s: sorted(s, key=repr), frozenset),
    deque: ValueType("deque", lambda d: [list(d), d.maxlen], lambda parts: deque(*parts)),
    range: ValueType("range", lambda r: [r.start, r.stop, r.step], lambda parts: range(*parts)),
    dict: ValueType("dict", dict.items, dict),
    OrderedDict: ValueType("ordered", dict.items, OrderedDict),
    Counter: ValueType("counter", dict.items, lambda pairs: Counter(dict(pairs))),
    defaultdict: ValueType(
        "defaultdict",
        lambda d: [getattr(d.default_factory, "__name__", None), dict(d)],
        lambda parts: defaultdict(FACTORIES[parts[0]], parts[1]),
    ),
    datetime: ValueType("datetime", _moment, lambda parts: datetime(*parts)),
    date: ValueType("date", _moment, lambda parts: date(*parts)),
    time: ValueType("time", _moment, lambda parts: time(*parts)),
    timedelta: ValueType("timedelta", lambda t: [t.days, t.seconds, t.microseconds], lambda parts: timedelta(*parts)),
    timezone: ValueType("timezone", lambda z: list(z.__getinitargs__()), lambda parts: timezone(*parts)),
    UUID: ValueType("uuid", str, UUID),
    type(Path()): _PATH,
    PurePosixPath: ValueType("purepath", str, PurePosixPath),
    np.ndarray: ValueType("array", lambda a: [a.dtype.str[1:], list(a.shape), a.tobytes()], _array),
    np.generic: ValueType("scalar", lambda a: [a.dtype.str[1:], [], a.tobytes()], lambda parts: _array(parts)[()]),
    np.dtype: ValueType("numpydtype", lambda d: d.str[1:], numpy_dtype),
    torch.Size: ValueType("size", list, torch.Size),
    torch.dtype: ValueType("dtype", lambda d: str(d).removeprefix("torch."), _dtype),
    torch.device: ValueType("device", str, torch.device),
    Key: ValueType("key", int, Key),
    Place: ValueType("place", int, Place),
}
OPAQUE = ValueType("opaque", lambda o: [o.module, o.qualname, o.how, *o.parts], lambda parts: _opaque(*parts))
READ = {kind.name: kind.read for kind in (*VALUE_TYPES.values(), OPAQUE)}
# pickles can hold tensors inside other values, such as sets
EVERY: ValueTypes = {
    **VALUE_TYPES,
    torch.Tensor: ValueType("tensor", lambda t: [str(t.dtype), list(t.shape), _tensor_bytes(t)], NotImplemented),
}
# with objects of unknown classes, for conversions with objects="carry": in JSON, and in pickles
STORED: ValueTypes = {**VALUE_TYPES, Opaque: OPAQUE}
CARRIED: ValueTypes = {**EVERY, Opaque: OPAQUE}
