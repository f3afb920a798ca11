"""A forward pass that fails leaves nothing behind: no hooks, no parts, and the next one is as the first."""

import pytest
import torch
import torch.distributed as dist
from blocks import MLP, WholeMLP, hooks_are_off, kept_alive, line, numbers, resharded, same, step
from ranks import ranks  # noqa: F401
from torch import nn

import shardwise as sw

X = numbers(7, 12, dtype=torch.float64)


class Fails(nn.Module):
    """Saves its input, then something of its own, then its input again; raises where it is told to."""

    def __init__(self):
        super().__init__()
        self.mlp, self.norm, self.trouble, self.where = MLP(WholeMLP()), nn.LayerNorm(12).double(), None, 0

    def forward(self, x):
        for place, work in enumerate((torch.sin, self.norm, self.mlp, torch.exp)):
            if self.trouble is not None and place == self.where:
                raise self.trouble("as told")
            x = x * 0.5 + work(x).tanh()
        return x * x


def check(module, plain, x=X):
    """It goes on as if nothing had been."""
    hooks_are_off()
    with sw.activation.measure() as account:
        same(step(module, x), plain)
    assert account.total.tensors >= account.gathers > 0


@pytest.mark.parametrize("what", ["inputs", "all"])
def test_any_exception_takes_the_hooks_off(ranks, what):  # noqa: F811
    def run(rank):
        module = MLP(WholeMLP()) if what == "inputs" else WholeMLP()
        module.act = Trouble()
        plain = step(module, X)
        resharded(module, line(), what=what)
        for trouble in (ValueError, KeyboardInterrupt, SystemExit, torch.OutOfMemoryError, GeneratorExit):
            module.act.trouble = trouble
            with pytest.raises(trouble, match="as told"):
                step(module, X)
            module.act.trouble = None
            check(module, plain)
        assert kept_alive(0)

    ranks(2, run)


class Trouble(nn.Module):
    trouble = None

    def forward(self, x):
        if self.trouble is not None:
            raise self.trouble("as told")
        return x.relu()


def test_ranks_may_fail_at_different_places(ranks):  # noqa: F811
    def run(rank):
        module = Fails()
        plain = step(module, X)
        for part in (module, module.norm, module.mlp):
            resharded(part, line())
        for round_ in range(3):
            module.trouble, module.where = ValueError, (rank + round_) % 3  # before the mlp speaks to others
            with pytest.raises(ValueError, match="as told"):
                step(module, X)
            module.trouble = None
            check(module, plain)

    ranks(3, run)


def test_one_rank_that_fails_may_try_again(ranks):  # noqa: F811
    def run(rank):
        module = resharded(Fails(), line())
        plain = step(Fails(), X)
        for who in (0, 1, 2, 1):
            if rank == who:
                module.trouble = ValueError
                with pytest.raises(ValueError, match="as told"):
                    step(module, X)
                module.trouble = None
            check(module, plain)

    ranks(3, run, patience=4, timeout=20)


def agree_to_skip(module, x):
    """One forward pass; what came of it only if no rank failed."""
    try:
        output = module(x)
    except ValueError:
        output = None
    failed = torch.tensor([output is None])
    dist.all_reduce(failed, dist.ReduceOp.MAX)
    return None if failed else output


@pytest.mark.parametrize("options", [{}, {"check": False}], ids=str)
def test_all_may_skip_what_failed_on_one_rank(ranks, options):  # noqa: F811
    def run(rank):
        module, whole = WholeMLP(), WholeMLP()
        act = module.act = Trouble()
        resharded(module, line(), **options)
        for who, again in ((1, X + 1), (0, X + 2)):
            act.trouble = ValueError if rank == who else None
            assert agree_to_skip(module, X.clone().requires_grad_()) is None
            act.trouble = None
            check(module, step(whole, again), again)

    ranks(2, run, patience=4, timeout=20)


def test_with_a_comparison_all_hear_of_the_rank_that_failed_and_go_on(ranks):  # noqa: F811
    def run(rank):
        module, whole, heard = WholeMLP(), WholeMLP(), []
        act = module.act = Trouble()
        resharded(module, line(), check=True)
        for who, again in ((1, X + 1), (0, X + 2), (2, X + 3)):
            act.trouble = ValueError if rank == who else None
            try:
                module(X.clone().requires_grad_())
            except Exception as error:
                heard.append((type(error), str(error)))
            act.trouble = None
            check(module, step(whole, again), again)
        return heard

    for rank, heard in enumerate(ranks(3, run, patience=4, timeout=20)):
        for who, (kind, text) in zip((1, 0, 2), heard, strict=True):
            assert kind is ValueError if rank == who else issubclass(kind, sw.ExchangeError)
            assert "as told" in text


def test_an_inner_failure_that_the_outer_module_survives(ranks):  # noqa: F811
    class Survives(nn.Module):
        def __init__(self):
            super().__init__()
            self.inner = Fails()

        def forward(self, x):
            try:
                return self.inner(x)
            except ValueError:
                return x * x.sin()

    def run(rank):
        module = Survives()
        module.inner.trouble, module.inner.where = ValueError, 2
        plain = step(module, X)
        for part in (module, module.inner, module.inner.norm):
            resharded(part, line())
        for _ in range(3):
            check(module, plain)

    ranks(2, run)


def test_hooks_of_others_are_left_as_they_are(ranks):  # noqa: F811
    def run(rank):
        module, seen = Fails(), []
        plain = step(module, X)
        resharded(module, line())
        with torch.autograd.graph.saved_tensors_hooks(lambda x: seen.append(x.shape) or x, lambda x: x):
            with sw.activation.measure() as account:
                same(step(module, X), plain)
            assert account.total.tensors == 0  # those who want all that is saved get all
            count = len(seen)
            module.trouble = ValueError
            with pytest.raises(ValueError, match="as told"):
                module(X)
            x = torch.ones(3, requires_grad=True)
            assert (x * x).sum().item() == 3
            assert len(seen) == count + 2
        module.trouble = None
        check(module, plain)

    ranks(2, run)


def test_hooks_inside_of_the_module_are_left_as_they_are(ranks):  # noqa: F811
    class Inside(nn.Module):
        def forward(self, x):
            with torch.autograd.graph.save_on_cpu(), torch.autograd.graph.saved_tensors_hooks(self.pack, lambda x: x):
                y = x.sin()
            return y + x.exp().sin() + x * x

        def pack(self, x):
            self.seen = x
            return x

    def run(rank):
        module = Inside()
        plain = step(module, X)
        resharded(module, line())
        with sw.activation.measure() as account:
            same(step(module, X), plain)
        assert torch.equal(module.seen, X)
        assert account.total.tensors == account.gathers == 1
        hooks_are_off()

    ranks(2, run)
