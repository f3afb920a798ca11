"""Rules: good ones say where tensors lie, bad ones are refused by the file and the rule."""

from math import prod

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import shardwise as sw
from shardwise import Box, Layout, LayoutError, Mesh, Replicate, Shard, StridedShard
from shardwise.checkpoint.rules import read_rules
from shardwise.errors import CheckpointError
from shardwise.layout import Experts, Fused, Heads
from shardwise.testing import on_ranks

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


def test_fused_ones_have_replicas_on_other_axes():
    layout = read_rules(GOOD).layout("h.qkv.bias", (16,))
    assert layout == Layout.on_mesh((16,), Mesh(dp=2, tp=4), [Replicate(), Fused(0, (8, 4, 4))])
    assert (
        [piece.box.lo for piece in layout.pieces(1)]
        == [piece.box.lo for piece in layout.pieces(5)]
        == [(2,), (9,), (13,)]
    )


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
    'base = "lama"': ["base = 'lama'", "did you mean 'llama'"],
    "base = 3": ["base must be a string, not 3"],
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
    f"{RULE}fused = {{dim = 0, heads = [4, 'x ** 2']}}": ["rule 1 ('w*')", "'x ** 2' is not an expression"],
    f"{RULE}fused = {{dim = 0, ratio = [1]}}\nheads = 3": ["rule 1 ('w*')", "fused has heads of its own"],
    f"{RULE}placements = 'S0'\nheads = 2.5": ["rule 1 ('w*')", "heads must be a whole number or an expression"],
    f"{RULE}placements = 'S0'\nrepeat = true": ["rule 1 ('w*')", "heads must say how many"],
    f"{RULE}placements = 'S0'\nwhen = ''": ["rule 1 ('w*')", "when", "'' is not an expression"],
    f"{RULE}placements = 'S0'\ndim = 0": ["rule 1 ('w*')", "dim belongs to owners"],
    f"{RULE}owners = 'a.b'": ["rule 1 ('w*')", "owners", "'a.b' is not an expression"],
    f"{RULE}owners = 'x'\nskip = true": ["rule 1 ('w*')", "exactly one of"],
    f"[mesh]\nep = 2\n{RULE}owners = '3 % 2'": ["rule 1 ('w*')", 'owners = "3 % 2" names no axis of Mesh(ep=2)'],
    f"[mesh]\nep = 2\ntp = 2\n{RULE}owners = 'ep % tp'": ["names several axes of Mesh(ep=2, tp=2): ep, tp"],
    f"[mesh]\nep = 2\n{RULE}owners = '3 % 2'\naxis = 'pe'": ["rule 1 ('w*')", "no axis 'pe'"],
    f"[mesh]\nep = 2\n{RULE}owners = '3 % ep'\nplacements = 'S0'": ["rule 1 ('w*')", "both speak of axis 'ep'"],
    "[[rule]]\nname = '{a}.{a}'\nskip = true": ["rule 1", "'{a}.{a}' has a field twice"],
    f"[model]\nheads = 2\n{RULE}skip = true": ["[model]", "unknown key 'heads'"],
    f"[model]\naxes = [2]\n{RULE}skip = true": ["[model]", "axes must be a list of names, not [2]"],
    f"[model]\nhead = 2\n{RULE}skip = true": ["[model]", "head must be a string, not 2"],
    f"[numbers]\na = 'b c'\n{RULE}skip = true": ["[numbers]", "a: 'b c' is not an expression"],
    f"[shapes]\nw = 3\n{RULE}skip = true": ["[shapes]", "w must be a list with a size for every dim, not 3"],
    f"[shapes]\nw = ['<= 3']\n{RULE}skip = true": ["[shapes]", "'<= 3' is not an expression"],
    f"[counts]\n'*.w' = 3\n{RULE}skip = true": ["[counts]", "'*.w' needs one number in the name"],
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
    with pytest.raises(LayoutError, match=r"rule 4 .*'h.qkv.w': its layout depends on its shape"):
        rules.placements("h.qkv.w")
    with pytest.raises(LayoutError, match=r"rule 4 .*add up to 16, but dim 0 of shape \(18, 2\) has 18"):
        rules.with_mesh(dp=1, tp=4).layout("h.qkv.w", (18, 2))
    with pytest.raises(LayoutError, match=r"rule 4 .*no dim 0 in a 0-d tensor"):
        rules.with_mesh(dp=1, tp=4).layout("h.qkv.w", ())
    ratio = read_rules({"rule": [{"name": "*", "fused": {"dim": 0, "ratio": [4, 2]}}]}).with_mesh(tp=2)
    with pytest.raises(LayoutError, match=r"16 cells of dim 0 cannot be cut in the ratio \[4, 2\]"):
        ratio.layout("w", (16, 2))


