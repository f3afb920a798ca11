"""Unpickle untrusted files: only what checkpoints are made of comes out, and nothing else runs.

A pickle is a small program. Before it runs, its instructions are checked against a list. The names that it may use are
a table of stubs, so nothing is ever imported for it. It cannot change a stub, and no stub calls anything.

A few bytes cannot cause much work either. Tuples are the only containers that Python hashes by walking them, and a
tuple of tuples that are shared many times takes forever. So an instruction that may make a large tuple is followed by
a call of ours, which replaces a tuple with many values by one that has no hash.
"""

from __future__ import annotations

import io
import pickle
import re
from collections import Counter, OrderedDict, defaultdict, deque
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from functools import lru_cache
from typing import Any, NoReturn, cast

import torch

from shardwise.checkpoint.opaque import (
    How,
    Opaque,
    Parts,
    UnknownObject,
    attributes,
    each_once,
    is_sharding,
    is_unknown_class,
    unknown_class,
)
from shardwise.checkpoint.shard_stubs import SHARDED_TENSOR, SHARDING, DistributedStub
from shardwise.checkpoint.unpickle_stubs import (
    COPIES,
    FACTORIES,
    KNOWN,
    CounterStub,
    DefaultDictStub,
    FunctionStub,
    Names,
    NameStub,
    OrderedDictStub,
    RecordStub,
    StorageStub,
    StorageType,
    Stub,
    TensorStub,
    UnhashableFrozenset,
    UnhashableTuple,
    ValueStub,
    make_frozenset,
    sizes,
)
from shardwise.errors import CheckpointError

MAX_DEPTH = 100  # levels of containers
MAX_CLASSES = 10_000  # unknown ones in a pickle
MAX_NAME = 1000  # characters of the name of a nested class
MAX_UNKNOWN_VALUES = 100_000  # in an object of an unknown class
MAX_KEY_VALUES = 256  # in a tuple that can be a key, and in the tuples in it
RECONSTRUCTORS = (("copyreg", "_reconstructor"), ("copy_reg", "_reconstructor"))
ATTRIBUTES = (("builtins", "getattr"), ("__builtin__", "getattr"))
Resolve = Callable[[object], object]  # a value without stubs


class Budget:
    """How many values a pickle may make or use: one for each of its bytes."""

    def __init__(self, limit: int) -> None:
        self._left = limit

    def spend(self, count: int) -> None:
        """Refuse more: such a pickle refers to the same values again and again."""
        self._left -= count
        if self._left < 0:
            raise pickle.UnpicklingError("it makes more copies than it has bytes")


class UnknownNames(Mapping[tuple[str, str], object]):
    """A class of its own for every unknown name; except for sharded tensors, which are not plain values."""

    def __init__(self) -> None:
        self._classes = dict[tuple[str, str], type[UnknownObject]]()

    def __contains__(self, key: object) -> bool:
        return key in SHARDING or self._is_unknown(key)

    def _is_unknown(self, key: object) -> bool:
        return key not in KNOWN and key not in COPIES and not (isinstance(key, tuple) and is_sharding(*key))

    def __getitem__(self, key: tuple[str, str]) -> object:
        if key in SHARDING:
            return SHARDING[key]
        if key in RECONSTRUCTORS:
            return FunctionStub(_reconstruct)
        return FunctionStub(self._attribute) if key in ATTRIBUTES else self._class(*key)

    def _class(self, module: str, qualname: str) -> type[UnknownObject]:
        if (module, qualname) not in self._classes:
            if len(self._classes) >= MAX_CLASSES:
                raise pickle.UnpicklingError(f"it names more than {MAX_CLASSES} classes")
            self._classes[module, qualname] = unknown_class(module, qualname)
        return self._classes[module, qualname]

    def _attribute(self, owner: object, name: object) -> object:
        """How old protocols name what is inside a class: another class, a method, a member of an Enum."""
        if owner is SHARDED_TENSOR and name == "ProcessGroupState":
            return DistributedStub
        if is_unknown_class(owner) and type(name) is str:
            if len(owner.qualname) + len(name) > MAX_NAME:  # each may be longer than the one before, for a few bytes
                raise pickle.UnpicklingError(f"it names a class with more than {MAX_NAME} characters")
            return self._class(owner.module, f"{owner.qualname}.{name}")
        return self._class("builtins", "getattr")(owner, name)

    def __iter__(self) -> Iterator[tuple[str, str]]:
        return iter(self._classes)

    def __len__(self) -> int:
        return len(self._classes)


