"""Casts of checkpoints: quantized codes are never taken for numbers, and no value is lost, unless that is asked for."""

import os
import re
import sys

import pytest
import torch
import torch.distributed as dist
from checkpoints import held, same

from shardwise import checkpoint, cli
from shardwise.errors import CheckpointError, RefusedCastError
from shardwise.testing import on_ranks

BF16, F16, F8 = torch.bfloat16, torch.float16, torch.float8_e4m3fn
READS = pytest.mark.parametrize("read", ["each", "once"])


@pytest.fixture(autouse=True)
def _here(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)


@pytest.fixture
def quantized():
    """The codes and the scale of a weight, beside plain tensors."""
    weight = torch.linspace(-0.02, 0.02, 64).reshape(8, 8)
    scale = weight.abs().max() / 448
    values = {"w": (weight / scale).to(F8), "w_scale_inv": scale.reshape(1, 1), "norm": torch.ones(8), "step": 3}
    torch.save(values, "m.pt")
    return values


@pytest.fixture
def large():
    """Two tensors with values that float16 does not have."""
    values = {"a": torch.tensor([1.0, 7e4, -1e6, 2.0]), "b": torch.tensor([1e5, 0.0]).to(BF16), "c": torch.ones(3)}
    torch.save(values, "large.pt")
    return values


def zeros(dtype, *shape):
    return torch.zeros(shape, dtype=dtype)


# --- load ------------------------------------------------------------------------------------------------------------

CODES = {
    "float8 with a scale": ({"w": zeros(F8, 4), "w_scale_inv": torch.ones(1)}, BF16, ["'w_scale_inv'", "quantized"]),
    "int8 with SCB": ({"w": zeros(torch.int8, 4), "SCB": torch.ones(1)}, F16, ["'SCB'", "quantized"]),
    "float8 alone": ({"w": zeros(F8, 4)}, torch.float32, ["without being named"]),
    "to int8": ({"w": torch.rand(4)}, torch.int8, ["without being named"]),
    "to float8": ({"w": torch.rand(4)}, F8, ["without being named"]),
    "to bool": ({"w": torch.rand(4)}, torch.bool, ["without being named"]),
    "bool": ({"w": zeros(torch.bool, 4)}, torch.float32, ["without being named"]),
    "shorter integers": ({"w": zeros(torch.int64, 4)}, torch.int32, ["without being named"]),
    "to complex": ({"w": torch.rand(4)}, torch.complex64, ["without being named"]),
}


@pytest.mark.parametrize("kind", CODES)
def test_what_is_no_plain_float_is_loaded_by_name_alone(kind):
    stored, becomes, words = CODES[kind]
    torch.save(stored, "m.pt")
    into = {"w": torch.ones(4).to(becomes)}
    for cast in (True, False, None, [("*", becomes)], [("w*", becomes)], [("?", becomes)]):
        with pytest.raises(RefusedCastError) as refused:
            checkpoint.load("m.pt", into, cast=cast)
        assert isinstance(refused.value, CheckpointError | ValueError)
        for word in ("'w'", str(stored["w"].dtype), str(becomes), f"cast=[('w', {becomes})]", *words):
            assert word in str(refused.value)
        same(into["w"], torch.ones(4).to(becomes))
    checkpoint.load("m.pt", into, cast=[("w", becomes)])
    same(into["w"], stored["w"].to(becomes))


def test_codes_are_loaded_into_codes_with_or_without_their_scales(quantized):
    into = {"w": zeros(F8, 8, 8)}
    checkpoint.load("m.pt", into, cast=False)
    same(into["w"], quantized["w"])
    into = {"w": zeros(F8, 8, 8), "w_scale_inv": torch.zeros(1, 1), "norm": zeros(BF16, 8)}
    checkpoint.load("m.pt", into)
    same(into["w_scale_inv"], quantized["w_scale_inv"])
    same(into["norm"], quantized["norm"].to(BF16))


def test_a_scale_of_codes_keeps_its_dtype_unless_it_is_named(quantized):
    into = {"w": zeros(F8, 8, 8), "w_scale_inv": zeros(BF16, 1, 1)}
    with pytest.raises(RefusedCastError, match="a scale of 'w'"):
        checkpoint.load("m.pt", into)
    checkpoint.load("m.pt", into, cast=[("w_scale_inv", BF16)])
    same(into["w_scale_inv"], quantized["w_scale_inv"].to(BF16))


def test_rules_of_a_load_say_what_the_target_is(quantized):
    into = {"norm": zeros(F16, 8)}
    for cast, words in (
        ([("norm", BF16)], "cast= makes 'norm' torch.bfloat16, but the target is torch.float16"),
        (BF16, "cast= makes 'norm' torch.bfloat16, but the target is torch.float16"),
        ([("norm", None)], "cast= makes 'norm' torch.float32, but the target is torch.float16"),
        ([("nrom", F16)], "cast= has 'nrom', which matches no name"),
    ):
        with pytest.raises(CheckpointError, match=words):
            checkpoint.load("m.pt", into, cast=cast)
    for cast in (F16, [("*", F16)], [("norm", F16)]):
        checkpoint.load("m.pt", into, cast=cast)
    with pytest.raises(TypeError, match="cast= must be"):
        checkpoint.load("m.pt", into, cast="float16")


