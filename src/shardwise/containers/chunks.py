"""A sharded tensor as torch's distributed checkpoints (DCP) see it: boxes that are written once, and read anywhere.

DCP knows a chunk by its tensor's name and its first cell, and keeps one of those that have both in common: equal boxes
of several ranks are replicas, of which it picks one. Other overlaps it cannot say, so each cell of those is written by
the lowest rank that holds it.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from typing import TYPE_CHECKING, NamedTuple

import torch

from shardwise.errors import LayoutError
from shardwise.exchange import view_of
from shardwise.exchange.messages import Tensors
from shardwise.geometry import Box, Boxes, Places, ints
from shardwise.layout import Layout, local_shapes, places_of

if TYPE_CHECKING:
    from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, MetadataIndex
    from torch.distributed.checkpoint.planner import WriteItem


class Chunk(NamedTuple):
    """A box of cells of an owner, inside the piece of that number; written by this owner, or only read."""

    piece: int
    box: Box
    written: bool


@dataclass(frozen=True)
class Chunks:
    """All cells of an owner. Those of its boxes that begin with the same cell are equal."""

    all: tuple[Chunk, ...]

    @cached_property
    def by_corner(self) -> dict[tuple[int, ...], list[int]]:
        """The numbers of the boxes with that first cell."""
        numbers = dict[tuple[int, ...], list[int]]()
        for number, chunk in enumerate(self.all):
            numbers.setdefault(chunk.box.lo, []).append(number)
        return numbers


@lru_cache(maxsize=1024)
def chunks_of(layout: Layout, owner: int) -> Chunks:
    """What an owner writes and reads.

    >>> both = Layout.boxes((8,), [(0, (0,), (6,)), (1, (4,), (8,))], overlap="replicas")
    >>> [(str(chunk.box), chunk.written) for chunk in chunks_of(both, 1).all]
    [('[6:8]', True), ('[4:6]', False)]
    """
    chunks = list[Chunk]()
    for number, piece in enumerate(layout.pieces(owner) if owner in layout else ()):
        written = _minus([piece.box], _before(layout, owner, number, piece.box))
        chunks += [Chunk(number, box, True) for box in written]
        chunks += [Chunk(number, box, False) for box in _minus([piece.box], written)]
    return Chunks(tuple(_cut_apart(chunks)))


def _minus(boxes: list[Box], others: Iterable[Box]) -> list[Box]:
    for other in others:
        boxes = [part for box in boxes for part in box.minus(other)]
    return boxes


def _before(layout: Layout, owner: int, number: int, box: Box) -> list[Box]:
    """Boxes whose owners write the cells that they have in common with this one; none where all replicas are equal."""
    meeting = [
        (other, at, piece.box)
        for other in layout.owners(box)
        for at, piece in enumerate(layout.pieces(other))
        if (other, at) != (owner, number) and piece.box & box
    ]
    if all(other != owner and theirs == box for other, _, theirs in meeting):
        return []
    return [theirs for other, at, theirs in meeting if (other, at) < (owner, number)]


def _cut_apart(chunks: list[Chunk]) -> list[Chunk]:
    """The same cells, cut where boxes with one first cell are not equal: an owner may hold overlapping pieces."""
    ends = dict[tuple[int, ...], tuple[int, ...]]()
    for _, box, _ in chunks:
        ends[box.lo] = tuple(map(min, ends.get(box.lo, box.hi), box.hi))
    if all(box.hi == ends[box.lo] for _, box, _ in chunks):
        return chunks
    cut = list[Chunk]()
    for piece, box, written in chunks:
        core = Box(box.lo, ends[box.lo])
        cut += [Chunk(piece, part, written) for part in (core, *box.minus(core))]
    return _cut_apart(cut)


def write_items(fqn: str, shards: Tensors, layout: Layout, owner: int) -> list[WriteItem]:
    """DCP's items of what this rank writes; what a checkpoint cannot hold is refused before anything is written."""
    from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, MetadataIndex, TensorProperties
    from torch.distributed.checkpoint.planner import TensorWriteData, WriteItem, WriteItemType

    _check(fqn, layout, shards)

    def item(box: Box) -> WriteItem:
        offsets, sizes = _offset_and_size(box)
        properties = TensorProperties.create_from_tensor(shards[0].detach())
        data = TensorWriteData(ChunkStorageMetadata(offsets, sizes), properties, torch.Size(layout.shape))
        return WriteItem(MetadataIndex(fqn, offsets), WriteItemType.SHARD, tensor_data=data)

    if 0 in layout.shape:  # an empty box still says that there is such a tensor
        return [item(Box((0,) * layout.ndim, layout.shape))] if shards else []
    return [item(chunk.box) for chunk in chunks_of(layout, owner).all if chunk.written]


