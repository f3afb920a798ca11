"""Objects of unknown classes, as a pickle makes them: what it does to them is recorded, and nothing runs."""

from __future__ import annotations

from typing import Any


class Foreign:
    """An object of a class that is not known here: what a pickle does to it is recorded. Each name has a subclass."""

    __slots__ = ("args", "called", "items", "pairs", "state")
    module = qualname = ""
    args: tuple[Any, ...]
    items: list[Any]
    pairs: list[tuple[Any, Any]]
    called: bool
    state: Any

    def __new__(cls, *args: Any) -> Foreign:
        made = super().__new__(cls)
        made.args, made.state, made.called, made.items, made.pairs = args, None, False, [], []
        return made

    def __init__(self, *args: Any) -> None:
        self.called = True  # the class was called; else only its __new__ is

    def __setstate__(self, state: Any) -> None:
        self.state = state

    def append(self, item: Any) -> None:
        """As pickles do with lists."""
        self.items.append(item)

    def __setitem__(self, key: Any, item: Any) -> None:
        self.pairs.append((key, item))

    def __call__(self, *args: Any) -> Foreign:
        """What a function returns that another one returned: nothing is called, and Python's `operator.call` is it."""
        return CALLED(self, *args)

    def __repr__(self) -> str:
        return f"<{self.module}.{self.qualname}>"


def foreign_class(module: str, qualname: str) -> type[Foreign]:
    """The class that stands for an unknown one."""
    return type("Foreign", (Foreign,), {"__slots__": (), "module": module, "qualname": qualname})


CALLED = foreign_class("operator", "call")


def is_sharding(module: str, name: str) -> bool:
    """True for what sharded tensors are made of; DTensors are wrapper subclasses."""
    return module.startswith("torch.distributed") or name == "_rebuild_wrapper_subclass"


def is_foreign_class(value: Any) -> bool:
    """True where a pickle names a class, or a function, that is not known."""
    return isinstance(value, type) and issubclass(value, Foreign)
