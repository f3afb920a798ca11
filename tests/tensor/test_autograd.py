"""Gradients through reshard on real ranks: those of torch's redistribute where it can, and else those of the value."""

from itertools import product

import numpy as np
import pytest
import torch
from devices import device_type, there
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


def start(y, mesh, placements):
    """The same backward, begun at y itself: less for torch to do."""
    y.backward(dtensor(weights(tuple(y.shape)), mesh, whole_of(placements)))


def gradients(mesh, shape, source, target, backward):
    """The gradients of x by our move and by torch's (None where it cannot make the move)."""
    found = []
    for move in [lambda x: sw.reshard(x, (mesh, target)), lambda x: x.redistribute(mesh, target)]:
        if found and not torch_can(source, target):
            return found[0], None
        x = dtensor(numbers(shape), mesh, source).requires_grad_()
        y = move(x)
        assert y.requires_grad
        backward(y, mesh, target)
        found.append(x.grad)
    return found


def check_pairs(ranks, mesh_shape, shape, pairs, backward=weigh):  # noqa: F811
    """All these moves, forth and back; how many torch could judge."""

    def run(rank):
        mesh, judged = init_device_mesh(device_type(), mesh_shape), 0
        for source, target in pairs:
            ours, theirs = gradients(mesh, shape, source, target, backward)
            assert_lies(ours, weights(shape), mesh, whole_of(source))
            if theirs is not None:
                same = ours.placements == theirs.placements  # not always: torch leaves the gradient of terms in terms
                ours, theirs = [g.to_local() if same else g.full_tensor() for g in (ours, theirs)]
                np.testing.assert_array_equal(ours.numpy(), theirs.numpy(), strict=True)
                judged += 1
        return judged

    n = int(np.prod(mesh_shape))
    assert ranks(n, run) == [sum(torch_can(a, b) for a, b in pairs)] * n


@pytest.mark.devices
@pytest.mark.parametrize("n", [2, 3])
def test_gradients_on_one_axis_are_those_of_redistribute(ranks, n):  # noqa: F811
    check_pairs(ranks, (n,), (5, 7), [((a,), (b,)) for a, b in product(PLACEMENTS, repeat=2)])


def test_gradients_on_two_axes_are_those_of_redistribute(ranks):  # noqa: F811
    pairs = list(product(product(PLACEMENTS, repeat=2), repeat=2))
    ours_alone = [pair for pair in pairs if not torch_can(*pair)]
    check_pairs(ranks, (2, 2), (5, 7), [pair for pair in pairs if torch_can(*pair)] + ours_alone[::4], start)


@pytest.mark.devices
def test_gradients_through_strided_shards_and_averages_are_those_of_the_value(ranks):  # noqa: F811
    strided = (_StridedShard(0, split_factor=2), Shard(0))
    others = [(Shard(1), Replicate()), (Partial("avg"), Shard(0)), (Replicate(), Partial("avg"))]
    pairs = [(strided, strided), *((strided, o) for o in others), *((o, strided) for o in others)]
    check_pairs(ranks, (2, 2), (7, 3), pairs)


# --- from mesh to mesh ------------------------------------------------------------------------------------------------

PLACES = {"0-3": [0, 1, 2, 3], "4-5": [4, 5], "2-5": [[2, 3], [4, 5]], "1-2": [1, 2]}
WAYS = [
    ("0-3", (Shard(0),), "4-5", (Shard(1),)),  # disjoint
    ("0-3", (Partial(),), "4-5", (Replicate(),)),
    ("4-5", (Shard(0),), "0-3", (Shard(1),)),  # to more ranks
    ("4-5", (Replicate(),), "1-2", (Shard(0),)),  # ranks 0 and 3 have neither
    ("0-3", (Shard(1),), "2-5", (Shard(0), Shard(0))),  # overlapping
    ("2-5", (Partial(), Shard(1)), "0-3", (Shard(0),)),
    ("2-5", (Shard(0), Replicate()), "1-2", (Replicate(),)),
]


def meshes():
    """Meshes of a world of six."""
    return {name: DeviceMesh(device_type(), places) for name, places in PLACES.items()}


def leaf(whole, mesh, placements):
    """A DTensor whose gradient is wanted; None outside of its mesh."""
    x = dtensor(whole, mesh, placements)
    return x if x is None else x.requires_grad_()


