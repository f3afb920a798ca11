"""Models of Megatron under the names of Hugging Face, and back: compared with tensors that torch cuts by hand."""

import json
import sys

import pytest
import torch
from megatron_folders import arguments, whole_model, write_dist, write_ranks

from shardwise import CheckpointError, checkpoint, cli

LLAMA = {"model_type": "llama", "hidden_size": 16, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 4}
GPT2 = {"model_type": "gpt2", "n_embd": 16, "n_head": 4}


def hf_layer(wholes, layer):
    """A layer of Llama or Mixtral, cut by torch alone."""
    mine = {n.removeprefix(f"decoder.layers.{layer}."): t for n, t in wholes.items() if f".layers.{layer}." in n}
    weight, bias = (mine[f"self_attention.linear_qkv.{kind}"] for kind in ("weight", "bias"))
    groups = [one.reshape(2, 16, -1) for one in (weight, bias)]  # 2 heads of q, one of k and one of v, of 4 cells each
    made = {
        "input_layernorm.weight": mine["input_layernorm.weight"],
        "post_attention_layernorm.weight": mine["pre_mlp_layernorm.weight"],
        "self_attn.o_proj.weight": mine["self_attention.linear_proj.weight"],
    }
    for name, lo, hi in (("q", 0, 8), ("k", 8, 12), ("v", 12, 16)):
        made[f"self_attn.{name}_proj.weight"] = groups[0][:, lo:hi].reshape(-1, 16)
        made[f"self_attn.{name}_proj.bias"] = groups[1][:, lo:hi].reshape(-1)
    for name, tensor in mine.items():
        if "local_experts" in name:
            made |= expert(tensor, name)
    if "mlp.router.weight" in mine:
        return made | {"block_sparse_moe.gate.weight": mine["mlp.router.weight"]}
    gate, up = mine["mlp.linear_fc1.weight"].chunk(2)
    down = mine["mlp.linear_fc2.weight"]
    return made | {"mlp.gate_proj.weight": gate, "mlp.up_proj.weight": up, "mlp.down_proj.weight": down}


def expert(tensor, name):
    where = f"block_sparse_moe.experts.{name.split('.')[3]}"
    if "linear_fc2" in name:
        return {f"{where}.w2.weight": tensor}
    return {f"{where}.{one}.weight": half for one, half in zip(("w1", "w3"), tensor.chunk(2), strict=True)}


def hf_model(wholes):
    made = {
        "model.embed_tokens.weight": wholes["embedding.word_embeddings.weight"],
        "model.norm.weight": wholes["decoder.final_layernorm.weight"],
        **({"lm_head.weight": wholes["output_layer.weight"]} if "output_layer.weight" in wholes else {}),
    }
    for layer in range(4):
        made |= {f"model.layers.{layer}.{name}": tensor for name, tensor in hf_layer(wholes, layer).items()}
    return made


def stacked(wholes, fused=True):
    """With layers and experts as one tensor, as Megatron saves them in torch_dist."""
    made, layers = {}, {}
    for name, tensor in wholes.items():
        if not name.startswith("decoder.layers."):
            made[name] = tensor
            continue
        rest = name.removeprefix("decoder.layers.").partition(".")[2]
        for old, new in NORMS.items() if fused else ():
            rest = rest.replace(old, new)
        layers.setdefault(rest, []).append(tensor)
    experts = {}
    for rest, several in layers.items():
        before, is_expert, after = rest.partition("local_experts.")
        if is_expert:
            experts.setdefault(f"{before}experts.{after.partition('.')[2]}", []).append(torch.stack(several))
        else:
            made[f"decoder.layers.{rest}"] = torch.stack(several)
    return made | {f"decoder.layers.{name}": torch.stack(several, 1) for name, several in experts.items()}


NORMS = {
    "input_layernorm.": "self_attention.linear_qkv.layer_norm_",
    "pre_mlp_layernorm.": "mlp.linear_fc1.layer_norm_",
}


def same(opened, expected):
    assert set(opened) == set(expected)
    for name, value in expected.items():
        torch.testing.assert_close(opened[name].read(), value, rtol=0, atol=0, msg=name)


