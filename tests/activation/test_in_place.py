"""Changes in place: what was saved before them is found or kept as it was, what is saved after them is not mixed up."""

import pytest
import torch
import torch.distributed as dist
from blocks import differs, line, numbers, resharded, same
from ranks import ranks  # noqa: F401
from torch import nn

import shardwise as sw

X = numbers(7, 12, dtype=torch.float64)


class Changes(nn.Module):
    """Makes its input another one on every rank."""

    def forward(self, x):
        x.mul_(dist.get_rank() + 2)
        return x * x + x.exp()


class ChangesView(nn.Module):
    def forward(self, x):
        x[2:4].add_(dist.get_rank())
        return x * x


class ChangesLate(nn.Module):
    """Saves the input before, and views of it after it was changed."""

    def forward(self, x):
        before = x.clone().sin() * x.detach().clone()
        x.transpose(0, 1).mul_(dist.get_rank() + 2)
        return before + x.view(-1).sin().view_as(x)


def through(module, x):
    """As an input that is not a leaf."""
    leaf = x.clone().requires_grad_()
    with sw.activation.measure() as account:
        output = module(leaf * 1)
        output.sum().backward()
    return account, [output.detach(), leaf.grad]


@pytest.mark.parametrize("make", [Changes, ChangesView, ChangesLate])
def test_an_input_that_is_changed_in_place_stays_whole(ranks, make):  # noqa: F811
    def run(rank):
        _, plain = through(make(), X)
        account, found = through(resharded(make(), line()), X)
        same(found, plain)
        assert account.total.tensors == 0
        assert differs(found[1])

    ranks(3, run)


@pytest.mark.devices
def test_one_input_that_is_changed_does_not_touch_others(ranks):  # noqa: F811
    class Mixed(nn.Module):
        def forward(self, x, *, y):
            y.mul_(dist.get_rank() + 2)
            return x.sin() * y + y.cos()

    def run(rank):
        found = []
        for module in (Mixed(), resharded(Mixed(), line())):
            x, y = X.clone().requires_grad_(), (X + 1).requires_grad_()
            with sw.activation.measure() as account:
                module(x * 1, y=y * 1).sum().backward()
            found.append([x.grad, y.grad])
        same(found[1], found[0])
        assert (account.total.tensors, account.bytes_saved) == (1, X.numel() * 8)

    ranks(2, run)


SAVES = {  # what is changed after it was saved
    "an intermediate": lambda x: _later(x * 2).sin(),
    "a result": lambda x: _later(x.exp()),
    "a mask": lambda x: x * _later((x > 0).to(x.dtype)),
}
_changed = []


def _later(x):
    _changed.append(x)
    return x


class Lent(nn.Module):
    """Saves tensors of its own that somebody changes later on."""

    def __init__(self, work):
        super().__init__()
        self.work = work
        self.weight = nn.Parameter(numbers(12, dtype=torch.float64))
        self.register_buffer("scale", numbers(12, seed=1, dtype=torch.float64))

    def forward(self, x):
        return self.work(x) * self.scale * self.weight


@pytest.mark.parametrize("parted", [False, True], ids=["plain", "resharded"])
def test_a_saved_tensor_that_is_changed_after_forward_is_found(ranks, parted):  # noqa: F811
    def run(rank):
        mesh = line()
        for work in SAVES.values():
            for change in (lambda m: _changed[-1].detach().mul_(2), lambda m: m.scale.add_(1), optimize):
                module = Lent(work)
                if parted:
                    resharded(module, mesh)
                output = module(X.clone().requires_grad_())
                change(module)
                with pytest.raises(RuntimeError, match="modified by an inplace operation"):
                    output.sum().backward()

    ranks(2, run)


def optimize(module):
    """As an optimizer does."""
    with torch.no_grad():
        module.weight.add_(1)


@pytest.mark.devices
def test_an_input_that_is_changed_after_forward_has_the_gradients_of_forward(ranks):  # noqa: F811
    class Square(nn.Module):
        def forward(self, x):
            return x * x.sin()

    def run(rank):
        (_, expected), module = through(Square(), X), resharded(Square(), line())
        for change in (torch.zero_, torch.exp_, lambda x: x[3:5].fill_(rank)):
            leaf = X.clone().requires_grad_()
            x = leaf * 1
            output = module(x)
            change(x.detach())
            output.sum().backward()  # as it is kept apart, plain torch can only raise
            same([output.detach(), leaf.grad], expected)

    ranks(2, run)


def test_buffers_that_forward_changes_are_those_of_the_module(ranks):  # noqa: F811
    class Running(nn.Module):
        def __init__(self):
            super().__init__()
            self.register_buffer("mean", torch.zeros(12, dtype=torch.float64))

        def forward(self, x):
            self.mean = self.mean * 0.9 + x.detach().mean(0) * (dist.get_rank() + 1)
            return x * self.mean

    def run(rank):
        module = Running()
        plain = Running()
        resharded(module, line())
        for n in range(3):
            same(through(module, X + n)[1], through(plain, X + n)[1])
        same(module.mean, plain.mean)
        assert differs(module.mean)

    ranks(2, run)
