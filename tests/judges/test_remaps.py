"""Fused weights are taken apart as the models themselves do it, put together again, and give the same logits."""

import json

import pytest
import torch
import transformers
from transformers_models import MODELS, logits, made

import shardwise as sw
from shardwise import Concat, Interleaved, Padded, Rotary, Stack, checkpoint
from shardwise.testing import on_ranks

pytestmark = pytest.mark.filterwarnings("ignore")  # of other libraries

FALCON = {"vocab_size": 96, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "bos_token_id": 1}
GROUPED = transformers.FalconConfig(**FALCON, num_kv_heads=2, new_decoder_architecture=True, eos_token_id=2)
PARTS = ["*.q.*", "*.k.*", "*.v.*"]
FUSED = {  # the sizes of q, k and v in a group of rows
    "gpt_neox": (MODELS["gpt_neox"](), [8, 8, 8]),
    "bloom": (MODELS["bloom"](), [8, 8, 8]),
    "falcon, grouped heads": (GROUPED, [16, 8, 8]),
}


def saved(config, folder):
    torch.manual_seed(0)
    model = transformers.AutoModelForCausalLM.from_config(config).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(torch.randn_like(parameter) * 0.2)
    model.save_pretrained(folder)
    return model


def own_split(attention, fused):
    """q, k and v of fused outputs (tokens x features) as the model's own attention cuts them, one row per feature."""
    if hasattr(attention, "_reshape"):
        return [one.transpose(1, 2).flatten(2)[0] for one in attention._reshape(fused)]
    if hasattr(attention, "_split_heads"):
        q, k, v = attention._split_heads(fused)
        repeats = attention.num_heads // attention.num_kv_heads
        return [q.flatten(2)[0], k[:, :, ::repeats].flatten(2)[0], v[:, :, ::repeats].flatten(2)[0]]
    whole = fused.view(*fused.shape[:-1], -1, 3 * attention.head_size)
    return [one.flatten(2)[0] for one in whole.chunk(3, dim=-1)]


@pytest.mark.parametrize("name", FUSED)
def test_qkv_by_head_is_taken_apart_as_the_model_does_and_put_together(name, tmp_path):
    config, sizes = FUSED[name]
    model = saved(config, tmp_path / "in")
    rule = Interleaved("*.query_key_value.*", PARTS, sizes)
    apart = checkpoint.convert(tmp_path / "in", tmp_path / "apart.safetensors", remap=[rule])
    attention_name = next(n for n, m in model.named_modules() if n.endswith(("attention", "self_attention")))
    attention = model.get_submodule(attention_name)
    weight = attention.query_key_value.weight.detach()
    for part, expected in zip("qkv", own_split(attention, weight.T[None]), strict=True):
        torch.testing.assert_close(apart[f"{attention_name}.{part}.weight"].read(), expected.T, rtol=0, atol=0)
    (tmp_path / "back").mkdir()
    (tmp_path / "back" / "config.json").write_text((tmp_path / "in" / "config.json").read_text())
    checkpoint.convert(apart, tmp_path / "back" / "model.safetensors", remap=[rule])
    back = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "back").eval()
    torch.testing.assert_close(logits(back), logits(model), rtol=0, atol=0)


@pytest.mark.parametrize("tp", [2, 4])
def test_a_fused_checkpoint_is_loaded_into_separate_sharded_projections(tp, tmp_path):
    """What a tensor parallel engine with q, k and v of its own would do: each rank reads its heads only."""
    model = saved(MODELS["gpt_neox"](), tmp_path)
    name = "gpt_neox.layers.0.attention.query_key_value.weight"
    expected = own_split(model.gpt_neox.layers[0].attention, model.get_parameter(name).detach().T[None])

    def run(rank):
        mesh = torch.distributed.device_mesh.init_device_mesh("cpu", (tp,))
        rows = [torch.distributed.tensor.Shard(0)]
        into = {p: torch.distributed.tensor.zeros(32, 32, device_mesh=mesh, placements=rows) for p in "qkv"}
        checkpoint.load(tmp_path, into, remap=[Interleaved(name, list("qkv"), [8, 8, 8])])
        for part, value in zip("qkv", expected, strict=True):
            torch.testing.assert_close(into[part].full_tensor(), value.T, rtol=0, atol=0)

    on_ranks(tp, run)


