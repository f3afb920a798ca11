"""Built-in rules: found by a name or a config.json, for the names and shapes of real models, and checked."""

import json

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import save_file

from shardwise import Layout, LayoutError, Mesh, checkpoint
from shardwise.checkpoint import Rules, read_rules
from shardwise.checkpoint.coupled_rules import CoupledRules
from shardwise.checkpoint.ready_rules import FILES, file_for, ready_names, ready_table
from shardwise.errors import CheckpointError
from shardwise.layout import Experts, Heads

SMALL = {
    "vocab_size": 96,
    "hidden_size": 64,
    "intermediate_size": 48,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
}
HEAD = {**SMALL, "head_dim": 16}  # wider than hidden_size / heads


def dense(head_dim):
    """Names of Llama with their shapes, and where they lie at tp=4, with 8 heads and 2 of k and v."""
    q, kv, layer = 8 * head_dim, 2 * head_dim, "model.layers.0"
    return {
        "model.embed_tokens.weight": ((96, 64), "S0"),
        "lm_head.weight": ((96, 64), "S0"),
        "model.norm.weight": ((64,), "R"),
        f"{layer}.input_layernorm.weight": ((64,), "R"),
        f"{layer}.self_attn.q_proj.weight": ((q, 64), "S0"),
        f"{layer}.self_attn.k_proj.weight": ((kv, 64), "heads0=2"),
        f"{layer}.self_attn.v_proj.weight": ((kv, 64), "heads0=2"),
        f"{layer}.self_attn.o_proj.weight": ((64, q), "S1"),
        f"{layer}.mlp.gate_proj.weight": ((48, 64), "S0"),
        f"{layer}.mlp.up_proj.weight": ((48, 64), "S0"),
        f"{layer}.mlp.down_proj.weight": ((64, 48), "S1"),
    }


def only(names, *parts):
    return {name: placed for name, placed in names.items() if any(part in name for part in parts)}


BIASES = {
    "model.layers.0.self_attn.q_proj.bias": ((64,), "S0"),
    "model.layers.0.self_attn.k_proj.bias": ((16,), "heads0=2"),
    "model.layers.0.self_attn.o_proj.bias": ((64,), "R"),
    "model.layers.0.mlp.up_proj.bias": ((48,), "S0"),
    "model.layers.0.mlp.down_proj.bias": ((64,), "R"),
}
NORMS = {f"model.layers.0.self_attn.{x}_norm.weight": ((16,), "R") for x in "qk"}
GEMMA = {f"model.layers.0.{x}_feedforward_layernorm.weight": ((64,), "R") for x in ("pre", "post")}
SEEING = {
    "vision_tower.vision_model.encoder.layers.0.self_attn.q_proj.weight": ((24, 24), "R"),
    "multi_modal_projector.mm_input_projection_weight": ((24, 64), "R"),
}


def experts(before, up, down, width=48):
    return {f"{before}.{n}.{x}.weight": ((width, 64), "S0") for n in range(4) for x in up} | {
        f"{before}.{n}.{down}.weight": ((64, width), "S1") for n in range(4)
    }


PROJECTIONS = ("gate_proj", "up_proj")
LAYER = "model.layers.0"
MOE = {**HEAD, "num_experts": 4, "moe_intermediate_size": 24}
QWEN_MOE = {
    f"{LAYER}.mlp.gate.weight": ((4, 64), "R"),
    **experts(f"{LAYER}.mlp.experts", PROJECTIONS, "down_proj", 24),
}
H = "transformer.h.0"


def by_head(layer, attention):
    """q, k and v of one head after the other, as in GPT-NeoX and BLOOM."""
    return {
        f"{layer}.{attention}.query_key_value.weight": ((192, 64), "S0"),
        f"{layer}.{attention}.query_key_value.bias": ((192,), "S0"),
        f"{layer}.{attention}.dense.weight": ((64, 64), "S1"),
        f"{layer}.{attention}.dense.bias": ((64,), "R"),
        f"{layer}.mlp.dense_h_to_4h.weight": ((256, 64), "S0"),
        f"{layer}.mlp.dense_h_to_4h.bias": ((256,), "S0"),
        f"{layer}.mlp.dense_4h_to_h.weight": ((64, 256), "S1"),
        f"{layer}.mlp.dense_4h_to_h.bias": ((64,), "R"),
        f"{layer}.input_layernorm.bias": ((64,), "R"),
    }


