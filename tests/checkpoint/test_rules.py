"""Rules: good ones say where tensors lie, bad ones are refused by the file and the rule, ready ones know real names."""

import pytest

from shardwise import Layout, LayoutError, Mesh, Replicate, Shard, StridedShard
from shardwise.checkpoint.rules import READY, read_rules
from shardwise.errors import CheckpointError

GOOD = """
[mesh]
dp = 2
tp = 4
[[rule]]
name = ["*.[qkv]_proj.weight", "embed"]
placements = {tp = "S0"}
[[rule]]
name = "*.o_proj.weight"
placements = ["R", "S1"]
[[rule]]
name = "both"
placements = "S0:4,S0"
[[rule]]
name = "*.qkv.*"
fused = {dim = 0, segments = [8, 4, 4], axis = "tp"}
[[rule]]
name = "*_extra_state"
skip = true
[[rule]]
name = "*"
placements = "R"
"""

TP, WHOLE = (Replicate(), Shard(0)), (Replicate(), Replicate())
PLACED = {
    "model.3.q_proj.weight": TP,
    "embed": TP,
    "model.3.o_proj.weight": (Replicate(), Shard(1)),
    "both": (StridedShard(0, 4), Shard(0)),
    "model.3.g_proj.weight": WHOLE,
    "": WHOLE,
}


@pytest.mark.parametrize("name", PLACED)
def test_the_first_rule_that_fits_gives_the_placements(name):
    assert read_rules(GOOD).placements(name) == PLACED[name]


def test_layouts_are_those_of_the_mesh():
    rules = read_rules(GOOD)
    assert rules.layout("embed", (12, 6)) == Layout.on_mesh((12, 6), Mesh(dp=2, tp=4), ["R", "S0"])
    assert rules.layout("step", ()) == Layout.replicated((), 8)


def test_fused_ones_are_cut_segment_by_segment():
    rules = read_rules(GOOD).with_mesh(tp=4, dp=1)
    assert rules.layout("h.qkv.bias", (16,)) == Layout.fused((16,), 0, [8, 4, 4], 4)


def test_a_ratio_fits_every_size():
    rules = read_rules('[[rule]]\nname = "*"\nfused = {dim = -1, ratio = [32, 8, 8]}').with_mesh(tp=2)
    assert rules.layout("w", (3, 12)) == Layout.fused((3, 12), 1, [8, 2, 2], 2)
    assert rules.layout("w", (96,)) == Layout.fused((96,), 0, [64, 16, 16], 2)


def test_a_file_a_text_a_mapping_and_rules_are_read_alike(tmp_path):
    file = tmp_path / "some.toml"
    file.write_text('[mesh]\ntp = 2\n[[rule]]\nname = "*"\nplacements = ["S0"]\n[files]\nprefix = "m."\n')
    said = {"mesh": {"tp": 2}, "rule": [{"name": "*", "placements": ["S0"]}], "files": {"prefix": "m."}}
    for source in (file, str(file), file.read_text(), said):
        rules = read_rules(source)
        assert read_rules(rules) is rules
        assert (rules.mesh, rules.prefix, rules.pattern) == (Mesh(tp=2), "m.", None)
        assert rules.placements("w") == (Shard(0),)


def test_another_mesh_leaves_the_rules_as_they_were():
    rules = read_rules("llama")
    assert rules.with_mesh(tp=2).mesh == Mesh(tp=2)
    assert rules.mesh is None


