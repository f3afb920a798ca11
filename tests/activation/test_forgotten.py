"""Memory: what is saved is really freed between forward and backward, and nothing outlives its graph."""

import gc
from weakref import ref

import pytest
import torch
import torch.distributed as dist
from blocks import MLP, WholeMLP, kept_alive, line, numbers, pull, resharded, same, settle, soon, step
from ranks import ranks  # noqa: F401
from torch import nn
from torch.distributed.tensor import Replicate, distribute_tensor
from torch.multiprocessing.reductions import StorageWeakRef

import shardwise as sw

X = numbers(7, 12, dtype=torch.float64)


def expired(storage):
    return soon(storage.expired)


@pytest.mark.devices
def test_an_input_is_freed_between_forward_and_backward(ranks):  # noqa: F811
    def run(rank):
        module, leaf = resharded(MLP(WholeMLP()), line()), X.clone().requires_grad_()
        plain = step(MLP(WholeMLP()), X)
        x = leaf * 1
        storage, tensor = StorageWeakRef(x.untyped_storage()), ref(x)
        output = module(x)
        del x
        assert tensor() is None
        assert expired(storage)
        pull(output)
        same([output.detach(), leaf.grad, *(p.grad for p in module.parameters())], plain)

    ranks(2, run)


def test_what_passes_between_modules_is_freed(ranks):  # noqa: F811
    class Noted(nn.Module):
        def __init__(self):
            super().__init__()
            self.storages = []

        def forward(self, x):
            self.storages.append(StorageWeakRef(x.untyped_storage()))
            return x

    def run(rank):
        mesh = line()
        noted = [Noted() for _ in range(3)]
        layers = [resharded(MLP(WholeMLP()), mesh) for _ in range(4)]
        chain = nn.Sequential(*(m for pair in zip(layers[:3], noted, strict=True) for m in pair), layers[3])
        with torch.no_grad():
            for p in chain.parameters():
                p.mul_(0.05)
        output = chain(X.clone().requires_grad_())
        assert [expired(s) for one in noted for s in one.storages] == [True] * 3
        pull(output)

    ranks(2, run)


def test_a_replicated_dtensor_is_freed_too(ranks):  # noqa: F811
    class Noted(nn.Linear):
        def forward(self, x):
            y = x * 2
            self.storage = StorageWeakRef(y.to_local().untyped_storage())
            return super().forward(y)

    def run(rank):
        mesh = line()
        module = Noted(12, 3).double()
        for name, p in list(module.named_parameters()):
            setattr(module, name, nn.Parameter(distribute_tensor(p.detach(), mesh, [Replicate()])))
        output = resharded(module, mesh)(distribute_tensor(X, mesh, [Replicate()]))
        assert expired(module.storage)
        output.sum().backward()

    ranks(2, run)


def test_what_is_restored_is_freed_after_backward(ranks):  # noqa: F811
    class Seen(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x, seen):
            ctx.save_for_backward(x)
            ctx.seen = seen
            return x.clone()

        @staticmethod
        def backward(ctx, gradient):
            (x,) = ctx.saved_tensors
            ctx.seen.append(StorageWeakRef(x.untyped_storage()))
            return gradient, None

    class Module(nn.Module):
        def __init__(self):
            super().__init__()
            self.seen = []

        def forward(self, x):
            return Seen.apply(x, self.seen)

    def run(rank):
        module = resharded(Module(), line())
        output = module(X.clone().requires_grad_())
        for times in (1, 2, 3):
            output.sum().backward(retain_graph=True)
            assert len(module.seen) == times
            assert all(map(expired, module.seen))

    ranks(2, run)


@pytest.mark.devices
def test_parts_go_with_their_graph(ranks):  # noqa: F811
    def run(rank):
        module = resharded(MLP(WholeMLP()), line())
        output = module(X.clone().requires_grad_())
        assert kept_alive(1)
        output.sum().backward()
        assert kept_alive(0)  # though the output lives
        output = module(X.clone().requires_grad_())
        kept = module(X.clone().requires_grad_())
        del output
        assert kept_alive(1)
        kept.sum().backward(retain_graph=True)
        assert kept_alive(1)
        del kept
        assert kept_alive(0)

    ranks(2, run)