def test_without_a_mesh_one_is_asked_for():
    with pytest.raises(LayoutError, match=r"built-in rules 'llama': there is no mesh.*with_mesh"):
        read_rules("llama").placements("model.norm.weight")


def test_a_mesh_that_the_rules_do_not_know_is_refused():
    with pytest.raises(LayoutError, match=r"'llama': Mesh\(model=2\) has no axis tp, over which"):
        read_rules("llama").with_mesh(model=2)
    with pytest.raises(LayoutError, match="at least one axis"):
        read_rules("llama").with_mesh()


# --- heads, experts and numbers of the config ------------------------------------------------------------------------

CONFIG = {"num_attention_heads": 8, "num_key_value_heads": 2, "num_experts": 6, "multi_query": True, "name": "x"}


def ruled(rule, mesh, config=CONFIG, **tables):
    """Rules of one rule for a name with a number."""
    rules = read_rules({"rule": [{"name": ["*.{expert}.w", "*"], **rule}], **tables}).with_mesh(**mesh)
    return rules if config is None else rules.with_config(config)


HEADED = {"placements": {"tp": "S0"}, "heads": "num_key_value_heads"}


def test_heads_are_not_cut():
    for tp in (1, 2):
        assert ruled(HEADED, {"tp": tp}).layout("k", (16, 4)) == Layout.on_mesh((16, 4), Mesh(tp=tp), "S0")
    with pytest.raises(
        LayoutError, match=r"Mesh\(tp=4\): 4 ranks cut 2 heads \(num_key_value_heads = 2\): use a number"
    ):
        ruled(HEADED, {"tp": 4})
    with pytest.raises(
        LayoutError, match=r"'k': 15 cells of dim 0 are not num_key_value_heads = 2 heads of equal size"
    ):
        ruled(HEADED, {"tp": 2}).layout("k", (15, 4))


def test_heads_are_replicated_where_there_are_more_ranks():
    rules = ruled(HEADED | {"repeat": True}, {"dp": 2, "tp": 4})
    assert rules.layout("k", (16, 4)) == Layout.on_mesh((16, 4), Mesh(dp=2, tp=4), [Replicate(), Heads(0, 2)])
    assert rules.placements("k") == (Replicate(), Heads(0, 2))
    with pytest.raises(LayoutError, match=r"3 ranks cut 2 heads .* divides 2 or is a multiple of it \(not 3\)"):
        ruled(HEADED | {"repeat": True}, {"tp": 3})


def test_dims_are_counted_from_the_end():
    rule = {"placements": {"tp": "S-1"}, "heads": "num_key_value_heads", "repeat": True}
    assert ruled(rule, {"tp": 4}).layout("k", (4, 16)) == Layout.on_mesh((4, 16), Mesh(tp=4), [Heads(1, 2)])
    assert ruled(rule, {"tp": 2}).layout("k", (4, 16)) == Layout.on_mesh((4, 16), Mesh(tp=2), "S1")


