"""Every byte of a checkpoint read once, by one rank, and sent to all who need any of it."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch

from shardwise.checkpoint.callers import Callers
from shardwise.checkpoint.entry import Entry
from shardwise.checkpoint.shares import Owned, slices
from shardwise.containers.memory import check_written
from shardwise.exchange import Move
from shardwise.exchange.overflow import Losses
from shardwise.geometry import Box, Boxes
from shardwise.job.agree import agreed
from shardwise.job.job import Mover, check_local, memory_of
from shardwise.job.plan import ModelPlan, Tensor
from shardwise.job.progress import Progress, shown
from shardwise.job.remap import Link
from shardwise.job.session import group_transport
from shardwise.layout import Layout

Listed = Sequence[tuple[Link, Entry, Tensor]]


def load_once(
    callers: Callers,
    targets: Mapping[str, Tensor],
    flat: Mapping[str, Any],
    prepare: Callable[[], Listed],
    max_bytes: int | None,
    progress: Progress,
    losses: Losses | None,
) -> None:
    """Fill the targets: a sync whose source are the mapped files, of which every rank holds an equal share."""
    entries, transport = dict[str, Entry](), group_transport(callers.group)

    def make() -> ModelPlan:
        listed = prepare()
        entries.update({link.source: entry for link, entry, _ in listed})
        layouts = readers(entries.values(), callers.owners)
        sources = {name: Tensor(entry.shape, entry.dtype, layouts[name], "cpu") for name, entry in entries.items()}
        used = {link.target for link, _, _ in listed}
        filled = {name: tensor for name, tensor in targets.items() if name in used}
        return ModelPlan.of([link for link, _, _ in listed], sources, filled, max_bytes=max_bytes)

    plan = agreed("load", make, group=callers.group)
    mover = Mover(transport, plan, "load")

    def check() -> None:
        for name, tensor in plan.targets.items():
            memory = memory_of(flat.get(name))
            check_local(f"{name!r} of the state dict", memory, tensor, callers.me)
            for one in memory:
                check_written(one, repr(name))

    def moves_of(bucket: list[int]) -> list[Move]:
        moves, read = list[Move](), dict[str, list[torch.Tensor]]()  # what several targets are made of is read once
        for at in bucket:
            link = plan.entries[at].link
            if link.source not in read:
                read[link.source] = _mapped(entries[link.source], plan.sources[link.source].layout, callers.me)
            moves.append(mover.move(at, read[link.source], memory_of(flat.get(link.target))))
            look(at, moves[-1])
        return moves

    def look(at: int, move: Move) -> None:
        if losses is not None and plan.may_overflow(at):
            target = plan.entries[at].link.target
            losses.look(repr(target), move.source, plan.targets[target].dtype)

    with shown(progress, mover.total, "load", here=callers.first) as tell:
        mover.run(moves_of, check=check, fresh=False, progress=tell)


def readers(entries: Iterable[Entry], owners: Sequence[int]) -> dict[str, Layout]:
    """Who reads what: boxes as they are stored, one after the other, in shares of equally many bytes."""
    listed = list(entries)
    total, before = max(1, sum(int(entry.boxes.volumes().sum()) * entry.dtype.itemsize for entry in listed)), 0
    found = dict[str, Layout]()
    for entry in listed:
        pieces, boxes = list[Owned](), entry.boxes
        columns = boxes.volumes().tolist(), boxes.lo.tolist(), boxes.hi.tolist()
        for volume, lo, hi in zip(*columns, strict=True):
            size = volume * entry.dtype.itemsize
            first, last = (where * len(owners) // total for where in (before, before + size - 1))
            whole = (owners[first], tuple(lo), tuple(hi))
            pieces += [whole] if first == last else slices(Box(*whole[1:]), owners[first : last + 1])
            before += size
        found[entry.name] = Layout.boxes(entry.shape, pieces, overlap="replicas")
    return found


def _mapped(entry: Entry, layout: Layout, me: int) -> list[torch.Tensor]:
    """What this rank is to read, as tensors of the mapped files."""
    if me not in layout:
        return []
    boxes = [piece.box for piece in sorted(layout.pieces(me), key=lambda piece: piece.buffer)]
    places = entry.within(Boxes.of(boxes, layout.ndim))
    return entry.views(entry.cuts(places))
