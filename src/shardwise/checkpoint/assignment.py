"""Which rank reads or writes which cells of a checkpoint: each of them once, in equal shares."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from functools import lru_cache
from math import prod

from shardwise.checkpoint.entry import Entry
from shardwise.errors import CheckpointError
from shardwise.geometry import Box, Boxes, cut, ints, row_major
from shardwise.layout import Grid, Layout, places_of
from shardwise.planning import plan

OwnedBox = tuple[int, tuple[int, ...], tuple[int, ...]]  # an owner, and the corners of a box
WHOLE = 2**22  # bytes of a box that one of its replicas writes whole: smaller parts are not worth their names


def assign_writers(name: str, layout: Layout, itemsize: int, turn: int) -> Layout:
    """The boxes that every owner writes. `turn` moves small ones on to the next replica, so that all write as much."""
    if layout.op is not None:
        raise CheckpointError(
            f"{name!r} is partial ({layout!r}), and a checkpoint holds values: reduce it first, "
            f"as in reshard(x, (mesh, ['R']))"
        )
    most = max(layout.form.holders.most, 1)
    return layout if most == 1 and isinstance(layout.form, Grid) else _once(layout, itemsize, turn % most)


@lru_cache(maxsize=4096)
def _once(layout: Layout, itemsize: int, turn: int) -> Layout:
    holders = _holders(layout)
    if holders is None:
        return _as_planned(layout, itemsize)
    if all(len(owners) == 1 for _, owners in holders):
        return layout
    pieces = list[OwnedBox]()
    for box, owners in holders:
        if box.volume * itemsize <= WHOLE:
            pieces.append((owners[turn % len(owners)], box.lo, box.hi))
        else:
            pieces += _slices(box, owners)
    return Layout.boxes(layout.shape, pieces).shortest()


@lru_cache(maxsize=1024)
def _holders(layout: Layout) -> list[tuple[Box, list[int]]] | None:
    """The owners of every box; None where boxes overlap in part."""
    if isinstance(layout.form, Grid):  # all of them at once, however many owners there are
        cells, holders = layout.form.cells, layout.form.holders
        rows = [holders.owners[holders.edges[block] : holders.edges[block + 1]].tolist() for block in cells.block]
        return [(cells.boxes.box(at), owners) for at, owners in enumerate(rows) if cells.boxes.box(at).volume]
    holders_of = dict[Box, list[int]]()
    for owner in layout.owners():
        for piece in layout.pieces(owner):
            holders_of.setdefault(piece.box, []).append(owner)
    return list(holders_of.items()) if sum(box.volume for box in holders_of) == prod(layout.shape) else None


def _as_planned(layout: Layout, itemsize: int) -> Layout:
    """As a plan chooses the senders for an owner that has nothing, in boxes that lie inside pieces."""
    copies = plan(layout, Layout.replicated(layout.shape, [max(layout.owners()) + 1]), itemsize=itemsize).copies
    pieces = list[OwnedBox]()
    for owner in layout.owners():
        places = places_of(layout, owner, [row_major(shape) for shape in layout.local_shapes(owner)])
        boxes = places.once(copies.boxes.take(copies.source == owner))[1].boxes
        pieces += [(owner, boxes.box(at).lo, boxes.box(at).hi) for at in range(boxes.count)]
    return Layout.boxes(layout.shape, pieces)


def _slices(box: Box, owners: Sequence[int]) -> list[OwnedBox]:
    """A box in equal shares, each of cells that lie one after the other: whole rows where there are enough of them."""
    shares = len(owners)
    rows = box.shape[0] if box.shape and box.shape[0] >= shares else box.volume
    edges = ints([rows * at // shares * (box.volume // rows) for at in range(shares + 1)])
    row, parts = cut(Boxes.of([box] * shares, len(box.shape)), edges[:-1], edges[1:])
    return [(owners[at], parts.box(n).lo, parts.box(n).hi) for n, at in enumerate(row.tolist())]


def assign_readers(entries: Iterable[Entry], owners: Sequence[int]) -> dict[str, Layout]:
    """The readers of every tensor: stored boxes in order, in shares of equally many bytes."""
    stored = list(entries)
    total, before = max(1, sum(int(entry.boxes.volumes().sum()) * entry.dtype.itemsize for entry in stored)), 0
    layouts = dict[str, Layout]()
    for entry in stored:
        pieces, boxes = list[OwnedBox](), entry.boxes
        columns = boxes.volumes().tolist(), boxes.lo.tolist(), boxes.hi.tolist()
        for volume, lo, hi in zip(*columns, strict=True):
            size = volume * entry.dtype.itemsize
            first, last = (where * len(owners) // total for where in (before, before + size - 1))
            whole = (owners[first], tuple(lo), tuple(hi))
            pieces += [whole] if first == last else _slices(Box(*whole[1:]), owners[first : last + 1])
            before += size
        layouts[entry.name] = Layout.boxes(entry.shape, pieces, overlap="replicas")
    return layouts
