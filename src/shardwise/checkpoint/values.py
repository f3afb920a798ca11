"""The values beside tensors that every format holds: one list, both ways. What comes back has the type that went in.

In the index of our own format they are JSON, by the table here; in torch.save and DCP files they are pickles, which
`standins.py` reads back to the same types. What is not in the table is refused when it is saved.
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
from types import NoneType, SimpleNamespace
from typing import Any, NamedTuple
from uuid import UUID

import numpy as np
import torch

from shardwise.checkpoint.opaque import How, Opaque, Parts, attributes
from shardwise.checkpoint.standins import FACTORIES, numpy_dtype
from shardwise.checkpoint.writing import write_tensor
from shardwise.errors import CheckpointError
from shardwise.quoting import brief
from shardwise.state.traverse import Key, Place


class Kind(NamedTuple):
    """A type of values: its name in JSON, of which other values it is made, and how it is made of them again."""

    name: str
    write: Callable[[Any], Any]
    read: Callable[[Any], Any]


Kinds = Mapping[type, Kind]


def refuse_modules(flat: Mapping[str, Any]) -> None:
    """Refuse models, optimizers and the like in the place of what they hold."""
    for name, value in flat.items():
        if callable(getattr(value, "state_dict", None)):
            raise TypeError(f"{name!r} is {type(value).__name__}: give its state_dict()")


def encoded(value: Any, where: str, kinds: Kinds | None = None) -> Any:
    """What JSON can hold, from which `decoded` makes the same again. `where` names the value in errors.

    >>> decoded(encoded({"betas": (0.9, 0.95), 3: [None, b"x"]}, "optimizer"))
    {'betas': (0.9, 0.95), 3: [None, b'x']}
    >>> encoded([1, {"x": Namespace(lr=1)}], "args")
    Traceback (most recent call last):
    shardwise.errors.CheckpointError: 'args[1]['x']' is Namespace, which is not stored: give vars(value)
    """
    table = KINDS if kinds is None else kinds

    def encode(value: Any, at: tuple[Any, ...]) -> Any:
        if type(value) in (NoneType, bool, str) or (type(value) is int and value.bit_length() <= 64):
            return value  # more digits are not read back from JSON
        if type(value) is list:
            return [encode(item, (*at, place)) for place, item in enumerate(value)]
        kind = table.get(_type(value))
        if kind is None:
            steps = "".join(f"[{brief(key)}]" for key in at)
            raise CheckpointError(f"'{where}{steps}' is {type(value).__name__}, which is not stored: {remedy(value)}")
        if isinstance(value, dict) and type(value) is not defaultdict:
            return {kind.name: [[encode(key, at), encode(item, (*at, key))] for key, item in value.items()]}
        if isinstance(value, set | frozenset):
            return {kind.name: [encode(item, at) for item in kind.write(value)]}
        return {kind.name: encode(kind.write(value), at)}

    return encode(value, ())


def decoded(said: Any) -> Any:
    """The value again."""
    if isinstance(said, list):
        return [decoded(item) for item in said]
    if not isinstance(said, dict):
        return said
    if len(said) == 1:
        (name, item), *_ = said.items()
        if name in READ:
            return READ[name](decoded(item))
    raise CheckpointError(f"{brief(said)} is no value that is known here")


def same_value(a: Any, b: Any) -> bool:
    """True for equal values of one type, whatever they have in them: 1, 1.0 and True differ, 0.0 and -0.0 do, and a NaN
    is equal to itself. The order of a dict's keys does not count.

    >>> same_value({"a": [1.0, float("nan")]}, {"a": [1.0, float("nan")]}), same_value([1], [True])
    (True, False)
    """
    return _text(a) == _text(b)


def _text(value: Any) -> str:
    return json.dumps(_in_order(encoded(value, "value", CARRIED)))


def _in_order(said: Any) -> Any:
    """With the pairs of dicts in one order."""
    if isinstance(said, list):
        return [_in_order(item) for item in said]
    if not isinstance(said, dict):
        return said
    found = {name: _in_order(item) for name, item in said.items()}
    return {name: sorted(item, key=json.dumps) if name in ("dict", "counter") else item for name, item in found.items()}


def is_listed(value: Any) -> bool:
    """True for values of known types, all through."""
    try:
        encoded(value, "value", EVERY)
    except CheckpointError:
        return False
    return True


def _type(value: Any) -> type:
    """What the table has it under: numpy has a class for every dtype."""
    if isinstance(value, np.ndarray | np.generic):
        known = value.dtype.kind in "biufc" and value.dtype.isnative
        return NoneType if not known else np.generic if isinstance(value, np.generic) else type(value)
    if isinstance(value, np.dtype):
        return np.dtype if value.kind in "biufc" and value.isnative else NoneType
    if isinstance(value, datetime | time) and (value.fold or type(value.tzinfo) not in (NoneType, timezone)):
        return NoneType  # a rule that is looked up elsewhere; pickles of torch.save lose the fold
    if type(value) is defaultdict and value.default_factory not in FACTORIES.values():
        return NoneType
    return type(value)


REMEDIES: dict[Any, str] = {  # the first that fits
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


def remedy(value: Any) -> str:
    """What to save instead."""
    if is_dataclass(value) and not isinstance(value, type):
        return "give dataclasses.asdict(value)"
    if isinstance(value, tuple):
        return "give value._asdict()" if hasattr(value, "_asdict") else "give tuple(value)"
    general = "leave it out, or make it of numbers, strings, lists, tuples and dicts"
    return next((text for kind, text in REMEDIES.items() if isinstance(value, kind)), general)


def _dtype(name: str) -> torch.dtype:
    found = getattr(torch, name, None)
    if not isinstance(found, torch.dtype):
        raise CheckpointError(f"{name!r} is no dtype of this torch")
    return found


def _array(said: Any) -> np.ndarray[Any, Any]:
    code, shape, data = said
    dtype = numpy_dtype(code)
    if len(data) != prod(shape) * dtype.itemsize:
        raise CheckpointError(f"an array of shape {shape} has {len(data)} bytes")
    return np.frombuffer(bytearray(data), dtype).reshape(shape)


def _opaque(module: str, name: str, how: How, args: Any, state: Any, items: Any, pairs: Any) -> Opaque:
    parts = Parts(args, state, items, pairs)
    if how not in ("name", "call", "new") or not all(type(part) is tuple for part in (args, items, pairs)):
        raise CheckpointError(f"an object of {name} is not described as it should be")
    return Opaque(str(module), str(name), how, lambda: parts, shown=attributes(args, state))


def _tensor_bytes(tensor: torch.Tensor) -> bytes:
    file = BytesIO()
    write_tensor(tensor, file)
    return file.getvalue()


def _moment(value: Any) -> list[Any]:
    """The fields of a date, a time or both."""
    names = ("year", "month", "day", "hour", "minute", "second", "microsecond", "tzinfo")
    return [getattr(value, name) for name in names if hasattr(value, name)]


_PATH = Kind("path", str, Path if issubclass(type(Path()), PurePosixPath) else PurePosixPath)
KINDS: dict[type, Kind] = {
    int: Kind("int", hex, lambda text: int(text, 16)),
    float: Kind("float", float.hex, float.fromhex),  # exact, and for those that JSON has no words for
    complex: Kind("complex", lambda c: [c.real.hex(), c.imag.hex()], lambda c: complex(*map(float.fromhex, c))),
    bytes: Kind("bytes", lambda b: b64encode(b).decode(), lambda text: b64decode(text, validate=True)),
    bytearray: Kind("bytearray", bytes, bytearray),
    tuple: Kind("tuple", list, tuple),
    set: Kind("set", lambda s: sorted(s, key=repr), set),
    frozenset: Kind("frozenset", lambda s: sorted(s, key=repr), frozenset),
    deque: Kind("deque", lambda d: [list(d), d.maxlen], lambda said: deque(*said)),
    range: Kind("range", lambda r: [r.start, r.stop, r.step], lambda said: range(*said)),
    dict: Kind("dict", dict.items, dict),
    OrderedDict: Kind("ordered", dict.items, OrderedDict),
    Counter: Kind("counter", dict.items, lambda pairs: Counter(dict(pairs))),
    defaultdict: Kind(
        "defaultdict",
        lambda d: [getattr(d.default_factory, "__name__", None), dict(d)],
        lambda said: defaultdict(FACTORIES[said[0]], said[1]),
    ),
    datetime: Kind("datetime", _moment, lambda said: datetime(*said)),
    date: Kind("date", _moment, lambda said: date(*said)),
    time: Kind("time", _moment, lambda said: time(*said)),
    timedelta: Kind("timedelta", lambda t: [t.days, t.seconds, t.microseconds], lambda said: timedelta(*said)),
    timezone: Kind("timezone", lambda z: list(z.__getinitargs__()), lambda said: timezone(*said)),
    UUID: Kind("uuid", str, UUID),
    type(Path()): _PATH,
    PurePosixPath: Kind("purepath", str, PurePosixPath),
    np.ndarray: Kind("array", lambda a: [a.dtype.str[1:], list(a.shape), a.tobytes()], _array),
    np.generic: Kind("scalar", lambda a: [a.dtype.str[1:], [], a.tobytes()], lambda said: _array(said)[()]),
    np.dtype: Kind("numpydtype", lambda d: d.str[1:], numpy_dtype),
    torch.Size: Kind("size", list, torch.Size),
    torch.dtype: Kind("dtype", lambda d: str(d).removeprefix("torch."), _dtype),
    torch.device: Kind("device", str, torch.device),
    Key: Kind("key", int, Key),
    Place: Kind("place", int, Place),
}
OPAQUE = Kind("opaque", lambda o: [o.module, o.qualname, o.how, *o.parts], lambda said: _opaque(*said))
READ = {kind.name: kind.read for kind in (*KINDS.values(), OPAQUE)}
# pickles can hold tensors inside of other values, such as sets
EVERY: Kinds = {
    **KINDS,
    torch.Tensor: Kind("tensor", lambda t: [str(t.dtype), list(t.shape), _tensor_bytes(t)], NotImplemented),
}
# what conversions carry on when they are asked to: in JSON, and in pickles
STORED: Kinds = {**KINDS, Opaque: OPAQUE}
CARRIED: Kinds = {**EVERY, Opaque: OPAQUE}
