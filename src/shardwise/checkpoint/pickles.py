"""Pickles from files that nobody vouches for: only what checkpoints are made of comes out, and nothing else runs.

A pickle is a small program. Before it is run, its instructions are checked against a list; what it may name is a table
of stand-ins, so that nothing is ever imported for it; and no stand-in can be changed by it, or calls anything.

A few bytes cannot ask for much work either. Tuples are the only containers that Python hashes by walking them, and a
tuple of tuples that are used again and again takes forever. So the instructions that make tuples are followed by a call
of ours, where they do not plainly make small ones: a tuple with much in it then comes out as one that has no hash.
"""

from __future__ import annotations

import io
import pickle
import re
from collections import Counter, OrderedDict, defaultdict, deque
from collections.abc import Callable, Collection
from functools import lru_cache
from typing import Any, NoReturn

import torch

from shardwise.checkpoint.foreign import Foreign, is_foreign_class, is_sharding
from shardwise.checkpoint.opaque import How, Opaque, Parts, attributes
from shardwise.checkpoint.standins import (
    COPIES,
    FACTORIES,
    KNOWN,
    Call,
    Default,
    Frozen,
    Holder,
    Name,
    Names,
    Ordered,
    Record,
    SavedTensor,
    Sealed,
    Storage,
    StorageKind,
    Tally,
    Wide,
    frozen,
    sizes,
)
from shardwise.errors import CheckpointError

DEEPEST = 100  # levels of containers
MOST_OPAQUE = 100_000  # values in an object of an unknown class
LIGHT = 256  # values in a tuple, and in the tuples in it, that can be a key


class Budget:
    """How many values a pickle may have made or looked at: one for each of its bytes, since each was written there."""

    def __init__(self, most: int) -> None:
        self._left = most

    def spend(self, count: int) -> None:
        """Refuse what is beyond: the same values are referred to again and again."""
        self._left -= count
        if self._left < 0:
            raise pickle.UnpicklingError("it makes more copies than it has bytes")


class _Unpickler(pickle.Unpickler):
    """Knows the tables, and no other names."""

    def __init__(self, data: bytes, where: str, more: Names) -> None:
        super().__init__(io.BytesIO(_framed(data)))
        self._where, self._more, self._budget = where, more, Budget(len(data))

    def find_class(self, module: str, name: str) -> Any:
        """Nothing is imported."""
        key = (module, name)
        if key in self._more:
            return self._more[key]
        if key in COPIES:
            return Call(lambda *args: COPIES[key](*self._paid(args)))
        if key in KNOWN:
            return KNOWN[key]
        refuse(self._where, module, name)

    def persistent_load(self, pid: Any) -> Any:
        """What torch writes instead of the bytes of a storage; or, in a tuple alone, what `_guarded` has us look at."""
        if type(pid) is tuple and len(pid) == 1:
            return _looked_at(pid[0])
        if type(pid) is not tuple or len(pid) != 5 or pid[0] != "storage" or not isinstance(pid[1], StorageKind):
            raise pickle.UnpicklingError("a storage is not described as torch does it")
        _, kind, key, _, count = pid
        if type(key) is not str:
            raise pickle.UnpicklingError("the key of a storage is not a text")
        return Storage(key, kind.dtype, sizes((count,))[0] * kind.dtype.itemsize)

    def _paid(self, args: tuple[Any, ...]) -> tuple[Any, ...]:
        """What is copied was written before, an element per byte at least: a few bytes cannot ask for much memory."""
        self._budget.spend(sum(len(arg) for arg in args if isinstance(arg, Collection)))
        return args


def _framed(data: bytes) -> bytes:
    """The pickle as one frame, which Python reads at once; without frames it reads every instruction from the file."""
    return bytes([FRAME]) + len(data).to_bytes(8, "little") + data


def _looked_at(value: Any) -> Any:
    """A tuple, without a hash if that would take long; a list is the items of a frozenset."""
    if type(value) is list:
        return frozen(value)
    if type(value) is not tuple:
        raise pickle.UnpicklingError("a storage is not described as torch does it")
    return value if _room(value, LIGHT) >= 0 else Wide(value)


def _room(value: tuple[Any, ...], room: int) -> int:
    """What is left of so much room when the items of a tuple are in it; negative where they do not fit."""
    room -= len(value)
    for item in value if room >= 0 else ():
        if isinstance(item, tuple):
            room = _room(item, room)
            if room < 0:
                break
    return room


def refuse(where: str, module: str, name: str) -> NoReturn:
    """Say what a pickle asks for, and what to do."""
    asked = f"{module[:80]}.{name[:80]}"
    if is_sharding(module, name):
        remedy = (
            "a sharded tensor is saved with torch.distributed.checkpoint, or gathered and then saved with torch.save"
        )
    else:
        remedy = (
            "load it where it can be trusted, and save only tensors, numbers, strings, lists and dicts (of a model its "
            "state_dict())"
        )
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
        return _Unpickler(_guarded(data), where, {} if more is None else more).load()
    except CheckpointError:
        raise
    except Exception as error:  # whatever a damaged pickle leads to
        raise CheckpointError(
            f"{where}: this is not the pickle of a checkpoint: {str(error) or type(error).__name__}"
        ) from error


