"""peft trains adapters and merges them; so do conversions, and both become the same weights."""

import peft
import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file

from shardwise import checkpoint
from shardwise.errors import CheckpointError


def llama(dtype=torch.float32):
    torch.manual_seed(0)
    sizes = {"hidden_size": 48, "intermediate_size": 80, "num_hidden_layers": 2, "vocab_size": 64}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "attention_bias": True, "tie_word_embeddings": False}
    return transformers.LlamaForCausalLM(transformers.LlamaConfig(**sizes, **heads)).to(dtype)


def gpt2(dtype=torch.float32):
    torch.manual_seed(0)
    config = transformers.GPT2Config(n_embd=32, n_head=4, n_layer=2, vocab_size=64, n_positions=16)
    return transformers.GPT2LMHeadModel(config).to(dtype)


def trained(model, **options):
    """A model with an adapter whose weights are not zero."""
    made = peft.get_peft_model(model, peft.LoraConfig(r=8, lora_alpha=12, **options))
    torch.manual_seed(1)
    for name, parameter in made.named_parameters():
        if "lora_" in name or "modules_to_save" in name:
            parameter.data = torch.randn_like(parameter) * 0.1
    return made


def close(found, expected, kind, dtype):
    """Within what peft's own arithmetic rounds: sums of float32; of embeddings in bfloat16 the product as well."""
    assert found.keys() == expected.keys()
    limits = {torch.float32: (2e-6, 2e-7), torch.bfloat16: (2**-7, 2**-11 if kind == "embeddings" else 1e-6)}
    for name, value in expected.items():
        assert (found[name].dtype, found[name].shape) == (value.dtype, value.shape), name
        torch.testing.assert_close(found[name], value, rtol=limits[dtype][0], atol=limits[dtype][1])
    if dtype == torch.bfloat16 and kind != "embeddings":
        differ = sum(int((found[name] != value).sum()) for name, value in expected.items())
        assert differ <= sum(value.numel() for value in expected.values()) / 1000


QKV = ["q_proj", "k_proj", "v_proj", "o_proj", "up_proj"]
ADAPTERS = {
    "plain": (llama, {"target_modules": QKV}),
    "rslora": (llama, {"target_modules": QKV, "use_rslora": True}),
    "patterns": (
        llama,
        {
            "target_modules": QKV,
            "rank_pattern": {"layers.0.self_attn.q_proj": 4, "up_proj": 2},
            "alpha_pattern": {"k_proj": 5, "^model.layers.1.self_attn.v_proj": 3},
        },
    ),
    "embeddings": (llama, {"target_modules": ["embed_tokens", "lm_head"]}),
    "biases": (llama, {"target_modules": ["q_proj"], "lora_bias": True}),
    "whole modules": (llama, {"target_modules": ["q_proj"], "modules_to_save": ["lm_head"]}),
    "inputs first": (gpt2, {"target_modules": ["c_attn", "c_proj"], "fan_in_fan_out": True}),
}


@pytest.mark.judged("peft", "LoRA adapters, merged", "read", "`merge_and_unload`")
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("kind", ADAPTERS)
def test_a_merge_is_that_of_peft(tmp_path, kind, dtype):
    make, options = ADAPTERS[kind]
    base = make(dtype)
    base.save_pretrained(tmp_path / "base")
    adapted = trained(base, **options)
    adapted.save_pretrained(tmp_path / "adapter")
    checkpoint.convert(tmp_path / "base", tmp_path / "out.safetensors", merge=tmp_path / "adapter", max_bytes=4096)
    adapted.merge_and_unload().save_pretrained(tmp_path / "merged")
    close(load_file(tmp_path / "out.safetensors"), load_file(tmp_path / "merged" / "model.safetensors"), kind, dtype)
    assert not checkpoint.verify(tmp_path / "base", tmp_path / "out.safetensors", merge=tmp_path / "adapter")
    assert checkpoint.verify(tmp_path / "base", tmp_path / "out.safetensors")


@pytest.mark.filterwarnings("ignore")
def test_a_merge_has_the_same_bits_for_every_sharding_and_gives_the_logits_of_peft(tmp_path):
    base = llama()
    base.save_pretrained(tmp_path / "base")
    adapted = trained(base, target_modules=QKV)
    adapted.save_pretrained(tmp_path / "adapter")
    one = checkpoint.convert(tmp_path / "base", tmp_path / "out", merge=tmp_path / "adapter", with_config=True)
    rules = checkpoint.read_rules("llama").with_mesh(tp=2)
    options = {"format": "sharded", "rules": rules, "merge": tmp_path / "adapter", "max_bytes": 4096}
    two = checkpoint.convert(tmp_path / "base", tmp_path / "sharded", **options)
    assert not checkpoint.verify(one, two)
    model, tokens = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "out"), torch.arange(12)[None]
    with torch.no_grad():
        torch.testing.assert_close(model(tokens).logits, adapted(tokens).logits, rtol=1e-4, atol=1e-5)
    checkpoint.convert(tmp_path / "out", tmp_path / "small", cast=torch.bfloat16, with_config=True)
    small = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "small", dtype="auto")
    assert {parameter.dtype for parameter in small.parameters()} == {torch.bfloat16}
    torch.testing.assert_close(small.state_dict(), model.to(torch.bfloat16).state_dict(), rtol=0, atol=0)


REFUSED = {
    "DoRA": ({"use_dora": True}, "use_dora is True, which is not a plain LoRA"),
    "PiSSA": ({"init_lora_weights": "pissa"}, "init_lora_weights is 'pissa', which is not a plain LoRA"),
    "a convolution": ({}, "has A of shape"),
}


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("kind", REFUSED)
def test_what_is_not_a_plain_lora_is_refused_by_name(tmp_path, kind):
    options, message = REFUSED[kind]
    base = torch.nn.ModuleDict({"q_proj": torch.nn.Conv2d(8, 8, 3) if "conv" in kind else torch.nn.Linear(16, 16)})
    save_file(base.state_dict(), tmp_path / "base.safetensors")
    peft.get_peft_model(base, peft.LoraConfig(target_modules=["q_proj"], **options)).save_pretrained(tmp_path / "a")
    with pytest.raises(CheckpointError, match=message):
        checkpoint.convert(tmp_path / "base.safetensors", tmp_path / "out", merge=tmp_path / "a")
    assert not (tmp_path / "out").exists()
