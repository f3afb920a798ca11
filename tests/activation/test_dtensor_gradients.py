"""Gradients of modules with DTensors, to the last bit: what is replicated on the mesh is kept in parts."""

import pytest
import torch
from blocks import (
    SIZES,
    compared,
    cotangent,
    differs,
    everywhere,
    fresh,
    grid,
    line,
    numbers,
    pull,
    resharded,
    same,
    step,
)
from ranks import ranks  # noqa: F401
from torch import nn
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    PrepareModuleInput,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)

import shardwise as sw

pytestmark = pytest.mark.slow

WORLDS = pytest.mark.parametrize("count", SIZES)
CHANCE = pytest.mark.filterwarnings("ignore:DTensor random operators may not have complete support")
WIDTH, HEADS, SEQUENCE = 24, 12, 7


class Attention(nn.Module):
    def __init__(self):
        super().__init__()
        self.q, self.k, self.v, self.out = (nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(4))

    def forward(self, x):
        q, k, v = (f(x).unflatten(-1, (-1, WIDTH // HEADS)).transpose(1, 2) for f in (self.q, self.k, self.v))
        found = nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.out(found.transpose(1, 2).flatten(2))


class FeedForward(nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.gate, self.down = (
            nn.Linear(WIDTH, 2 * WIDTH),
            nn.Linear(WIDTH, 2 * WIDTH),
            nn.Linear(2 * WIDTH, WIDTH, bias=False),
        )

    def forward(self, x):
        return self.down(nn.functional.silu(self.gate(x)) * self.up(x))


class Block(nn.Module):
    """As in any transformer."""

    def __init__(self):
        super().__init__()
        self.norm, self.attention = nn.LayerNorm(WIDTH), Attention()
        self.norm_again, self.mlp, self.drop = nn.RMSNorm(WIDTH), FeedForward(), nn.Dropout(0.0)

    def forward(self, x):
        x = x + self.drop(self.attention(self.norm(x)))
        return x + self.drop(self.mlp(self.norm_again(x)))


def replicated(mesh):
    """A block with the same activations on every rank, as plain tensors."""
    plan = {f"attention.{name}": ColwiseParallel() for name in "qkv"} | {
        "mlp.up": ColwiseParallel(),
        "mlp.gate": ColwiseParallel(),
    }
    return parallelize_module(block(), mesh, plan | {"attention.out": RowwiseParallel(), "mlp.down": RowwiseParallel()})


def by_sequence(mesh):
    """A block whose activations are sharded by sequence between its parts, as DTensors: lengths may be uneven."""
    rows = RowwiseParallel(output_layouts=Shard(1), use_local_output=False)
    gathered = PrepareModuleInput(input_layouts=(Shard(1),), desired_input_layouts=(Replicate(),))
    plan = {f"attention.{name}": ColwiseParallel() for name in "qkv"} | {
        "mlp.up": ColwiseParallel(),
        "mlp.gate": ColwiseParallel(),
    }
    plan |= {"attention.out": rows, "mlp.down": rows, "attention": gathered, "mlp": gathered}
    plan |= {"norm": SequenceParallel(use_local_output=False), "norm_again": SequenceParallel(use_local_output=False)}
    return parallelize_module(block(), mesh, plan)


def block():
    torch.manual_seed(7)
    return Block()


def close(found, expected):
    """The same but for the order of sums."""
    for mine, theirs in zip(found, expected, strict=True):
        whole = mine.full_tensor() if isinstance(mine, DTensor) else mine
        torch.testing.assert_close(whole, theirs, rtol=1e-3, atol=1e-4)


def of_inputs(account, count, *, size, group=None):
    """Whole inputs of so many bytes are among what was kept; all that was kept was gathered once."""
    assert account.total.tensors == account.gathers == count
    assert account.bytes_saved == size
    assert everywhere(account.bytes_kept, group) == account.bytes_saved


@pytest.mark.devices
@WORLDS
def test_a_block_with_replicated_activations(ranks, count):  # noqa: F811
    def run(rank):
        x, mesh = numbers(2, SEQUENCE, WIDTH), line()
        module = replicated(mesh)
        account, found = compared(module, mesh, x, steps=1)
        close(found, step(block(), x))
        whole = x.numel() * 4
        # the input of the block; the output of each norm, once for its linears. What norms themselves save is plain
        of_inputs(account, 3, size=3 * whole)

    ranks(count, run)


@WORLDS
def test_a_block_by_sequence_of_a_length_that_does_not_divide(ranks, count):  # noqa: F811
    def run(rank):
        x, mesh = numbers(2, SEQUENCE, WIDTH), line()
        module, given = by_sequence(mesh), distribute_tensor(x, mesh, [Shard(1)])
        account, found = compared(module, mesh, given, steps=1)
        plain = step(block(), x)
        close(found[1:], gradients(block(), x, given))
        close(found[:1], plain[:1])
        of_inputs(account, 2, size=2 * x.numel() * 4)  # what was gathered for the attention and the mlp

    ranks(count, run)


def gradients(module, x, given):
    """Of the whole module, where every rank pulls with the cotangent of its part."""
    (leaf,) = fresh([x])
    output = module(leaf)
    parts = distribute_tensor(output.detach(), given.device_mesh, [Shard(1)]).to_local()
    shape, stride = output.shape, output.stride()
    mine = DTensor.from_local(
        cotangent(parts), given.device_mesh, [Shard(1)], run_check=False, shape=shape, stride=stride
    )
    output.backward(mine.full_tensor())
    return [leaf.grad, *(p.grad for p in module.parameters())]


@pytest.mark.parametrize("count", [2, 3])
def test_parts_of_a_block_may_be_resharded_by_themselves(ranks, count):  # noqa: F811
    def run(rank):
        x, mesh = numbers(2, SEQUENCE, WIDTH), line()
        module = by_sequence(mesh)
        given = distribute_tensor(x, mesh, [Shard(1)])
        plain = step(module, given)
        for name in ("attention", "mlp"):
            resharded(module.get_submodule(name), mesh, name=name)
        with sw.activation.measure() as account:
            same(step(module, given), plain)
        assert list(account.modules) == ["attention", "mlp"]
        assert [one.tensors for one in account.modules.values()] == [1, 1]
        resharded(module, mesh)  # around them as well
        same(step(module, given), plain)

    ranks(count, run)


@CHANCE
@WORLDS
def test_a_block_with_dropout_of_its_own_on_every_rank(ranks, count):  # noqa: F811
    def run(rank):
        x, mesh = numbers(2, SEQUENCE, WIDTH), line()
        for make, given in ((replicated, x), (by_sequence, distribute_tensor(x, mesh, [Shard(1)]))):
            module = make(mesh)
            module.drop.p = 0.5
            account, found = compared(module, mesh, given, steps=1)
            assert account.gathers == account.total.tensors > 0
            assert everywhere(account.bytes_kept) == account.bytes_saved
            assert differs(found[0])

    ranks(count, run)


@CHANCE
@pytest.mark.parametrize("count", [2, 3])
def test_a_replicated_dtensor_that_chance_made_different_stays_whole(ranks, count):  # noqa: F811
    class Chance(nn.Module):
        def forward(self, x):
            early = x.sin()
            late = nn.functional.dropout(x, 0.5)
            return early * early + late * late  # the first is the same everywhere; the second is not

    def run(rank):
        mesh = line()
        x = distribute_tensor(numbers(4, 6), mesh, [Replicate()])
        account, found = compared(Chance(), mesh, x, steps=1)
        assert differs(found[1])
        assert 1 <= account.total.tensors <= 2
        assert account.gathers == account.total.tensors

    ranks(count, run)


CASES = {  # modules, placements of their weights, and the input
    "Linear": (lambda: nn.Linear(6, 12), {"weight": [Shard(0)], "bias": [Shard(0)]}, (5, 6)),
    "LayerNorm": (lambda: nn.LayerNorm(6), {}, (5, 6)),
    "RMSNorm": (lambda: nn.RMSNorm(6), {}, (3, 5, 6)),
    "Embedding": (lambda: nn.Embedding(12, 5), {"weight": [Shard(1)]}, None),
    "Conv2d": (lambda: nn.Conv2d(3, 5, 3), {}, (2, 3, 6, 7)),
    "GELU": (nn.GELU, {}, (3, 5)),
    "Softmax": (lambda: nn.Softmax(-1), {}, (3, 5)),
}


def distributed(module, mesh, placements, everywhere=()):
    """With weights as DTensors on a mesh, in these placements or replicated."""
    for name, p in list(module.named_parameters()):
        placed = placements.get(name, [Replicate()])
        setattr(module, name, nn.Parameter(distribute_tensor(p.detach(), mesh, [*everywhere, *placed])))
    return module


@WORLDS
def test_modules_with_replicated_dtensors(ranks, count):  # noqa: F811
    def run(rank):
        mesh, found = line(), {}
        for name, (make, placements, shape) in CASES.items():
            torch.manual_seed(1)
            module = distributed(make(), mesh, placements)
            x = numbers(*shape) if shape else torch.arange(21).reshape(3, 7).remainder(12)
            account, _ = compared(module, mesh, distribute_tensor(x, mesh, [Replicate()]), steps=1)
            assert everywhere(account.bytes_kept) == account.bytes_saved
            found[name] = account.total.tensors, account.gathers
        return found

    found = ranks(count, run)
    assert found == [found[0]] * count
    for name, (tensors, gathers) in found[0].items():
        assert gathers == tensors >= 1, name


def test_a_larger_mesh_of_which_one_axis_is_resharded(ranks):  # noqa: F811
    def run(rank):
        mesh, x = grid(), numbers(6, 5, WIDTH)
        group = mesh["tp"].get_group()
        torch.manual_seed(3)
        module = FeedForward()
        for name in ("up", "gate"):
            distributed(module.get_submodule(name), mesh, {"weight": [Shard(0)], "bias": [Shard(0)]}, [Replicate()])
        distributed(module.down, mesh, {"weight": [Shard(1)]}, [Replicate()])
        given = distribute_tensor(x, mesh, [Shard(0), Replicate()])
        account, _ = compared(module, mesh["tp"], given, steps=1)
        of_inputs(account, 1, size=x.numel() * 4 // 2, group=group)
        assert differs(given)
        assert not differs(given, group)

        resharded(module, mesh["dp"])  # nothing is replicated there but the weights
        with sw.activation.measure() as account:
            step(module, given)
        assert account.total.tensors == 0

    ranks(4, run)


def test_a_block_on_either_axis_of_a_larger_mesh(ranks):  # noqa: F811
    def run(rank):
        whole = grid()
        for axis, other in (("dp", "tp"), ("tp", "dp")):
            mesh = whole[axis]
            x = numbers(2, SEQUENCE, WIDTH, seed=whole[other].get_local_rank())
            account, found = compared(by_sequence(mesh), mesh, distribute_tensor(x, mesh, [Shard(1)]), steps=1)
            of_inputs(account, 2, size=2 * x.numel() * 4, group=mesh.get_group())
            assert differs(found[0])

    ranks(4, run)


@pytest.mark.devices
def test_dtensors_that_are_not_replicated_stay_whole(ranks):  # noqa: F811
    def run(rank):
        mesh = line()
        for placement in (Shard(0), Shard(1), Partial()):
            local = numbers(4, 6, seed=rank).requires_grad_()
            module = resharded(nn.GELU(), mesh)
            with sw.activation.measure() as account:
                x = DTensor.from_local(local, mesh, [placement])
                output = module(x if placement != Partial() else x.redistribute(mesh, [Shard(0)]))
                pull(output)
            assert account.total.tensors == 0, placement

    ranks(2, run)
