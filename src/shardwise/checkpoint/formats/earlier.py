"""Tensors of a checkpoint that lie in files of earlier ones: what an incremental save has not written again.

The index has them by the name of a folder beside its own, in the field `earlier`: the file of every rank there, by its
number, and which tensors lie there, of which ranks.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, cast

import numpy as np

from shardwise.checkpoint.values import JsonObject
from shardwise.errors import CheckpointError
from shardwise.geometry import Ints
from shardwise.quoting import brief
from shardwise.storage.increments import FIELD, LOCATION


@dataclass(frozen=True, eq=False)  # the same one for many tensors: quicker to compare
class Moved:
    """Parts that owners would have in files of their own lie in other files."""

    owners: tuple[int, ...]
    files: tuple[int, ...]


class EarlierFiles:
    """The files of earlier checkpoints that an index names. Their numbers follow those of its own files."""

    def __init__(self, names: Sequence[str], moved: Mapping[str, tuple[Moved, ...]]) -> None:
        self.names, self._moved = names, moved

    @staticmethod
    def of(index: JsonObject, count: int, where: object) -> EarlierFiles:
        """From an index with `count` files of its own."""
        try:
            return _parsed(cast("dict[str, Any]", index.get(FIELD, {})), count)
        except (LookupError, TypeError, ValueError, AttributeError) as error:
            raise CheckpointError(f"{where}: its field {FIELD!r} is invalid: {error}") from error

    def moved(self, name: str) -> tuple[Moved, ...]:
        """What is elsewhere of a tensor."""
        return self._moved.get(name, ())


def _parsed(earlier: Mapping[str, Mapping[str, Any]], count: int) -> EarlierFiles:
    names, moved = list[str](), defaultdict[str, tuple[Moved, ...]](tuple)
    for folder, fields in earlier.items():
        numbers = {owner: count + len(names) + at for at, owner in enumerate(map(int, fields["files"]))}
        names += [_name(folder, file) for file in fields["files"].values()]
        for owners, tensors in fields["tensors"]:
            if not all(type(owner) is int and 0 <= owner < count for owner in owners):
                raise ValueError(f"{brief(owners)} are not numbers of its {count} files")
            one = Moved(tuple(owners), tuple(numbers[owner] for owner in owners))
            for tensor in tensors:
                moved[tensor] += (one,)
    return EarlierFiles(names, moved)


def _name(folder: str, file: str) -> str:
    """The file, relative to the folder of the index; refused if it is not one of ours in a folder beside it."""
    location = f"{folder}/{file}"
    if not LOCATION.fullmatch(location) or not location.isprintable():
        raise ValueError(f"{brief(location)} is not a file of a checkpoint beside it")
    return f"../{location}"


def file_numbers(owner: Ints, moved: Sequence[Moved], count: int) -> Ints:
    """The file of each part, by the number of its owner."""
    files = np.arange(count)
    for one in moved:
        files[list(one.owners)] = one.files
    numbers: Ints = files[owner]
    return numbers
