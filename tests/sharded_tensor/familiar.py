"""Specs, shards and checks for containers under torch's names, and torch's own names: what these tests share."""

from itertools import product
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
from torch.distributed import _shard
from torch.distributed._shard import sharded_tensor as torchs_tensor
from torch.distributed._shard import sharding_spec as torchs_spec

from shardwise import sharded_tensor as ours

TORCH = SimpleNamespace(**{**vars(torchs_tensor), **vars(torchs_spec), **vars(_shard)})
BOTH = pytest.mark.parametrize("api", [ours, TORCH], ids=["ours", "torch"])
DTYPES = (
    *(torch.bool, torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64, torch.uint16, torch.uint32),
    *(torch.uint64, torch.float16, torch.bfloat16, torch.float32, torch.float64, torch.complex64, torch.complex128),
    *(torch.float8_e4m3fn, torch.float8_e5m2, torch.float8_e4m3fnuz, torch.float8_e5m2fnuz, torch.float8_e8m0fnu),
)


def placed(*order):
    return [f"rank:{rank}/cpu" for rank in order]


def rows(*order, api=ours):
    return api.ChunkShardingSpec(0, placed(*order))


def columns(*order, api=ours):
    return api.ChunkShardingSpec(1, placed(*order))


def listed(*boxes, api=ours):
    """Boxes of (offsets, sizes, rank)."""
    return api.EnumerableShardingSpec([api.ShardMetadata(list(lo), list(size), *placed(r)) for lo, size, r in boxes])


def grid(height, width, *order, api=ours):
    """Four blocks that meet at (height // 3, width // 2), in the order of these ranks."""
    ys, xs = [(0, height // 3), (height // 3, height)], [(0, width // 2), (width // 2, width)]
    boxes = [((y, x), (end - y, stop - x)) for (y, end), (x, stop) in product(ys, xs)]
    return listed(*((*box, rank) for box, rank in zip(boxes, order, strict=True)), api=api)


def numbers(*shape, dtype=torch.float64):
    return torch.arange(torch.Size(shape).numel(), dtype=torch.float64).reshape(shape).to(dtype)


def part(whole, metadata):
    return ours.narrow_tensor(whole, metadata).clone()


def mine(whole, spec, api=ours):
    """This rank's shards of a tensor."""
    metadata = spec.build_metadata(whole.size(), api.TensorProperties()).shards_metadata
    return [api.Shard(part(whole, m), m) for m in metadata if m.placement.rank() == dist.get_rank()]


def corners(shards, size=None):
    """Where they are; with a size, empty ones that lie past its end are at the end."""

    def offsets(shard):
        return tuple(shard.shard_offsets if size is None else map(min, shard.shard_offsets, size))

    return sorted((offsets(m), tuple(m.shard_sizes), str(m.placement)) for m in shards)


def same(found, expected):
    """Equal to the last bit."""
    assert (found.dtype, found.shape) == (expected.dtype, expected.shape)
    left, right = (tensor.detach().contiguous().flatten().view(torch.uint8) for tensor in (found, expected))
    torch.testing.assert_close(left, right, rtol=0, atol=0)


def check(st, whole, spec):
    """The container has the whole by that spec, and this rank has its shards."""
    expected = spec.build_metadata(whole.size(), ours.TensorProperties()).shards_metadata
    assert (st.sharding_spec(), tuple(st.size()), st.dtype) == (spec, tuple(whole.shape), whole.dtype)
    assert corners(st.metadata().shards_metadata, whole.size()) == corners(expected, whole.size())
    assert corners((s.metadata for s in st.local_shards()), whole.size()) == corners(
        (m for m in expected if m.placement.rank() == dist.get_rank()), whole.size()
    )
    for shard in st.local_shards():
        same(shard.tensor, part(whole, shard.metadata))


def refused(kind, call):
    """What it says, once it is refused; the group can be used after that."""
    with pytest.raises(kind) as error:
        call()
    same(ours.ones(rows(*range(dist.get_world_size())), 8).gather(None), torch.ones(8))
    return str(error.value)


def same_refusals(found, **words):
    """On all ranks the same messages, with these words."""
    assert found == [found[0]] * len(found)
    for name, word in words.items():
        assert word in found[0][name]
