"""Quantized checkpoints are loaded and converted: codes to codes, to values and back, always with the same bits."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from references import assert_same_bits, dequantized, quantized_fp8, random_codes, random_scales
from safetensors.torch import load_file, save_file
from typer.testing import CliRunner

from shardwise import CheckpointError, Concat, Layout, Quantized, ShardedTensor, Stack, Transposed, checkpoint
from shardwise.cli import app
from shardwise.quantized import FORMATS, quantize, scales_layout
from shardwise.testing import scatter, strategies

SMALL = FORMATS["fp8-block"].with_block((4, 3))
RULE = Quantized("*.weight", "*.weight_scale_inv", format=SMALL)
KINDS = [kind for kind in strategies.KINDS if kind != "partial"]
ATTENTION = {"q": (8, 6), "k": (4, 6), "v": (4, 6)}


def small(shape, seed=0):
    return random_codes(shape, SMALL, seed), random_scales(SMALL.grid(shape), torch.float32, seed)


def tensors(**shapes):
    """Codes and scales of block-scaled weights, and a norm."""
    found = {"norm.weight": torch.randn(6, generator=torch.Generator().manual_seed(0)).bfloat16()}
    for seed, (name, shape) in enumerate(shapes.items()):
        found[f"{name}.weight"], found[f"{name}.weight_scale_inv"] = small(shape, seed)
    return found


def values(stored, dtype=torch.bfloat16):
    """The same as values."""
    names = [name for name in stored if not name.endswith("_scale_inv")]
    coded = [name for name in names if f"{name}_scale_inv" in stored]
    found = {name: dequantized(stored[name], stored[f"{name}_scale_inv"], SMALL, dtype) for name in coded}
    return {name: found.get(name, stored[name]) for name in names}


@pytest.fixture
def stored(tmp_path):
    kept = tensors(**ATTENTION)
    save_file(kept, tmp_path / "model.safetensors")
    return tmp_path / "model.safetensors", kept


def assert_all_same(found, wanted):
    assert sorted(found) == sorted(wanted)
    for name, value in wanted.items():
        assert_same_bits(found[name], value)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_values_are_loaded_from_codes_and_scales(stored, dtype):
    path, kept = stored
    wanted = values(kept, dtype)
    into = {name: torch.zeros_like(value) for name, value in wanted.items()}
    checkpoint.load(path, into, remap=[RULE])
    assert_all_same(into, wanted)


def test_values_are_joined_and_transposed_on_the_way(stored):
    path, kept = stored
    wanted = values(kept)
    into = {"norm": torch.zeros(6, dtype=torch.bfloat16), "qkv": torch.zeros(6, 16, dtype=torch.bfloat16)}
    rules = [RULE, Concat("qkv", ["q.weight", "k.weight", "v.weight"]), Transposed("qkv")]
    checkpoint.load(path, into, remap=rules, rename={"norm.weight": "norm"})
    assert_same_bits(into["qkv"], torch.cat([wanted[f"{name}.weight"] for name in "qkv"]).T.contiguous())


def test_values_are_stacked_on_the_way(tmp_path):
    kept = tensors(**{f"experts.{at}": (5, 7) for at in range(3)})
    save_file(kept, tmp_path / "a.safetensors")
    into = {"experts": torch.zeros(3, 5, 7, dtype=torch.bfloat16)}
    checkpoint.load(tmp_path / "a.safetensors", into, remap=[RULE, Stack("experts", "experts.{}.weight")])
    wanted = values(kept)
    assert_same_bits(into["experts"], torch.stack([wanted[f"experts.{at}.weight"] for at in range(3)]))


@st.composite
def sharded(draw):
    format = draw(st.sampled_from([SMALL, *FORMATS.values()]))
    width = st.sampled_from([32, 64, 96]) if format.block[1] == 32 else st.integers(1, 10)
    shape = (*draw(st.lists(st.integers(1, 3), max_size=1)), draw(st.integers(1, 13)), draw(width))
    return draw(strategies.layouts(shape, KINDS)), format


@settings(max_examples=60)
@given(sharded(), st.data())
def test_values_are_the_same_under_every_sharding(tmp_path_factory, drawn, data):
    layout, format = drawn
    path, shape = tmp_path_factory.mktemp("sharded") / "a.safetensors", layout.shape
    scale = next(one for one in format.scales if one != torch.float8_e8m0fnu)
    grid = data.draw(st.sampled_from(format.scales_shapes(shape)))
    codes, scales = random_codes(format.codes_shape(shape), format), random_scales(grid, scale)
    save_file({"a.w": codes, "a.s": scales}, path)
    wanted = scatter(dequantized(codes, scales, format, torch.float32).numpy(), layout)
    rank = data.draw(st.sampled_from(layout.owners()))
    mine = layout.relabel({rank: 0, **({0: rank} if 0 in layout and rank != 0 else {})})  # one process is rank 0
    shards = [torch.zeros(part.shape) for part in wanted[rank]]
    checkpoint.load(path, {"a.w": ShardedTensor(shards, mine)}, remap=[Quantized("*.w", "*.s", format=format)])
    for shard, part in zip(shards, wanted[rank], strict=True):
        assert_same_bits(shard, torch.from_numpy(part.copy()))


def test_codes_and_scales_are_loaded_into_coupled_layouts(stored):
    path, kept = stored
    codes = Layout.chunk((8, 6), 0, [1, 0])
    scales = scales_layout(codes, SMALL)
    into = {
        "q.weight": ShardedTensor(torch.zeros(4, 6).to(torch.float8_e4m3fn), codes),
        "q.weight_scale_inv": ShardedTensor(torch.zeros(1, 2), scales),
    }
    checkpoint.load(path, into, remap=[RULE])
    assert_same_bits(into["q.weight"].shards[0], kept["q.weight"][4:])
    assert_same_bits(into["q.weight_scale_inv"].shards[0], kept["q.weight_scale_inv"][1:])


def test_whole_blocks_of_codes_are_joined(stored):
    path, kept = stored
    into = {
        "qkv.weight": torch.zeros(16, 6).to(torch.float8_e4m3fn),
        "qkv.weight_scale_inv": torch.zeros(4, 2),
    }
    checkpoint.load(path, into, remap=[RULE, Concat("qkv.weight", [f"{name}.weight" for name in "qkv"])])
    for end in ("weight", "weight_scale_inv"):
        assert_same_bits(into[f"qkv.{end}"], torch.cat([kept[f"{name}.{end}"] for name in "qkv"]))


def test_a_join_through_blocks_is_refused(tmp_path):
    save_file(tensors(a=(6, 6), b=(4, 6)), tmp_path / "a.safetensors")
    into = {"c.weight": torch.zeros(10, 6).to(torch.float8_e4m3fn), "c.weight_scale_inv": torch.zeros(3, 2)}
    with pytest.raises(ValueError, match="does not end where blocks of fp8-block end"):
        checkpoint.load(tmp_path / "a.safetensors", into, remap=[RULE, Concat("c.weight", ["a.weight", "b.weight"])])


def test_values_are_quantized_into_targets_of_codes_and_scales(tmp_path):
    plain = {"a.weight": torch.randn(10, 7), "b.weight": torch.randn(6, 7).bfloat16()}
    save_file(plain, tmp_path / "a.safetensors")
    into = {}
    for name, value in plain.items():
        into[name] = torch.zeros(value.shape).to(torch.float8_e4m3fn)
        into[f"{name}_scale_inv"] = torch.zeros(SMALL.grid(tuple(value.shape)))
    checkpoint.load(tmp_path / "a.safetensors", into, remap=[RULE])
    for name, value in plain.items():
        codes, scales = quantized_fp8(value, SMALL)
        assert_same_bits(into[name], codes)
        assert_same_bits(into[f"{name}_scale_inv"], scales)


def test_conversions_write_values(stored, tmp_path):
    path, kept = stored
    checkpoint.convert(path, tmp_path / "b.safetensors", remap=[RULE])
    assert_all_same(load_file(tmp_path / "b.safetensors"), values(kept))
    checkpoint.convert(path, tmp_path / "f.safetensors", remap=[RULE], cast=[("[qkv].weight", torch.float32)])
    wide = values(kept, torch.float32)
    assert_all_same(load_file(tmp_path / "f.safetensors"), wide)
    assert checkpoint.verify(path, tmp_path / "b.safetensors", remap=[RULE]) == []


def test_conversions_write_codes_and_scales(tmp_path):
    plain = {"a.weight": torch.randn(3, 10, 7), "b.weight": torch.randn(6, 7).bfloat16(), "n.weight": torch.randn(9)}
    save_file(plain, tmp_path / "a.safetensors")
    made = checkpoint.convert(tmp_path / "a.safetensors", tmp_path / "b.safetensors", remap=[RULE], max_bytes=8192)
    wanted = {"n.weight": plain["n.weight"]}
    for name in ("a.weight", "b.weight"):
        wanted[name], wanted[f"{name}_scale_inv"] = quantized_fp8(plain[name], SMALL)
    assert_all_same({name: entry.read() for name, entry in made.items()}, wanted)


@pytest.mark.parametrize("name", ["fp8-row", "fp8-tensor", "int8-row", "int8-scb", "mxfp8"])
def test_conversions_write_every_format_that_can_be_written(tmp_path, name):
    plain = torch.randn(130, 64, generator=torch.Generator().manual_seed(6))
    save_file({"a.weight": plain}, tmp_path / "a.safetensors")
    rule = Quantized("*.weight", "*.scale", format=name)
    made = checkpoint.convert(tmp_path / "a.safetensors", tmp_path / "b.safetensors", remap=[rule], max_bytes=8192)
    codes, scales = quantize(plain, name)
    assert_all_same({key: entry.read() for key, entry in made.items()}, {"a.weight": codes, "a.scale": scales})
    back = checkpoint.convert(tmp_path / "b.safetensors", tmp_path / "c.safetensors", remap=[rule], cast=torch.float32)
    wanted = dequantized(codes, scales, FORMATS[name], torch.float32)
    assert_same_bits(back["a.weight"].read(), wanted)


def test_mxfp4_becomes_transposed_values(tmp_path):
    codes, scales = random_codes((2, 5, 3, 16), FORMATS["mxfp4"]), random_scales((2, 5, 3), torch.uint8)
    save_file({"e.up_blocks": codes, "e.up_scales": scales}, tmp_path / "a.safetensors")
    rules = [Quantized(), Transposed("e.up", (0, 2, 1))]
    wanted = dequantized(codes, scales, FORMATS["mxfp4"], torch.bfloat16).transpose(1, 2).contiguous()
    made = checkpoint.convert(tmp_path / "a.safetensors", tmp_path / "b.safetensors", remap=rules, max_bytes=8192)
    assert_all_same({name: entry.read() for name, entry in made.items()}, {"e.up": wanted})
    layout = Layout.chunk((2, 96, 5), 1, [1, 0])
    into = {"e.up": ShardedTensor(torch.zeros(2, 48, 5, dtype=torch.bfloat16), layout)}
    checkpoint.load(tmp_path / "a.safetensors", into, remap=rules)
    assert_same_bits(into["e.up"].shards[0], wanted[:, 48:].contiguous())


def test_blocks_of_config_json_are_used(tmp_path):
    kept = tensors(a=(8, 6))
    save_file(kept, tmp_path / "model.safetensors")
    text = '{"quantization_config": {"quant_method": "fp8", "weight_block_size": [4, 3]}}'
    (tmp_path / "config.json").write_text(text)
    into = {"a.weight": torch.zeros(8, 6, dtype=torch.bfloat16)}
    checkpoint.load(tmp_path, into, remap=[Quantized()])
    assert_same_bits(into["a.weight"], values(kept)["a.weight"])


def test_values_out_of_range_are_refused(tmp_path):
    codes, scales = torch.full((4, 3), 448.0).to(torch.float8_e4m3fn), torch.full((1, 1), 1000.0)
    save_file({"a.weight": codes, "a.weight_scale_inv": scales}, tmp_path / "a.safetensors")
    into = {"a.weight": torch.zeros(4, 3, dtype=torch.float16)}
    with pytest.raises(ValueError, match=r"12 values of 'a.weight' are beyond the range of torch.float16"):
        checkpoint.load(tmp_path / "a.safetensors", into, remap=[RULE])
    checkpoint.load(tmp_path / "a.safetensors", into, remap=[RULE], overflow="allow")
    assert into["a.weight"].isinf().all()


def test_bad_input_is_refused_in_one_error(stored, tmp_path):
    path, kept = stored
    with pytest.raises(ValueError, match=r"'q.weight' is quantized \(fp8-block\), but 'q.weight' is to be torch.int32"):
        checkpoint.load(path, {"q.weight": torch.zeros(8, 6, dtype=torch.int32)}, remap=[RULE])
    coded = {"q.weight": kept["q.weight"].clone(), "q.weight_scale_inv": torch.zeros(2, 2).bfloat16()}
    with pytest.raises(ValueError, match="are not cast"):
        checkpoint.load(path, coded, remap=[RULE])
    nothing = Quantized("*.z", "*.s", format="mxfp8")
    with pytest.raises(ValueError, match="fits nothing"):
        checkpoint.load(path, {"norm.weight": torch.zeros(6).bfloat16()}, remap=[nothing])
    del kept["k.weight_scale_inv"]
    save_file(kept, tmp_path / "lone.safetensors")
    with pytest.raises(
        CheckpointError, match=r"'k.weight' is torch.float8_e4m3fn, which are codes, but there are no scales"
    ) as error:
        checkpoint.convert(tmp_path / "lone.safetensors", tmp_path / "out.safetensors", remap=[RULE])
    assert "lone.safetensors" in str(error.value)
    assert not (tmp_path / "out.safetensors").exists()


def test_a_module_is_filled_with_values(stored):
    path, kept = stored
    with torch.device("meta"):
        module = torch.nn.ModuleDict({name: torch.nn.Linear(6, ATTENTION[name][0], bias=False) for name in "qkv"})
    module = module.to(torch.bfloat16)
    checkpoint.load(path, module, remap=[RULE])
    wanted = values(kept)
    assert_all_same(module.state_dict(), {f"{name}.weight": wanted[f"{name}.weight"] for name in "qkv"})


def test_tied_tensors_get_one_value(stored):
    path, kept = stored
    tied = torch.zeros(8, 6, dtype=torch.bfloat16)
    into = {"q.weight": tied, "head.weight": tied}
    checkpoint.load(path, into, remap=[RULE], rename=[("q.*", ["q.*", "head.*"]), ("*", "*")])
    assert_same_bits(tied, values(kept)["q.weight"])
    other = torch.zeros(4, 6, dtype=torch.bfloat16)
    with pytest.raises(CheckpointError, match="share their memory, but come from different quantized tensors"):
        checkpoint.load(path, {"k.weight": other, "v.weight": other}, remap=[RULE])


def test_the_command_line_dequantizes_and_quantizes(tmp_path):
    codes, scales = quantize(torch.randn(4, 64, generator=torch.Generator().manual_seed(9)), "mxfp8")
    save_file({"a.weight": codes, "a.weight_scale": scales}, tmp_path / "a.safetensors")
    a, b, c = (str(tmp_path / f"{name}.safetensors") for name in "abc")
    run = CliRunner().invoke
    assert run(app, ["convert", a, b, "--quantized", "auto", "--no-bar"]).exit_code == 0
    assert_same_bits(load_file(b)["a.weight"], dequantized(codes, scales, FORMATS["mxfp8"], torch.bfloat16))
    assert run(app, ["verify", a, b, "--quantized", "auto", "--no-bar"]).exit_code == 0
    again = run(app, ["convert", b, c, "--quantized", "*.weight,*.weight_scale@mxfp8", "--no-bar"])
    assert again.exit_code == 0
    assert_all_same(load_file(c), {"a.weight": codes, "a.weight_scale": scales})


def test_errors_name_the_file_that_has_codes(tmp_path):
    codes, scales = quantize(torch.ones(4, 4), "fp8-row")
    save_file({"w": codes, "w_scale": scales}, tmp_path / "c.safetensors")
    with pytest.raises(CheckpointError, match=r"c\.safetensors: 'w' has shape \(4, 4\) in the source, but \(5, 4\)"):
        checkpoint.load(tmp_path / "c.safetensors", {"w": torch.empty(5, 4)}, remap=[Quantized()])


def test_automatic_rules_say_how_to_quantize(tmp_path):
    save_file({"w": torch.ones(4, 4)}, tmp_path / "c.safetensors")
    with pytest.raises(CheckpointError, match=r"c\.safetensors: Quantized\(\).* fits nothing.*To quantize values"):
        checkpoint.convert(tmp_path / "c.safetensors", tmp_path / "d", remap=[Quantized()])
