"""Checkpoints of DeepSpeed's ZeRO: parameters by name out of flat partitions, and files that do not fit together."""

import re
import shutil

import pytest
import torch
from deepspeed_folders import Zero

import shardwise as sw
from shardwise.errors import CheckpointError

GROUPS = [
    {"embedding": (13, 5), "a.weight": (7, 5), "b.weight": (5, 7)},
    {"scale": (1,), "a.bias": (7,), "norm": (2, 1, 3)},
]
TWO_SAVES = "are of different saves"


def zero(stage: int, ranks: int = 2, **others) -> Zero:
    """A training with two groups, tied weights and a frozen parameter."""
    return Zero(GROUPS, stage, ranks, frozen={"frozen": (11,)}, ties={"head": "embedding"}, **others)


def change(file, edit) -> None:
    """Edit what a file has, and save it again."""
    value = torch.load(file, weights_only=False)
    edit(value)
    torch.save(value, file)


def error_of(folder) -> str:
    """What opening says, in one line."""
    with pytest.raises(CheckpointError) as caught:
        sw.checkpoint.open(folder)
    return str(caught.value)


@pytest.mark.parametrize("stage", [1, 2, 3])
@pytest.mark.parametrize("ranks", [1, 2, 3, 7])
def test_every_tensor_is_what_the_ranks_had_together(tmp_path, stage, ranks):
    training = zero(stage, ranks)
    training.save(tmp_path)
    opened = sw.checkpoint.open(tmp_path)
    assert {name for name in opened if not name.startswith("module.")} == set(training.tensors)
    for name, value in training.tensors.items():
        torch.testing.assert_close(opened[name].read(), value, rtol=0, atol=0)


@pytest.mark.parametrize("stage", [2, 3])
def test_boxes_of_a_tensor_are_read_alone(tmp_path, stage):
    training = zero(stage, 3)
    training.save(tmp_path)
    entry = sw.checkpoint.open(tmp_path)["optimizer.state.a.weight.exp_avg"]
    for row in range(7):
        part = entry.read(sw.Box((row, 1), (row + 1, 4)))
        torch.testing.assert_close(part, training.tensors[entry.name][row : row + 1, 1:4], rtol=0, atol=0)


def test_a_group_smaller_than_its_padding_is_read(tmp_path):
    training = Zero([{"w": (1,)}, {"v": (3,)}], 1, 3)
    training.save(tmp_path)
    opened = sw.checkpoint.open(tmp_path)
    assert all(torch.equal(opened[name].read(), value) for name, value in training.tensors.items())


def test_the_weights_that_the_model_computes_with_are_there_too(tmp_path):
    training = zero(2)
    training.save(tmp_path)
    opened = sw.checkpoint.open(tmp_path)
    weight = opened["module.a.weight"].read()
    torch.testing.assert_close(weight, training.tensors["model.a.weight"].bfloat16(), rtol=0, atol=0)
    assert "module.frozen" in opened


def test_values_keep_their_names_and_groups_name_their_parameters(tmp_path):
    zero(3).save(tmp_path)
    values = sw.checkpoint.open(tmp_path).objects
    assert values["tokens"] == 12
    assert values["optimizer.param_groups.1.params"] == [*GROUPS[1]]
    assert values["optimizer.param_groups.0.betas"] == (0.9, 0.99)
    assert not any("frozen" in name or "param_shapes" in name for name in values)


def test_tied_weights_are_converted_once_and_come_back_nested(tmp_path):
    training = zero(3)
    training.save(tmp_path / "zero")
    sw.checkpoint.convert(tmp_path / "zero", tmp_path / "all.pt", objects="drop")
    back = torch.load(tmp_path / "all.pt", weights_only=True)
    assert back["model"]["head"].data_ptr() == back["model"]["embedding"].data_ptr()
    assert torch.equal(
        back["optimizer"]["state"]["a.bias"]["exp_avg"], training.tensors["optimizer.state.a.bias.exp_avg"]
    )
    assert sw.checkpoint.verify(tmp_path / "zero", tmp_path / "all.pt", objects="drop") == []


