"""Ways to cut a matrix into rectangles: the inputs of both sides of a comparison."""

from __future__ import annotations

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
    chance = np.random.default_rng(seed)
    lo, hi, parts = ints([[0, 0]]), ints([shape]), ints([count])
    while (parts > 1).any():  # everything that is still to be several rectangles is cut in two
        done, todo = parts == 1, parts > 1
        row, (axis, at, first) = np.arange(todo.sum()), _cuts(lo[todo], hi[todo], parts[todo], chance)
        middle_hi, middle_lo = hi[todo], lo[todo]
        middle_hi[row, axis] = middle_lo[row, axis] = at
        lo, hi = np.concatenate([lo[done], lo[todo], middle_lo]), np.concatenate([hi[done], middle_hi, hi[todo]])
        parts = np.concatenate([parts[done], first, parts[todo] - first])
    tiling = Tiling(shape, chance.permutation(count), lo, hi)
    tiling.layout().validate()
    return tiling


def _cuts(lo: Ints, hi: Ints, parts: Ints, chance: np.random.Generator) -> tuple[Ints, Ints, Ints]:
    """Where to cut each: the axis (mostly the longer one), the place, and how many of the parts go before it."""
    row, sides = np.arange(len(parts)), hi - lo
    axis = np.argmax(sides, axis=1) ^ ((chance.random(len(parts)) < 0.3) & (sides.min(axis=1) > 1))
    first = chance.integers(np.maximum(1, parts // 4), np.maximum(1, 3 * parts // 4), endpoint=True)
    at = ints(sides[row, axis] * first / parts * chance.uniform(0.7, 1.3, len(parts)))
    return axis, lo[row, axis] + np.clip(at, 1, sides[row, axis] - 1), first
