"""Directories with a file per rank: tensors cut by torch and put together again, bit-for-bit; bad ones are refused."""

import pytest
import torch
from safetensors.torch import save_file

from shardwise import Box, Layout, LayoutError, Mesh, checkpoint
from shardwise.checkpoint.formats.rank_files import open_rank_files
from shardwise.checkpoint.local_files import files_at
from shardwise.errors import CheckpointError

RULES = {
    "rule": [
        {"name": "*.rows", "placements": {"tp": "S0"}},
        {"name": "*.columns", "placements": {"tp": "S-1"}},
        {"name": "*.qkv", "fused": {"dim": 0, "segments": [8, 4, 4], "axis": "tp"}},
        {"name": "*.gate_up", "fused": {"dim": 1, "ratio": [1, 1], "axis": "tp"}},
        {"name": "*.seen", "skip": True},
        {"name": "*", "placements": "R"},
    ]
}


def rules(pattern=None, prefix="", **mesh):
    files = ({"pattern": pattern} if pattern else {}) | {"prefix": prefix}
    return RULES | {"mesh": mesh, "files": files}


def tensors():
    torch.manual_seed(0)
    return {
        "a.rows": torch.randn(13, 6),
        "b.rows": torch.randn(7).to(torch.bfloat16),
        "c.rows": torch.zeros(0, 4),
        "a.columns": torch.randn(6, 10, dtype=torch.float64),
        "a.qkv": torch.randn(16, 5),
        "b.qkv": torch.randint(100, (16,)),
        "a.gate_up": torch.randn(3, 14).half(),
        "norm": torch.randn(6),
        "step": torch.tensor(7),
    }


def chunks(whole, count, dim):
    """As many as asked for: torch.chunk leaves empty ones out."""
    found = list(whole.chunk(count, dim))
    return found + [whole.narrow(dim, 0, 0)] * (count - len(found))


def cut(name, whole, count):
    """The shards of all ranks, by torch alone."""
    kind = name.rpartition(".")[2]
    if kind == "rows":
        return chunks(whole, count, 0)
    if kind == "columns":
        return chunks(whole, count, -1)
    if kind in ("qkv", "gate_up"):
        dim, sizes = (0, [8, 4, 4]) if kind == "qkv" else (1, [7, 7])
        parts = zip(*(chunks(segment, count, dim) for segment in whole.split(sizes, dim)), strict=True)
        return [torch.cat(part, dim) for part in parts]
    return [whole] * count


def sharded(wholes, count):
    """A state dict per rank."""
    shards = {name: cut(name, whole, count) for name, whole in wholes.items()}
    return [{name: found[rank].clone() for name, found in shards.items()} for rank in range(count)]


def write(path, state_dicts, name="model_{}.safetensors"):
    for rank, state_dict in enumerate(state_dicts):
        file = path / name.format(rank)
        file.parent.mkdir(parents=True, exist_ok=True)
        if file.suffix == ".safetensors":
            save_file({key: value.clone() for key, value in state_dict.items()}, file)
        else:
            torch.save(state_dict, file)


def opened(path, said):
    return open_rank_files(files_at(path)[0], said)


