"""Half-open boxes of cells, one at a time."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from math import prod
from operator import index

from shardwise.errors import LayoutError


@dataclass(frozen=True, slots=True)
class Box:
    """The cells from `lo` (included) to `hi` (excluded) on every axis.

    >>> Box((0, 2), (4, 6)).volume
    16
    >>> print(Box((0, 2), (4, 6)))
    [0:4, 2:6]
    """

    lo: tuple[int, ...]
    hi: tuple[int, ...]

    def __post_init__(self) -> None:
        for side in "lo", "hi":
            object.__setattr__(self, side, _whole(getattr(self, side)))
        if len(self.lo) != len(self.hi):
            raise LayoutError(f"a box needs lo and hi of one length, not {self.lo} and {self.hi}")
        if any(a > b for a, b in zip(self.lo, self.hi, strict=True)):
            raise LayoutError(f"a box needs lo <= hi on every axis, not lo={self.lo}, hi={self.hi}")

    @property
    def shape(self) -> tuple[int, ...]:
        """How many cells on each axis."""
        return tuple(b - a for a, b in zip(self.lo, self.hi, strict=True))

    @property
    def volume(self) -> int:
        """How many cells in all; a 0-d box has one."""
        return prod(self.shape)

    @property
    def slices(self) -> tuple[slice, ...]:
        """The box as an index of the whole tensor."""
        return tuple(slice(a, b) for a, b in zip(self.lo, self.hi, strict=True))

    def __and__(self, other: Box) -> Box | None:
        """The cells of both, or None.

        >>> Box((0, 0), (4, 6)) & Box((2, 4), (8, 8))
        Box(lo=(2, 4), hi=(4, 6))
        """
        self._like(other)
        lo = tuple(map(max, self.lo, other.lo))
        hi = tuple(map(min, self.hi, other.hi))
        return Box(lo, hi) if all(a < b for a, b in zip(lo, hi, strict=True)) else None

    def minus(self, other: Box) -> list[Box]:
        """The cells without those of the other, as at most two boxes per axis.

        >>> [str(b) for b in Box((0, 0), (4, 6)).minus(Box((1, 2), (4, 6)))]
        ['[0:1, 0:6]', '[1:4, 0:2]']
        """
        hole, rest, lo, hi = self & other, list[Box](), self.lo, self.hi
        if hole is None:
            return [self]
        for axis in range(len(lo)):
            below, above = (*hi[:axis], hole.lo[axis], *hi[axis + 1 :]), (*lo[:axis], hole.hi[axis], *lo[axis + 1 :])
            rest += [Box(lo, below)] * (hole.lo[axis] > lo[axis]) + [Box(above, hi)] * (hole.hi[axis] < hi[axis])
            lo, hi = (*lo[:axis], hole.lo[axis], *lo[axis + 1 :]), (*hi[:axis], hole.hi[axis], *hi[axis + 1 :])
        return rest

    def __contains__(self, other: Box) -> bool:
        """True where every cell of `other` is in this box."""
        self._like(other)
        return all(a <= c and d <= b for a, b, c, d in zip(self.lo, self.hi, other.lo, other.hi, strict=True))

    def _like(self, other: Box) -> None:
        if len(self.lo) != len(other.lo):
            raise LayoutError(f"{self} and {other} have different numbers of dims")

    def within(self, outer: Box) -> Box:
        """The same cells counted from the corner of `outer`.

        >>> Box((4, 6), (5, 8)).within(Box((4, 4), (8, 8)))
        Box(lo=(0, 2), hi=(1, 4))
        """
        return Box(
            tuple(a - o for a, o in zip(self.lo, outer.lo, strict=True)),
            tuple(b - o for b, o in zip(self.hi, outer.lo, strict=True)),
        )

    def __str__(self) -> str:
        return "[" + ", ".join(f"{a}:{b}" for a, b in zip(self.lo, self.hi, strict=True)) + "]"


def _whole(corner: Iterable[int]) -> tuple[int, ...]:
    """A corner of whole numbers."""
    try:
        numbers = tuple(corner)
        if bool in map(type, numbers):
            raise TypeError
        return tuple(map(index, numbers))
    except TypeError:
        raise LayoutError(f"a corner of a box needs whole numbers, not {corner!r}") from None


def row_major(shape: tuple[int, ...]) -> tuple[int, ...]:
    """The strides of a contiguous buffer.

    >>> row_major((4, 6, 2))
    (12, 2, 1)
    """
    strides = [1] * len(shape)
    for axis in range(len(shape) - 1, 0, -1):
        strides[axis - 1] = strides[axis] * max(shape[axis], 1)
    return tuple(strides)