LATENT = {"q_lora_rank": 24, "kv_lora_rank": 16, "qk_rope_head_dim": 4, "qk_nope_head_dim": 8, "v_head_dim": 6}
FALCON = {"model_type": "falcon", "vocab_size": 96, "hidden_size": 64, "num_attention_heads": 8}
FALCON_NAMES = {
    "transformer.word_embeddings.weight": ((96, 64), "S0"),
    f"{H}.self_attention.dense.weight": ((64, 64), "S1"),
    f"{H}.mlp.dense_h_to_4h.weight": ((256, 64), "S0"),
    f"{H}.mlp.dense_4h_to_h.weight": ((64, 256), "S1"),
    "transformer.ln_f.weight": ((64,), "R"),
}
MODELS = {  # the config.json, names with their shapes and where they lie at tp=4
    "Llama": ({"model_type": "llama", **SMALL}, dense(8) | BIASES),
    "Mistral": ({"model_type": "mistral", **HEAD}, dense(16)),
    "Qwen2": ({"model_type": "qwen2", **SMALL}, dense(8) | BIASES),
    "Qwen3": ({"model_type": "qwen3", **HEAD}, dense(16) | NORMS),
    "Gemma 2": ({"model_type": "gemma2", **HEAD}, dense(16) | GEMMA),
    "Gemma 3": ({"model_type": "gemma3_text", **HEAD}, dense(16) | GEMMA | NORMS),
    "Gemma 3 that sees": (
        {"model_type": "gemma3", "architectures": ["Gemma3ForConditionalGeneration"], "text_config": HEAD},
        {f"language_model.{name}": placed for name, placed in dense(16).items()} | SEEING,
    ),
    "Mixtral": (
        {"model_type": "mixtral", **SMALL, "num_local_experts": 4},
        only(dense(8), "attn", "norm", "embed")
        | {f"{LAYER}.block_sparse_moe.gate.weight": ((4, 64), "R")}
        | experts(f"{LAYER}.block_sparse_moe.experts", ("w1", "w3"), "w2"),
    ),
    "Qwen3-MoE": ({"model_type": "qwen3_moe", **MOE}, only(dense(16), "attn") | QWEN_MOE),
    "Qwen2-MoE": (
        {"model_type": "qwen2_moe", **MOE, "shared_expert_intermediate_size": 32},
        QWEN_MOE
        | {
            f"{LAYER}.mlp.shared_expert.up_proj.weight": ((32, 64), "S0"),
            f"{LAYER}.mlp.shared_expert.down_proj.weight": ((64, 32), "S1"),
            f"{LAYER}.mlp.shared_expert_gate.weight": ((1, 64), "R"),
        },
    ),
    "Phi-3": (
        {"model_type": "phi3", **SMALL},
        {
            f"{LAYER}.self_attn.qkv_proj.weight": ((96, 64), "fused0=64,16,16:8,2,2"),
            f"{LAYER}.self_attn.o_proj.weight": ((64, 64), "S1"),
            f"{LAYER}.mlp.gate_up_proj.weight": ((96, 64), "fused0=48,48"),
            f"{LAYER}.mlp.down_proj.weight": ((64, 48), "S1"),
        },
    ),
    "Megatron": (
        {"model_type": "megatron", "num_attention_heads": 8, "num_query_groups": 4, "hidden_size": 64, "gated": True},
        {
            "embedding.word_embeddings.weight": ((96, 64), "S0"),
            "decoder.layers.0.self_attention.linear_qkv.weight": ((128, 64), "S0"),
            "decoder.layers.0.self_attention.linear_qkv.layer_norm_weight": ((64,), "R"),
            "decoder.layers.0.self_attention.linear_proj.weight": ((64, 64), "S1"),
            "decoder.layers.0.mlp.linear_fc1.weight": ((96, 64), "fused0=48,48"),
            "decoder.layers.0.mlp.linear_fc2.weight": ((64, 48), "S1"),
            "decoder.layers.0.mlp.linear_fc2.bias": ((64,), "R"),
            "decoder.final_layernorm.weight": ((64,), "R"),
            "output_layer.weight": ((96, 64), "S0"),
        },
    ),
    "GPT-2": (
        {"architectures": ["GPT2LMHeadModel"], "vocab_size": 96, "n_embd": 64, "n_head": 8, "n_inner": None},
        {
            "wte.weight": ((96, 64), "S0"),
            "transformer.wpe.weight": ((32, 64), "R"),
            f"{H}.attn.c_attn.weight": ((64, 192), "fused1=64,64,64:8,8,8"),
            f"{H}.attn.c_attn.bias": ((192,), "fused0=64,64,64:8,8,8"),
            f"{H}.attn.c_proj.weight": ((64, 64), "S0"),
            f"{H}.attn.c_proj.bias": ((64,), "R"),
            f"{H}.attn.bias": ((1, 1, 32, 32), "R"),
            "h.0.mlp.c_fc.weight": ((64, 256), "S1"),
            f"{H}.mlp.c_fc.bias": ((256,), "S0"),
            f"{H}.mlp.c_proj.weight": ((256, 64), "S0"),
            f"{H}.mlp.c_proj.bias": ((64,), "R"),
            f"{H}.ln_1.weight": ((64,), "R"),
            "transformer.ln_f.bias": ((64,), "R"),
        },
    ),
    "GPT-NeoX": (
        {"model_type": "gpt_neox", **SMALL, "intermediate_size": 256},
        by_head("gpt_neox.layers.0", "attention")
        | {
            "gpt_neox.embed_in.weight": ((96, 64), "S0"),
            "embed_out.weight": ((96, 64), "S0"),
            "gpt_neox.final_layer_norm.weight": ((64,), "R"),
            "gpt_neox.layers.0.attention.rotary_emb.inv_freq": ((4,), "R"),
        },
    ),
    "BLOOM": (
        {"model_type": "bloom", "vocab_size": 96, "hidden_size": 64, "n_head": 8},
        by_head(H, "self_attention")
        | {
            "word_embeddings.weight": ((96, 64), "S0"),
            "transformer.word_embeddings_layernorm.bias": ((64,), "R"),
        },
    ),
    "Falcon 40b": (
        {**FALCON, "new_decoder_architecture": True, "multi_query": True, "num_kv_heads": 2},
        FALCON_NAMES
        | {f"{H}.self_attention.query_key_value.weight": ((96, 64), "heads0=2"), f"{H}.ln_attn.bias": ((64,), "R")},
    ),
    "Falcon 7b": (
        {**FALCON, "multi_query": True, "num_kv_heads": 8},
        FALCON_NAMES | {f"{H}.self_attention.query_key_value.weight": ((80, 64), "fused0=64,8,8:8,1,1")},
    ),
    "Falcon 1b": (
        {**FALCON, "multi_query": False},
        FALCON_NAMES | {f"{H}.self_attention.query_key_value.weight": ((192, 64), "S0")},
    ),
    "DeepSeek-V3": (
        {
            **SMALL,
            "model_type": "deepseek_v3",
            "n_routed_experts": 4,
            "moe_intermediate_size": 24,
            **LATENT,
        },
        {
            f"{LAYER}.self_attn.q_a_proj.weight": ((24, 64), "R"),
            f"{LAYER}.self_attn.q_a_layernorm.weight": ((24,), "R"),
            f"{LAYER}.self_attn.q_b_proj.weight": ((96, 24), "S0"),
            f"{LAYER}.self_attn.kv_a_proj_with_mqa.weight": ((20, 64), "R"),
            f"{LAYER}.self_attn.kv_b_proj.weight": ((112, 16), "S0"),
            f"{LAYER}.self_attn.o_proj.weight": ((64, 48), "S1"),
            f"{LAYER}.mlp.gate.weight": ((4, 64), "R"),
            f"{LAYER}.mlp.gate.e_score_correction_bias": ((4,), "R"),
            f"{LAYER}.mlp.shared_experts.up_proj.weight": ((24, 64), "S0"),
            f"{LAYER}.mlp.shared_experts.down_proj.weight": ((64, 24), "S1"),
            f"{LAYER}.shared_head.head.weight": ((96, 64), "S0"),
            f"{LAYER}.eh_proj.weight": ((64, 128), "R"),
            **experts(f"{LAYER}.mlp.experts", PROJECTIONS, "down_proj", 24),
        },
    ),
    "gpt-oss": (
        {"model_type": "gpt_oss", **HEAD, "intermediate_size": 128, "num_local_experts": 4, "quantization_config": {}},
        {
            f"{LAYER}.self_attn.k_proj.bias": ((32,), "heads0=2"),
            f"{LAYER}.self_attn.sinks": ((8,), "S0"),
            f"{LAYER}.mlp.router.weight": ((4, 64), "R"),
            f"{LAYER}.mlp.experts.gate_up_proj": ((4, 64, 256), "S2"),
            f"{LAYER}.mlp.experts.gate_up_proj_bias": ((4, 256), "S1"),
            f"{LAYER}.mlp.experts.down_proj": ((4, 128, 64), "S1"),
            f"{LAYER}.mlp.experts.down_proj_bias": ((4, 64), "R"),
            f"{LAYER}.mlp.experts.gate_up_proj_blocks": ((4, 256, 2, 16), "S1"),
            f"{LAYER}.mlp.experts.down_proj_scales": ((4, 64, 4), "S2"),
        },
    ),
    "Mamba": (
        {"model_type": "mamba", **SMALL, "intermediate_size": 128, "state_size": 8, "time_step_rank": 4},
        {
            "backbone.embeddings.weight": ((96, 64), "S0"),
            "backbone.layers.0.mixer.in_proj.weight": ((256, 64), "fused0=128,128"),
            "backbone.layers.0.mixer.conv1d.weight": ((128, 1, 4), "S0"),
            "backbone.layers.0.mixer.conv1d.bias": ((128,), "S0"),
            "backbone.layers.0.mixer.x_proj.weight": ((20, 128), "S1"),
            "backbone.layers.0.mixer.dt_proj.weight": ((128, 4), "S0"),
            "backbone.layers.0.mixer.A_log": ((128, 8), "S0"),
            "backbone.layers.0.mixer.D": ((128,), "S0"),
            "backbone.layers.0.mixer.out_proj.weight": ((64, 128), "S1"),
            "backbone.norm_f.weight": ((64,), "R"),
        },
    ),
}


