"""What a checkpoint becomes by options, in conversions and comparisons; and what is told of options that do nothing."""

import math

import numpy as np
import pytest
import torch
from typer.testing import CliRunner

from shardwise import checkpoint
from shardwise.checkpoint import Concat, Stack, Transposed
from shardwise.checkpoint.values import same_value
from shardwise.cli import app
from shardwise.errors import CheckpointError

STATE = {
    "model": {
        **{f"{n}.{part}.weight": torch.randn(4, 4) for n in range(2) for part in "qkv"},
        "norm.weight": torch.ones(4),
        "seen": torch.tensor(3),
    },
    "optimizer": {"step": torch.tensor(7.0), "lr": 0.1, "betas": (0.9, 0.95)},
}
FUSE = Concat("*.qkv.weight", ["*.q.weight", "*.k.weight", "*.v.weight"])
OPTIONS = {
    "rename": {"rename": {"model.*": "*"}},
    "some": {"select": "model.*"},
    "joined": {"remap": [FUSE]},
    "turned": {"remap": [Transposed("*.q.weight")]},
    "cast": {"cast": [("*.norm.weight", torch.float32), torch.bfloat16]},
    "all": {"select": ["model.*"], "rename": [("model.*", "*")], "remap": [FUSE], "cast": torch.half},
}


@pytest.fixture
def saved(tmp_path):
    checkpoint.save(STATE, tmp_path / "saved")
    return tmp_path / "saved"


def dtypes(found):
    return {name: entry.dtype for name, entry in found.items()}


# --- comparing -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("target", ["out.safetensors", "out.pt", "dcp"])
@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
def test_what_was_converted_is_what_the_source_becomes(saved, tmp_path, options, target):
    made = checkpoint.convert(saved, tmp_path / target, format="dcp" if target == "dcp" else None, **options)
    assert checkpoint.verify(saved, made, **options) == []
    if options.keys() != {"select"}:
        assert checkpoint.verify(saved, made) != []


def test_with_select_the_other_may_have_more(saved, tmp_path):
    torch.save(STATE, tmp_path / "all.pt")
    assert checkpoint.verify(saved, tmp_path / "all.pt", select="model.norm.*") == []
    (found,) = checkpoint.verify(tmp_path / "all.pt", saved, select="model.norm.*", cast=torch.half)
    assert str(found) == "model.norm.weight: dtype torch.float16 and torch.float32"


def test_other_values_are_compared_where_both_hold_them(saved, tmp_path):
    other = {**STATE, "optimizer": {**STATE["optimizer"], "lr": 0.2, "more": 1}}
    torch.save(other, tmp_path / "other.pt")
    found = checkpoint.verify(saved, tmp_path / "other.pt")
    assert [str(one) for one in found] == [
        f"optimizer.more: {saved} has no 'optimizer.more' (nearest: 'optimizer.lr')",
        "optimizer.lr: 0.1 and 0.2",
    ]
    checkpoint.convert(saved, tmp_path / "plain.safetensors")
    assert checkpoint.verify(saved, tmp_path / "plain.safetensors") == []


@pytest.mark.parametrize(
    ("a", "b", "same"),
    [
        (math.nan, math.nan, True),
        (1, True, False),
        (1, 1.0, False),
        ([1, (2,)], [1, (2,)], True),
        ([1], (1,), False),
        ({"a": torch.ones(2)}, {"a": torch.ones(2)}, True),
        ({"a": torch.ones(2)}, {"a": torch.ones(2, dtype=torch.half)}, False),
        ({"a": 1}, {"b": 1}, False),
        (np.arange(3), np.arange(3), True),
        (np.arange(3), np.arange(4), False),
        ({1, 2}, {2, 1}, True),
        (None, None, True),
    ],
)
def test_values_are_the_same_by_type_and_contents(a, b, same):
    assert same_value(a, b) is same


