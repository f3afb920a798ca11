"""Experts move to other ranks, and sequences to heads and back, between real processes."""

import numpy as np
import pytest
import torch
from devices import device_type
from ranks import ranks  # noqa: F401
from sharded import expect, held
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, distribute_tensor

import shardwise as sw

EXPERTS, ROWS, COLUMNS = 8, 4, 6
BEFORE = [0, 0, 1, 1, 2, 2, 3, 3]
AFTER = [0, (1, 3), 1, 2, (0, 1, 2, 3), 2, 3, 0]  # experts 1 and 4 are hot
VALUES = np.arange(EXPERTS * ROWS * COLUMNS, dtype=np.float32).reshape(EXPERTS, ROWS, COLUMNS)


def received(before, after):
    """How many experts ranks receive that they did not have."""
    want = [{holders} if isinstance(holders, int) else set(holders) for holders in after]
    return sum(len(holders - {had}) for had, holders in zip(before, want, strict=True))


@pytest.mark.devices
def test_experts_are_placed_anew_with_the_fewest_bytes(ranks):  # noqa: F811
    source, target = (sw.Layout.experts(VALUES.shape, 0, owners) for owners in (BEFORE, AFTER))
    made = sw.plan(source, target, itemsize=4)
    assert made.bytes_moved == made.lower_bound == received(BEFORE, AFTER) * ROWS * COLUMNS * 4

    def move(rank):
        placed = sw.reshard(held(VALUES, source, rank), target)
        expect(placed, VALUES, target, rank)
        back = sw.reshard(placed, source, verify=True)
        expect(back, VALUES, source, rank)
        return (placed.shards[0][:, 0, 0] // (ROWS * COLUMNS)).tolist()  # the experts in this rank's buffer

    assert ranks(4, move) == [[0, 4, 7], [1, 2, 4], [3, 4, 5], [1, 4, 6]]


def test_a_resharder_places_experts_again_and_again(ranks):  # noqa: F811
    source, target = (sw.Layout.experts(VALUES.shape, 0, owners) for owners in (BEFORE, AFTER))

    def sync(rank):
        mine, theirs = {"w": held(VALUES, source, rank)}, {"w": held(np.zeros_like(VALUES), target, rank)}
        resharder = sw.Resharder(mine, theirs)
        for factor in (1, 2):
            mine["w"].shards[0].mul_(factor)
            resharder.run()
        expect(theirs["w"], 2 * VALUES, target, rank)
        return resharder.plan.bytes_moved == resharder.plan.lower_bound

    assert ranks(4, sync) == [True] * 4


@pytest.mark.devices
def test_ulysses_is_a_reshard_there_and_back(ranks):  # noqa: F811
    values = np.arange(10 * 4 * 3, dtype=np.float32).reshape(10, 4, 3)  # an uneven sequence
    outside, inside = sw.Layout.ulysses(values.shape, sequence=0, heads=1, owners=4)

    def attend(rank):
        heads = sw.reshard(held(values, outside, rank), inside)
        expect(heads, values, inside, rank)
        expect(sw.reshard(heads, outside), values, outside, rank)
        return tuple(heads.shards[0].shape)

    assert ranks(4, attend) == [(10, 1, 3)] * 4


def test_dtensors_refuse_placements_that_torch_does_not_have(ranks):  # noqa: F811
    words = ["heads0=2", "fused0=4,4", "zigzag0", "cyclic0=2", "experts0=0,1", sw.Heads(0, 2)]

    def ask(rank):
        mesh = init_device_mesh(device_type(), (2,))
        whole = distribute_tensor(torch.arange(8.0), mesh, [Replicate()])
        for word in words:
            with pytest.raises(sw.ShardwiseError, match=f"DTensor has no placement {word}.*Layout.on_mesh"):
                sw.reshard(whole, (mesh, [word]))
        heads = sw.reshard(whole, sw.Layout.on_mesh((8,), (2,), ["fused0=4,4"]))
        return heads.shards[0].tolist()

    assert ranks(2, ask) == [[0, 1, 4, 5], [2, 3, 6, 7]]