RULE = '[[rule]]\nname = "w*"\n'
BAD = {
    "": ["no rules ''", "llama"],
    "lama": ["no rules 'lama'", "did you mean 'llama'"],
    "x = [": ["these rules", "not valid TOML"],
    "[mesh]\ntp = 2": ["no [[rule]]"],
    "rule = 3": ["rule must be a list, not 3"],
    "rule = [3]": ["rule 1", "not 3"],
    "[[rule]]\nplacements = 'R'": ["rule 1", "name must be a pattern"],
    "[[rule]]\nname = [1]": ["rule 1", "[1]"],
    "[[rule]]\nname = true": ["rule 1", "name", "True"],
    f"{RULE}placement = 'R'": ["rule 1 ('w*')", "unknown key 'placement'", "did you mean 'placements'"],
    RULE: ["rule 1 ('w*')", "exactly one of placements, fused and skip"],
    f"{RULE}placements = 'R'\nskip = true": ["rule 1 ('w*')", "exactly one of"],
    f"{RULE}skip = 1": ["rule 1 ('w*')", "skip must be true or false, not 1"],
    f"{RULE}skip = false": ["rule 1 ('w*')", "exactly one of placements, fused and skip"],
    f"{RULE}placements = 0": ["rule 1 ('w*')", "placements must be like", "not 0"],
    f"{RULE}placements = ['X0']": ["rule 1 ('w*')", "'X0' is not a placement"],
    f"{RULE}placements = {{tp = 0}}": ["rule 1 ('w*')", "0 is not a placement"],
    f"{RULE}placements = ['Pmix']": ["rule 1 ('w*')", "no reduction 'mix'"],
    f"{RULE}fused = 3": ["rule 1 ('w*')", "fused must be like", "3"],
    f"{RULE}fused = {{dim = 0}}": ["rule 1 ('w*')", "segments", "ratio"],
    f"{RULE}fused = {{dim = 0, segments = [1], ratio = [1]}}": ["rule 1 ('w*')", "exactly one of"],
    f"{RULE}fused = {{dim = 0, segments = []}}": ["rule 1 ('w*')", "whole numbers above 0", "[]"],
    f"{RULE}fused = {{dim = 0, segments = [4, true]}}": ["rule 1 ('w*')", "whole numbers above 0"],
    f"{RULE}fused = {{dim = 0, ratio = [4, 0]}}": ["rule 1 ('w*')", "whole numbers above 0", "[4, 0]"],
    f"{RULE}fused = {{dim = '0', ratio = [4]}}": ["rule 1 ('w*')", "dim must be a whole number, not '0'"],
    f"{RULE}fused = {{dims = 0, ratio = [4]}}": ["rule 1 ('w*')", "unknown key 'dims'", "did you mean 'dim'"],
    f"[meshes]\n{RULE}skip = true": ["unknown key 'meshes'", "did you mean 'mesh'"],
    f"mesh = 4\n{RULE}skip = true": ["[mesh]", "mesh must be a table, not 4"],
    f"[mesh]\n{RULE}skip = true": ["[mesh]", "at least one axis"],
    f"[mesh]\ntp = 0\n{RULE}skip = true": ["[mesh]", "'tp'", "at least 1, not 0"],
    f"[mesh]\ntp = 'two'\n{RULE}skip = true": ["[mesh]", "'tp'", "not 'two'"],
    f"[mesh]\ntp = 2\n{RULE}placements = {{tpp = 'S0'}}": ["rule 1 ('w*')", "no axis 'tpp'", "did you mean 'tp'"],
    f"[mesh]\ntp = 2\n{RULE}placements = ['S0', 'R']": ["rule 1 ('w*')", "1 axes", "2 placements"],
    f"[mesh]\ntp = 2\n{RULE}fused = {{dim = 0, ratio = [1], axis = 'dp'}}": ["rule 1 ('w*')", "no axis 'dp'"],
    f"[mesh]\ntp = 2\ndp = 2\n{RULE}fused = {{dim = 0, ratio = [1]}}": ["rule 1 ('w*')", "several axes", "axis ="],
    f"[files]\nname = 'x'\n{RULE}skip = true": ["[files]", "unknown key 'name'"],
    f"[files]\npattern = 4\n{RULE}skip = true": ["[files]", "pattern must be a string, not 4"],
    f"[mesh]\ntp = 2\n[files]\npattern = '{{pp}}.pt'\n{RULE}skip = true": ["[files]", "{pp}", "rank, tp"],
    f"[mesh]\ntp = 2\n[files]\npattern = '{{tp.real}}.pt'\n{RULE}skip = true": ["[files]", "{tp.real}"],
    f"[mesh]\ntp = 2\n[files]\npattern = '{{tp'\n{RULE}skip = true": ["[files]", "'{tp'"],
    f"[mesh]\ntp = 2\n[files]\npattern = '{{tp:q}}'\n{RULE}skip = true": ["[files]", "'{tp:q}'"],
    f"[mesh]\ntp = 2\n[files]\npattern = '{{tp:{{x}}}}'\n{RULE}skip = true": ["[files]", "x"],
}


@pytest.mark.parametrize("text", BAD)
def test_a_bad_text_is_refused(text):
    with pytest.raises(LayoutError) as caught:
        read_rules(text)
    for part in BAD[text]:
        assert part in str(caught.value)


@pytest.mark.parametrize("source", [None, 3, [("*", "R")]])
def test_what_is_no_rules_at_all_is_refused(source):
    with pytest.raises(LayoutError, match="rules must be a path"):
        read_rules(source)


