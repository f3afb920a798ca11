"""Objects of classes that are not known here: they are shown, carried on or left out, and never run."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import cached_property
from typing import Any, Literal, NamedTuple, NoReturn, get_args

import torch

from shardwise.quoting import brief, in_line

How = Literal["name", "call", "new"]
Objects = Literal["drop", "carry"]
SHOWN = 4  # attributes in a listing


class Parts(NamedTuple):
    """What an object is made of: arguments, state, and what was appended to it or set in it."""

    args: tuple[Any, ...] = ()
    state: Any = None
    items: tuple[Any, ...] = ()
    pairs: tuple[tuple[Any, Any], ...] = ()


class OpaqueError(TypeError):
    """An object of an unknown class cannot be pickled as others are."""


class Opaque:
    """An object in a checkpoint whose class is not known here. Nothing of it was run or imported.

    `name` is its class, with the module; `args` are the arguments that would make it, `state` is what would be set
    (most often its attributes), `items` and `pairs` are what lists and dicts have. `tensors`: how many are in it.
    They are read when the parts are first looked at.

    >>> Opaque("argparse", "Namespace", "new", lambda: Parts(state={"lr": 0.1}), shown="lr=0.1")
    <argparse.Namespace(lr=0.1), not rebuilt>
    """

    def __init__(
        self, module: str, qualname: str, how: How, parts: Callable[[], Parts], *, shown: str = "", tensors: int = 0
    ) -> None:
        self.module, self.qualname, self.how, self.tensors = module, qualname, how, tensors
        self._parts, self._shown = parts, shown

    @property
    def name(self) -> str:
        """Its class, or the name that stands here instead of an object."""
        return f"{self.module}.{self.qualname}"

    @cached_property
    def parts(self) -> Parts:
        """All of it."""
        return self._parts()

    @property
    def args(self) -> tuple[Any, ...]:
        """The arguments that would make it."""
        return self.parts.args

    @property
    def state(self) -> Any:
        """What would be set: most often a dict of attributes."""
        return self.parts.state

    @property
    def items(self) -> tuple[Any, ...]:
        """What would be appended to it: of a list, its items."""
        return self.parts.items

    @property
    def pairs(self) -> tuple[tuple[Any, Any], ...]:
        """What would be set in it: of a dict, its keys and values."""
        return self.parts.pairs

    @property
    def filled(self) -> list[str]:
        """Which of `args`, `state`, `items` and `pairs` have something."""
        return [field for field, part in self.parts._asdict().items() if part is not None and part != ()]

    def __repr__(self) -> str:
        inside = f" with {self.tensors} tensor{'s' * (self.tensors > 1)}" if self.tensors else ""
        return f"<{in_line(self.name)}{f'({self._shown})' if self.how != 'name' else ''}{inside}, not rebuilt>"

    def __reduce__(self) -> NoReturn:
        raise OpaqueError(f"{self!r} cannot be saved: its class is not known here")


def attributes(args: tuple[Any, ...], state: Any) -> str:
    """The arguments and attributes that are plain, in a few words."""
    plain = [brief(value) for value in args if _is_plain(value)]
    if isinstance(state, dict):
        plain += [
            f"{in_line(key)}={brief(value)}" for key, value in state.items() if type(key) is str and _is_plain(value)
        ]
    return ", ".join(plain[:SHOWN]) + (", ..." if len(plain) > SHOWN else "")


def _is_plain(value: Any) -> bool:
    return isinstance(value, str | bytes | int | float | complex | None)


def check_objects(objects: object) -> None:
    """Refuse another word."""
    if objects not in (None, *get_args(Objects)):
        raise ValueError(f"objects= must be 'drop' or 'carry', not {objects!r}")


def opaque_in(value: Any) -> Opaque | None:
    """The first object of an unknown class in a value."""
    return next((one for one in _inside(value) if isinstance(one, Opaque)), None)


def tensors_in(value: Any) -> int:
    """How many tensors are in a value: in containers, in objects of unknown classes, and in attributes of others.

    >>> tensors_in({"a": [torch.ones(1), {"b": (torch.ones(1), 2)}]})
    2
    """
    found = list(_inside(value))
    return sum(one.tensors if isinstance(one, Opaque) else isinstance(one, torch.Tensor) for one in found)


def _inside(value: Any) -> Iterator[Any]:
    """A value and all that is in it, each once. What is inside an object of an unknown class is not looked at."""
    seen, todo = set[int](), [value]
    while todo:
        one = todo.pop()
        if id(one) not in seen:
            seen.add(id(one))
            yield one
            todo.extend(reversed([*_items(one)]))


def _items(value: Any) -> Iterable[Any]:
    if isinstance(value, Opaque | torch.Tensor | str | bytes | type):
        return ()
    if isinstance(value, Mapping):
        return [*value, *value.values()]
    return (
        value if isinstance(value, list | tuple | set | frozenset | deque) else getattr(value, "__dict__", {}).values()
    )
