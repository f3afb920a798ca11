"""megatron-core and transformers judge: what Megatron writes we read, what we write it loads, and logits are equal."""

import json
from pathlib import Path

import pytest
import torch
import transformers
from megatron_models import KINDS, TOKENS, arguments, load, logits, model, on_megatron, save, save_ranks, start

from shardwise import checkpoint

pytestmark = pytest.mark.filterwarnings("ignore")  # of other libraries

SIZES = {"vocab_size": 128, "hidden_size": 32, "num_hidden_layers": 4, "num_attention_heads": 4}
GROUPS = {"num_key_value_heads": 2, "intermediate_size": 64, "head_dim": 8, "rms_norm_eps": 1e-5}
ROTARY = {"rope_type": "default", "rope_theta": 10000.0}
GPT = {"vocab_size": 128, "n_embd": 32, "n_layer": 4, "n_head": 4, "n_positions": 16, "n_inner": 64}
CONFIGS = {
    "llama": lambda: transformers.LlamaConfig(**SIZES, **GROUPS),
    "mixtral": lambda: transformers.MixtralConfig(**SIZES, **GROUPS, num_local_experts=4, rope_parameters=ROTARY),
    "gpt2": lambda: transformers.GPT2Config(**GPT, activation_function="gelu"),
}


def own_logits(path):
    """By transformers."""
    with torch.no_grad():
        return transformers.AutoModelForCausalLM.from_pretrained(path).eval()(TOKENS).logits


def close(found, expected):
    assert float(expected.abs().max()) > 0.01
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5)


def as_hf(kind, source, folder):
    """The model as transformers loads it."""
    folder.mkdir()
    CONFIGS[kind]().save_pretrained(folder)
    checkpoint.convert(source, folder / "model.safetensors", **checkpoint.translation(source, "hf"))
    return folder


@pytest.mark.judged("megatron-core", "torch_dist: Llama, GPT-2, Mixtral", "read", "logits of transformers")
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("tp", "pp"), [(1, 1), (2, 1), (1, 2), (2, 2)])
def test_what_megatron_saves_has_the_logits_of_transformers(kind, tp, pp, tmp_path):
    if kind == "mixtral" and tp > 1:
        pytest.skip("experts and tensor parallel ranks need sequence parallelism, which local modules lack")

    def write(rank):
        start(tp, pp)
        torch.manual_seed(7)
        made = model(kind, tp, pp)
        save([made], tmp_path / "dist", arguments(kind, tp, pp))
        save_ranks([made], tmp_path / "iter_0000003", arguments(kind, tp, pp), rank)
        return logits(made) if pp == 1 else None

    by_megatron = on_megatron(tp * pp, write)[0]
    dist, ranks = checkpoint.open(tmp_path / "dist"), checkpoint.open(tmp_path / "iter_0000003")
    assert (dist.format, ranks.format) == ("megatron-dist", "megatron-ranks")
    found = own_logits(as_hf(kind, dist, tmp_path / "from_dist"))
    torch.testing.assert_close(own_logits(as_hf(kind, ranks, tmp_path / "from_ranks")), found, rtol=0, atol=0)
    if by_megatron is not None:
        close(found, by_megatron)


GRIDS = {  # kind, tp, pp, ep and parts of an interleaved pipeline
    "experts on two ranks": ("mixtral", 1, 1, 2, None),
    "experts and a pipeline": ("mixtral", 1, 2, 2, None),
    "interleaved": ("llama", 2, 2, 1, 2),
    "interleaved and tied": ("gpt2", 1, 2, 1, 2),
}