def _reconstruct(kind: object, base: object, state: object) -> UnknownObject:
    """How old protocols make an object."""
    if not is_unknown_class(kind) or not is_unknown_class(base) or base.qualname != "object" or state is not None:
        raise pickle.UnpicklingError("an object is not made as Python does it")
    return kind.__new__(kind)


class _Unpickler(pickle.Unpickler):
    """Knows the names in the tables, and no others."""

    def __init__(self, data: bytes, where: object, more: Names) -> None:
        super().__init__(io.BytesIO(_framed(data)))
        self._where, self._more, self._budget = where, more, Budget(len(data))

    def find_class(self, module: str, name: str) -> object:
        """Nothing is imported."""
        key = (module, name)
        if key in self._more:
            return self._more[key]
        if key in COPIES:
            return FunctionStub(lambda *args: COPIES[key](*self._pay(args)))
        if key in KNOWN:
            return KNOWN[key]
        refuse(self._where, module, name)

    def persistent_load(self, pid: object) -> object:
        """A storage, as torch describes it; or a value in a 1-tuple, which `_guarded` passes here to be checked."""
        if type(pid) is tuple and len(pid) == 1:
            return _hashable(pid[0])
        if type(pid) is not tuple or len(pid) != 5 or pid[0] != "storage" or not isinstance(pid[1], StorageType):
            raise pickle.UnpicklingError("a storage is not described as torch does it")
        _, kind, key, _, count = pid
        if type(key) is not str:
            raise pickle.UnpicklingError("the key of a storage is not a string")
        return StorageStub(key, kind.dtype, sizes((count,))[0] * kind.dtype.itemsize)

    def _pay(self, args: tuple[object, ...]) -> tuple[object, ...]:
        """Count what is copied: each element took at least a byte, so a few bytes cannot cause much memory use."""
        self._budget.spend(sum(len(arg) for arg in args if isinstance(arg, Collection)))
        return args


def _framed(data: bytes) -> bytes:
    """The pickle as one frame, which Python reads at once; without frames it reads instruction by instruction."""
    return bytes([FRAME]) + len(data).to_bytes(8, "little") + data


def _hashable(value: object) -> object:
    """A tuple, without a hash if hashing would take long; a list holds the items of a frozenset."""
    if type(value) is list:
        return make_frozenset(value)
    if type(value) is not tuple:
        raise pickle.UnpicklingError("a storage is not described as torch does it")
    return value if _space_left(value, MAX_KEY_VALUES) >= 0 else UnhashableTuple(value)


def _space_left(value: tuple[object, ...], space: int) -> int:
    """What remains of `space` values after those of a tuple and its tuples; negative if they do not fit."""
    space -= len(value)
    for item in value if space >= 0 else ():
        if isinstance(item, tuple):
            space = _space_left(item, space)
            if space < 0:
                break
    return space


def refuse(where: object, module: str, name: str) -> NoReturn:
    """Say what a pickle names, and what to do."""
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
        f"{where} asks for {f'{module[:80]}.{name[:80]}'!r}, which is not allowed in a checkpoint: nothing of it was "
        f"run. Remedy: {remedy}"
    )


def unpickle(data: bytes, where: object, more: Names | None = None) -> object:
    """The contents of a pickle, with stubs for tensors; `more`: names that it may use besides the known ones.

    >>> unpickle(pickle.dumps({"a": [1, 2.5]}), "here")
    {'a': [1, 2.5]}
    >>> unpickle(b"cos\\nsystem\\n(S'true'\\ntR.", "here")
    Traceback (most recent call last):
    shardwise.errors.CheckpointError: here asks for 'os.system', which is not allowed in a checkpoint: ...
    """
    try:
        return _Unpickler(_guarded(data), where, {} if more is None else more).load()
    except CheckpointError:
        raise
    except Exception as error:  # whatever a damaged pickle leads to
        raise CheckpointError(
            f"{where}: not the pickle of a checkpoint: {str(error) or type(error).__name__}"
        ) from error


