"""torch.utils.checkpoint, both variants, around modules that are resharded and inside them."""

import pytest
import torch
from blocks import MLP, WholeMLP, compared, kept_in_parts, line, numbers, pull, resharded, same
from ranks import ranks  # noqa: F401
from torch import nn
from torch.utils.checkpoint import checkpoint

import shardwise as sw

X = numbers(7, 12, dtype=torch.float64)
SIZE = X.numel() * 8


@pytest.mark.parametrize("reentrant", [False, True])
def test_a_checkpoint_around_recomputes_and_keeps_nothing(ranks, reentrant):  # noqa: F811
    class Counted(nn.Module):
        calls = 0

        def forward(self, x):
            self.calls += 1
            return x.tanh()

    def run(rank):
        found = []
        for parted in (False, True):
            module = MLP(WholeMLP(act=Counted))
            if parted:
                resharded(module, line())
            x = X.clone().requires_grad_()
            with sw.activation.measure() as account:
                output = checkpoint(module, x, use_reentrant=reentrant)
                assert account.total.tensors == 0
                pull(output)
            found.append([output, x.grad, *(p.grad for p in module.parameters())])
            assert module.act.calls == 2
            assert account.total.tensors == 0
        same(found[1], found[0])

    ranks(2, run)


@pytest.mark.devices
@pytest.mark.parametrize("reentrant", [False, True])
def test_a_checkpoint_inside_recomputes_from_an_input_that_is_kept_in_parts(ranks, reentrant):  # noqa: F811
    class Inside(nn.Module):
        def __init__(self):
            super().__init__()
            self.mlp, self.norm, self.calls = MLP(WholeMLP(act=nn.GELU)), nn.LayerNorm(12).double(), 0

        def body(self, x):
            self.calls += 1
            return nn.functional.dropout(self.mlp(x), 0.3)

        def forward(self, x):
            return self.norm(x) + checkpoint(self.body, x, use_reentrant=reentrant)

    def run(rank):
        module, mesh = Inside(), line()
        account, _ = compared(module, mesh, X)
        kept_in_parts(account, tensors=1, size=SIZE)
        assert module.calls == 2 * 4
        resharded(module.mlp, mesh)  # and what is inside the checkpoint as well
        compared(module, mesh, X)

    ranks(2, run)


@pytest.mark.parametrize("reentrant", [False, True])
def test_some_blocks_may_be_checkpointed_and_others_resharded(ranks, reentrant):  # noqa: F811
    def run(rank):
        mesh, found = line(), []
        for parted in (False, True):
            blocks = [MLP(WholeMLP(hidden=8)) for _ in range(4)]
            x = leaf = X.clone().requires_grad_()
            with sw.activation.measure() as account:
                for number, block in enumerate(blocks):
                    if parted:
                        resharded(block, mesh)
                    x = (checkpoint(block, x, use_reentrant=reentrant) if number % 2 else block(x)) * 0.01
                pull(x)
            found.append([leaf.grad, *(p.grad for block in blocks for p in block.parameters())])
        same(found[1], found[0])
        kept_in_parts(account, tensors=2, size=2 * SIZE, steps=1)

    ranks(3, run)
