"""Gradients of modules with plain tensors, to the last bit: what is the same on all ranks is kept in parts, no more."""

import pytest
import torch
import torch.distributed as dist
from blocks import (
    MLP,
    SIZES,
    Copied,
    Summed,
    WholeMLP,
    compared,
    differs,
    everywhere,
    grid,
    kept_in_parts,
    line,
    numbers,
    resharded,
    same,
    share,
    step,
    whole_numbers,
)
from ranks import ranks  # noqa: F401
from torch import nn

import shardwise as sw

pytestmark = pytest.mark.slow

WORLDS = pytest.mark.parametrize("count", SIZES)


@pytest.mark.devices
@WORLDS
def test_a_tensor_parallel_mlp_has_the_gradients_of_the_whole_one(ranks, count):  # noqa: F811
    def run(rank):
        whole, x = WholeMLP(), whole_numbers(7, 12, seed=9)
        expected = step(whole, x)
        part = MLP(whole)
        account, found = compared(part, line(), x)
        kept_in_parts(account, tensors=1, size=7 * 12 * 8)
        up, bias, down = expected[2:]
        same(found, [*expected[:2], share(up, 0, None), share(bias, 0, None), share(down, 1, None)])
        assert differs(part.up)

    ranks(count, run)


@WORLDS
def test_activations_that_save_what_differs_per_rank_are_left_alone(ranks, count):  # noqa: F811
    def run(rank):
        mesh = line()
        for act in (nn.GELU, nn.Tanh, nn.Sigmoid, nn.SiLU):
            part = MLP(WholeMLP(hidden=24, act=act))
            account, found = compared(part, mesh, numbers(5, 12, dtype=torch.float64))
            kept_in_parts(account, tensors=1, size=5 * 12 * 8)
            assert differs(found[2])

    ranks(count, run)


def layer_norm(elementwise=True):
    return nn.LayerNorm(10, elementwise_affine=elementwise)


def conv(**options):
    return nn.Conv2d(3, 5, 3, **options)


SAVERS = {  # modules, their inputs, and how many bytes of these they save
    "LayerNorm": (layer_norm, [(7, 10)], 280),
    "LayerNorm without weights": (lambda: layer_norm(False), [(7, 10)], 280),
    "RMSNorm": (lambda: nn.RMSNorm(10), [(7, 10)], 280),
    "GroupNorm": (lambda: nn.GroupNorm(2, 6), [(3, 6, 5)], 360),
    "BatchNorm": (lambda: nn.BatchNorm1d(6), [(5, 6, 3)], 360),
    "Conv1d": (lambda: nn.Conv1d(2, 3, 2), [(2, 2, 9)], 144),
    "Conv2d": (conv, [(2, 3, 7, 5)], 840),
    "Conv2d with stride": (lambda: conv(stride=2, padding=1), [(1, 3, 9, 9)], 972),
    "ConvTranspose2d": (lambda: nn.ConvTranspose2d(3, 2, 2), [(2, 3, 4, 5)], 480),
    "Linear of one row": (lambda: nn.Linear(10, 3), [(10,)], 40),
    "Bilinear": (lambda: nn.Bilinear(4, 6, 3), [(5, 4), (5, 6)], 200),
    "GRU": (lambda: nn.GRUCell(4, 3), [(5, 4), (5, 3)], 140),
    "GELU": (nn.GELU, [(3, 5)], 60),
}


@WORLDS
def test_modules_that_save_their_inputs_keep_and_gather_each_once(ranks, count):  # noqa: F811
    def run(rank):
        mesh, found = line(), {}
        for name, (make, shapes, _) in SAVERS.items():
            torch.manual_seed(rank)  # weights are this rank's own
            module = make()
            inputs = [numbers(*shape, seed=seed) for seed, shape in enumerate(shapes)]
            account, _ = compared(module, mesh, *inputs, steps=1)
            total = account.total
            found[name] = total.tensors, total.gathers, total.bytes_saved, everywhere(total.bytes_kept)
        return found

    expected = {name: (len(shapes), len(shapes), size, size) for name, (_, shapes, size) in SAVERS.items()}
    assert ranks(count, run) == [expected] * count


@WORLDS
def test_an_embedding_keeps_its_indices_in_parts(ranks, count):  # noqa: F811
    def run(rank):
        torch.manual_seed(rank)
        indices = torch.arange(33).reshape(3, 11).remainder(7)
        account, found = compared(nn.Embedding(7, 4), line(), indices)
        kept_in_parts(account, tensors=1, size=33 * 8)
        assert differs(found[0])

    ranks(count, run)


def test_a_batch_norm_counts_its_statistics_once_per_call(ranks):  # noqa: F811
    def run(rank):
        plain, parted = nn.BatchNorm1d(6), nn.BatchNorm1d(6)
        resharded(parted, line())
        for seed in range(3):
            same(step(parted, numbers(5, 6, seed=seed)), step(plain, numbers(5, 6, seed=seed)))
            same(list(parted.buffers()), list(plain.buffers()))

    ranks(2, run)