@pytest.mark.parametrize("model", MODELS)
def test_the_tensors_of(model):
    config, expected = MODELS[model]
    rules = Rules.of(config, {"tp": 4})
    found = {name: str(rules.layout(name, shape)).split("/")[1] for name, (shape, _) in expected.items()}
    assert found == {name: f"{word}@tp=4" for name, (_, word) in expected.items()}
    rules.check({name: shape for name, (shape, _) in expected.items()})


@pytest.mark.parametrize("model", MODELS)
def test_one_rank_has_all_and_other_axes_replicate(model):
    config, expected = MODELS[model]
    for name, (shape, word) in expected.items():
        assert Rules.of(config, {"tp": 1}).layout(name, shape) == Layout.replicated(shape, 1)
        both = Rules.of(config, Mesh(dp=2, tp=4)).layout(name, shape)
        assert str(both) == str(Layout.on_mesh(shape, Mesh(dp=2, tp=4), ["R", word]))


def test_every_file_is_found_by_all_of_its_names():
    for file in FILES:
        for kind in ready_table(file)["model"]["types"]:
            assert file_for({"model_type": kind}, "config.json") == file
    assert {file_for(config, "config.json") for config, _ in MODELS.values()} == set(FILES)
    for name in (*ready_names(), "gemma", "GPT-2", "gpt-neox", "mistral", "qwen", "deepseek"):
        assert read_rules(name).with_mesh(tp=2).mesh == Mesh(tp=2)


