"""verify: two checkpoints have the same tensors and values, whatever their formats and shardings."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, TypeVar

import numpy as np

from shardwise.checkpoint.entry import Checkpoint
from shardwise.checkpoint.opaque import Objects, check_objects, tensors_in
from shardwise.checkpoint.opening import open
from shardwise.checkpoint.streaming import CHUNK, Stream, differing
from shardwise.checkpoint.streams import Select, chosen, stream_of, streams_of
from shardwise.checkpoint.structure import differing_step
from shardwise.checkpoint.values import is_listed, same_value
from shardwise.errors import RefusedCastError
from shardwise.exchange.overflow import Lost, Overflow, check_overflow, refusal
from shardwise.geometry import Box, Boxes, Ints, starts
from shardwise.job.casts import Cast
from shardwise.job.names import Rename, missing
from shardwise.job.progress import Progress, check_progress, shown
from shardwise.job.remap import Remap
from shardwise.quoting import brief, in_line

T = TypeVar("T")
R = TypeVar("R")
NEAREST = 8  # names that lack, for which one that is much like it is looked for among all


@dataclass(frozen=True)
class Difference:
    """What differs in a tensor, and where: a box that has the first cells that do."""

    name: str
    what: str
    box: Box | None = None

    def __str__(self) -> str:
        return f"{in_line(self.name)}: {self.what}" + (f" in {self.box}" if self.box is not None else "")


def verify(
    a: Any,
    b: Any,
    *,
    rename: Rename = None,
    remap: Iterable[Remap] = (),
    select: Select = None,
    cast: Cast = None,
    overflow: Overflow = "refuse",
    objects: Objects | None = None,
    rules: Any = None,
    other_rules: Any = None,
    jobs: int = 1,
    progress: Progress = None,
) -> list[Difference]:
    """What differs between two checkpoints: names, shapes, dtypes, and values bit by bit. Nothing where they are equal.

    `a` and `b`: what `open` takes (with `rules`, and `other_rules` for b), or what it returned. `rename`, `remap`,
    `select`, `cast` and `overflow` as in `convert`: whether b is what a becomes by them; with `select` b may have more.
    Values that are no tensors are compared where both formats hold them; safetensors hold none, and only values with
    tensors inside them are then a difference. `objects="drop"`: objects of unknown classes are not compared.
    """
    check_objects(objects)
    check_progress(progress)
    check_jobs(jobs)
    one = a if isinstance(a, Checkpoint) else open(a, rules=rules)
    other = b if isinstance(b, Checkpoint) else open(b, rules=other_rules)
    streams = streams_of(one, rename=rename, remap=remap, select=select, cast=cast)
    check_overflow(overflow)
    if overflow == "refuse":
        check_losses(streams, overflow, "Nothing was compared", jobs=jobs)
    found = _absent(streams, other, other.path)
    if select is None:
        found += _absent(other, streams, one.path)
    pairs = {name: (stream, stream_of(other[name])) for name, stream in streams.items() if name in other}
    found += compared(pairs, jobs=jobs, progress=progress)
    found += _structure(one, other, [*pairs, *filter(chosen(one, select), one.objects)])
    return found + _values(one, other, select, objects)


def _structure(one: Checkpoint, other: Checkpoint, names: Iterable[str]) -> list[Difference]:
    """What differs in the containers of leaves that both have: dict, list or tuple, and the types of keys."""
    steps = {name: differing_step(one.paths.get(name), other.paths.get(name)) for name in names}
    return [Difference(name, what) for name, what in steps.items() if what is not None]


def _absent(names: Iterable[str], there: Iterable[str], path: str) -> list[Difference]:
    known = dict.fromkeys(there)
    absent = [name for name in names if name not in known]
    near = [Difference(name, missing(f"{path} has no", [name], known)) for name in absent[:NEAREST]]
    return near + [Difference(name, f"{path} has no {name!r}") for name in absent[NEAREST:]]


def _values(one: Checkpoint, other: Checkpoint, select: Select, objects: Objects | None) -> list[Difference]:
    """What differs in values that are no tensors."""
    apart = set(uncompared(one, other, select, objects))
    mine, theirs = ({key: v for key, v in side.items() if key not in apart} for side in _sides(one, other, select))
    found = _lacking(mine, other) + _lacking(theirs, one)
    for name in mine:
        if name in theirs and not same_value(mine[name], theirs[name]):
            found.append(Difference(name, f"{brief(mine[name]):.60} and {brief(theirs[name]):.60}"))
    return found


def uncompared(
    one: Checkpoint, other: Checkpoint, select: Select = None, objects: Objects | None = None
) -> dict[str, str]:
    """The values that are not compared, and why."""
    safetensors = "safetensors" in (one.format, other.format)
    found = dict[str, str]()
    for name, value in (item for side in _sides(one, other, select) for item in side.items()):
        if objects == "drop" and not is_listed(value):
            found[name] = "of unknown classes"
        elif safetensors and not tensors_in(value):
            found.setdefault(name, "that safetensors cannot hold")
    return found


def _sides(one: Checkpoint, other: Checkpoint, select: Select) -> tuple[dict[str, Any], dict[str, Any]]:
    """The values of both that are asked for."""
    mine = {name: one.objects[name] for name in filter(chosen(one, select), one.objects)}
    return mine, {name: value for name, value in other.objects.items() if select is None or name in mine}


def _lacking(values: Mapping[str, Any], there: Checkpoint) -> list[Difference]:
    """Values that are not there; of objects, what they are and how they are left out."""
    names = [name for name in values if name not in there.objects]
    objects = [name for name in names if there.format == "safetensors" or not is_listed(values[name])]
    drop = "objects='drop' does not compare such objects"
    return _absent([name for name in names if name not in objects], there.objects, there.path) + [
        Difference(name, f"{there.path} has no {name!r}, which is {brief(values[name])}; {drop}") for name in objects
    ]


def check_jobs(jobs: int) -> None:
    """Refuse what are not so many threads."""
    if jobs < 1:
        raise ValueError(f"jobs= must be 1 or more, not {jobs!r}")


def compared(
    pairs: Mapping[str, tuple[Stream, Stream]], *, jobs: int = 1, chunk: int = CHUNK, progress: Progress = None
) -> list[Difference]:
    """What differs, in the order of the names."""
    total, done, found = sum(a.size for a, _ in pairs.values()), 0, list[Difference]()
    with shown(progress, total, "verify", here=True) as tell:
        for name, difference in ordered(pairs, lambda name: _difference(name, *pairs[name], chunk), jobs):
            found += [difference] if difference is not None else []
            done += pairs[name][0].size
            if tell is not None:
                tell(done, total)
    return found


def check_losses(
    streams: Mapping[str, Stream], overflow: Overflow, outcome: str, *, jobs: int = 1, chunk: int = CHUNK
) -> tuple[Lost, ...]:
    """What casts lose; refused, unless that is allowed. Only casts that can lose a value are looked at."""
    check_overflow(overflow)
    watched = [stream for stream in streams.values() if stream.may_overflow]
    lost = [one for _, losses in ordered(watched, lambda stream: stream.losses(chunk), jobs) for one in losses.listed()]
    if lost and overflow == "refuse":
        raise RefusedCastError(refusal(lost, outcome))
    return tuple(lost)


def ordered(items: Iterable[T], work: Callable[[T], R], jobs: int) -> Iterator[tuple[T, R]]:
    """The results of work on every item, by several threads, in the order of the items."""
    if jobs <= 1:
        yield from ((item, work(item)) for item in items)
        return
    listed = list(items)
    with ThreadPoolExecutor(jobs) as pool:
        yield from zip(listed, pool.map(work, listed), strict=True)


def _difference(name: str, a: Stream, b: Stream, chunk: int) -> Difference | None:
    for what, one, other in ("shape", a.shape, b.shape), ("dtype", a.dtype, b.dtype):
        if one != other:
            return Difference(name, f"{what} {one} and {other}")
    a.check()
    b.check()
    whole = Box((0,) * len(a.shape), a.shape)
    for (part, room), (_, other_room) in zip(a.chunks(whole, chunk), b.chunks(whole, chunk), strict=True):
        a.fill(part, room)
        b.fill(part, other_room)
        wrong = differing(room, other_room)
        if len(wrong):
            return Difference(name, f"{len(wrong)} or more cells differ", _around(part, wrong))
    return None


def _around(boxes: Boxes, numbers: Ints) -> Box:
    """The smallest box that has the cells of these numbers, of the first of the boxes that has any."""
    edges = starts(boxes.volumes())
    at = int(np.searchsorted(edges, numbers[0], "right")) - 1
    box = boxes.box(at)
    inside = numbers[numbers < edges[at + 1]] - edges[at]
    sides = np.unravel_index(inside, box.shape) if box.shape else ()
    lo = tuple(start + int(side.min()) for start, side in zip(box.lo, sides, strict=True))
    return Box(lo, tuple(start + int(side.max()) + 1 for start, side in zip(box.lo, sides, strict=True)))
