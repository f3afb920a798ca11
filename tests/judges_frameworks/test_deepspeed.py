"""Checkpoints that DeepSpeed wrote: every value equals that of DeepSpeed's own script and optimizer."""

import contextlib
import io
from argparse import Namespace

import pytest
import torch
from deepspeed.checkpoint.ds_to_universal import main as make_universal
from deepspeed.utils.zero_to_fp32 import get_fp32_state_dict_from_zero_checkpoint
from deepspeed_training import Training, resume, write

import shardwise as sw
from shardwise.testing import on_ranks

TRAININGS = {
    **{f"ZeRO-{stage} on {ranks}": Training(stage, ranks) for stage in (1, 2, 3) for ranks in (1, 2, 3)},
    "one group": Training(2, 3, groups=1),
    "float32": Training(1, 2, dtype=""),
    "ZeRO-3 in float32": Training(3, 2, dtype=""),
    "round robin": Training(2, 2, {"round_robin_gradients": True}),
    "small sub-groups": Training(3, 2, {"sub_group_size": 50}),
    "optimizer for bfloat16": Training(1, 2, config={"data_types": {"grad_accum_dtype": "fp32"}}),
}


@pytest.fixture(scope="module", params=TRAININGS)
def saved(request, tmp_path_factory):
    """The folder of a checkpoint, and the values that DeepSpeed says that its parameters have."""
    training, folder = TRAININGS[request.param], tmp_path_factory.mktemp("deepspeed")
    return folder, on_ranks(training.ranks, lambda rank: write(training, folder), timeout=200)[0]


def by_the_script(folder):
    """What zero_to_fp32.py makes of a checkpoint."""
    with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):
        return get_fp32_state_dict_from_zero_checkpoint(str(folder))


@pytest.mark.judged("deepspeed", "ZeRO-1, 2 and 3: weights and states", "read", "its optimizer, bit-for-bit")
def test_weights_and_moments_are_those_of_the_optimizer(saved, request):
    folder, values = saved
    if "round robin" in request.node.name:
        pytest.skip("DeepSpeed looks for its values in the order of the model, but has them in another one")
    opened = sw.checkpoint.open(folder)
    for name, value in values.items():
        torch.testing.assert_close(opened[name].read(), value, rtol=0, atol=0, msg=name)


@pytest.mark.judged("deepspeed", "ZeRO-1, 2 and 3: fp32 weights", "read", "`zero_to_fp32`, bit-for-bit")
def test_the_model_is_what_zero_to_fp32_makes_of_it(saved, request):
    folder, _ = saved
    if "optimizer for bfloat16" in request.node.name:
        pytest.skip("zero_to_fp32 refuses it, as it names no stage")
    opened, script = sw.checkpoint.open(folder), by_the_script(folder)
    lacking = {name.removeprefix("model.") for name in opened if name.startswith("model.")} - set(script)
    assert lacking <= {"frozen"}  # which the script leaves out for ZeRO-1
    for name, value in script.items():
        torch.testing.assert_close(opened[f"model.{name}"].read(), value, rtol=0, atol=0, msg=name)


def test_a_conversion_reads_back_the_same(saved, tmp_path):
    folder, values = saved
    opened = sw.checkpoint.open(folder)
    sw.checkpoint.convert(folder, tmp_path / "all.pt", objects="drop")
    nested = torch.load(tmp_path / "all.pt", weights_only=True)
    for name in values:
        if name.startswith("model."):
            assert torch.equal(nested["model"][name.removeprefix("model.")], opened[name].read())
    assert nested["tokens"] == 12


@pytest.fixture(scope="module", params=[2, 3])
def written(request, tmp_path_factory):
    """A universal checkpoint that shardwise wrote, and the values that DeepSpeed had."""
    training, base = Training(request.param, 2), tmp_path_factory.mktemp("universal")
    values = on_ranks(2, lambda rank: write(training, base / "zero"), timeout=200)[0]
    sw.checkpoint.convert(base / "zero", base / "universal", format="deepspeed-universal")
    return base, values


@pytest.mark.judged("deepspeed", "universal", "written", "resumes on other ranks and stages")
@pytest.mark.parametrize(("stage", "ranks"), [(1, 3), (2, 1), (3, 3)])
def test_deepspeed_resumes_from_what_was_written_on_other_ranks(written, stage, ranks):
    base, values = written
    loaded, tokens = on_ranks(ranks, lambda rank: resume(Training(stage, ranks), base / "universal"), timeout=200)[0]
    assert tokens == 12
    assert set(loaded) == set(values)
    for name, value in values.items():
        torch.testing.assert_close(loaded[name], value, rtol=0, atol=0, msg=name)


@pytest.mark.judged("deepspeed", "universal", "read", "`ds_to_universal`, bit-for-bit")
def test_universal_checkpoints_of_deepspeed_and_of_shardwise_are_equal(written):
    base, _ = written
    [step] = (base / "zero").glob("global_step*")
    folder = base / "by_deepspeed" / step.name
    options = {"num_extract_workers": 1, "num_merge_workers": 1, "keep_temp_folder": False, "strict": True}
    with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):
        make_universal(
            Namespace(input_folder=f"{step}", output_folder=f"{folder}", inject_missing_state=True, **options)
        )
    assert sw.checkpoint.verify(folder.parent, base / "universal", objects="drop") == []
    assert sw.checkpoint.verify(base / "zero", base / "universal", objects="drop") == []