CLASSES = {
    "LlamaForCausalLM": "llama",
    "Qwen3MoeForCausalLM": "qwen_moe",
    "GPTNeoXForCausalLM": "gpt_neox",
    "GPT2LMHeadModel": "gpt2",
    "BloomModel": "bloom",
    "DeepseekV3ForCausalLM": "deepseek_v3",
    "GptOssForCausalLM": "gpt_oss",
    "Gemma3ForConditionalGeneration": "llama",
}


@pytest.mark.parametrize("name", CLASSES)
def test_a_config_without_a_type_is_known_by_its_class(name):
    assert file_for({"architectures": ["Strange", name]}, "config.json") == CLASSES[name]


def test_unknown_architectures_are_named_with_the_nearest():
    config = {"model_type": "qwen4", "architectures": ["Qwen4ForCausalLM"]}
    with pytest.raises(LayoutError) as caught:
        Rules.of(config, {"tp": 2})
    for part in (
        "config.json",
        "'qwen4'",
        "['Qwen4ForCausalLM']",
        "nearest are 'qwen",
        "[[rule]]",
        "base = 'qwen",
        "docs/rules",
    ):
        assert part in str(caught.value)
    with pytest.raises(LayoutError, match="nearest are 'llama'"):
        Rules.of({"model_type": "llava", "text_config": {"model_type": "llama"}})
    with pytest.raises(LayoutError, match="nearest are"):
        Rules.of({"model_type": "\x1b[2J" * 1000, "architectures": [3, "X"]})
    with pytest.raises(LayoutError, match="neither model_type nor architectures"):
        Rules.of({"model_type": 3, "architectures": "LlamaForCausalLM"})
    with pytest.raises(LayoutError, match=r"'llama' and architectures \['MixtralForCausalLM'\] are different kinds"):
        Rules.of({"model_type": "llama", "architectures": ["MixtralForCausalLM"]})


Q, K = (f"{LAYER}.self_attn.{x}_proj.weight" for x in "qk")


def llama(**changes):
    return {"model_type": "llama", **SMALL, **changes}