def chunk_list(layout: Layout, owner: int) -> list[ChunkStorageMetadata]:
    """DCP's chunks of what this rank reads."""
    from torch.distributed.checkpoint.metadata import ChunkStorageMetadata

    return [ChunkStorageMetadata(*_offset_and_size(chunk.box)) for chunk in chunks_of(layout, owner).all]


def tensor_shard(index: MetadataIndex, shards: Tensors, layout: Layout, owner: int) -> torch.Tensor:
    """The memory of a chunk, apart from autograd. Of several with one first cell the index says which one is read."""
    known = chunks_of(layout, owner)
    numbers = known.by_corner.get(tuple(index.offset or ()), [])
    if 0 in layout.shape and shards:
        return shards[0].new_empty(layout.shape)
    if not numbers:
        raise ValueError(
            f"Could not find shard at '{index.offset}' for FQN: '{index.fqn}': rank {owner} holds {layout!r}"
        )
    row, box, _ = known.all[index.index if index.index in numbers else numbers[0]]
    places = _places(layout, owner, tuple(shard.stride() for shard in shards))
    (cut,) = places.inside(ints([row]), Boxes.of([box], layout.ndim)).windows()
    return view_of(cut, [shard.detach() for shard in shards])


@lru_cache(maxsize=64)
def _places(layout: Layout, owner: int, strides: tuple[tuple[int, ...], ...]) -> Places:
    return places_of(layout, owner, strides)


def _offset_and_size(box: Box) -> tuple[torch.Size, torch.Size]:
    """Where it begins, and its size."""
    return torch.Size(box.lo), torch.Size(box.shape)


def _check(fqn: str, layout: Layout, shards: Tensors) -> None:
    """Refuse what DCP cannot hold."""
    from shardwise.containers.memory import check_memory  # which knows ShardedTensors

    if layout.op is not None:
        raise LayoutError(
            f"dcp.save: {fqn!r} lies as {layout!r}, and a checkpoint cannot hold partial values: reduce them first, "
            f"shardwise.reshard(x, x.layout.whole())"
        )
    for shard in shards:
        check_memory(shard, f"dcp.save: {fqn!r}")


def check_shards(shards: Sequence[object], layout: Layout, me: int) -> None:
    """Refuse shards that are not what the layout gives this rank."""
    expected = local_shapes(layout, me)
    tensors = [shard for shard in shards if isinstance(shard, torch.Tensor)]
    if len(tensors) < len(shards):
        strange = next(shard for shard in shards if not isinstance(shard, torch.Tensor))
        raise LayoutError(f"a shard must be a tensor, not {strange!r}")
    shapes = tuple(tuple(tensor.shape) for tensor in tensors)
    if shapes != expected:
        raise LayoutError(
            f"{layout!r} gives rank {me} tensors of shapes {list(expected)}, but it brought {list(shapes)}"
        )
    if len({(tensor.dtype, tensor.device) for tensor in tensors}) > 1:
        kinds = sorted({f"{tensor.dtype} on {tensor.device}" for tensor in tensors})
        raise LayoutError(f"the shards of a rank must have one dtype and device, not {', '.join(kinds)}")
