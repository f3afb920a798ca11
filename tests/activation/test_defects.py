"""Everything that goes wrong with torch's `input_reshard`, in the same calls."""

import inspect
import pickle

import pytest
import torch
from blocks import MLP, SIZES, WholeMLP, differs, everywhere, hooks_are_off, line, numbers, pull, same, share, step
from ranks import ranks  # noqa: F401
from torch import nn
from torch.distributed.tensor.parallel.input_reshard import input_reshard as torchs
from torch.utils.checkpoint import checkpoint

import shardwise as sw


def reshard(module, mesh, dim):
    """As torch is called; what is small is not left out."""
    return sw.input_reshard(module, mesh, dim, least=0)


def test_the_call_is_that_of_torch():
    theirs = inspect.signature(torchs).parameters.values()
    ours = list(inspect.signature(sw.input_reshard).parameters.values())
    for mine, other in zip(ours, theirs, strict=False):
        assert (mine.name, mine.kind, mine.default) == (other.name, other.kind, other.default)
    assert all(extra.kind is extra.KEYWORD_ONLY for extra in ours[len(theirs) :])


@pytest.mark.parametrize("count", SIZES)
def test_activations_that_differ_per_rank_are_not_taken_for_replicated_ones(ranks, count):  # noqa: F811
    def run(rank):
        whole, x = WholeMLP(hidden=24), numbers(8, 12, dtype=torch.float64).mul(8).round()
        expected = step(whole, x)
        found = step(reshard(MLP(whole), line(), 0), x)
        up, bias, down = expected[2:]
        same(found, [*expected[:2], share(up, 0, None), share(bias, 0, None), share(down, 1, None)])

    ranks(count, run)


def test_weights_that_differ_per_rank_are_not_taken_for_replicated_ones(ranks):  # noqa: F811
    def run(rank):
        torch.manual_seed(rank)
        module, x, mesh = nn.Linear(8, 4), numbers(8, 8), line()
        plain = step(module, x)
        for dim in (0, 1):
            with sw.activation.measure() as account:
                same(step(reshard(module, mesh, dim), x), plain)
            assert differs(plain[1])
            assert account.bytes_saved == 8 * 8 * 4  # the input, no weight

    ranks(4, run)


def test_masks_that_differ_per_rank_are_not_taken_for_replicated_ones(ranks):  # noqa: F811
    def run(rank):
        torch.manual_seed(0)
        module, x = nn.Sequential(nn.Dropout(0.5), nn.Linear(8, 8), nn.Dropout(0.3)), numbers(8, 8)
        plain = step(module, x)
        same(step(reshard(module, line(), 0), x), plain)
        assert differs(plain[1])

    ranks(4, run)


def test_inputs_that_differ_per_rank_are_refused_and_not_mixed(ranks):  # noqa: F811
    def run(rank):
        module, x = reshard(nn.Linear(8, 8), line(), 0), numbers(8, 8, seed=rank).requires_grad_()
        with pytest.raises(sw.ExchangeError, match=r"input\[0\] of Linear \d+ is not the same on all ranks"):
            pull(module(x))
        assert x.grad is None

    ranks(4, run)


@pytest.mark.parametrize("count", SIZES)
def test_tensors_of_few_elements_are_gathered_back(ranks, count):  # noqa: F811
    def run(rank):
        mesh = line()
        for numel in range(1, count**2 + 2):
            module, x = nn.GELU(), numbers(numel)
            plain = step(module, x)
            with sw.activation.measure() as account:
                same(step(reshard(module, mesh, 0), x), plain)
            assert (account.total.tensors, account.gathers) == (1, 1)
            assert everywhere(account.bytes_kept) == account.bytes_saved == 4 * numel

    ranks(count, run)


def test_hooks_do_not_stay_on_after_an_exception(ranks):  # noqa: F811
    class Fails(nn.Linear):
        def forward(self, x):
            super().forward(x)
            raise ValueError("as told")

    def run(rank):
        module, unrelated = reshard(Fails(8, 8), line(), 0), nn.Linear(8, 8)
        plain = step(unrelated, numbers(8, 8, seed=rank))
        with pytest.raises(ValueError, match="as told"):
            module(numbers(8, 8))
        same(step(unrelated, numbers(8, 8, seed=rank)), plain)
        assert differs(plain[2])
        hooks_are_off()

    ranks(2, run)