def test_a_mesh_that_contradicts_the_config_is_refused_at_once():
    for tp in (3, 16):
        with pytest.raises(LayoutError, match=rf"Mesh\(tp={tp}\): {tp} ranks cut 8 heads \(num_attention_heads = 8\)"):
            Rules.of(llama(), {"tp": tp})
    with pytest.raises(
        LayoutError, match=r"4 ranks cut 6 heads \(num_key_value_heads = 6\): use a number of ranks that"
    ):
        Rules.of(llama(num_attention_heads=12, num_key_value_heads=6), {"tp": 4})
    with pytest.raises(LayoutError, match=r"16 ranks cut 8 heads"):
        Rules.of(MODELS["Phi-3"][0], {"tp": 16})
    with pytest.raises(LayoutError, match=r"8 ranks cut 4 blocks \(intermediate_size // 32 = 4\)"):
        Rules.of(MODELS["gpt-oss"][0], {"tp": 8})
    Rules.of({**MODELS["gpt-oss"][0], "quantization_config": None}, {"tp": 8})
    for model, number in (("gpt-oss", "num_local_experts"), ("Qwen3-MoE", "num_experts")):
        with pytest.raises(LayoutError, match=rf"8 ranks along 'ep' for 4 experts \({number} = 4\): use ep=4 or less"):
            Rules.of(MODELS[model][0], {"ep": 8, "tp": 2})
    with pytest.raises(LayoutError, match=r"Mesh\(model=2\) has no axis ep or tp"):
        Rules.of(MODELS["Mixtral"][0], {"model": 2})


WRONG = {
    "heads": (llama(num_attention_heads=16, head_dim=8), Q, (64, 64), "num_attention_heads * head_dim = 128"),
    "hidden": (llama(hidden_size=32, head_dim=8), Q, (64, 64), "hidden_size = 32"),
    "kv heads": (llama(num_key_value_heads=4), K, (16, 64), "num_key_value_heads * head_dim = 32"),
    "vocabulary": (llama(vocab_size=97), "lm_head.weight", (96, 64), "at least vocab_size = 97"),
    "dims": (llama(), "lm_head.weight", (96,), "at least vocab_size = 96"),
    "fused": (
        MODELS["Phi-3"][0],
        f"{LAYER}.self_attn.qkv_proj.weight",
        (192, 64),
        "(num_attention_heads + 2 * num_key_value_heads) * head_dim = 96",
    ),
    "stacked experts": (
        MODELS["gpt-oss"][0],
        f"{LAYER}.mlp.experts.down_proj_bias",
        (8, 64),
        "num_local_experts = 4",
    ),
    "router": (MODELS["Mixtral"][0], f"{LAYER}.block_sparse_moe.gate.weight", (8, 64), "num_local_experts = 4"),
}


@pytest.mark.parametrize("what", WRONG)
def test_weights_that_contradict_the_config_are_refused(what):
    config, name, shape, said = WRONG[what]
    with pytest.raises(LayoutError) as caught:
        Rules.of(config, {"tp": 2}).layout(name, shape)
    for part in (repr(name), str(shape), said, "is it the config.json of these weights?"):
        assert part in str(caught.value)


def test_experts_that_the_config_does_not_have_are_refused():
    config, names = MODELS["Mixtral"]
    shapes = {name: shape for name, (shape, _) in names.items()}
    with pytest.raises(LayoutError, match=r"config\.json says num_local_experts = 4: number 3 is missing"):
        Rules.of(config, {"tp": 2}).check({name: shape for name, shape in shapes.items() if ".3.w1." not in name})
    with pytest.raises(LayoutError, match="number 4 is too many"):
        Rules.of(config, {"tp": 2}).check(shapes | {f"{LAYER}.block_sparse_moe.experts.4.w1.weight": (48, 64)})


def test_a_config_with_a_huge_number_of_experts_is_refused_at_once():
    config = {"model_type": "deepseek_v3", "num_attention_heads": 8, "n_routed_experts": 2**60}
    rules = Rules.of(config, {"ep": 2})
    with pytest.raises(LayoutError, match="n_routed_experts = 1152921504606846976: number 2 is missing"):
        rules.check({f"model.layers.0.mlp.experts.{number}.up_proj.weight": (4, 4) for number in range(2)})