PLAIN = b"012]ael)}dsu\x8f\x90\x94\x93Rb\x81Q"  # instructions of one byte
SCALAR = rb"(?:K.|M..|J.{4}|[N\x88\x89]|G.{8}|\x8a(?:\x05.{5}|\x06.{6}|\x07.{7}|\x08.{8}))"
COUNTED = {  # the bytes of their count
    **dict.fromkeys(b"\x8cC\x8aU", 1),
    **dict.fromkeys(b"XBT\x8b", 4),
    **dict.fromkeys(b"\x8d\x8e\x96", 8),
}
FRAME, STOP, TUPLES, FROZENSET = 0x95, ord("."), b"\x85\x86\x87t", 0x91
SHORT = range(65)  # of texts, in bytes, which are recognized without a step in Python for each
LOOK = b"\x85Q"  # put what is on the stack into a tuple, and have `persistent_load` look at it


def _guarded(data: bytes) -> bytes:
    """The pickle with calls of ours after tuples that may be large, and in the place of frozensets.

    Refuses what no checkpoint needs (extensions, classes made without their names being looked up), counts beyond the
    end, and numbers in the memo beyond its length: Python would make the memo so long, and fill the memory.
    """
    run, at, done, parts = _harmless(len(data).bit_length()), 0, 0, list[bytes]()
    while True:
        found = run.match(data, at)
        at = found.end() if found else at
        if at >= len(data):
            raise pickle.UnpicklingError("it is truncated")
        code = data[at]
        if code == STOP:
            return b"".join([*parts, data[done:]]) if parts else data
        if code in COUNTED:
            body = at + 1 + COUNTED[code]
            at = stop = body + int.from_bytes(data[at + 1 : body], "little")
        elif code == FRAME:
            parts.append(data[done:at])  # frames are only hints, and would have other lengths
            at, stop = at + 9, at + 9 + int.from_bytes(data[at + 1 : at + 9], "little")
            done = at
        elif code in TUPLES:
            parts += data[done : at + 1], LOOK
            at = done = stop = at + 1
        elif code == FROZENSET:
            parts += data[done:at], b"l" + LOOK
            at = done = stop = at + 1
        else:
            raise pickle.UnpicklingError(f"instruction 0x{code:02x} at byte {at} is refused")
        if stop > len(data):
            raise pickle.UnpicklingError("it is truncated")


@lru_cache
def _harmless(bits: int) -> re.Pattern[bytes]:
    """A run of instructions that are short, in a pickle whose length has so many bits.

    Of those that make tuples it has such as make them of scalars (perhaps in a tuple alone), or for one call.
    """
    top, low = divmod(max(bits, 8) - 1, 8)
    index = b".{%d}[\\x00-\\x%02x]\\x00{%d}" % (top, 2 ** (low + 1) - 1, 3 - top) if top < 4 else b".{4}"
    plain = b"".join(b"\\x%02x" % code for code in PLAIN)
    alone = b"(?:(?:\\x94|q.|r%b)?+\\x85)?+" % index
    small = b"%b(?:\\x85|%b(?:[\\x85\\x86]|%b{1,62}+[\\x85-\\x87]?+)?+)?+" % (SCALAR, SCALAR, SCALAR)
    text, wide = (b"|".join(b"\\x%02x%b.{%d}" % (n, zeros, n) for n in SHORT) for zeros in (b"", b"\\x00{3}"))
    return re.compile(
        b"(?:[%b]++|[hq].|j.{4}|r%b|%b%b|\\((?:%b{0,64}+t%b)?+|[\\x85-\\x87t](?=[QR\\x81])|\\x8c(?:%b)|X(?:%b)"
        b"|\\x80.|[IFLSVg][^\n]*+\n|p[0-9]{1,%d}\n|c[^\n]*+\n[^\n]*+\n)*+"
        % (plain, index, small, alone, SCALAR, alone, text, wide, len(str(2**bits))),
        re.DOTALL,
    )


def check_tree(root: Any, where: str, most: int, foreign: bool = False) -> None:
    """Refuse containers that contain themselves, are too deep, or are written once and meant a million times.

    Objects of unknown classes are values, or with `foreign` containers of what they are made of.
    """
    known = dict[int, tuple[int, int]]()

    def measured(value: Any, depth: int) -> tuple[int, int]:
        """How many values it has, and how deep they lie in it."""
        if not isinstance(value, CONTAINERS) and not (foreign and isinstance(value, OBJECTS)):
            return 1, 0
        if id(value) not in known:
            items = _inner(value)
            parts = [measured(item, depth + 1) for item in items] if depth <= DEEPEST else []
            count, height = 1 + sum(part[0] for part in parts), 1 + max((part[1] for part in parts), default=0)
            if depth + height > DEEPEST:
                raise CheckpointError(f"{where}: containers lie more than {DEEPEST} deep in each other or themselves")
            known[id(value)] = count, height
        return known[id(value)]

    if measured(root, 0)[0] > most:
        raise CheckpointError(f"{where} would have more than {most} values: it refers to the same ones again and again")


