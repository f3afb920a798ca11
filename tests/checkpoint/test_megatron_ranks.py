"""Megatron's files of ranks: whole tensors by global names, whatever ranks saved them; and what is refused."""

import pytest
import torch
from megatron_folders import arguments, whole_model, write_ranks

from shardwise import CheckpointError, checkpoint

OLD = {  # as Megatron named them before its core
    "embedding.": "language_model.embedding.",
    "decoder.final_layernorm.": "language_model.encoder.final_norm.",
    "decoder.": "language_model.encoder.",
    "output_layer.": "language_model.output_layer.",
    "linear_qkv": "query_key_value",
    "linear_proj": "dense",
    "linear_fc1": "dense_h_to_4h",
    "linear_fc2": "dense_4h_to_h",
    "input_layernorm": "input_norm",
    "pre_mlp_layernorm": "post_attention_norm",
}
GRIDS = {"1": (1, 1, 1), "tp": (2, 1, 1), "pp": (1, 2, 1), "tp and pp": (2, 2, 1), "interleaved": (2, 2, 2)}


def old_name(name):
    for new, old in OLD.items():
        name = name.replace(new, old)
    return name


def made(folder, tp=2, pp=2, chunks=1, **more):
    """A folder, and the tensors in it."""
    writing = {key: more.pop(key) for key in ("ep", "renamed", "iteration", "file") if key in more}
    args = arguments(tensor_model_parallel_size=tp, pipeline_model_parallel_size=pp, **more)
    wholes = whole_model(args)
    write_ranks(folder, wholes, args, chunks=chunks, **writing)
    return wholes


def same(opened, wholes):
    assert set(opened) == set(wholes)
    for name, whole in wholes.items():
        torch.testing.assert_close(opened[name].read(), whole, rtol=0, atol=0, msg=name)


@pytest.mark.parametrize("grid", GRIDS.values(), ids=GRIDS)
@pytest.mark.parametrize("renamed", [str, old_name], ids=["core", "old names"])
def test_the_whole_tensors_come_back(tmp_path, grid, renamed):
    wholes = made(tmp_path / "iter_0000100", *grid, renamed=renamed)
    opened = checkpoint.open(tmp_path / "iter_0000100")
    same(opened, wholes)
    assert opened.format == "megatron-ranks"
    assert {*opened.objects} == {"args", "iteration", "checkpoint_version"}


@pytest.mark.parametrize("more", [{"swiglu": False}, {"untie_embeddings_and_output_weights": False}])
def test_plain_mlps_and_tied_embeddings(tmp_path, more):
    wholes = made(tmp_path, **more)
    same(checkpoint.open(tmp_path), wholes)


@pytest.mark.parametrize(("tp", "pp"), [(2, 1), (2, 2)])
def test_experts_are_numbered_over_all_ranks(tmp_path, tp, pp):
    wholes = made(tmp_path, tp, pp, ep=2, num_experts=4, expert_model_parallel_size=2)
    same(checkpoint.open(tmp_path), wholes)


def test_the_training_is_opened_at_its_latest_iteration(tmp_path):
    made(tmp_path / "iter_0000050", iteration=50)
    wholes = made(tmp_path / "iter_0000100")
    (tmp_path / "latest_checkpointed_iteration.txt").write_text("100")
    opened = checkpoint.open(tmp_path)
    same(opened, wholes)
    assert opened.objects["iteration"] == 100
    (tmp_path / "latest_checkpointed_iteration.txt").write_text("150")
    with pytest.raises(CheckpointError, match=r"latest.*says 150, but there is no iter_0000150"):
        checkpoint.open(tmp_path)


def test_a_missing_rank_is_named(tmp_path):
    made(tmp_path)
    (tmp_path / "mp_rank_01_001/model_optim_rng.pt").unlink()
    with pytest.raises(CheckpointError, match=r"tensor 2 x pipeline 2 .* missing: 'mp_rank_01_001'"):
        checkpoint.open(tmp_path)


