"""Meshes whose ranks do not rise: a DTensor is what torch scattered and what full_tensor reads, or it is refused."""

from itertools import permutations, product
from random import Random

import numpy as np
import pytest
import torch
import torch.distributed as dist
from devices import device_type
from dtensors import layout_on, numbers
from ranks import ranks  # noqa: F401  pytest looks fixtures up by name
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.placement_types import _StridedShard

import shardwise as sw

WHOLE = (Shard(0), Shard(1), Replicate())
EVEN, UNEVEN = (4, 8), (5, 7)


def everywhere(flag):
    """True where it is true on every rank."""
    found = [None] * dist.get_world_size()
    dist.all_gather_object(found, flag)
    return all(found)


def assert_equal(found, wanted):
    np.testing.assert_array_equal(found.numpy(), wanted.numpy(), strict=True)


def check_mesh(places, shape, placements, line):
    """True where torch returns what it scattered, and then so do we, there and back; else it is refused both ways."""
    mesh, whole = DeviceMesh(device_type(), places), numbers(shape)
    theirs = distribute_tensor(whole, mesh, placements)
    if not everywhere(torch.equal(theirs.full_tensor(), whole)):
        with pytest.raises(sw.ShardwiseError, match="use a mesh whose ranks rise"):
            sw.reshard(theirs, (line, "R"))
        with pytest.raises(sw.ShardwiseError, match="use a mesh whose ranks rise"):
            sw.reshard(distribute_tensor(whole, line, [Shard(1)]), (mesh, placements))
        return False
    assert_equal(sw.reshard(theirs, (line, "R")).to_local(), whole)
    ours = sw.reshard(distribute_tensor(whole, line, [Shard(1)]), (mesh, placements))
    assert_equal(ours.to_local(), theirs.to_local())
    assert_equal(ours.full_tensor(), whole)
    assert_equal(ours.redistribute(mesh, [Replicate()] * mesh.ndim).to_local(), whole)
    return True


def check_meshes(ranks, cases):  # noqa: F811
    """How many of the cases torch itself can hold."""

    def run(rank):
        line = DeviceMesh(device_type(), list(range(dist.get_world_size())))
        return sum(check_mesh(*case, line) for case in cases)

    return ranks(int(np.size(cases[0][0])), run)


@pytest.mark.parametrize("n", [3, 4])
def test_every_order_of_ranks_on_one_axis_is_read_as_torch_gathers_it(ranks, n):  # noqa: F811
    shapes = [(n, 2 * n), UNEVEN]
    cases = [(list(p), s, (w,)) for p, s, w in product(permutations(range(n)), shapes, WHOLE)][:: 1 if n == 3 else 5]
    assert check_meshes(ranks, cases)[0] > len(cases) // 2


@pytest.mark.parametrize("shape", [EVEN, UNEVEN])
def test_every_order_of_ranks_on_two_axes_is_read_as_torch_gathers_it_or_refused(ranks, shape):  # noqa: F811
    squares = [np.reshape(p, (2, 2)).tolist() for p in permutations(range(4))]
    cases = [(square, shape, both) for square, both in product(squares, product(WHOLE, repeat=2))]
    assert check_meshes(ranks, cases[::5])[0] > 10


def test_orders_on_axes_of_different_sizes_are_read_as_torch_gathers_them_or_refused(ranks):  # noqa: F811
    draw, places = Random(4), np.arange(6).reshape(2, 3)
    orders = [places[[1, 0]][:, [2, 0, 1]], places[:, [1, 2, 0]], places[[1, 0]]]
    orders += [np.reshape(draw.sample(range(6), 6), (2, 3)) for _ in range(3)]
    cases = [(order.tolist(), (6, 12), draw.choices(WHOLE, k=2)) for order in orders for _ in range(2)]
    assert check_meshes(ranks, cases)[0] >= 6


# --- what the user put there himself ----------------------------------------------------------------------------------

CONSISTENT = {
    "reversed": ([3, 2, 1, 0], [(Shard(0),), (_StridedShard(0, split_factor=2),), (Partial(),)]),
    "some": ([3, 0, 2], [(Shard(1),), (Partial("max"),)]),
    "rows": ([[2, 3], [0, 1]], [(Shard(0), Partial()), (Partial(), Shard(0)), (Replicate(), Shard(1))]),
    "both": ([[3, 2], [1, 0]], [(Shard(0), Shard(0)), (Partial("avg"), Shard(1)), (Shard(1), Replicate())]),
    "inner": ([[1, 0], [2, 3]], [(Shard(0), Shard(1)), (Shard(0), Shard(0)), (Replicate(), Shard(0))]),
}


def from_local(whole, mesh, placements):
    """Local tensors in the order in which full_tensor reads them, which is asserted; None outside of the mesh."""
    if mesh.get_coordinate() is None:
        return None
    (local,) = sw.testing.scatter(whole.numpy(), layout_on(mesh, placements, tuple(whole.shape)))[dist.get_rank()]
    x = DTensor.from_local(
        torch.from_numpy(local), mesh, placements, run_check=False, shape=whole.shape, stride=(12, 1)
    )
    assert_equal(x.full_tensor(), whole)
    return x


def each_consistent():
    """The name, mesh and placements of every case."""
    return [(DeviceMesh(device_type(), places), p) for places, some in CONSISTENT.values() for p in some]


