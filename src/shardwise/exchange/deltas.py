"""Deltas: the cells of a block that have changed, in the fewest bytes of several forms. Pure, and lossless.

An encoded block is a header, the values of the changed cells, and where they lie. Each of the three starts at a
multiple of 8 bytes. Nobody but the sender has to know how many cells changed; both sides know the number of all cells.
"""

from __future__ import annotations

from collections.abc import Callable
from enum import IntEnum
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from shardwise.errors import ExchangeError
from shardwise.geometry import Bools, Ints, ints

BLOCK = 2**18  # cells of a block: with their mask and values they stay in the cache
FEW = 10  # one changed cell among so many
HEADER = 16  # bytes: form, count and length, as numbers of 4 bytes
WORDS: dict[int, np.dtype[Any]] = {
    1: np.dtype("u1"),
    2: np.dtype("u2"),
    4: np.dtype("u4"),
    8: np.dtype("u8"),
    16: np.dtype("c16"),
}

Bytes = npt.NDArray[np.uint8]
Words = npt.NDArray[Any]  # cells as numbers of their size: only their bits matter


class Form(IntEnum):
    """How an encoded block says where the changed cells lie."""

    NONE = 0  # no cell changed
    DENSE = 1  # all values are there: also those of cells that did not change
    BITS = 2  # one bit per cell
    BYTE_GAPS = 3  # the cells between two changed ones, in one byte; the largest number stands for a longer gap
    SHORT_GAPS = 4  # the same in two bytes
    RUNS = 5  # start and length of every run, in 4 bytes each


GAPS: dict[Form, np.dtype[Any]] = {Form.BYTE_GAPS: np.dtype("u1"), Form.SHORT_GAPS: np.dtype("u2")}
RUN = np.dtype("u4")
NO_GAPS = ints([])


class Choice(NamedTuple):
    """The form of a block: how many cells changed, their numbers, the gaps before them, and the bytes that tell it."""

    form: Form
    changed: int
    cells: slice | Ints
    gaps: Ints
    bytes: int


class Changes(NamedTuple):
    """What an encoded block says: the numbers of changed cells, their values, and how many bytes it has."""

    cells: slice | Ints
    values: Words
    bytes: int


def most_bytes(cells: int, itemsize: int) -> int:
    """No encoded block of so many cells has more.

    >>> most_bytes(3, 2)
    32
    """
    return HEADER + _up(cells * itemsize) + 8  # two of its parts are rounded up


def encode(changed: Bools, words: Callable[[], Words], itemsize: int, room: Bytes) -> int:
    """Write a block into the room, which has `most_bytes`, and return its length; `words` is called if any changed.

    >>> room = np.zeros(most_bytes(4, 2), np.uint8)
    >>> cells = np.array([7, 8, 9, 10], np.uint16)
    >>> length = encode(np.array([False, True, False, False]), lambda: cells, 2, room)
    >>> target = np.zeros(4, np.uint16)
    >>> decode(room[:length], target) == length, target.tolist()
    (True, [0, 8, 0, 0])
    """
    choice = choose(changed, itemsize)
    room[:HEADER].view(RUN)[:] = choice.form, choice.changed, choice.bytes, 0
    start = HEADER + _up(choice.changed * itemsize)
    if not choice.changed:
        return start
    values = room[HEADER : HEADER + choice.changed * itemsize].view(WORDS[itemsize])
    if isinstance(choice.cells, slice):
        values[:] = words()
    else:
        words().take(choice.cells, out=values, mode="clip")  # which does not copy twice; no number is out of range
    told = _told(choice, changed)
    room[start : start + told.nbytes].view(told.dtype)[:] = told
    return start + _up(told.nbytes)