def test_the_list_of_differences_is_cut_unless_all_is_asked_for(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for name, value in ("a", 0.0), ("b", 1.0):
        torch.save({f"w{n}": torch.full((2,), value) for n in range(30)}, f"{name}.pt")
    short = CliRunner().invoke(app, ["verify", "a.pt", "b.pt", "--no-bar"])
    assert (short.exit_code, len(short.output.splitlines())) == (1, 21)
    assert short.output.splitlines()[-1] == "... and 10 more differences: --all lists them"
    every = CliRunner().invoke(app, ["verify", "a.pt", "b.pt", "--no-bar", "--all"])
    assert (every.exit_code, len(every.output.splitlines())) == (1, 30)


def test_the_command_takes_what_convert_takes(saved, tmp_path):
    options = ["--select", "model.*", "--rename", "model.*=*", "--cast", "float16", "--cast", "norm.*=float32"]
    options += ["--concat", "*.qkv.weight=*.q.weight,*.k.weight,*.v.weight", "--no-bar"]
    out = str(tmp_path / "out")
    assert CliRunner().invoke(app, ["convert", str(saved), out, *options]).exit_code == 0
    found = CliRunner().invoke(app, ["verify", str(saved), out, *options])
    assert (found.exit_code, "equal, bit-for-bit" in found.output) == (0, True)


# --- options ---------------------------------------------------------------------------------------------------------


def test_the_dtype_for_the_rest_is_for_floating_point_and_comes_last(saved, tmp_path):
    casts = [torch.bfloat16, ("*.norm.weight", torch.float64), ("*.0.q.weight", None)]
    found = dtypes(checkpoint.convert(saved, tmp_path / "out", cast=casts))
    assert found.pop("model.norm.weight") == torch.float64
    assert found.pop("model.0.q.weight") == torch.float32
    assert found.pop("model.seen") == torch.int64
    assert set(found.values()) == {torch.bfloat16}


@pytest.mark.parametrize("cast", [[torch.half, torch.bfloat16], "float16", [("a", "b", "c")], [("*", 3)], 3])
def test_casts_that_are_none_are_refused(saved, tmp_path, cast):
    with pytest.raises(TypeError):
        checkpoint.convert(saved, tmp_path / "out", cast=cast)
    assert not (tmp_path / "out").exists()


def test_select_chooses_other_values_too(saved, tmp_path):
    made = checkpoint.convert(saved, tmp_path / "out", format="dcp", select=["model.*", "optimizer.lr"])
    assert dict(made.objects) == {"optimizer.lr": 0.1}
    assert all(name.startswith("model.") for name in made)


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"select": ["model.*", "nodel.*"]}, "select= has 'nodel.*', which matches no name"),
        ({"rename": {"modle.*": "*"}}, "rename= has 'modle.*', which matches no name"),
        ({"rename": [("model.*", "*"), ("head", "h")]}, "rename= has 'head', which matches no name"),
        ({"cast": [("*.nrom.*", torch.half)]}, r"cast= has '\*.nrom.\*', which matches no name"),
        ({"remap": [Concat("qkv", ["q", "k", "v"])]}, "whole='qkv'.* fits nothing"),
        ({"remap": [Stack("*.e", "*.{}.e")]}, "Stack.* fits nothing"),
        ({"remap": [Transposed("*.o.weight")]}, "Transposed.* fits nothing"),
    ],
    ids=str,
)
def test_what_fits_nothing_is_refused(saved, tmp_path, options, said):
    with pytest.raises((CheckpointError, ValueError), match=said):
        checkpoint.convert(saved, tmp_path / "out", **options)
    with pytest.raises((CheckpointError, ValueError), match=said):
        checkpoint.verify(saved, saved, **options)
    assert not (tmp_path / "out").exists()


def test_some_parts_of_a_whole_without_the_others_are_refused(tmp_path):
    torch.save({"0.q": torch.ones(2, 2), "0.k": torch.ones(2, 2), "1.q": torch.ones(2, 2)}, tmp_path / "in.pt")
    with pytest.raises(ValueError, match=r"'1\.q' is there, but '1\.k' is not"):
        checkpoint.convert(tmp_path / "in.pt", tmp_path / "out", remap=[Concat("*.qk", ["*.q", "*.k"])])


def test_floats_to_integers_need_a_name(saved, tmp_path):
    with pytest.raises(TypeError, match="would cut them: give a pattern"):
        checkpoint.convert(saved, tmp_path / "out", cast=torch.int32)
    with pytest.raises(CheckpointError, match="without being named"):
        checkpoint.convert(saved, tmp_path / "out", cast=[("*.norm.weight", torch.int32)])
    made = checkpoint.convert(saved, tmp_path / "out", cast=[("model.norm.weight", torch.int32)])
    assert made["model.norm.weight"].dtype == torch.int32


# --- what is no state dict -------------------------------------------------------------------------------------------


def test_models_in_the_place_of_what_they_hold_are_refused(saved, tmp_path):
    model = torch.nn.Linear(2, 2)
    for call in (
        lambda: checkpoint.load(saved, {"model": model}),
        lambda: checkpoint.save({"model": model}, tmp_path / "m"),
    ):
        with pytest.raises(TypeError, match=r"'model' is Linear: give its state_dict\(\)"):
            call()


def test_an_optimizer_without_state_is_not_passed_over(tmp_path):
    weight = torch.nn.Parameter(torch.ones(3))
    trained = torch.optim.AdamW([weight])
    weight.grad = torch.ones(3)
    trained.step()
    checkpoint.save({"optimizer": trained.state_dict()}, tmp_path / "saved")
    fresh = {"optimizer": torch.optim.AdamW([weight]).state_dict()}
    with pytest.raises(CheckpointError, match=r"'optimizer\.state' is empty here, but .* has tensors below it"):
        checkpoint.load(tmp_path / "saved", fresh)
    checkpoint.load(tmp_path / "saved", fresh, strict=False)
    assert fresh["optimizer"]["state"] == {}
