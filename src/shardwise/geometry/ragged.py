"""Rows of different lengths laid end to end in flat arrays, and groups in sorted ones."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

Ints = npt.NDArray[np.int64]
Bools = npt.NDArray[np.bool_]


def ints(values: npt.ArrayLike) -> Ints:
    """An int64 array."""
    return np.asarray(values, dtype=np.int64)


def spread(counts: Ints) -> tuple[Ints, Ints]:
    """For rows of these lengths: the row of every entry, and its place in that row.

    >>> [a.tolist() for a in spread(ints([2, 0, 3]))]
    [[0, 0, 2, 2, 2], [0, 1, 0, 1, 2]]
    """
    row = np.repeat(np.arange(len(counts), dtype=np.int64), counts)
    return row, np.arange(len(row), dtype=np.int64) - starts(counts)[row]


def starts(counts: Ints) -> Ints:
    """Where each row begins, and at last where they all end.

    >>> starts(ints([2, 0, 3])).tolist()
    [0, 2, 2, 5]
    """
    edges = np.zeros(len(counts) + 1, dtype=np.int64)
    np.cumsum(counts, out=edges[1:])
    return edges


def heads(*columns: Ints) -> Bools:
    """True where a new group begins: where any of the columns changes.

    >>> heads(ints([3, 3, 3, 4]), ints([0, 1, 1, 1])).tolist()
    [True, True, False, True]
    """
    first = np.zeros(len(columns[0]), dtype=np.bool_)
    first[:1] = True
    for column in columns:
        first[1:] |= column[1:] != column[:-1]
    return first


def numbered(*columns: Ints) -> Ints:
    """The groups numbered 0, 1, ... where equal ones stand together."""
    return np.cumsum(heads(*columns)) - 1


def running(values: Ints, group: Ints) -> Ints:
    """The sum of the values before this one in its group, where equal groups stand together.

    >>> running(ints([5, 1, 2, 7]), ints([0, 0, 0, 4])).tolist()
    [0, 5, 6, 0]
    """
    before = starts(values)[:-1]
    first = heads(group)
    return before - before[first][np.cumsum(first) - 1]


def totals(values: Ints, group: Ints, count: int) -> Ints:
    """The sum of the values of every group 0, 1, ..., count - 1, to the last bit.

    >>> totals(ints([5, 1, 2]), ints([2, 0, 2]), 3).tolist()
    [1, 0, 7]
    """
    sums = np.zeros(count, dtype=values.dtype)
    np.add.at(sums, group, values)
    return sums


def exact_sum(values: Ints) -> int:
    """The sum as a Python number, which no count of replicas can overflow."""
    return (int((values >> 32).sum()) << 32) + int((values & (2**32 - 1)).sum())


def different(values: Ints) -> Ints:
    """The different values, rising (np.unique hashes, which takes longer than sorting)."""
    ordered = np.sort(values, axis=None)
    return ordered[heads(ordered)]


def either(these: Ints, those: Ints) -> Ints:
    """The values of one or both, rising; of two that rise and are the same, the one."""
    return these if np.array_equal(these, those) else different(np.concatenate([these, those]))


def counted(values: Ints) -> tuple[Ints, Ints]:
    """The different values, rising, and how many there are of each.

    >>> [a.tolist() for a in counted(ints([5, 3, 5]))]
    [[3, 5], [1, 2]]
    """
    ordered = np.sort(values, axis=None)
    first = np.flatnonzero(heads(ordered))
    return ordered[first], np.diff(np.append(first, len(ordered)))


def run_of(values: Ints, value: int) -> slice:
    """Where a value stands in rising values."""
    return slice(int(values.searchsorted(value, "left")), int(values.searchsorted(value, "right")))
