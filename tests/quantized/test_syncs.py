"""Quantized tensors between ranks: the same bits whatever the layouts, and only codes and scales as messages."""

import numpy as np
import pytest
import torch
from references import assert_same_bits, dequantized, quantized_fp8, random_codes, random_scales
from safetensors.torch import save_file
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor

from shardwise import Concat, Layout, Quantized, Resharder, ShardedTensor, checkpoint, fingerprint
from shardwise.quantized import FORMATS, dequantize, quantize, scales_layout
from shardwise.testing import on_ranks, scatter

pytestmark = pytest.mark.slow

SMALL = FORMATS["fp8-block"].with_block((4, 3))
RULE = Quantized("*.w", "*.s", format=SMALL)
SHAPE = (11, 10)
LAYOUTS = [
    Layout.chunk(SHAPE, 0, 3),
    Layout.chunk(SHAPE, 1, 3),
    Layout.replicated(SHAPE, 3),
    Layout.replicated(SHAPE, [1]),
    Layout.split(SHAPE, 0, [1, 0, 10], [2, 1, 0]),
    Layout.cyclic(SHAPE, 0, 2, 3),
    Layout.flat(SHAPE, [(0, 0, 37), (2, 37, 90), (1, 90, 110)]),
    Layout.boxes(SHAPE, [(0, (0, 0), (5, 10)), (1, (5, 0), (11, 4)), (2, (5, 4), (11, 10))]),
    Layout.fused(SHAPE, 0, [8, 3], 3),
]
BITS = dict.fromkeys((torch.float8_e4m3fn, torch.int8, torch.uint8), torch.uint8)
BITS |= {torch.bfloat16: torch.int16, torch.float16: torch.int16, torch.float32: torch.float32}


def on(layout, tensor, rank):
    """This rank's part of a tensor."""
    parts = scatter(tensor.view(BITS[tensor.dtype]).numpy(), layout).get(rank, [])
    made = [torch.empty(part.shape, dtype=tensor.dtype) for part in parts]
    for shard, part in zip(made, parts, strict=True):
        shard.view(BITS[tensor.dtype]).copy_(torch.from_numpy(part))
    return ShardedTensor(made, layout)


def empty(layout, dtype, rank):
    return on(layout, torch.zeros(layout.shape, dtype=dtype), rank)


def assert_holds(sharded, tensor, rank):
    for found, wanted in zip(sharded.shards, on(sharded.layout, tensor, rank).shards, strict=True):
        assert_same_bits(found, wanted)


def stored():
    return random_codes(SHAPE, SMALL), random_scales(SMALL.grid(SHAPE), torch.float32)


def pairs():
    """Every layout as source and as target."""
    return [
        (one, LAYOUTS[(at + step) % len(LAYOUTS)]) for at, one in enumerate(LAYOUTS) for step in (1, 4)[: 1 + at % 2]
    ]


def test_codes_become_values_under_every_layout():
    codes, scales = stored()
    values = dequantized(codes, scales, SMALL, torch.bfloat16)

    def check(rank):
        for source, target in pairs():
            kept = {"a.w": on(source, codes, rank), "a.s": on(Layout.chunk(scales.shape, 1, 3), scales, rank)}
            into = {"a.w": empty(target, torch.bfloat16, rank)}
            sync = Resharder(kept, into, remap=[RULE])
            sync.run()
            assert_holds(into["a.w"], values, rank)
            for shard in into["a.w"].shards:
                shard.zero_()
            sync.run()
            assert_holds(into["a.w"], values, rank)

    on_ranks(3, check)


def test_values_become_codes_under_every_layout():
    values = torch.randn(SHAPE, generator=torch.Generator().manual_seed(7)).bfloat16()
    first, second = quantized_fp8(values, SMALL), quantized_fp8(values * 3, SMALL)

    def check(rank):
        for source, target in pairs():
            kept = {"a.w": on(source, values, rank)}
            grid = scales_layout(target, SMALL)
            into = {"a.w": empty(target, torch.float8_e4m3fn, rank), "a.s": empty(grid, torch.float32, rank)}
            sync = Resharder(kept, into, remap=[RULE])
            for wanted in (first, second):
                sync.run()
                assert_holds(into["a.w"], wanted[0], rank)
                assert_holds(into["a.s"], wanted[1], rank)
                for shard in kept["a.w"].shards:
                    shard.mul_(3)

    on_ranks(3, check)


