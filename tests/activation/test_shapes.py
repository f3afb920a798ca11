"""Any shape, strides, dtype and nesting of inputs: what is restored is what was saved, bit-for-bit."""

import random

import pytest
import torch
from blocks import SIZES, bits, kept_alive, line, numbers, pull, resharded, same
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st
from ranks import ranks  # noqa: F401
from torch import nn
from torch.utils._pytree import tree_leaves

import shardwise as sw
from shardwise.testing import on_ranks

FLOATS = (torch.float32, torch.float64, torch.bfloat16, torch.float16, torch.complex64, torch.complex128)
WHOLE = (torch.int64, torch.int32, torch.int16, torch.uint8, torch.bool)
LENGTHS = (1, 1, 2, 3, 4, 5, 7, 8, 13, 0)


class Told(torch.autograd.Function):
    """Saves a tensor, and tells what it gets back."""

    @staticmethod
    def forward(ctx, x, scale, told):
        ctx.save_for_backward(x, scale)
        ctx.told = told
        return scale * 1

    @staticmethod
    def backward(ctx, gradient):
        x, scale = ctx.saved_tensors
        ctx.told.append((bits(x), x.dtype, tuple(x.shape), x.stride(), x.requires_grad))
        return (gradient * x if x.is_floating_point() or x.is_complex() else None), gradient * scale, None


class Saver(nn.Module):
    """Saves its inputs, and views of them, in several ways."""

    def __init__(self):
        super().__init__()
        self.scale, self.told = nn.Parameter(torch.tensor(1.5)), []

    def forward(self, *args, **kwargs):
        total = self.scale * 1
        for x in tree_leaves((args, kwargs)):
            if isinstance(x, torch.Tensor):
                for view in views(x):
                    total = total + real(view * self.scale).sum() + Told.apply(view, self.scale, self.told).sum().abs()
                if x.is_floating_point() or x.is_complex():
                    total = total + real(x.sin() * x).sum()
        return total


def real(x):
    return x.real + x.imag if x.is_complex() else x


