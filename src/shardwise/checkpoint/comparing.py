"""Comparisons: the contents of two checkpoints, or one with its own checksums (verify)."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import overload

import numpy as np
import torch

from shardwise.checkpoint.adapters import with_adapter
from shardwise.checkpoint.damage import Damage, verify_sums
from shardwise.checkpoint.entry import Checkpoint
from shardwise.checkpoint.files import WORDS
from shardwise.checkpoint.opaque import Objects, check_objects, tensors_in
from shardwise.checkpoint.opening import open
from shardwise.checkpoint.rules import RulesSource
from shardwise.checkpoint.selection import EVERYTHING, Select, Selection
from shardwise.checkpoint.streams import (
    CHUNK,
    Stream,
    check_jobs,
    check_losses,
    map_in_order,
    stream_of,
    streams_of,
)
from shardwise.checkpoint.values import has_known_types, same_value
from shardwise.exchange.overflow import Overflow, check_overflow
from shardwise.geometry import Box, Boxes, Ints, starts
from shardwise.job.casts import Cast
from shardwise.job.names import Rename, missing
from shardwise.job.progress import Progress, check_progress, reporter
from shardwise.quantized.moves import Rule
from shardwise.quoting import brief, in_line
from shardwise.state.traverse import OBJ_PATH, Key, Place
from shardwise.storage.paths import PathLike

SUGGESTIONS = 8  # missing names for which a similar one is searched
PATH_STEPS = {Key: "dict, int", Place: "tuple", int: "list", str: "dict, str"}  # the container that a key leads into


@dataclass(frozen=True)
class Difference:
    """A difference: the tensor or value, what differs, and a box around the first cells that do."""

    name: str
    what: str
    box: Box | None = None

    def __str__(self) -> str:
        return f"{in_line(self.name)}: {self.what}" + (f" in {self.box}" if self.box is not None else "")


@overload
def verify(
    a: PathLike | Checkpoint, *, rules: RulesSource | None = None, jobs: int = 1, progress: Progress = None
) -> list[Damage]: ...


@overload
def verify(
    a: PathLike | Checkpoint,
    b: PathLike | Checkpoint,
    *,
    rename: Rename = None,
    remap: Iterable[Rule] = (),
    select: Select = None,
    exclude: Select = None,
    merge: PathLike | None = None,
    cast: Cast = None,
    overflow: Overflow = "refuse",
    objects: Objects | None = None,
    rules: RulesSource | None = None,
    other_rules: RulesSource | None = None,
    jobs: int = 1,
    progress: Progress = None,
) -> list[Difference]: ...


def verify(
    a: PathLike | Checkpoint,
    b: PathLike | Checkpoint | None = None,
    *,
    rename: Rename = None,
    remap: Iterable[Rule] = (),
    select: Select = None,
    exclude: Select = None,
    merge: PathLike | None = None,
    cast: Cast = None,
    overflow: Overflow = "refuse",
    objects: Objects | None = None,
    rules: RulesSource | None = None,
    other_rules: RulesSource | None = None,
    jobs: int = 1,
    progress: Progress = None,
) -> list[Difference] | list[Damage]:
    """List the differences between two checkpoints: names, shapes, dtypes and values, bit-for-bit. Empty if equal.

    Of one checkpoint: the damage of all its files, by the checksums that `save` and `convert` write. Empty if every
    byte is as it was written. A checkpoint without checksums is refused.

    `a` and `b`: what `open` takes (with `rules`, and `other_rules` for b), or what it returned. `rename`, `remap`,
    `select`, `exclude`, `merge`, `cast` and `overflow` as in `convert`: compares b with what `convert` would make of
    a; with `select` or `exclude` b may have more. Other values are compared if both formats can hold them. safetensors
    holds none: there only values with tensors inside count as a difference. `objects="drop"`: objects of unknown
    classes are not compared.
    """
    check_objects(objects)
    check_progress(progress)
    check_jobs(jobs)
    if b is None:
        options = {"rename": rename, "remap": remap, "select": select, "exclude": exclude, "merge": merge, "cast": cast}
        _check_alone(**options, objects=objects, other_rules=other_rules)
        return verify_sums(a, rules=rules, jobs=jobs, progress=progress)
    chosen = Selection(select, exclude)
    one = a if isinstance(a, Checkpoint) else open(a, rules=rules)
    one = one if merge is None else with_adapter(one, merge)
    other = b if isinstance(b, Checkpoint) else open(b, rules=other_rules)
    streams = streams_of(one, rename=rename, remap=remap, selection=chosen, cast=cast)
    check_overflow(overflow)
    if overflow == "refuse":
        check_losses(streams, overflow, "Nothing was compared", jobs=jobs)
    differences = _absent(streams, other, other.path)
    if chosen.everything:
        differences += _absent(other, streams, one.path)
    pairs = {name: (stream, stream_of(other[name])) for name, stream in streams.items() if name in other}
    differences += compare_streams(pairs, jobs=jobs, progress=progress)
    differences += _structure(one, other, [*pairs, *filter(chosen.of(one), one.objects)])
    return differences + _values(one, other, chosen, objects)


def _check_alone(**options: object) -> None:
    """Refuse options that compare, where there is nothing to compare with."""
    given = [name for name, value in options.items() if value is not None and value != ()]
    if given:
        raise ValueError(f"{given[0]}= compares two checkpoints, but only one was given: give the other one, too")


def _structure(one: Checkpoint, other: Checkpoint, names: Iterable[str]) -> list[Difference]:
    """Leaves that both have in different containers: dict, list or tuple, or with other types of keys."""
    steps = {name: differing_step(one.paths.get(name), other.paths.get(name)) for name in names}
    return [Difference(name, what) for name, what in steps.items() if what is not None]


def _absent(names: Iterable[str], there: Iterable[str], path: str) -> list[Difference]:
    known = dict.fromkeys(there)
    absent = [name for name in names if name not in known]
    near = [Difference(name, missing(f"{path} has no", [name], known)) for name in absent[:SUGGESTIONS]]
    return near + [Difference(name, f"{path} has no {name!r}") for name in absent[SUGGESTIONS:]]


def _values(one: Checkpoint, other: Checkpoint, chosen: Selection, objects: Objects | None) -> list[Difference]:
    """Differences in values that are not tensors."""
    skipped = set(uncompared(one, other, chosen, objects))
    mine, theirs = ({key: v for key, v in side.items() if key not in skipped} for side in _sides(one, other, chosen))
    differences = _missing_values(mine, other) + _missing_values(theirs, one)
    for name in mine:
        if name in theirs and not same_value(mine[name], theirs[name]):
            differences.append(Difference(name, f"{brief(mine[name]):.60} and {brief(theirs[name]):.60}"))
    return differences


def uncompared(
    one: Checkpoint, other: Checkpoint, chosen: Selection = EVERYTHING, objects: Objects | None = None
) -> dict[str, str]:
    """The values that are not compared, and why."""
    safetensors = "safetensors" in (one.format, other.format)
    reasons = dict[str, str]()
    for name, value in (item for side in _sides(one, other, chosen) for item in side.items()):
        if objects == "drop" and not has_known_types(value):
            reasons[name] = "of unknown classes"
        elif safetensors and not tensors_in(value):
            reasons.setdefault(name, "that safetensors cannot hold")
    return reasons


def _sides(one: Checkpoint, other: Checkpoint, chosen: Selection) -> tuple[dict[str, object], dict[str, object]]:
    """The selected values of both."""
    mine = {name: one.objects[name] for name in filter(chosen.of(one), one.objects)}
    return mine, {name: value for name, value in other.objects.items() if chosen.everything or name in mine}


def _missing_values(values: Mapping[str, object], there: Checkpoint) -> list[Difference]:
    """Values that a checkpoint lacks; for objects, with their class and how to skip them."""
    names = [name for name in values if name not in there.objects]
    objects = [name for name in names if there.format == "safetensors" or not has_known_types(values[name])]
    drop = "objects='drop' does not compare such objects"
    return _absent([name for name in names if name not in objects], there.objects, there.path) + [
        Difference(name, f"{there.path} has no {name!r}, which is {brief(values[name])}; {drop}") for name in objects
    ]


def compare_streams(
    pairs: Mapping[str, tuple[Stream, Stream]], *, jobs: int = 1, chunk: int = CHUNK, progress: Progress = None
) -> list[Difference]:
    """The differences, in the order of the names."""
    total, done, differences = sum(a.size for a, _ in pairs.values()), 0, list[Difference]()
    with reporter(progress, total, "verify", here=True) as tell:
        for name, difference in map_in_order(pairs, lambda name: _difference(name, *pairs[name], chunk), jobs):
            differences += [difference] if difference is not None else []
            done += pairs[name][0].size
            if tell is not None:
                tell(done, total)
    return differences


def _difference(name: str, a: Stream, b: Stream, chunk: int) -> Difference | None:
    for what, one, other in ("shape", a.shape, b.shape), ("dtype", a.dtype, b.dtype):
        if one != other:
            return Difference(name, f"{what} {one} and {other}")
    a.check()
    b.check()
    for (part, buffer), (_, other_buffer) in zip(a.chunks(a.whole, chunk), b.chunks(b.whole, chunk), strict=True):
        a.fill(part, buffer)
        b.fill(part, other_buffer)
        wrong = _differing(buffer, other_buffer)
        if len(wrong):
            return Difference(name, f"{len(wrong)} or more cells differ", _around(part, wrong))
    return None


def _differing(a: torch.Tensor, b: torch.Tensor) -> Ints:
    """The numbers of elements whose bits differ."""
    bits = [
        np.frombuffer(t.view(WORDS[t.element_size()]).numpy(), dtype=f"u{min(t.element_size(), 8)}") for t in (a, b)
    ]
    wrong = bits[0] != bits[1]
    return np.flatnonzero(wrong.reshape(a.numel(), -1).any(axis=1) if a.element_size() > 8 else wrong)


def _around(boxes: Boxes, numbers: Ints) -> Box:
    """The smallest box around the cells with these numbers, in the first box that has any."""
    edges = starts(boxes.volumes())
    at = int(np.searchsorted(edges, numbers[0], "right")) - 1
    box = boxes.box(at)
    inside = numbers[numbers < edges[at + 1]] - edges[at]
    sides = np.unravel_index(inside, box.shape) if box.shape else ()
    lo = tuple(start + int(side.min()) for start, side in zip(box.lo, sides, strict=True))
    return Box(lo, tuple(start + int(side.max()) + 1 for start, side in zip(box.lo, sides, strict=True)))


# --- paths of two sides ------------------------------------------------------------------------------------


def differing_step(a: OBJ_PATH | None, b: OBJ_PATH | None) -> str | None:
    """What differs between two paths of one name: the type of a key or container. None: nothing, or a path is unknown.

    >>> differing_step(("state", Key(0)), ("state", 0)), differing_step(("a", "b"), ("a", "b"))
    ('is at state[0] (dict, int) and at state[0] (list)', None)
    """
    if a is None or b is None or (a == b and list(map(type, a)) == list(map(type, b))):
        return None
    return f"is at {_path_text(a)} and at {_path_text(b)}"


def _path_text(path: OBJ_PATH) -> str:
    into = "; ".join(PATH_STEPS.get(type(key), type(key).__name__) for key in path[1:])
    return f"{path[0]}{''.join(f'[{brief(key)}]' for key in path[1:])}" + (f" ({into})" if into else "")
