"""On and off again, twice, copied, pickled; and what cannot be."""

import copy
import inspect
import io
import pickle

import pytest
import torch
import torch.distributed as dist
from blocks import MLP, WholeMLP, compared, grid, hooks_are_off, line, numbers, pull, resharded, same, step
from devices import device_type
from ranks import ranks  # noqa: F401
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel.input_reshard import input_reshard as torchs_input_reshard

import shardwise as sw

X = numbers(7, 12, dtype=torch.float64)
SIZE = X.numel() * 8


def counted(module, plain):
    """How many tensors a step keeps in parts, with the right gradients."""
    with sw.activation.measure() as account:
        same(step(module, X), plain)
    assert account.gathers == account.total.tensors
    return account.total.tensors


def test_no_dim_is_no_change():
    module = nn.Linear(2, 2)
    before = dict(vars(module))
    assert sw.input_reshard(module, None) is module
    assert sw.input_reshard(module, None, None, what="all", check=True) is module
    assert sw.input_reshard_handle(module) is None
    assert vars(module) == before
    assert "forward" not in vars(module)


@pytest.mark.devices
def test_it_returns_the_module_and_can_be_removed(ranks):  # noqa: F811
    def run(rank):
        module, mesh = MLP(WholeMLP()), line()
        plain = step(module, X)
        for _ in range(2):
            assert sw.input_reshard(module, mesh, 0, least=0) is module
            handle = sw.input_reshard_handle(module)
            assert counted(module, plain) == 1
            handle.remove()
            assert sw.input_reshard_handle(module) is None
            assert "forward" not in vars(module)
            assert counted(module, plain) == 0
            handle.remove()  # a second time does nothing
        hooks_are_off()

    ranks(2, run)


def test_twice_is_as_the_last_time(ranks):  # noqa: F811
    def run(rank):
        module, mesh = WholeMLP(), line()
        plain = step(module, X)
        resharded(module, mesh, what="all")
        first = sw.input_reshard_handle(module)
        resharded(module, mesh, name="last")
        with sw.activation.measure() as account:
            same(step(module, X), plain)
        assert list(account.modules) == ["last"]
        assert (account.total.tensors, account.gathers) == (1, 1)
        first.remove()  # it is not on any more
        assert counted(module, plain) == 1
        sw.input_reshard_handle(module).remove()
        assert counted(module, plain) == 0
        sw.input_reshard(module, mesh, None)
        assert sw.input_reshard_handle(module) is None

    ranks(2, run)


@pytest.mark.devices
def test_what_was_saved_before_it_was_removed_is_restored(ranks):  # noqa: F811
    def run(rank):
        module, plain = MLP(WholeMLP()), step(MLP(WholeMLP()), X)
        resharded(module, line())
        x = X.clone().requires_grad_()
        output = module(x)
        sw.input_reshard_handle(module).remove()
        pull(output)
        same([output.detach(), x.grad, *(p.grad for p in module.parameters())], plain)

    ranks(2, run)


def test_a_forward_that_was_replaced_before_and_after(ranks):  # noqa: F811
    def run(rank):
        module, mesh = MLP(WholeMLP()), line()
        own = module.forward

        def twice(x):
            return own(x) * 2

        module.forward = twice
        plain = step(module, X)
        resharded(module, mesh)
        assert counted(module, plain) == 1
        under = module.forward
        module.forward = lambda x: under(x)
        assert counted(module, plain) == 1
        module.forward = under
        sw.input_reshard_handle(module).remove()
        assert module.forward is twice
        assert counted(module, plain) == 0

    ranks(2, run)


def test_hooks_state_and_signature_of_the_module_are_its_own(ranks):  # noqa: F811
    def run(rank):
        module = WholeMLP()
        signature, names = inspect.signature(module.forward), sorted(module.state_dict())
        resharded(module, line())
        assert inspect.signature(module.forward) == signature
        assert sorted(module.state_dict()) == names
        assert (len(module._forward_hooks), len(module._forward_pre_hooks)) == (0, 0)
        assert [name for name, _ in module.named_modules()] == ["", "up", "down", "act"]
        called = []
        module.register_forward_pre_hook(lambda m, args: called.append("before"))
        module.register_forward_hook(lambda m, args, output: called.append("after"))
        step(module, X)
        assert called == ["before", "after"]
        module.load_state_dict(WholeMLP().state_dict())
        assert isinstance(module.double(), WholeMLP)

    ranks(2, run)


def copies(module):
    yield "deepcopy", copy.deepcopy(module)
    yield "pickle", pickle.loads(pickle.dumps(module))
    file = io.BytesIO()
    torch.save(module, file)
    file.seek(0)
    yield "torch.save", torch.load(file, weights_only=False)