@pytest.mark.parametrize("options", [{}, {"check": True}, {"what": "all"}], ids=str)
def test_graphs_without_a_backward_leave_nothing(ranks, options):  # noqa: F811
    def run(rank):
        whole, mesh = WholeMLP(), line()
        plain = step(whole, X)
        module = resharded(WholeMLP(), mesh, **options)
        for _ in range(100):
            module(X.clone().requires_grad_())
        assert kept_alive(0)
        same(step(module, X), plain)

    ranks(2, run)


def test_losses_that_are_dropped_while_others_go_back(ranks):  # noqa: F811
    def run(rank):
        module, plain = resharded(MLP(WholeMLP()), line()), step(MLP(WholeMLP()), X)
        for _ in range(60):
            dropped = module(X.clone().requires_grad_())
            same(step(module, X), plain)
            del dropped
        assert kept_alive(0)

    ranks(2, run)


def test_what_never_goes_back_may_live_longer_on_one_rank(ranks):  # noqa: F811
    def run(rank):
        module, plain = resharded(MLP(WholeMLP()), line()), step(MLP(WholeMLP()), X)
        for _ in range(50):
            output = module(X.clone().requires_grad_())
            shown = output if rank == 0 else None  # such as for a log that one rank writes
            del output
            same(step(module, X), plain)
            del shown
        assert kept_alive(0)
        same(step(module, X), plain)

    ranks(2, run, patience=5, timeout=30)


def test_garbage_of_one_rank_may_be_collected_later(ranks):  # noqa: F811
    def run(rank):
        module, plain = resharded(MLP(WholeMLP()), line()), step(MLP(WholeMLP()), X)
        gc.disable()
        for _ in range(3):
            for _ in range(15):
                cycle = [module(X.clone().requires_grad_())]
                if rank == 0:
                    cycle.append(cycle)
                del cycle
                same(step(module, X), plain)
            gc.collect()
        gc.enable()
        assert kept_alive(0)

    ranks(2, run, patience=5, timeout=30)


@pytest.mark.parametrize("calls", [1, 3])
def test_memory_for_parts_that_nobody_asked_for_is_given_back(ranks, calls):  # noqa: F811
    size = 2**20

    def run(rank):
        module = sw.input_reshard(nn.GELU(), line(), 0)

        def passes(count):
            for _ in range(count):
                x = torch.ones(size // 4, requires_grad=True)
                dropped, output = module(x * 1), x * 1
                for _ in range(calls):
                    output = module(output)
                output.sum().backward()
                del dropped, output
            dist.barrier()
            settle()

        passes(10)
        before = resident()
        passes(40)
        return resident() - before

    for rise in ranks(2, run):
        assert rise < 40 * size  # less than one for each pass


def resident():
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * 4096


def test_outputs_that_are_saved_do_not_hold_themselves(ranks):  # noqa: F811
    class Result(nn.Module):
        def forward(self, x):
            return x.exp().sigmoid().softmax(-1).tanh()

    def run(rank):
        mesh = line()
        gc.collect()
        gc.disable()
        for what in ("inputs", "all"):
            module = resharded(Result(), mesh, what=what)
            for retain in (True, False):
                output = module(X.clone().requires_grad_())
                output.sum().backward(retain_graph=retain)
                storage, tensor = StorageWeakRef(output.untyped_storage()), ref(output)
                del output
                assert tensor() is None
                assert storage.expired()
        gc.enable()

    ranks(2, run)


def test_small_tensors_stay_whole_unless_asked_for(ranks):  # noqa: F811
    def run(rank):
        module, mesh = nn.GELU(), line()
        for numel, options in ((2**14, {}), (2**14 - 1, {}), (100, {"least": 400}), (99, {"least": 400})):
            with sw.activation.measure() as account:
                pull(sw.input_reshard(module, mesh, 0, **options)(numbers(numel).requires_grad_()))
            assert account.total.tensors == account.gathers == (numel in (2**14, 100))

    ranks(2, run)


def test_a_part_is_as_small_as_it_can_be(ranks):  # noqa: F811
    def run(rank):
        module = sw.input_reshard(nn.GELU(), line(), 0)
        with sw.activation.measure() as account:
            output = module(numbers(1001, 333).requires_grad_())
        assert abs(3 * account.bytes_kept - account.bytes_saved) <= 3 * 64
        pull(output)

    ranks(3, run)
