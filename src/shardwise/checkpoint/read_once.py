"""Read every byte of a checkpoint once, on one rank, and send it to all ranks that need it."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import NamedTuple

import torch

from shardwise.checkpoint.callers import Callers
from shardwise.checkpoint.entry import Entry
from shardwise.checkpoint.writer_assignment import Owned, slices
from shardwise.containers.memory import check_written
from shardwise.exchange.overflow import Losses
from shardwise.geometry import Box, Boxes
from shardwise.job.agree import agree_on
from shardwise.job.job import Job
from shardwise.job.plan import ModelPlan, TensorInfo
from shardwise.job.progress import Progress, shown
from shardwise.job.remap import Link
from shardwise.job.session import group_transport
from shardwise.job.side import LiveSide
from shardwise.layout import Layout


class Prepared(NamedTuple):
    """What a load does on a rank: which entries fill which tensors, the names that are filled, and other values."""

    links: Sequence[tuple[Link, Entry, TensorInfo]]
    linked: set[str]
    others: Sequence[str]


def load_once(
    callers: Callers,
    targets: Mapping[str, TensorInfo],
    flat: Mapping[str, object],
    prepare: Callable[[], Prepared],
    max_bytes: int | None,
    progress: Progress,
    *,
    count_losses: bool,
) -> tuple[Prepared, Losses]:
    """Fill the targets: a job whose source are the mapped files, of which every rank reads an equal share.

    Returns what was loaded, and the casts' losses among what this rank reads.
    """
    transport = group_transport(callers.group)

    def make() -> tuple[ModelPlan, Prepared]:
        prepared = prepare()
        entries = {link.source: entry for link, entry, _ in prepared.links}
        layouts = assign_readers(entries.values(), callers.owners)
        sources = {name: TensorInfo(entry.shape, entry.dtype, layouts[name], "cpu") for name, entry in entries.items()}
        links = [link for link, _, _ in prepared.links]
        used = {link.target for link in links}
        filled = {name: tensor for name, tensor in targets.items() if name in used}
        return ModelPlan.of(links, sources, filled, max_bytes=max_bytes), prepared

    plan, prepared = agree_on(transport, "load", make)
    job = Job(transport, plan, "load", overflow="count" if count_losses else "allow")
    entries = {link.source: entry for link, entry, _ in prepared.links}
    source, target = FileSide(entries, plan, callers.me), LiveSide(flat, plan.targets)

    def check() -> None:
        for name, memory in target.checked("state dict", plan.targets, callers.me).items():
            for tensor in memory:
                check_written(tensor, repr(name))

    with shown(progress, job.total, "load", here=callers.first) as tell:
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
            self._mapped[name] = _mapped(self._entries[name], self._plan.sources[name].layout, self._me)
        return self._mapped[name]

    def stamp(self) -> object:
        """Files are read once."""
        return object()

    def sent(self, entries: Sequence[int]) -> None:
        """Unmap them."""
        self._mapped.clear()

    def filled(self, names: Sequence[str]) -> None:
        """Files are only a source."""


def assign_readers(entries: Iterable[Entry], owners: Sequence[int]) -> dict[str, Layout]:
    """The readers of every tensor: stored boxes in order, in shares of equally many bytes."""
    stored = list(entries)
    total, before = max(1, sum(int(entry.boxes.volumes().sum()) * entry.dtype.itemsize for entry in stored)), 0
    layouts = dict[str, Layout]()
    for entry in stored:
        pieces, boxes = list[Owned](), entry.boxes
        columns = boxes.volumes().tolist(), boxes.lo.tolist(), boxes.hi.tolist()
        for volume, lo, hi in zip(*columns, strict=True):
            size = volume * entry.dtype.itemsize
            first, last = (where * len(owners) // total for where in (before, before + size - 1))
            whole = (owners[first], tuple(lo), tuple(hi))
            pieces += [whole] if first == last else slices(Box(*whole[1:]), owners[first : last + 1])
            before += size
        layouts[entry.name] = Layout.boxes(entry.shape, pieces, overlap="replicas")
    return layouts


def _mapped(entry: Entry, layout: Layout, me: int) -> list[torch.Tensor]:
    """This rank's share of an entry, as memory-mapped tensors."""
    if me not in layout:
        return []
    boxes = [piece.box for piece in sorted(layout.pieces(me), key=lambda piece: piece.buffer)]
    places = entry.within(Boxes.of(boxes, layout.ndim))
    return entry.views(entry.cuts(places))