DEEPSEEK = {  # the real one, in fp8
    "model_type": "deepseek_v3",
    "vocab_size": 129280,
    "hidden_size": 7168,
    "intermediate_size": 18432,
    "moe_intermediate_size": 2048,
    "num_attention_heads": 128,
    "num_key_value_heads": 128,
    "n_routed_experts": 256,
    "q_lora_rank": 1536,
    "kv_lora_rank": 512,
    "qk_rope_head_dim": 64,
    "qk_nope_head_dim": 128,
    "v_head_dim": 128,
    "n_shared_experts": 1,
    "quantization_config": {"quant_method": "fp8", "weight_block_size": [128, 128]},
}
BLOCKS = {
    "model.layers.0.mlp.down_proj": (7168, 18432),
    "model.layers.0.mlp.up_proj": (18432, 7168),
    "model.layers.3.self_attn.q_a_proj": (1536, 7168),
    "model.layers.3.self_attn.q_b_proj": (24576, 1536),
    "model.layers.3.self_attn.kv_a_proj_with_mqa": (576, 7168),
    "model.layers.3.self_attn.kv_b_proj": (32768, 512),
    "model.layers.3.self_attn.o_proj": (7168, 16384),
    "model.layers.3.mlp.experts.255.gate_proj": (2048, 7168),
    "model.layers.3.mlp.experts.0.down_proj": (7168, 2048),
    "model.layers.3.mlp.shared_experts.up_proj": (2048, 7168),
}


