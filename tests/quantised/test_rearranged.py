"""Quantised tensors that are rearranged on the way: their values are what rearranged values would be."""

import pytest
import torch
from references import assert_same_bits, dequantised, random_codes, random_scales
from safetensors.torch import load_file, save_file

from shardwise import Interleaved, Layout, Padded, Quantised, Resharder, Rotary, ShardedTensor, checkpoint
from shardwise.quantised import FORMATS
from shardwise.testing import on_ranks

SMALL = FORMATS["fp8-block"].with_block((4, 3))
RULE = Quantised("*.w", "*.s", format=SMALL)
CODES, SCALES = random_codes((12, 10), SMALL), random_scales(SMALL.grid((12, 10)), torch.float32)
VALUES = dequantised(CODES, SCALES, SMALL, torch.float32)
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
def test_between_ranks(what):
    rules, expected = CASES[what]

    def run(rank):
        rows, grid = Layout.chunk((12, 10), 0, [0]), Layout.chunk(SMALL.grid((12, 10)), 0, [0])
        source = {"a.w": ShardedTensor([CODES] * (rank == 0), rows), "a.s": ShardedTensor([SCALES] * (rank == 0), grid)}
        layouts = {name: Layout.chunk(value.shape, 1, 2) for name, value in expected.items()}
        target = {n: ShardedTensor([torch.zeros(len(v), 5).bfloat16()], layouts[n]) for n, v in expected.items()}
        Resharder(source, target, remap=[RULE, *rules]).run()
        for name, value in expected.items():
            assert_same_bits(target[name].shards[0], value.bfloat16().chunk(2, 1)[rank].contiguous())

    on_ranks(2, run)


def test_codes_are_not_rearranged_without_their_scales(tmp_path):
    save_file({"a.w": CODES, "a.s": SCALES}, tmp_path / "in.safetensors")
    into = {f"a.{n}.w": torch.zeros(4, 10, dtype=torch.float8_e4m3fn) for n in "qkv"}
    into |= {f"a.{n}.s": torch.zeros(1, 4) for n in "qkv"}
    rule = Interleaved("a.w", ["a.q.w", "a.k.w", "a.v.w"], [2, 2, 2])
    with pytest.raises(ValueError, match="is not a box: its codes and scales cannot be moved together"):
        checkpoint.load(tmp_path / "in.safetensors", into, remap=[RULE, rule])