@pytest.mark.devices
def test_gradients_come_back_from_other_meshes(ranks):  # noqa: F811
    def run(rank):
        known, shape, passed = meshes(), (7, 5), []
        for a, source, b, target in WAYS * 2:  # the second time nobody has to be told
            x = leaf(numbers(shape), known[a], source)
            handle = sw.reshard(x, (known[b], target), async_op=True)
            y = handle.wait()
            if y is None:
                handle.backward()
            else:
                weigh(y, known[b], target)
            assert_lies(None if x is None else x.grad, weights(shape), known[a], whole_of(source))
            passed.append(y is None)
        return sum(passed)

    assert ranks(6, run) == [10, 6, 4, 8, 8, 8]


@pytest.mark.devices
def test_a_pipeline_of_two_meshes_runs_backward_through_both(ranks):  # noqa: F811
    def run(rank):
        known, shape = meshes(), (7, 5)
        first, second = known["0-3"], known["4-5"]
        x = leaf(numbers(shape), first, [Shard(0)])
        there = sw.reshard(x, (second, "S1"), async_op=True)
        y = there.wait()
        back = sw.reshard(None if y is None else y * y, (first, "R"), async_op=True)
        z = back.wait()
        if z is None:
            back.backward()  # and on through y * y
        else:
            weigh(z, first, [Replicate()])
            there.backward()
        assert_lies(None if x is None else x.grad, 2 * numbers(shape) * weights(shape), first, [Shard(0)])
        return (y is None, z is None)

    assert ranks(6, run) == [(True, False)] * 4 + [(False, True)] * 2


def test_a_handle_refuses_backward_where_there_is_something_else_to_call_it_on(ranks):  # noqa: F811
    def run(rank):
        mesh, found = init_device_mesh(device_type(), (2,)), []
        for x in leaf(numbers((4, 4)), mesh, [Shard(0)]), dtensor(numbers((4, 4)), mesh, [Shard(0)]):
            with pytest.raises(sw.ExchangeError, match="nothing to take part in") as caught:
                sw.reshard(x, (mesh, "S1"), async_op=True).backward()
            found.append(caught.type is sw.ExchangeError)
        return found

    assert ranks(2, run) == [[True, True]] * 2


# --- our own container ------------------------------------------------------------------------------------------------

SHAPE = (6, 8)
LAYOUTS = [
    Layout.split(SHAPE, 0, [1, 0, 5]),  # uneven, and nothing on rank 1
    Layout.split(SHAPE, 1, [6, 2], owners=[2, 0]),  # rank 1 is no owner
    Layout.boxes(SHAPE, [(0, (0, 0), (3, 4)), (0, (3, 4), (6, 8)), (1, (0, 4), (3, 8)), (2, (3, 0), (6, 4))]),
    Layout.boxes(SHAPE, [(1, (0, 0), (6, 1)), (1, (0, 1), (6, 2)), (1, (0, 2), (6, 8))]),  # all on one rank
    Layout.cyclic(SHAPE, 1, 3, owners=3),
    Layout.flat(SHAPE, [(0, 0, 11), (1, 11, 30), (2, 30, 48)]),
    Layout.replicated(SHAPE, owners=3),
    Layout.on_mesh(SHAPE, (3,), ["P"]),
]


def sharded(whole, layout, rank):
    """Our container; on ranks that own nothing one without shards."""
    return ShardedTensor([there(torch.from_numpy(b)) for b in scatter(whole.numpy(), layout).get(rank, [])], layout)


def loss_of(y, weight):
    """The part of this rank in a loss in which every cell of y has its weight."""
    return sum((shard * w).sum() for shard, w in zip(y.shards, weight.shards, strict=True))


def assert_shards(found, whole, layout, rank):
    """These are the tensors that the layout gives this rank of the whole."""
    expected = scatter(whole.numpy(), layout).get(rank, [])
    assert len(found) == len(expected)
    for ours, theirs in zip(found, expected, strict=True):
        np.testing.assert_array_equal(ours.numpy(), theirs, strict=True)