@pytest.mark.devices
def test_what_from_local_holds_moves_between_all_such_meshes(ranks):  # noqa: F811
    def run(rank):
        whole, cases = numbers((16, 12)), each_consistent()
        for (mesh, source), (other, target) in zip(cases, [*cases[3:], *cases[:3]], strict=True):
            x, model = from_local(whole, mesh, source), from_local(whole, other, target)
            assert sw.layout_of((mesh, source), (16, 12)) == layout_on(mesh, source, (16, 12))
            found = sw.reshard(x, (other, target))
            assert (found is None) == (model is None)
            if found is not None:
                assert_equal(found.full_tensor(), whole)
            room = None if model is None else model.clone()
            sync = sw.Resharder({"w": x}, {"w": room})
            sync.run()
            if room is not None:
                assert_equal(room.full_tensor(), whole)
        return len(cases)

    assert ranks(4, run) == [14] * 4


def test_checkpoints_hold_what_full_tensor_reads(ranks, tmp_path):  # noqa: F811
    def run(rank):
        cases = [(m, p) for m, p in each_consistent() if m.size() == 4 and not any(q.is_partial() for q in p)]
        whole = numbers((16, 12))
        for number, (mesh, placements) in enumerate(cases):
            folder, into = tmp_path / str(number), from_local(torch.zeros_like(whole), mesh, placements)
            sw.checkpoint.save({"w": from_local(whole, mesh, placements)}, folder)
            assert_equal(sw.checkpoint.open(folder)["w"].read(), whole)
            sw.checkpoint.load(folder, into={"w": into})
            assert_equal(into.full_tensor(), whole)
        return len(cases)

    assert ranks(4, run) == [8] * 4


def test_slices_and_flattened_meshes_are_read_as_torch_gathers_them(ranks):  # noqa: F811
    def run(rank):
        world = DeviceMesh(device_type(), [[3, 1], [2, 0]], mesh_dim_names=("dp", "tp"))
        whole = numbers((4, 8))
        for mesh in (world["dp"], world["tp"], world._flatten("all")):
            for placement, other in product((Shard(0), Shard(1)), repeat=2):
                theirs = distribute_tensor(whole, mesh, [placement])
                assert_equal(sw.reshard(theirs, (mesh, "R")).to_local(), whole)
                ours = sw.reshard(theirs, (mesh, [other]))
                assert_equal(ours.full_tensor(), whole)
                assert_equal(ours.to_local(), distribute_tensor(whole, mesh, [other]).to_local())
        return True

    assert ranks(4, run) == [True] * 4


def test_a_group_that_keeps_the_given_order_is_read_in_that_order_beside_an_equal_mesh_that_does_not(ranks):  # noqa: F811
    def run(rank):
        order, whole = [3, 1, 0, 2], numbers((4, 8))
        plain = DeviceMesh(device_type(), order)
        kept = DeviceMesh.from_group(dist.new_group(order, sort_ranks=False), "cpu")
        found = []
        for mesh in (plain, kept, plain):
            theirs = distribute_tensor(whole, mesh, [Shard(0)])
            assert_equal(sw.reshard(theirs, (mesh, "R")).to_local(), whole)
            found.append(int(theirs.to_local()[0, 0]) // 8)
        assert plain == kept
        return found

    assert ranks(4, run) == [[0, 2, 0], [1, 1, 1], [2, 3, 2], [3, 0, 3]]


# --- refusals ---------------------------------------------------------------------------------------------------------


def test_what_is_refused_is_refused_on_every_rank_and_leaves_the_group_usable(ranks):  # noqa: F811
    cases = [
        (
            [2, 0, 1],
            UNEVEN,
            [Shard(0)],
            r"rank 1 has a shard of shape \(2, 7\) for torch's collectives, but of \(1, 7\)",
        ),
        ([[3, 1], [0, 2]], EVEN, [Shard(0), Shard(1)], "lines along axis 0 order their ranks differently"),
        ([[3, 1], [0, 2]], EVEN, [Partial(), Shard(0)], "lines along axis 1 order their ranks differently"),
        (
            [[1, 0], [2, 3]],
            EVEN,
            [_StridedShard(0, split_factor=2), Shard(0)],
            "lines along axis 1 order their ranks differently",
        ),
    ]

    def run(rank):
        line, count = DeviceMesh(device_type(), [0, 1, 2, 3]), 0
        for places, shape, placements, words in cases:
            mesh, whole = DeviceMesh(device_type(), places), numbers(shape)
            x = DTensor.from_local(whole.clone(), mesh, placements, run_check=False, shape=shape, stride=whole.stride())
            if rank not in mesh.mesh:
                x = None
            for refused in (
                lambda x=x: sw.reshard(x, (line, "R")),
                lambda x=x: sw.fingerprint(x, group=dist.group.WORLD),
                lambda m=mesh, p=placements, w=whole: sw.reshard(distribute_tensor(w, line, [Shard(1)]), (m, p)),
            ):
                with pytest.raises(sw.ShardwiseError, match=words):
                    refused()
                count += 1
        whole = numbers(EVEN)
        assert_equal(sw.reshard(distribute_tensor(whole, line, [Shard(0)]), (line, "R")).to_local(), whole)
        return count

    assert ranks(4, run, timeout=30) == [12] * 4
