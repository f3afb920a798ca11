"""DTensors cut from a whole tensor rank by rank: also those that torch itself cannot scatter. And what they must be."""

from functools import lru_cache

import numpy as np
import torch
import torch._dynamo  # a process imports it with its first DTensor, which takes seconds: once here, not on every rank
import torch.distributed as dist
from devices import there
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard
from torch.distributed.tensor.placement_types import _StridedShard

from shardwise import Layout, Mesh
from shardwise.testing import gather, scatter

PLACEMENTS = (Shard(0), Shard(1), Replicate(), Partial())


def numbers(shape):
    """Whole numbers, all different, in float64: sums and averages of them are exact in any order."""
    return there(_numbers(shape))


@lru_cache
def _numbers(shape):
    """On the CPU: what the parent of a rank keeps must not depend on the device."""
    return torch.arange(1, torch.Size(shape).numel() + 1, dtype=torch.float64, device="cpu").reshape(shape)


@lru_cache(maxsize=1024)
def layout_on(mesh, placements, shape):
    """Where the cells of a DTensor of that shape are: torch scatters along the rising ranks of an axis."""
    ranks = mesh.mesh.numpy()
    for axis, placement in enumerate(placements):
        ranks = np.sort(ranks, axis=axis) if isinstance(placement, Shard | _StridedShard) else ranks
    return Layout.on_mesh(shape, Mesh.of(ranks.shape, ranks=ranks.tolist()), placements)


@lru_cache(maxsize=1024)
def local_of(whole, layout):
    """This rank's only buffer of the whole in that layout. To be read only."""
    (found,) = scatter(whole.numpy(), layout, seed=7)[dist.get_rank()]
    return there(torch.from_numpy(found))


def dtensor(whole, mesh, placements):
    """The whole as a DTensor; None on ranks that are not in the mesh."""
    if mesh.get_coordinate() is None:
        return None
    local = local_of(whole, layout_on(mesh, tuple(placements), tuple(whole.shape)))
    return DTensor.from_local(local, mesh, placements, run_check=False, shape=whole.shape, stride=whole.stride())


def torch_can(source, target):
    """True where DTensor.redistribute makes this move, and rightly."""
    makes_terms = any(b.is_partial() and a != b for a, b in zip(source, target, strict=True))
    return not makes_terms and torch_reads(source) and torch_reads(target)


def torch_reads(placements):
    """True where torch gathers uneven tensors rightly: not from strided shards, nor where a dim is split thrice."""
    split = [p.dim for p in placements if isinstance(p, Shard)]
    return not any(isinstance(p, _StridedShard) for p in placements) and all(split.count(dim) < 3 for dim in split)


def assert_lies(found, whole, mesh, placements):
    """`found` is the whole on this mesh with these placements, on a rank outside of it None."""
    if mesh.get_coordinate() is None:
        assert found is None
        return
    assert type(found) is DTensor
    assert (found.device_mesh, found.placements) == (mesh, tuple(placements))
    assert (found.shape, found.stride(), found.dtype) == (whole.shape, whole.stride(), whole.dtype)
    layout, local = layout_on(mesh, tuple(placements), tuple(whole.shape)), found.to_local()
    assert tuple(local.shape) == layout.local_shape(dist.get_rank())
    if layout.op is None:
        np.testing.assert_array_equal(local.numpy(), local_of(whole, layout).numpy(), strict=True)
    elif torch_reads(placements):
        np.testing.assert_array_equal(found.full_tensor().numpy(), whole.numpy(), strict=True)
    else:
        np.testing.assert_array_equal(gathered(local, layout), whole.numpy(), strict=True)


def gathered(local, layout):
    """The whole array, from the local tensors of all ranks of the world."""
    found = [None] * dist.get_world_size()
    dist.all_gather_object(found, local.numpy())
    return gather({rank: [buffer] for rank, buffer in enumerate(found)}, layout)
