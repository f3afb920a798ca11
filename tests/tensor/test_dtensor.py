"""DTensors from any placements to any others, on real ranks: torch's redistribute and the whole tensor are the judges."""

from itertools import product
from random import Random

import numpy as np
import pytest
import torch
import torch.distributed as dist
from dtensors import PLACEMENTS, assert_lies, dtensor, layout_on, numbers, torch_can
from ranks import ranks  # noqa: F401  pytest looks fixtures up by name
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard
from torch.distributed.tensor.placement_types import _StridedShard

import shardwise as sw

WITH_OPS = (*PLACEMENTS, Partial("avg"), Partial("max"), Partial("min"))
NESTED = [  # dim 0 split by several axes, from left to right and from right to left
    (Shard(0), Shard(0)),
    (_StridedShard(0, split_factor=2), Shard(0)),
    (_StridedShard(0, split_factor=3), Shard(0)),
    (_StridedShard(0, split_factor=2), _StridedShard(0, split_factor=2)),
    (_StridedShard(0, split_factor=2), Replicate()),
    (Partial(), _StridedShard(1, split_factor=3)),
]


def moved_rightly(whole, mesh, source, target):
    """One move, held against the whole tensor, and against torch's where it can make the move."""
    x = dtensor(whole, mesh, source)
    found = sw.reshard(x, (mesh, target))
    assert_lies(found, whole, mesh, target)
    if torch_can(source, target):
        theirs = x.redistribute(mesh, target)
        assert found.placements == theirs.placements
        if not any(p.is_partial() for p in target):  # terms are ours to choose
            np.testing.assert_array_equal(found.to_local().numpy(), theirs.to_local().numpy(), strict=True)
    return True


def count_moves(ranks, mesh_shape, cases):  # noqa: F811
    """All these moves (shape, source, target) in one run of the ranks."""

    def run(rank):
        mesh = init_device_mesh("cpu", mesh_shape)
        return sum(moved_rightly(numbers(shape), mesh, source, target) for shape, source, target in cases)

    n = int(np.prod(mesh_shape))
    assert ranks(n, run) == [len(cases)] * n


@pytest.mark.parametrize("n", [2, 3])
def test_every_pair_of_placements_on_one_axis_gives_what_torch_gives(ranks, n):  # noqa: F811
    shapes = [(5, 7), (7, 3, 4), (1, 2), (0, 3), (4, 0)]  # uneven, fewer rows than ranks, and no cells at all
    cases = [(s, (a,), (b,)) for s in shapes[:2] for a, b in product(WITH_OPS, repeat=2)]
    cases += [(s, (a,), (b,)) for s in shapes[2:] for a, b in product(PLACEMENTS, repeat=2)]
    count_moves(ranks, (n,), cases)


@pytest.mark.parametrize(("mesh", "shape"), [((2, 2), (5, 7)), ((2, 3), (7, 3, 4))])
def test_every_pair_of_placements_on_two_axes_gives_what_torch_gives(ranks, mesh, shape):  # noqa: F811
    both = list(product(PLACEMENTS, repeat=2))
    count_moves(ranks, mesh, [(shape, a, b) for a, b in product(both, repeat=2)])


def test_small_and_empty_tensors_move_on_two_axes(ranks):  # noqa: F811
    both, draw = list(product(PLACEMENTS, repeat=2)), Random(1)
    shapes = [(1, 1), (3, 2), (0, 3), (4, 0), (1, 0, 5)]
    count_moves(ranks, (2, 3), [(draw.choice(shapes), draw.choice(both), draw.choice(both)) for _ in range(60)])


def test_nested_and_strided_shards_move_to_all_others_and_back(ranks):  # noqa: F811
    plain = [(Replicate(), Replicate()), (Shard(0), Shard(1)), (Shard(1), Shard(0)), (Partial(), Shard(0))]
    pairs = [*product(NESTED, plain), *product(plain, NESTED), *product(NESTED, repeat=2)]
    count_moves(ranks, (2, 2), [((13, 5), a, b) for a, b in pairs])


def test_nested_and_strided_shards_move_between_axes_of_different_sizes(ranks):  # noqa: F811
    count_moves(ranks, (2, 3), [(shape, a, b) for shape in [(13, 5), (4, 3, 2)] for a, b in product(NESTED, repeat=2)])


def test_a_sample_of_all_placements_moves_on_three_axes(ranks):  # noqa: F811
    draw, words = Random(3), [*PLACEMENTS, Shard(0), _StridedShard(0, split_factor=2), _StridedShard(1, split_factor=3)]
    shapes = [(5, 7), (7, 3, 4), (13, 2), (1, 3)]

    def three():
        return tuple(draw.choice(words) for _ in range(3))

    cases = [(draw.choice(shapes), three(), three()) for _ in range(60)]
    cases += [((13, 7), (Shard(0), Shard(0), Shard(0)), (Shard(1), Shard(1), Shard(1)))]
    cases += [((13, 7), (Partial(), Partial(), Partial()), (Shard(0), Shard(1), Shard(0)))]
    count_moves(ranks, (2, 2, 2), cases)
