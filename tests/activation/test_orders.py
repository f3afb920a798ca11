"""Ranks that go back in other orders meet; ranks that differ or never go back end in an error, not in a hang."""

import pytest
import torch
import torch.distributed as dist
from blocks import MLP, WholeMLP, grid, hooks_are_off, kept_alive, line, numbers, pull, resharded, same, step
from ranks import ranks  # noqa: F401
from torch import nn
from torch.utils._pytree import tree_leaves, tree_map

import shardwise as sw
from shardwise.activation import sharded_activation

X = numbers(7, 12, dtype=torch.float64)


@pytest.fixture(autouse=True)
def impatient(monkeypatch):
    """A waiting rank helps the others after a short while."""
    monkeypatch.setattr(sharded_activation, "PATIENCE", 0.5)


class Product(nn.Module):
    def forward(self, x, y=None):
        return x.sin() * x if y is None else x.sin() * y.cos()


def losses(module, count):
    """Independent ones, with the leaves that they are functions of."""
    leaves = [(X + n).requires_grad_() for n in range(count)]
    return leaves, [module(leaf * 1) for leaf in leaves]


@pytest.mark.parametrize("count", [2, 3])
def test_backward_may_ask_in_another_order_on_another_rank(ranks, count):  # noqa: F811
    def run(rank):
        found, inputs = [], [X + n for n in range(count)]
        for wrap in (lambda module: module, lambda module: resharded(module, line())):
            modules, leaves = [wrap(Product()) for _ in inputs], [x.clone().requires_grad_() for x in inputs]
            order = [(at + rank) % count for at in range(count)]  # the last one goes back first
            total = sum(modules[at](leaves[at] * 1).sum() for at in order)
            total.backward()
            found.append([leaf.grad for leaf in leaves])
        same(found[1], found[0])
        assert kept_alive(0)

    ranks(count, run)


def test_backward_passes_of_two_modules_may_come_in_another_order_on_another_rank(ranks):  # noqa: F811
    def run(rank):
        module, other = resharded(Product(), line()), resharded(Product(), line())
        leaves = [X.clone().requires_grad_(), (X + 1).requires_grad_()]
        outputs = [module(leaves[0]), other(leaves[1])]
        plain = [step(Product(), x)[1] for x in (X, X + 1)]
        for which in (0, 1) if rank == 0 else (1, 0):
            pull(outputs[which])
        same([leaf.grad for leaf in leaves], plain)

    ranks(2, run)


def test_one_module_whose_calls_go_back_in_another_order_is_an_error_on_all_ranks(ranks):  # noqa: F811
    def run(rank):
        module = resharded(Product(), line(), name="product")
        leaves, outputs = losses(module, 2)
        found = text_of(lambda: pull(outputs[rank]))
        assert all(leaf.grad is None for leaf in leaves)
        same(step(module, X), step(Product(), X))  # the group can be used
        return found

    found = ranks(2, run)
    assert found == [found[0]] * 2
    assert "input[0] of product is not the same on all ranks" in found[0]


@pytest.mark.devices
def test_graphs_that_join_in_another_order_of_operations(ranks):  # noqa: F811
    def run(rank):
        found = []
        for module in (Product(), resharded(Product(), line())):
            leaves, outputs = losses(module, 4)
            order = outputs if rank == 0 else outputs[::-1]
            torch.autograd.backward([output.sum() for output in order])
            found.append([leaf.grad for leaf in leaves])
        same(found[1], found[0])

    ranks(2, run)


def held(rank, work):
    """Do it on rank 0 while the others wait for it to end, without a message between them."""
    store = dist.distributed_c10d._get_default_store()
    if rank == 0:
        try:
            return work()
        finally:
            store.set("done", "yes")
    store.wait(["done"])
    return None


def text_of(work):
    try:
        work()
    except sw.ExchangeError as error:
        return str(error)
    return "no error"


def test_backward_on_one_rank_only_is_an_error_after_the_timeout_of_the_group(ranks):  # noqa: F811
    def run(rank):
        module = resharded(Product(), line())
        output = module(X.clone().requires_grad_())
        text = held(rank, lambda: text_of(output.sum().backward))
        hooks_are_off()
        return text

    text, nothing = ranks(2, run, patience=3, timeout=20, dying=(9,))
    assert "rank 0 was waiting for" in text
    assert nothing is None


DIFFERENCES = {  # inputs, of which those that are made of x differ between ranks
    "input[0] of": lambda x: ((x, X), {}),
    "input[1] of": lambda x: ((X, x), {}),
    "input['y'] of": lambda x: ((X,), {"y": x}),
    "input[0][1] of": lambda x: (([X, x],), {}),
    "input['y']['b'][0] of": lambda x: ((X,), {"y": {"a": X, "b": (x,)}}),
    "input[0] of product": lambda x: ((X[: 2 + int(x[0, 0])],), {}),  # of another shape
}