@pytest.mark.parametrize("verify", [False, True])
def test_asynchronous_runs_quantize_the_values_of_the_call(verify):
    """Also blocks of which several ranks have a part. An error of one rank is raised on all."""
    values = torch.randn(SHAPE, generator=torch.Generator().manual_seed(7)).bfloat16()
    wanted = [quantized_fp8(values * 3**step, SMALL) for step in range(2)]

    def check(rank):
        for source, target in pairs():
            kept = {"a.w": on(source, values, rank)}
            grid = scales_layout(target, SMALL)
            into = {"a.w": empty(target, torch.float8_e4m3fn, rank), "a.s": empty(grid, torch.float32, rank)}
            back = {"a.w": empty(source, torch.bfloat16, rank)}
            sync, other = Resharder(kept, into, remap=[RULE], verify=verify), Resharder(into, back, remap=[RULE])
            for codes, scales in wanted:
                handle = sync.run(async_op=True)
                for shard in kept["a.w"].shards:
                    shard.mul_(3)
                handle.wait()
                assert_holds(into["a.w"], codes, rank)
                assert_holds(into["a.s"], scales, rank)
                other.run(async_op=True).wait()
                assert_holds(back["a.w"], dequantized(codes, scales, SMALL, torch.bfloat16), rank)
            for shard in kept["a.w"].shards if rank == source.owners()[-1] else ():
                shard.fill_(torch.inf)
            handle = sync.run(async_op=True)
            for shard in kept["a.w"].shards:
                shard.zero_()
            with pytest.raises(ValueError, match=r"'a\.w'"):
                handle.wait()

    on_ranks(3, check)


def test_deltas_of_values_that_become_codes_and_back_bring_the_same_bits(monkeypatch):
    """Codes and scales are compared, as they are sent; what is dequantized is sent whole."""
    monkeypatch.setattr("shardwise.exchange.exchange.INLINE", 0)
    monkeypatch.setattr("shardwise.exchange.exchange.SMALLEST", 1)
    values = torch.randn(SHAPE, generator=torch.Generator().manual_seed(7)).bfloat16()

    def check(rank):
        for source, target in pairs()[::3]:
            kept, grid, now = {"a.w": on(source, values, rank)}, scales_layout(target, SMALL), values.clone()
            into = {"a.w": empty(target, torch.float8_e4m3fn, rank), "a.s": empty(grid, torch.float32, rank)}
            back = {"a.w": empty(source, torch.bfloat16, rank)}
            syncs = [Resharder(*ends, remap=[RULE], delta="always") for ends in ((kept, into), (into, back))]
            for step in range(4):
                codes, scales = quantized_fp8(now, SMALL)
                for sync in syncs:
                    sync.run()
                    assert sync._deltas.compares == (step > 0)
                assert_holds(into["a.w"], codes, rank)
                assert_holds(into["a.s"], scales, rank)
                assert_holds(back["a.w"], dequantized(codes, scales, SMALL, torch.bfloat16), rank)
                now[step, 2 * step :: 3] *= 5
                for ours, theirs in zip(kept["a.w"].shards, on(source, now, rank).shards, strict=True):
                    ours.copy_(theirs)

    on_ranks(3, check)


@pytest.mark.parametrize("name", ["fp8-row", "fp8-tensor", "int8-scb", "mxfp8"])
def test_values_are_quantized_to_every_format(name):
    format, shape = FORMATS[name], (10, 64)
    values = torch.randn(shape, generator=torch.Generator().manual_seed(10))
    codes, scales = quantize(values, name)
    rule = Quantized("*.w", "*.s", format=name)

    def check(rank):
        source, target = Layout.chunk(shape, 1, 3), Layout.chunk(shape, 0, 3)
        kept, grid = {"a.w": on(source, values, rank)}, scales_layout(target, format)
        into = {"a.w": empty(target, format.codes, rank), "a.s": empty(grid, scales.dtype, rank)}
        Resharder(kept, into, remap=[rule], verify=True, max_bytes=256).run()
        assert_holds(into["a.w"], codes, rank)
        assert_holds(into["a.s"], scales, rank)
        back = {"a.w": empty(source, torch.float32, rank)}
        Resharder(into, back, remap=[rule], max_bytes=256).run()
        assert_holds(back["a.w"], dequantized(codes, scales, format, torch.float32), rank)

    on_ranks(3, check)


def test_codes_stay_codes_and_only_they_travel():
    codes, scales = stored()

    def check(rank):
        source, target = Layout.chunk(SHAPE, 0, 2), Layout.chunk(SHAPE, 1, 2)
        grids = scales_layout(source, SMALL), scales_layout(target, SMALL)
        kept = {"a.w": on(source, codes, rank), "a.s": on(grids[0], scales, rank)}
        into = {"a.w": empty(target, torch.float8_e4m3fn, rank), "a.s": empty(grids[1], torch.float32, rank)}
        sync = Resharder(kept, into, remap=[RULE], verify=True)
        sync.run()
        assert_holds(into["a.w"], codes, rank)
        assert_holds(into["a.s"], scales, rank)
        values = {"a.w": empty(target, torch.float32, rank)}
        dequantizing = Resharder(kept, values, remap=[RULE], verify=True)
        dequantizing.run()
        assert_holds(values["a.w"], dequantized(codes, scales, SMALL, torch.float32), rank)
        assert dequantizing.plan.bytes_moved == sync.plan.bytes_moved < 11 * 10 + 4 * 4 * 4

    on_ranks(2, check)