@pytest.mark.judged("megatron-core", "torch_dist and files of ranks", "read", "each other, bit-for-bit")
@pytest.mark.parametrize("grid", GRIDS.values(), ids=GRIDS)
def test_all_forms_of_a_model_are_the_same_for_transformers(grid, tmp_path):
    kind, tp, pp, ep, vp = grid

    def write(rank):
        start(tp, pp, ep, vp)
        torch.manual_seed(7)
        parts = [model(kind, tp, pp, ep, vp, part) for part in (range(vp) if vp else [None])]
        args = arguments(kind, tp, pp, ep, vp)
        save(parts, tmp_path / "stacked", args)
        save(parts, tmp_path / "one_by_one", args, singleton_local_shards=True)
        save_ranks(parts, tmp_path / "ranks", args, rank)

    on_megatron(tp * pp * ep, write)
    forms = {form: checkpoint.open(tmp_path / form) for form in ("stacked", "one_by_one", "ranks")}
    found = {form: as_hf(kind, opened, tmp_path / f"{form}_hf") for form, opened in forms.items()}
    assert len(forms["one_by_one"]) > len(forms["stacked"])
    for form in ("one_by_one", "ranks"):
        assert checkpoint.verify(found["stacked"], found[form]) == []


@pytest.mark.judged(
    "megatron-core", "torch_dist: Llama, GPT-2, Mixtral", "written", "`dist_checkpointing.load`, logits of transformers"
)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("tp", [1, 2])
def test_what_we_write_is_loaded_by_megatron_with_the_same_logits(kind, tp, tmp_path):
    if kind == "mixtral" and tp > 1:
        pytest.skip("experts and tensor parallel ranks need sequence parallelism, which local modules lack")
    torch.manual_seed(0)
    made = transformers.AutoModelForCausalLM.from_config(CONFIGS[kind]())
    with torch.no_grad():
        for parameter in made.parameters():
            parameter.copy_(torch.randn_like(parameter) * 0.2)
    made.save_pretrained(tmp_path / "hf")
    expected, changed = own_logits(tmp_path / "hf"), checkpoint.translation(tmp_path / "hf", "megatron")
    names = [("decoder.layers.pre_mlp_layernorm.weight", "decoder.layers.mlp.linear_fc1.layer_norm_weight")]
    checkpoint.convert(tmp_path / "hf", tmp_path / "first", format="megatron-dist", **changed)
    local = names if kind == "mixtral" else None  # the name that local modules have for it
    checkpoint.convert(tmp_path / "first", tmp_path / "out", format="megatron-dist", rename=local)

    def read(rank):
        start(tp, 1)
        torch.manual_seed(99)
        made = model(kind, tp)
        load(made, tmp_path / "out")
        return logits(made)

    close(on_megatron(tp, read)[0], expected)


def test_values_of_single_ranks_go_there_and_back(tmp_path):
    def write(rank):
        start(2, 1)
        save([model("llama", 2)], tmp_path / "in", arguments("llama", 2))

    on_megatron(2, write)
    ours = checkpoint.convert(tmp_path / "in", tmp_path / "out", format="megatron-dist", objects="carry")
    some = ["decoder.*", "embedding.*", "output_layer.*"]
    assert checkpoint.verify(tmp_path / "in", tmp_path / "out", select=some) == []
    assert {name for name in ours.objects if "/shard_" in name}
    assert json.loads(Path(tmp_path, "out/metadata.json").read_text())["sharded_backend"] == "torch_dist"

    def read(rank):
        start(1, 1)
        from megatron.core import dist_checkpointing

        made = model("llama")
        found = dist_checkpointing.load({"model0": made.sharded_state_dict()}, str(tmp_path / "out"))  # strict
        assert found["iteration"] == 3
        assert found["args"].num_layers == 4
        made.load_state_dict(found["model0"])
        return {name: value for name, value in made.state_dict().items() if value is not None}

    found, opened = on_megatron(1, read)[0], checkpoint.open(tmp_path / "in")
    qkv = opened["decoder.layers.self_attention.linear_qkv.weight"].read()
    torch.testing.assert_close(found["decoder.layers.2.self_attention.linear_qkv.weight"], qkv[2], rtol=0, atol=0)
