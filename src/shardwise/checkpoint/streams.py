"""What a checkpoint becomes: its tensors selected, renamed, joined, split and cast, and read in chunks."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from math import prod
from mmap import MAP_PRIVATE, mmap
from operator import attrgetter
from typing import IO, TypeVar

import torch

from shardwise.checkpoint.entry import Checkpoint, Entry, FileCopies, HashableBoxes, Packed, read_into
from shardwise.checkpoint.files import WORDS
from shardwise.checkpoint.quantized import ValueEntry, coded_entries, quantized_names, with_values
from shardwise.checkpoint.selection import EVERYTHING, Selection, check_used
from shardwise.checkpoint.zeros import zeros_entry
from shardwise.errors import CheckpointError, RefusedCastError
from shardwise.exchange.overflow import Losses, Lost, Overflow, check_overflow, may_overflow, refusal
from shardwise.geometry import Box, Boxes, Window, cut, ints
from shardwise.job.casts import Cast, CastRequest, Casts, Change, Typed, check_change, check_changes
from shardwise.job.names import Rename, rename_patterns
from shardwise.job.remap import Link, links, shapes_after
from shardwise.job.subtensor import Subtensor
from shardwise.quantized.moves import Rule, split_rules
from shardwise.quantized.recognition import Quantized

T = TypeVar("T")
R = TypeVar("R")
Sources = tuple[tuple[Link, Entry], ...]
CHUNK = 2**23  # bytes that are read at a time
APART = 2**20  # bytes of a buffer that gets memory of its own


@dataclass(frozen=True)
class Stream:
    """A tensor whose cells come from entries, by links; cast to `dtype`."""

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    sources: Sources

    @property
    def whole(self) -> Box:
        """All cells."""
        return Box.whole(self.shape)

    @property
    def size(self) -> int:
        """The bytes of all cells."""
        return prod(self.shape) * self.dtype.itemsize

    def same_bytes(self, other: Stream) -> bool:
        """True where the same bytes of files are known to become the same tensor: tied weights that are stored once."""
        return self.origin is not None and self.origin == other.origin

    @property
    def origin(self) -> Hashable:
        """The bytes that it comes from, and what becomes of them; None where it shares none of them with another."""
        if not self.sources or any(entry.shared is None for _, entry in self.sources):
            return None
        parts = [(link.source_view, link.target_view, entry.dtype, entry.shared) for link, entry in self.sources]
        return self.shape, self.dtype, tuple(parts)

    def check(self) -> None:
        """Refuse cells that are stored nowhere."""
        for link, entry in self.sources:
            entry.check(Boxes.of([link.source_view.region], len(entry.shape)))

    def fill(self, boxes: Boxes, buffer: torch.Tensor) -> None:
        """The cells of boxes, one after the other, into a flat tensor."""
        read_into(copies.into([buffer]) for copies in self._copies(boxes))

    def read(self, box: Box) -> torch.Tensor:
        """The cells of a box, in memory of their own."""
        values = torch.empty(box.shape, dtype=self.dtype, device="cpu")
        self.fill(Boxes.of([box] if box.volume else [], len(box.lo)), values.view(-1))
        return values

    def _copies(self, boxes: Boxes) -> Iterator[FileCopies]:
        """To the cells of boxes, one after the other."""
        memory = Packed(HashableBoxes(boxes))
        return (FileCopies.of(entry, memory, link) for link, entry in self.sources)

    @property
    def may_overflow(self) -> bool:
        """True where a value may be beyond the range of the new dtype."""
        return any(may_overflow(entry.dtype, self.dtype) for _, entry in self.sources)

    def losses(self, chunk: int = CHUNK) -> Losses:
        """What the cast loses of all cells; nothing is read where it can lose nothing."""
        losses = Losses()
        for part, _ in self._parts(self.whole, chunk) if self.may_overflow else ():
            for entry, sources, _ in self._copies(part):
                if may_overflow(entry.dtype, self.dtype):
                    losses.look(repr(self.name), entry.views(sources), self.dtype)
        return losses

    def write(self, box: Box, file: IO[bytes], chunk: int = CHUNK) -> None:
        """The cells of a box, row-major, to a file: copied as stored if possible, otherwise packed in chunks."""
        runs = self._runs(box)
        for entry, run in runs or ():
            entry.copy(run, file)
        computed = any(entry.made_by for _, entry in self.sources)  # which needs memory as well
        for part, buffer in self.chunks(box, chunk // 4 if computed else chunk) if runs is None else ():
            self.fill(part, buffer)
            file.write(buffer.view(WORDS[self.dtype.itemsize]).numpy().data)

    def _runs(self, box: Box) -> list[tuple[Entry, Window]] | None:
        """The box as bytes of files one after the other; None where it has to be packed or cast."""
        if any(entry.dtype != self.dtype or entry.made_by for _, entry in self.sources):
            return None
        runs = list[tuple[int, Entry, Window]]()
        for copies in self._copies(Boxes.of([box] if box.volume else [], len(box.lo))):
            if not copies.contiguous:
                return None
            runs += [(to.offset, copies.entry, run) for run, to in zip(copies.sources, copies.targets, strict=True)]
        return [(entry, run) for _, entry, run in sorted(runs, key=lambda run: run[0])]

    def chunks(self, box: Box, chunk: int) -> Iterator[tuple[Boxes, torch.Tensor]]:
        """A box in parts of so many bytes, row-major, each with the same buffer for its cells."""
        buffer = None
        for part, cells in self._parts(box, chunk):
            buffer = _buffer(cells, self.dtype) if buffer is None else buffer  # the first is the largest
            yield part, buffer[:cells]

    def _parts(self, box: Box, chunk: int) -> Iterator[tuple[Boxes, int]]:
        """With the number of cells in each."""
        volume, cells, whole = box.volume, max(1, chunk // self.dtype.itemsize), Boxes.of([box], len(self.shape))
        for start in range(0, volume, cells):
            stop = min(start + cells, volume)
            yield cut(whole, ints([start]), ints([stop]))[1], stop - start


def _buffer(count: int, dtype: torch.dtype) -> torch.Tensor:
    """Memory for so many elements. What is large goes back to the system at once: allocators may keep it for later."""
    if count * dtype.itemsize < APART:
        return torch.empty(count, dtype=dtype, device="cpu")
    return torch.frombuffer(mmap(-1, count * dtype.itemsize, flags=MAP_PRIVATE), dtype=torch.uint8).view(dtype)


def stream_of(entry: Entry) -> Stream:
    """An entry as it is."""
    whole = Subtensor.whole(entry.shape)
    return Stream(entry.name, entry.shape, entry.dtype, ((Link(entry.name, entry.name, whole, whole), entry),))


def streams_of(
    opened: Checkpoint,
    *,
    rename: Rename = None,
    remap: Iterable[Rule] = (),
    selection: Selection = EVERYTHING,
    cast: Cast = None,
) -> dict[str, Stream]:
    """The tensors by their new names. Patterns that match nothing are refused."""
    (quantized, remap), casts = split_rules(remap), Casts.of(cast)
    opened = with_values(opened, quantized)
    shapes = {name: opened[name].shape for name in filter(selection.of(opened), opened)}
    if not shapes and len(opened):
        selection.check(opened, list(opened))
    targets = shapes_after(shapes, rename=rename, remap=remap)
    casts = casts.among(targets)
    sources = by_target(links(shapes, targets, rename=rename, remap=remap, empty=True), opened)
    if not selection.everything:
        selection.check(opened, [*opened, *opened.objects])
    check_used(opened, "rename=", rename_patterns(rename), opened)
    check_used(opened, "cast=", casts.unused(targets), targets)
    streams = {name: _stream(name, shape, sources[name], casts) for name, shape in targets.items()}
    check_casts(opened, sources, streams, partial(_check_cast, opened=opened, casts=casts))
    for stream in streams.values():
        stream.check()
    return _quantized(opened, streams, quantized) if quantized else streams


def _quantized(opened: Checkpoint, streams: dict[str, Stream], rules: Sequence[Quantized]) -> dict[str, Stream]:
    """Values that rules name become codes and scales, unless the rule found codes and scales, which became values."""
    used = {entry.rule for entry in opened.values() if isinstance(entry, ValueEntry)}
    becoming = quantized_names(streams, [rule for rule in rules if rule not in used])
    for rule in rules:
        if rule not in used and not any(one.rule == rule for one in becoming.values()):
            raise CheckpointError(f"{opened.path}: {_fits_nothing(rule)}")
    found = dict[str, Stream]()
    for name, stream in streams.items():
        if name in becoming:
            several = coded_entries(becoming[name].tensor, stream.read, [entry for _, entry in stream.sources])
            made = {entry.name: stream_of(entry) for entry in several}
        else:
            made = {name: stream}
        twice = next((new for new in made if new in found or (new in streams and new != name)), None)
        if twice is not None:
            raise CheckpointError(f"{opened.path}: {twice!r} is there already: {name!r} cannot be quantized to it")
        found |= made
    return found


def _fits_nothing(rule: Quantized) -> str:
    if rule.codes is None:
        return (
            "Quantized() (--quantized auto) fits nothing: there are no codes with scales. To quantize values, give "
            "names and a format: Quantized('*.weight', '*.weight_scale_inv', format='fp8-block')"
        )
    return f"{rule} fits nothing: leave it out, or look for other names"


def _stream(name: str, shape: tuple[int, ...], sources: Sources, casts: Casts) -> Stream:
    stored = {(entry.dtype, entry.becomes): None for link, entry in sources if not link.zeros}
    becomes = {(casts.request(name, dtype) or CastRequest(kept, named=False)).dtype for dtype, kept in stored}
    if len(becomes) > 1:
        raise CheckpointError(
            f"{name!r} is put together from {', '.join(str(dtype) for dtype, _ in stored)}: cast= makes them alike"
        )
    return Stream(name, shape, becomes.pop(), tuple(one for one in sources if prod(one[0].target_view.shape)))


def by_target(links: Iterable[Link], entries: Mapping[str, Entry]) -> dict[str, Sources]:
    """The links to every target, with the entries that they come from."""
    sources = defaultdict[str, list[tuple[Link, Entry]]](list)
    for link in sorted(links, key=attrgetter("zeros")):  # zeros have the dtype of the others
        beside = sources[link.target]
        shape = link.source_view.shape
        entry = zeros_entry(link.source, shape, beside[0][1].dtype) if link.zeros else entries[link.source]
        beside.append((link, entry))
    return {name: tuple(several) for name, several in sources.items()}


def check_casts(
    opened: Checkpoint,
    sources: Mapping[str, Sources],
    targets: Mapping[str, Typed],
    check: Callable[[Change], None],
) -> None:
    """Refuse casts that `check` refuses."""
    named = [(name, entry) for name, several in sources.items() for _, entry in several]
    try:
        check_changes([Change(entry.name, name, entry.dtype, targets[name].dtype) for name, entry in named], check)
    except ValueError as error:
        raise RefusedCastError(f"{opened.path}: {error}") from error


def _check_cast(change: Change, opened: Checkpoint, casts: Casts) -> None:
    request = casts.request(change.target, change.dtype)
    check_change(change, opened, named=request is not None and request.named)


def check_losses(
    streams: Mapping[str, Stream], overflow: Overflow, outcome: str, *, jobs: int = 1, chunk: int = CHUNK
) -> tuple[Lost, ...]:
    """The values that casts lose; refused, unless `overflow` allows it. Other tensors are not read."""
    check_overflow(overflow)
    watched = [stream for stream in streams.values() if stream.may_overflow]
    lost = [
        one
        for _, losses in map_in_order(watched, lambda stream: stream.losses(chunk), jobs)
        for one in losses.per_tensor()
    ]
    if lost and overflow == "refuse":
        raise RefusedCastError(refusal(lost, outcome))
    return tuple(lost)


def duplicates(keys: Mapping[str, Hashable]) -> dict[str, str]:
    """The names whose key an earlier name has, with that name.

    >>> duplicates({"a": 1, "b": 2, "c": 1})
    {'c': 'a'}
    """
    first = dict[Hashable, str]()
    return {name: one for name, key in keys.items() if (one := first.setdefault(key, name)) != name}


def check_jobs(jobs: int) -> None:
    """Refuse a number of threads below 1."""
    if jobs < 1:
        raise ValueError(f"jobs= must be 1 or more, not {jobs!r}")


def map_in_order(items: Iterable[T], work: Callable[[T], R], jobs: int) -> Iterator[tuple[T, R]]:
    """The results of `work` on every item, by several threads, in the order of the items."""
    if jobs <= 1:
        yield from ((item, work(item)) for item in items)
        return
    todo = list(items)
    with ThreadPoolExecutor(jobs) as pool:
        yield from zip(todo, pool.map(work, todo), strict=True)