@pytest.mark.parametrize("make", [lambda: line(), lambda: grid()["tp"]], ids=["line", "axis"])
def test_copies_have_weights_and_parts_of_their_own(ranks, make):  # noqa: F811
    def run(rank):
        module = WholeMLP()
        expected, other = step(module, X), WholeMLP()
        with torch.no_grad():
            for p in other.parameters():
                p.add_(1)
        changed = step(other, X)
        resharded(module, make())
        found = {}
        for way, twin in copies(module):
            assert sw.input_reshard_handle(twin) is not sw.input_reshard_handle(module)
            twin.load_state_dict(other.state_dict())
            found[way] = counted(twin, changed)
            assert counted(module, expected) == 1
            sw.input_reshard_handle(twin).remove()
            assert counted(twin, changed) == 0
            assert counted(module, expected) == 1
        return found

    assert ranks(4, run) == [{"deepcopy": 1, "pickle": 1, "torch.save": 1}] * 4


def test_a_nested_module_is_copied_with_its_parts(ranks):  # noqa: F811
    def run(rank):
        chain = nn.Sequential(WholeMLP(), nn.Tanh(), WholeMLP())
        plain, mesh = step(chain, X), line()
        for part in (chain, chain[0], chain[2]):
            resharded(part, mesh)
        assert counted(chain, plain) == 2
        for _, twin in copies(chain):
            assert counted(twin, plain) == 2

    ranks(2, run)


def test_a_pickled_module_is_read_where_there_are_no_ranks(ranks):  # noqa: F811
    def run(rank):
        return pickle.dumps(resharded(WholeMLP(), line()))

    for data in ranks(2, run):
        module = pickle.loads(data)
        with torch.no_grad():
            assert torch.equal(module(X), WholeMLP()(X))


def test_a_mesh_of_one_rank_keeps_all(ranks):  # noqa: F811
    def run(rank):
        account, _ = compared(WholeMLP(), line(), X)
        assert account.total.tensors == 0

    ranks(1, run)


def test_ranks_outside_of_the_mesh_are_left_alone(ranks):  # noqa: F811
    def run(rank):
        mesh = DeviceMesh(device_type(), [0, 2])
        module, plain = WholeMLP(), step(WholeMLP(), X)
        resharded(module, mesh)
        return counted(module, plain)

    assert ranks(3, run) == [1, 0, 1]


def test_what_is_no_mesh_is_refused(ranks):  # noqa: F811
    def run(rank):
        for bad in (None, dist.group.WORLD, "tp"):
            with pytest.raises(sw.LayoutError, match=r"needs a DeviceMesh, such as mesh\['tp'\]"):
                sw.input_reshard(nn.Linear(2, 2), bad, 0)
        account, _ = compared(WholeMLP(), grid()["dp"], X)
        assert account.total.tensors == 2

    ranks(4, run)


def test_of_a_mesh_with_several_dims_the_first_counts_as_in_torch(ranks):  # noqa: F811
    def run(rank):
        mesh, unnamed = grid(), DeviceMesh(device_type(), [[0, 1], [2, 3]])
        x = X + rank % 2  # the same on the two ranks of a column
        for one in mesh, unnamed:
            account, _ = compared(WholeMLP(), one, x)
            assert account.total.tensors == 2
        torch.manual_seed(0)  # torch's keeps weights in parts, too
        module, even = nn.Linear(8, 8, bias=False), numbers(8, 8) + rank % 2  # torch's needs sizes that divide
        expected = step(module, even)
        torchs_input_reshard(module, mesh, 0)
        for mine, theirs in zip(expected, step(module, even), strict=True):
            torch.testing.assert_close(mine, theirs)
        compared(WholeMLP(), DeviceMesh(device_type(), [[0, 1, 2, 3]]), X + rank)  # a line of one keeps all
        with pytest.raises(sw.ExchangeError, match=r"not the same on all ranks of the mesh.*give mesh\['tp'\]"):
            step(resharded(WholeMLP(), mesh), X + rank // 2)  # the same along the second dim: torch mixes them up

    ranks(4, run)


def test_dtensors_that_are_replicated_along_the_first_dim_are_kept_in_parts(ranks):  # noqa: F811
    def run(rank):
        mesh = grid()
        for placements, tensors in (
            ([Replicate(), Shard(0)], 1),
            ([Replicate(), Replicate()], 1),
            ([Shard(0), Replicate()], 0),
        ):
            x = distribute_tensor(numbers(8, 6), mesh, placements)
            weight = distribute_tensor(numbers(5, 6, seed=1), mesh, [Replicate(), Replicate()])
            module = nn.Linear(6, 5, bias=False)
            module.weight = nn.Parameter(weight)
            account, _ = compared(module, mesh, x, steps=1)
            assert account.total.tensors == tensors, placements

    ranks(4, run)
