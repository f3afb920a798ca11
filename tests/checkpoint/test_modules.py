"""Modules as targets of load: with memory, on the meta device, under FSDP2, with buffers and tied weights."""

import re

import pytest
import torch
from devices import device_type
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Shard, distribute_module, distribute_tensor

import shardwise as sw
from shardwise import CheckpointError, Concat, checkpoint
from shardwise.testing import on_ranks

pytestmark = pytest.mark.filterwarnings("ignore:FSDP2-wrapped module:UserWarning")


class Rotary(nn.Module):
    """Has a buffer that is in no state dict, and a method that fills it."""

    def __init__(self):
        super().__init__()
        self.register_buffer("inv_freq", torch.empty(4), persistent=False)
        self.reset_parameters()

    def reset_parameters(self):
        self.inv_freq.copy_(1.0 / 10 ** torch.arange(4))


class Forgetful(Rotary):
    """Fills only a part."""

    def reset_parameters(self):
        self.inv_freq[1:] = 3


class Model(nn.Module):
    def __init__(self, rotary=Rotary):
        super().__init__()
        self.embed = nn.Embedding(10, 6)
        self.layers = nn.ModuleList(nn.Linear(6, 6) for _ in range(2))
        self.rotary = rotary()
        self.norm = nn.BatchNorm1d(6)
        self.head = nn.Linear(6, 10, bias=False)
        self.head.weight = self.embed.weight
        self.norm.bias.requires_grad_(False)
        self.head.weight.note = "shared"


def randomised(model, seed):
    torch.manual_seed(seed)
    with torch.no_grad():
        for tensor in model.state_dict().values():
            tensor.copy_(torch.randn(tensor.shape) * 9)
    return model


def on_meta(make=Model, *args):
    with torch.device("meta"):
        return make(*args)


@pytest.fixture
def saved(tmp_path):
    expected = randomised(Model(), 0)
    state = expected.state_dict()
    del state["head.weight"]  # tied: stored once
    torch.save(state, tmp_path / "model.pt")
    return tmp_path / "model.pt", expected


def whole(tensor):
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def same(found, expected):
    ours, theirs = (dict([*m.named_parameters(), *m.named_buffers()]) for m in (found, expected))
    assert ours.keys() == theirs.keys()
    for name, value in theirs.items():
        torch.testing.assert_close(whole(ours[name].detach()), value.detach(), rtol=0, atol=0, msg=name)
        assert ours[name].requires_grad == value.requires_grad


def test_parameters_and_buffers_are_filled_in_place(saved):
    path, expected = saved
    model = randomised(Model(), 1)
    before = dict(model.named_parameters())
    checkpoint.load(path, model)
    same(model, expected)
    assert all(before[name] is one for name, one in model.named_parameters())


def test_a_module_on_the_meta_device_gets_memory(saved):
    path, expected = saved
    model = on_meta()
    checkpoint.load(path, into=model)
    same(model, expected)
    assert model.head.weight is model.embed.weight
    assert model.head.weight.note == "shared"


@pytest.mark.parametrize("read", ["each", "once"])
@pytest.mark.parametrize("start", ["memory", "meta"])
def test_modules_under_fsdp2(saved, start, read):
    path, expected = saved

    def run(rank):
        mesh = init_device_mesh(device_type(), (2,))
        model = on_meta() if start == "meta" else randomised(Model(), 1)
        for layer in model.layers:
            fully_shard(layer, mesh=mesh)
        fully_shard(model, mesh=mesh)
        checkpoint.load(path, into=model, read=read)
        same(model, expected)
        assert model.head.weight is model.embed.weight
        assert isinstance(model.layers[0].weight, DTensor)
        x = torch.ones(3, 6)
        torch.testing.assert_close(model.layers[1](x), expected.layers[1](x), rtol=0, atol=0)

    on_ranks(2, run)


def test_a_tensor_parallel_module_under_fsdp2(saved):
    path, expected = saved

    def run(rank):
        mesh = init_device_mesh(device_type(), (2, 2), mesh_dim_names=("dp", "tp"))

        def columns(name, module, tp):
            if isinstance(module, nn.Linear) and name.startswith("layers"):
                module.weight = nn.Parameter(distribute_tensor(module.weight, tp, [Shard(1)]))

        model = distribute_module(randomised(Model(), 1), mesh["tp"], columns)
        model.head.weight = model.embed.weight  # distribute_module makes two of them
        fully_shard(model, mesh=mesh["dp"])
        checkpoint.load(path, into=model, group=torch.distributed.group.WORLD)
        for name, value in expected.state_dict().items():
            torch.testing.assert_close(whole(model.state_dict()[name]), value, rtol=0, atol=0, msg=name)

    on_ranks(4, run)