def test_a_sync_of_values_into_an_engine_with_codes_sends_codes():
    parts = {name: torch.randn(8, 6, generator=torch.Generator().manual_seed(at)) for at, name in enumerate("qk")}
    codes, scales = quantized_fp8(torch.cat(list(parts.values())), SMALL)

    def check(rank):
        rows = Layout.chunk((8, 6), 0, 2)
        kept = {f"{name}.w": on(rows, value, rank) for name, value in parts.items()}
        target = Layout.chunk((16, 6), 1, 2)
        grid = scales_layout(target, SMALL)
        into = {"qk.w": empty(target, torch.float8_e4m3fn, rank), "qk.s": empty(grid, torch.float32, rank)}
        sync = Resharder(kept, into, remap=[RULE, Concat("qk.w", ["q.w", "k.w"])])
        sync.run()
        assert_holds(into["qk.w"], codes, rank)
        assert_holds(into["qk.s"], scales, rank)
        assert sync.plan.bytes_moved == 16 * 6 // 2 + 4 * 4

    on_ranks(2, check)


@pytest.mark.parametrize("read", ["once", "each"])
def test_a_group_loads_values_and_codes(tmp_path, read):
    codes, scales = stored()
    values = torch.randn(SHAPE, generator=torch.Generator().manual_seed(8))
    wanted = quantized_fp8(values, SMALL)
    save_file({"a.w": codes, "a.s": scales, "b.w": values}, tmp_path / "a.safetensors")

    def check(rank):
        for target in LAYOUTS[::2]:
            into = {"a.w": empty(target, torch.float32, rank), "b.w": empty(target, torch.float8_e4m3fn, rank)}
            into["b.s"] = empty(scales_layout(target, SMALL), torch.float32, rank)
            checkpoint.load(tmp_path / "a.safetensors", into, remap=[RULE], read=read)
            assert_holds(into["a.w"], dequantized(codes, scales, SMALL, torch.float32), rank)
            assert_holds(into["b.w"], wanted[0], rank)
            assert_holds(into["b.s"], wanted[1], rank)

    on_ranks(3, check)


def test_sharded_tensors_are_dequantized_where_they_are():
    codes, scales = stored()
    values = dequantized(codes, scales, SMALL, torch.bfloat16)

    def check(rank):
        found = set()
        for layout in LAYOUTS[:2] + LAYOUTS[6:7]:
            spread = on(layout, codes, rank), on(Layout.chunk(scales.shape, 0, 3), scales, rank)
            here = dequantize(*spread, SMALL)
            assert_holds(here, values, rank)
            found.add((fingerprint(here), fingerprint(spread[0])))
        return found

    results = on_ranks(3, check)
    assert len(set().union(*results)) == 1


def test_values_are_written_to_dtensors(tmp_path):
    codes, scales = stored()
    values = dequantized(codes, scales, SMALL, torch.bfloat16)
    save_file({"a.w": codes, "a.s": scales}, tmp_path / "a.safetensors")

    def check(rank):
        mesh = init_device_mesh("cpu", (3,))
        for dim in (0, 1):
            into = {"a.w": distribute_tensor(torch.zeros(SHAPE, dtype=torch.bfloat16), mesh, [Shard(dim)])}
            checkpoint.load(tmp_path / "a.safetensors", into, remap=[RULE], read="once")
            assert_same_bits(into["a.w"].full_tensor(), values)
            kept = {"a.w": on(LAYOUTS[0], codes, rank), "a.s": on(Layout.replicated(scales.shape, 3), scales, rank)}
            into["a.w"].to_local().zero_()
            Resharder(kept, into, remap=[RULE]).run()
            assert_same_bits(into["a.w"].full_tensor(), values)

    on_ranks(3, check)


def test_what_one_rank_has_wrong_is_refused_on_all():
    def check(rank):
        values = torch.full(SHAPE, np.inf if rank == 1 else 1.0)
        layout = Layout.chunk(SHAPE, 0, 2)
        kept = {"a.w": on(layout, values, rank)}
        grid = scales_layout(layout, SMALL)
        into = {"a.w": empty(layout, torch.float8_e4m3fn, rank), "a.s": empty(grid, torch.float32, rank)}
        with pytest.raises(ValueError, match=r"'a.w' has values that are not finite"):
            Resharder(kept, into, remap=[RULE]).run()
        aligned = Layout.split(SHAPE, 0, [8, 3])
        kept = {"a.w": on(aligned, values, rank)}
        with pytest.raises(ValueError, match=r"'a.w' has values that are not finite"):
            Resharder(kept, into, remap=[RULE]).run()
        large = {"a.w": on(layout, torch.full(SHAPE, 400.0).to(torch.float8_e4m3fn), rank)}
        large["a.s"] = on(grid, torch.full(SMALL.grid(SHAPE), 1e4), rank)
        half = {"a.w": empty(layout, torch.float16, rank)}
        with pytest.raises(ValueError, match=r"beyond the range of torch.float16"):
            Resharder(large, half, remap=[RULE]).run()

    on_ranks(2, check)
