"""Pickles from files that nobody vouches for: only what checkpoints are made of comes out, and nothing else runs.

A pickle is a small program. Before it is run, its instructions are checked against a list; what it may name is a table
of stand-ins, so that nothing is ever imported for it; and no stand-in can be changed by it, or calls anything.
"""

from __future__ import annotations

import io
import pickle
import re
from collections import OrderedDict
from collections.abc import Callable, Collection
from functools import lru_cache
from typing import Any, NoReturn

from shardwise.checkpoint.standins import (
    COPIES,
    KNOWN,
    Call,
    Holder,
    Names,
    Ordered,
    Record,
    SavedTensor,
    Sealed,
    Storage,
    StorageKind,
    sizes,
)
from shardwise.errors import CheckpointError

DEEPEST = 100  # levels of containers


class _Unpickler(pickle.Unpickler):
    """Knows the tables, and no other names."""

    def __init__(self, data: bytes, where: str, more: Names) -> None:
        super().__init__(io.BytesIO(data))
        self._where, self._more, self._left = where, more, len(data)

    def find_class(self, module: str, name: str) -> Any:
        """Nothing is imported."""
        key = (module, name)
        if key in self._more:
            return self._more[key]
        if key in COPIES:
            return Call(lambda *args: COPIES[key](*self._paid(args)))
        if key in KNOWN:
            return KNOWN[key]
        _refuse(self._where, module, name)

    def persistent_load(self, pid: Any) -> Storage:
        """What torch writes instead of the bytes of a storage."""
        if type(pid) is not tuple or len(pid) != 5 or pid[0] != "storage" or not isinstance(pid[1], StorageKind):
            raise pickle.UnpicklingError("a storage is not described as torch does it")
        _, kind, key, _, count = pid
        if type(key) is not str:
            raise pickle.UnpicklingError("the key of a storage is not a text")
        return Storage(key, kind.dtype, sizes((count,))[0] * kind.dtype.itemsize)

    def _paid(self, args: tuple[Any, ...]) -> tuple[Any, ...]:
        """What is copied was written before, an element per byte at least: a few bytes cannot ask for much memory."""
        self._left -= sum(len(arg) for arg in args if isinstance(arg, Collection))
        if self._left < 0:
            raise pickle.UnpicklingError("it makes more copies than it has bytes")
        return args


def _refuse(where: str, module: str, name: str) -> NoReturn:
    asked = f"{module[:80]}.{name[:80]}"
    if module.startswith("torch.distributed") or name == "_rebuild_wrapper_subclass":  # DTensors are such
        remedy = (
            "a sharded tensor is saved with torch.distributed.checkpoint, or gathered and then saved with torch.save"
        )
    else:
        remedy = "load it where it can be trusted, and save only tensors, numbers, texts, lists and dicts"
    raise CheckpointError(
        f"{where} asks for {asked!r}, which is no part of a checkpoint: nothing of it was run. Remedy: {remedy}"
    )


def unpickle(data: bytes, where: str, more: Names | None = None) -> Any:
    """What a pickle holds, with stand-ins for tensors; `more` are names that it may use beside the known ones.

    >>> unpickle(pickle.dumps({"a": [1, 2.5]}), "here")
    {'a': [1, 2.5]}
    >>> unpickle(b"cos\\nsystem\\n(S'true'\\ntR.", "here")
    Traceback (most recent call last):
    shardwise.errors.CheckpointError: here asks for 'os.system', which is no part of a checkpoint: ...
    """
    try:
        _check_instructions(data)
        return _Unpickler(data, where, more or {}).load()
    except CheckpointError:
        raise
    except Exception as error:  # whatever a damaged pickle leads to
        raise CheckpointError(
            f"{where}: this is not the pickle of a checkpoint: {str(error) or type(error).__name__}"
        ) from error


