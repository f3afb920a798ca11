"""Objects of unknown classes: their code never runs. They are shown, copied to other checkpoints, or left out.

`UnknownObject` records what a pickle does to an object while it is read; `Opaque` is what users see of it.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import cached_property
from typing import Literal, NamedTuple, NoReturn, TypeGuard, get_args

import torch

from shardwise.quoting import brief, in_line

How = Literal["name", "call", "new"]
Objects = Literal["drop", "carry"]
SHOWN = 4  # attributes in a listing


class UnknownObject:
    """An object of an unknown class. It records what a pickle does to it. Each class name has a subclass."""

    __slots__ = ("args", "by_call", "items", "pairs", "state")
    module = qualname = ""
    args: tuple[object, ...]
    items: list[object]
    pairs: list[tuple[object, object]]
    by_call: bool  # the class was called, instead of its __new__ only
    state: object

    def __new__(cls, *args: object) -> UnknownObject:
        made = super().__new__(cls)
        made.args, made.state, made.by_call, made.items, made.pairs = args, None, False, [], []
        return made

    def __init__(self, *args: object) -> None:
        self.by_call = True

    def __setstate__(self, state: object) -> None:
        self.state = state

    def append(self, item: object) -> None:
        """As pickles do with lists."""
        self.items.append(item)

    def __setitem__(self, key: object, item: object) -> None:
        self.pairs.append((key, item))

    def __call__(self, *args: object) -> UnknownObject:
        """The result of a function that another one returned: recorded as Python's `operator.call`, not called."""
        return OPERATOR_CALL(self, *args)

    def __repr__(self) -> str:
        return f"<{self.module}.{self.qualname}>"


def unknown_class(module: str, qualname: str) -> type[UnknownObject]:
    """The stub of an unknown class."""
    return type("UnknownObject", (UnknownObject,), {"__slots__": (), "module": module, "qualname": qualname})


OPERATOR_CALL = unknown_class("operator", "call")


def is_unknown_class(value: object) -> TypeGuard[type[UnknownObject]]:
    """True if a pickle names an unknown class or function."""
    return isinstance(value, type) and issubclass(value, UnknownObject)


def is_sharding(module: str, name: str) -> bool:
    """True for what sharded tensors are made of; DTensors are wrapper subclasses."""
    return module.startswith("torch.distributed") or name == "_rebuild_wrapper_subclass"


class Parts(NamedTuple):
    """What an object is made of: arguments, state, and what was appended to it or set in it."""

    args: tuple[object, ...] = ()
    state: object = None
    items: tuple[object, ...] = ()
    pairs: tuple[tuple[object, object], ...] = ()


class OpaqueError(TypeError):
    """An object of an unknown class cannot be pickled as others are."""


class Opaque:
    """An object of an unknown class in a checkpoint. Nothing of it was run or imported.

    `name`: its class, with the module. `args`: the arguments that would make it. `state`: what would be set, usually
    its attributes. `items` and `pairs`: the contents of a list or dict. `tensors`: how many it contains; they are read
    when the parts are first used.

    >>> Opaque("argparse", "Namespace", "new", lambda: Parts(state={"lr": 0.1}), summary="lr=0.1")
    <argparse.Namespace(lr=0.1), not rebuilt>
    """

    def __init__(
        self, module: str, qualname: str, how: How, parts: Callable[[], Parts], *, summary: str = "", tensors: int = 0
    ) -> None:
        self.module, self.qualname, self.how, self.tensors = module, qualname, how, tensors
        self._parts, self._summary = parts, summary

    @property
    def name(self) -> str:
        """Its class; for a class or function, its own name."""
        return f"{self.module}.{self.qualname}"

    @cached_property
    def parts(self) -> Parts:
        """All of it."""
        return self._parts()

    @property
    def args(self) -> tuple[object, ...]:
        """The arguments that would make it."""
        return self.parts.args

    @property
    def state(self) -> object:
        """What would be set: usually a dict of attributes."""
        return self.parts.state

    @property
    def items(self) -> tuple[object, ...]:
        """What would be appended to it: of a list, its items."""
        return self.parts.items

    @property
    def pairs(self) -> tuple[tuple[object, object], ...]:
        """What would be set in it: of a dict, its keys and values."""
        return self.parts.pairs

    @property
    def filled(self) -> list[str]:
        """Which of `args`, `state`, `items` and `pairs` are not empty."""
        return [field for field, part in self.parts._asdict().items() if part is not None and part != ()]

    def __repr__(self) -> str:
        inside = f" with {self.tensors} tensor{'s' * (self.tensors > 1)}" if self.tensors else ""
        return f"<{in_line(self.name)}{f'({self._summary})' if self.how != 'name' else ''}{inside}, not rebuilt>"

    def __reduce__(self) -> NoReturn:
        raise OpaqueError(f"{self!r} cannot be saved: its class is unknown")


def attributes(args: tuple[object, ...], state: object) -> str:
    """The simple arguments and attributes, in a few words."""
    plain = [brief(value) for value in args if _is_plain(value)]
    if isinstance(state, dict):
        plain += [
            f"{in_line(key)}={brief(value)}" for key, value in state.items() if type(key) is str and _is_plain(value)
        ]
    return ", ".join(plain[:SHOWN]) + (", ..." if len(plain) > SHOWN else "")


def _is_plain(value: object) -> bool:
    return isinstance(value, str | bytes | int | float | complex | None)


def check_objects(objects: object) -> None:
    """Refuse an unknown option."""
    if objects not in (None, *get_args(Objects)):
        raise ValueError(f"objects= must be 'drop' or 'carry', not {objects!r}")


def opaque_in(value: object) -> Opaque | None:
    """The first object of an unknown class in a value."""
    return next((one for one in each_once(value, _items) if isinstance(one, Opaque)), None)


def tensors_in(value: object) -> int:
    """How many tensors are in a value: in containers, in objects of unknown classes, and in attributes of others.

    >>> tensors_in({"a": [torch.ones(1), {"b": (torch.ones(1), 2)}]})
    2
    """
    return sum(
        one.tensors if isinstance(one, Opaque) else isinstance(one, torch.Tensor) for one in each_once(value, _items)
    )


def each_once(value: object, items: Callable[[object], Iterable[object]]) -> Iterator[object]:
    """A value, its items, and theirs, each once."""
    seen, todo = set[int](), [value]
    while todo:
        one = todo.pop()
        if id(one) not in seen:
            seen.add(id(one))
            yield one
            todo.extend(reversed([*items(one)]))


def _items(value: object) -> Iterable[object]:
    """The items of containers, and attributes. Objects of unknown classes are not entered."""
    if isinstance(value, Opaque | torch.Tensor | str | bytes | type):
        return ()
    if isinstance(value, Mapping):
        return [*value, *value.values()]
    return (
        value if isinstance(value, list | tuple | set | frozenset | deque) else getattr(value, "__dict__", {}).values()
    )