def test_names_dtypes_and_parts_as_for_a_state_dict(saved):
    path, expected = saved
    model = nn.Module()
    model.both = nn.Linear(6, 12, dtype=torch.bfloat16, device="meta")
    parts = [Concat(f"both.{kind}", [f"layers.0.{kind}", f"layers.1.{kind}"]) for kind in ("weight", "bias")]
    checkpoint.load(path, model, remap=parts)
    weights = torch.cat([layer.weight.detach() for layer in expected.layers]).bfloat16()
    torch.testing.assert_close(model.both.weight.detach(), weights, rtol=0, atol=0)
    checkpoint.load(path, model, remap=parts, rename=lambda name: name)
    torch.testing.assert_close(model.both.weight.detach(), weights, rtol=0, atol=0)


def test_a_module_whose_state_dict_is_not_its_own_memory_gets_the_values_too(tmp_path):
    class Copies(nn.Linear):
        def state_dict(self, *args, **kwargs):
            return {name: value.clone() for name, value in super().state_dict(*args, **kwargs).items()}

    class Counts(nn.Linear):
        def get_extra_state(self):
            return self.steps

        def set_extra_state(self, state):
            self.steps = state

    copies, counts = Copies(3, 2), Counts(3, 2)
    counts.steps = 7
    state = {"weight": torch.ones(2, 3), "bias": torch.full((2,), 2.0), "_extra_state": 41}
    torch.save(state, tmp_path / "in.pt")
    parameter = copies.weight
    checkpoint.load(tmp_path / "in.pt", copies)
    checkpoint.load(tmp_path / "in.pt", counts)
    torch.testing.assert_close(copies.weight.detach(), state["weight"], rtol=0, atol=0)
    assert copies.weight is parameter
    assert counts.steps == 41


# --- refusals --------------------------------------------------------------------------------------------------------


class Attribute(nn.Module):
    def __init__(self):
        super().__init__()
        self.table = torch.arange(4)


REFUSED = {
    "a buffer that no method fills": (
        lambda: on_meta(Model, lambda: _without(Rotary(), "reset_parameters")),
        "['rotary.inv_freq'] of the module are on the meta device and in no checkpoint",
    ),
    "a buffer that is filled in part": (lambda: on_meta(Model, Forgetful), "['rotary.inv_freq'] of the module are on"),
    "a tensor that is no buffer": (lambda: on_meta(Model, Attribute), "['rotary.table'] of the module are on the meta"),
    "a missing name": (lambda: nn.Sequential(nn.Linear(6, 6)), "the source has nothing for '0.weight' (nearest"),
    "what was tied": (lambda: _with(Model(), "head", nn.Linear(6, 10)), "the source has nothing for 'head.weight'"),
    "another shape": (
        lambda: _with(Model(), "norm", nn.BatchNorm1d(5)),
        "'norm.weight' has shape (6,) in the source, but (5,) in the target",
    ),
}


def _with(module, name, value):
    setattr(module, name, value)
    return module


def _without(rotary, method):
    kind = type("Plain", (nn.Module,), {})
    plain = kind()
    plain.register_buffer("inv_freq", rotary.inv_freq, persistent=False)
    return plain


@pytest.mark.parametrize("what", REFUSED)
def test_it_refuses(saved, what):
    make, words = REFUSED[what]
    model = make()
    before = {name: value.clone() for name, value in model.state_dict().items()}
    with pytest.raises(CheckpointError, match=re.escape(words)):
        checkpoint.load(saved[0], into=model)
    for name, value in model.state_dict().items():
        assert value.is_meta or torch.equal(value, before[name])


def test_what_a_checkpoint_lacks_cannot_stay_on_the_meta_device(saved):
    model = _with(Model(), "more", nn.Linear(2, 2))
    checkpoint.load(saved[0], into=model, strict=False)
    with torch.device("meta"):
        model = _with(Model(), "more", nn.Linear(2, 2))
    with pytest.raises(
        CheckpointError, match=re.escape("no values for ['more.weight', 'more.bias'], which the module")
    ):
        checkpoint.load(saved[0], into=model, strict=False)
    assert model.embed.weight.is_meta


def test_a_refusal_of_one_rank_is_raised_on_all(saved):
    def run(rank):
        with pytest.raises(sw.errors.ShardwiseError) as error:
            checkpoint.load(saved[0], into=on_meta(Model, Forgetful if rank else Rotary), read="once")
        return str(error.value)

    first, second = on_ranks(2, run)
    assert first == second
    assert "rotary.inv_freq" in first


def test_modules_inside_a_state_dict_are_still_refused(saved):
    with pytest.raises(TypeError, match=r"'model' is Model: give its state_dict\(\)"):
        checkpoint.load(saved[0], into={"model": Model()})