PLAIN = b"(012N\x88\x89]ael)t\x85\x86\x87}dsu\x8f\x90\x91\x94\x93Rb\x81Q"  # instructions of one byte
COUNTED = {  # the bytes of their count
    **dict.fromkeys(b"\x8cC\x8aU", 1),
    **dict.fromkeys(b"XBT\x8b", 4),
    **dict.fromkeys(b"\x8d\x8e\x96", 8),
}
FRAME, STOP = 0x95, ord(".")


def _check_instructions(data: bytes) -> None:
    """Refuse what no checkpoint needs (extensions, classes made without their names being looked up), counts beyond the
    end, and numbers in the memo beyond its length: Python would make the memo so long, and fill the memory."""
    run, at = _harmless(len(data).bit_length()), 0
    while True:
        found = run.match(data, at)
        at = found.end() if found else at
        if at >= len(data):
            raise pickle.UnpicklingError("it is truncated")
        code = data[at]
        if code == STOP:
            return
        if code == FRAME:
            at, stop = at + 9, at + 9 + int.from_bytes(data[at + 1 : at + 9], "little")
        elif code in COUNTED:
            body = at + 1 + COUNTED[code]
            at = stop = body + int.from_bytes(data[at + 1 : body], "little")
        else:
            raise pickle.UnpicklingError(f"instruction 0x{code:02x} at byte {at} is refused")
        if stop > len(data):
            raise pickle.UnpicklingError("it is truncated")


@lru_cache
def _harmless(bits: int) -> re.Pattern[bytes]:
    """A run of instructions that are short, in a pickle whose length has so many bits."""
    top, low = divmod(max(bits, 8) - 1, 8)
    index = b".{%d}[\\x00-\\x%02x]\\x00{%d}" % (top, 2 ** (low + 1) - 1, 3 - top) if top < 4 else b".{4}"
    return re.compile(
        b"(?:[%b]++|[Khq].|M..|[Jj].{4}|r%b|G.{8}|\\x80.|\\x8a\\x05.{5}|[IFLSVg][^\n]*+\n|p[0-9]{1,%d}\n|c[^\n]*+\n[^\n]*+\n)*+"
        % (b"".join(b"\\x%02x" % code for code in PLAIN), index, len(str(2**bits))),
        re.DOTALL,
    )


def check_tree(root: Any, where: str, most: int) -> None:
    """Refuse containers that contain themselves, are too deep, or are written once and meant a million times."""
    known = dict[int, tuple[int, int]]()

    def measured(value: Any, depth: int) -> tuple[int, int]:
        """How many values it has, and how deep they lie in it."""
        if not isinstance(value, dict | list | tuple | set | frozenset):
            return 1, 0
        if id(value) not in known:
            items = [*value, *value.values()] if isinstance(value, dict) else value
            parts = [measured(item, depth + 1) for item in items] if depth <= DEEPEST else []
            count, height = 1 + sum(part[0] for part in parts), 1 + max((part[1] for part in parts), default=0)
            if depth + height > DEEPEST:
                raise CheckpointError(f"{where}: containers lie more than {DEEPEST} deep in each other or themselves")
            known[id(value)] = count, height
        return known[id(value)]

    if measured(root, 0)[0] > most:
        raise CheckpointError(f"{where} would have more than {most} values: it refers to the same ones again and again")


def settled(value: Any, where: str, tensor: Callable[[SavedTensor], Any]) -> Any:
    """The value without stand-ins: tensors are what `tensor` makes of them. The value has passed `check_tree`."""
    seen = dict[int, Any]()

    def settle(value: Any) -> Any:
        if id(value) not in seen:
            seen[id(value)] = made(value)
        return seen[id(value)]

    def made(value: Any) -> Any:
        if isinstance(value, SavedTensor):
            return tensor(value)
        if isinstance(value, Holder):
            return value.value
        if isinstance(value, Sealed | Record):
            raise CheckpointError(f"{where} has a {type(value).__name__} that is part of no tensor")
        if isinstance(value, dict):
            items = {settle(key): settle(item) for key, item in value.items()}
            return OrderedDict(items) if isinstance(value, Ordered) else items
        if type(value) in (list, tuple, set, frozenset):
            return type(value)(map(settle, value))
        return value

    return settle(value)