PLAIN = b"012]ael)}dsu\x8f\x90\x94\x93Rb\x81Q"  # instructions of one byte
SCALAR = rb"(?:K.|M..|J.{4}|[N\x88\x89]|G.{8}|\x8a(?:\x05.{5}|\x06.{6}|\x07.{7}|\x08.{8}))"
COUNTED = {  # the bytes of their count
    **dict.fromkeys(b"\x8cC\x8aU", 1),
    **dict.fromkeys(b"XBT\x8b", 4),
    **dict.fromkeys(b"\x8d\x8e\x96", 8),
}
FRAME, STOP, TUPLES, FROZENSET = 0x95, ord("."), b"\x85\x86\x87t", 0x91
SHORT = range(65)  # lengths of strings that one regular expression recognizes
CHECK = b"\x85Q"  # put the top of the stack into a tuple, and pass it to `persistent_load`


def _guarded(data: bytes) -> bytes:
    """The pickle with calls of ours after tuples that may be large, and instead of frozensets.

    Refuses what no checkpoint needs (extensions, classes that bypass find_class), counts beyond the end, and memo
    numbers beyond the length: Python would allocate a memo of that length.
    """
    run, at, done, parts = _harmless(len(data).bit_length()), 0, 0, list[bytes]()
    while True:
        match = run.match(data, at)
        at = match.end() if match else at
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
            parts += data[done : at + 1], CHECK
            at = done = stop = at + 1
        elif code == FROZENSET:
            parts += data[done:at], b"l" + CHECK
            at = done = stop = at + 1
        else:
            raise pickle.UnpicklingError(f"instruction 0x{code:02x} at byte {at} is refused")
        if stop > len(data):
            raise pickle.UnpicklingError("it is truncated")


