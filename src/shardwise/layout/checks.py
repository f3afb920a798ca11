"""Checks of constructor arguments: errors say what was given, what was expected, and the fix."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from math import prod
from typing import SupportsIndex, TypeGuard, cast

import numpy as np

from shardwise.errors import LayoutError
from shardwise.geometry import Boxes, Ints, ints
from shardwise.notation import MOST_OWNERS
from shardwise.quoting import brief

MOST_CELLS = 2**50  # keeps every volume, position and byte count of the library well inside 64 bits
MOST_DIMS = 16  # proofs of coverage take 2**dims corners per box
MOST_PIECES = 2**20  # intervals of a dim


def counted(value: object, what: str, least: int = 1) -> int:
    """A whole number of at least `least`, or an error that says what it is for."""
    try:
        number = int(cast(SupportsIndex, value).__index__())
    except (AttributeError, TypeError):
        raise LayoutError(f"{what} must be a whole number, not {brief(value)}") from None
    if isinstance(value, bool) or number < least:
        raise LayoutError(f"{what} must be a whole number of at least {least}, not {brief(value)}")
    if number >= 2**99:
        raise LayoutError(f"{what} is {brief(value)}: is a digit wrong?")
    return number


def owner_array(owners: object) -> Ints:
    """Owners from a number of them (0, 1, 2, ...) or from their numbers in order."""
    if isinstance(owners, int | np.integer) and not isinstance(owners, bool):
        count = counted(owners, "the number of owners")
        if count > MOST_OWNERS:
            raise LayoutError(f"{count} owners are more than 2**18: is a number wrong?")
        return np.arange(count)
    try:
        if isinstance(owners, np.ndarray):
            given = owners
        else:
            listed = list(cast(Iterable[object], owners))
            plain = set(map(type, listed)) == {int}
            given = np.array(listed if plain else [counted(o, "an owner", -(2**99)) for o in listed], object)
    except (TypeError, LayoutError):
        raise LayoutError(
            f"owners must be a number of owners or a list of whole numbers, not {brief(owners)}"
        ) from None
    if given.ndim != 1 or not given.size or given.dtype.kind not in "iuO":
        raise LayoutError(f"owners must be a non-empty list of whole numbers, not {brief(owners)}")
    for bad in int(given.min()), int(given.max()):
        if not 0 <= bad < 2**63:
            raise LayoutError(f"owners are numbered from 0 to 2**63 - 1, not {bad}")
    return given.astype(np.int64)  # a copy: callers may write into theirs


def not_too_many(number: int, what: str) -> int:
    """The number; refused where it is absurdly large."""
    if number > MOST_PIECES:
        raise LayoutError(f"{number} {what} are more than 2**20: is a number wrong?")
    return number


def refuse_repeats(owners: Ints, what: str) -> None:
    """Raise where an owner is named twice."""
    unique, count = np.unique(owners, return_counts=True)
    if len(unique) != len(owners):
        raise LayoutError(f"{what} names owner {int(unique[count.argmax()])} more than once: every owner has one place")


def checked_shape(shape: Iterable[object]) -> tuple[int, ...]:
    """A shape of whole numbers that is not absurdly large."""
    try:
        sizes = tuple(counted(size, "every size of a shape", least=0) for size in shape)
    except TypeError:
        raise LayoutError(f"a shape must be a sequence of whole numbers, not {brief(shape)}") from None
    if len(sizes) > MOST_DIMS:
        raise LayoutError(f"a shape of {len(sizes)} dims is not supported: at most {MOST_DIMS}")
    if prod(size + 1 for size in sizes) > MOST_CELLS:
        raise LayoutError(f"shape {sizes} has about 2**50 cells or more: is a size wrong?")
    return sizes


def checked_dim(dim: object, shape: tuple[int, ...]) -> int:
    """A dim of the shape, counted from the front."""
    number = counted(dim, "a dim", least=-(2**62))
    if not -len(shape) <= number < len(shape):
        if not shape:
            raise LayoutError(f"no dim {number} in a 0-d tensor: it can only be replicated (or partial)")
        raise LayoutError(
            f"no dim {number} in a tensor of shape {shape}: dims are 0..{len(shape) - 1} (or -{len(shape)}..-1)"
        )
    return number % len(shape)


def checked_sizes(sizes: Iterable[object], shape: tuple[int, ...], dim: int, what: str) -> tuple[int, ...]:
    """Sizes that fill a dim."""
    try:
        numbers = tuple(counted(size, f"each of the {what}", least=0) for size in sizes)
    except TypeError:
        raise LayoutError(f"{what} must be a sequence of whole numbers, not {sizes!r}") from None
    if sum(numbers) != shape[dim]:
        shown = f"{list(numbers[:8])}"[:-1] + (", ...]" if len(numbers) > 8 else "]")
        raise LayoutError(f"{what} {shown} add up to {sum(numbers)}, but dim {dim} of shape {shape} has {shape[dim]}")
    return numbers


def checked_ranges(ranges: Iterable[Sequence[int]], shape: tuple[int, ...]) -> tuple[Ints, Ints, Ints]:
    """Owners, starts and stops of ranges of the flattened tensor."""
    try:
        rows = [tuple(row) for row in ranges]
    except TypeError:
        rows = []
    if not rows or any(len(row) != 3 for row in rows):
        raise LayoutError("ranges must be a non-empty list of (owner, start, stop)")
    ends = [[counted(x, "a range", least=0) for x in row[1:]] for row in rows]
    for start, stop in ends:
        if not start <= stop <= prod(shape):
            raise LayoutError(f"range {start}:{stop} is not inside the {prod(shape)} cells of shape {shape}")
    edges = ints(ends)
    return owner_array([row[0] for row in rows]), edges[:, 0], edges[:, 1]


def checked_boxes(pieces: Iterable[object], shape: tuple[int, ...]) -> tuple[Ints, Boxes]:
    """Owners and boxes, from (owner, lo, hi) rows or from three arrays."""
    try:
        columns: Sequence[object] = (
            pieces if _is_columns(pieces) else list(zip(*cast(Iterable[Iterable[object]], pieces), strict=True))
        )
    except (TypeError, ValueError):
        columns = []
    if len(columns) != 3:
        raise LayoutError("boxes must be a non-empty list of (owner, lo, hi), or three arrays (owners, lo, hi)")
    owners = owner_array(columns[0])
    lo, hi = (_corners(side, len(owners), shape) for side in columns[1:])
    bad = np.flatnonzero(((lo < 0) | (lo > hi) | (hi > ints(shape))).any(axis=1))
    if len(bad):
        i = int(bad[0])
        raise LayoutError(
            f"box {i} of owner {owners[i]}, lo={tuple(lo[i].tolist())} hi={tuple(hi[i].tolist())}, is not inside shape "
            f"{shape}: every axis needs 0 <= lo <= hi <= size"
        )
    return owners, Boxes(lo, hi)


def _is_columns(pieces: object) -> TypeGuard[tuple[Ints, ...]]:
    return isinstance(pieces, tuple) and all(isinstance(column, np.ndarray) for column in pieces)


def _corners(side: object, count: int, shape: tuple[int, ...]) -> Ints:
    try:
        corners = np.asarray(side)
    except (ValueError, OverflowError):
        corners = np.empty((0, 0))
    if corners.size == 0 and not shape:
        return np.zeros((count, 0), dtype=np.int64)
    if corners.shape != (count, len(shape)) or corners.dtype.kind not in "iu":
        raise LayoutError(f"every box needs lo and hi of {len(shape)} whole numbers, as the shape {shape} has")
    if corners.dtype == np.uint64 and corners.max(initial=0) >= 2**62:
        raise LayoutError(f"a box that reaches to {corners.max()} is not inside shape {shape}")
    return np.array(corners, dtype=np.int64)