class AnyProduct(nn.Module):
    def forward(self, *args, **kwargs):
        total = 0
        for x in tree_leaves((args, kwargs)):
            total = total + (x * x.sin()).sum()
        return total


def given(label, rank):
    """Rank 1 has other numbers."""
    return tree_map(lambda x: x.clone().requires_grad_(), DIFFERENCES[label](torch.ones_like(X) + (rank == 1)))


@pytest.mark.parametrize("check", [None, True])
def test_inputs_that_differ_raise_the_same_error_on_all_ranks(ranks, check):  # noqa: F811
    def run(rank):
        mesh, found = line(), {}
        module = AnyProduct()
        for label in DIFFERENCES:
            resharded(module, mesh, check=check, name="product")
            args, kwargs = given(label, rank)
            if check:
                found[label] = text_of(lambda args=args, kwargs=kwargs: module(*args, **kwargs))
            else:
                found[label] = text_of(module(*args, **kwargs).backward)
            hooks_are_off()
            same(step(module, X), step(AnyProduct(), X))  # the group can be used
        assert kept_alive(0)
        return found

    found = ranks(3, run)
    assert found == [found[0]] * 3
    for label, text in found[0].items():
        assert label in text
        assert "of product" in text
        assert "is not the same on all ranks of the mesh" in text
        assert "other values on ranks 0, 2 than on rank 1" in text


def test_without_a_check_nothing_is_compared(ranks):  # noqa: F811
    def run(rank):
        module = resharded(Product(), line(), check=False)
        x = (X + rank).requires_grad_()
        pull(module(x))
        return x.grad

    first, second = ranks(2, run)
    assert first.shape == second.shape


@pytest.mark.devices
def test_a_difference_in_one_bit_is_found_by_a_full_check(ranks):  # noqa: F811
    def run(rank):
        module = resharded(Product(), line(), check=True, name="product")
        x = numbers(300, 300)
        if rank == 1:
            x.view(torch.int32)[211, 97] ^= 1
        text = text_of(lambda: module(x.requires_grad_()))
        same(step(module, X), step(Product(), X))
        return text

    found = ranks(2, run)
    assert found == [found[0]] * 2
    assert "input[0] of product is not the same" in found[0]


def test_a_full_check_holds_for_nested_modules(ranks):  # noqa: F811
    class Outer(nn.Module):
        def __init__(self):
            super().__init__()
            self.inner = Product()

        def forward(self, x):
            return self.inner(x * (dist.get_rank() + 1))

    def run(rank):
        mesh, module = line(), Outer()
        resharded(module, mesh, name="outer")
        resharded(module.inner, mesh, check=True, name="inner")
        return text_of(lambda: module(X.clone().requires_grad_()))

    found = ranks(2, run)
    assert found == [found[0]] * 2
    assert "input[0] of inner is not the same" in found[0]


def test_everything_is_compared_where_everything_is_kept(ranks):  # noqa: F811
    def run(rank):
        mesh, found = line(), []
        for options in ({"check": True}, {}):
            module = resharded(MLP(WholeMLP(hidden=24)), mesh, what="all", name="mlp", **options)
            found.append(text_of(lambda module=module: module(X.clone().requires_grad_()).sum().backward()))
        return found

    found = ranks(2, run)
    assert found == [found[0]] * 2
    assert all("a saved tensor of shape (7, 12) of mlp is not the same" in text for text in found[0])


def test_only_the_ranks_of_the_mesh_raise(ranks):  # noqa: F811
    def run(rank):
        mesh = grid()["tp"]
        module = resharded(Product(), mesh, name="product")
        x = (X + (rank == 3)).requires_grad_()
        return text_of(module(x).sum().backward)

    found = ranks(4, run)
    assert found[:2] == ["no error"] * 2
    assert found[2] == found[3]
    assert "other values on rank 2 than on rank 3" in found[2]


def test_modules_are_accounted_for_by_name(ranks):  # noqa: F811
    def run(rank):
        mesh = line()
        first, second = (resharded(Product(), mesh, name=name) for name in ("first", "second"))
        x = X.clone().requires_grad_()
        with sw.activation.measure() as outside:
            first(x)
            with sw.activation.measure() as inside:
                output = second(first(x))
            assert inside.gathers == 0
        pull(output)  # it is accounted for whenever it is
        assert {name: (one.tensors, one.gathers) for name, one in inside.modules.items()} == {
            "first": (1, 1),
            "second": (1, 1),
        }
        assert {name: (one.tensors, one.gathers) for name, one in outside.modules.items()} == {"first": (1, 0)}
        size = X.numel() * 8
        assert inside.bytes_saved == 2 * size
        assert inside.total.bytes_gathered == 2 * size - inside.bytes_kept
        assert str(inside).startswith("first: 1 tensors of 672 bytes")
        unnamed = [resharded(Product(), mesh) for _ in range(2)]
        with sw.activation.measure() as account:
            for module in unnamed:
                step(module, X)
        assert len(account.modules) == 2
        assert all(name.startswith("Product ") for name in account.modules)

    ranks(2, run)