def choose(changed: Bools, itemsize: int) -> Choice:
    """The form with the fewest bytes."""
    size, count = len(changed), int(np.count_nonzero(changed))
    if not count:
        return Choice(Form.NONE, 0, slice(0, 0), NO_GAPS, 0)
    few = FEW * count <= size
    cells = _numbers(changed, count) if few else NO_GAPS  # from here on, few cells take few steps
    gaps = _gaps(cells)
    steps = gaps[1:] > 0 if few else changed[1:] > changed[:-1]
    runs = int(few or changed[0]) + int(np.count_nonzero(steps))
    sizes = {Form.DENSE: (size - count) * itemsize, Form.BITS: -(-size // 8), Form.RUNS: 2 * RUN.itemsize * runs}
    if sizes[Form.DENSE] <= min(sizes.values()):
        return Choice(Form.DENSE, size, slice(None), NO_GAPS, 0)
    cells = cells if few else _numbers(changed, count)
    if count < min(sizes.values()):
        gaps = gaps if few else _gaps(cells)
        sizes |= {form: dtype.itemsize * (count + _escapes(gaps, dtype)) for form, dtype in GAPS.items()}
    form = min(sizes, key=lambda one: (sizes[one], one))
    return Choice(form, count, cells, gaps, sizes[form])


def decode(encoded: Bytes, words: Words) -> int:
    """Write the changed cells, leave the others (a dense block writes all), and return the length of the block."""
    found = changes(encoded, len(words), words.itemsize)
    words[found.cells] = found.values
    return found.bytes


def changes(encoded: Bytes, cells: int, itemsize: int) -> Changes:
    """What a block of so many cells says. Whatever the bytes are, its numbers are those of cells, each at most once."""
    _check(len(encoded) >= HEADER, "no whole header")
    form, count, size, _ = encoded[:HEADER].view(RUN).tolist()
    _check(form in _READ and count <= cells, f"form {form} with {count} of {cells} cells")
    start = HEADER + _up(count * itemsize)
    _check(start + _up(size) <= len(encoded), f"{start + size} bytes where {len(encoded)} are left")
    values = encoded[HEADER : HEADER + count * itemsize].view(WORDS[itemsize])
    where = _READ[Form(form)](encoded[start : start + size], cells, count)
    return Changes(where, values, start + _up(size))


# --- where changed cells lie -----------------------------------------------------------------------------------------


def _numbers(changed: Bools, count: int) -> Ints:
    """The numbers of changed cells. Few are looked for by 8 cells at a time first: that takes half the time."""
    even = len(changed) // 8 * 8
    if not 0 < FEW * count <= len(changed) or even < len(changed):
        return np.flatnonzero(changed)
    by_eights = changed.view(np.uint64)
    eights = np.flatnonzero(by_eights != 0)
    within = np.flatnonzero(by_eights[eights].view(np.bool_))
    numbers = eights.take(within >> 3)
    numbers <<= 3
    within &= 7
    numbers += within
    return numbers


def _told(choice: Choice, changed: Bools) -> Words:
    if choice.form is Form.BITS:
        return np.packbits(changed, bitorder="little")
    if choice.form is Form.RUNS:
        edges = np.flatnonzero(np.diff(changed, prepend=False, append=False)).reshape(-1, 2)
        edges[:, 1] -= edges[:, 0]
        return edges.astype(RUN).reshape(-1)
    if choice.form in GAPS:
        return _packed_gaps(choice.gaps, choice.bytes // GAPS[choice.form].itemsize, GAPS[choice.form])
    return np.zeros(0, np.uint8)


def _gaps(cells: Ints) -> Ints:
    """How many cells did not change before each of these."""
    gaps = cells.copy()
    gaps[1:] -= cells[:-1]
    gaps[1:] -= 1
    return gaps


def _escapes(gaps: Ints, dtype: np.dtype[Any]) -> int:
    most = np.iinfo(dtype).max
    return int((gaps[gaps >= most] // most).sum()) if len(gaps) and gaps.max() >= most else 0


def _packed_gaps(gaps: Ints, length: int, dtype: np.dtype[Any]) -> Words:
    """The largest number stands for as many cells that did not change, with none that did after them."""
    if length == len(gaps):
        return gaps.astype(dtype)
    most = np.iinfo(dtype).max
    long = np.flatnonzero(gaps >= most)
    escapes, short = gaps[long] // most, gaps.astype(dtype)
    short[long] = gaps[long] - escapes * most
    packed, ends = np.full(length, most, dtype), np.ones(length, np.bool_)
    ends[np.repeat(long, escapes) + np.arange(length - len(gaps))] = False
    packed[ends] = short
    return packed


def _read_dense(told: Bytes, cells: int, count: int) -> slice:
    _check(count == cells and not len(told), f"{count} of {cells} cells")
    return slice(None)


def _read_none(told: Bytes, cells: int, count: int) -> slice:
    _check(count == 0 and not len(told), f"{count} values where nothing changed")
    return slice(0, 0)


def _read_bits(told: Bytes, cells: int, count: int) -> Ints:
    _check(len(told) == -(-cells // 8), f"{len(told)} bytes of bits for {cells} cells")
    found = np.flatnonzero(np.unpackbits(told, bitorder="little").view(np.bool_))
    _check(len(found) == count and (not count or found[-1] < cells), f"{len(found)} bits for {count} of {cells} cells")
    return found


def _read_gaps(told: Words, cells: int, count: int) -> Ints:
    steps = told.astype(np.int64)
    ends = told != np.iinfo(told.dtype).max
    steps += ends
    found = np.cumsum(steps)
    if len(found) != count:
        found = found[ends]
    elif not ends.all():
        _check(False, "a gap without an end")
    found -= 1
    _check(len(found) == count and (not count or found[-1] < cells), f"{len(found)} gaps for {count} of {cells} cells")
    return found


def _read_byte_gaps(told: Bytes, cells: int, count: int) -> Ints:
    return _read_gaps(told, cells, count)


def _read_short_gaps(told: Bytes, cells: int, count: int) -> Ints:
    _check(len(told) % 2 == 0, "half a gap")
    return _read_gaps(told.view(GAPS[Form.SHORT_GAPS]), cells, count)


def _read_runs(told: Bytes, cells: int, count: int) -> Ints:
    _check(len(told) % (2 * RUN.itemsize) == 0, "half a run")
    starts, lengths = told.view(RUN).astype(np.int64).reshape(-1, 2).T
    ends = starts + lengths
    apart = bool((lengths > 0).all() and (starts[1:] > ends[:-1]).all() and (not len(ends) or ends[-1] <= cells))
    _check(apart and int(lengths.sum()) == count, f"runs that are not {count} of {cells} cells")
    before = np.cumsum(lengths) - lengths
    return np.arange(count) + np.repeat(starts - before, lengths)


_READ: dict[Form, Callable[[Bytes, int, int], slice | Ints]] = {
    Form.NONE: _read_none,
    Form.DENSE: _read_dense,
    Form.BITS: _read_bits,
    Form.BYTE_GAPS: _read_byte_gaps,
    Form.SHORT_GAPS: _read_short_gaps,
    Form.RUNS: _read_runs,
}


def _check(right: bool, what: str) -> None:
    if not right:
        raise ExchangeError(f"a message is damaged: its delta has {what}. delta=False sends whole messages")


def _up(size: int) -> int:
    return -(-size // 8) * 8
