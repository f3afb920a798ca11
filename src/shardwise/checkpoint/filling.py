"""Fill tensors from files: every rank reads what it needs, or every byte is read once and sent to all that need it."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from itertools import chain
from typing import NamedTuple, Protocol

import torch

from shardwise.checkpoint.assignment import assign_readers
from shardwise.checkpoint.checking import BlockCheck, DamagedBlock
from shardwise.checkpoint.entry import Entry, FileCopies, HashableBoxes, Local, Packed, Reading, read_into
from shardwise.checkpoint.streams import Stream
from shardwise.containers.delivered import DeliveredTensor
from shardwise.containers.memory import check_written
from shardwise.exchange.messages import Tensors
from shardwise.exchange.overflow import Losses, Lost
from shardwise.job.agree import Callers, agree_on
from shardwise.job.job import Job
from shardwise.job.plan import HostsOfGroup, ModelPlan, TensorInfo
from shardwise.job.progress import Count, Progress, reporter
from shardwise.job.remap import Link
from shardwise.job.side import LiveSide
from shardwise.job.zeros import zeros_layout
from shardwise.layout import Layout


class FillOptions(NamedTuple):
    """How to move bytes from files to tensors."""

    max_bytes: int | None
    progress: Progress
    count_losses: bool  # of casts
    check: BlockCheck


class Prepared(NamedTuple):
    """What a load does on a rank: the tensors to fill, what all ranks know of them, all filled names, other values.

    `buffers`: targets of codes and scales, which are written to other targets as values. `losses` of these values.
    """

    streams: Mapping[str, Stream]
    targets: Mapping[str, TensorInfo]
    linked: set[str]
    others: Mapping[str, object]
    buffers: Mapping[str, DeliveredTensor]
    losses: Losses

    def links(self) -> list[Link]:
        """Of all tensors."""
        return [link for stream in self.streams.values() for link, _ in stream.sources]

    def only(self, names: Iterable[str]) -> Prepared:
        """Some of the tensors."""
        return self._replace(streams={name: self.streams[name] for name in names})

    def size(self, names: Iterable[str]) -> int:
        """The bytes of all cells of these tensors."""
        return sum(self.streams[name].size for name in names)

    def entries(self) -> dict[str, Entry]:
        """The sources, by name."""
        return {link.source: entry for stream in self.streams.values() for link, entry in stream.sources}


class Fill(Protocol):
    """Fills tensors in one way: `prepare` finds what this rank does. Returns what it returned, and losses of casts."""

    def __call__(
        self, callers: Callers, flat: Mapping[str, object], prepare: Callable[[], Prepared], options: FillOptions
    ) -> tuple[Prepared, Losses]:
        """All callers return when all are done."""
        ...


def _check(target: LiveSide, infos: Mapping[str, TensorInfo], me: int) -> None:
    """Refuse memory that is not what the layouts give this rank, or must not be written to."""
    for name, memory in target.checked("state dict", infos, me).items():
        for tensor in memory:
            check_written(tensor, repr(name))


def fill_each(
    callers: Callers, flat: Mapping[str, object], prepare: Callable[[], Prepared], options: FillOptions
) -> tuple[Prepared, Losses]:
    """Every rank fills its part. Returns when all have: what was prepared, and the losses of casts."""
    prepared, by_rank = callers.tell(lambda: _fill_part(callers, flat, prepare(), options))
    losses = Losses()
    for lost in chain.from_iterable(lost for lost, _ in by_rank.values()):
        losses.keep_worst(lost)  # ranks may have read the same values
    options.check.damaged.update(chain.from_iterable(damaged for _, damaged in by_rank.values()))
    return prepared, losses


def _fill_part(
    callers: Callers, flat: Mapping[str, object], prepared: Prepared, options: FillOptions
) -> tuple[Prepared, tuple[list[Lost], list[DamagedBlock]]]:
    """Fill this rank's part. All positions are found before the first read, so that errors come early.

    Losses of casts are counted and blocks are checked in the same pass.
    """
    losses, target = prepared.losses, LiveSide({**flat, **prepared.buffers}, prepared.targets)
    counted = losses if options.count_losses else None
    _check(target, prepared.targets, callers.me)

    def readings(names: Iterable[str]) -> list[Reading]:
        return [
            _reading(prepared.targets[name], target.memory(name), source, callers.me, counted)
            for name in names
            for source in prepared.streams[name].sources
        ]

    delivered = {name for name, tensor in prepared.targets.items() if tensor.delivered}
    todo = readings(name for name in prepared.streams if name not in delivered)
    total = sum(reading.bytes for reading in todo) + sum(prepared.streams[name].size for name in delivered)
    _check_whole(callers, prepared, options.check)
    with reporter(options.progress, total, "load", here=callers.first) as tell, options.check.watching():
        count = Count(tell, total)
        read_into(todo, count.add)
        for names in target.deliveries():  # one after the other: each needs memory
            read_into(readings(names), count.add)
            target.filled(names)
    return prepared, (losses.per_tensor(), options.check.finish())


def _check_whole(callers: Callers, prepared: Prepared, check: BlockCheck) -> None:
    """With check="all", this rank's share of all files that any rank reads from."""
    if check.check == "all":
        entries = [entry for entry in prepared.entries().values() if entry.files is check.files]
        names = sorted({name for entry in entries for name in entry.used()})
        check.check_whole(names, callers.owners.index(callers.me), len(callers.owners))


