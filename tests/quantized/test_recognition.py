"""Codes and scales are found by names, dtypes and shapes; what does not fit is named in one error."""

import pytest
import torch

from shardwise.quantized import Quantized, recognize

FP8 = torch.float8_e4m3fn


def tensors(**given):
    return {
        name.replace("__", "."): torch.empty(shape, dtype=dtype, device="meta")
        for name, (shape, dtype) in given.items()
    }


def found(known, *rules, config=None):
    several = recognize(known, rules or [Quantized()], config)
    return {one.value: (one.codes, one.scales, one.format.name) for one in several.values()}


def test_the_conventions_of_quantizers_are_known():
    known = tensors(
        a__weight=((256, 384), FP8),
        a__weight_scale_inv=((2, 3), torch.float32),
        b__weight=((256, 384), FP8),
        b__weight_scale=((), torch.float32),
        c__weight=((256, 384), FP8),
        c__weight_scale=((256, 1), torch.bfloat16),
        d__weight=((256, 384), torch.int8),
        d__SCB=((256,), torch.float32),
        e__weight=((256, 384), FP8),
        e__weight_scale=((256, 12), torch.uint8),
        f__weight=((256, 384), torch.int8),
        f__weight_scale=((256,), torch.float32),
        g__up_blocks=((2, 8, 3, 16), torch.uint8),
        g__up_scales=((2, 8, 3), torch.uint8),
        h__gate_up=((2, 256, 128), FP8),
        h__gate_up_scale_inv=((2, 2, 1), torch.float32),
        norm__weight=((256,), torch.bfloat16),
        mask=((256,), torch.uint8),
    )
    assert found(known) == {
        "a.weight": ("a.weight", "a.weight_scale_inv", "fp8-block"),
        "b.weight": ("b.weight", "b.weight_scale", "fp8-tensor"),
        "c.weight": ("c.weight", "c.weight_scale", "fp8-row"),
        "d.weight": ("d.weight", "d.SCB", "int8-scb"),
        "e.weight": ("e.weight", "e.weight_scale", "mxfp8"),
        "f.weight": ("f.weight", "f.weight_scale", "int8-row"),
        "g.up": ("g.up_blocks", "g.up_scales", "mxfp4"),
        "h.gate_up": ("h.gate_up", "h.gate_up_scale_inv", "fp8-block"),
    }


def test_config_json_gives_the_size_of_blocks():
    known = tensors(w=((256, 384), FP8), w_scale_inv=((4, 6), torch.float32))
    config = {"quantization_config": {"quant_method": "fp8", "weight_block_size": [64, 64]}}
    assert recognize(known, [Quantized()], config)["w"].format.block == (64, 64)
    with pytest.raises(
        ValueError, match=r"have shape \(4, 6\), but codes of shape \(256, 384\) in fp8-block need \(2, 3\)"
    ):
        recognize(known, [Quantized()])


def test_rules_give_other_names():
    known = tensors(a__q=((8, 8), torch.int8), a__s=((8,), torch.float32), b__q=((8, 8), torch.bfloat16))
    rule = Quantized("*.q", "*.s", format="int8-row", value="*.w")
    assert found(known, rule) == {"a.w": ("a.q", "a.s", "int8-row")}


@pytest.mark.parametrize(
    ("known", "error"),
    [
        (tensors(w_scale_inv=((2, 2), torch.float32)), "'w_scale_inv' is a scale, but its codes 'w' are not there"),
        (tensors(m__SCB=((2,), torch.float32)), "'m.SCB' is a scale, but its codes 'm.weight' are not there"),
        (
            tensors(w=((256, 256), FP8)),
            "'w' is torch.float8_e4m3fn, which are codes, but there are no scales 'w_scale_inv' or",
        ),
        (
            tensors(w=((256, 256), FP8), w_scale_inv=((3, 2), torch.float32)),
            r"the scales of 'w' have shape \(3, 2\), but codes of shape \(256, 256\) in fp8-block need \(2, 2\)",
        ),
        (
            tensors(w=((256, 256), FP8), w_scale_inv=((2, 2), torch.int32)),
            "'w_scale_inv' is torch.int32, and 'w' is torch.float8_e4m3fn: no format has these",
        ),
        (
            tensors(x_blocks=((4, 3, 8), torch.uint8), x_scales=((4, 3), torch.uint8)),
            r"'x_blocks' has shape \(4, 3, 8\), but codes in mxfp4 have 16 bytes in the last dim",
        ),
    ],
)
def test_what_does_not_fit_is_named(known, error):
    with pytest.raises(ValueError, match=error):
        recognize(known, [Quantized()])


def test_names_of_rules_are_checked_too():
    rule = Quantized("*.q", "*.s", format="int8-row")
    with pytest.raises(ValueError, match=r"'a.q' is torch.int8, which are codes, but there are no scales 'a.s'"):
        recognize(tensors(a__q=((8, 8), torch.int8)), [rule])
    with pytest.raises(ValueError, match=r"'a.s' is a scale, but its codes 'a.q' are not there"):
        recognize(tensors(a__s=((8,), torch.float32)), [rule])


def test_unknown_methods_and_bad_blocks_of_a_config_are_refused():
    with pytest.raises(ValueError, match="quant_method 'gptq'"):
        recognize({}, [Quantized()], {"quantization_config": {"quant_method": "gptq"}})
    with pytest.raises(ValueError, match="weight_block_size 7"):
        recognize({}, [Quantized()], {"quantization_config": {"quant_method": "fp8", "weight_block_size": 7}})


@pytest.mark.parametrize(
    "given", [{"codes": "a"}, {"format": "mxfp4"}, {"codes": "a", "scales": "b"}, {"dtype": torch.int8}]
)
def test_rules_that_say_too_little_are_refused(given):
    with pytest.raises(TypeError, match="Quantized"):
        Quantized(**given)
