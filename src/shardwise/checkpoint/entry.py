"""What a checkpoint has: a mapping from names to tensors in files. Nothing is read before it is asked for."""

from __future__ import annotations

import re
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cached_property, lru_cache
from itertools import product
from math import prod
from operator import mul
from typing import Any, NamedTuple

import numpy as np
import torch

from shardwise.checkpoint.files import Files, Span, elements
from shardwise.checkpoint.local_files import LocalFiles
from shardwise.checkpoint.remote_files import worth_it
from shardwise.errors import CheckpointError, LayoutError
from shardwise.exchange.cuts import Cut, Places
from shardwise.exchange.reduce import Look
from shardwise.geometry import Box, Boxes, Ints, gaps, join, tiles
from shardwise.layout import Layout
from shardwise.tensor.overflow import Lost

LATELY = 0.01  # seconds: what was seen to be whole then is taken to be
UNCOPIED = re.compile(r"torch\.(u?int[1-7]|qu?int\d+(x\d+)?)")  # dtypes of torch that it has no copies of
TOGETHER = 256  # cuts that are copied at a time: each may need a file of its own, and a process has few


class Located(NamedTuple):
    """Where boxes are in their files: the byte of the first element of each, and strides (in elements).

    Without strides they lie row-major.
    """

    start: Ints
    strides: Ints | None = None


class Alike:
    """Boxes as a value: equal for tensors that are stored alike. What is found for one of them holds for all."""

    def __init__(self, boxes: Boxes) -> None:
        self.boxes = boxes

    @cached_property
    def _value(self) -> tuple[tuple[int, ...], bytes, bytes]:
        return self.boxes.lo.shape, self.boxes.lo.tobytes(), self.boxes.hi.tobytes()

    @cached_property
    def _hash(self) -> int:
        return hash(self._value)

    def __hash__(self) -> int:
        return self._hash

    def __eq__(self, other: object) -> bool:
        return self is other or (isinstance(other, Alike) and self._value == other._value)


