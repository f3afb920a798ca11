"""Inside of DDP and FSDP2, which have hooks and storages of their own."""

from collections import OrderedDict

import pytest
import torch
from blocks import MLP, WholeMLP, differs, fresh, grid, kept_alive, local, numbers, pull, resharded, same
from ranks import ranks  # noqa: F401
from torch import nn
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import Shard, distribute_tensor
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    parallelize_module,
)
from torch.nn.parallel import DistributedDataParallel

import shardwise as sw

pytestmark = pytest.mark.slow


class Chain(nn.Module):
    """Blocks in a row, each with an input that is the same on the ranks of an axis."""

    def __init__(self, group):
        super().__init__()
        self.blocks = nn.ModuleList(MLP(WholeMLP(), group) for _ in range(3))
        self.norms = nn.ModuleList(nn.LayerNorm(12).double() for _ in range(3))

    def forward(self, x):
        for norm, block in zip(self.norms, self.blocks, strict=True):
            x = x + block(norm(x))
        return x


def trained(model, inputs, steps=3):
    """Gradients and parameters of some steps of an optimizer."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    found = []
    for number in range(steps):
        optimizer.zero_grad()
        (x,) = fresh([inputs + number])
        output = model(x)
        pull(output)
        found += [output.detach(), x.grad, *(local(p.grad).clone() for p in model.parameters())]
        optimizer.step()
    return found + [local(p.detach()).clone() for p in model.parameters()]


def twice(make, x):
    """Without and with parts."""
    plain = trained(make(False), x)
    with sw.activation.measure() as account:
        found = trained(make(True), x)
    same(found, plain)
    assert account.gathers == account.total.tensors > 0
    assert kept_alive(0)
    return account, found


@pytest.mark.parametrize(
    ("which", "options"),
    [("whole", {}), ("blocks", {"find_unused_parameters": True}), ("blocks", {"static_graph": True})],
)
def test_ddp_outside(ranks, which, options):  # noqa: F811
    def run(rank):
        mesh = grid()
        group, row = mesh["tp"].get_group(), rank // 2
        x = numbers(5, 12, seed=row, dtype=torch.float64)

        def make(parted):
            chain = Chain(group)
            for part in (chain,) if which == "whole" else chain.blocks:
                if parted:
                    resharded(part, mesh["tp"])
            return DistributedDataParallel(chain, process_group=mesh["dp"].get_group(), **options)

        account, found = twice(make, x)
        assert account.total.tensors == (3 if which == "whole" else 9)
        assert differs(found[1], mesh["dp"].get_group())
        assert not differs(found[1], group)

    ranks(4, run)


@pytest.mark.parametrize("reshard", [True, False])
def test_fsdp_outside_on_the_other_axis(ranks, reshard):  # noqa: F811
    def run(rank):
        mesh = grid()
        group, row = mesh["tp"].get_group(), rank // 2
        x = numbers(5, 12, seed=row, dtype=torch.float64)

        def make(parted):
            chain = Chain(group)
            for part in (*chain.blocks, *chain.norms):
                if parted:
                    resharded(part, mesh["tp"])
                fully_shard(part, mesh=mesh["dp"], reshard_after_forward=reshard)
            return fully_shard(chain, mesh=mesh["dp"], reshard_after_forward=reshard)

        account, found = twice(make, x)
        assert account.total.tensors == 3 * 6
        assert differs(found[1], mesh["dp"].get_group())

    ranks(4, run)


@pytest.mark.filterwarnings("ignore:FSDP2-wrapped module .* returned a view tensor")
def test_fsdp_and_parallelize_module_on_one_mesh(ranks):  # noqa: F811
    class Block(nn.Module):
        def __init__(self):
            super().__init__()
            self.up, self.down = nn.Linear(12, 20), nn.Linear(20, 12)

        def forward(self, x):
            return self.down(nn.functional.gelu(self.up(x)))

    def run(rank):
        mesh, row = grid(), rank // 2
        x = numbers(5, 12, seed=row)

        def make(parted):
            torch.manual_seed(1)
            chain = nn.Sequential(Block(), Block())
            for block in chain:
                parallelize_module(block, mesh["tp"], {"up": ColwiseParallel(), "down": RowwiseParallel()})
                if parted:
                    resharded(block, mesh["tp"])
                fully_shard(block, mesh=mesh["dp"])
            return fully_shard(chain, mesh=mesh["dp"])

        account, found = twice(make, x)
        assert account.total.tensors == 2 * 3
        assert not differs(found[1], mesh["tp"].get_group())

    ranks(4, run)


def test_fsdp_on_the_same_axis_with_inputs_that_are_the_same(ranks):  # noqa: F811
    def run(rank):
        mesh = grid()["tp"]

        def make(parted):
            whole = nn.Sequential(WholeMLP(hidden=8), nn.LayerNorm(12).double())
            fully_shard(whole, mesh=mesh)
            return resharded(whole, mesh) if parted else whole  # also around it

        twice(make, numbers(5, 12, dtype=torch.float64))

    ranks(4, run)


def test_fsdp_that_casts_inputs(ranks):  # noqa: F811
    def run(rank):
        mesh = grid()
        policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)

        def make(parted):
            chain = nn.Sequential(WholeMLP(hidden=8).float(), WholeMLP(hidden=8).float())
            for part in chain:
                if parted:
                    resharded(part, mesh["tp"])
                fully_shard(part, mesh=mesh["dp"], mp_policy=policy)
            return fully_shard(chain, mesh=mesh["dp"], mp_policy=policy)

        account, _ = twice(make, numbers(5, 12, seed=rank // 2) / 8)
        assert account.bytes_saved == 2 * 3 * 5 * 12 * 2

    ranks(4, run)


def test_sequence_parallel_blocks_inside_of_fsdp(ranks):  # noqa: F811
    def run(rank):
        mesh, row = grid(), rank // 2
        tp = mesh["tp"]
        x = distribute_tensor(numbers(2, 7, 12, seed=row), tp, [Shard(1)])
        plan = {
            "up": ColwiseParallel(input_layouts=Shard(1)),
            "down": RowwiseParallel(output_layouts=Shard(1), use_local_output=False),
        }

        def make(parted):
            torch.manual_seed(2)
            block = nn.Sequential(OrderedDict(up=nn.Linear(12, 16), act=nn.GELU(), down=nn.Linear(16, 12)))
            parallelize_module(block, tp, plan)
            return fully_shard(resharded(block, tp) if parted else block, mesh=mesh["dp"])

        account, _ = twice(make, x)
        assert account.total.tensors == 3  # the gathered input

    ranks(4, run)