def as_hf(path, out):
    return checkpoint.convert(path, out, **checkpoint.translation(path, "hf"))


@pytest.mark.parametrize("more", [{}, {"num_experts": 4}, {"untie_embeddings_and_output_weights": False}])
def test_every_form_of_a_model_becomes_the_same_model_of_hugging_face(tmp_path, more):
    args = arguments(tensor_model_parallel_size=2, pipeline_model_parallel_size=2, **more)
    wholes = whole_model(args)
    write_ranks(tmp_path / "ranks", wholes, args)
    write_dist(tmp_path / "stacked", stacked(wholes), common={"args": args})
    write_dist(tmp_path / "by_module", stacked(wholes, fused=False), common={"args": args})
    write_dist(tmp_path / "one_by_one", wholes, common={"args": args})
    for form in ("ranks", "stacked", "by_module", "one_by_one"):
        same(as_hf(tmp_path / form, tmp_path / f"{form}.safetensors"), hf_model(wholes))


@pytest.mark.parametrize("more", [{}, {"num_experts": 4}])
def test_halves_that_megatron_saved_apart_are_gate_and_up(tmp_path, more):
    args = arguments(**more)
    wholes, apart = whole_model(args), {}
    for name, tensor in wholes.items():
        halves = zip(("_w", "_v"), tensor.chunk(2), strict=True) if "linear_fc1" in name else [("", tensor)]
        apart |= {name.replace("local_experts", "experts") + end: half.clone() for end, half in halves}
    write_dist(tmp_path / "in", apart, common={"args": args})
    same(as_hf(tmp_path / "in", tmp_path / "out.safetensors"), hf_model(wholes))


@pytest.mark.parametrize("more", [{}, {"num_experts": 4}])
def test_a_model_of_hugging_face_goes_there_and_back(tmp_path, more):
    args = arguments(**more)
    wholes = whole_model(args)
    expected = hf_model(wholes)
    (tmp_path / "hf").mkdir()
    torch.save(expected, tmp_path / "hf" / "model.pt")
    kind = {"model_type": "mixtral"} if more else {}
    (tmp_path / "hf" / "config.json").write_text(json.dumps(LLAMA | kind))
    changed = checkpoint.translation(tmp_path / "hf", "megatron")
    made = checkpoint.convert(tmp_path / "hf", tmp_path / "dist", format="megatron-dist", **changed)
    where = {"mlp.linear_fc1.layer_norm_": "pre_mlp_layernorm."} if more else {}
    named = {n.replace(*old) if (old := next(iter(where.items()), None)) else n: t for n, t in stacked(wholes).items()}
    same(made, named)
    torch.save({"args": args}, tmp_path / "dist" / "common.pt")
    same(as_hf(tmp_path / "dist", tmp_path / "back.safetensors"), expected)


def test_gpt2_with_its_transposed_weights_goes_there_and_back(tmp_path):
    torch.manual_seed(0)
    shapes = {"ln_1": (16,), "attn.c_attn": (16, 48), "attn.c_proj": (16, 16), "ln_2": (16,), "mlp.c_fc": (16, 24)}
    shapes |= {"mlp.c_proj": (24, 16)}
    weights = {f"h.{n}.{name}.weight": torch.randn(shape) for n in range(2) for name, shape in shapes.items()}
    biases = {f"h.{n}.{name}.bias": torch.randn(shape[-1]) for n in range(2) for name, shape in shapes.items()}
    top = {"wte.weight": torch.randn(48, 16), "wpe.weight": torch.randn(8, 16)}
    top |= {"ln_f.weight": torch.randn(16), "ln_f.bias": torch.randn(16)}
    model = {f"transformer.{name}": tensor for name, tensor in (weights | biases | top).items()}
    (tmp_path / "hf").mkdir()
    torch.save(model, tmp_path / "hf" / "model.pt")
    (tmp_path / "hf" / "config.json").write_text(json.dumps(GPT2))
    changed = checkpoint.translation(tmp_path / "hf", "megatron")
    made = checkpoint.convert(tmp_path / "hf", tmp_path / "dist", format="megatron-dist", **changed)
    q, k, v = model["transformer.h.1.attn.c_attn.weight"].T.chunk(3)
    by_head = torch.stack([one.reshape(4, 4, 16) for one in (q, k, v)], 1).reshape(48, 16)
    found = made["decoder.layers.self_attention.linear_qkv.weight"].read()[1]
    torch.testing.assert_close(found, by_head, rtol=0, atol=0)
    args = arguments(
        swiglu=False, group_query_attention=False, position_embedding_type="learned_absolute", num_layers=2
    )
    torch.save({"args": args}, tmp_path / "dist" / "common.pt")
    same(as_hf(tmp_path / "dist", tmp_path / "back.safetensors"), model)


