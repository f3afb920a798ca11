"""Terms that autograd follows: partial tensors made from local tensors that require gradients, leaves or not."""

from itertools import product

import numpy as np
import pytest
import torch
import torch._dynamo  # a process imports it with its first DTensor, which takes seconds: once here, not on every rank
import torch.distributed as dist
from devices import device_type
from ranks import ranks  # noqa: F401  pytest looks fixtures up by name
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard

import shardwise as sw

OPS = ("sum", "avg", "max", "min", "product")
SHAPES = ((12, 3), (300, 40))  # messages that travel with the agreement, and those of their own


def leaf(shape, rank):
    """Other numbers on every rank, whole ones."""
    count = int(np.prod(shape))
    return ((torch.arange(count, dtype=torch.float64) * (rank + 1)) % 7 + 1).reshape(shape).requires_grad_()


LOCALS = {"a leaf": lambda t: t, "no leaf": lambda t: t * 1.0, "a view": lambda t: t.t().contiguous().t()}


def assert_equal(found, wanted):
    np.testing.assert_array_equal(found.detach().numpy(), wanted.detach().numpy(), strict=True)


def squares(y):
    """A loss with another gradient for every value; of the terms of a partial result, the sum of their values."""
    return (y * y).sum() if not any(p.is_partial() for p in y.placements) else (y * 3).sum()


def through(move, make, op, target, shape, rank, mesh):
    """The result, and the gradient of this rank's local tensor."""
    t = leaf(shape, rank)
    y = move(DTensor.from_local(make(t), mesh, [Partial(op)], run_check=False), (mesh, [target]))
    squares(y).full_tensor().backward()
    return y, t.grad


@pytest.mark.devices
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_terms_from_local_tensors_move_with_gradients_as_torch_moves_them(ranks, shape):  # noqa: F811
    def run(rank):
        mesh = init_device_mesh(device_type(), (2,))
        cases = list(product(OPS, LOCALS.values(), [Replicate(), Shard(0), Shard(1)]))
        for case in [*cases, *((op, LOCALS["no leaf"], Partial(op)) for op in ("sum", "avg"))]:
            (op, make, target) = case
            ours = through(sw.reshard, make, op, target, shape, rank, mesh)
            theirs = through(lambda x, to: x.redistribute(*to), make, op, target, shape, rank, mesh)
            assert_equal(ours[0].to_local(), theirs[0].to_local())
            assert_equal(ours[1], theirs[1])
        return len(cases)

    assert ranks(2, run) == [45] * 2


@pytest.mark.devices
def test_every_way_to_move_takes_terms_that_autograd_follows(ranks):  # noqa: F811
    def run(rank):
        mesh, line = init_device_mesh(device_type(), (2,)), sw.parse("12x3/P@2")
        wanted = sum(leaf((12, 3), r) for r in range(2)).detach()
        for make in LOCALS.values():
            x = DTensor.from_local(make(leaf((12, 3), rank)), mesh, [Partial()], run_check=False)
            own = sw.ShardedTensor(make(leaf((12, 3), rank)), line)
            assert_equal(sw.reshard(x, (mesh, "R"), async_op=True).wait().to_local(), wanted)
            assert_equal(sw.reshard(x, (mesh, "R"), verify=True).to_local(), wanted)
            assert_equal(sw.reshard(own, "12x3/R@2").local_tensor(), wanted)
            assert_equal(own.gather(dst=None), wanted)
            assert sw.fingerprint(x) == sw.fingerprint(own) == sw.fingerprint(sw.ShardedTensor(wanted, "12x3/R@2"))
            room = torch.zeros(12, 3, dtype=torch.float64)
            into = DTensor.from_local(room, mesh, [Replicate()], run_check=False)
            sw.Resharder({"w": x}, {"w": into}).run()
            assert_equal(room, wanted)
            (moved,) = sw.reshard_state_dict({"w": own}, {"w": "12x3/R@2"}).values()
            assert_equal(moved.local_tensor(), wanted)
            with torch.no_grad():
                assert_equal(sw.reshard(x, (mesh, "R"), out=room.zero_()).to_local(), wanted)
        return True

    assert ranks(2, run) == [True] * 2


