"""Which rank reads or writes which cells of a checkpoint: each of them once, in equal shares."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from functools import lru_cache
from itertools import repeat
from math import prod

from shardwise.checkpoint.entry import Entry, HashableBoxes
from shardwise.errors import CheckpointError
from shardwise.geometry import Box, Boxes, cut, ints, row_major
from shardwise.layout import Grid, Layout, places_of
from shardwise.planning import plan

Ranks = tuple[int, ...]
Readers = tuple[Ranks, ...]  # each of these groups reads all of something
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
            pieces += _slices(Boxes.of([box], layout.ndim), [owners])
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
        pieces += _owned(repeat(owner, boxes.count), boxes)
    return Layout.boxes(layout.shape, pieces)


def _slices(boxes: Boxes, owners: Sequence[Sequence[int]]) -> list[OwnedBox]:
    """Every box in equal shares for its owners, each of cells that lie one after the other: whole rows if possible."""
    if all(len(takers) == 1 for takers in owners):  # as most are
        return _owned([owner for (owner,) in owners], boxes)
    whose, number, start, stop = list[int](), list[int](), list[int](), list[int]()
    for at, (size, takers) in enumerate(zip((boxes.hi - boxes.lo).tolist(), owners, strict=True)):
        volume, shares = prod(size), len(takers)
        rows = size[0] if size and size[0] >= shares else volume
        edges = [rows * share // shares * (volume // rows) for share in range(shares + 1)] if volume else [0]
        whose += takers[: len(edges) - 1]
        number += [at] * (len(edges) - 1)
        start += edges[:-1]
        stop += edges[1:]
    row, parts = cut(boxes.take(ints(number)), ints(start), ints(stop))
    return _owned([whose[at] for at in row.tolist()], parts)


def _owned(owners: Iterable[int], boxes: Boxes) -> list[OwnedBox]:
    corners = zip(owners, boxes.lo.tolist(), boxes.hi.tolist(), strict=True)
    return [(owner, tuple(lo), tuple(hi)) for owner, lo, hi in corners]


def assign_readers(entries: Iterable[Entry], owners: Sequence[int]) -> dict[str, Layout]:
    """The readers of every tensor: stored boxes in order, in shares of equally many bytes.

    What only some ranks can read is shared among these. If those of several hosts can, each host reads all of it: then
    the plan takes each cell from where it is nearest.
    """
    everyone, totals, before = (tuple(owners),), Counter[Ranks](), Counter[Ranks]()
    sizes = dict[Entry, list[tuple[int, Readers]]]()
    for entry in entries:
        who = _readers(entry, everyone)
        sizes[entry] = [
            (volume * entry.dtype.itemsize, groups)
            for volume, groups in zip(entry.boxes.volumes().tolist(), who, strict=True)
        ]
        for size, groups in sizes[entry]:
            totals.update(dict.fromkeys(groups, size))
    layouts = dict[str, Layout]()
    for entry, rows in sizes.items():
        readers = tuple(tuple(_share(group, size, before, totals) for group in groups) for size, groups in rows)
        layouts[entry.name] = _read_by(entry.shape, entry.stored, readers)
    return layouts


def _readers(entry: Entry, everyone: Readers) -> list[Readers]:
    """The groups of ranks that can read each stored box."""
    known = entry.files.readers
    if not known:
        return [everyone] * entry.shards
    names = [entry.paths[number] for number in entry.file.tolist()]
    return [tuple(map(tuple, known[name])) if name in known else everyone for name in names]


def _share(group: Ranks, size: int, before: Counter[Ranks], totals: Counter[Ranks]) -> Ranks:
    """The ranks of a group that read the next bytes."""
    start, total = before[group], max(1, totals[group])
    before[group] += size
    return group[start * len(group) // total : (start + size - 1) * len(group) // total + 1]


@lru_cache(maxsize=1024)
def _read_by(shape: tuple[int, ...], stored: HashableBoxes, readers: tuple[Readers, ...]) -> Layout:
    """Cached: most tensors are read whole by one rank, and many are stored in the same boxes."""
    rows = [(row, group) for row, groups in enumerate(readers) for group in groups]
    boxes = stored.boxes.take(ints([row for row, _ in rows]))
    return Layout.boxes(shape, _slices(boxes, [group for _, group in rows]), overlap="replicas")
