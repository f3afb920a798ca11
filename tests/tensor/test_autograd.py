"""Gradients through reshard on real ranks: those of torch's redistribute where it can, and else those of the value."""

from itertools import product

import numpy as np
import pytest
import torch
from dtensors import PLACEMENTS, assert_lies, dtensor, numbers, torch_can
from ranks import ranks  # noqa: F401  pytest looks fixtures up by name
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard
from torch.distributed.tensor.placement_types import _StridedShard

import shardwise as sw
from shardwise import Layout, ShardedTensor
from shardwise.testing import scatter


def whole_of(placements):
    """How gradients lie: as the value, and whole where that is partial."""
    return tuple(Replicate() if p.is_partial() else p for p in placements)


def weights(shape):
    """What the loss weighs every cell with."""
    return numbers(shape).flip(0) * 3


def weigh(y, mesh, placements):
    """backward of a loss in which every cell of y has its weight."""
    (y * dtensor(weights(tuple(y.shape)), mesh, whole_of(placements))).sum().backward()


def gradients(mesh, shape, source, target):
    """The gradients of x by our move and by torch's (None where it cannot make the move)."""
    found = []
    for move in [lambda x: sw.reshard(x, (mesh, target)), lambda x: x.redistribute(mesh, target)]:
        if found and not torch_can(source, target):
            return found[0], None
        x = dtensor(numbers(shape), mesh, source).requires_grad_()
        y = move(x)
        assert y.requires_grad
        weigh(y, mesh, target)
        found.append(x.grad)
    return found


def check_pairs(ranks, mesh_shape, shape, pairs):  # noqa: F811
    """All these moves, forth and back; how many torch could judge."""

    def run(rank):
        mesh, judged = init_device_mesh("cpu", mesh_shape), 0
        for source, target in pairs:
            ours, theirs = gradients(mesh, shape, source, target)
            assert_lies(ours, weights(shape), mesh, whole_of(source))
            if theirs is not None:
                np.testing.assert_array_equal(ours.full_tensor().numpy(), theirs.full_tensor().numpy(), strict=True)
                judged += 1
        return judged

    n = int(np.prod(mesh_shape))
    assert ranks(n, run) == [sum(torch_can(a, b) for a, b in pairs)] * n


@pytest.mark.parametrize("n", [2, 3])
def test_gradients_on_one_axis_are_those_of_redistribute(ranks, n):  # noqa: F811
    check_pairs(ranks, (n,), (5, 7), [((a,), (b,)) for a, b in product(PLACEMENTS, repeat=2)])


def test_gradients_on_two_axes_are_those_of_redistribute(ranks):  # noqa: F811
    both = list(product(PLACEMENTS, repeat=2))
    check_pairs(ranks, (2, 2), (5, 7), list(product(both, repeat=2)))


def test_gradients_through_strided_shards_and_averages_are_those_of_the_value(ranks):  # noqa: F811
    strided = (_StridedShard(0, split_factor=2), Shard(0))
    others = [(Shard(1), Replicate()), (Partial("avg"), Shard(0)), (Replicate(), Partial("avg"))]
    pairs = [(strided, strided), *((strided, o) for o in others), *((o, strided) for o in others)]
    check_pairs(ranks, (2, 2), (7, 3), pairs)