def same(found, expected):
    """Equal to the last bit."""
    assert (found.dtype, found.shape) == (expected.dtype, expected.shape)
    torch.testing.assert_close(found, expected, rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize("kind", ["safetensors", "pt"])
@pytest.mark.parametrize("count", [1, 2, 3, 4, 8])
def test_the_whole_tensors_come_back(tmp_path, count, kind):
    wholes = tensors()
    write(tmp_path, sharded(wholes, count), f"model_{{}}.{kind}")
    checkpoint = opened(tmp_path, rules(tp=count))
    assert set(checkpoint) == set(wholes)
    for name, whole in wholes.items():
        same(checkpoint[name].read(), whole)


@pytest.mark.parametrize("count", [2, 3])
def test_boxes_are_read_from_the_files_that_have_them(tmp_path, count):
    wholes = tensors()
    write(tmp_path, sharded(wholes, count))
    checkpoint = opened(tmp_path, rules(tp=count))
    same(checkpoint["a.rows"].read(Box((3, 1), (9, 4))), wholes["a.rows"][3:9, 1:4])
    same(checkpoint["a.qkv"].read(Box((6, 0), (13, 5))), wholes["a.qkv"][6:13])
    assert checkpoint["a.rows"].layout == Layout.chunk((13, 6), 0, count)
    assert checkpoint["norm"].shards == 1
    spans = [span for _, span in checkpoint["a.rows"].ranges()]
    assert [span.file for span in spans] == [f"model_{rank}.safetensors" for rank in range(count)]


def test_uneven_shards_follow_one_another(tmp_path):
    whole = torch.randn(12, 3)
    write(tmp_path, [{"a.rows": part.clone()} for part in whole.split([1, 0, 9, 2])])
    entry = opened(tmp_path, rules(tp=4))["a.rows"]
    same(entry.read(), whole)
    assert entry.shape == (12, 3)


MESHES = {  # placements on a mesh of x=2, y=3
    "rows and columns": ["S0", "S1"],
    "columns and rows": ["S1", "S0"],
    "rows of rows": ["S0", "S0"],
    "replicas of rows": ["R", "S0"],
    "rows of replicas": ["S0", "R"],
    "strided": ["S0:3", "S0"],
    "replicas": ["R", "R"],
}


@pytest.mark.parametrize("kind", MESHES)
def test_on_a_mesh_of_two_axes(tmp_path, kind):
    whole, mesh = torch.randn(11, 8), Mesh(x=2, y=3)
    layout = Layout.on_mesh((11, 8), mesh, MESHES[kind])
    for rank in layout.owners():
        shard = torch.empty(layout.local_shape(rank))
        for piece in layout.pieces(rank):
            cells = tuple(map(slice, piece.box.lo, piece.box.hi))
            shard.as_strided(whole[cells].shape, piece.strides, piece.offset).copy_(whole[cells])
        save_file({"w": shard}, tmp_path / f"{rank // 3}-{rank % 3}.safetensors")
    said = {"mesh": {"x": 2, "y": 3}, "rule": [{"name": "w", "placements": MESHES[kind]}]}
    same(opened(tmp_path, said | {"files": {"pattern": "{x}-{y}.safetensors"}})["w"].read(), whole)


def test_fused_ones_on_a_mesh_with_replicas(tmp_path):
    wholes = tensors()
    for rank, state_dict in enumerate(sharded(wholes, 3)):
        for dp in range(2):
            save_file(state_dict, tmp_path / f"tp{rank}dp{dp}.safetensors")
    checkpoint = opened(tmp_path, rules("tp{tp}dp{dp}.safetensors", dp=2, tp=3))
    for name, whole in wholes.items():
        same(checkpoint[name].read(), whole)


def test_files_are_found_by_their_pattern_and_names_by_their_prefix(tmp_path):
    wholes = tensors()
    beside = {"optimizer": {"norm": torch.ones(3)}, "norm": "of the args", "args": {"lr": 0.5}, "b.seen": 3}
    states = [
        {"module": shards | {"a.seen": torch.ones(rank), "tied": True}, "iteration": 40 + rank, **beside}
        for rank, shards in enumerate(sharded(wholes, 2))
    ]
    write(tmp_path, states, "mp_rank_{:02d}/model_optim_rng.pt")
    checkpoint = opened(tmp_path, rules("mp_rank_{tp:02d}/model_optim_rng.pt", "module.", tp=2))
    assert set(checkpoint) == set(wholes)
    assert checkpoint.objects == {"iteration": 40, "args.lr": 0.5, "tied": True}
    assert checkpoint.paths == {name: (name,) for name in (*wholes, "iteration", "tied")} | {"args.lr": ("args", "lr")}
    for name, whole in wholes.items():
        same(checkpoint[name].read(), whole)


def test_transposed_shards_of_torch_save(tmp_path):
    whole = torch.randn(6, 8)
    write(tmp_path, [{"w.rows": part.t().contiguous().t()} for part in whole.chunk(2)], "{}.pt")
    same(opened(tmp_path, rules(tp=2))["w.rows"].read(), whole)


@pytest.mark.parametrize("name", ["{}.pt", "consolidated.{:02d}.pth", "v2-model-{}-of-12.safetensors", "rank{}"])
def test_files_are_found_by_the_number_in_their_names(tmp_path, name):
    whole = torch.arange(24.0)
    write(tmp_path, [{"w.rows": part.clone()} for part in whole.chunk(12)], name)
    (tmp_path / "params.json").write_text("{}")
    (tmp_path / "tokenizer.model").write_text("none of them")
    same(opened(tmp_path, rules(tp=12))["w.rows"].read(), whole)


# --- what is refused -------------------------------------------------------------------------------------------------


def refused(path, said, *parts, error=CheckpointError):
    with pytest.raises(error) as caught:
        opened(path, said)
    for part in parts:
        assert part in str(caught.value)


ROWS = torch.arange(12.0).reshape(6, 2)
BAD = {
    "a name that one rank lacks": (
        [{"a.rows": ROWS, "norm": ROWS}, {"a.rows": ROWS, "nrom": ROWS}],
        ["model_1.safetensors has no 'norm' (nearest: 'nrom'), but", "model_0.safetensors has"],
    ),
    "a name that one rank has alone": (
        [{"a.rows": ROWS}, {"a.rows": ROWS, "norm": ROWS}],
        ["model_0.safetensors has no 'norm'", "model_1.safetensors has"],
    ),
    "dtypes that differ": (
        [{"a.rows": ROWS}, {"a.rows": ROWS.half()}],
        ["'a.rows'", "float32 of shape (6, 2) in", "model_0", "float16", "model_1", "dtype", "rule 1"],
    ),
    "dims that differ": (
        [{"a.rows": ROWS}, {"a.rows": ROWS.reshape(-1)}],
        ["'a.rows'", "(6, 2)", "model_0", "(12,)", "model_1", "number of dims"],
    ),
    "sizes beside the sharded dim that differ": (
        [{"a.rows": ROWS}, {"a.rows": ROWS[:, :1].clone()}],
        ["'a.rows'", "(6, 2)", "(6, 1)", "dim 1 should have the same size", "rule 1"],
    ),
    "replicas that differ": (
        [{"norm": ROWS}, {"norm": ROWS[:5].clone()}],
        ["'norm'", "(6, 2)", "(5, 2)", "dim 0 should have the same size", "rule 6"],
    ),
    "nothing at all": ([{}, {}], ["model_0.safetensors has no tensor"]),
}


@pytest.mark.parametrize("what", BAD)
def test_files_that_do_not_belong_together_are_refused(tmp_path, what):
    states, parts = BAD[what]
    write(tmp_path, states)
    refused(tmp_path, rules(tp=2), *parts)


def test_shapes_that_the_rule_cannot_make_are_refused(tmp_path):
    write(tmp_path, [{"a.qkv": torch.zeros(7, 2)}, {"a.qkv": torch.zeros(9, 2)}])
    refused(tmp_path, rules(tp=2), "'a.qkv' has shape (7, 2)", "model_0", "should have (8, 2)", "rule 3")
    write(tmp_path, [{"a.qkv": torch.zeros(7, 2)}, {"a.qkv": torch.zeros(7, 2)}])
    refused(tmp_path, rules(tp=2), "rule 3", "'a.qkv'", "add up to 16", "14", error=LayoutError)
    write(tmp_path, [{"a.rows": torch.tensor(1)}] * 2)
    refused(tmp_path, rules(tp=2), "rule 1", "'a.rows'", "model_0", "0-d", error=LayoutError)


def test_partial_tensors_are_refused(tmp_path):
    write(tmp_path, [{"w": ROWS}] * 2)
    said = {"mesh": {"tp": 2}, "rule": [{"name": "w", "placements": ["P"]}]}
    refused(tmp_path, said, "rule 1", "'w'", "partial", error=LayoutError)


def test_names_that_no_rule_fits_are_refused(tmp_path):
    write(tmp_path, [{"w": ROWS}] * 2)
    said = {"mesh": {"tp": 2}, "rule": [{"name": "v", "placements": "R"}]}
    refused(tmp_path, said, "none of 1 rules matches 'w'", error=LayoutError)


def test_missing_and_left_over_files_are_named(tmp_path):
    write(tmp_path, [{"w": ROWS}] * 3)
    (tmp_path / "model_1.safetensors").rename(tmp_path / "modul_1.safetensors")
    said = rules("model_{tp}.safetensors", tp=4)
    refused(tmp_path, said, "2 of the 4 files", "'model_1.safetensors' (nearest:", "'model_3.safetensors'")
    refused(tmp_path, rules("model_{rank}.safetensors", tp=2), "1 of the 2 files", "'model_1.safetensors'")
    refused(tmp_path, rules(tp=3), "no set of numbered files", "model_0.safetensors, model_2.safetensors", "pattern")
    write(tmp_path, [{"w": ROWS}] * 3)
    for pattern in ("model_{tp}.safetensors", "model_{rank}.safetensors"):
        refused(tmp_path, rules(pattern, tp=2), "model_2.safetensors does not belong to a rank of Mesh(tp=2)")


def test_patterns_that_lead_astray_are_refused(tmp_path):
    write(tmp_path, [{"w": ROWS}] * 2)
    refused(tmp_path, rules("../model_{tp}.safetensors", tp=2), "not inside the checkpoint")
    same_file = rules("model_{tp}.safetensors", tp=2, dp=2)
    refused(tmp_path, same_file, "several ranks", "'model_0.safetensors'", error=LayoutError)


def test_directories_without_files_of_ranks_are_refused(tmp_path):
    refused(tmp_path, rules(tp=2), "no set of numbered files", "among none", "pattern")
    (tmp_path / "notes_0").write_text("nothing")
    (tmp_path / "notes_1").write_text("nothing")
    refused(tmp_path, rules(tp=2), "no set of numbered files", "notes_0, notes_1")
    refused(tmp_path, rules("notes_{tp}", tp=2), "notes_0 is neither a torch.save file nor a safetensors file")
    write(tmp_path, [{"w": ROWS}] * 2, "a_{}.safetensors")
    write(tmp_path, [{"w": ROWS}] * 2, "b_{}.safetensors")
    refused(tmp_path, rules(tp=2), "several sets of numbered files", "a_0.safetensors", "b_1.safetensors")
    refused(tmp_path, "llama", "there is no mesh", error=LayoutError)


def test_a_damaged_file_is_named(tmp_path):
    write(tmp_path, [{"w": ROWS}] * 2)
    file = tmp_path / "model_1.safetensors"
    file.write_bytes(file.read_bytes()[:-4])
    refused(tmp_path, rules(tp=2), "model_1.safetensors", "truncated")


EXPERTS = {
    "rule": [{"name": "{expert}.w", "owners": "expert % ep", "placements": {"tp": "S0"}}],
    "mesh": {"ep": 2, "tp": 2},
}


def test_experts_are_read_from_the_files_that_have_them(tmp_path):
    wholes = {f"{n}.w": torch.randn(5, 2) for n in range(3)}
    ranks = [
        {name: wholes[name].chunk(2)[tp].clone() for name in wholes if int(name[0]) % 2 == ep}
        for ep in range(2)
        for tp in range(2)
    ]
    write(tmp_path, ranks)
    found = opened(tmp_path, EXPERTS)
    assert sorted(found) == sorted(wholes)
    for name, whole in wholes.items():
        same(found[name].read(), whole)
    write(tmp_path, [ranks[0] | ranks[2], *ranks[1:]])
    refused(tmp_path, EXPERTS, "model_0.safetensors has '1.w', which", "rule 1", "gives to other ranks")
    write(tmp_path, [{"0.w": ranks[0]["0.w"]}, *ranks[1:]])
    refused(tmp_path, EXPERTS, "model_0.safetensors has no '2.w'", "but", "model_1.safetensors has")


def test_stacked_experts_are_read_from_all_files(tmp_path):
    whole = torch.randn(5, 2)
    write(tmp_path, [{"w": whole[0::2].clone()}, {"w": whole[1::2].clone()}])
    found = opened(tmp_path, {"rule": [{"name": "w", "owners": "expert % ep", "dim": 0}], "mesh": {"ep": 2}})
    same(found["w"].read(), whole)


def test_fused_tensors_with_replicas_and_replicated_heads(tmp_path):
    whole = torch.randn(12, 3)  # heads of two rows: four of q, one of k, one of v
    parts = [torch.cat([whole[2 * rank : 2 * rank + 2], whole[8:]]) for rank in range(4)]
    write(tmp_path, [{"qkv": parts[rank % 4]} for rank in range(8)])
    fused = {"name": "qkv", "fused": {"dim": -2, "heads": [4, 1, 1], "axis": "tp"}}
    found = opened(tmp_path, {"rule": [fused], "mesh": {"dp": 2, "tp": 4}})
    same(found["qkv"].read(), whole)
    made = checkpoint.convert(found, tmp_path / "whole.safetensors")
    same(made["qkv"].read(), whole)


def test_files_that_differ_where_rules_say_replicas_are_refused(tmp_path):
    """A rule that does not fit leaves a tensor that is split to the one for all others."""
    whole = torch.arange(48.0).reshape(6, 8)
    for rank in range(2):
        torch.save(
            {"o_proj": whole[:, 4 * rank : 4 * rank + 4].clone(), "norm": torch.ones(8)}, tmp_path / f"{rank}.pt"
        )
    rules = {"mesh": {"tp": 2}, "rule": [{"name": "oproj", "placements": "S1"}, {"name": "*", "placements": "R"}]}
    found = checkpoint.open(tmp_path, rules=rules)
    assert torch.equal(found["norm"].read(), torch.ones(8))
    with pytest.raises(CheckpointError, match=r"'o_proj' differs between .*0\.pt and .*1\.pt, .* replicas"):
        found["o_proj"].read()
    with pytest.raises(CheckpointError, match="is it split over an axis"):
        checkpoint.convert(found, tmp_path / "out.safetensors")
