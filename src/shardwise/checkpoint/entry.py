"""The contents of a checkpoint: a mapping from names to tensors in files, which are read on demand."""

from __future__ import annotations

import re
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cached_property, lru_cache
from itertools import product
from math import prod
from operator import mul
from typing import IO, Any, NamedTuple

import numpy as np
import torch

from shardwise.checkpoint.files import ByteRange, Files, elements, worth_it
from shardwise.checkpoint.local_files import RECHECK_SECONDS, LocalFiles
from shardwise.errors import CheckpointError, LayoutError
from shardwise.exchange import view_of
from shardwise.exchange.buffers import copy_all
from shardwise.exchange.overflow import Lost
from shardwise.exchange.reduce import Look
from shardwise.geometry import Box, Boxes, Ints, Places, Window, gaps, join, tiles
from shardwise.layout import Layout

OutputFile = IO[bytes]
UNCOPIED = re.compile(r"torch\.(u?int[1-7]|qu?int\d+(x\d+)?)")  # dtypes of torch that it has no copies of
TOGETHER = 256  # cuts that are copied at a time: each may need a file of its own, and a process has few
BATCH = 2**24  # bytes that are copied at a time where tensors are small


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

    def ranges(self) -> list[tuple[Box, ByteRange]]:
        """Every box, with the bytes between its first and its last element."""
        places = self.places(np.arange(self.boxes.count))
        return [(places.boxes.box(at), self._span(cut)) for at, cut in enumerate(self.cuts(places))]

    def places(self, rows: Ints, at: Located | None = None) -> Places:
        """Where some of its boxes are: the tensors are numbers of files, offsets and strides are counted in bytes."""
        at, boxes = at or self.locate(rows), self.boxes.take(rows)
        strides = Places.packed(boxes).strides if at.strides is None else at.strides
        return Places(boxes, self.file[rows], at.start, strides * self.dtype.itemsize)

    def cuts(self, places: Places) -> list[Window]:
        """Places that are counted in bytes, as cuts of files."""
        return Places(places.boxes, places.tensor, places.offset, places.strides // self.dtype.itemsize).windows()

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

    def views(self, cuts: Sequence[Window]) -> list[torch.Tensor]:
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

    def _parts(self, cut: Window, outer: int) -> list[Window]:
        """A cut as one for every step along its first dims."""
        if not outer:
            return [cut]
        steps = [stride * self.dtype.itemsize for stride in cut.strides[:outer]]
        return [
            Window(cut.tensor, cut.shape[outer:], cut.strides[outer:], cut.offset + sum(map(mul, at, steps)))
            for at in product(*map(range, cut.shape[:outer]))
        ]

    def copy(self, cut: Window, file: OutputFile) -> None:
        """Append the bytes between the first and the last element of a cut to a file."""
        self._check_dtype()
        self.files.copy(self._span(cut), file)

    def _span(self, cut: Window) -> ByteRange:
        return ByteRange(self.paths[cut.tensor], cut.offset, cut.offset + cut.reach * self.dtype.itemsize)

    def read(self, box: Box | None = None) -> torch.Tensor:
        """The values of all cells, or of a box, in memory of their own."""
        whole = Box((0,) * len(self.shape), self.shape)
        wanted = whole if box is None else box
        if wanted.volume and wanted & whole != wanted:
            raise ValueError(f"{wanted} is not inside {self.name!r}, which has shape {self.shape}")
        boxes = Boxes.of([wanted] if wanted.volume else [], len(self.shape))
        self.check(boxes)
        self.within(boxes)  # the files have it: a damaged file must not decide how much memory is allocated
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


class Reading(NamedTuple):
    """Elements in files of an entry, and where they belong. `look` sees them as they are in the files."""

    entry: Entry
    cuts: Sequence[Window]
    tensors: Sequence[torch.Tensor]
    look: Look | None = None

    @property
    def bytes(self) -> int:
        """What it writes."""
        return sum(tensor.nbytes for tensor in self.tensors)

    def parts(self) -> Iterator[Reading]:
        """In so many cuts at a time as may be mapped."""
        if len(self.cuts) <= TOGETHER:
            yield self
            return
        for at in range(0, len(self.cuts), TOGETHER):
            some = slice(at, at + TOGETHER)
            yield self._replace(cuts=self.cuts[some], tensors=self.tensors[some])


def read_into(readings: Iterable[Reading], done: Callable[[int], None] | None = None) -> None:
    """Copy all of them, small ones together. `done` hears of the bytes that are there, and whose files were whole."""
    for batch, size in _batches(readings):
        _read_batch(batch)
        if done is not None:
            done(size)


def _batches(readings: Iterable[Reading]) -> Iterator[tuple[list[Reading], int]]:
    """Of the same files, with their bytes."""
    batch, cuts, size = list[Reading](), 0, 0
    for part in (part for reading in readings for part in reading.parts()):
        count, more = len(part.cuts), part.bytes
        full = cuts + count > TOGETHER or size + more > BATCH
        if batch and (full or part.entry.files is not batch[0].entry.files):
            yield batch, size
            batch, cuts, size = [], 0, 0
        batch.append(part)
        cuts, size = cuts + count, size + more
    if batch:
        yield batch, size


def _read_batch(batch: Sequence[Reading]) -> None:
    """What is mapped and cut off is not read, since that would end the process; what changed meanwhile is refused."""
    files = batch[0].entry.files
    names = {entry.paths[cut.tensor] for entry, cuts, *_ in batch for cut in cuts}
    files.check_unchanged(names, within=RECHECK_SECONDS)
    there, here = list[torch.Tensor](), list[torch.Tensor]()
    for entry, cuts, tensors, look in batch:
        views = entry.views(cuts)
        if look is not None:
            look(views)
        here += views
        there += tensors
    copy_all(there, here)
    files.check_unchanged(names)


def fill(entry: Entry, target: Places, tensors: Sequence[torch.Tensor]) -> None:
    """Copy into tensors what belongs at these places of them."""
    here, there = entry.within(target.boxes).common(target)
    read_into([Reading(entry, entry.cuts(here), [view_of(window, tensors) for window in there.windows()])])


def _outer(cut: Window, itemsize: int) -> int:
    """How many dims to take apart, so that most of what is fetched is needed."""
    outer = 0
    for dim, (size, stride) in enumerate(zip(cut.shape, cut.strides, strict=True)):
        inner = 1 + sum((n - 1) * step for n, step in zip(cut.shape[dim + 1 :], cut.strides[dim + 1 :], strict=True))
        if size > 1 and not worth_it((stride - inner) * itemsize, inner * itemsize):
            outer = dim + 1
    return outer


class Checkpoint(Mapping[str, Entry]):
    """The tensors of a checkpoint by name, and its other values. Everything is read on demand."""

    def __init__(
        self,
        files: Files,
        format: str,
        entries: Mapping[str, Entry],
        *,
        paths: Mapping[str, tuple[str | int, ...]] | None = None,
        objects: Callable[[], Mapping[str, object]] = dict,
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
        """Values other than tensors, by name: counters, settings."""
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
