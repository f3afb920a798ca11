"""The contents of a checkpoint: a mapping from names to tensors in files, which are read on demand."""

from __future__ import annotations

import re
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cached_property, lru_cache
from itertools import islice
from math import prod
from operator import attrgetter
from typing import Any, NamedTuple, TypeVar

import numpy as np
import torch

from shardwise.checkpoint.checking import current_check
from shardwise.checkpoint.files import ByteRange, Files
from shardwise.checkpoint.local_files import RECHECK_SECONDS
from shardwise.checkpoint.window_reads import WindowReader
from shardwise.errors import CheckpointError, LayoutError
from shardwise.exchange import view_of
from shardwise.exchange.buffers import copy_all
from shardwise.exchange.overflow import Lost
from shardwise.exchange.reduce import Look
from shardwise.geometry import Box, Boxes, Ints, Places, Strides, Window, exact_sum, gaps, ints, join, tiles
from shardwise.job.remap import Link
from shardwise.job.subtensor import Subtensor
from shardwise.layout import Layout, places_of
from shardwise.storage.appending import OutputFile

V = TypeVar("V")
UNCOPIED = re.compile(r"torch\.(u?int[1-7]|qu?int\d+(x\d+)?)")  # dtypes of torch that it has no copies of
TOGETHER = 256  # windows that are copied at a time: each may need a file of its own, and a process has few
BATCH = 2**24  # bytes that are copied at a time where tensors are small


class Positions(NamedTuple):
    """Where boxes are in their files: the byte of the first element of each, and strides (in elements).

    Without strides they lie row-major.
    """

    start: Ints
    strides: Ints | None = None


class HashableBoxes:
    """Boxes as a value, by which results are cached: many tensors are stored in the same boxes."""

    def __init__(self, boxes: Boxes) -> None:
        self.boxes = boxes

    @staticmethod
    def of(*boxes: Box) -> HashableBoxes:
        """Some boxes of one tensor; those without cells are left out."""
        return HashableBoxes(Boxes.of([box for box in boxes if box.volume], len(boxes[0].lo)))

    @cached_property
    def _value(self) -> tuple[tuple[int, ...], bytes, bytes]:
        return self.boxes.lo.shape, self.boxes.lo.tobytes(), self.boxes.hi.tobytes()

    @cached_property
    def _hash(self) -> int:
        return hash(self._value)

    def __hash__(self) -> int:
        return self._hash

    def __eq__(self, other: object) -> bool:
        return self is other or (isinstance(other, HashableBoxes) and self._value == other._value)