@pytest.mark.parametrize("count", SIZES)
def test_sizes_need_not_divide(ranks, count):  # noqa: F811
    def run(rank):
        mesh = line()
        for rows, columns in ((7, 5), (5, 7), (1, 3), (3, 1), (13, 1), (11, 13)):
            module, x = nn.Linear(columns, 3), numbers(rows, columns)
            plain = step(module, x)
            for dim in (0, 1, -1):
                same(step(reshard(module, mesh, dim), x), plain)

    ranks(count, run)


def test_values_of_fewer_dims_than_that(ranks):  # noqa: F811
    def run(rank):
        mesh = line()
        for module, x in (
            (nn.LayerNorm(10), numbers(7, 10)),
            (nn.LayerNorm(10), numbers(10)),
            (nn.BatchNorm1d(6), numbers(4, 6)),
            (nn.PReLU(), numbers()),
        ):
            module.eval()
            plain = step(module, x)
            for dim in (1, 2, 5, -3):
                with sw.activation.measure() as account:
                    same(step(reshard(module, mesh, dim), x), plain)
                assert account.gathers == 1

    ranks(3, run)


@pytest.mark.parametrize("reentrant", [True, False])
def test_a_checkpoint_is_not_defeated(ranks, reentrant):  # noqa: F811
    def run(rank):
        calls, found = [], []
        module, mesh = nn.Linear(8, 8), line()
        module.register_forward_pre_hook(lambda m, args: calls.append(torch.is_grad_enabled()))
        for body in (module, reshard(module, mesh, 0)):
            x = numbers(8, 8).requires_grad_()
            with sw.activation.measure() as account:
                checkpoint(body, x, use_reentrant=reentrant).square().sum().backward()
            found.append(x.grad)
        same(found[1], found[0])
        assert calls == [not reentrant, True] * 2
        assert account.total.tensors == 0

    ranks(2, run)


def test_one_gather_does_for_all_that_use_an_input(ranks):  # noqa: F811
    class Five(nn.Module):
        def __init__(self):
            super().__init__()
            self.layers = nn.ModuleList(nn.Linear(8, 8) for _ in range(5))

        def forward(self, x):
            return sum(layer(x) for layer in self.layers)

    def run(rank):
        module, x = Five(), numbers(8, 8)
        plain = step(module, x)
        with sw.activation.measure() as account:
            same(step(reshard(module, line(), 0), x), plain)
        total = account.total
        assert (total.tensors, total.gathers, total.bytes_saved) == (1, 1, 256)
        assert total.bytes_gathered == 256 - total.bytes_kept

    ranks(4, run)


def test_it_can_be_removed_and_pickled(ranks):  # noqa: F811
    def run(rank):
        module, x = reshard(nn.Linear(8, 8), line(), 0), numbers(8, 8)
        twin = pickle.loads(pickle.dumps(module))
        same(step(twin, x), step(module, x))
        sw.input_reshard_handle(module).remove()
        same(step(twin, x), step(module, x))

    ranks(2, run)


def test_what_is_right_in_torch_is_right_here(ranks):  # noqa: F811
    def run(rank):
        mesh = line()
        inner = nn.Linear(8, 8)
        module, x = nn.Sequential(inner, nn.Tanh(), inner), numbers(8, 8)
        plain = step(module, x)
        with torch.no_grad():
            expected = module(x)
        for part in (inner, module):
            reshard(part, mesh, 0)
            same(step(module, x), plain)
            with torch.no_grad():
                same(module(x), expected)
        leaf = x.clone().requires_grad_()
        (gradient,) = torch.autograd.grad(module(leaf).sum(), leaf, create_graph=True)
        gradient.square().sum().backward()
        found = leaf.grad.clone()
        for part in (inner, module):
            sw.input_reshard_handle(part).remove()
        leaf = x.clone().requires_grad_()
        (gradient,) = torch.autograd.grad(module(leaf).sum(), leaf, create_graph=True)
        gradient.square().sum().backward()
        same(found, leaf.grad)

    ranks(2, run)