def views(x):
    """Tensors in the same memory."""
    yield x
    yield x.unsqueeze(0)
    if x.ndim:
        yield x.transpose(0, -1)
        yield x[x.shape[0] // 2 :]
        yield x[..., ::2]
        yield x.unfold(0, min(2, x.shape[0]), 1)
    if x.is_complex():
        yield torch.view_as_real(x)
        yield x.real
        yield x.imag


def tensor_of(chance, dtype):
    """A base that is a leaf, and some view of it."""
    shape = [chance.choice(LENGTHS) for _ in range(chance.randrange(5))]
    base = numbers(*shape, seed=chance.randrange(1000)).mul(20).to(dtype)
    if dtype in FLOATS:
        base.requires_grad_(chance.random() < 0.8)
    x = base
    for _ in range(chance.randrange(3)):
        x = chance.choice(CHANGES)(chance, x)
    return base, x


def permuted(chance, x):
    return x.permute(chance.sample(range(x.ndim), x.ndim))


def sliced(chance, x):
    if not x.ndim:
        return x
    dim = chance.randrange(x.ndim)
    length = chance.randint(0, x.shape[dim]) if chance.random() < 0.2 else (x.shape[dim] + 1) // 2
    return x.narrow(dim, chance.randint(0, x.shape[dim] - length), length)


def stepped(chance, x):
    return x[..., ::3] if x.ndim else x


def expanded(chance, x):
    return x.unsqueeze(0).expand(chance.choice([1, 3]), *x.shape)


def channels_last(chance, x):
    return x.to(memory_format=torch.channels_last) if x.ndim == 4 else x


CHANGES = (permuted, sliced, stepped, expanded, channels_last)


def nested(chance, tensors):
    """Somewhere in lists, tuples and dicts, by position or by name."""
    args, kwargs = [], {}
    for number, x in enumerate(tensors):
        value = chance.choice([x, (x, 1), [None, x], {"x": [x, "text"]}, {"a": {"b": (x,)}}])
        if chance.random() < 0.5:
            args.append(value)
        else:
            kwargs[f"name{number}"] = value
    return args, kwargs


def example(seed, module):
    """What backward got back, and the gradients."""
    chance = random.Random(seed)
    pairs = [tensor_of(chance, chance.choice(FLOATS if chance.random() < 0.7 else WHOLE)) for _ in range(3)]
    args, kwargs = nested(chance, [x for _, x in pairs])
    module.zero_grad(set_to_none=True)
    module.told.clear()
    module(*args, **kwargs).backward()
    return [base.grad for base, _ in pairs] + [module.scale.grad], list(module.told)


def dims(shape, stride):
    """Those that are not only repeated, from the one whose elements lie closest; with ties, none."""
    found = sorted((n, dim) for dim, n in enumerate(stride) if n and shape[dim] > 1)
    return [dim for _, dim in found] if len({n for n, _ in found}) == len(found) else None


def like(found, expected):
    """The same bits, type, shape and need of gradients, and the same order of dims in memory."""
    assert len(found) == len(expected)
    for mine, theirs in zip(found, expected, strict=True):
        assert torch.equal(mine[0], theirs[0])
        assert mine[1:3] == theirs[1:3]
        assert mine[4] == theirs[4]
        assert dims(*theirs[2:4]) in (None, dims(*mine[2:4]))


@pytest.mark.parametrize("count", SIZES)
@settings(max_examples=1, phases=[Phase.generate], suppress_health_check=list(HealthCheck))
@given(first=st.integers(0, 2**40))
def test_inputs_of_any_kind_are_restored_bit_by_bit(count, first):
    def run(rank):
        mesh, plain, parted = line(), Saver(), Saver()
        kept = 0
        for seed in range(first, first + 15):
            resharded(parted, mesh, dim=random.Random(seed).choice([0, 1, -1, 7]))
            gradients, told = example(seed, plain)
            with sw.activation.measure() as account:
                found, again = example(seed, parted)
            like(again, told)
            same(found, gradients)
            assert account.gathers >= account.total.tensors
            kept += account.total.tensors
        assert kept_alive(0)
        return kept

    kept = on_ranks(count, run)
    assert kept == [kept[0]] * count
    assert kept[0] > 15


SMALL = [(), (1,), (2,), (3,), (5,), (15,), (16,), (17,), (1, 1), (4, 1), (1, 3), (3, 2, 1), (0,), (3, 0), (2, 2, 2)]


@pytest.mark.parametrize("count", SIZES)
def test_tensors_smaller_than_the_mesh_and_of_few_dims(ranks, count):  # noqa: F811
    def run(rank):
        mesh = line()
        for shape in SMALL:
            for dim in (0, 1, 2, -1):
                found = []
                for parted in (True, False):
                    module, x = nn.PReLU(), numbers(*shape, seed=3).requires_grad_()
                    if parted:
                        resharded(module, mesh, dim=dim)
                    with sw.activation.measure() as account:
                        pull(module(x))
                    found.append([x.grad, module.weight.grad])
                    assert account.total.tensors == account.gathers == (parted and x.numel() > 0)
                same(*found)

    ranks(count, run)


LAYOUTS = {
    "channels last": lambda: numbers(4, 16, 9, 9).to(memory_format=torch.channels_last),
    "channels last, without the last row and column": lambda: numbers(4, 16, 10, 10).to(
        memory_format=torch.channels_last
    )[:, :, :-1, :-1],
    "channels last, every other image": lambda: numbers(8, 16, 9, 9).to(memory_format=torch.channels_last)[::2],
    "one image, repeated": lambda: numbers(1, 16, 9, 9).expand(4, -1, -1, -1),
    "transposed": lambda: numbers(4, 16, 9, 11).transpose(2, 3),
    "a window": lambda: numbers(4, 20, 12, 12)[:, 2:18, 1:10, 1:10],
}


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_convolution_takes_the_same_path_over_memory_of_any_layout(ranks, layout):  # noqa: F811
    def run(rank):
        torch.manual_seed(0)
        module, mesh, found = nn.Conv2d(16, 24, 3), line(), []
        for parted in (False, False, True):
            if parted:
                resharded(module, mesh)
            module.zero_grad(set_to_none=True)
            x = LAYOUTS[layout]().requires_grad_()
            pull(module(x))
            found.append([x.grad, *(p.grad for p in module.parameters())])
        same(found[1], found[0])  # as torch itself does
        same(found[2], found[0])

    ranks(2, run)


def test_values_that_are_negated_or_conjugated_when_read(ranks):  # noqa: F811
    class Product(nn.Module):
        def forward(self, x):
            return real(x * x.conj() * x.conj().imag).sum()

    def run(rank):
        found = []
        for module in (Product(), resharded(Product(), line())):
            x = numbers(6, dtype=torch.complex64).requires_grad_()
            module(x.conj()).backward()
            found.append(x.grad)
        same(found[1], found[0])

    ranks(2, run)


@pytest.mark.devices
def test_inputs_that_share_memory_are_kept_once(ranks):  # noqa: F811
    class Pair(nn.Module):
        def forward(self, x, y, *, z):
            return (x * y.t() * z[0].view(4, 6)).sum()

    def run(rank):
        found = []
        for module in (Pair(), resharded(Pair(), line())):
            x = numbers(4, 6).requires_grad_()
            with sw.activation.measure() as account:
                module(x, x.t(), z=[x.view(24)]).backward()
            found.append(x.grad)
        same(found[1], found[0])
        assert (account.total.tensors, account.bytes_saved, account.gathers) == (1, 96, 1)

    ranks(3, run)