@pytest.mark.devices
def test_gradients_of_every_layout_come_back_to_where_the_shards_are(ranks):  # noqa: F811
    pairs = list(product(LAYOUTS, repeat=2))

    def run(rank):
        for source, target in pairs:
            x = sharded(numbers(SHAPE), source, rank).requires_grad_()
            handle = sw.reshard(x, target, async_op=True)
            y = handle.wait()
            if y is None:
                handle.backward()
            else:
                # every replica has the gradient of the value: a loss of one of them, not of their sum
                loss_of(y, sharded(weights(SHAPE), target.whole(), rank)).backward()
            assert_shards([shard.grad for shard in x.shards], weights(SHAPE), source.whole(), rank)
            assert (x.grad is None) == (not x.shards)
            assert x.grad is None or x.grad.layout == source.whole()
        return len(pairs)

    assert ranks(3, run) == [64] * 3


@pytest.mark.devices
def test_gradients_pass_between_dtensors_and_our_container(ranks):  # noqa: F811
    layout = LAYOUTS[2]

    def run(rank):
        mesh = init_device_mesh(device_type(), (3,))
        for placements in [(p,) for p in PLACEMENTS]:
            x = leaf(numbers(SHAPE), mesh, placements)
            y = sw.reshard(x, layout)
            loss_of(y, sharded(weights(SHAPE), layout, rank)).backward()
            assert_lies(x.grad, weights(SHAPE), mesh, whole_of(placements))
            z = sharded(numbers(SHAPE), layout, rank).requires_grad_()
            weigh(sw.reshard(z, (mesh, placements)), mesh, placements)
            assert_shards([shard.grad for shard in z.shards], weights(SHAPE), layout, rank)
        return True

    assert ranks(3, run) == [True] * 3


@pytest.mark.devices
def test_gradients_of_several_moves_of_one_tensor_add_up(ranks):  # noqa: F811
    def run(rank):
        x = sharded(numbers(SHAPE), LAYOUTS[0], rank).requires_grad_()
        targets = LAYOUTS[2], LAYOUTS[4], LAYOUTS[5]
        moved = [sw.reshard(x, target, async_op=True) for target in targets]
        for handle, target in zip(moved, targets, strict=True):
            loss_of(handle.wait(), sharded(weights(SHAPE), target, rank)).backward()
        assert_shards([shard.grad for shard in x.shards], 3 * weights(SHAPE), LAYOUTS[0], rank)
        return True

    assert ranks(3, run) == [True] * 3


# --- gradients of gradients -------------------------------------------------------------------------------------------


@pytest.mark.devices
def test_dtensors_can_be_differentiated_twice(ranks):  # noqa: F811
    ways = [((Shard(0), Shard(1)), (Shard(1), Replicate())), ((Shard(0), Shard(0)), (Replicate(), Shard(1)))]

    def run(rank):
        mesh, whole = init_device_mesh(device_type(), (2, 2)), numbers((5, 3))
        for source, target in ways:
            found = []
            for move in [lambda x, to: sw.reshard(x, (mesh, to)), lambda x, to: x.redistribute(mesh, to)]:
                x = leaf(whole, mesh, source)
                y = move(x, target)
                (first,) = torch.autograd.grad((y * y * y).sum(), x, create_graph=True)
                assert_lies(first.detach(), 3 * whole**2, mesh, source)
                weigh(first, mesh, source)
                found.append(x.grad.full_tensor().numpy())
            np.testing.assert_array_equal(found[0], (6 * whole * weights((5, 3))).numpy(), strict=True)
            np.testing.assert_array_equal(found[0], found[1], strict=True)
        return True

    assert ranks(4, run) == [True] * 4


@pytest.mark.devices
def test_terms_can_be_differentiated_twice(ranks):  # noqa: F811
    def run(rank):
        mesh, whole = init_device_mesh(device_type(), (2,)), numbers((5, 3))
        x = leaf(whole, mesh, [Partial()])
        y = sw.reshard(x, (mesh, "S0"))
        (first,) = torch.autograd.grad((y * y * y).sum(), x, create_graph=True)
        assert_lies(first.detach(), 3 * whole**2, mesh, [Replicate()])
        weigh(first, mesh, [Replicate()])
        assert_lies(x.grad, 6 * whole * weights((5, 3)), mesh, [Replicate()])
        return True

    assert ranks(2, run) == [True] * 2


