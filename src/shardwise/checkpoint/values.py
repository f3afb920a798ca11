"""Values that are no tensors, as JSON and back: what state dicts have of counters, settings and nested names."""

from __future__ import annotations

from base64 import b64decode, b64encode
from collections.abc import Mapping
from typing import Any

import torch

from shardwise.errors import CheckpointError
from shardwise.state.traverse import Key, Place

PLAIN = (type(None), bool, int, str)


def refuse_modules(flat: Mapping[str, Any]) -> None:
    """Refuse models, optimizers and the like in the place of what they hold."""
    for name, value in flat.items():
        if callable(getattr(value, "state_dict", None)):
            raise TypeError(f"{name!r} is {type(value).__name__}: give its state_dict()")


def encoded(value: Any, where: str) -> Any:
    """What JSON can hold, from which `decoded` makes the same again.

    >>> decoded(encoded({"betas": (0.9, 0.95), 3: [None, b"x"]}, "optimizer"))
    {'betas': (0.9, 0.95), 3: [None, b'x']}
    """
    if type(value) is int and value.bit_length() > 64:  # more digits than JSON is read with
        return {"int": hex(value)}
    if type(value) in PLAIN:
        return value
    if type(value) is list:
        return [encoded(item, where) for item in value]
    if isinstance(value, Mapping):
        return {"dict": [[encoded(key, where), encoded(item, where)] for key, item in value.items()]}
    for kind, (name, write, _) in KINDS.items():
        if type(value) is kind:
            return {name: encoded(write(value), where) if name in NESTED else write(value)}
    if isinstance(value, tuple):  # named ones lose their names
        return {"tuple": [encoded(item, where) for item in value]}
    raise CheckpointError(
        f"{where!r} is {type(value).__name__}, which is not stored: leave it out, or make it of numbers, texts, lists, "
        f"tuples and dicts"
    )


def decoded(said: Any) -> Any:
    """The value again."""
    if isinstance(said, list):
        return [decoded(item) for item in said]
    if not isinstance(said, dict):
        return said
    if len(said) == 1:
        (name, item), *_ = said.items()
        if name == "int":
            return int(item, 16)
        if name == "dict":
            return {decoded(key): decoded(value) for key, value in item}
        for other, _, read in KINDS.values():
            if name == other:
                return read(decoded(item) if name in NESTED else item)
    raise CheckpointError(f"{said!r:.100} is no value that is known here")


NESTED = ("tuple", "set", "size")
KINDS: dict[type, tuple[str, Any, Any]] = {
    float: ("float", float.hex, float.fromhex),  # exact, and for those that JSON has no words for
    complex: ("complex", lambda c: [c.real.hex(), c.imag.hex()], lambda c: complex(*map(float.fromhex, c))),
    bytes: ("bytes", lambda b: b64encode(b).decode(), lambda text: b64decode(text, validate=True)),
    tuple: ("tuple", list, tuple),
    set: ("set", lambda s: sorted(s, key=repr), set),
    torch.Size: ("size", list, torch.Size),
    torch.dtype: ("dtype", lambda d: str(d).removeprefix("torch."), lambda d: _dtype(d)),
    torch.device: ("device", str, torch.device),
    Key: ("key", int, Key),
    Place: ("place", int, Place),
}


def _dtype(name: str) -> torch.dtype:
    found = getattr(torch, name, None)
    if not isinstance(found, torch.dtype):
        raise CheckpointError(f"{name!r} is no dtype of this torch")
    return found