def test_experts_of_mixtral_are_stacked_and_taken_apart_again(tmp_path):
    model = made("mixtral")
    model.save_pretrained(tmp_path / "in")
    layer = "*.block_sparse_moe.experts"
    rules = [
        Concat("*.w13", ["*.all.w1", "*.all.w3"], dim=1),
        Stack("*.all.w1", f"{layer}.{{}}.w1.weight"),
        Stack("*.all.w3", f"{layer}.{{}}.w3.weight"),
        Stack("*.w2", f"{layer}.{{}}.w2.weight"),
    ]
    stacked = checkpoint.convert(tmp_path / "in", tmp_path / "stacked.safetensors", remap=rules)
    for at, block in enumerate(model.model.layers):
        fused = block.mlp.experts.gate_up_proj.detach()
        torch.testing.assert_close(stacked[f"model.layers.{at}.w13"].read(), fused, rtol=0, atol=0)
    (tmp_path / "back").mkdir()
    (tmp_path / "back" / "config.json").write_text((tmp_path / "in" / "config.json").read_text())
    checkpoint.convert(stacked, tmp_path / "back" / "model.safetensors", remap=rules)
    back = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "back").eval()
    torch.testing.assert_close(logits(back), logits(model), rtol=0, atol=0)


def test_rotary_pairs_give_the_attention_of_rotary_halves(tmp_path):
    """The published form of Llama turns neighbours; transformers turns halves. Scores of q and k are the same."""
    model = saved(MODELS["llama"](), tmp_path / "in")
    q, k = "model.layers.0.self_attn.q_proj.weight", "model.layers.0.self_attn.k_proj.weight"
    rules = [Rotary("*.q_proj.weight", 8, to="pairs"), Rotary("*.k_proj.weight", 8, to="pairs")]
    pairs = checkpoint.convert(tmp_path / "in", tmp_path / "pairs.safetensors", remap=rules)
    hidden = torch.randn(1, 6, 32)
    cos, sin = model.model.rotary_emb(hidden, torch.arange(6)[None])
    heads = [model.get_parameter(name).detach() @ hidden[0].T for name in (q, k)]
    halves = [one.view(-1, 8, 6).transpose(1, 2)[None] for one in heads]
    turned = transformers.models.llama.modeling_llama.apply_rotary_pos_emb(*halves, cos, sin)
    expected = turned[0][0, :2] @ turned[1][0].transpose(1, 2)

    def complex_rotary(weight):
        value = (weight @ hidden[0].T).view(-1, 4, 2, 6).permute(0, 3, 1, 2).contiguous()
        return torch.view_as_real(torch.view_as_complex(value) * torch.complex(cos, sin)[0, :, :4]).flatten(2)

    ours = complex_rotary(pairs[q].read())[:2] @ complex_rotary(pairs[k].read()).transpose(1, 2)
    torch.testing.assert_close(ours, expected)


def test_a_padded_vocabulary_gives_the_same_logits(tmp_path):
    model = saved(MODELS["llama"](), tmp_path / "in")
    rules = [Padded("*embed_tokens.weight", multiple=64), Padded("lm_head.weight", multiple=64)]
    (tmp_path / "padded").mkdir()
    config = json.loads((tmp_path / "in" / "config.json").read_text()) | {"vocab_size": 128}
    (tmp_path / "padded" / "config.json").write_text(json.dumps(config))
    checkpoint.convert(tmp_path / "in", tmp_path / "padded" / "model.safetensors", remap=rules)
    padded = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "padded").eval()
    found, expected = logits(padded), logits(model)
    torch.testing.assert_close(found[..., :96], expected, rtol=0, atol=0)
    assert not found[..., 96:].any()
    assert sw.checkpoint.verify(tmp_path / "in", tmp_path / "padded", remap=rules) == []
