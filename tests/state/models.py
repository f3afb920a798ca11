"""A small Llama, sharded in every way that torch knows, and what the tests of state dicts share."""

from functools import partial

import pytest
import torch
import torch._dynamo  # a process imports it with its first DTensor, which takes seconds: once here, not on every rank
import torch.distributed as dist
import torch.distributed.checkpoint.state_dict  # the same
import torch.nn.functional as F  # noqa: N812  as everybody calls it
from devices import device_type, there
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Replicate, distribute_tensor
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    parallelize_module,
)

import shardwise as sw

VOCABULARY, WIDTH, HEAD, HEADS, KEYS, HIDDEN, LAYERS = 37, 32, 4, 8, 4, 44, 2  # 37 rows divide by nothing
TOKENS = torch.arange(20).reshape(2, 10) * 7 % VOCABULARY  # on the CPU
HOWS = ("plain", "fsdp", "tp", "both")


class Attention(nn.Module):
    def __init__(self):
        super().__init__()
        sizes = {"q": HEADS * HEAD, "k": KEYS * HEAD, "v": KEYS * HEAD}
        for name, size in sizes.items():
            setattr(self, name, nn.Linear(WIDTH, size, bias=False))
        self.o = nn.Linear(HEADS * HEAD, WIDTH, bias=False)

    def forward(self, x):
        q, k, v = (part(x).unflatten(-1, (-1, HEAD)).transpose(-2, -3) for part in (self.q, self.k, self.v))
        k, v = (part.repeat_interleave(q.shape[-3] // k.shape[-3], dim=-3) for part in (k, v))
        found = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.o(found.transpose(-2, -3).flatten(-2))


class Gated(nn.Module):
    def __init__(self):
        super().__init__()
        self.gate, self.up = nn.Linear(WIDTH, HIDDEN, bias=False), nn.Linear(WIDTH, HIDDEN, bias=False)
        self.down = nn.Linear(HIDDEN, WIDTH, bias=False)

    def forward(self, x):
        return self.down(F.silu(self.gate(x)) * self.up(x))


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.attention_norm, self.attention = nn.RMSNorm(WIDTH), Attention()
        self.mlp_norm, self.mlp = nn.RMSNorm(WIDTH), Gated()

    def forward(self, x):
        x = x + self.attention(self.attention_norm(x))
        return x + self.mlp(self.mlp_norm(x))


class Llama(nn.Module):
    """Random weights that depend on the seed alone."""

    def __init__(self, seed=0):
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, WIDTH)
        self.layers = nn.ModuleList(Block() for _ in range(LAYERS))
        self.norm = nn.RMSNorm(WIDTH)
        self.head = nn.Linear(WIDTH, VOCABULARY, bias=False)
        draw = torch.Generator().manual_seed(seed)
        with torch.no_grad():
            for parameter in self.parameters():
                parameter.copy_(torch.randn(parameter.shape, generator=draw, device="cpu") / 4)

    def forward(self, tokens):
        x = self.embed(tokens)
        for layer in self.layers:
            x = layer(x)
        return self.head(self.norm(x))


def fsdp(model, mesh):
    """FSDP2 over a mesh with one dim."""
    for layer in model.layers:
        fully_shard(layer, mesh=mesh)
    return fully_shard(model, mesh=mesh, reshard_after_forward=True)


def tp(model, mesh, *, norms=False):
    """Tensor parallel over a mesh with one dim. `norms`: those are DTensors too, not left as they are."""
    whole = {"embed": RowwiseParallel(input_layouts=Replicate()), "head": ColwiseParallel(output_layouts=Replicate())}
    parallelize_module(model, mesh, whole)
    for layer in model.layers:
        columns = {f"attention.{name}": ColwiseParallel() for name in "qkv"}
        columns |= {f"mlp.{name}": ColwiseParallel() for name in ("gate", "up")}
        parallelize_module(layer, mesh, columns | {"attention.o": RowwiseParallel(), "mlp.down": RowwiseParallel()})
    for module in model.modules() if norms else ():
        if isinstance(module, nn.RMSNorm):
            module.weight = nn.Parameter(distribute_tensor(module.weight.detach(), mesh, [Replicate()]))
            module.forward = partial(normed, module)
    return model


def normed(module, x):
    """What RMSNorm does, with weights that are DTensors."""
    return F.rms_norm(x, (WIDTH,), module.weight.to_local(), module.eps)


def sharded(how, seed=0, ranks=range(4)):
    """A Llama, sharded over these ranks; None on others. All ranks call."""
    ranks = list(ranks)
    if how == "both":
        half = len(ranks) // 2
        mesh = DeviceMesh(device_type(), [ranks[:half], ranks[half:]], mesh_dim_names=("dp", "tp"))
        if dist.get_rank() not in ranks:
            return None
        return fsdp(tp(Llama(seed), mesh["tp"], norms=True), mesh["dp"])
    mesh = DeviceMesh(device_type(), ranks)
    if dist.get_rank() not in ranks:
        return None
    return {"plain": lambda model, _: model, "fsdp": fsdp, "tp": tp}[how](Llama(seed), mesh)


def state(model):
    """Its state dict; None where there is no model."""
    return None if model is None else model.state_dict()


def full(value):
    """The whole tensor, by torch's own word."""
    return value.full_tensor() if isinstance(value, DTensor) else value


def weights(model):
    """The whole tensors of a model, as they are now."""
    return {name: full(value).clone() for name, value in model.state_dict().items()}


@torch.no_grad()
def logits(found):
    """What a plain Llama with these whole weights says."""
    model = Llama(seed=99)
    model.load_state_dict(found)
    return model(there(TOKENS))


@torch.no_grad()
def said(model):
    """What a model says itself."""
    return full(model(there(TOKENS)))


def same(found, expected):
    """Equal to the last bit."""
    assert (found.dtype, found.shape) == (expected.dtype, expected.shape)
    left, right = (one.detach().contiguous().flatten().view(torch.uint8) for one in (found, expected))
    torch.testing.assert_close(left, right, rtol=0, atol=0)


def all_same(found, expected):
    """Equal to the last bit, name by name."""
    assert list(found) == list(expected)
    for name, value in expected.items():
        same(found[name], value)


def numbers(*shape, dtype=torch.float32, start=0):
    """Different numbers for every cell."""
    return (torch.arange(torch.Size(shape).numel(), dtype=torch.float64) + start).reshape(shape).to(dtype)


def held(whole, layout, group=None):
    """This rank's part of a whole tensor by a layout or its notation; None on ranks that have none."""
    layout = sw.parse(layout) if isinstance(layout, str) else layout
    rank = dist.get_rank()
    if rank not in layout:
        return None
    parts = [torch.empty(shape, dtype=whole.dtype) for shape in layout.local_shapes(rank)]
    for piece in layout.pieces(rank):
        box = tuple(slice(a, b) for a, b in zip(piece.box.lo, piece.box.hi, strict=True))
        torch.as_strided(parts[piece.buffer], piece.box.shape, piece.strides, piece.offset).copy_(whole[box])
    return sw.ShardedTensor(parts, layout, group)


def lies(found, whole, layout):
    """This rank has exactly its part of the whole tensor."""
    expected = held(whole, layout)
    if expected is None:
        assert found is None
        return
    assert sw.layout_of(found) == expected.layout
    tensors = [found.to_local()] if isinstance(found, DTensor) else list(found.shards)
    assert len(tensors) == len(expected.shards)
    for tensor, part in zip(tensors, expected.shards, strict=True):
        same(tensor, part)


def dtensor(whole, mesh, *placements):
    """The whole as a DTensor, by torch's own word."""
    return distribute_tensor(whole, mesh, placements)


def meshes():
    """Of all four ranks: in a row, and two by two."""
    return init_device_mesh(device_type(), (4,)), init_device_mesh(device_type(), (2, 2), mesh_dim_names=("dp", "tp"))


def refused(call):
    """What it says, once it is refused as it should be; the group can be used after that."""
    with pytest.raises(ValueError) as error:  # noqa: PT011  the text is held against those of the other ranks
        call()
    assert isinstance(error.value, sw.ExchangeError)
    usable()
    return str(error.value)


def answer(call):
    """What it says where it is refused as it should be, and else what has come of it: for many cases in one run."""
    try:
        call()
    except ValueError as error:
        found = str(error) if isinstance(error, sw.ExchangeError) else f"refused on this rank alone: {error!r}"
    except Exception as error:
        found = f"failed: {error!r}"
    else:
        found = "not refused"
    usable()
    return found


def usable():
    """The group can still reshard."""
    owners = dist.get_world_size()
    whole, rows, columns = numbers(owners, owners), f"{owners}x{owners}/S0@{owners}", f"{owners}x{owners}/S1@{owners}"
    lies(sw.reshard(held(whole, rows), columns), whole, columns)


def same_refusals(found, **words):
    """On all ranks the same texts, with these words in them."""
    for name, several in words.items():
        said = [texts[name] for texts in found]
        assert said == [said[0]] * len(said), f"{name}: {said}"
        for word in [several] if isinstance(several, str) else several:
            assert word in said[0], f"{name}: {word!r} is not in {said[0]!r}"
