"""Quantized tensors that are rearranged on the way: their values are what rearranged values would be."""

import pytest
import torch
from references import assert_same_bits, dequantized, random_codes, random_scales
from safetensors.torch import load_file, save_file

from shardwise import Concat, Interleaved, Layout, Padded, Quantized, Resharder, Rotary, ShardedTensor, checkpoint
from shardwise.errors import CheckpointError
from shardwise.quantized import FORMATS, quantize
from shardwise.testing import on_ranks

SMALL = FORMATS["fp8-block"].with_block((4, 3))
RULE = Quantized("*.w", "*.s", format=SMALL)
CODES, SCALES = random_codes((12, 10), SMALL), random_scales(SMALL.grid((12, 10)), torch.float32)
VALUES = dequantized(CODES, SCALES, SMALL, torch.float32)
HEADS = VALUES.view(2, 3, 2, 10)
APART = Interleaved("a.w", ["a.q", "a.k", "a.v"], [2, 2, 2])
SOME = VALUES.view(2, 6, 10)[:, [0, 2, 1, 3, 4, 5]].reshape(12, 10)  # the first four cells of heads of six
TURNED = VALUES.view(3, 2, 2, 10).transpose(1, 2).reshape(12, 10)
CASES = {
    "interleaved": ([APART], {f"a.{n}": HEADS[:, at].reshape(4, 10) for at, n in enumerate("qkv")}),
    "rotary": ([Rotary("a.w", 4, to="halves")], {"a.w": TURNED}),
    "rotary in part": ([Rotary("a.w", 6, to="halves", rotary_dim=4)], {"a.w": SOME}),
    "padded": ([Padded("a.w", size=16)], {"a.w": torch.cat([VALUES, torch.zeros(4, 10)])}),
}


@pytest.mark.parametrize("what", CASES)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_from_files(tmp_path, what, dtype):
    rules, expected = CASES[what]
    save_file({"a.w": CODES, "a.s": SCALES}, tmp_path / "in.safetensors")
    into = {name: torch.full(value.shape, 7, dtype=dtype) for name, value in expected.items()}
    checkpoint.load(tmp_path / "in.safetensors", into, remap=[RULE, *rules])
    checkpoint.convert(tmp_path / "in.safetensors", tmp_path / "out.safetensors", remap=[RULE, *rules], cast=dtype)
    written = load_file(tmp_path / "out.safetensors")
    for name, value in expected.items():
        assert_same_bits(into[name], value.to(dtype))
        assert_same_bits(written[name], value.to(dtype))


@pytest.mark.parametrize("what", CASES)
@pytest.mark.parametrize("dim", [0, 1])
def test_between_ranks(what, dim):
    rules, expected = CASES[what]

    def run(rank):
        rows, grid = Layout.chunk((12, 10), 0, [0]), Layout.chunk(SMALL.grid((12, 10)), 0, [0])
        source = {"a.w": ShardedTensor([CODES] * (rank == 0), rows), "a.s": ShardedTensor([SCALES] * (rank == 0), grid)}
        mine = {name: value.bfloat16().chunk(2, dim)[rank].contiguous() for name, value in expected.items()}
        layouts = {name: Layout.chunk(value.shape, dim, 2) for name, value in expected.items()}
        target = {name: ShardedTensor([torch.zeros_like(value)], layouts[name]) for name, value in mine.items()}
        Resharder(source, target, remap=[RULE, *rules]).run()
        for name, value in mine.items():
            assert_same_bits(target[name].shards[0], value)

    on_ranks(2, run)


def test_codes_are_not_rearranged_without_their_scales(tmp_path):
    save_file({"a.w": CODES, "a.s": SCALES}, tmp_path / "in.safetensors")
    into = {f"a.{n}.w": torch.zeros(4, 10, dtype=torch.float8_e4m3fn) for n in "qkv"}
    into |= {f"a.{n}.s": torch.zeros(1, 4) for n in "qkv"}
    rule = Interleaved("a.w", ["a.q.w", "a.k.w", "a.v.w"], [2, 2, 2])
    with pytest.raises(ValueError, match="is not a box: its codes and scales cannot be moved together"):
        checkpoint.load(tmp_path / "in.safetensors", into, remap=[RULE, rule])


def quantized_by_hand(values):
    codes, scales = quantize(values, SMALL)
    return {"a.w": codes, "a.s": scales}


def test_padding_of_values_has_their_dtype(tmp_path):
    save_file({"a.w": CODES, "a.s": SCALES}, tmp_path / "in.safetensors")
    checkpoint.convert(tmp_path / "in.safetensors", tmp_path / "out.safetensors", remap=[RULE, Padded("a.w", size=16)])
    assert_same_bits(load_file(tmp_path / "out.safetensors")["a.w"], CASES["padded"][1]["a.w"].bfloat16())


@pytest.mark.parametrize("rows", [0, 5, 12])
def test_values_are_padded_before_they_are_quantized(tmp_path, rows):
    save_file({"a.w": VALUES[:rows].clone()}, tmp_path / "in.safetensors")
    expected = quantized_by_hand(torch.cat([VALUES[:rows], torch.zeros(16 - rows, 10)]))
    into = {name: torch.ones_like(value) for name, value in expected.items()}
    checkpoint.load(tmp_path / "in.safetensors", into, remap=[RULE, Padded("a.w")])
    checkpoint.convert(tmp_path / "in.safetensors", tmp_path / "out.safetensors", remap=[RULE, Padded("a.w", size=16)])
    written = load_file(tmp_path / "out.safetensors")
    for name, value in expected.items():
        assert_same_bits(into[name], value)
        assert_same_bits(written[name], value)


def test_padding_that_is_kept_has_no_values_to_quantize(tmp_path):
    save_file({"a.w": VALUES}, tmp_path / "in.safetensors")
    into = quantized_by_hand(torch.zeros(16, 10))
    with pytest.raises(CheckpointError, match="only 120 of its 160 values are given"):
        checkpoint.load(tmp_path / "in.safetensors", into, remap=[RULE, Padded("a.w", fill="keep")])


def test_values_without_cells_become_codes_without_cells(tmp_path):
    save_file({"a.w": torch.empty(0, 10)}, tmp_path / "in.safetensors")
    checkpoint.convert(tmp_path / "in.safetensors", tmp_path / "out.safetensors", remap=[RULE])
    assert {name: value.shape for name, value in load_file(tmp_path / "out.safetensors").items()} == {
        "a.w": (0, 10),
        "a.s": (0, 4),
    }


@pytest.mark.parametrize("order", ["qk", "kq"])
def test_values_of_several_dtypes_are_quantized_without_loss(tmp_path, order):
    parts = {"q": VALUES[:8].clone() / 3, "k": VALUES[8:].bfloat16() / 3}
    save_file(parts, tmp_path / "in.safetensors")
    expected = quantized_by_hand(torch.cat([parts[name].float() for name in order]))
    into = {name: torch.ones_like(value) for name, value in expected.items()}
    checkpoint.load(tmp_path / "in.safetensors", into, remap=[RULE, Concat("a.w", list(order))])
    for name, value in expected.items():
        assert_same_bits(into[name], value)


def test_whole_numbers_are_not_quantized(tmp_path):
    save_file({"a.w": torch.arange(-60, 60, dtype=torch.int32).view(12, 10)}, tmp_path / "in.safetensors")
    with pytest.raises(CheckpointError, match=r"'a.w' is torch.int32: only floating-point values can be quantized"):
        checkpoint.load(tmp_path / "in.safetensors", quantized_by_hand(VALUES), remap=[RULE])