@pytest.mark.parametrize("tp", [8, 32])  # 32 ranks cut blocks in two
def test_scales_lie_with_their_blocks_of_codes(tp):
    grids = {name: tuple(-(-size // 128) for size in shape) for name, shape in BLOCKS.items()}
    with torch.device("meta"):
        meta = {f"{name}.weight": torch.empty(shape, dtype=torch.float8_e4m3fn) for name, shape in BLOCKS.items()}
        meta |= {f"{name}.weight_scale_inv": torch.empty(grid) for name, grid in grids.items()}
    rules = CoupledRules.of(Rules.of(DEEPSEEK, {"ep": 2, "tp": tp}), meta)
    for name, shape in BLOCKS.items():
        codes, scales = rules.layout(f"{name}.weight", shape), rules.layout(f"{name}.weight_scale_inv", grids[name])
        assert codes.owners() == scales.owners()
        for rank in codes.owners():
            (one,), (other,) = codes.pieces(rank), scales.pieces(rank)
            assert tuple(at // 128 for at in one.box.lo) == other.box.lo
            assert tuple(-(-at // 128) for at in one.box.hi) == other.box.hi


def test_a_quantized_model_is_converted_by_the_rules_of_its_weights(tmp_path):
    """The rules name no scales. The cut of 12 rows by two ranks goes through a block of 8."""
    config = llama() | {"quantization_config": {"quant_method": "fp8", "weight_block_size": [8, 8]}}
    (tmp_path / "in").mkdir()
    (tmp_path / "in" / "config.json").write_text(json.dumps(config))
    up, scales = torch.arange(48 * 64).reshape(48, 64).to(torch.float8_e4m3fn), torch.rand(6, 8)
    stored = {"model.layers.0.mlp.up_proj.weight": up, "model.layers.0.mlp.up_proj.weight_scale_inv": scales}
    save_file(stored, tmp_path / "in" / "model.safetensors")
    made = checkpoint.convert(
        tmp_path / "in", tmp_path / "out", format="sharded", rules=Rules.of(config, {"tp": 4}), select="*"
    )
    for name, value in stored.items():
        torch.testing.assert_close(made[name].read().float(), value.float(), rtol=0, atol=0)
    assert [str(box) for box, _ in made["model.layers.0.mlp.up_proj.weight"].ranges()][1] == "[12:24, 0:64]"
    assert made["model.layers.0.mlp.up_proj.weight_scale_inv"].shards >= 4


def test_a_padded_vocabulary_fits():
    assert Rules.of(llama(), {"tp": 4}).layout("lm_head.weight", (128, 64)).local_shape(0) == (32, 64)


def test_experts_on_an_axis_of_their_own():
    config, _ = MODELS["Mixtral"]
    name = f"{LAYER}.block_sparse_moe.experts.2.w2.weight"
    rules = Rules.of(config, Mesh(ep=2, tp=2))
    assert rules.layout(name, (64, 48)) == Layout.on_mesh((64, 48), Mesh(ep=1, tp=2, ranks=[2, 3]), "R,S1")
    assert rules.layout(Q, (64, 64)) == Layout.on_mesh((64, 64), Mesh(ep=2, tp=2), "R,S0")
    stacked = Rules.of(MODELS["gpt-oss"][0], Mesh(ep=2, tp=2)).layout(f"{LAYER}.mlp.experts.down_proj", (4, 128, 64))
    assert stacked == Layout.on_mesh((4, 128, 64), Mesh(ep=2, tp=2), [Experts(0, [0, 0, 1, 1]), "S1"])
    assert stacked.local_shape(3) == (2, 64, 64)
    alone = Rules.of(config, Mesh(ep=4))
    assert alone.layout(name, (64, 48)) == Layout.replicated((64, 48), [2])
    assert alone.layout(Q, (64, 64)) == Layout.replicated((64, 64), 4)


def heads_of(layout, rank, head_dim):
    """The heads along dim 0 that a rank has, in the order of its buffer."""
    pieces = sorted(layout.pieces(rank), key=lambda piece: piece.offset)
    rows = [row for piece in pieces for row in range(piece.box.lo[0], piece.box.hi[0])]
    assert [row % head_dim for row in rows] == list(range(head_dim)) * (len(rows) // head_dim), "a head is cut"
    return [row // head_dim for row in rows[::head_dim]]


@given(
    kv=st.integers(1, 6),
    group=st.integers(1, 6),
    head_dim=st.integers(1, 3),
    tp=st.integers(1, 24),
    name=st.sampled_from(["llama", "phi3"]),
)
def test_every_head_of_q_is_with_its_head_of_k_and_v_or_the_mesh_is_refused(kv, group, head_dim, tp, name):
    heads = kv * group
    config = {"model_type": name, "num_attention_heads": heads, "num_key_value_heads": kv, "head_dim": head_dim}
    possible = heads % tp == 0 and (kv % tp == 0 or tp % kv == 0)
    if not possible:
        with pytest.raises(LayoutError, match=rf"{tp} ranks cut \d+ heads"):
            Rules.of(config, {"tp": tp})
        return
    rules = Rules.of(config, {"tp": tp})
    for rank in range(tp):
        if name == "llama":
            q, k = (heads_of(rules.layout(x, (n * head_dim, 1)), rank, head_dim) for x, n in ((Q, heads), (K, kv)))
            v = k
        else:
            layout = rules.layout(f"{LAYER}.self_attn.qkv_proj.weight", ((heads + 2 * kv) * head_dim, 1))
            every = heads_of(layout, rank, head_dim)
            q, k = (
                [n - first for n in every if first <= n < last] for first, last in ((0, heads), (heads, heads + kv))
            )
            v = [n - heads - kv for n in every if n >= heads + kv]
            assert every == [*q, *(n + heads for n in k), *(n + heads + kv for n in v)]
        assert q == list(range(rank * heads // tp, (rank + 1) * heads // tp))
        assert [k[at * len(k) // len(q)] for at in range(len(q))] == [head // group for head in q]
        assert k == v


# --- without a config ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("ready", ["llama", "mixtral", "qwen", "gpt_neox", "bloom", "mamba"])
def test_a_name_alone_is_enough_where_nothing_is_computed(ready):
    rules = read_rules(ready).with_mesh(tp=4)
    for model, (config, names) in MODELS.items():
        if ready in (file_for(config, ""), "qwen" if model == "Qwen3" else None):
            for name, (shape, word) in names.items():
                expected = word.replace("heads0=2", "S0")
                assert str(rules.layout(name, shape)).split("/")[1] == f"{expected}@tp=4"


@pytest.mark.parametrize("ready", FILES)
def test_ready_rules_refuse_what_they_do_not_know(ready):
    rules = read_rules(ready).with_mesh(tp=8)
    for name in (
        "model.layers.0.self_attn.q_proj.qweight",
        "model.layers.0.self_attn.W_pack.weight",
        "transformer.wte",
    ):
        with pytest.raises(LayoutError, match=f"built-in rules '{ready}': none of"):
            rules.placements(name)


def test_numbers_that_rules_need_are_asked_for():
    with pytest.raises(
        LayoutError, match=r"the number 'num_attention_heads' is needed: no config\.json was given.*Rules\.of"
    ):
        read_rules("phi3").with_mesh(tp=2).layout(f"{LAYER}.self_attn.qkv_proj.weight", (96, 64))
    with pytest.raises(LayoutError, match=r"the number 'new_decoder_architecture' is needed"):
        read_rules("falcon").with_mesh(tp=2).layout(f"{H}.self_attention.query_key_value.weight", (96, 64))
    with pytest.raises(LayoutError, match=r"the number 'num_attention_heads' is needed: it is not in config\.json"):
        Rules.of({"model_type": "llama"}, {"tp": 2}).layout(Q, (64, 64))


# --- files -----------------------------------------------------------------------------------------------------------


@pytest.fixture
def saved(tmp_path):
    """A Llama of one layer, and its config.json."""
    names = {name: shape for name, (shape, _) in dense(8).items()}
    torch.save({name: torch.randn(shape) for name, shape in names.items()}, tmp_path / "model.pt")
    (tmp_path / "config.json").write_text(json.dumps(llama()))
    return tmp_path


def test_a_config_is_a_path_a_folder_or_a_mapping(saved):
    expected = Rules.of(llama(), {"tp": 8}).layout(K, (16, 64))
    for config in (saved, saved / "config.json", str(saved), saved / "model.pt"):
        assert (
            Rules.of(config, Mesh(tp=8)).layout(K, (16, 64))
            == expected
            == Layout.on_mesh((16, 64), Mesh(tp=8), [Heads(0, 2)])
        )
    assert read_rules(saved / "config.json").with_mesh(tp=8).layout(K, (16, 64)) == expected


def test_a_conversion_finds_the_rules(saved):
    made = checkpoint.convert(saved, saved / "tp8", format="sharded", rules=read_rules("auto").with_mesh(tp=8))
    back = checkpoint.convert(saved / "tp8", saved / "back.safetensors")
    assert made[Q].shards == 8
    assert made[K].shards in (2, 8)  # each head once, in one file or in parts
    assert not checkpoint.verify(saved / "model.pt", saved / "back.safetensors")
    assert len(back) == 11


def test_files_of_ranks_with_replicated_heads_are_read(saved, tmp_path):
    whole = torch.load(saved / "model.pt", weights_only=True)
    rules = Rules.of(saved, {"tp": 8})
    for rank in range(8):
        parts = {name: local(rules.layout(name, tensor.shape), tensor, rank) for name, tensor in whole.items()}
        torch.save(parts, tmp_path / f"rank_{rank}.pt")
    opened = checkpoint.open(tmp_path, rules=read_rules("auto").with_mesh(tp=8))
    assert {name: entry.shape for name, entry in opened.items()} == {name: tuple(t.shape) for name, t in whole.items()}
    for name, tensor in whole.items():
        torch.testing.assert_close(opened[name].read(), tensor, rtol=0, atol=0)


def local(layout, tensor, rank):
    """What a rank has of a tensor."""
    part = torch.empty(layout.local_shape(rank))
    for piece in layout.pieces(rank):
        cells = tensor[tuple(map(slice, piece.box.lo, piece.box.hi))]
        part.as_strided(cells.shape, piece.strides, piece.offset).copy_(cells)
    return part


def test_a_config_that_contradicts_the_weights_stops_a_conversion_before_it_writes(saved):
    (saved / "config.json").write_text(json.dumps(llama(hidden_size=128)))
    with pytest.raises(LayoutError, match=r"hidden_size = 128"):
        checkpoint.convert(saved, saved / "out", format="sharded", rules=read_rules("auto").with_mesh(tp=2))
    (saved / "config.json").write_text(json.dumps(llama(tie_word_embeddings=False)))
    checkpoint.convert(saved, saved / "some", format="sharded", rules=read_rules("auto").with_mesh(tp=2), select=Q)
    without = checkpoint.convert(
        saved, saved / "less.pt", select=[name for name in dense(8) if name != "lm_head.weight"]
    )
    with pytest.raises(LayoutError, match="tie_word_embeddings = false"):
        checkpoint.convert(without, saved / "out", format="sharded", rules=read_rules("auto").with_mesh(tp=2))
    assert not (saved / "out").exists()


def test_automatic_rules_need_a_config(saved):
    (saved / "config.json").rename(saved / "other.json")
    auto = read_rules("auto").with_mesh(tp=2)
    with pytest.raises(CheckpointError, match=r"config\.json is missing, by which rules='auto' finds the rules"):
        checkpoint.convert(saved, saved / "out", format="sharded", rules=auto)
    with pytest.raises(LayoutError, match=r"rules 'auto' needs a config\.json: Rules\.of"):
        auto.layout(Q, (64, 64))
    with pytest.raises(CheckpointError, match="no such file or directory"):
        Rules.of(saved / "nope")
    (saved / "config.json").write_text("[]")
    with pytest.raises(CheckpointError, match="expected a JSON object"):
        checkpoint.convert(saved, saved / "out", format="sharded", rules=auto)
    with pytest.raises(LayoutError, match=r"the mesh must be a Mesh or a mapping such as \{'tp': 4\}, not 'tp=2'"):
        Rules.of(llama(), "tp=2")
    with pytest.raises(LayoutError, match=r"config must be the path of a folder or config\.json, or a mapping, not 3"):
        Rules.of(3)
    with pytest.raises(LayoutError, match="must be a mapping, not 3"):
        read_rules("auto").with_config(3)