def test_heads_that_a_rule_counts_itself_need_no_config():
    rules = read_rules({"mesh": {"tp": 4}, "rule": [{"name": "*", "placements": ["S0"], "heads": 2, "repeat": True}]})
    assert str(rules.layout("k", (8, 4))) == "8x4/heads0=2@tp=4"
    assert str(rules.placements("k")[0]) == "heads0=2"
    with pytest.raises(LayoutError, match=r"7 cells of dim 0 are not 2 heads of equal size$"):
        rules.layout("k", (7, 4))
    with pytest.raises(LayoutError, match="4 ranks cut 3 "):
        read_rules({"mesh": {"tp": 4}, "rule": [{"name": "*", "placements": ["S0"], "heads": 3}]}).layout("q", (9, 4))


def test_heads_over_two_axes():
    both = {"placements": ["S0", "S0"], "heads": "num_attention_heads", "repeat": True}
    assert ruled(both, {"a": 2, "b": 4}).layout("q", (16, 4)) == Layout.on_mesh((16, 4), Mesh(a=2, b=4), "S0,S0")
    repeated = ruled(both, {"a": 4, "b": 4}).layout("q", (16, 4))
    assert [repeated.pieces(rank)[0].box.lo[0] for rank in range(16)] == [rank // 2 * 2 for rank in range(16)]


def test_without_a_config_nothing_is_known_of_heads():
    assert ruled(HEADED, {"tp": 8}, None).layout("k", (64, 32)) == Layout.on_mesh((64, 32), Mesh(tp=8), "S0")


def test_segments_by_heads_of_the_config():
    counts = ["num_attention_heads", "num_key_value_heads", "num_key_value_heads"]
    fused = {"fused": {"dim": 0, "heads": counts, "axis": "tp"}}
    for tp in (1, 2, 4, 8):
        found = ruled(fused, {"dp": 2, "tp": tp}).layout("qkv", (48, 4))
        expected = {"tp": Fused(0, (32, 8, 8), heads=(8, 2, 2))}
        assert found == Layout.on_mesh((48, 4), Mesh(dp=2, tp=tp), expected)
    for tp in (3, 16):
        with pytest.raises(LayoutError, match=rf"{tp} ranks cut 8 heads \(num_attention_heads = 8\)"):
            ruled(fused, {"tp": tp})
    with pytest.raises(LayoutError, match=r"50 cells of dim 0 cannot be cut into 12 heads of equal size: \[8, 2, 2\]"):
        ruled(fused, {"tp": 2}).layout("qkv", (50, 4))
    with pytest.raises(LayoutError, match=r"the number 'num_attention_heads' is needed: no config\.json was given"):
        ruled(fused, {"tp": 2}, None).layout("qkv", (48, 4))
    with pytest.raises(LayoutError, match=r"the number 'num_attention_heads' is needed: it is not in config\.json"):
        ruled(fused, {"tp": 2}, {"name": "x"}).layout("qkv", (48, 4))


def test_an_expert_lies_at_one_position():
    rules = ruled({"owners": "expert % ep", "placements": {"tp": "S0"}}, {"ep": 2, "dp": 2, "tp": 2})
    for expert, ranks in ((0, [[0, 1], [2, 3]]), (5, [[4, 5], [6, 7]])):
        submesh = Mesh(ep=1, dp=2, tp=2, ranks=[ranks])
        assert rules.layout(f"a.{expert}.w", (8, 4)) == Layout.on_mesh((8, 4), submesh, "R,R,S0")
    with pytest.raises(LayoutError, match="its layout depends on its shape or number"):
        rules.placements("a.0.w")
    with pytest.raises(LayoutError, match="the number 'expert' is needed for 'expert % ep'"):
        rules.layout("w", (8, 4))


def test_stacked_experts_lie_where_the_expression_says():
    rule = {"owners": "expert % ep", "dim": 0, "placements": {"tp": "S1"}}
    layout = ruled(rule, {"ep": 2, "tp": 2}).layout("experts", (6, 4))
    assert layout == Layout.on_mesh((6, 4), Mesh(ep=2, tp=2), [Experts(0, [0, 1, 0, 1, 0, 1]), "S1"])
    assert layout.local_shapes(3) == ((3, 2),)
    assert [piece.box.lo for piece in layout.pieces(3)] == [(1, 2), (3, 2), (5, 2)]
    with pytest.raises(LayoutError, match="70000 indices of dim 0 are too many"):
        ruled(rule, {"ep": 2, "tp": 2}).layout("experts", (70000, 4))
    with pytest.raises(LayoutError, match="no dim 0 in a 0-d tensor"):
        ruled(rule, {"ep": 2, "tp": 2}).layout("experts", ())


@given(ep=st.integers(1, 5), count=st.integers(1, 12), step=st.integers(0, 7), first=st.integers(0, 7))
def test_experts_in_one_tensor_and_in_many_are_on_the_same_ranks(ep, count, step, first):
    owners = f"(expert * {step} + {first}) % ep"
    named, stacked = ({"name": "*.{expert}", "owners": owners}, {"name": "*", "owners": owners, "dim": 1})
    rules = read_rules({"mesh": {"ep": ep, "tp": 2}, "rule": [named, stacked]})
    layout = rules.layout("all", (3, count))
    for expert in range(count):
        position = (expert * step + first) % ep
        assert rules.layout(f"one.{expert}", (3,)).owners() == (2 * position, 2 * position + 1)
        assert layout.owners(Box((0, expert), (3, expert + 1))) == (2 * position, 2 * position + 1)


def test_experts_move_by_one_resharder():
    shapes = {f"a.{n}.w": (4, 2) for n in range(5)} | {"stacked": (5, 3)}

    def placed(owners):
        every = [{"name": "*.{expert}.w", "owners": owners}, {"name": "stacked", "owners": owners, "dim": 0}]
        rules = read_rules({"mesh": {"ep": 4}, "rule": every})
        return {name: rules.layout(name, shape) for name, shape in shapes.items()}

    def run(rank):
        source, target = placed("expert % ep"), placed("(4 - expert) * ep // 5")
        before, after, expected = ({name: valued(one[name], rank) for name in one} for one in (source, target, target))
        for tensor in after.values():
            _ = tensor is None or [shard.zero_() for shard in tensor.shards]
        sw.Resharder(before, after).run()
        for name, tensor in after.items():
            for one, other in zip(tensor.shards, expected[name].shards, strict=True) if tensor is not None else ():
                torch.testing.assert_close(one, other, rtol=0, atol=0)
        return [name for name, tensor in after.items() if tensor is not None]

    experts = [[name for name in names if name != "stacked"] for names in on_ranks(4, run)]
    assert experts == [["a.3.w", "a.4.w"], ["a.2.w"], ["a.1.w"], ["a.0.w"]]


def valued(layout, rank):
    """A tensor whose cells are their numbers; None on ranks that have nothing of it."""
    tensor = sw.empty(layout, dtype=torch.float32)
    whole = torch.arange(prod(layout.shape)).float().view(layout.shape) + 1
    for piece in layout.pieces(rank) if tensor is not None else ():
        cells = whole[tuple(map(slice, piece.box.lo, piece.box.hi))]
        tensor.shards[piece.buffer].as_strided(cells.shape, piece.strides, piece.offset).copy_(cells)
    return tensor


def test_positions_outside_the_axis_are_refused():
    for owners, position in (("expert - 2", -2), ("expert + ep", 2), ("num_experts - expert * ep + expert * ep", 6)):
        with pytest.raises(LayoutError, match=rf"is {position} for .*, but the axis has positions 0 to 1"):
            ruled({"owners": owners, "axis": "ep"}, {"ep": 2}).layout("a.0.w", (8, 4))
    with pytest.raises(LayoutError, match="divides 3 by 0"):
        ruled({"owners": "expert % (ep - 2)"}, {"ep": 2}).layout("a.3.w", (8, 4))


def test_rules_of_another_kind_of_model_are_passed_over():
    table = {"rule": [{"name": "*", "placements": "S0", "when": "1 - multi_query"}, {"name": "*", "skip": True}]}
    rules = read_rules(table).with_mesh(tp=2)
    assert not rules.with_config({"multi_query": False}).skips("w")
    assert rules.with_config({"multi_query": True}).skips("w")
    with pytest.raises(LayoutError, match=r"rule 1 .*the number 'multi_query' is needed for '1 - multi_query'"):
        rules.layout("w", (4,))


def test_numbers_are_the_first_that_can_be_computed():
    numbers = {"num_key_value_heads": ["absent", "num_attention_heads // 4"], "unknown": "absent"}
    rules = ruled(HEADED, {"tp": 2}, numbers=numbers)
    assert rules._known.numbers["num_key_value_heads"] == 2
    assert "unknown" not in rules._known.numbers


def test_the_config_of_the_language_model_counts():
    inner = {"num_attention_heads": 2, "text_config": {"num_attention_heads": 4, "num_key_value_heads": 4}}
    assert ruled(HEADED, {"tp": 4}, inner).layout("k", (16, 4)).local_shape(3) == (4, 4)


def test_shapes_are_those_of_the_config():
    shapes = {"w": [">= num_experts", "num_attention_heads", "*"], "x": ["absent + 1"], "y": []}
    rules = ruled({"placements": "R"}, {"tp": 2}, shapes=shapes)
    for name, shape in (("w", (6, 8, 3)), ("w", (7, 8, 0)), ("x", (5,)), ("y", (1, 2)), ("z", ())):
        assert rules.layout(name, shape).shape == shape
    said = (
        r"config\.json says \(at least num_experts = 6, num_attention_heads = 8, any\): is it the config\.json of these"
    )
    for shape in ((5, 8, 3), (6, 9, 3), (6, 8)):
        with pytest.raises(LayoutError, match=said):
            rules.layout("w", shape)


def test_numbers_of_experts_are_those_of_the_config():
    rules = ruled({"placements": "R"}, {"tp": 2}, counts={"*.{expert}.w": "num_experts"}, model={"head": "*head"})
    every = {f"a.{n}.w": (2,) for n in range(6)} | {"b.w": (3,)}
    rules.check(every)
    without = {name: shape for name, shape in every.items() if name != "a.3.w"}
    rules.check(without, whole=False)
    said = r"matches 5 numbers below 'a\.', but config\.json says num_experts = 6: number 3 is missing"
    with pytest.raises(LayoutError, match=said):
        rules.check(without)
    with pytest.raises(LayoutError, match="number 6 is too many"):
        rules.check(every | {"a.6.w": (2,)})


def test_an_output_layer_that_is_not_tied_must_be_there():
    rules = ruled({"placements": "R"}, {"tp": 2}, model={"head": "*head"})
    untied = rules.with_config({"tie_word_embeddings": False})
    untied.check({"my.head": (4,), "w": (3,)})
    rules.with_config({"tie_word_embeddings": True}).check({"w": (3,)})
    rules.check({"w": (3,)})
    with pytest.raises(LayoutError, match=r"no tensor matches '\*head', but config\.json says .*tie_word_embeddings"):
        untied.check({"w": (3,)})
    untied.check({"w": (3,)}, whole=False)
    rules.with_config({"tie_word_embeddings": False, "architectures": ["LlamaModel"]}).check({"w": (3,)})
    with pytest.raises(LayoutError, match="tie_word_embeddings"):
        rules.with_config({"tie_word_embeddings": False, "architectures": ["GPT2LMHeadModel"]}).check({"w": (3,)})


def test_rules_add_to_built_in_ones():
    rules = read_rules('base = "llama"\n[[rule]]\nname = "*.extra"\nplacements = {tp = "S1"}\n[mesh]\ntp = 2')
    assert rules.placements("model.extra") == (Shard(1),)
    assert rules.placements("lm_head.weight") == (Shard(0),)
    with pytest.raises(LayoutError, match=r"none of 9 rules matches 'other'"):
        rules.placements("other")
