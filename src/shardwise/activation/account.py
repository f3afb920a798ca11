"""What activations cost: bytes that were saved, that are kept, and that had to be gathered again."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field


@dataclass
class Account:
    """Of one module."""

    tensors: int = 0  # kept in parts
    bytes_saved: int = 0  # that they have
    bytes_kept: int = 0  # of those, on this rank
    gathers: int = 0
    bytes_gathered: int = 0  # from other ranks

    def kept(self, whole: int, part: int) -> None:
        """A tensor was kept in parts."""
        self.tensors += 1
        self.bytes_saved += whole
        self.bytes_kept += part

    def gathered(self, received: int) -> None:
        """It was restored."""
        self.gathers += 1
        self.bytes_gathered += received

    def __add__(self, other: Account) -> Account:
        return Account(*(a + b for a, b in zip(vars(self).values(), vars(other).values(), strict=True)))


@dataclass
class Measure:
    """What was saved by modules under `input_reshard` on this rank, by module and in all.

    >>> m = Measure()
    >>> m.of("MLP 0").kept(4096, 1024)
    >>> m.bytes_saved, m.bytes_kept, m.gathers
    (4096, 1024, 0)
    >>> print(m)
    MLP 0: 1 tensors of 4096 bytes, 1024 kept; 0 gathers of 0 bytes
    """

    modules: dict[str, Account] = field(default_factory=dict)

    def of(self, module: str) -> Account:
        """Of one module."""
        return self.modules.setdefault(module, Account())

    @property
    def total(self) -> Account:
        """Of all modules."""
        return sum(self.modules.values(), Account())

    @property
    def bytes_saved(self) -> int:
        """What would be kept without it."""
        return self.total.bytes_saved

    @property
    def bytes_kept(self) -> int:
        """What is kept of that."""
        return self.total.bytes_kept

    @property
    def gathers(self) -> int:
        """How often something was restored."""
        return self.total.gathers

    def __str__(self) -> str:
        return "\n".join(
            f"{name}: {a.tensors} tensors of {a.bytes_saved} bytes, {a.bytes_kept} kept; "
            f"{a.gathers} gathers of {a.bytes_gathered} bytes"
            for name, a in self.modules.items()
        )


_active = ContextVar[Measure | None]("the accounting that is on", default=None)


@contextmanager
def measure() -> Iterator[Measure]:
    """Account for what is saved inside, and for restoring it, whenever that is."""
    found = Measure()
    token = _active.set(found)
    try:
        yield found
    finally:
        _active.reset(token)


def account_of(module: str) -> Account:
    """Where to write down what a module does."""
    active = _active.get()
    return Account() if active is None else active.of(module)