def test_a_model_and_its_optimizer_are_loaded_by_their_names(tmp_path):
    training = Zero([{"weight": (3, 4), "bias": (3,)}], 3, 2)
    training.save(tmp_path)
    into = {
        "model": torch.nn.Linear(4, 3).state_dict(),
        "optimizer": {"state": {"weight": {"exp_avg": torch.zeros(3, 4)}}},
    }
    sw.checkpoint.load(tmp_path, into=into)
    assert torch.equal(into["model"]["weight"], training.tensors["model.weight"])
    assert torch.equal(
        into["optimizer"]["state"]["weight"]["exp_avg"], training.tensors["optimizer.state.weight.exp_avg"]
    )


def test_the_folder_of_a_step_is_opened_without_latest(tmp_path):
    step = zero(2).save(tmp_path, latest=False)
    assert "model.a.weight" in sw.checkpoint.open(step)
    assert "is not a recognized checkpoint" in error_of(tmp_path)


def test_model_states_of_one_rank_of_zero_3_are_never_weights(tmp_path):
    step = zero(3).save(tmp_path)
    file = step / "zero_pp_rank_0_mp_rank_00_model_states.pt"
    assert "'embedding' has shape (13, 5), but no cells here" in error_of(file)
    for part in step.glob("*optim_states.pt"):
        part.unlink()
    assert "no optim_states files" in error_of(tmp_path)
    (step / "zero_pp_rank_1_mp_rank_00_model_states.pt").unlink()
    assert "no optim_states files" in error_of(step)


# --- files that do not fit together -----------------------------------------------------------------------------------


@pytest.mark.parametrize("stage", [2, 3])
def test_a_missing_rank_is_named(tmp_path, stage):
    step = zero(stage, 3).save(tmp_path)
    (step / "bf16_zero_pp_rank_1_mp_rank_00_optim_states.pt").unlink()
    assert "lacks the parts of the optimizer of rank 1: " in error_of(tmp_path)


def test_missing_model_states_of_a_rank_are_named(tmp_path):
    step = zero(3, 3).save(tmp_path)
    (step / "zero_pp_rank_2_mp_rank_00_model_states.pt").unlink()
    assert "lacks the model states of rank 2: " in error_of(tmp_path)


@pytest.mark.parametrize("stage", [2, 3])
def test_files_of_two_numbers_of_ranks_are_refused(tmp_path, stage):
    zero(stage, 3).save(tmp_path)
    zero(stage, 2).save(tmp_path / "later")
    shutil.copytree(tmp_path / "later" / "global_step3", tmp_path / "global_step3", dirs_exist_ok=True)
    assert "has files of two numbers of ranks" in error_of(tmp_path)


@pytest.mark.parametrize("stage", [2, 3])
def test_mixed_iterations_are_refused(tmp_path, stage):
    step = zero(stage).save(tmp_path)
    other = zero(stage, step=4).save(tmp_path / "later")
    name = "bf16_zero_pp_rank_1_mp_rank_00_optim_states.pt"
    shutil.copy(other / name, step / name)
    message = error_of(tmp_path)
    assert TWO_SAVES in message
    assert "the step of group 0 is 3.0 in one, and 4.0 in the other" in message
    assert name in message


def test_model_states_of_another_iteration_are_refused(tmp_path):
    step = zero(2).save(tmp_path)
    other = zero(2, step=4, seed=1).save(tmp_path / "later")
    shutil.copy(other / "mp_rank_00_model_states.pt", step)
    message = error_of(tmp_path)
    assert "mp_rank_00_model_states.pt" in message
    assert "'embedding'" in message


@pytest.mark.parametrize("rank", range(4))
def test_the_part_of_a_rank_of_another_training_at_the_same_step_is_refused(tmp_path, rank):
    step, other = zero(2, 4).save(tmp_path), zero(2, 4, seed=1).save(tmp_path / "other")
    name = f"bf16_zero_pp_rank_{rank}_mp_rank_00_optim_states.pt"
    shutil.copy(other / name, step / name)
    said = error_of(tmp_path)
    assert "has other values of " in said
    assert name in said


def test_optimizer_states_of_another_order_are_refused(tmp_path):
    step = zero(2).save(tmp_path)

    def swap(model):
        model["param_shapes"][0] = dict(reversed(model["param_shapes"][0].items()))

    change(step / "mp_rank_00_model_states.pt", swap)
    assert "_0_mp_rank_00_optim_states.pt has elements 0 to 65 of 'embedding', but by " in error_of(tmp_path)