def _inner(value: Any) -> Any:
    """What lies in a container, or in an object of an unknown class."""
    if isinstance(value, Foreign):
        return [value.args, value.state, value.items, value.pairs]
    if isinstance(value, Holder):
        return [value.value]
    return [*value, *value.values()] if isinstance(value, dict) else value


CONTAINERS = (dict, list, tuple, set, frozenset, deque)
OBJECTS = (Foreign, Holder)
UNHASHED: dict[type, type] = {tuple: Wide, frozenset: Frozen}
DICTS: dict[type, Callable[[Any], Any]] = {Ordered: OrderedDict, Tally: Counter}


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
            return settle(value.value) if isinstance(value.value, Foreign) else value.value
        if isinstance(value, Name):
            module, _, name = value.name.rpartition(".")
            return Opaque(module or "builtins", name, "name", Parts)
        if isinstance(value, Foreign) or is_foreign_class(value):
            return _known_or_opaque(value, where, settle)
        if isinstance(value, Sealed | Record):
            raise CheckpointError(f"{where} has a {type(value).__name__} that is part of no tensor")
        if isinstance(value, dict):
            items = {settle(key): settle(item) for key, item in value.items()}
            if isinstance(value, Default):
                return defaultdict(FACTORIES[value.factory], items)
            return next((kind(items) for stand_in, kind in DICTS.items() if isinstance(value, stand_in)), items)
        if isinstance(value, deque):
            return deque(map(settle, value), value.maxlen)
        for kind in (list, tuple, set, frozenset):
            if type(value) in (kind, UNHASHED.get(kind)):
                return kind(map(settle, value))
        return value

    return settle(value)


def _known_or_opaque(value: Any, where: str, settle: Callable[[Any], Any]) -> Any:
    """An object of a class that the user has called safe; otherwise one that says what it is."""
    safe = _safe_globals().get((value.module, value.qualname))
    if is_foreign_class(value):
        return safe if safe is not None else Opaque(value.module, value.qualname, "name", Parts)
    if safe is None:
        return _opaque(value, where, settle)
    try:
        check_tree(value, where, MOST_OPAQUE, foreign=True)
        return _rebuilt(safe, value, settle)
    except Exception as error:  # whatever the user's class does
        raise CheckpointError(f"{where}: {value.module}.{value.qualname} could not be rebuilt: {error}") from error


def _opaque(value: Foreign, where: str, settle: Callable[[Any], Any]) -> Opaque:
    def parts() -> Parts:
        check_tree(value, where, MOST_OPAQUE, foreign=True)
        args, state, items, pairs = map(settle, (value.args, value.state, value.items, value.pairs))
        return Parts(args, state, tuple(items), tuple(pairs))

    how: How = "call" if value.called else "new"
    shown = attributes(value.args, value.state)
    return Opaque(value.module, value.qualname, how, parts, shown=shown, tensors=tensors_in(value))


def tensors_in(value: Any) -> int:
    """How many tensors an object is made of, at any depth."""
    seen, todo, count = set[int](), [value], 0
    while todo:
        one = todo.pop()
        if id(one) not in seen:
            seen.add(id(one))
            count += isinstance(one, SavedTensor | Storage)  # which quantised tensors are made of
            todo += _inner(one) if isinstance(one, (*OBJECTS, *CONTAINERS)) else ()
    return count


def _safe_globals() -> dict[tuple[str, str], Any]:
    """What the user gave to torch.serialization.add_safe_globals, by module and name."""
    found = dict[tuple[str, str], Any]()
    for one in torch.serialization.get_safe_globals():
        if isinstance(one, tuple):
            module, _, name = one[1].rpartition(".")
            found[module, name] = one[0]
        else:
            found[one.__module__, one.__qualname__] = one
    return found


def _rebuilt(kind: Any, value: Foreign, settle: Callable[[Any], Any]) -> Any:
    """As pickle makes it."""
    args = settle(value.args)
    made = kind(*args) if value.called else kind.__new__(kind, *args)
    for item in value.items:
        made.append(settle(item))
    for key, item in value.pairs:
        made[settle(key)] = settle(item)
    state = settle(value.state)
    if state is not None and hasattr(made, "__setstate__"):
        made.__setstate__(state)
    elif state is not None:
        named, slots = state if type(state) is tuple and len(state) == 2 else (state, None)
        for name, item in {**(named or {}), **(slots or {})}.items():
            object.__setattr__(made, name, item)  # of frozen dataclasses, too
    return made