class Block(nn.Module):
    """Two masks that differ per rank, one of them drawn by hand, beside a buffer and a closed-over tensor."""

    def __init__(self, whole):
        super().__init__()
        self.norm, self.mlp, self.drop = nn.LayerNorm(12).double(), MLP(whole), nn.Dropout(0.4)
        self.register_buffer("scale", numbers(12, seed=40 + dist.get_rank(), dtype=torch.float64))
        self.outside = numbers(12, seed=50 + dist.get_rank(), dtype=torch.float64)

    def forward(self, x):
        mask = torch.rand_like(x) > 0.3
        return x * mask + self.drop(self.mlp(self.norm(x))) * self.scale + x * self.outside


@WORLDS
def test_masks_buffers_and_other_tensors_of_a_rank_are_never_mixed(ranks, count):  # noqa: F811
    def run(rank):
        block, x = Block(WholeMLP(hidden=24)), numbers(5, 12, dtype=torch.float64)
        account, found = compared(block, line(), x)
        kept_in_parts(account, tensors=1, size=5 * 12 * 8)
        assert differs(found[0])
        assert differs(found[1])
        block.eval()
        compared(block, line(), x)

    ranks(count, run)


class Attention(nn.Module):
    """Every rank has as many heads as it likes."""

    def __init__(self):
        super().__init__()
        heads = dist.get_rank() + 1
        self.heads, self.qkv, self.out = heads, nn.Linear(8, 3 * heads * 4), nn.Linear(heads * 4, 8, bias=False)

    def forward(self, x, *, mask):
        qkv = self.qkv(Copied.apply(x, None)).unflatten(-1, (3, self.heads, 4))
        found = nn.functional.scaled_dot_product_attention(*qkv.permute(2, 0, 3, 1, 4), attn_mask=mask)
        return Summed.apply(self.out(found.transpose(1, 2).flatten(2)), None)


@WORLDS
def test_attention_over_the_heads_of_a_rank(ranks, count):  # noqa: F811
    def run(rank):
        torch.manual_seed(rank)
        account, found = compared(Attention(), line(), numbers(2, 7, 8), mask=numbers(7, 7, seed=1) > 0)
        assert account.total.tensors == account.gathers
        assert account.bytes_saved >= 2 * 2 * 7 * 8 * 4
        assert everywhere(account.bytes_kept) == account.bytes_saved
        return found[:2]

    found = ranks(count, run)
    same(found, [found[0]] * count)


def test_a_tensor_saved_by_several_operations_is_kept_and_gathered_once(ranks):  # noqa: F811
    class Many(nn.Module):
        def __init__(self):
            super().__init__()
            self.layers = nn.ModuleList(nn.Linear(6, 6) for _ in range(5))

        def forward(self, x):
            return sum(layer(x.view(-1, 6)).sin() for layer in self.layers) + (x * x).view(-1, 6) + x.exp().view(-1, 6)

    def run(rank):
        account, _ = compared(Many(), line(), numbers(3, 2, 6))
        kept_in_parts(account, tensors=1, size=3 * 2 * 6 * 4)

    ranks(2, run)


def test_one_axis_of_a_mesh_keeps_to_its_own_ranks(ranks):  # noqa: F811
    def run(rank):
        mesh = grid()
        group, row = mesh["tp"].get_group(), rank // 2
        part, x = MLP(WholeMLP(), group), numbers(7, 12, seed=row, dtype=torch.float64)
        account, found = compared(part, mesh["tp"], x)
        kept_in_parts(account, tensors=1, size=7 * 12 * 8, group=group)
        assert not differs(found[1], group)
        assert differs(found[1])

    ranks(4, run)


def test_everything_is_kept_in_parts_on_request(ranks):  # noqa: F811
    class Whole(nn.Module):
        def __init__(self):
            super().__init__()
            self.mlp, self.norm = WholeMLP(act=nn.GELU), nn.LayerNorm(12).double()

        def forward(self, x):
            return self.norm(self.mlp(x).exp().tanh())

    def run(rank):
        module, x, mesh = Whole(), numbers(7, 12, dtype=torch.float64), line()
        with torch.no_grad():
            for p in module.parameters():
                p.mul_(0.1)
        some, plain = compared(module, mesh, x)
        every, again = compared(module, mesh, x, options={"what": "all"})
        same(again, plain)
        assert some.total.tensors == 2
        assert every.total.tensors > 10
        assert everywhere(every.bytes_kept) == every.bytes_saved
        return every.bytes_saved // 2

    wide, narrow, row = 7 * 26 * 8, 7 * 12 * 8, 7 * 8
    # the input; those of GELU and of the second weight; exp, tanh and its norm, with mean and deviation: no weights
    assert ranks(3, run) == [narrow + 2 * wide + 2 * narrow + 2 * row] * 3


def test_what_is_everything_or_inputs():
    with pytest.raises(ValueError, match="'inputs' or 'all', not 'most'"):
        sw.input_reshard(nn.Linear(2, 2), None, 0, what="most")