def test_a_rank_of_another_save_is_named(tmp_path):
    made(tmp_path, 2, 1)
    made(tmp_path / "other", 4, 1, num_query_groups=4)
    (tmp_path / "other/mp_rank_02").rename(tmp_path / "mp_rank_02")
    with pytest.raises(CheckpointError, match=r"tensor 2 .* 'mp_rank_02' too"):
        checkpoint.open(tmp_path)


def test_more_ranks_than_any_folder_has_are_refused_at_once(tmp_path):
    made(tmp_path, 1, 1)
    change(
        tmp_path / "mp_rank_00/model_optim_rng.pt", lambda s: vars(s["args"]).update(tensor_model_parallel_size=10**12)
    )
    with pytest.raises(CheckpointError, match="say 1000000000000 ranks, but there are 1"):
        checkpoint.open(tmp_path)


def change(path, work):
    state = torch.load(path, weights_only=False)
    work(state)
    torch.save(state, path)


@pytest.mark.parametrize(
    ("work", "message"),
    [
        (lambda state: state.update(iteration=99), r"iteration is 100 in .*mp_rank_00_000.* 99 in .*mp_rank_01_001"),
        (
            lambda state: setattr(state["args"], "num_layers", 6),
            r"args.num_layers is 4 in .* but 6 in .*mp_rank_01_001",
        ),
        (lambda state: state.pop("args"), r"mp_rank_01_001.* has no 'args'"),
        (lambda state: state["model"].pop("output_layer.weight"), r"mp_rank_01_001.* has no 'output_layer.weight'"),
        (lambda state: state.update(checkpoint_version=1.0), "checkpoint_version 1.0 orders rows"),
        (lambda state: state.pop("checkpoint_version"), "checkpoint_version 0 orders rows"),
        (lambda state: state["model"].update(gate_weight=torch.ones(2)), "none of .* rules matches 'gate_weight'"),
    ],
)
def test_a_file_that_contradicts_the_others_is_named(tmp_path, work, message):
    made(tmp_path)
    change(tmp_path / "mp_rank_01_001/model_optim_rng.pt", work)
    with pytest.raises(CheckpointError, match=message):
        checkpoint.open(tmp_path)


@pytest.mark.parametrize(
    ("more", "message"),
    [
        ({"hidden_size": 32}, r"the shape is \(48, 16\), but args says .*hidden_size = 32"),
        ({"num_query_groups": 4}, r"linear_qkv.weight.* but args says"),
        ({"num_query_groups": 1}, "2 ranks cut 1 blocks"),
        ({"num_layers": 6}, r"args.num_layers is 6, but the files have 4 layers"),
        ({"swiglu": False}, r"linear_fc1.weight.* but args says"),
        ({"num_attention_heads": None}, r"args.num_attention_heads is None, but a whole number is needed"),
    ],
)
def test_args_that_contradict_the_tensors_are_refused(tmp_path, more, message):
    made(tmp_path)
    for file in tmp_path.rglob("*.pt"):
        change(file, lambda state: vars(state["args"]).update(more))
    with pytest.raises(CheckpointError, match=message):
        checkpoint.open(tmp_path)


def test_an_output_layer_that_is_not_tied_is_refused_where_args_say_so(tmp_path):
    made(tmp_path)
    for file in tmp_path.rglob("*.pt"):
        change(file, lambda state: vars(state["args"]).update(untie_embeddings_and_output_weights=False))
    with pytest.raises(CheckpointError, match=r"args say that 'output_layer.weight' is .*, but they differ"):
        checkpoint.open(tmp_path)


def test_the_iteration_of_the_folder_is_that_of_the_files(tmp_path):
    made(tmp_path / "iter_0000200", 1, 1)
    with pytest.raises(CheckpointError, match=r"mp_rank_00/model_optim_rng.pt is of iteration 100"):
        checkpoint.open(tmp_path / "iter_0000200")


def test_a_truncated_file_is_named(tmp_path):
    made(tmp_path, 2, 1)
    file = tmp_path / "mp_rank_01/model_optim_rng.pt"
    file.write_bytes(file.read_bytes()[:2000])
    with pytest.raises(CheckpointError, match=r"mp_rank_01/model_optim_rng.pt"):
        checkpoint.open(tmp_path)
