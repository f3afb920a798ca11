"""Rules that config.json chooses: models of transformers are sharded by them and come back with equal bits and logits.

And the parts are useful: attention and MLPs that are computed from the parts of every rank, in plain torch, add up.
"""

import shutil

import pytest
import torch
import transformers
from torch.nn.functional import conv1d, pad, scaled_dot_product_attention, silu, softplus
from transformers.models.llama.modeling_llama import apply_rotary_pos_emb
from transformers_models import TOKENS

from shardwise import LayoutError, checkpoint
from shardwise.checkpoint import Rules

pytestmark = pytest.mark.filterwarnings("ignore")  # of other libraries

COMMON = {
    "vocab_size": 96,
    "hidden_size": 64,
    "num_hidden_layers": 2,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
SMALL = {**COMMON, "intermediate_size": 48, "num_attention_heads": 8, "max_position_embeddings": 64}
HEADS = {**SMALL, "num_key_value_heads": 2}
WIDE = {**HEADS, "head_dim": 16}
MOE = {"num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 24}
LOCAL = {"num_local_experts": 8, "num_experts_per_tok": 2}
FALCON = {**COMMON, "num_attention_heads": 8}
CONFIGS = {
    "llama": lambda: transformers.LlamaConfig(**HEADS, attention_bias=True, mlp_bias=True),
    "mistral": lambda: transformers.MistralConfig(**HEADS),
    "qwen2": lambda: transformers.Qwen2Config(**HEADS),
    "qwen3": lambda: transformers.Qwen3Config(**WIDE, tie_word_embeddings=True),
    "gemma2": lambda: transformers.Gemma2Config(**WIDE),
    "gemma3": lambda: transformers.Gemma3TextConfig(**WIDE),
    "mixtral": lambda: transformers.MixtralConfig(**HEADS, **LOCAL),
    "qwen3_moe": lambda: transformers.Qwen3MoeConfig(**WIDE, **MOE),
    "qwen2_moe": lambda: transformers.Qwen2MoeConfig(**HEADS, **MOE, shared_expert_intermediate_size=40),
    "phi3": lambda: transformers.Phi3Config(**HEADS),
    "gpt2": lambda: transformers.GPT2Config(
        vocab_size=96, n_positions=64, n_embd=64, n_layer=2, n_head=8, bos_token_id=1, eos_token_id=2
    ),
    "gpt_neox": lambda: transformers.GPTNeoXConfig(**SMALL),
    "bloom": lambda: transformers.BloomConfig(vocab_size=96, hidden_size=64, n_layer=2, n_head=8),
    "falcon 40b": lambda: transformers.FalconConfig(**FALCON, new_decoder_architecture=True, num_kv_heads=2, bias=True),
    "falcon 7b": lambda: transformers.FalconConfig(**FALCON, multi_query=True),
    "falcon 1b": lambda: transformers.FalconConfig(
        **FALCON, multi_query=False, alibi=True, parallel_attn=False, bias=True
    ),
    "deepseek_v3": lambda: transformers.DeepseekV3Config(
        **{**SMALL, "num_key_value_heads": 8},
        moe_intermediate_size=24,
        n_routed_experts=8,
        num_experts_per_tok=2,
        n_group=2,
        topk_group=1,
        n_shared_experts=1,
        first_k_dense_replace=1,
        kv_lora_rank=16,
        q_lora_rank=24,
        qk_rope_head_dim=8,
        qk_nope_head_dim=8,
        v_head_dim=8,
    ),
    "gpt_oss": lambda: transformers.GptOssConfig(**WIDE, **LOCAL, layer_types=["sliding_attention", "full_attention"]),
    "mamba": lambda: transformers.MambaConfig(**COMMON, state_size=8),
}
EXPERTS = [name for name in CONFIGS if name in ("mixtral", "qwen3_moe", "qwen2_moe", "deepseek_v3", "gpt_oss")]


@pytest.fixture(scope="module", params=list(CONFIGS))
def saved(request, tmp_path_factory):
    """The name of an architecture, a folder with a model of it, and the model."""
    folder = tmp_path_factory.mktemp(request.param.replace(" ", "-"))
    return request.param, folder, made(request.param, folder)


def made(name, folder):
    torch.manual_seed(0)
    model = transformers.AutoModelForCausalLM.from_config(CONFIGS[name]()).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(torch.randn_like(parameter) * 0.2)
    model.save_pretrained(folder)
    return transformers.AutoModelForCausalLM.from_pretrained(folder).eval()


def returned(folder, out, mesh):
    """The model after it was sharded over a mesh and put together again."""
    rules = Rules.of(folder, mesh)
    sharded = checkpoint.convert(folder, out / "sharded", format="sharded", rules=rules, durable=False)
    files = [name for name in sharded if sharded[name].shards > 1]
    assert files or set(mesh.values()) == {1}
    (out / "back").mkdir()
    checkpoint.convert(sharded, out / "back" / "model.safetensors", durable=False)
    shutil.copy(folder / "config.json", out / "back")
    return transformers.AutoModelForCausalLM.from_pretrained(out / "back").eval()


def same(found, expected):
    ours, theirs = found.state_dict(), expected.state_dict()
    assert ours.keys() == theirs.keys()
    for name, value in theirs.items():
        torch.testing.assert_close(ours[name], value, rtol=0, atol=0, msg=name)
    with torch.no_grad():
        logits = [model(TOKENS, use_cache=False).logits for model in (found, expected)]
    torch.testing.assert_close(*logits, rtol=0, atol=0)


@pytest.mark.parametrize("tp", [1, 2, 4, 8])
def test_a_model_comes_back_as_it_was(saved, tmp_path, tp):
    _, folder, expected = saved
    same(returned(folder, tmp_path, {"tp": tp}), expected)


@pytest.mark.parametrize("name", EXPERTS)
def test_a_model_with_experts_on_an_axis_comes_back_as_it_was(name, tmp_path):
    expected = made(name, tmp_path / "model")
    same(returned(tmp_path / "model", tmp_path, {"dp": 2, "ep": 4, "tp": 2}), expected)


def test_a_mesh_that_cuts_heads_is_refused_by_every_preset_with_heads(saved):
    name, folder, _ = saved
    if name != "mamba":
        with pytest.raises(LayoutError, match=r"16 ranks cut \d+ heads"):
            Rules.of(folder, {"tp": 16})


# --- parts of ranks are enough to compute with ------------------------------------------------------------------------


class Parts:
    """What a rank has of every tensor, as the layouts of the rules say."""

    def __init__(self, folder, tp):
        self.opened, self.rules, self.tp = checkpoint.open(folder), Rules.of(folder, {"tp": tp}), tp

    def __call__(self, name, rank):
        entry = self.opened[name]
        layout = self.rules.layout(name, entry.shape)
        part = torch.empty(layout.local_shape(rank))
        for piece in layout.pieces(rank):
            part.as_strided(piece.box.shape, piece.strides, piece.offset).copy_(entry.read(piece.box))
        return part


def attended(model, hidden, q, k, v, head_dim):
    """Attention of the heads that a rank has."""
    q, k, v = (x.view(*x.shape[:2], -1, head_dim).transpose(1, 2) for x in (q, k, v))
    assert q.shape[1] % k.shape[1] == 0
    cos, sin = model.model.rotary_emb(hidden, torch.arange(hidden.shape[1])[None])
    q, k = apply_rotary_pos_emb(q, k, cos, sin)
    k, v = (x.repeat_interleave(q.shape[1] // x.shape[1], dim=1) for x in (k, v))
    return scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2)


def by_llama(parts, model, hidden, rank):
    """The parts of a rank: attention and MLP of layer 0."""
    w = {x: parts(f"model.layers.0.self_attn.{x}_proj.weight", rank) for x in "qkvo"}
    b = {x: parts(f"model.layers.0.self_attn.{x}_proj.bias", rank) for x in "qkvo"}
    gate, up, down = (parts(f"model.layers.0.mlp.{x}_proj.weight", rank) for x in ("gate", "up", "down"))
    biases = [parts(f"model.layers.0.mlp.{x}_proj.bias", rank) for x in ("gate", "up", "down")]
    attention = attended(model, hidden, *(hidden @ w[x].T + b[x] for x in "qkv"), 8) @ w["o"].T + (
        b["o"] if rank == 0 else 0
    )
    mlp = (silu(hidden @ gate.T + biases[0]) * (hidden @ up.T + biases[1])) @ down.T + (biases[2] if rank == 0 else 0)
    return attention, mlp


def by_phi3(parts, model, hidden, rank):
    """The same, from fused weights. A rank has its heads of q, then those of k and of v."""
    qkv, out = (parts(f"model.layers.0.self_attn.{x}_proj.weight", rank) for x in ("qkv", "o"))
    gate_up, down = (parts(f"model.layers.0.mlp.{x}_proj.weight", rank) for x in ("gate_up", "down"))
    rows = out.shape[1], (qkv.shape[0] - out.shape[1]) // 2
    attention = attended(model, hidden, *(hidden @ qkv.T).split([rows[0], rows[1], rows[1]], dim=-1), 8) @ out.T
    gate, up = (hidden @ gate_up.T).chunk(2, dim=-1)
    return attention, (silu(gate) * up) @ down.T


@pytest.mark.parametrize("tp", [2, 8])
@pytest.mark.parametrize(("name", "computed"), [("llama", by_llama), ("phi3", by_phi3)])
def test_attention_and_mlp_of_all_ranks_add_up(tmp_path, name, computed, tp):
    model, parts = made(name, tmp_path), Parts(tmp_path, tp)
    layer, hidden = model.model.layers[0], torch.randn(2, 12, 64)
    sums = [sum(both) for both in zip(*(computed(parts, model, hidden, rank) for rank in range(tp)), strict=True)]
    mask = torch.full((12, 12), -torch.inf).triu(1)[None, None]
    with torch.no_grad():
        positions = model.model.rotary_emb(hidden, torch.arange(12)[None])
        attention = layer.self_attn(hidden, position_embeddings=positions, attention_mask=mask)[0]
        expected = attention, layer.mlp(hidden)
    for found, one in zip(sums, expected, strict=True):
        torch.testing.assert_close(found, one, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("tp", [2, 8])
def test_attention_and_mlp_of_transposed_weights_add_up(tmp_path, tp):
    model, parts, hidden = made("gpt2", tmp_path), Parts(tmp_path, tp), torch.randn(2, 12, 64)
    attention = mlp = 0
    for rank in range(tp):
        w = {
            x: parts(f"transformer.h.0.{x}.weight", rank)
            for x in ("attn.c_attn", "attn.c_proj", "mlp.c_fc", "mlp.c_proj")
        }
        b = {x: parts(f"transformer.h.0.{x}.bias", rank) for x in w}
        qkv = (hidden @ w["attn.c_attn"] + b["attn.c_attn"]).chunk(3, dim=-1)
        heads = (x.view(2, 12, -1, 8).transpose(1, 2) for x in qkv)
        found = scaled_dot_product_attention(*heads, is_causal=True).transpose(1, 2).flatten(2)
        attention += found @ w["attn.c_proj"] + (b["attn.c_proj"] if rank == 0 else 0)
        features = model.transformer.h[0].mlp.act(hidden @ w["mlp.c_fc"] + b["mlp.c_fc"])
        mlp += features @ w["mlp.c_proj"] + (b["mlp.c_proj"] if rank == 0 else 0)
    block = model.transformer.h[0]
    with torch.no_grad():
        expected = block.attn(hidden, attention_mask=torch.full((12, 12), -torch.inf).triu(1)[None, None])[0]
        torch.testing.assert_close(mlp, block.mlp(hidden), rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(attention, expected, rtol=1e-4, atol=1e-4)


INTERLEAVED = {  # rows of query_key_value: heads or groups, and what each is made of
    "gpt_neox": ("gpt_neox.layers.0.attention", 8, 3),
    "bloom": ("transformer.h.0.self_attention", 8, 3),
    "falcon 1b": ("transformer.h.0.self_attention", 8, 3),
    "falcon 40b": ("transformer.h.0.self_attention", 2, 6),
}


@pytest.mark.parametrize("tp", [2, 8])
@pytest.mark.parametrize("name", INTERLEAVED)
def test_a_rank_has_whole_groups_of_heads(tmp_path, name, tp):
    made(name, tmp_path)
    where, groups, heads = INTERLEAVED[name]
    parts, whole = Parts(tmp_path, tp), checkpoint.open(tmp_path)[f"{where}.query_key_value.weight"].read()
    every = whole.view(groups, heads, 8, 64)
    for rank in range(tp):
        found = parts(f"{where}.query_key_value.weight", rank).view(-1, heads, 8, 64)
        first = rank * groups // tp
        torch.testing.assert_close(found, every[first : first + max(groups // tp, 1)], rtol=0, atol=0)


@pytest.mark.parametrize("tp", [2, 8])
def test_the_inner_channels_of_mamba_add_up(tmp_path, tp):
    model, parts, hidden = made("mamba", tmp_path), Parts(tmp_path, tp), torch.randn(2, 5, 64)
    mixer, where, outs = model.backbone.layers[0].mixer, "backbone.layers.0.mixer", []
    names = ("in_proj.weight", "conv1d.weight", "conv1d.bias", "x_proj.weight", "dt_proj.weight", "dt_proj.bias")
    ranks = [{x: parts(f"{where}.{x}", rank) for x in (*names, "A_log", "D", "out_proj.weight")} for rank in range(tp)]
    for w in ranks:
        x, w["gate"] = (hidden @ w["in_proj.weight"].T).chunk(2, dim=-1)
        x = conv1d(pad(x.mT, (3, 0)), w["conv1d.weight"], w["conv1d.bias"], groups=x.shape[-1]).mT
        w["x"] = silu(x)
    sizes = [mixer.time_step_rank, mixer.ssm_state_size, mixer.ssm_state_size]
    step, b, c = sum(w["x"] @ w["x_proj.weight"].T for w in ranks).split(sizes, dim=-1)  # all ranks need the sum
    for w in ranks:
        dt = softplus(step @ w["dt_proj.weight"].T + w["dt_proj.bias"])
        state, seen = torch.zeros(2, dt.shape[-1], sizes[1]), []
        for at in range(5):
            decay = torch.exp(dt[:, at, :, None] * -torch.exp(w["A_log"]))
            state = decay * state + (dt[:, at] * w["x"][:, at])[..., None] * b[:, at, None]
            seen.append((state * c[:, at, None]).sum(-1))
        outs.append(((torch.stack(seen, 1) + w["x"] * w["D"]) * silu(w["gate"])) @ w["out_proj.weight"].T)
    with torch.no_grad():
        torch.testing.assert_close(sum(outs), mixer(hidden), rtol=1e-3, atol=1e-3)


def test_gate_and_up_of_interleaved_experts_match_the_rows_of_down(tmp_path):
    model, parts = made("gpt_oss", tmp_path), Parts(tmp_path, 8)
    experts, hidden = model.model.layers[0].mlp.experts, torch.randn(1, 5, 64)
    where, total = "model.layers.0.mlp.experts", torch.zeros(8, 5, 64)
    for rank in range(8):
        both = hidden @ parts(f"{where}.gate_up_proj", rank) + parts(f"{where}.gate_up_proj_bias", rank)[:, None]
        gate, up = both[..., ::2].clamp(max=experts.limit), both[..., 1::2].clamp(-experts.limit, experts.limit)
        total += ((up + 1) * gate * torch.sigmoid(gate * experts.alpha)) @ parts(f"{where}.down_proj", rank)
    total += parts(f"{where}.down_proj_bias", 0)[:, None]
    with torch.no_grad():
        for expert in range(8):
            chosen, weights = torch.full((5, 1), expert), torch.ones(5, 1)
            expected = experts(hidden[0], chosen, weights)
            torch.testing.assert_close(total[expert], expected.view(5, 64), rtol=1e-4, atol=1e-4)
