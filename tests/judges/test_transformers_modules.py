"""checkpoint.load(path, into=model) gives a model of transformers what from_pretrained gives it, bit-for-bit."""

import os

import pytest
import torch
import transformers
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from transformers import conversion_mapping
from transformers.core_model_loading import Chunk, ConversionOps, Interleave, PermuteForRope, Transpose, WeightConverter
from transformers.distributed import DistributedConfig
from transformers_models import MODELS, logits, made

from shardwise import CheckpointError, checkpoint
from shardwise.testing import on_ranks

pytestmark = pytest.mark.filterwarnings("ignore")  # of other libraries


@pytest.fixture(scope="module", params=list(MODELS))
def saved(request, tmp_path_factory):
    """The name of an architecture, a checkpoint of it, and what from_pretrained makes of that."""
    folder = tmp_path_factory.mktemp(request.param)
    made(request.param).save_pretrained(folder)
    return request.param, folder, transformers.AutoModelForCausalLM.from_pretrained(folder).eval()


def same_tensors(found, expected):
    """Every parameter and buffer, also those in no checkpoint, with equal bits; tied where they are tied."""
    ours, theirs = (dict([*m.named_parameters(), *m.named_buffers()]) for m in (found, expected))
    assert ours.keys() == theirs.keys()
    for name, value in theirs.items():
        assert ours[name].dtype == value.dtype
        torch.testing.assert_close(ours[name].detach(), value.detach(), rtol=0, atol=0, equal_nan=True, msg=name)


def test_a_model_with_memory(saved):
    name, folder, expected = saved
    model = made(name, seed=1)
    checkpoint.load(folder, into=model)
    same_tensors(model, expected)
    torch.testing.assert_close(logits(model), logits(expected), rtol=0, atol=0)


def test_a_model_on_the_meta_device(saved):
    name, folder, expected = saved
    with torch.device("meta"):
        model = transformers.AutoModelForCausalLM.from_config(MODELS[name]()).eval()
    checkpoint.load(folder, into=model)
    same_tensors(model, expected)
    assert [p.requires_grad for p in model.parameters()] == [p.requires_grad for p in expected.parameters()]
    torch.testing.assert_close(logits(model), logits(expected), rtol=0, atol=0)


# --- on several ranks ------------------------------------------------------------------------------------------------


def on_meta(name):
    with torch.device("meta"):
        return transformers.AutoModelForCausalLM.from_config(MODELS[name]()).eval()


def layers(model):
    """The blocks of a model: what people shard by itself."""
    return max((m for m in model.modules() if isinstance(m, torch.nn.ModuleList)), key=len)


def whole(tensor):
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def same_values(found, expected):
    ours, theirs = (dict([*m.named_parameters(), *m.named_buffers()]) for m in (found, expected))
    assert ours.keys() == theirs.keys()
    for name, value in theirs.items():
        torch.testing.assert_close(whole(ours[name].detach()), value.detach(), rtol=0, atol=0, equal_nan=True, msg=name)


@pytest.mark.parametrize("start", ["memory", "meta"])
def test_a_model_under_fsdp2(saved, start):
    name, folder, expected = saved

    def run(rank):
        mesh = init_device_mesh("cpu", (2,))
        model = on_meta(name) if start == "meta" else made(name, seed=1)
        for layer in layers(model):
            fully_shard(layer, mesh=mesh)
        fully_shard(model, mesh=mesh)
        checkpoint.load(folder, into=model, group=torch.distributed.group.WORLD if start == "meta" else None)
        same_values(model, expected)
        torch.testing.assert_close(logits(model), logits(expected), rtol=0, atol=0)

    on_ranks(2, run)


PARALLEL = [name for name in MODELS if getattr(MODELS[name](), "base_model_tp_plan", None)]