@lru_cache
def _harmless(bits: int) -> re.Pattern[bytes]:
    """Matches a run of short instructions, in a pickle whose length has so many bits.

    Of instructions that make tuples, only those of scalars (perhaps in a 1-tuple) and of arguments of one call match.
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


def check_tree(root: object, where: object, limit: int, *, enter_unknown: bool = False) -> None:
    """Refuse containers that contain themselves, are too deep, or are stored once and used a million times.

    Objects of unknown classes count as one value, with `enter_unknown` as containers of their parts.
    """
    known = dict[int, tuple[int, int]]()

    def measure(value: object, depth: int) -> tuple[int, int]:
        """The number of values in it, and its depth."""
        if not isinstance(value, CONTAINERS) and not (enter_unknown and isinstance(value, OBJECTS)):
            return 1, 0
        if id(value) not in known:
            items = _inner(value)
            parts = [measure(item, depth + 1) for item in items] if depth <= MAX_DEPTH else []
            count, height = 1 + sum(part[0] for part in parts), 1 + max((part[1] for part in parts), default=0)
            if depth + height > MAX_DEPTH:
                raise CheckpointError(
                    f"{where}: containers are nested more than {MAX_DEPTH} deep, or contain themselves"
                )
            known[id(value)] = count, height
        return known[id(value)]

    if measure(root, 0)[0] > limit:
        raise CheckpointError(
            f"{where} would have more than {limit} values: it refers to the same ones again and again"
        )


def _inner(value: object) -> Iterable[object]:
    """The items of a container, or the parts of an object of an unknown class."""
    if isinstance(value, UnknownObject):
        return [value.args, value.state, value.items, value.pairs]
    if isinstance(value, ValueStub):
        return [value.value]
    return [*value, *value.values()] if isinstance(value, dict) else cast("Iterable[object]", value)


CONTAINERS = (dict, list, tuple, set, frozenset, deque)
OBJECTS = (UnknownObject, ValueStub)
UNHASHABLE: dict[type, type] = {tuple: UnhashableTuple, frozenset: UnhashableFrozenset}
DICTS: dict[type, Callable[[dict[object, object]], object]] = {OrderedDictStub: OrderedDict, CounterStub: Counter}


def without_stubs(value: object, where: object, read: Callable[[TensorStub], object]) -> object:
    """The value with real objects instead of stubs; `read` makes tensors. The value has passed `check_tree`."""
    return _Resolver(where, read)(value)


class _Resolver:
    """Makes real objects of stubs, each once."""

    def __init__(self, where: object, read: Callable[[TensorStub], object]) -> None:
        self._where, self._read, self._made = where, read, dict[int, object]()

    def __call__(self, value: object) -> object:
        if id(value) not in self._made:
            self._made[id(value)] = self._make(value)
        return self._made[id(value)]

    def _make(self, value: object) -> object:
        if isinstance(value, UnknownObject) or is_unknown_class(value):
            return _known_or_opaque(value, self._where, self)
        if isinstance(value, Stub | RecordStub):
            return self._of_stub(value)
        if isinstance(value, dict):
            return self._of_dict(value)
        if isinstance(value, deque):
            return deque(map(self, value), value.maxlen)
        for kind in (list, tuple, set, frozenset):
            if type(value) in (kind, UNHASHABLE.get(kind)):
                return kind(map(self, cast("Iterable[object]", value)))
        return value

    def _of_stub(self, value: Stub | RecordStub) -> object:
        if isinstance(value, TensorStub):
            return self._read(value)
        if isinstance(value, ValueStub):
            return self(value.value) if isinstance(value.value, UnknownObject) else value.value
        if isinstance(value, NameStub):
            module, _, name = value.name.rpartition(".")
            return Opaque(module or "builtins", name, "name", Parts)
        raise CheckpointError(f"{self._where} has a {type(value).__name__} that is not part of a tensor")

    def _of_dict(self, value: dict[object, object]) -> object:
        items = {self(key): self(item) for key, item in value.items()}
        if isinstance(value, DefaultDictStub):
            return defaultdict(FACTORIES[value.factory], items)
        return next((kind(items) for stub, kind in DICTS.items() if isinstance(value, stub)), items)


def _known_or_opaque(value: UnknownObject | type[UnknownObject], where: object, resolve: Resolve) -> object:
    """An object of a class that the user declared safe; otherwise an Opaque."""
    safe = _safe_globals().get((value.module, value.qualname))
    if not isinstance(value, UnknownObject):
        return safe if safe is not None else Opaque(value.module, value.qualname, "name", Parts)
    if safe is None:
        return _opaque(value, where, resolve)
    try:
        check_tree(value, where, MAX_UNKNOWN_VALUES, enter_unknown=True)
        return _rebuild(safe, value, resolve)
    except Exception as error:  # whatever the user's class does
        raise CheckpointError(f"{where}: {value.module}.{value.qualname} could not be rebuilt: {error}") from error


def _opaque(value: UnknownObject, where: object, resolve: Resolve) -> Opaque:
    def parts() -> Parts:
        check_tree(value, where, MAX_UNKNOWN_VALUES, enter_unknown=True)
        args, state, items, pairs = map(resolve, (value.args, value.state, value.items, value.pairs))
        return Parts(*cast("Parts", (args, state, tuple(cast("Parts", items)), tuple(cast("Parts", pairs)))))

    how: How = "call" if value.by_call else "new"
    summary = attributes(value.args, value.state)
    return Opaque(value.module, value.qualname, how, parts, summary=summary, tensors=count_tensors(value))


def count_tensors(value: object) -> int:
    """How many tensors an object is made of, at any depth. Quantized ones are made of storages."""
    inside = each_once(value, lambda one: _inner(one) if isinstance(one, (*OBJECTS, *CONTAINERS)) else ())
    return sum(isinstance(one, TensorStub | StorageStub) for one in inside)


def _safe_globals() -> dict[tuple[str, str], Any]:
    """What the user passed to torch.serialization.add_safe_globals, by module and name."""
    allowed = dict[tuple[str, str], Any]()
    for one in torch.serialization.get_safe_globals():
        if isinstance(one, tuple):
            module, _, name = one[1].rpartition(".")
            allowed[module, name] = one[0]
        else:
            allowed[one.__module__, one.__qualname__] = one
    return allowed


def _rebuild(kind: Any, value: UnknownObject, resolve: Resolve) -> object:
    """As pickle makes it."""
    args = cast("tuple[object, ...]", resolve(value.args))
    made = kind(*args) if value.by_call else kind.__new__(kind, *args)
    for item in value.items:
        made.append(resolve(item))
    for key, item in value.pairs:
        made[resolve(key)] = resolve(item)
    state: Any = resolve(value.state)
    if state is not None and hasattr(made, "__setstate__"):
        made.__setstate__(state)
    elif state is not None:
        named, slots = state if type(state) is tuple and len(state) == 2 else (state, None)
        for name, item in {**(named or {}), **(slots or {})}.items():
            object.__setattr__(made, name, item)  # works for frozen dataclasses, too
    return made
