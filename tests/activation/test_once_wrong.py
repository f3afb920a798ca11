"""What went wrong once."""

import time

import pytest
import torch
import torch.distributed as dist
from blocks import line, resharded, same
from ranks import ranks  # noqa: F401
from torch import nn

from shardwise.activation import sharded_activation

X = torch.randn(64, 8, generator=torch.Generator().manual_seed(0))


@pytest.fixture(autouse=True)
def impatient(monkeypatch):
    """A waiting rank helps the others after a short while."""
    monkeypatch.setattr(sharded_activation, "PATIENCE", 0.5)


class Product(nn.Module):
    def forward(self, x):
        return x.sin() * x


class Own(nn.Module):
    """Each rank takes its own rows of an input that all have."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(1)
        self.linear = nn.Linear(8, 4)

    def forward(self, x):
        return self.linear(x.chunk(dist.get_world_size(), 0)[dist.get_rank()])


def test_a_rank_that_is_late_may_have_other_graphs_waiting(ranks):  # noqa: F811
    def run(rank):
        found = []
        for wrap in (lambda module: module, lambda module: resharded(module, line())):
            first, second = wrap(Product()), wrap(Product())
            leaves = [X.clone().requires_grad_(), (X + 1).requires_grad_()]
            a, b = first(leaves[0] * 1).sum(), second(leaves[1] * 1).sum()
            time.sleep(2 * sharded_activation.PATIENCE if rank == 1 and len(found) else 0)  # then the other one helps
            a.backward()
            b.backward()
            found.append([leaf.grad for leaf in leaves])
        same(found[1], found[0])

    ranks(2, run)


def test_what_a_rank_takes_of_its_input_may_be_its_own_part(ranks):  # noqa: F811
    def run(rank):
        found = []
        for module in (Own(), resharded(Own(), line()), resharded(Own(), line(), check=False)):
            x = X.clone().requires_grad_()
            module(x * 1).square().sum().backward()
            found.append([x.grad, module.linear.weight.grad])
        same(found[1], found[0])
        same(found[2], found[0])

    ranks(2, run)


def test_a_backward_that_failed_on_one_rank_may_be_run_again_by_all(ranks):  # noqa: F811
    def run(rank):
        module = resharded(nn.Linear(8, 4), line())
        x = X.clone().requires_grad_()
        y = x * 1
        output = module(y).square().sum()

        def trouble(grad):
            raise ValueError("as told")

        handle = y.register_hook(trouble if rank == 1 else lambda grad: None)
        try:
            output.backward(retain_graph=True)
        except ValueError:
            assert rank == 1
        handle.remove()
        module.zero_grad()
        x.grad = None
        output.backward()
        plain = X.clone().requires_grad_()
        nn.functional.linear(plain, module.weight, module.bias).square().sum().backward()
        same([x.grad], [plain.grad])

    ranks(2, run)


def test_transforms_of_functions_are_left_alone(ranks):  # noqa: F811
    def run(rank):
        module = resharded(Product(), line())
        found = torch.func.grad(lambda x: module(x).sum())(X)
        x = X.clone().requires_grad_()
        Product()(x).sum().backward()
        torch.testing.assert_close(found, x.grad)

    ranks(2, run)
