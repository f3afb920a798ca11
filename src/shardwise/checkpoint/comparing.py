"""verify: two checkpoints have the same tensors, whatever their formats and shardings."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, TypeVar

import numpy as np

from shardwise.checkpoint.entry import Checkpoint, Entry
from shardwise.checkpoint.opening import open
from shardwise.checkpoint.streaming import CHUNK, Stream, differing
from shardwise.geometry import Box, Boxes, Ints, starts
from shardwise.state.links import Link
from shardwise.state.names import missing
from shardwise.state.progress import Progress, check_progress, shown
from shardwise.state.view import View

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
        return f"{self.name}: {self.what}" + (f" in {self.box}" if self.box is not None else "")


def verify(a: Any, b: Any, *, jobs: int = 1, progress: Progress = None, rules: Any = None) -> list[Difference]:
    """What differs between two checkpoints: names, shapes, dtypes, and values bit by bit. Nothing where they are equal.

    `a` and `b`: what `open` takes, or what it returned.
    """
    check_progress(progress)
    check_jobs(jobs)
    one, other = (found if isinstance(found, Checkpoint) else open(found, rules=rules) for found in (a, b))
    found = list[Difference]()
    for mine, theirs in (one, other), (other, one):
        absent = [name for name in mine if name not in theirs]
        found += [Difference(name, missing(f"{theirs.path} has no", [name], theirs)) for name in absent[:NEAREST]]
        found += [Difference(name, f"{theirs.path} has no {name!r}") for name in absent[NEAREST:]]
    common = {name: (stream_of(one[name]), stream_of(other[name])) for name in one if name in other}
    return found + compared(common, jobs=jobs, progress=progress)


def check_jobs(jobs: int) -> None:
    """Refuse what are not so many threads."""
    if jobs < 1:
        raise ValueError(f"jobs= must be 1 or more, not {jobs!r}")


def stream_of(entry: Entry) -> Stream:
    """An entry as it is."""
    whole = View.whole(entry.shape)
    return Stream(entry.name, entry.shape, entry.dtype, ((Link(entry.name, entry.name, whole, whole), entry),))


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