def test_optimizer_states_are_left_out_and_unknown_weights_refused(tmp_path):
    args = arguments()
    wholes = whole_model(args)
    more = {f"optimizer.state.exp_avg.{name}": torch.zeros_like(tensor) for name, tensor in wholes.items()}
    write_dist(tmp_path / "in", wholes | more, common={"args": args})
    same(as_hf(tmp_path / "in", tmp_path / "out.safetensors"), hf_model(wholes))
    write_dist(tmp_path / "odd", wholes | {"mtp.layers.0.weight": torch.ones(2)}, common={"args": args})
    with pytest.raises(CheckpointError, match=r"'mtp.layers.0.weight' has no name in Hugging Face's llama"):
        checkpoint.translation(tmp_path / "odd", "hf")


@pytest.fixture
def shell(monkeypatch):
    """Runs a command; returns its exit code."""

    def run(*words):
        monkeypatch.setattr(sys, "argv", ["shardwise", *words])
        try:
            cli.main()
        except SystemExit as ended:
            return ended.code or 0
        return 0

    return run


def test_the_shell_gives_names_cuts_the_vocabulary_and_compares(tmp_path, shell, capsys):
    args = arguments()
    wholes = whole_model(args)
    write_ranks(tmp_path / "in", wholes, args)
    cut = ["--pad", "model.embed_tokens.weight=40", "--pad", "lm_head.weight=40"]
    words = [str(tmp_path / "in"), str(tmp_path / "out.safetensors"), "--names", "hf", *cut, "--no-bar"]
    assert [shell(command, *words) for command in ("convert", "verify")] == [0, 0]
    expected = hf_model(wholes)
    expected |= {name: expected[name][:40] for name in ("model.embed_tokens.weight", "lm_head.weight")}
    same(checkpoint.open(tmp_path / "out.safetensors"), expected)
    assert shell("verify", *words, "--rename", "a=b") == 2
    assert "--names and --rename cannot be combined" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("more", "message"),
    [
        ({"num_query_groups": 3}, "4 attention heads in 3 query groups"),
        ({"rotary_interleaved": True}, "args.rotary_interleaved is set"),
        ({"apply_layernorm_1p": True}, "args.apply_layernorm_1p is set"),
        ({"swiglu": False}, "neither swiglu"),
    ],
)
def test_models_that_hugging_face_has_not_got_are_refused(tmp_path, more, message):
    write_dist(tmp_path, whole_model(arguments()), common={"args": arguments(**more)})
    with pytest.raises(CheckpointError, match=message):
        checkpoint.translation(tmp_path, "hf")


def test_what_is_missing_to_translate_is_named(tmp_path):
    write_dist(tmp_path / "in", whole_model(arguments()), common={})
    with pytest.raises(CheckpointError, match="has no 'args' with the arguments of Megatron"):
        checkpoint.translation(tmp_path / "in", "hf")
    torch.save({"model.norm.weight": torch.ones(2)}, tmp_path / "model.pt")
    with pytest.raises(CheckpointError, match=r"config.json is missing"):
        checkpoint.translation(tmp_path / "model.pt", "megatron")
    with pytest.raises(ValueError, match="must be those of 'hf' or 'megatron', not 'gguf'"):
        checkpoint.translation(tmp_path / "in", "gguf")