@pytest.mark.parametrize("stage", [2, 3])
def test_parameters_of_another_model_are_refused(tmp_path, stage):
    step = zero(stage).save(tmp_path)
    for file in step.glob("*model_states.pt"):
        change(file, lambda model: model["param_shapes"][1].update(extra=torch.Size([40])))
    message = error_of(tmp_path)
    assert re.search(r"_optim_states.pt: \w+\[1\] has \d+ elements .* need \d+", message)


def test_a_truncated_part_is_named(tmp_path):
    step = zero(2).save(tmp_path)
    file = step / "bf16_zero_pp_rank_1_mp_rank_00_optim_states.pt"
    file.write_bytes(file.read_bytes()[:-100])
    assert f"{file}" in error_of(tmp_path)


def test_a_wrong_latest_names_the_folders_that_are_there(tmp_path):
    zero(2).save(tmp_path)
    (tmp_path / "latest").write_text("global_step9\n")
    assert "'global_step9', but here are the folders 'global_step3'" in error_of(tmp_path)
    (tmp_path / "latest").write_text("../elsewhere")
    assert "not inside the checkpoint" in error_of(tmp_path)


@pytest.mark.parametrize(
    "key", ["base_optimizer_state", "single_partition_of_fp32_groups", "partition_count", "zero_stage"]
)
@pytest.mark.parametrize("value", [None, "text", [1], {0: {0: [[]]}}, torch.zeros(2)])
def test_anything_in_the_place_of_what_deepspeed_writes_is_one_error(tmp_path, key, value):
    step = zero(2).save(tmp_path)
    for file in step.glob("*optim_states.pt"):
        change(file, lambda part: part["optimizer_state_dict"].update({key: value}))
    assert str(tmp_path) in error_of(tmp_path)


def test_models_that_are_split_otherwise_are_refused(tmp_path):
    step = zero(2).save(tmp_path)
    (step / "mp_rank_01_model_states.pt").write_bytes(b"")
    assert "tensor, pipeline or expert parallelism" in error_of(tmp_path)


# --- universal checkpoints --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("stage", [2, 3])
def test_a_universal_checkpoint_has_what_the_ranks_had(tmp_path, stage):
    training = zero(stage, 3)
    training.save(tmp_path / "zero")
    made = sw.checkpoint.convert(tmp_path / "zero", tmp_path / "out", format="deepspeed-universal")
    assert made.format == "deepspeed-universal"
    assert sw.checkpoint.verify(tmp_path / "zero", tmp_path / "out") == []
    opened = sw.checkpoint.open(tmp_path / "out")
    for name, value in training.tensors.items():
        torch.testing.assert_close(opened[name].read(), value, rtol=0, atol=0)
    assert opened["model.head"].shared == opened["model.embedding"].shared


def test_files_of_a_universal_checkpoint_are_where_deepspeed_looks(tmp_path):
    training = zero(2)
    training.save(tmp_path / "zero")
    sw.checkpoint.convert(tmp_path / "zero", tmp_path / "out", format="deepspeed-universal")
    folder = tmp_path / "out" / (tmp_path / "out" / "latest_universal").read_text()
    beside = {file.name for file in (folder / "zero" / "a.weight").iterdir()}
    assert beside == {"fp32.pt", "exp_avg.pt", "exp_avg_sq.pt", "step.pt"}  # all are taken for states
    master = torch.load(folder / "zero" / "a.weight" / "fp32.pt", weights_only=True)
    torch.testing.assert_close(master["param"], training.tensors["model.a.weight"], rtol=0, atol=0)
    settings = torch.load(folder / "zero" / "optimizer_state.pt", weights_only=True)
    assert [group["params"] for group in settings["param_groups"]] == [[0], [1]]
    assert settings["optimizer_state_dict"]["state"][0]["step"] == 3
    for model in ("mp_rank_00_model_states.pt", "zero_pp_rank_0_mp_rank_00_model_states.pt"):
        assert torch.load(folder / model, weights_only=True)["global_steps"] == 3