def test_errors_name_the_file(tmp_path):
    file = tmp_path / "mine.toml"
    file.write_text(f"{RULE}placements = ['S2']")
    rules = read_rules(file).with_mesh(tp=2)
    with pytest.raises(
        LayoutError, match=r"mine\.toml, rule 1 \('w\*'\): 'w1': no dim 2 in a tensor of shape \(4, 6\)"
    ):
        rules.layout("w1", (4, 6))
    with pytest.raises(LayoutError, match=r"mine\.toml: none of 1 rules matches 'x'"):
        rules.layout("x", (4, 6))
    file.write_bytes(b"\xff\xfe")
    with pytest.raises(LayoutError, match=r"mine\.toml: not valid TOML"):
        read_rules(file)
    with pytest.raises(CheckpointError, match=r"other\.toml is missing"):
        read_rules(tmp_path / "other.toml")


def test_what_cannot_be_laid_out_is_refused():
    rules = read_rules(GOOD)
    with pytest.raises(LayoutError, match=r"rule 5 .*'m_extra_state' is left out"):
        rules.layout("m_extra_state", (4,))
    with pytest.raises(LayoutError, match=r"rule 4 .*'h.qkv.w' is fused"):
        rules.placements("h.qkv.w")
    with pytest.raises(LayoutError, match=r"rule 4 .*'h.qkv.w'.* no replicas"):
        rules.layout("h.qkv.w", (16, 2))
    with pytest.raises(LayoutError, match=r"rule 4 .*add up to 16, but dim 0 of shape \(18, 2\) has 18"):
        rules.with_mesh(dp=1, tp=4).layout("h.qkv.w", (18, 2))
    with pytest.raises(LayoutError, match=r"rule 4 .*no dim 0 in a 0-d tensor"):
        rules.with_mesh(dp=1, tp=4).layout("h.qkv.w", ())
    ratio = read_rules({"rule": [{"name": "*", "fused": {"dim": 0, "ratio": [4, 2]}}]}).with_mesh(tp=2)
    with pytest.raises(LayoutError, match=r"16 cells of dim 0 cannot be cut in the ratio \[4, 2\]"):
        ratio.layout("w", (16, 2))


def test_without_a_mesh_one_is_asked_for():
    with pytest.raises(LayoutError, match=r"built-in rules 'llama' has no \[mesh\].*with_mesh"):
        read_rules("llama").placements("model.norm.weight")


def test_a_mesh_that_the_rules_do_not_know_is_refused():
    with pytest.raises(LayoutError, match=r"'llama', rule 1 .*no axis 'tp' in Mesh\(model=2\)"):
        read_rules("llama").with_mesh(model=2)
    with pytest.raises(LayoutError, match="at least one axis"):
        read_rules("llama").with_mesh()


# --- ready rules: names as they are in the checkpoints on the Hugging Face hub ---------------------------------------

EVERY = {
    "model.embed_tokens.weight": "S0",
    "model.layers.0.input_layernorm.weight": "R",
    "model.layers.31.post_attention_layernorm.weight": "R",
    "model.layers.0.self_attn.q_proj.weight": "S0",
    "model.layers.0.self_attn.k_proj.weight": "S0",
    "model.layers.11.self_attn.v_proj.weight": "S0",
    "model.layers.0.self_attn.o_proj.weight": "S1",
    "model.norm.weight": "R",
    "lm_head.weight": "S0",
}
DENSE = {
    "model.layers.0.mlp.gate_proj.weight": "S0",
    "model.layers.0.mlp.up_proj.weight": "S0",
    "model.layers.0.mlp.down_proj.weight": "S1",
}
BIASES = {
    "model.layers.0.self_attn.q_proj.bias": "S0",
    "model.layers.0.self_attn.k_proj.bias": "S0",
    "model.layers.0.self_attn.v_proj.bias": "S0",
    "model.layers.0.self_attn.o_proj.bias": "R",
}
MODELS = {
    "Llama-2": ("llama", EVERY | DENSE | {"model.layers.0.self_attn.rotary_emb.inv_freq": "R"}),
    "Llama-3": ("llama", EVERY | DENSE),
    "Llama with biases": (
        "llama",
        BIASES
        | {
            "model.layers.0.mlp.gate_proj.bias": "S0",
            "model.layers.0.mlp.up_proj.bias": "S0",
            "model.layers.0.mlp.down_proj.bias": "R",
        },
    ),
    "Mistral": ("mistral", EVERY | DENSE),
    "Qwen2": ("qwen", EVERY | DENSE | BIASES),
    "Qwen3": (
        "qwen",
        EVERY | DENSE | {"model.layers.0.self_attn.q_norm.weight": "R", "model.layers.0.self_attn.k_norm.weight": "R"},
    ),
    "Qwen2-MoE, Qwen3-MoE": (
        "qwen",
        {
            "model.layers.0.mlp.gate.weight": "R",
            "model.layers.0.mlp.experts.59.gate_proj.weight": "S0",
            "model.layers.0.mlp.experts.59.up_proj.weight": "S0",
            "model.layers.0.mlp.experts.59.down_proj.weight": "S1",
            "model.layers.0.mlp.shared_expert.gate_proj.weight": "S0",
            "model.layers.0.mlp.shared_expert.up_proj.weight": "S0",
            "model.layers.0.mlp.shared_expert.down_proj.weight": "S1",
            "model.layers.0.mlp.shared_expert_gate.weight": "R",
        },
    ),
    "Mixtral": (
        "mixtral",
        EVERY
        | {
            "model.layers.0.block_sparse_moe.gate.weight": "R",
            "model.layers.0.block_sparse_moe.experts.0.w1.weight": "S0",
            "model.layers.0.block_sparse_moe.experts.7.w2.weight": "S1",
            "model.layers.0.block_sparse_moe.experts.7.w3.weight": "S0",
        },
    ),
}


