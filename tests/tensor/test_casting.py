"""Which casts have to be named, and which values they lose: against the casts of torch, and the names of the world."""

import itertools
from dataclasses import dataclass

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from shardwise.errors import RefusedValueError
from shardwise.exchange.overflow import Loss, check_overflow, loss, may_overflow
from shardwise.job.casts import PLAIN, Change, check_change, codes_of, scales_of

F8, I8, U8, I32, F32 = torch.float8_e4m3fn, torch.int8, torch.uint8, torch.int32, torch.float32
FLOATS = (*PLAIN, F8, torch.float8_e5m2, torch.float8_e4m3fnuz, torch.float8_e5m2fnuz)
INTEGERS = (I8, U8, torch.int16, torch.uint16, I32, torch.uint32, torch.int64, torch.uint64)


@dataclass
class Typed:
    dtype: torch.dtype


def typed(dtypes):
    return {name: Typed(dtype) for name, dtype in dtypes.items()}


# --- which values are lost -------------------------------------------------------------------------------------------


def is_lost(value, cast, becomes):
    """By Python's numbers: a finite value that becomes none, or one that is beyond what the dtype can hold."""
    if not becomes.is_floating_point:
        limits = torch.iinfo(becomes)
        return not (value == value and abs(value) != float("inf") and limits.min <= int(value) <= limits.max)
    if torch.tensor([float("inf")]).to(becomes).float().isinf().item():
        return abs(value) < float("inf") and not abs(cast) < float("inf")
    return abs(value) > torch.finfo(becomes).max


@given(st.sampled_from(FLOATS), st.sampled_from(FLOATS + INTEGERS), st.lists(st.floats(width=32), max_size=8))
def test_values_of_floats_are_lost_as_torch_casts_them(dtype, becomes, values):
    given = torch.tensor(values, dtype=F32).to(dtype)
    if (dtype, becomes) == (torch.float32, torch.bfloat16):
        given = given.clamp(-3e38, 3e38)  # beyond that it is not looked at
    cast = given.to(becomes)
    expected = [value for value, one in zip(given.tolist(), cast.tolist(), strict=True) if is_lost(value, one, becomes)]
    assert loss(given, becomes).count == (len(expected) if dtype != becomes else 0)


@given(st.sampled_from(INTEGERS), st.sampled_from(INTEGERS + FLOATS), st.data())
def test_values_of_integers_are_lost_as_torch_casts_them(dtype, becomes, data):
    limits = torch.iinfo(dtype)
    edges = st.sampled_from([limits.min, limits.max]) | st.integers(limits.min, limits.max)
    given = torch.tensor(data.draw(st.lists(edges, max_size=8)), dtype=dtype)
    pairs = zip(given.tolist(), given.to(becomes).tolist(), strict=True)
    assert loss(given, becomes).count == sum(is_lost(value, one, becomes) for value, one in pairs)


@given(st.lists(st.complex_numbers(), max_size=8))
def test_both_parts_of_complex_values_are_looked_at(values):
    given = torch.tensor(values, dtype=torch.complex128)
    parts = torch.view_as_real(given)
    assert loss(given, torch.complex64) == loss(parts, torch.float32)


def test_casts_that_are_not_looked_at_lose_nothing():
    for dtype, becomes in itertools.product((*FLOATS, *INTEGERS, torch.bool), repeat=2):
        known = (dtype, becomes) == (torch.float32, torch.bfloat16) or becomes == torch.bool
        if not known and not may_overflow(dtype, becomes):
            loses_nothing(dtype, becomes)


def loses_nothing(dtype, becomes):
    limits = (torch.finfo if dtype.is_floating_point else torch.iinfo)(dtype) if dtype != torch.bool else None
    ends = [0, 1] if limits is None else [limits.min, 0, limits.max]
    special = [float("inf"), float("-inf"), float("nan")] if dtype.is_floating_point else []
    given = torch.tensor([*ends, *special], dtype=torch.float64 if special else dtype).to(dtype)
    cast = given.to(becomes).double()
    assert cast.isfinite().tolist() == given.double().isfinite().tolist(), (dtype, becomes)


def test_the_largest_value_and_the_count_are_told():
    given = torch.zeros(300, 300)
    given[7, 5], given[299, 299], given[0, 0] = -1e9, 7e4, float("inf")
    assert loss(given, torch.float16) == Loss(2, 1e9)
    assert loss(given.t(), torch.float16) == Loss(2, 1e9)
    assert loss(given[::2, ::3], torch.float16) == Loss()
    assert loss(given, torch.bfloat16) == Loss()
    assert loss(torch.tensor(7e4), torch.float16) == Loss(1, 7e4)
    assert loss(torch.zeros(0), torch.float16) == Loss()


def test_infinities_that_saturate_are_lost():
    assert loss(torch.tensor([float("inf"), float("nan"), 1.0]), F8) == Loss(1, float("inf"))
    assert loss(torch.tensor([float("nan"), -0.5, 3.9]), U8).count == 1


