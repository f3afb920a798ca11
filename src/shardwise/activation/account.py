"""What activations cost: bytes saved for backward, bytes kept on this rank, and bytes gathered again."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field


@dataclass
class Account:
    """The account of one module."""

    tensors: int = 0  # saved as shards
    bytes_saved: int = 0  # of these tensors, as a whole
    bytes_kept: int = 0  # of those, on this rank
    gathers: int = 0
    bytes_gathered: int = 0  # from other ranks

    def kept(self, whole: int, part: int) -> None:
        """Count a tensor of which this rank keeps a part."""
        self.tensors += 1
        self.bytes_saved += whole
        self.bytes_kept += part

    def gathered(self, received: int) -> None:
        """Count a tensor that was restored."""
        self.gathers += 1
        self.bytes_gathered += received

    def __add__(self, other: Account) -> Account:
        return Account(*(a + b for a, b in zip(vars(self).values(), vars(other).values(), strict=True)))


@dataclass
class Measure:
    """What modules under `input_reshard` saved on this rank, by module and in total.

    >>> m = Measure()
    >>> m.of("MLP 0").kept(4096, 1024)
    >>> m.bytes_saved, m.bytes_kept, m.gathers
    (4096, 1024, 0)
    >>> print(m)
    MLP 0: 1 tensors of 4096 bytes, 1024 kept; 0 gathers of 0 bytes
    """

    modules: dict[str, Account] = field(default_factory=dict)

    def of(self, module: str) -> Account:
        """The account of one module."""
        return self.modules.setdefault(module, Account())

    @property
    def total(self) -> Account:
        """The sum over all modules."""
        return sum(self.modules.values(), Account())

    @property
    def bytes_saved(self) -> int:
        """What this rank would keep without `input_reshard`."""
        return self.total.bytes_saved

    @property
    def bytes_kept(self) -> int:
        """What it keeps of that."""
        return self.total.bytes_kept

    @property
    def gathers(self) -> int:
        """How many tensors were restored."""
        return self.total.gathers

    def __str__(self) -> str:
        return "\n".join(
            f"{name}: {a.tensors} tensors of {a.bytes_saved} bytes, {a.bytes_kept} kept; "
            f"{a.gathers} gathers of {a.bytes_gathered} bytes"
            for name, a in self.modules.items()
        )


_active = ContextVar[Measure | None]("active measure", default=None)


@contextmanager
def measure() -> Iterator[Measure]:
    """Account for what is saved inside the context, and for restoring it, even if that happens later."""
    active = Measure()
    token = _active.set(active)
    try:
        yield active
    finally:
        _active.reset(token)


def account_of(module: str) -> Account:
    """The account of a module in the active measure."""
    active = _active.get()
    return Account() if active is None else active.of(module)
