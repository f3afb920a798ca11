"""transformers is the judge of quantized checkpoints: values and codes are the same, bit-for-bit."""

import json
from types import SimpleNamespace

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, FineGrainedFP8Config, GptOssConfig, LlamaConfig, Mxfp4Config
from transformers.integrations.finegrained_fp8 import Fp8Dequantize, Fp8Quantize

from shardwise import Layout, Quantized, ShardedTensor, Transposed, checkpoint
from shardwise.quantized import FORMATS, dequantize, quantize

SIZES = {"vocab_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 64}
LLAMA = LlamaConfig(hidden_size=256, intermediate_size=384, **SIZES)
GPT_OSS = GptOssConfig(hidden_size=64, intermediate_size=96, num_local_experts=2, num_experts_per_tok=1, **SIZES)
PROJECTIONS = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
FP8 = [Quantized(f"*.{name}.weight", f"*.{name}.weight_scale_inv", format="fp8-block") for name in PROJECTIONS]


def bits(tensor):
    return tensor.detach().contiguous().view(torch.uint8)


def assert_same_bits(found, wanted):
    assert sorted(found) == sorted(wanted)
    for name, tensor in wanted.items():
        assert found[name].dtype == tensor.dtype, name
        assert torch.equal(bits(found[name]), bits(tensor)), name


def new_model(config):
    torch.manual_seed(0)
    return AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)


def saved(config, folder, changed, quantization):
    """A checkpoint of a new model whose tensors were changed, with its config."""
    new_model(config).save_pretrained(folder)
    tensors = changed(load_file(folder / "model.safetensors"))
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    known = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**known, "quantization_config": quantization}))
    return folder


@pytest.fixture(scope="module")
def llama(tmp_path_factory):
    """In fp8, as our conversion writes it."""
    folder = tmp_path_factory.mktemp("llama")

    def changed(tensors):
        save_file(tensors, folder / "plain.safetensors")
        made = checkpoint.convert(folder / "plain.safetensors", folder / "fp8.safetensors", remap=FP8)
        found = {name: entry.read() for name, entry in made.items()}
        (folder / "plain.safetensors").unlink()
        (folder / "fp8.safetensors").unlink()
        return found

    return saved(LLAMA, folder, changed, {"quant_method": "fp8", "weight_block_size": [128, 128]})


@pytest.fixture(scope="module")
def gpt_oss(tmp_path_factory):
    """With experts in MXFP4: any bytes are codes."""

    def changed(tensors):
        found, random = {}, torch.Generator().manual_seed(1)
        for name, tensor in tensors.items():
            if name.endswith(("gate_up_proj", "down_proj")):
                experts, columns, rows = tensor.shape  # transposed in the model
                shape = (experts, rows, columns // 32)
                found[f"{name}_blocks"] = torch.randint(0, 256, (*shape, 16), generator=random, dtype=torch.uint8)
                found[f"{name}_scales"] = torch.randint(118, 124, shape, generator=random, dtype=torch.uint8)
            else:
                found[name] = tensor
        return found

    method = {"quant_method": "mxfp4", "modules_to_not_convert": ["lm_head", "*.self_attn", "*.router", "*.embed*"]}
    return saved(GPT_OSS, tmp_path_factory.mktemp("gpt_oss"), changed, method)


def test_a_llama_in_fp8_is_loaded_as_transformers_loads_it(llama):
    theirs = AutoModelForCausalLM.from_pretrained(
        llama, dtype=torch.bfloat16, quantization_config=FineGrainedFP8Config(dequantize=True)
    )
    ours = new_model(LLAMA)
    checkpoint.load(llama, ours, remap=[Quantized()])
    assert_same_bits(ours.state_dict(), theirs.state_dict())
    prompt = torch.arange(9)[None]
    assert torch.equal(ours.eval()(prompt).logits, theirs.eval()(prompt).logits)


def test_parts_of_a_llama_are_the_parts_of_what_transformers_loads(llama):
    theirs = AutoModelForCausalLM.from_pretrained(
        llama, dtype=torch.bfloat16, quantization_config=FineGrainedFP8Config(dequantize=True)
    ).state_dict()
    layout = Layout.chunk((384, 256), 0, [3, 0, 1, 2])  # this process, rank 0, has rows 96 to 192: part of a block
    name = "model.layers.1.mlp.up_proj.weight"
    into = {name: ShardedTensor(torch.zeros(96, 256, dtype=torch.bfloat16), layout)}
    checkpoint.load(llama, into, remap=[Quantized()])
    assert torch.equal(bits(into[name].shards[0]), bits(theirs[name][96:192]))


def test_gpt_oss_in_mxfp4_is_loaded_as_transformers_loads_it(gpt_oss):
    theirs = AutoModelForCausalLM.from_pretrained(
        gpt_oss, dtype=torch.bfloat16, quantization_config=Mxfp4Config(dequantize=True)
    )
    ours = new_model(GPT_OSS)
    rules = [Quantized(), Transposed("*.experts.*_proj", (0, 2, 1))]
    checkpoint.load(gpt_oss, ours.state_dict(), remap=rules)
    assert_same_bits(ours.state_dict(), theirs.state_dict())


@pytest.mark.parametrize("shape", [(256, 384), (3, 128, 256)])
@pytest.mark.parametrize("scales", [torch.float32, torch.float8_e8m0fnu])
def test_fp8_blocks_have_the_bits_of_transformers(shape, scales):
    power = "ue8m0" if scales != torch.float32 else "float"
    config = SimpleNamespace(weight_block_size=(128, 128), scale_fmt=power)
    judge = SimpleNamespace(quantization_config=config)
    values = torch.randn(shape, generator=torch.Generator().manual_seed(2)).bfloat16()
    wanted = list(Fp8Quantize(judge)._quantize_one("w", values).values())
    found = quantize(values, "fp8-block", scales=scales)
    for one, other in zip(found, wanted, strict=True):
        assert torch.equal(bits(one), bits(other))
    for dtype in (torch.bfloat16, torch.float32, torch.float16):
        back = Fp8Dequantize(judge)._dequantize_one(*wanted, output_dtype=dtype)
        assert torch.equal(bits(dequantize(*found, "fp8-block", dtype=dtype)), bits(back))


@pytest.mark.parametrize("name", ["fp8-row", "fp8-tensor", "mxfp8"])
def test_other_grids_of_scales_have_the_bits_of_transformers(name):
    judge = Fp8Dequantize(SimpleNamespace(quantization_config=None))
    codes, scales = quantize(torch.randn(96, 128, generator=torch.Generator().manual_seed(3)), name)
    wanted = judge._dequantize_one(codes, scales, output_dtype=torch.bfloat16)
    assert torch.equal(bits(dequantize(codes, scales, FORMATS[name])), bits(wanted))