@pytest.mark.parametrize("overflow", [None, True, "Allow", "ignore"])
def test_other_words_are_refused(overflow):
    with pytest.raises(RefusedValueError, match="overflow= must be 'refuse' or 'allow'"):
        check_overflow(overflow)


# --- which casts have to be named ------------------------------------------------------------------------------------

EVERYTHING = (*FLOATS, *INTEGERS, torch.bool, torch.complex64, torch.complex128)


def test_only_plain_floats_are_cast_without_a_name():
    for dtype, becomes in itertools.product(EVERYTHING, repeat=2):
        is_cast_by_name_unless_plain(dtype, becomes)


def is_cast_by_name_unless_plain(dtype, becomes):
    change = Change("w", "w", dtype, becomes)
    if dtype == becomes or (dtype in PLAIN and becomes in PLAIN):
        check_change(change, typed({"w": dtype}), named=False)
        return
    with pytest.raises(RefusedValueError, match=f"'w'.*{dtype}|imaginary"):
        check_change(change, typed({"w": dtype}), named=False)
    if not dtype.is_complex or becomes.is_complex:
        check_change(change, typed({"w": dtype}), named=True)


QUANTIZED = {  # the codes, and what belongs to them
    "deepseek": ("a.weight", {"a.weight": F8, "a.weight_scale_inv": F32}),
    "vllm": ("a.weight", {"a.weight": F8, "a.weight_scale": F32, "a.input_scale": F32}),
    "modelopt": ("a.weight", {"a.weight": U8, "a.weight_scale": F8, "a.weight_scale_2": F32, "a.input_scale": F32}),
    "bitsandbytes int8": ("a.weight", {"a.weight": I8, "a.SCB": F32}),
    "bitsandbytes nf4": (
        "a.weight",
        {
            "a.weight": U8,
            "a.weight.absmax": U8,
            "a.weight.nested_absmax": F32,
            "a.weight.quant_map": F32,
            "a.weight.nested_quant_map": F32,
            "a.weight.quant_state.bitsandbytes__nf4": U8,
        },
    ),
    "gptq": ("a.qweight", {"a.qweight": I32, "a.qzeros": I32, "a.scales": torch.float16, "a.g_idx": I32}),
    "mxfp4": ("a.up_proj_blocks", {"a.up_proj_blocks": U8, "a.up_proj_scales": U8}),
    "compressed": ("a.weight_packed", {"a.weight_packed": I32, "a.weight_scale": F32, "a.weight_zero_point": I32}),
    "comfy": ("a.weight", {"a.weight": F8, "a.scale_weight": F32, "a.scale_input": F32}),
    "hqq": ("a.W_q", {"a.W_q": U8, "a.scale": F32, "a.zero": F32}),
    "torchao": ("a.weight._data", {"a.weight._data": F8, "a.weight._scale": F32}),
    "at the top": ("w", {"w": I8, "SCB": F32}),
    "below it": ("w", {"w": I8, "w.scales": F32}),
}
PLAIN_NEIGHBOURS = {"b.weight": F32, "b.weight_scale": F32, "b.scale": F32, "logit_scale": F32, "b.ids": torch.int64}


@pytest.mark.parametrize("kind", QUANTIZED)
def test_the_scales_of_codes_are_known_by_the_names_of(kind):
    codes, dtypes = QUANTIZED[kind]
    tensors = typed(PLAIN_NEIGHBOURS | dtypes)
    scales = [name for name in dtypes if name != codes]
    assert scales_of(codes, tensors) == scales
    assert [codes_of(name, tensors) for name in scales] == [codes] * len(scales)
    assert [codes_of(name, tensors) for name in PLAIN_NEIGHBOURS] == [None] * len(PLAIN_NEIGHBOURS)
    with pytest.raises(RefusedValueError, match="quantized codes") as refused:
        check_change(Change(codes, "w", dtypes[codes], torch.bfloat16), tensors, named=False)
    assert all(repr(name) in str(refused.value) for name in scales[:4])
    assert "cast=[('w', torch.bfloat16)]" in str(refused.value)
    assert "--cast 'w=bfloat16'" in str(refused.value)


def test_scales_of_codes_are_cast_by_name_alone():
    tensors = typed({"w": F8, "w_scale_inv": F32})
    change = Change("w_scale_inv", "w_scale_inv", F32, torch.bfloat16)
    with pytest.raises(RefusedValueError, match="a scale of 'w', whose values are quantized codes"):
        check_change(change, tensors, named=False)
    check_change(change, tensors, named=True)


def test_scales_beside_a_target_of_codes_are_named():
    with pytest.raises(RefusedValueError, match="'w_scale' stands beside it"):
        check_change(Change("w", "w", F32, I8), typed({"w": F32}), typed({"w": I8, "w_scale": F32}), named=False)


@given(st.text(st.sampled_from("a._scale0SCBinv"), max_size=400))
def test_any_name_is_read_at_once(name):
    assert codes_of(name, {}) is None
