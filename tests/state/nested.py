"""Sharded tensors of sharded tensors on four ranks, as FSDP over TP makes them: built box by box, in every make."""

from types import SimpleNamespace

import torch
import torch.distributed as dist
from models import held, lies, numbers, same
from torch.distributed._shard import sharded_tensor as torchs_tensor
from torch.distributed._shard import sharding_spec as torchs_spec
from torch.distributed._shard.sharded_tensor import metadata as torchs_metadata
from torch.distributed.tensor import DTensor, Partial

import shardwise as sw

TORCH = SimpleNamespace(**{**vars(torchs_spec), **vars(torchs_tensor), **vars(torchs_metadata)})
WHOLE = numbers(8, 6)
QUARTERS = sw.Layout.boxes(
    (8, 6), [(2 * i + j, (4 * i, 3 * j), (4 * i + 4, 3 * j + 3)) for i in (0, 1) for j in (0, 1)]
)


def by_boxes(size, boxes, tensors, api=TORCH):
    """A ShardedTensor from boxes (offsets, sizes, rank) of all ranks that this one knows, and its own tensors."""
    shards = [api.ShardMetadata(list(lo), list(sizes), f"rank:{rank}/cpu") for lo, sizes, rank in boxes]
    dtype = next((tensor.dtype for tensor in tensors), torch.float32)
    metadata = api.ShardedTensorMetadata(shards, torch.Size(size), api.TensorProperties(dtype))
    mine = [m for m in shards if m.placement.rank() == dist.get_rank()]
    local = [api.Shard(tensor, m) for tensor, m in zip(tensors, mine, strict=True)]
    return api.ShardedTensor._init_from_local_shards_and_global_metadata(local, metadata)


def columns(part, pair, api=TORCH):
    """A part that the two ranks of a pair have by columns."""
    at, height = dist.get_rank() % 2, part.shape[0]
    width = part.shape[1] // 2
    boxes = [((0, 0), (height, width), 2 * pair), ((0, width), (height, part.shape[1] - width), 2 * pair + 1)]
    return by_boxes(part.shape, boxes, [part[:, :width].clone() if at == 0 else part[:, width:].clone()], api)


def rows_of(inner, size=(8, 6), api=TORCH):
    """Two halves, one for each pair of ranks; a rank knows only of its own column of ranks, as FSDP over TP does."""
    rank, half = dist.get_rank(), size[0] // 2
    boxes = [((half * pair, 0), (half, size[1]), 2 * pair + rank % 2) for pair in (0, 1)]
    return by_boxes(size, boxes, [inner], api)


def half(whole=WHOLE):
    """The rows of this rank's pair."""
    return whole.chunk(2)[dist.get_rank() // 2]


def flat(value, **kwargs):
    (found,) = sw.flatten_sharded_tensors({"x": value}, **kwargs).values()
    return found


def is_whole(found, whole, layout):
    """It lies so, can be gathered, and can be resharded."""
    assert found.layout == layout
    if dist.get_rank() in layout:
        lies(found, whole, layout)
    else:
        assert found.shards == ()
    same(found.gather(None), whole)
    turned = sw.Layout.chunk(whole.shape, whole.ndim - 1, [3, 1, 0])
    lies(sw.reshard(found, turned), whole, turned)


def halves():
    """Rows on the two ranks of this column of ranks."""
    return sw.Layout.chunk((8, 6), 0, [dist.get_rank() % 2, 2 + dist.get_rank() % 2])


def in_pair(part):
    """Columns on the two ranks of this pair, as our own container."""
    pair = dist.get_rank() // 2
    return held(part, sw.Layout.chunk(part.shape, 1, [2 * pair, 2 * pair + 1]))


def terms(part, mesh):
    """A DTensor whose terms add up to the part."""
    return DTensor.from_local(part / mesh.size(), mesh, [Partial()], run_check=False)