@dataclass(eq=False)
class Entry:
    """A tensor in files: box i of it lies in file number `file[i]` of `paths`.

    `locate` finds for some rows where they are in those files. Formats that have to look into a file for that do so
    when it is called. Windows of files have their offset in bytes, but their strides in elements, as tensors have.
    `shared` is equal for entries that are the same bytes of the same files: tied weights.
    """

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    stored: HashableBoxes
    file: Ints
    locate: Callable[[Ints], Positions] = field(repr=False)
    paths: Sequence[str] = field(repr=False)
    files: Files = field(repr=False)
    shared: Hashable = None
    made_by: str = ""  # how it is computed from other entries, where it is

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
            once = _tiled(self.stored, self.shape)
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
        return self.stored.boxes

    @property
    def becomes(self) -> torch.dtype:
        """The dtype that a conversion writes, if no other is asked for."""
        return self.dtype

    @property
    def bytes(self) -> int:
        """Of all cells, once."""
        return prod(self.shape) * self.dtype.itemsize

    @property
    def near(self) -> bool:
        """True where its bytes are read straight into memory."""
        return self.files.near

    @property
    def shards(self) -> int:
        """How many boxes it is stored in."""
        return self.boxes.count

    def used(self) -> list[str]:
        """The files that it lies in."""
        return [self.paths[number] for number in np.unique(self.file).tolist()]

    def ranges(self) -> list[tuple[Box, ByteRange]]:
        """Every box, with the bytes between its first and its last element."""
        windows = self.windows(self.places(np.arange(self.shards)))
        return [(self.boxes.box(at), self._span(window)) for at, window in enumerate(windows)]

    def places(self, rows: Ints, at: Positions | None = None) -> Places:
        """Where some of its boxes are: the tensors are numbers of files, offsets and strides are counted in bytes."""
        at, boxes = at or self.locate(rows), self.boxes.take(rows)
        strides = Places.packed(boxes).strides if at.strides is None else at.strides
        return Places(boxes, self.file[rows], at.start, strides * self.dtype.itemsize)

    def windows(self, places: Places) -> list[Window]:
        """Places that are counted in bytes, as windows of files: their strides are counted in elements."""
        return Places(places.boxes, places.tensor, places.offset, places.strides // self.dtype.itemsize).windows()

    def check(self, boxes: Boxes | None) -> None:
        """Refuse dtypes that cannot be copied, and cells of boxes that no file has. Exact, also where boxes overlap."""
        self.check_dtype()
        if boxes is None:
            return
        with self._provable():
            if _tiled(self.stored, self.shape):
                return
        for row in range(boxes.count):
            _, rows = join(boxes.take(np.array([row])), self.boxes)
            with self._provable():
                missing = gaps(self.boxes.take(rows), boxes.box(row), np.zeros(len(rows), dtype=np.bool_))
            if missing:
                raise CheckpointError(
                    f"{self.files.root}: no file has {', '.join(map(str, missing[:4]))} of {self.name!r} "
                    f"(shape {self.shape}): shards are missing"
                )

    def views(self, windows: Sequence[Window]) -> list[torch.Tensor]:
        """The elements of windows of files, as tensors: of the mapped file, or of what was fetched."""
        self.check_dtype()
        return self.files.elements([(self.paths[window.tensor], window) for window in windows], self.dtype)

    def check_dtype(self) -> None:
        """Refuse a dtype that torch cannot copy."""
        if _uncopied(self.dtype):
            raise CheckpointError(
                f"{self.files.root}: {self.name!r} is {self.dtype}, which torch cannot copy: floats, complex, bool and "
                f"integers of whole bytes are read. Remedy: leave it out, or save its int_repr() and its scales"
            )

    def show(self, windows: Sequence[Window], views: Sequence[torch.Tensor]) -> None:
        """Tell the check of the load what was read, if there is one."""
        check = current_check()
        if check is not None:
            check.see(self.files, [(self.paths[window.tensor], window) for window in windows], views)

    def copy(self, window: Window, file: OutputFile) -> None:
        """Append the bytes between the first and the last element of a window to a file."""
        self.check_dtype()
        self.files.copy(self._span(window), file)

    def _span(self, window: Window) -> ByteRange:
        return ByteRange.of(self.paths[window.tensor], window, self.dtype.itemsize)

    def read(self, box: Box | None = None) -> torch.Tensor:
        """The values of all cells, or of a box, in memory of their own."""
        whole = Box.whole(self.shape)
        wanted = whole if box is None else box
        if wanted.volume and wanted & whole != wanted:
            raise ValueError(f"{wanted} is not inside {self.name!r}, which has shape {self.shape}")
        # the files have it: a damaged file must not decide how much memory is allocated
        copies = FileCopies.of(self, Packed(HashableBoxes.of(wanted)))
        values = torch.empty(wanted.shape, dtype=self.dtype, device="cpu")
        read_into([copies.into([values.view(-1)])])
        return values


@lru_cache
def _uncopied(dtype: torch.dtype) -> bool:
    return UNCOPIED.fullmatch(str(dtype)) is not None


def whole_entry(
    name: str, shape: tuple[int, ...], dtype: torch.dtype, file: int, start: int, paths: Sequence[str], files: Files
) -> Entry:
    """A tensor that lies in one file, row-major from a byte on."""
    stored = whole_box(shape)
    where, begins = (np.full(stored.boxes.count, number, dtype=np.int64) for number in (file, start))
    return Entry(name, shape, dtype, stored, where, lambda rows: Positions(begins[rows]), paths, files)


@lru_cache(maxsize=4096)
def _tiled(stored: HashableBoxes, shape: tuple[int, ...]) -> bool:
    """True where boxes have every cell exactly once."""
    return tiles(stored.boxes, shape)


@lru_cache(maxsize=4096)
def whole_box(shape: tuple[int, ...]) -> HashableBoxes:
    """All cells as a box, if there are any."""
    return HashableBoxes.of(Box.whole(shape))


# --- copies from files to memory --------------------------------------------------------------------------------------


class Local(NamedTuple):
    """Memory: an owner's tensors of a layout."""

    layout: Layout
    owner: int
    strides: tuple[Strides, ...]

    def places(self) -> Places:
        """Where its cells are in them."""
        return places_of(self.layout, self.owner, self.strides)


class Packed(NamedTuple):
    """Memory: the cells of boxes one after the other, in one flat tensor."""

    boxes: HashableBoxes

    def places(self) -> Places:
        """Where its cells are in it."""
        return Places.packed(self.boxes.boxes)


class FileCopies(NamedTuple):
    """Copies from windows of an entry's files to windows of memory, one for one."""

    entry: Entry
    sources: Sequence[Window]
    targets: Sequence[Window]

    @staticmethod
    def of(entry: Entry, memory: Local | Packed, link: Link | None = None) -> FileCopies:
        """All cells of memory that a link fills from the entry; without a link, all that the entry has."""
        matched = match(entry, memory, link)
        return FileCopies(entry, matched.sources(entry), matched.targets)

    @property
    def contiguous(self) -> bool:
        """True where every copy is one run of bytes."""
        return all(map(attrgetter("contiguous"), (*self.sources, *self.targets)))

    def into(self, tensors: Sequence[torch.Tensor], look: Look | None = None) -> Reading:
        """Into this memory."""
        return Reading(self.entry, self.sources, self.targets, tensors, look)


class Match(NamedTuple):
    """Copy i takes the cells `boxes[i]` of a part (`view`), from box `row[i]` of the `rows`, to `targets[i]`.

    `dense` are the same cells where boxes lie row-major, from the first element of their row on. `wanted`: boxes around
    all cells that are needed, where the stored boxes have not got all of them.
    """

    rows: Ints
    row: Ints
    boxes: Boxes
    dense: list[Window]
    targets: list[Window]
    wanted: Boxes | None
    view: Subtensor

    def sources(self, entry: Entry) -> list[Window]:
        """Where the cells are in the files of one of the tensors."""
        entry.check(self.wanted)
        at, size = entry.locate(self.rows), entry.dtype.itemsize
        if at.strides is None:
            files, starts, rows = entry.file[self.rows].tolist(), at.start.tolist(), self.row.tolist()
            return [
                Window(files[row], dense.shape, dense.strides, starts[row] + dense.offset * size)
                for row, dense in zip(rows, self.dense, strict=True)
            ]
        return entry.windows(self.view.inside(entry.places(self.rows, at), self.row, self.boxes))


def match(entry: Entry, memory: Local | Packed, link: Link | None = None) -> Match:
    """Which stored boxes fill which memory; it looks into no file."""
    here, there = (Subtensor.whole(entry.shape),) * 2 if link is None else (link.source_view, link.target_view)
    return _match(entry.stored, memory, here, there)


@lru_cache(maxsize=1024)
def _match(stored: HashableBoxes, memory: Local | Packed, source_view: Subtensor, target_view: Subtensor) -> Match:
    """Cached for all tensors that are stored in the same boxes and have the same layout."""
    there = target_view.of_places(memory.places())
    # the number of its box stands for its file: that differs from tensor to tensor
    packed, count = Places.packed(stored.boxes), stored.boxes.count
    boxes = Places(packed.boxes, np.arange(count), np.zeros(count, np.int64), packed.strides)
    number, here = source_view.of_places(boxes).once(there.boxes)
    rows, row = np.unique(here.tensor, return_inverse=True)
    targets = there.inside(number, here.boxes)
    whole = exact_sum(here.boxes.volumes()) == exact_sum(there.boxes.volumes())
    wanted = None if whole else source_view.back(there.boxes)
    return Match(ints(rows), ints(row), here.boxes, here.windows(), targets.windows(), wanted, source_view)


@dataclass(frozen=True)
class Reading:
    """Elements in files of an entry, and where they belong in memory. `look` sees them as they are in the files."""

    entry: Entry
    sources: Sequence[Window]
    targets: Sequence[Window]
    memory: Sequence[torch.Tensor]
    look: Look | None = None

    @cached_property
    def bytes(self) -> int:
        """What it writes."""
        return sum(window.volume * self.memory[window.tensor].element_size() for window in self.targets)

    def read(self, reader: WindowReader) -> Reading:
        """Read straight into memory; returns what is to be copied from views."""
        if not self.entry.near or any(tensor.device.type != "cpu" for tensor in self.memory):
            return self
        entry = self.entry
        entry.check_dtype()
        left = [
            (source, target)
            for source, target in zip(self.sources, self.targets, strict=True)
            if not reader.read(entry.paths[source.tensor], source, entry.dtype, target, self.memory, self.look)
        ]
        return self._some([source for source, _ in left], [target for _, target in left])

    def _some(self, sources: Sequence[Window], targets: Sequence[Window]) -> Reading:
        return Reading(self.entry, sources, targets, self.memory, self.look)

    def parts(self) -> Iterator[Reading]:
        """In so many windows at a time as may be mapped."""
        if len(self.sources) <= TOGETHER:
            yield self
            return
        for at in range(0, len(self.sources), TOGETHER):
            some = slice(at, at + TOGETHER)
            yield self._some(self.sources[some], self.targets[some])


def read_into(readings: Iterable[Reading], done: Callable[[int], None] | None = None) -> None:
    """Copy all of them, small ones together. `done` hears of the bytes that are there, and whose files were whole."""
    reader: WindowReader | None = None
    for batch, size in _batches(readings):
        if reader is None or reader.files is not batch[0].entry.files:
            reader = WindowReader(batch[0].entry.files)
        _read_batch(batch, reader)
        if done is not None:
            done(size)


def _batches(readings: Iterable[Reading]) -> Iterator[tuple[list[Reading], int]]:
    """Of the same files, with their bytes."""
    batch, windows, size = list[Reading](), 0, 0
    for part in (part for reading in readings for part in reading.parts()):
        count, more = len(part.sources), part.bytes
        full = windows + count > TOGETHER or size + more > BATCH
        if batch and (full or part.entry.files is not batch[0].entry.files):
            yield batch, size
            batch, windows, size = [], 0, 0
        batch.append(part)
        windows, size = windows + count, size + more
    if batch:
        yield batch, size


def _read_batch(batch: Sequence[Reading], reader: WindowReader) -> None:
    """Files that changed meanwhile are refused."""
    files = batch[0].entry.files
    names = {reading.entry.paths[window.tensor] for reading in batch for window in reading.sources}
    rest = [left for reading in batch if (left := reading.read(reader)).sources]
    if rest:
        files.check_unchanged(names, within=RECHECK_SECONDS)  # to read what was cut off would end the process
        _copy(rest)
    files.check_unchanged(names)


def _copy(readings: Sequence[Reading]) -> None:
    """From views of mapped files, or of what was fetched, all of them together."""
    there, here = list[torch.Tensor](), list[torch.Tensor]()
    for reading in readings:
        views = reading.entry.views(reading.sources)
        if reading.look is not None:
            reading.look(views)
        here += views
        there += [view_of(window, reading.memory) for window in reading.targets]
    copy_all(there, here)
    left = iter(here)
    for reading in readings:
        reading.entry.show(reading.sources, list(islice(left, len(reading.sources))))


class LazyMapping(Mapping[str, V]):
    """Values that are made when first used: a large checkpoint has very many."""

    def __init__(self, names: Mapping[str, object], make: Callable[[str], V]) -> None:
        self._names, self._make, self._made = names, make, dict[str, V]()

    def __getitem__(self, name: str) -> V:
        if name in self._made:
            return self._made[name]
        if name not in self._names:
            raise KeyError(name)
        value = self._made[name] = self._make(name)
        return value

    def replace(self, name: str, value: V) -> None:
        """From now on this is the value."""
        self._made[name] = value

    def __contains__(self, name: object) -> bool:
        return name in self._names

    def __iter__(self) -> Iterator[str]:
        return iter(self._names)

    def __len__(self) -> int:
        return len(self._names)

    def __repr__(self) -> str:
        return repr(dict(self))


class Checkpoint(LazyMapping[Entry]):
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
        super().__init__(entries, entries.__getitem__)
        self.files, self.format = files, format
        self.path = files.root  # where it is; the file, where it is one
        self.paths = paths or {}  # of names in nested state dicts, where they are known
        self.metadata = metadata or {}
        self.sums = False  # True where its index says that all files have checksums beside them
        self.reused: tuple[str, ...] = ()  # by `convert`: the files of an earlier try that were whole
        self.lost: tuple[Lost, ...] = ()  # by `convert`: values beyond the range of their new dtype, cast as allowed
        self._objects = objects

    def replaced(
        self,
        entries: Mapping[str, Entry],
        *,
        paths: Mapping[str, tuple[str | int, ...]] | None = None,
        objects: Mapping[str, object] | None = None,
    ) -> Checkpoint:
        """The same with other tensors, and perhaps other paths and values."""
        made = Checkpoint(
            self.files,
            self.format,
            entries,
            paths=self.paths if paths is None else paths,
            objects=lambda: self.objects if objects is None else objects,
            metadata=self.metadata,
        )
        made.sums = self.sums
        made.path = self.path  # of a single file it is more than the root of `files`
        return made

    @cached_property
    def objects(self) -> Mapping[str, Any]:
        """Values other than tensors, by name: counters, settings."""
        return self._objects()

    @property
    def bytes(self) -> int:
        """Of all tensors."""
        return sum(entry.bytes for entry in self.values())

    def __repr__(self) -> str:
        return f"Checkpoint({self.path!r}, {self.format}, {len(self)} tensor{'s' * (len(self) != 1)})"

    def _repr_html_(self) -> str:
        """Alike tensors in one row, in notebooks; no value is read."""
        from shardwise import report
        from shardwise.checkpoint.listing import Row, rows

        return report.listed(repr(self), Row._fields, rows(self))