def test_names_with_brackets_can_be_named():
    torch.save({"w[0]": zeros(torch.int8, 4)}, "m.pt")
    into = {"w[0]": torch.ones(4)}
    checkpoint.load("m.pt", into, cast=[("w[0]", torch.float32)])
    same(into["w[0]"], torch.zeros(4))


@pytest.mark.devices(group=False)
@READS
def test_all_ranks_hear_of_codes_and_of_values_that_are_lost(tmp_path, quantized, large, read):
    def run(rank):
        found = []
        for path, into, options in (
            ("m.pt", {"w": held(zeros(BF16, 8, 8), "8x8/S0@2")}, {}),
            ("large.pt", {"a": held(zeros(F16, 4), "4/S0@2"), "c": held(zeros(F16, 3), "3/R@2")}, {}),
            ("large.pt", {"a": held(zeros(F16, 4), "4/S0@2")}, {"overflow": "allow"}),
        ):
            try:
                checkpoint.load(path, into, read=read, group=dist.group.WORLD, **options)
                found.append(into["a"].local_tensor().tolist())
            except RefusedCastError as error:
                found.append(str(error))
        return found

    one, other = on_ranks(2, run)
    assert one[:2] == other[:2]
    assert "'w_scale_inv' stands beside it" in one[0]
    assert "of 'a'" in one[1]
    assert "the largest in magnitude is 1e+06" in one[1]
    assert "All tensors of the target were written" in one[1]
    assert one[2] + other[2] == [1.0, float("inf"), float("-inf"), 2.0]


# --- values that are lost --------------------------------------------------------------------------------------------


def test_a_load_counts_what_it_loses_and_says_what_was_written(large):
    into = {"a": zeros(F16, 4), "b": zeros(F16, 2), "c": zeros(F16, 3)}
    with pytest.raises(RefusedCastError) as refused:
        checkpoint.load("large.pt", into)
    said = str(refused.value)
    for words in (
        "2 values of 'a'",
        "torch.float16",
        "65504",
        "the largest in magnitude is 1e+06",
        "1 more tensor, such as 'b'",
    ):
        assert words in said
    assert "All tensors of the target were written; overflow='allow'" in said
    same(into["a"], large["a"].to(F16))
    checkpoint.load("large.pt", into, overflow="allow")
    checkpoint.load("large.pt", {"a": zeros(BF16, 4), "c": zeros(F16, 3)})
    with pytest.raises(ValueError, match="overflow= must be"):
        checkpoint.load("large.pt", into, overflow="ignore")


@pytest.mark.parametrize("verify", [True, False])
@pytest.mark.parametrize("format", ["safetensors", "torch.save", "dcp"])
def test_a_conversion_that_would_lose_values_writes_nothing(large, format, verify):
    with pytest.raises(RefusedCastError, match=r"2 values of 'a'.*Nothing was written; overflow='allow'"):
        checkpoint.convert("large.pt", "out/x", format=format, cast=F16, verify=verify)
    assert not os.path.exists("out/x")
    made = checkpoint.convert("large.pt", "out/x", format=format, cast=F16, verify=verify, overflow="allow")
    same(made["a"].read(), large["a"].to(F16))
    with pytest.raises(RefusedCastError, match="Nothing was compared"):
        checkpoint.verify("large.pt", "out/x", cast=F16)
    assert checkpoint.verify("large.pt", "out/x", cast=F16, overflow="allow") == []


def test_a_conversion_tried_again_is_refused_again(large):
    for _ in range(2):
        with pytest.raises(RefusedCastError, match="of 'a'"):
            checkpoint.convert("large.pt", "out", format="dcp", cast=F16, verify=False)


def test_values_that_saturate_are_lost_too(large):
    for becomes, words in ((F8, "2 values.*ends at 448"), (torch.int16, "2 values.*ends at 32767")):
        with pytest.raises(RefusedCastError, match=words):
            checkpoint.convert("large.pt", "out", cast=[("a", becomes)])
    assert not os.path.exists("out")


def test_values_are_looked_at_in_every_part(tmp_path):
    whole = torch.zeros(3, 70_000)
    whole[2, 69_999] = 1e9
    torch.save({"q": whole, "k": torch.ones(1, 70_000)}, "m.pt")
    fuse = checkpoint.Concat("qk", ["q", "k"])
    with pytest.raises(RefusedCastError, match="1 value of 'qk' is beyond the range"):
        checkpoint.convert("m.pt", "out", remap=[fuse], cast=F16, max_bytes=2**14)