@pytest.mark.devices
def test_our_container_can_be_differentiated_twice(ranks):  # noqa: F811
    ways = [(LAYOUTS[0], LAYOUTS[2]), (LAYOUTS[2], LAYOUTS[5]), (LAYOUTS[4], LAYOUTS[0])]

    def run(rank):
        whole = numbers(SHAPE)
        for source, target in ways:
            x = sharded(whole, source, rank).requires_grad_()
            y = sw.reshard(x, target)
            cubes = sum((shard * shard * shard).sum() for shard in y.shards)
            first = torch.autograd.grad(cubes, x.shards, create_graph=True)
            assert_shards([grad.detach() for grad in first], 3 * whole**2, source, rank)
            loss_of(ShardedTensor(first, source), sharded(weights(SHAPE), source, rank)).backward()
            assert_shards([shard.grad for shard in x.shards], 6 * whole * weights(SHAPE), source, rank)
        return True

    assert ranks(3, run) == [True] * 3


# --- dtypes, and where there is no graph ------------------------------------------------------------------------------


@pytest.mark.devices
@pytest.mark.parametrize(("dtype", "cast"), [(torch.float32, torch.bfloat16), (torch.float32, torch.float64)])
def test_the_gradient_of_a_cast_has_the_dtype_of_the_source(ranks, dtype, cast):  # noqa: F811
    def run(rank):
        mesh, ones = init_device_mesh(device_type(), (2, 2)), torch.ones(5, 7, dtype=dtype)
        for source, target in product([(Shard(0), Shard(1)), (Partial(), Shard(0))], [(Shard(1), Shard(1))]):
            x = leaf(ones, mesh, source)
            y = sw.reshard(x, (mesh, target), dtype=cast)
            assert y.dtype == cast
            assert_lies(y.detach().to(dtype), ones, mesh, target)  # numpy has no bfloat16
            (y * 3).sum().backward()
            assert_lies(x.grad, 3 * ones, mesh, whole_of(source))
        z = ShardedTensor(torch.ones(5 if rank == 0 else 1, 2, dtype=dtype), "8x2/split0=5,1,1,1@4").requires_grad_()
        (sw.reshard(z, "8x2/S0@4", dtype=cast).local_tensor() * 3).sum().backward()
        np.testing.assert_array_equal(z.local_tensor().grad.numpy(), 3 * torch.ones_like(z.local_tensor()).detach())
        return x.grad.dtype, z.local_tensor().grad.dtype

    assert ranks(4, run) == [(dtype, dtype)] * 4


@pytest.mark.devices
def test_without_gradients_there_is_no_graph(ranks):  # noqa: F811
    def run(rank):
        mesh, found = init_device_mesh(device_type(), (2,)), []
        x, z = leaf(numbers((5, 3)), mesh, [Shard(0)]), sharded(numbers((4, 2)), Layout.chunk((4, 2), 0, 2), rank)
        with torch.no_grad():
            found += [sw.reshard(x, (mesh, "S1")), sw.reshard(z.requires_grad_(), "4x2/S1@2").local_tensor()]
        found += [sw.reshard(x.detach(), (mesh, "S1")), sw.reshard(z.detach(), "4x2/S1@2").local_tensor()]
        found += [sw.reshard(x.detach().to(torch.int64), (mesh, "S1"))]
        assert isinstance(found[0], DTensor)
        with pytest.raises(sw.ExchangeError, match="nothing to take part in"):
            sw.reshard(x.detach(), (mesh, "S1"), async_op=True).backward()
        return [(y.requires_grad, y.grad_fn) for y in found]

    assert ranks(2, run) == [[(False, None)] * 5] * 2


@pytest.mark.devices
def test_ranks_that_disagree_on_the_gradient_all_raise(ranks):  # noqa: F811
    def run(rank):
        mesh, found = init_device_mesh(device_type(), (3,)), []
        x = dtensor(numbers((5, 3)), mesh, [Shard(0)]).requires_grad_(rank != 1)
        z = sharded(numbers(SHAPE), LAYOUTS[2], rank).requires_grad_(rank == 2)
        moves = [lambda: sw.reshard(x, (mesh, "S1")), lambda: sw.reshard(z, LAYOUTS[4])]
        for move in moves:
            with pytest.raises(sw.ExchangeError, match="disagree on the gradient") as caught:
                move()
            found.append(str(caught.value))
        with torch.set_grad_enabled(rank > 0), pytest.raises(sw.ExchangeError, match="disagree on the gradient"):
            sw.reshard(z.requires_grad_(), LAYOUTS[4])
        after = sw.reshard(z, LAYOUTS[4])  # the group is still good
        assert_shards(after.detach().shards, numbers(SHAPE), LAYOUTS[4], rank)
        return found

    reports = ranks(3, run)
    assert reports[0] == reports[1] == reports[2]