def _reading(
    tensor: TensorInfo, memory: Sequence[torch.Tensor], source: tuple[Link, Entry], me: int, losses: Losses | None
) -> Reading:
    """What this rank reads of an entry; `losses` counts what a cast loses."""
    link, entry = source
    copies = FileCopies.of(entry, Local(tensor.layout, me, tuple(t.stride() for t in memory)), link)
    look = losses.looking(repr(link.target), entry.dtype, tensor.dtype) if losses is not None else None
    return copies.into(memory, look)


def fill_once(
    callers: Callers, flat: Mapping[str, object], prepare: Callable[[], Prepared], options: FillOptions
) -> tuple[Prepared, Losses]:
    """Fill the targets of all ranks: a job whose source is the files, of which every rank reads an equal share.

    Returns when all are filled: what was prepared, and the losses of casts.
    """
    transport = callers.transport
    assert transport is not None, "one rank alone fills its own part"

    def make() -> tuple[ModelPlan, Prepared]:
        prepared = prepare()
        entries, links = prepared.entries(), prepared.links()
        zeros = {link.source: zeros_layout(link, prepared.targets[link.target].layout) for link in links if link.zeros}
        stored = [entry for name, entry in entries.items() if name not in zeros]
        layouts = {**assign_readers(stored, callers.owners), **zeros}
        sources = {name: TensorInfo(entry.shape, entry.dtype, layouts[name], "cpu") for name, entry in entries.items()}
        hosts = HostsOfGroup.of("auto", transport.hosts)
        return ModelPlan.of(links, sources, prepared.targets, max_bytes=options.max_bytes, hosts=hosts), prepared

    plan, prepared = agree_on(transport, "load", make)
    for files in {entry.files for entry in prepared.entries().values()}:
        files.planned(plan, callers.me)
    job = Job(transport, plan, "load", overflow="count" if options.count_losses else "allow")
    source = FileSide(prepared.entries(), plan, callers.me, options.check)
    target = LiveSide({**flat, **prepared.buffers}, plan.targets)
    with reporter(options.progress, job.total, "load", here=callers.first) as tell:
        check = partial(_check, target, plan.targets, callers.me)
        job.run(source, target, check=check, fresh=False, progress=tell)

    def say() -> tuple[None, tuple[list[Lost], list[DamagedBlock]]]:
        _check_whole(callers, prepared, options.check)
        return None, ([*job.losses.per_tensor(), *prepared.losses.per_tensor()], options.check.finish())

    _, by_rank = callers.tell(say)  # no rank returns while another still reads: the caller may delete the files
    losses = Losses()
    for lost in chain.from_iterable(lost for lost, _ in by_rank.values()):
        losses.add(lost)  # each value was read by one rank
    options.check.damaged.update(chain.from_iterable(damaged for _, damaged in by_rank.values()))
    return prepared, losses


class FileSide:
    """This rank's share of the files, as memory-mapped tensors. A source of several targets is mapped once."""

    def __init__(self, entries: Mapping[str, Entry], plan: ModelPlan, me: int, check: BlockCheck) -> None:
        self._entries, self._plan, self._me, self._check = entries, plan, me, check
        self._mapped = dict[str, Tensors]()

    def memory(self, name: str) -> Tensors:
        """Of its share."""
        if name not in self._mapped:
            self._mapped[name] = self._map(self._entries[name], self._plan.sources[name].layout)
        return self._mapped[name]

    def _map(self, entry: Entry, layout: Layout) -> Tensors:
        if self._me not in layout:
            return []
        boxes = [piece.box for piece in sorted(layout.pieces(self._me), key=lambda piece: piece.buffer)]
        windows = FileCopies.of(entry, Packed(HashableBoxes.of(*boxes))).sources
        with self._check.watching():  # here, because another thread may run this
            views = entry.views(windows)
            entry.show(windows, views)
        return views

    def stamp(self) -> object:
        """Files are read once."""
        return object()

    def sent(self, links: Sequence[int]) -> None:
        """Unmap them."""
        self._mapped.clear()

    def filled(self, names: Sequence[str]) -> None:
        """Files are only a source."""
