"""Modules that are called in all the ways in which modules are called."""

import pytest
import torch
from blocks import (
    MLP,
    WholeMLP,
    compared,
    grid,
    hooks_are_off,
    kept_alive,
    kept_in_parts,
    line,
    numbers,
    pull,
    resharded,
    same,
    step,
    whole_numbers,
)
from ranks import ranks  # noqa: F401
from torch import nn

import shardwise as sw

X = numbers(7, 12, dtype=torch.float64)
SIZE = X.numel() * 8


class Again(nn.Module):
    """Calls itself, or another module several times."""

    def __init__(self):
        super().__init__()
        self.norm, self.weight = nn.LayerNorm(12).double(), nn.Parameter(X[0].clone())

    def forward(self, x, depth=3):
        return self(x.sin() * self.weight, depth - 1) * x if depth else self.norm(x)


class Outer(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm, self.first, self.second = nn.LayerNorm(12).double(), MLP(WholeMLP()), MLP(WholeMLP(hidden=9))

    def forward(self, x):
        y = self.first(self.norm(x)) * 0.01
        return self.second(y) * x + y * self.first(x)


@pytest.mark.parametrize("count", [2, 3])
def test_a_module_may_call_itself(ranks, count):  # noqa: F811
    def run(rank):
        account, _ = compared(Again(), line(), X)
        assert account.gathers == account.total.tensors >= 2 * 4

    ranks(count, run)


@pytest.mark.devices
@pytest.mark.parametrize("count", [2, 3])
def test_nested_modules_may_all_be_resharded(ranks, count):  # noqa: F811
    def run(rank):
        mesh, module = line(), Outer()
        plain = step(module, X)
        for part in (module, module.norm, module.first, module.second):
            resharded(part, mesh)
        with sw.activation.measure() as account:
            same(step(module, X), plain)
        # the input, the output of the norm, and that of the first: each once, though several parts save them
        assert (account.total.tensors, account.gathers, account.bytes_saved) == (3, 3, 3 * SIZE)
        sw.input_reshard_handle(module).remove()
        with sw.activation.measure() as account:
            same(step(module, X), plain)
        assert account.gathers == account.total.tensors == 4  # the input is kept by the norm and by the first
        hooks_are_off()

    ranks(count, run)


def test_a_module_may_be_called_several_times_before_backward(ranks):  # noqa: F811
    def run(rank):
        found = []
        for module in (MLP(WholeMLP()), resharded(MLP(WholeMLP()), line())):
            inputs = [(X + n).requires_grad_() for n in range(4)]
            with sw.activation.measure() as account:
                outputs = [module(x) for x in inputs]
                chained = module(module(outputs[0] * 0.001) * 0.001)
                for output in (*outputs[2:], chained, outputs[1]):
                    pull(output)
            found.append([x.grad for x in inputs] + [p.grad for p in module.parameters()])
        same(found[1], found[0])
        kept_in_parts(account, tensors=6, size=6 * SIZE, steps=1)

    ranks(2, run)


@pytest.mark.devices
def test_gradients_accumulate_over_calls(ranks):  # noqa: F811
    def run(rank):
        found = []
        for module in (Outer(), resharded(Outer(), line())):
            losses = [module(X + n).sum() for n in range(3)]
            sum(losses).backward()
            for n in range(3):
                module(X - n).sum().backward()
            found.append([p.grad for p in module.parameters()])
        same(found[1], found[0])

    ranks(3, run)


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_nothing_is_kept_where_nothing_is_saved(ranks, mode):  # noqa: F811
    def run(rank):
        module = Outer()
        plain, whole = step(module, X), module(X).detach()
        resharded(module, line())
        with sw.activation.measure() as account:
            with mode():
                same(module(X), whole)
            assert not account.modules
            same(step(module, X), plain)
        assert account.gathers > 0

    ranks(2, run)


def test_training_and_evaluation_may_take_turns(ranks):  # noqa: F811
    class Dropped(nn.Module):
        def __init__(self):
            super().__init__()
            self.drop, self.norm = nn.Dropout(0.5), nn.BatchNorm1d(12).double()

        def forward(self, x):
            return self.drop(x) * self.norm(x)

    def run(rank):
        plain, parted = Dropped(), resharded(Dropped(), line())
        for training in (True, False, True, False, True):
            plain.train(training)
            assert parted.train(training) is parted
            same(step(parted, X), step(plain, X))
            with torch.no_grad():
                torch.manual_seed(rank)
                expected = plain(X)
                torch.manual_seed(rank)
                same(parted(X), expected)
            same(list(parted.buffers()), list(plain.buffers()))

    ranks(2, run)


def test_no_gradients_within_a_module_and_frozen_parameters(ranks):  # noqa: F811
    class Half(nn.Module):
        def __init__(self):
            super().__init__()
            self.layers = nn.ModuleList(nn.Linear(12, 12).double() for _ in range(3))

        def forward(self, x):
            with torch.no_grad():
                y = self.layers[0](x)
            return self.layers[1](x) * y + self.layers[2](x.detach())

    def run(rank):
        module = Half()
        module.layers[1].requires_grad_(False)
        account, _ = compared(module, line(), X)
        kept_in_parts(account, tensors=1, size=SIZE)
        for p in module.parameters():
            p.requires_grad_(False)
        resharded(module, line())
        with sw.activation.measure() as account:
            assert not module(X).requires_grad
        assert account.total.tensors == 0

    ranks(2, run)


@pytest.mark.devices
def test_retained_graphs_give_the_same_again(ranks):  # noqa: F811
    def run(rank):
        found = []
        for module in (Outer(), resharded(Outer(), line())):
            x = X.clone().requires_grad_()
            output = module(x)
            with sw.activation.measure() as account:
                grads = [
                    torch.autograd.grad(output.sum(), (x, *module.parameters()), retain_graph=True) for _ in range(3)
                ]
                grads.append(torch.autograd.grad(output.square().sum(), x))
            found.append(grads)
        same(found[1], found[0])
        del output, account
        assert kept_alive(0)

    ranks(2, run)


def test_a_retained_graph_is_gathered_once_per_backward(ranks):  # noqa: F811
    def run(rank):
        module, x, mesh = Outer(), X.clone().requires_grad_(), line()
        for part in (module, module.norm, module.first, module.second):
            resharded(part, mesh)
        with sw.activation.measure() as account:
            output = module(x) + module(x + 1)
        kept = account.total.tensors
        assert kept == 6
        for times in (1, 2, 3):
            torch.autograd.grad(output.sum(), x, retain_graph=True)
            assert account.gathers == times * kept

    ranks(2, run)


@pytest.mark.devices
def test_double_backward(ranks):  # noqa: F811
    class Smooth(nn.Module):
        def __init__(self):
            super().__init__()
            self.up, self.down = nn.Linear(12, 5).double(), nn.Linear(5, 12).double()

        def forward(self, x):
            return self.down(self.up(x).tanh()) * x.sin()

    def run(rank):
        torch.manual_seed(0)
        plain = Smooth()
        found = []
        for parted in (False, True):
            module = resharded(plain, line()) if parted else plain
            module.zero_grad(set_to_none=True)
            x = X.clone().requires_grad_()
            with sw.activation.measure() as account:
                (gradient,) = torch.autograd.grad(module(x).sum(), x, create_graph=True)
                (twice,) = torch.autograd.grad(gradient.square().sum(), x, create_graph=True)
                (twice * x).sum().backward()
            found.append([gradient, twice, x.grad, *(p.grad for p in module.parameters())])
        same(found[1], found[0])
        assert account.total.tensors == 1
        assert account.gathers >= 2
        torch.autograd.gradcheck(lambda x: module(x), X[:2].clone().requires_grad_())
        torch.autograd.gradgradcheck(lambda x: module(x), X[:1].clone().requires_grad_())

    ranks(2, run)


def test_nested_modules_may_be_resharded_on_different_axes(ranks):  # noqa: F811
    class Outer(nn.Module):
        def __init__(self):
            super().__init__()
            self.norm, self.inner = nn.LayerNorm(12).double(), WholeMLP(act=nn.GELU)

        def forward(self, x):
            return self.inner(self.norm(x)) * x + self.inner(x)

    def run(rank):
        mesh, module = grid(), Outer()
        plain = step(module, X)
        for inner, outer in (("dp", "tp"), ("tp", "dp")):
            resharded(module.inner, mesh[inner], name="inner")
            resharded(module, mesh[outer], name="outer")
            with sw.activation.measure() as account:
                same(step(module, X), plain)
            assert {name: one.tensors for name, one in account.modules.items()} == {"outer": 1, "inner": 2}
            assert account.gathers == 3

    ranks(4, run)


def test_saved_tensors_may_be_looked_at_outside_of_backward(ranks):  # noqa: F811
    def run(rank):
        module = resharded(nn.Linear(12, 3).double(), line())
        output = module(X)
        for _ in range(2):
            same(output.grad_fn._saved_mat1, X)
        output.sum().backward()

    ranks(2, run)


def test_whole_numbers_that_need_no_gradients_are_kept_too(ranks):  # noqa: F811
    class Masked(nn.Module):
        def forward(self, x, mask, index):
            return torch.where(mask, x, x.exp()).index_select(0, index) * x.index_select(0, index)

    def run(rank):
        mask, index = whole_numbers(7, 12) > 0, torch.tensor([6, 0, 3, 3])
        account, _ = compared(Masked(), line(), X, mask, index)
        assert account.total.tensors == account.gathers == 2 * 2
        assert account.bytes_saved == 2 * (7 * 12 + 4 * 8)

    ranks(3, run)