# --- convert and verify ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("cast", [BF16, [("*", BF16)], [("w*", BF16)], [("norm", torch.float32), BF16]])
def test_codes_are_not_converted_without_their_name(quantized, cast):
    with pytest.raises(RefusedCastError, match=r"'w' is torch.float8_e4m3fn.*'w_scale_inv' stands beside it"):
        checkpoint.convert("m.pt", "out.pt", cast=cast)
    assert not os.path.exists("out.pt")
    with pytest.raises(RefusedCastError, match="'w_scale_inv' stands beside it"):
        checkpoint.verify("m.pt", "m.pt", cast=cast)


def test_codes_that_stay_keep_their_scales(quantized):
    with pytest.raises(RefusedCastError, match=r"'w_scale_inv' is torch.float32.*a scale of 'w'"):
        checkpoint.convert("m.pt", "out.pt", cast=[("w", None), BF16])
    made = checkpoint.convert("m.pt", "out.pt", cast=[("w*", None), BF16])
    assert {name: entry.dtype for name, entry in made.items()} == {"w": F8, "w_scale_inv": torch.float32, "norm": BF16}
    assert checkpoint.verify("m.pt", "out.pt", cast=[("w*", None), BF16]) == []


def test_integers_are_left_alone_by_a_dtype_and_refused_by_a_pattern():
    torch.save({"ids": torch.arange(4), "mask": zeros(torch.bool, 2), "w": torch.ones(2)}, "m.pt")
    made = checkpoint.convert("m.pt", "out.pt", cast=BF16)
    assert [entry.dtype for entry in made.values()] == [torch.int64, torch.bool, BF16]
    with pytest.raises(RefusedCastError, match=r"'ids' is torch.int64"):
        checkpoint.convert("m.pt", "again.pt", cast=[("*", BF16)])


def test_codes_cast_by_name_are_those_of_torch(quantized):
    made = checkpoint.convert("m.pt", "out.pt", cast=[("w", BF16)])
    same(made["w"].read(), quantized["w"].to(BF16))
    assert checkpoint.verify("m.pt", "out.pt", cast=[("w", BF16)]) == []


def test_new_names_are_those_that_rules_name(quantized):
    with pytest.raises(RefusedCastError, match=r"'w' is torch.float8_e4m3fn, but 'v' is to be torch.bfloat16"):
        checkpoint.convert("m.pt", "out.pt", rename={"w": "v"}, cast=BF16)
    made = checkpoint.convert("m.pt", "out.pt", rename={"w": "v"}, cast=[("v", BF16)])
    assert made["v"].dtype == BF16


def test_all_refused_casts_are_listed_at_once():
    codes = {f"l{n}.weight": torch.ones(4).to(torch.float8_e4m3fn) for n in range(6)}
    torch.save({**codes, "l0.weight_scale_inv": torch.ones(1)}, "many.pt")
    into = {name: zeros(BF16, 4) for name in codes}
    for cast in lambda: checkpoint.load("many.pt", into), lambda: checkpoint.convert("many.pt", "o.pt", cast=BF16):
        with pytest.raises(RefusedCastError) as refused:
            cast()
        said = str(refused.value)
        assert "'l0.weight' is torch.float8_e4m3fn in the source and torch.bfloat16 in the target" in said
        assert "gives codes, not weights; for weights dequantize: remap=[Quantized()] or --quantized auto" in said
        assert re.search(r"[56] more casts refused: 'l1.weight', 'l2.weight'", said)


# --- the command line ------------------------------------------------------------------------------------------------


@pytest.fixture
def shell(monkeypatch, capsys):
    """Runs a command: the exit code, and all that was printed."""

    def run(*words):
        monkeypatch.setattr(sys, "argv", ["shardwise", *words])
        capsys.readouterr()
        code = 0
        try:
            cli.main()
        except SystemExit as ended:
            code = ended.code or 0
        return code, "".join(capsys.readouterr())

    return run


def test_codes_and_losses_from_the_shell(shell, quantized, large):
    code, text = shell("convert", "m.pt", "out.pt", "--cast", "bfloat16", "--no-bar")
    assert code == 2
    assert "'w_scale_inv' stands beside it" in text
    assert "every cell" not in text
    code, text = shell("convert", "m.pt", "kept.pt", "--cast", "bfloat16", "--cast", "w*=keep", "--no-bar")
    assert code == 0
    assert "every cell is right" in text
    code, text = shell("convert", "m.pt", "out.pt", "--cast", "w=bfloat16", "--no-bar")
    assert code == 0
    assert "every cell is as it was cast" in text
    code, text = shell("convert", "large.pt", "o.pt", "--cast", "float16", "--no-bar")
    assert code == 2
    assert "--allow-overflow" in text
    assert not os.path.exists("o.pt")
    assert "overflow='allow'" not in text
    code, text = shell("convert", "large.pt", "o.pt", "--cast", "float16", "--allow-overflow", "--no-bar")
    assert code == 0
    assert "every cell is as it was cast\n3 values became inf, such as in 'a'" in text
    assert "right" not in text
    assert shell("verify", "large.pt", "o.pt", "--cast", "float16", "--no-bar")[0] == 2
    assert shell("verify", "large.pt", "o.pt", "--cast", "float16", "--allow-overflow", "--no-bar")[0] == 0
