"""The names of per-rank files: a pattern with the rank, or with its position along every mesh axis."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from string import Formatter

import numpy as np

from shardwise.errors import LayoutError
from shardwise.layout import Mesh
from shardwise.quoting import brief

DIGITS = re.compile("(0?[0-9]{1,2})?d?")  # allowed format specs of numbers in file names
NUMBER = re.compile("[0-9]+")


def numbers_in(name: str) -> tuple[int, ...]:
    """
    >>> numbers_in("model_03-of-16.pt")
    (3, 16)
    """
    return tuple(map(int, NUMBER.findall(name)))


def numbered_alike(names: Iterable[str]) -> list[list[str]]:
    """Names that differ in numbers only, together, in the order of their numbers.

    >>> numbered_alike(["b_10.pt", "a.pt", "b_9.pt"])
    [['b_9.pt', 'b_10.pt'], ['a.pt']]
    """
    found = dict[str, dict[tuple[int, ...], str]]()
    for name in names:
        found.setdefault(NUMBER.sub("0", name), {})[numbers_in(name)] = name
    return [[group[key] for key in sorted(group)] for group in found.values()]


def axis_positions(mesh: Mesh, rank: int) -> dict[str, int]:
    """The fields of a file pattern: the rank, and its position along every axis.

    >>> axis_positions(Mesh(dp=2, tp=4), 6)
    {'rank': 6, 'dp': 1, 'tp': 2}
    """
    places = [int(place) for place in np.unravel_index(rank, mesh.shape)]
    return {"rank": rank} | dict(zip(mesh.names, places, strict=True))


def file_name(pattern: str, places: Mapping[str, int]) -> str:
    """The file of a rank.

    >>> file_name("d{dp}/model_{tp:02d}.pt", {"rank": 6, "dp": 1, "tp": 2})
    'd1/model_02.pt'
    """
    for _, field, form, conversion in _fields(pattern):
        if field is not None and field not in places:
            raise LayoutError(
                f"pattern {brief(pattern)} has the unknown field {{{field}}}: known are {', '.join(places)}"
            )
        if conversion or not DIGITS.fullmatch(form or ""):
            raise LayoutError(
                f"pattern {brief(pattern)} is not supported: write {{{field}}}, or with leading zeros {{{field}:02d}}"
            )
    return pattern.format(**places)


def _fields(pattern: str) -> list[tuple[str, str | None, str | None, str | None]]:
    try:
        return list(Formatter().parse(pattern))
    except ValueError as error:
        raise LayoutError(f"pattern {brief(pattern)} cannot be read: {error}") from None
