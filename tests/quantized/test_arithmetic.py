"""quantize and dequantize give the same bits as the arithmetic on whole tensors, on any box."""

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from references import (
    assert_same_bits,
    dequantized,
    factors,
    largest,
    quantized_fp8,
    random_codes,
    random_scales,
    repeated,
)

from shardwise import Box
from shardwise.quantized import FORMATS, dequantize, quantize
from shardwise.quantized.arithmetic import (
    Scaling,
    dequantize_box,
    encode_box,
    largest_magnitudes,
)

DTYPES = [torch.float32, torch.bfloat16, torch.float16]
ENCODED = [name for name in FORMATS if name != "mxfp4"]


@st.composite
def formats(draw, names=tuple(FORMATS)):
    found = FORMATS[draw(st.sampled_from(names))]
    return (
        found.with_block(draw(st.tuples(st.integers(1, 5), st.integers(1, 5)))) if found.name == "fp8-block" else found
    )


@st.composite
def shapes(draw, format):
    lead = draw(st.lists(st.integers(1, 3), max_size=2))
    if format.block[1] == 32:
        return (*lead, draw(st.integers(1, 7)), 32 * draw(st.integers(1, 3)))
    return (*lead, draw(st.integers(1, 12)), draw(st.integers(1, 12)))


@st.composite
def boxes(draw, shape):
    edges = [sorted(draw(st.tuples(st.integers(0, size), st.integers(0, size)))) for size in shape]
    return Box(tuple(lo for lo, _ in edges), tuple(hi for _, hi in edges))


@st.composite
def quantized(draw):
    format = draw(formats())
    shape = draw(shapes(format))
    scale = draw(st.sampled_from([one for one in format.scales if one != torch.float8_e8m0fnu]))
    grid = draw(st.sampled_from(format.scales_shapes(shape)))
    codes = random_codes(format.codes_shape(shape), format, draw(st.integers(0, 99)))
    return format, shape, codes, random_scales(grid, scale, draw(st.integers(0, 99)))


@given(quantized(), st.sampled_from(DTYPES))
def test_whole_tensors_are_dequantized_bit_for_bit(tensor, dtype):
    format, _, codes, scales = tensor
    assert_same_bits(dequantize(codes, scales, format, dtype=dtype), dequantized(codes, scales, format, dtype))


@given(quantized(), st.sampled_from(DTYPES), st.data())
def test_any_box_is_dequantized_like_the_whole_tensor(tensor, dtype, data):
    format, shape, codes, scales = tensor
    box = data.draw(boxes(shape))
    here, there = format.codes_box(box), format.scales_box(box, shape, tuple(scales.shape))
    out = torch.empty(box.shape, dtype=dtype)
    dequantize_box(out, codes[here.slices], scales[there.slices], format, box, shape)
    assert_same_bits(out, dequantized(codes, scales, format, dtype)[box.slices])


@given(formats(ENCODED), st.data())
def test_the_largest_magnitudes_of_boxes_join_to_those_of_the_whole(format, data):
    shape = data.draw(shapes(format))
    values = torch.randn(shape, generator=torch.Generator().manual_seed(1)).to(data.draw(st.sampled_from(DTYPES)))
    cut = data.draw(st.integers(0, shape[-1]))
    parts = [Box((0,) * len(shape), (*shape[:-1], cut)), Box((*[0] * (len(shape) - 1), cut), shape)]
    joined = torch.zeros(format.grid(shape))
    for box in parts:
        touched = format.grid_box(box, shape)
        found = largest_magnitudes(values[box.slices], format, box, shape)
        joined[touched.slices] = torch.maximum(joined[touched.slices], found)
    assert_same_bits(joined, largest(values, format))


@given(formats(ENCODED), st.data())
def test_any_box_is_encoded_like_the_whole_tensor(format, data):
    shape = data.draw(shapes(format))
    values = torch.randn(shape, generator=torch.Generator().manual_seed(2))
    codes, _ = quantize(values, format)
    forward = Scaling.of(largest(values, format), format, torch.float32).forward
    if format.name == "mxfp8":
        forward = Scaling.of(largest(values, format), format, torch.uint8).forward
    box = data.draw(boxes(shape))
    out = torch.empty(box.shape, dtype=format.codes)
    encode_box(out, values[box.slices], forward[format.grid_box(box, shape).slices], format, box, shape)
    assert_same_bits(out, codes[box.slices])