def test_a_universal_checkpoint_with_flat_tensors_gets_their_shapes_back(tmp_path):
    zero(3).save(tmp_path / "zero")
    sw.checkpoint.convert(tmp_path / "zero", tmp_path / "out", format="deepspeed-universal")
    folder = tmp_path / "out" / "global_step3_universal"
    for file in [*folder.glob("zero/*/fp32.pt"), *folder.glob("zero/*/exp_avg*.pt")]:  # as ds_to_universal has them
        torch.save(torch.load(file, weights_only=True)["param"].reshape(-1), file)
    for file in folder.glob("zero/*/step.pt"):
        file.unlink()
    assert sw.checkpoint.verify(tmp_path / "zero", tmp_path / "out") == []


def test_damaged_universal_checkpoints_are_refused(tmp_path):
    zero(2).save(tmp_path / "zero")
    sw.checkpoint.convert(tmp_path / "zero", tmp_path / "out", format="deepspeed-universal")
    folder = tmp_path / "out" / "global_step3_universal"
    other = torch.load(folder / "zero" / "b.weight" / "exp_avg.pt", weights_only=True)
    torch.save(other, folder / "zero" / "norm" / "exp_avg.pt")
    assert "exp_avg.pt has shape (5, 7), but by " in error_of(folder)
    (folder / "zero" / "a.weight" / "exp_avg_sq.pt").unlink()
    assert "has no zero/NAME/exp_avg_sq.pt for 'a.weight'" in error_of(folder)
    (folder / "mp_rank_00_model_states.pt").unlink()
    (folder / "zero_pp_rank_0_mp_rank_00_model_states.pt").unlink()
    assert "has no model states" in error_of(folder)


def test_two_checkpoints_in_a_folder_are_both_named(tmp_path):
    zero(2).save(tmp_path)
    sw.checkpoint.convert(tmp_path, tmp_path, format="deepspeed-universal")
    assert "'global_step3' (by latest) and 'global_step3_universal' (by latest_universal)" in error_of(tmp_path)
    assert sw.checkpoint.open(tmp_path / "latest").format == "deepspeed"
    assert sw.checkpoint.open(tmp_path / "global_step3_universal").format == "deepspeed-universal"


def test_a_universal_checkpoint_is_never_written_over(tmp_path):
    zero(2).save(tmp_path / "zero")
    sw.checkpoint.convert(tmp_path / "zero", tmp_path / "out", format="deepspeed-universal")
    with pytest.raises(CheckpointError, match="has a universal checkpoint already"):
        sw.checkpoint.convert(tmp_path / "zero", tmp_path / "out", format="deepspeed-universal")


def test_what_deepspeed_would_not_find_is_refused_before_writing(tmp_path):
    zero(3).save(tmp_path / "zero")
    refused = {
        "no groups": {"select": "model.*"},
        "model.a.weight": {"select": ["optimizer.*", "model.[!a]*"]},
        "cast it to float32": {"cast": torch.bfloat16},
        "of no parameter in": {"rename": [("optimizer.state.norm.exp_avg", "optimizer.state.norms.exp_avg")]},
    }
    for message, options in refused.items():
        with pytest.raises(CheckpointError, match=message):
            sw.checkpoint.convert(tmp_path / "zero", tmp_path / "out", format="deepspeed-universal", **options)
    assert not (tmp_path / "out" / "latest_universal").exists()


def test_a_checkpoint_of_torch_becomes_one_of_deepspeed(tmp_path):
    model = torch.nn.Linear(4, 3)
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.ones(2, 4)).sum().backward()
    optimizer.step()
    from torch.distributed.checkpoint.state_dict import get_model_state_dict, get_optimizer_state_dict

    state = {"model": get_model_state_dict(model), "optimizer": get_optimizer_state_dict(model, optimizer)}
    sw.checkpoint.save(state, tmp_path / "run")
    sw.checkpoint.convert(tmp_path / "run", tmp_path / "out", format="deepspeed-universal")
    opened = sw.checkpoint.open(tmp_path / "out")
    assert torch.equal(opened["model.weight"].read(), model.weight)
    assert torch.equal(opened["optimizer.state.bias.exp_avg"].read(), optimizer.state[model.bias]["exp_avg"])
    assert opened.objects["optimizer.param_groups.0.params"] == ["weight", "bias"]