@pytest.mark.devices
def test_a_gradient_of_terms_stays_terms_where_torch_leaves_it_so(ranks):  # noqa: F811
    words = (Shard(0), Replicate(), Partial())
    same_terms = [(a, b, g) for a, b, g in product(product(words, repeat=2), repeat=3) if _torch_can(a, b, g)]

    def gradient(move, mesh, source, target, arrives):
        x = _dtensor(mesh, source, 1).detach().requires_grad_()
        (found,) = torch.autograd.grad(move(x, (mesh, target)), x, _dtensor(mesh, arrives, 2))
        return found

    def run(rank):
        mesh = init_device_mesh(device_type(), (2, 2))
        for case in same_terms[::3]:
            ours, theirs = (gradient(move, mesh, *case) for move in (sw.reshard, lambda x, to: x.redistribute(*to)))
            assert ours.placements == theirs.placements, case
            assert_equal(ours.to_local(), theirs.to_local())
        return len(same_terms)

    assert ranks(4, run)[0] > 60


def test_a_gradient_of_terms_becomes_whole_where_other_ranks_take_part(ranks):  # noqa: F811
    def run(rank):
        mesh, found = DeviceMesh(device_type(), [0, 1]), None
        x = _dtensor(mesh, [Partial()], 1).detach().requires_grad_() if rank < 2 else None
        handle = sw.reshard(x, (mesh, "P"), group=dist.group.WORLD, async_op=True)
        y = handle.wait()
        if y is None:
            handle.backward()
        else:
            (found,) = torch.autograd.grad(y, x, _dtensor(mesh, [Partial()], 2))
            assert_equal(found.to_local(), _dtensor(mesh, [Partial()], 2).full_tensor())
        return None if found is None else found.placements

    assert ranks(4, run) == [(Replicate(),)] * 2 + [None] * 2


def _torch_can(source, target, arrives):
    """Moves that torch makes, forward and backward: never from a full value to terms."""
    return not any(b.is_partial() and not a.is_partial() for a, b in zip(source, target, strict=True)) and any(
        p.is_partial() and g.is_partial() for p, g in zip(source, arrives, strict=True)
    )


def _dtensor(mesh, placements, seed):
    """Of shape (8, 3), terms and all drawn alike on every rank but for where it differs by placement."""
    rows = 8 // int(np.prod([mesh.size(n) for n, p in enumerate(placements) if isinstance(p, Shard)]))
    place = [at for at, p in zip(mesh.get_coordinate(), placements, strict=True) if not p.is_replicate()]
    local = (torch.arange(rows * 3, dtype=torch.float64).reshape(rows, 3) * (7 * sum(place) + seed)) % 11
    return DTensor.from_local(local, mesh, placements, run_check=False, shape=(8, 3), stride=(3, 1))


# --- refusals ---------------------------------------------------------------------------------------------------------


def test_reductions_that_cannot_be_are_refused_before_anything_moves(ranks):  # noqa: F811
    def run(rank):
        mesh, square = init_device_mesh(device_type(), (4,)), DeviceMesh(device_type(), [[0, 1], [2, 3]])
        whole, three = torch.tensor([1, 2, 4]), torch.ones(3, dtype=torch.float64)
        refused = [
            (whole, mesh, [Partial("avg")], "torch.int64 cannot be reduced by 'avg': .*Cast the terms"),
            (whole > 1, mesh, [Partial("avg")], "torch.bool cannot be reduced by 'avg'"),
            (three, mesh, [Partial("prod")], "no reduction 'prod'.*did you mean 'product'"),
            (three, square, [Partial("avg"), Partial("sum")], "mix reductions .*Reduce the axes of the others first"),
        ]
        for local, at, placements, words in refused:
            x = DTensor.from_local(local, at, placements, run_check=False)
            for call in (lambda x=x, at=at: sw.reshard(x, (at, ["R"] * at.ndim)), lambda x=x: sw.fingerprint(x)):
                with pytest.raises(sw.ShardwiseError, match=words):
                    call()
            with pytest.raises(sw.ShardwiseError, match=words):
                sw.reshard_state_dict({"w": x}, {"w": (at, ["R"] * at.ndim)})
        x = DTensor.from_local(three, mesh, [Partial("avg")], run_check=False)
        assert_equal(sw.reshard(x, (mesh, "R")).to_local(), three)  # the group is as good as before
        return True

    assert ranks(4, run, timeout=30) == [True] * 4


def test_an_axis_of_one_rank_reduces_nothing_whatever_its_reduction(ranks):  # noqa: F811
    def run(rank):
        mesh, local = DeviceMesh(device_type(), [[0], [1]]), torch.ones(4) * (rank + 1)
        x = DTensor.from_local(local, mesh, [Partial("avg"), Partial("sum")], run_check=False)
        assert_equal(sw.reshard(x, (mesh, "R,R")).to_local(), x.full_tensor())
        return dist.get_rank()

    assert ranks(2, run) == [0, 1]