@dataclass(eq=False)
class Entry:
    """A tensor in files: box i of it lies in file number `file[i]` of `paths`.

    `locate` finds for some rows where they are in those files. Formats that have to look into a file for that do so
    when it is asked. Cuts of files have their offset in bytes, but their strides in elements, as tensors have. `shared`
    is equal for entries that are the same bytes of the same files: tied weights.
    """

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    alike: Alike
    file: Ints
    locate: Callable[[Ints], Located] = field(repr=False)
    paths: Sequence[str] = field(repr=False)
    files: Files = field(repr=False)
    shared: Hashable = None

    def __post_init__(self) -> None:
        if 0 in self.shape and prod(max(size, 1) for size in self.shape) >= 2**58:
            raise CheckpointError(f"{self.files.root}: {self.name!r} has shape {self.shape}, which no tensor has")

    @cached_property
    def layout(self) -> Layout:
        """Where its cells live; the owners are numbers of files, those of `paths`."""
        if not self.boxes.count:
            return Layout.replicated(self.shape, [0])
        pieces = zip(self.file.tolist(), self.boxes.lo.tolist(), self.boxes.hi.tolist(), strict=True)
        with self._provable():
            once = _tiled(self.alike, self.shape)
            return Layout.boxes(self.shape, list(pieces), overlap=None if once else "replicas").shortest()

    @contextmanager
    def _provable(self) -> Iterator[None]:
        """Boxes that no layout has are those of a damaged file."""
        try:
            yield
        except LayoutError as error:
            raise CheckpointError(f"{self.files.root}: the shards of {self.name!r}: {error}") from error

    @property
    def boxes(self) -> Boxes:
        """What its files have."""
        return self.alike.boxes

    @property
    def bytes(self) -> int:
        """Of all cells, once."""
        return prod(self.shape) * self.dtype.itemsize

    @property
    def shards(self) -> int:
        """How many boxes it is stored in."""
        return self.boxes.count

    def used(self) -> list[str]:
        """The files that it lies in."""
        return [self.paths[number] for number in np.unique(self.file).tolist()]

    def ranges(self) -> list[tuple[Box, Span]]:
        """Every box, with the bytes between its first and its last element."""
        places = self.places(np.arange(self.boxes.count))
        return [(places.boxes.box(at), self._span(cut)) for at, cut in enumerate(self.cuts(places))]

    def places(self, rows: Ints, at: Located | None = None) -> Places:
        """Where some of its boxes are: the tensors are numbers of files, offsets and strides are counted in bytes."""
        at, boxes = at or self.locate(rows), self.boxes.take(rows)
        strides = Places.packed(boxes).strides if at.strides is None else at.strides
        return Places(boxes, self.file[rows], at.start, strides * self.dtype.itemsize)

    def cuts(self, places: Places) -> list[Cut]:
        """Places that are counted in bytes, as cuts of files."""
        return Places(places.boxes, places.tensor, places.offset, places.strides // self.dtype.itemsize).cuts()

    def within(self, boxes: Boxes) -> Places:
        """What the files have of these boxes, no cell twice."""
        _, rows = join(boxes, self.boxes)
        return self.places(np.unique(rows)).once(boxes)[1]

    def check(self, boxes: Boxes) -> None:
        """Refuse cells that no file has, and dtypes that cannot be copied. Exact, also where boxes overlap."""
        self._check_dtype()
        with self._provable():
            if _tiled(self.alike, self.shape):
                return
        for row in range(boxes.count):
            _, held = join(boxes.take(np.array([row])), self.boxes)
            with self._provable():
                missing = gaps(self.boxes.take(held), boxes.box(row), np.zeros(len(held), dtype=np.bool_))
            if missing:
                raise CheckpointError(
                    f"{self.files.root}: no file has {', '.join(map(str, missing[:4]))} of {self.name!r} "
                    f"(shape {self.shape}): shards are missing"
                )

    def views(self, cuts: Sequence[Cut]) -> list[torch.Tensor]:
        """The elements of cuts of files, as tensors: of the mapped file, or of what was fetched."""
        self._check_dtype()
        if isinstance(self.files, LocalFiles):
            return [self.files.elements(self._span(cut), self.dtype, cut.shape, cut.strides) for cut in cuts]
        blocks = [(cut, _outer(cut, self.dtype.itemsize)) for cut in cuts]
        parts = [self._parts(cut, outer) for cut, outer in blocks]
        found = iter(self.files.fetch([self._span(part) for several in parts for part in several]))
        tensors = [
            [elements(next(found), 0, self.dtype, part.shape, part.strides) for part in several] for several in parts
        ]
        return [
            several[0] if not outer else torch.stack(several).reshape(cut.shape)
            for (cut, outer), several in zip(blocks, tensors, strict=True)
        ]

    def _check_dtype(self) -> None:
        if _uncopied(self.dtype):
            raise CheckpointError(
                f"{self.files.root}: {self.name!r} is {self.dtype}, which torch cannot copy: floats, complex, bool and "
                f"integers of whole bytes are read. Remedy: leave it out, or save its int_repr() and its scales"
            )

    def copy_to(self, tensors: list[torch.Tensor], cuts: Sequence[Cut], look: Look | None = None) -> None:
        """Copy the elements of cuts of files into tensors; `look` sees them as they are in the files."""
        for at in range(0, len(cuts), TOGETHER):
            some = cuts[at : at + TOGETHER]
            names = {self.paths[cut.tensor] for cut in some}
            # what is mapped and cut off is not read: that would end the process
            self.files.check_unchanged(names, within=LATELY)
            views = self.views(some)
            if look is not None:
                look(views)
            torch._foreach_copy_(tensors[at : at + TOGETHER], views)
            del views  # they keep files mapped, of which a process has few
            self.files.check_unchanged(names)

    def _parts(self, cut: Cut, outer: int) -> list[Cut]:
        """A cut as one for every step along its first dims."""
        if not outer:
            return [cut]
        steps = [stride * self.dtype.itemsize for stride in cut.strides[:outer]]
        return [
            Cut(cut.tensor, cut.shape[outer:], cut.strides[outer:], cut.offset + sum(map(mul, at, steps)))
            for at in product(*map(range, cut.shape[:outer]))
        ]

    def copy(self, cut: Cut, file: Any) -> None:
        """Append the bytes between the first and the last element of a cut to a file."""
        self._check_dtype()
        self.files.copy(self._span(cut), file)

    def _span(self, cut: Cut) -> Span:
        return Span(self.paths[cut.tensor], cut.offset, cut.offset + cut.reach * self.dtype.itemsize)

    def read(self, box: Box | None = None) -> torch.Tensor:
        """The values of all cells, or of a box, in memory of their own."""
        whole = Box((0,) * len(self.shape), self.shape)
        wanted = whole if box is None else box
        if wanted.volume and wanted & whole != wanted:
            raise ValueError(f"{wanted} is not inside of {self.name!r}, which has shape {self.shape}")
        boxes = Boxes.of([wanted] if wanted.volume else [], len(self.shape))
        self.check(boxes)
        self.within(boxes)  # the files have it: what a damaged one says is not room that is asked for
        found = torch.empty(wanted.shape, dtype=self.dtype, device="cpu")
        if boxes.count:
            fill(self, Places.packed(boxes), [found.view(-1)])
        return found


@lru_cache
def _uncopied(dtype: torch.dtype) -> bool:
    return UNCOPIED.fullmatch(str(dtype)) is not None


def whole_entry(
    name: str, shape: tuple[int, ...], dtype: torch.dtype, file: int, start: int, paths: Sequence[str], files: Files
) -> Entry:
    """A tensor that lies in one file, row-major from a byte on."""
    alike = whole_box(shape)
    count = alike.boxes.count
    where, begins = np.full(count, file, dtype=np.int64), np.full(count, start, dtype=np.int64)
    return Entry(name, shape, dtype, alike, where, lambda rows: Located(begins[rows]), paths, files)


@lru_cache(maxsize=4096)
def _tiled(alike: Alike, shape: tuple[int, ...]) -> bool:
    """True where boxes have every cell exactly once. Kept: most tensors are stored as others are."""
    return tiles(alike.boxes, shape)


@lru_cache(maxsize=4096)
def whole_box(shape: tuple[int, ...]) -> Alike:
    """All cells as a box, if there are any. Kept: a model has many tensors of few shapes."""
    return Alike(Boxes.of([Box((0,) * len(shape), shape)] if prod(shape) else [], len(shape)))


def fill(entry: Entry, target: Places, tensors: Sequence[torch.Tensor]) -> None:
    """Copy into tensors what belongs at these places of them."""
    here, there = placed(entry.within(target.boxes), target)
    entry.copy_to([cut.of(tensors) for cut in there], entry.cuts(here))


def placed(source: Places, target: Places) -> tuple[Places, list[Cut]]:
    """The same cells on both sides."""
    row, there = target.within(source.boxes)
    return source.inside(row, there.boxes), there.cuts()


def _outer(cut: Cut, itemsize: int) -> int:
    """How many dims to take apart, so that what is fetched is not mostly what nobody asked for."""
    outer = 0
    for dim, (size, stride) in enumerate(zip(cut.shape, cut.strides, strict=True)):
        inner = 1 + sum((n - 1) * step for n, step in zip(cut.shape[dim + 1 :], cut.strides[dim + 1 :], strict=True))
        if size > 1 and not worth_it((stride - inner) * itemsize, inner * itemsize):
            outer = dim + 1
    return outer


class Checkpoint(Mapping[str, Entry]):
    """The tensors of a checkpoint by name, and its other values. Nothing is read before it is asked for."""

    def __init__(
        self,
        files: Files,
        format: str,
        entries: Mapping[str, Entry],
        *,
        paths: Mapping[str, tuple[Any, ...]] | None = None,
        objects: Callable[[], Mapping[str, Any]] = dict,
        metadata: Mapping[str, str] | None = None,
    ) -> None:
        self.files, self.format, self._entries = files, format, entries
        self.path = files.root  # where it is; the file, where it is one
        self.paths = paths or {}  # of names in nested state dicts, where they are known
        self.metadata = metadata or {}
        self.reused: tuple[str, ...] = ()  # by `convert`: the files of an earlier try that were whole
        self.lost: tuple[Lost, ...] = ()  # by `convert`: values beyond the range of their new dtype, cast as allowed
        self._objects = objects

    @cached_property
    def objects(self) -> Mapping[str, Any]:
        """What is no tensor, by name: counters, settings."""
        return self._objects()

    @property
    def bytes(self) -> int:
        """Of all tensors."""
        return sum(entry.bytes for entry in self._entries.values())

    def __getitem__(self, name: str) -> Entry:
        return self._entries[name]

    def __contains__(self, name: object) -> bool:
        return name in self._entries

    def __iter__(self) -> Iterator[str]:
        return iter(self._entries)

    def __len__(self) -> int:
        return len(self._entries)

    def __repr__(self) -> str:
        return f"Checkpoint({self.path!r}, {self.format}, {len(self)} tensor{'s' * (len(self) != 1)})"
