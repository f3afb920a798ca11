"""Ways to cut a matrix into rectangles: the inputs of both sides of a comparison."""

from __future__ import annotations

import random
from typing import NamedTuple

import numpy as np

from shardwise import Layout
from shardwise.geometry import Ints, ints

Corners = list[tuple[list[int], list[int]]]


class Tiling(NamedTuple):
    """Rectangles `lo:hi` that cover the shape exactly once; number i belongs to `owners[i]`."""

    shape: tuple[int, int]
    owners: Ints
    lo: Ints
    hi: Ints

    def layout(self) -> Layout:
        """A new layout, from the arrays."""
        return Layout.boxes(self.shape, (self.owners, self.lo, self.hi))

    def corners(self) -> Corners:
        """(lo, hi) of every rectangle, as plain numbers."""
        return list(zip(self.lo.tolist(), self.hi.tolist(), strict=True))

    def pieces(self) -> list[tuple[int, list[int], list[int]]]:
        """(owner, lo, hi) of every rectangle, as plain numbers."""
        return list(zip(self.owners.tolist(), self.lo.tolist(), self.hi.tolist(), strict=True))


def grid(shape: tuple[int, int], rows: int, columns: int) -> Tiling:
    """Equal rectangles; the shape must divide."""
    size = ints(shape) // (rows, columns)
    lo = np.stack(np.divmod(np.arange(rows * columns), columns), axis=1) * size
    return Tiling(shape, np.arange(rows * columns), lo, lo + size)


def listed(tiling: Tiling) -> Tiling:
    """The same, but the first owner holds the last rectangle too: no longer one block per owner, so not a grid."""
    owners = tiling.owners.copy()
    owners[-1] = owners[0]
    return tiling._replace(owners=owners)


def guillotine(shape: tuple[int, int], count: int, *, seed: int) -> Tiling:
    """Rectangles of many forms, from random cuts from side to side; owners in random order."""
    chance = random.Random(seed)
    found: Corners = []
    todo = [([0, 0], list(shape), count)]
    while todo:
        lo, hi, parts = todo.pop()
        if parts == 1:
            found.append((lo, hi))
            continue
        axis, at, first = _cut(lo, hi, parts, chance)
        middle_hi, middle_lo = hi.copy(), lo.copy()
        middle_hi[axis] = middle_lo[axis] = at
        todo += [(lo, middle_hi, first), (middle_lo, hi, parts - first)]
    corners = ints(found)
    tiling = Tiling(shape, np.random.default_rng(seed).permutation(count), corners[:, 0], corners[:, 1])
    tiling.layout().validate()
    return tiling


def _cut(lo: list[int], hi: list[int], parts: int, chance: random.Random) -> tuple[int, int, int]:
    """Where to cut: the axis (mostly the longer one), the place, and how many of the parts go before it."""
    sides = [hi[0] - lo[0], hi[1] - lo[1]]
    longer = int(sides[1] > sides[0])
    axis = 1 - longer if chance.random() < 0.3 and min(sides) > 1 else longer
    first = chance.randint(max(1, parts // 4), max(1, 3 * parts // 4))
    at = int(sides[axis] * first / parts * chance.uniform(0.7, 1.3))
    return axis, lo[axis] + min(max(at, 1), sides[axis] - 1), first
