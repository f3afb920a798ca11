"""The rows of a page: a tensor each, with its layout or plan."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from math import prod

from shardwise.layout import Layout
from shardwise.planning import Plan


@dataclass(frozen=True)
class Row:
    """A tensor of a page: its name, where it lies or how it moves, the bytes of an element, its dtype and a note.

    >>> from shardwise.layout import parse
    >>> Row("w", parse("8x6/S0@4"), itemsize=2).size
    96
    """

    name: str
    shown: Layout | Plan
    itemsize: int | None = None  # a plan knows it; a layout does not, and its cells are counted
    dtype: str = ""
    note: str = ""

    def __post_init__(self) -> None:
        if not isinstance(self.shown, Layout | Plan):
            raise TypeError(f"a page shows a Layout or a Plan as {self.name!r}, not {self.shown!r}")

    @property
    def size(self) -> int:
        """The bytes of all cells, once; the number of cells where their bytes are not known."""
        if isinstance(self.shown, Plan):
            return prod(self.shown.target.shape) * self.shown.itemsize
        return prod(self.shown.shape) * (self.itemsize or 1)

    @property
    def counts_cells(self) -> bool:
        """True where the size is not in bytes."""
        return isinstance(self.shown, Layout) and self.itemsize is None


def rows(what: Iterable[object]) -> list[Row]:
    """Layouts, plans, mappings from names to them, and rows: as rows."""
    return [row for one in what for row in _rows(one)]


def _rows(one: object) -> list[Row]:
    if isinstance(one, Row):
        return [one]
    if isinstance(one, Layout | Plan):
        return [Row("", one)]
    if isinstance(one, Mapping):
        return [Row(str(name), shown) for name, shown in one.items()]
    if isinstance(one, Iterable) and not isinstance(one, str):
        return rows(one)
    raise TypeError(f"a page shows a Layout, a Plan, a mapping from names to them, or rows, not {one!r}")