@pytest.mark.parametrize("model", MODELS)
def test_ready_rules_place_the_tensors_of(model):
    ready, expected = MODELS[model]
    rules = read_rules(ready).with_mesh(tp=8)
    found = {name: ",".join(map(str, rules.placements(name))) for name in expected}
    assert found == expected


@pytest.mark.parametrize("ready", READY)
def test_ready_rules_refuse_what_they_do_not_know(ready):
    rules = read_rules(ready).with_mesh(tp=8)
    for name in (
        "model.layers.0.self_attn.q_proj.qweight",
        "model.layers.0.self_attn.W_pack.weight",
        "transformer.wte",
    ):
        with pytest.raises(LayoutError, match=f"built-in rules '{ready}': none of"):
            rules.placements(name)


def test_on_more_axes_ready_rules_replicate():
    rules = read_rules("mixtral").with_mesh(dp=2, tp=4)
    assert rules.layout("lm_head.weight", (32, 8)) == Layout.on_mesh((32, 8), Mesh(dp=2, tp=4), "R,S0")


HEADS = {"num_attention_heads": 8, "num_key_value_heads": 4}
K, Q, OUT = (f"model.layers.0.self_attn.{x}_proj.weight" for x in "kqo")


@pytest.mark.parametrize("ready", READY)
def test_ready_rules_refuse_to_cut_heads(ready):
    for config in (HEADS, {"text_config": HEADS}):
        rules = read_rules(ready).with_config(config)
        with pytest.raises(LayoutError, match=r"Mesh\(tp=8\) cuts 4 heads \(num_key_value_heads .*at most 4 ranks"):
            rules.with_mesh(tp=8).layout(K, (64, 32))
        for name, tp, shape in ((Q, 3, (128, 32)), (OUT, 16, (32, 128))):
            with pytest.raises(LayoutError, match=r"cuts 8 heads \(num_attention_heads"):
                rules.with_mesh(tp=tp).layout(name, shape)
        for tp in (1, 2, 4):
            assert rules.with_mesh(tp=tp).layout(K, (64, 32)) == Layout.on_mesh((64, 32), Mesh(tp=tp), "S0")
        assert rules.with_mesh(tp=8).layout(Q, (128, 32)) == Layout.on_mesh((128, 32), Mesh(tp=8), "S0")


def test_without_grouped_heads_k_and_v_have_as_many_as_q():
    rules = read_rules("llama").with_config({"num_attention_heads": 4}).with_mesh(tp=8)
    with pytest.raises(LayoutError, match="cuts 4 heads"):
        rules.layout(K, (64, 32))


def test_without_a_config_nothing_is_known_of_heads():
    assert read_rules("llama").with_mesh(tp=8).layout(K, (64, 32)) == Layout.on_mesh((64, 32), Mesh(tp=8), "S0")


def test_a_conversion_reads_the_config_beside_the_weights(tmp_path):
    import torch

    from shardwise import checkpoint

    torch.save({K: torch.zeros(64, 32)}, tmp_path / "model.pt")
    (tmp_path / "config.json").write_text('{"num_attention_heads": 8, "num_key_value_heads": 4}')
    rules = read_rules("llama")
    with pytest.raises(LayoutError, match="cuts 4 heads"):
        checkpoint.convert(tmp_path / "model.pt", tmp_path / "tp8", format="sharded", rules=rules.with_mesh(tp=8))
    assert not (tmp_path / "tp8").exists()
    made = checkpoint.convert(tmp_path / "model.pt", tmp_path / "tp4", format="sharded", rules=rules.with_mesh(tp=4))
    assert made[K].shards == 4
