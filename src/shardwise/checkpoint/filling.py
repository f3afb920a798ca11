"""Fill tensors from files: every rank reads what it needs, or every byte is read once and sent to all that need it."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from typing import NamedTuple

import torch

from shardwise.checkpoint.assignment import assign_readers
from shardwise.checkpoint.callers import Callers
from shardwise.checkpoint.entry import Entry, FileCopies, HashableBoxes, Local, Packed, Reading, read_into
from shardwise.checkpoint.streams import Stream
from shardwise.containers.delivered import DeliveredTensor
from shardwise.containers.memory import check_written
from shardwise.exchange.overflow import Losses
from shardwise.job.agree import agree_on
from shardwise.job.job import Job
from shardwise.job.plan import ModelPlan, TensorInfo
from shardwise.job.progress import Count, Progress, shown
from shardwise.job.remap import Link
from shardwise.job.session import group_transport
from shardwise.job.side import LiveSide
from shardwise.layout import Layout


class Prepared(NamedTuple):
    """What a load does on a rank: the tensors to fill, what all ranks know of them, all filled names, other values.

    `buffers`: targets of codes and scales, which are written to other targets as values. `losses` of these values.
    """

    streams: Mapping[str, Stream]
    targets: Mapping[str, TensorInfo]
    linked: set[str]
    others: Sequence[str]
    buffers: Mapping[str, DeliveredTensor]
    losses: Losses

    def links(self) -> list[Link]:
        """Of all tensors."""
        return [link for stream in self.streams.values() for link, _ in stream.sources]

    def entries(self) -> dict[str, Entry]:
        """The sources, by name."""
        return {link.source: entry for stream in self.streams.values() for link, entry in stream.sources}


def _check(target: LiveSide, infos: Mapping[str, TensorInfo], me: int) -> None:
    """Refuse memory that is not what the layouts give this rank, or must not be written to."""
    for name, memory in target.checked("state dict", infos, me).items():
        for tensor in memory:
            check_written(tensor, repr(name))


def fill_each(
    callers: Callers,
    flat: Mapping[str, object],
    prepare: Callable[[], Prepared],
    progress: Progress,
    *,
    count_losses: bool,
) -> tuple[Prepared, Losses]:
    """Fill this rank's part. All positions are found before the first read, so that errors come early.

    Returns what was prepared, and the casts' losses, which are counted in the same pass.
    """
    prepared, losses = prepare(), Losses()
    target, counted = LiveSide({**flat, **prepared.buffers}, prepared.targets), losses if count_losses else None
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
    with shown(progress, total, "load", here=callers.first) as tell:
        count = Count(tell, total)
        read_into(todo, count.add)
        for names in target.deliveries():  # one after the other: each needs memory
            read_into(readings(names), count.add)
            target.filled(names)
    return prepared, losses


def _reading(
    tensor: TensorInfo, memory: Sequence[torch.Tensor], source: tuple[Link, Entry], me: int, losses: Losses | None
) -> Reading:
    """What this rank reads of an entry; `losses` counts what a cast loses."""
    link, entry = source
    copies = FileCopies.of(entry, Local(tensor.layout, me, tuple(t.stride() for t in memory)), link)
    look = losses.looking(repr(link.target), entry.dtype, tensor.dtype) if losses is not None else None
    return copies.into(memory, look)


def fill_once(
    callers: Callers,
    flat: Mapping[str, object],
    prepare: Callable[[], Prepared],
    progress: Progress,
    *,
    count_losses: bool,
    max_bytes: int | None,
) -> tuple[Prepared, Losses]:
    """Fill the targets of all ranks: a job whose source is the mapped files, of which every rank reads an equal share.

    Returns what was prepared, and the casts' losses among what this rank reads.
    """

    def make() -> tuple[ModelPlan, Prepared]:
        prepared = prepare()
        entries = prepared.entries()
        layouts = assign_readers(entries.values(), callers.owners)
        sources = {name: TensorInfo(entry.shape, entry.dtype, layouts[name], "cpu") for name, entry in entries.items()}
        return ModelPlan.of(prepared.links(), sources, prepared.targets, max_bytes=max_bytes), prepared

    transport = group_transport(callers.group)
    plan, prepared = agree_on(transport, "load", make)
    job = Job(transport, plan, "load", overflow="count" if count_losses else "allow")
    source = FileSide(prepared.entries(), plan, callers.me)
    target = LiveSide({**flat, **prepared.buffers}, plan.targets)
    with shown(progress, job.total, "load", here=callers.first) as tell:
        check = partial(_check, target, plan.targets, callers.me)
        job.run(source, target, check=check, fresh=False, progress=tell)
    return prepared, job.losses


class FileSide:
    """This rank's share of the files, as memory-mapped tensors. A source of several targets is mapped once."""

    def __init__(self, entries: Mapping[str, Entry], plan: ModelPlan, me: int) -> None:
        self._entries, self._plan, self._me = entries, plan, me
        self._mapped = dict[str, list[torch.Tensor]]()

    def memory(self, name: str) -> list[torch.Tensor]:
        """Of its share."""
        if name not in self._mapped:
            self._mapped[name] = self._map(self._entries[name], self._plan.sources[name].layout)
        return self._mapped[name]

    def _map(self, entry: Entry, layout: Layout) -> list[torch.Tensor]:
        if self._me not in layout:
            return []
        boxes = [piece.box for piece in sorted(layout.pieces(self._me), key=lambda piece: piece.buffer)]
        return entry.views(FileCopies.of(entry, Packed(HashableBoxes.of(*boxes))).sources)

    def stamp(self) -> object:
        """Files are read once."""
        return object()

    def sent(self, links: Sequence[int]) -> None:
        """Unmap them."""
        self._mapped.clear()

    def filled(self, names: Sequence[str]) -> None:
        """Files are only a source."""