@given(formats(("fp8-block", "fp8-row", "fp8-tensor")), st.data(), st.sampled_from(DTYPES))
def test_fp8_is_quantized_bit_for_bit(format, data, dtype):
    shape = data.draw(shapes(format))
    values = torch.randn(shape, generator=torch.Generator().manual_seed(3)).to(dtype)
    values[..., : shape[-1] // 2] = 0
    codes, scales = quantize(values, format)
    wanted, grid = quantized_fp8(values, format)
    assert_same_bits(codes, wanted)
    assert_same_bits(scales, grid)


def test_large_tensors_take_several_chunks_of_rows(monkeypatch):
    monkeypatch.setattr("shardwise.quantized.arithmetic.CELLS", 2**14)
    format = FORMATS["fp8-block"]
    codes = random_codes((300, 1000), format)
    scales = random_scales((3, 8), torch.float32)
    wanted = dequantized(codes, scales, format, torch.bfloat16)
    assert_same_bits(dequantize(codes, scales, "fp8-block"), wanted)
    again, grid = quantize(wanted, "fp8-block")
    assert_same_bits(again, quantized_fp8(wanted, format)[0])
    assert_same_bits(grid, quantized_fp8(wanted, format)[1])


@pytest.mark.parametrize("scale", [torch.uint8, torch.float8_e8m0fnu])
def test_mxfp8_scales_are_powers_of_two_that_no_value_exceeds(scale):
    values = torch.randn(5, 96, generator=torch.Generator().manual_seed(4)) * 1000
    codes, scales = quantize(values, "mxfp8", scales=scale)
    power = factors(scales) if scale == torch.uint8 else scales.to(torch.float32)
    assert (largest(values, FORMATS["mxfp8"]) / power <= 448).all()
    assert (largest(values, FORMATS["mxfp8"]) / power > 224).all()
    exact = (values / repeated(power, FORMATS["mxfp8"], (5, 96))).to(torch.float8_e4m3fn)
    assert_same_bits(codes, exact)


def test_all_codes_and_exponents_of_mxfp4_are_those_of_ldexp():
    byte = torch.arange(256, dtype=torch.uint8)
    codes = byte.view(1, 16, 16).expand(255, 16, 16).contiguous()
    scales = byte[:255].view(255, 1).expand(255, 16).contiguous()
    table = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6], dtype=torch.bfloat16)
    both = torch.stack([table[(codes & 15).long()], table[(codes >> 4).long()]], -1).flatten(2)
    wanted = torch.ldexp(both, scales.int()[..., None] - 127, out=torch.empty_like(both)).flatten(1)
    found = dequantize(codes, scales, "mxfp4")
    np.testing.assert_array_equal(found.float().numpy(), wanted.float().numpy())


def test_the_last_exponent_is_not_a_number():
    scales = torch.tensor([[255, 127]], dtype=torch.uint8)
    values = dequantize(torch.zeros(1, 2, 16, dtype=torch.uint8), scales, "mxfp4")
    assert values.isnan().tolist() == [[True] * 32 + [False] * 32]


def test_int8_with_scb_multiplies_by_the_reciprocal_of_127():
    codes = torch.arange(-127, 128, dtype=torch.int8).view(5, 51)
    scales = torch.rand(5, generator=torch.Generator().manual_seed(5)) * 9
    wanted = codes * scales.view(-1, 1) * 7.874015718698502e-3
    assert_same_bits(dequantize(codes, scales, "int8-scb", dtype=torch.float32), wanted)


@pytest.mark.parametrize("scale", [1e-40, 3e-30, 0.37, 1.0, 1e30, 3e38])
def test_all_codes_of_fp8_are_those_of_torch(scale):
    codes = torch.arange(256, dtype=torch.uint8).view(16, 16).view(torch.float8_e4m3fn)
    for some in (codes, codes[:, :15].contiguous(), codes.T):
        for dtype in DTYPES:
            found = dequantize(some, torch.full((1, 1), scale), "fp8-block", dtype=dtype)
            wanted = (some.to(torch.float32) * torch.tensor(scale)).to(dtype)
            np.testing.assert_array_equal(found.float().numpy(), wanted.float().numpy())


def test_values_too_small_for_a_scale_become_zero():
    codes, scales = quantize(torch.tensor([[1e-37, 0.0]]), "fp8-block")
    assert codes.float().tolist() == [[0, 0]]
    assert scales.tolist() == [[1]]


def test_scales_that_would_be_rounded_are_refused():
    with pytest.raises(TypeError, match=r"scales of torch.float32 or .*, not torch.bfloat16"):
        quantize(torch.randn(4, 4), "fp8-block", scales=torch.bfloat16)


def test_nan_codes_stay_nan():
    codes = torch.tensor([[127, 255, 1]], dtype=torch.uint8).view(torch.float8_e4m3fn)
    values = dequantize(codes, torch.ones(1, 1), "fp8-block", dtype=torch.float32)
    assert values.isnan().tolist() == [[True, True, False]]


@pytest.mark.parametrize("bad", [float("inf"), float("nan")])
def test_values_that_are_not_finite_are_refused(bad):
    with pytest.raises(ValueError, match="not finite"):
        quantize(torch.tensor([[1.0, bad]]), "fp8-block")


def test_wrong_dtypes_and_shapes_are_refused_with_the_right_ones():
    codes, scales = quantize(torch.randn(5, 4), "fp8-row")
    with pytest.raises(TypeError, match=r"codes of torch.float8_e4m3fn with scales of torch.float32 are not int8-row"):
        dequantize(codes, scales, "int8-row")
    with pytest.raises(
        ValueError, match=r"have shape \(4, 1\), but codes of shape \(5, 4\) in fp8-row need \(5, 1\) or"
    ):
        dequantize(codes, scales[:4], "fp8-row")
    with pytest.raises(ValueError, match="'fp9' is not a format of quantized tensors: there are fp8-block"):
        dequantize(codes, scales, "fp9")
    with pytest.raises(ValueError, match="cannot be quantized to it"):
        quantize(torch.randn(5, 32), "mxfp4")


@pytest.mark.parametrize("name", [name for name in FORMATS if name != "mxfp4"])
@pytest.mark.parametrize("shape", [(0, 7), (5, 0), (2, 0, 3)])
def test_no_values_have_scales_of_the_right_shape(name, shape):
    codes, scales = quantize(torch.empty(shape), name)
    assert (codes.shape, scales.shape) == (shape, FORMATS[name].grid(shape))
    assert dequantize(codes, scales, name).shape == shape


@pytest.mark.parametrize("dtype", [torch.int32, torch.bool, torch.float8_e4m3fn])
def test_only_floating_point_values_are_quantized(dtype):
    with pytest.raises(TypeError, match=f"only floating-point values can be quantized, not {dtype}"):
        quantize(torch.ones(2, 4).to(dtype), "fp8-row")