def parallel(model, mesh):
    """Tensor parallel by transformers' own plan for the model."""
    config = DistributedConfig(tp_size=2, fsdp_size=mesh // 2)
    config, _, manager = type(model).prepare_distribute_model(config)
    return type(model).maybe_distribute_model(model, config, manager)


@pytest.mark.parametrize("world", [2, 4], ids=["tp", "fsdp and tp"])
@pytest.mark.parametrize("name", PARALLEL)
def test_a_tensor_parallel_model(tmp_path, name, world):
    made(name).save_pretrained(tmp_path)

    def run(rank):
        os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(world)}
        config = DistributedConfig(tp_size=2, fsdp_size=world // 2)
        expected = transformers.AutoModelForCausalLM.from_pretrained(tmp_path, distributed_config=config).eval()
        model = parallel(on_meta(name), world)
        checkpoint.load(tmp_path, into=model)
        ours, theirs = (dict([*m.named_parameters(), *m.named_buffers()]) for m in (model, expected))
        assert ours.keys() == theirs.keys()
        sharded = 0
        for key, value in theirs.items():
            sharded += isinstance(value, DTensor)
            one, other = (t.to_local() if isinstance(t, DTensor) else t for t in (ours[key].detach(), value.detach()))
            torch.testing.assert_close(one, other, rtol=0, atol=0, equal_nan=True, msg=key)
        assert sharded
        torch.testing.assert_close(logits(model), logits(expected), rtol=0, atol=0)

    on_ranks(world, run)


# --- conversions -----------------------------------------------------------------------------------------------------


@pytest.fixture
def converting(monkeypatch, tmp_path):
    """Save a Llama whose files differ from its tensors by a converter, and load it in both ways."""

    def run(source, target, *operations):
        converter = WeightConverter(source, target, operations=list(operations))
        monkeypatch.setitem(conversion_mapping._checkpoint_conversion_mapping_cache, "LlamaForCausalLM", [converter])
        made("llama").save_pretrained(tmp_path)
        with torch.device("meta"):
            model = transformers.LlamaForCausalLM(MODELS["llama"]()).eval()
        checkpoint.load(tmp_path, into=model)
        same_tensors(model, transformers.AutoModelForCausalLM.from_pretrained(tmp_path))
        return set(checkpoint.open(tmp_path))

    conversion_mapping.get_checkpoint_conversion_mapping("llama")  # makes the table
    return run


GATE, UP, DOWN = (f"mlp.{name}_proj.weight" for name in ("gate", "up", "down"))
Q, ROPE = "self_attn.q_proj.weight", PermuteForRope(permute_layer_names=["q_proj"])
CONVERTERS = {
    "split": ("mlp.both.weight", [GATE, UP], Chunk(dim=0)),
    "split along columns": ("mlp.both.weight", [GATE, UP], Chunk(dim=1)),
    "transposed": ("mlp.turned.weight", DOWN, Transpose(0, 1)),
    "transposed and split": ("mlp.both.weight", [GATE, UP], Transpose(0, 1), Chunk(dim=1)),
    "transposed if it must be": (DOWN, DOWN, Transpose(0, 1, check_dims=True)),
    "interleaved": ("mlp.mixed.weight", DOWN, Interleave(dim=0)),
    "interleaved along columns": ("mlp.mixed.weight", DOWN, Interleave(dim=1, inverse=True)),
    "interleaved and split": ("mlp.both.weight", [GATE, UP], Interleave(dim=0), Chunk(dim=0)),
    "rotary": ("self_attn.gv.weight", [Q, "self_attn.o_proj.weight"], Chunk(dim=0), ROPE),
    "rotary in itself": (Q, Q, ROPE),
}


@pytest.mark.parametrize("what", CONVERTERS)
def test_operations_of_converters_are_translated(converting, what):
    stored = converting(*CONVERTERS[what])
    assert f"model.layers.0.{CONVERTERS[what][0]}" in stored


class Doubled(ConversionOps):
    def convert(self, input_dict, source_patterns, target_patterns, **kwargs):
        return {target_patterns[0]: 2 * next(iter(input_dict.values()))[0]}

    @property
    def reverse_op(self):
        return self


def test_an_operation_that_is_not_a_change_of_place_is_refused(converting):
    words = r"'model\.layers\.0\.mlp\.down_proj\.weight' cannot be loaded by transformers' WeightConverter.*Doubled"
    with pytest.raises(CheckpointError, match=words):
        converting("mlp.mixed.weight", DOWN, Doubled())


def test_experts_that_are_not_counted_from_zero_are_refused(tmp_path):
    made("mixtral").save_pretrained(tmp_path / "all")
    stored = checkpoint.open(tmp_path / "all")
    assert "model.layers.0.mlp.experts.gate_up_proj" not in stored
    name = next(name for name in stored if ".0.block_sparse_moe.experts.1.w1" in name)
    checkpoint.convert(tmp_path / "all", tmp_path / "some.safetensors", select=[one for one in stored if one != name])
    with pytest.raises(CheckpointError, match="are not numbered 0, 1, 2 and so on"):
        checkpoint.load(tmp_path / "some.safetensors", into=on_meta("mixtral"))


def test_a_model_in_another_dtype_and_under_other_names(tmp_path):
    made("qwen3_moe").save_pretrained(tmp_path / "in")
    checkpoint.convert(tmp_path / "in", tmp_path / "out.safetensors", rename={"*": "wrapped.*"})
    model = on_meta("qwen3_moe").bfloat16()
    checkpoint.load(tmp_path / "out.safetensors", into=model, rename={"wrapped.*": "*"})
    expected = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "in", dtype=torch.bfloat16)
    for name, value in expected.named_parameters():
        torch.testing.assert_close(model.get_parameter(name), value, rtol=0, atol=0)
