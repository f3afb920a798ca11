"""Reductions: in the order of the terms, wide enough, block by block."""

from functools import reduce as fold

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from threads import FORMS, forms, plain, spaced, tensors_of

from shardwise import ExchangeError
from shardwise.exchange import reduce as reducing
from shardwise.exchange.reduce import accumulator, blocks, check, reduce
from shardwise.notation import OPERATIONS
from shardwise.testing.arrays import COMBINE

NUMPY = [np.bool_, np.int8, np.uint8, np.int16, np.uint16, np.int32, np.uint32, np.int64, np.uint64]
SHORT = [torch.bfloat16, torch.float16, torch.float8_e4m3fn, torch.float8_e5m2]
NUMBERS = {torch.int64: np.int64, torch.float64: np.float64}
LONG = [torch.float32, torch.float64, torch.complex64, torch.complex128]
WHOLE = [torch.from_numpy(np.zeros(1, dtype)).dtype for dtype in NUMPY]
FRACTIONS = [op for op in OPERATIONS if op not in reducing.BITWISE]
pytestmark = pytest.mark.usefixtures("small_blocks")


@pytest.fixture(scope="module")
def small_blocks():
    """Blocks of a few cells, so that small tensors have many."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(reducing, "BLOCK", 7)
        yield


def reduced(terms, op, *, form=plain, becomes=None):
    target = form(tuple(terms[0].shape), becomes or terms[0].dtype)
    reduce(target, terms, op)
    return target


def fractions(dtype, count=4, seed=0):
    """Terms of very different size, so that their order and every rounding shows."""
    random = np.random.default_rng(seed)
    values = random.standard_normal((count, 5, 6)) * 10.0 ** random.integers(-2, 3, (count, 5, 6))
    return list(torch.from_numpy(values).to(dtype))


def exact(op, values):
    """What whole numbers reduce to, by numpy."""
    return fold(COMBINE[op], values) if op != "avg" else sum(values) / len(values)


def one_by_one(op, terms, wide):
    """The terms, one after the other, in a wide dtype; rounded once."""
    apply = {"sum": torch.add, "avg": torch.add, "product": torch.mul, "max": torch.maximum, "min": torch.minimum}
    value = fold(apply[op], [term.to(wide) for term in terms])
    return (value / len(terms) if op == "avg" else value).to(terms[0].dtype)


@pytest.mark.parametrize("op", OPERATIONS)
@pytest.mark.parametrize("dtype", NUMPY, ids=lambda dtype: dtype.__name__)
def test_whole_numbers_reduce_as_in_numpy_also_where_they_wrap(op, dtype):
    random = np.random.default_rng(1)
    raw = random.integers(0, 256, (4, 5, 6 * np.dtype(dtype).itemsize)).astype(np.uint8)
    values = list(raw % 2 == 1 if dtype is np.bool_ else raw.view(dtype))
    terms = [torch.from_numpy(value) for value in values]
    try:
        check(op, terms[0].dtype)
    except ExchangeError:
        assert op == "avg" or (dtype is np.uint64 and op in ("max", "min"))
    else:
        np.testing.assert_array_equal(reduced(terms, op).numpy(), exact(op, values), strict=True)


@pytest.mark.parametrize("op", FRACTIONS)
@pytest.mark.parametrize("dtype", LONG, ids=str)
def test_long_floats_are_reduced_one_term_after_the_other(op, dtype):
    if dtype.is_complex and op in ("max", "min"):
        with pytest.raises(ExchangeError, match=f"terms of dtype {dtype} cannot be reduced by '{op}'"):
            check(op, dtype)
        return
    check(op, dtype)
    terms = fractions(dtype)
    torch.testing.assert_close(reduced(terms, op), one_by_one(op, terms, dtype), rtol=0, atol=0)


@pytest.mark.parametrize("op", FRACTIONS)
@pytest.mark.parametrize("dtype", SHORT, ids=str)
def test_short_floats_are_reduced_in_float32_and_rounded_once(op, dtype):
    check(op, dtype)
    terms = [term.to(dtype) for term in fractions(torch.float32)]
    found, wanted = reduced(terms, op), one_by_one(op, terms, torch.float32)
    torch.testing.assert_close(found.float(), wanted.float(), rtol=0, atol=0, equal_nan=True)


def test_a_sum_of_bfloat16_keeps_what_rounding_every_term_would_lose():
    terms = [torch.tensor([256.0], dtype=torch.bfloat16), *[torch.tensor([1.0], dtype=torch.bfloat16)] * 8]
    assert fold(torch.add, terms).item() == 256.0
    assert reduced(terms, "sum").item() == 264.0


def test_the_order_of_terms_is_kept():
    large, small = torch.tensor([1e16], dtype=torch.float64), torch.tensor([1.0], dtype=torch.float64)
    assert reduced([large, small, -large, small], "sum").item() == 1.0
    assert reduced([large, -large, small, small], "sum").item() == 2.0


@pytest.mark.parametrize("dtype", WHOLE, ids=str)
def test_averages_of_integers_are_refused_as_torch_does(dtype):
    with pytest.raises(ExchangeError, match=f"terms of dtype {dtype} cannot be reduced by 'avg': .*Cast the terms"):
        check("avg", dtype)


def test_the_largest_of_numbers_that_are_none_is_none():
    terms = [torch.tensor([1.0, float("nan")]), torch.tensor([float("nan"), 2.0])]
    for op in ("max", "min"):
        assert reduced(terms, op).isnan().all()


@pytest.mark.parametrize("op", reducing.BITWISE)
@pytest.mark.parametrize("dtype", [*SHORT, *LONG], ids=str)
def test_bits_of_fractions_are_not_reduced(op, dtype):
    with pytest.raises(ExchangeError, match=f"terms of dtype {dtype} cannot be reduced by '{op}': there is no such"):
        check(op, dtype)


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("op", OPERATIONS)
def test_terms_and_target_may_lie_in_memory_in_any_way(op, form):
    dtype = torch.float64 if op == "avg" else torch.int64
    values = [v.astype(NUMBERS[dtype]) for v in np.random.default_rng(2).integers(-9, 9, (3, 4, 3, 2))]
    before = tensors_of(values, dtype, form)
    found = reduced(before, op, form=spaced)
    np.testing.assert_array_equal(found.numpy(), exact(op, values))
    for term, value in zip(before, values, strict=True):  # terms are only read
        np.testing.assert_array_equal(term.numpy(), value)


def test_a_target_of_another_dtype_gets_the_value_as_it_is_rounded():
    terms = [torch.tensor([256.0]).bfloat16(), torch.tensor([1.0]).bfloat16()]
    assert reduced(terms, "sum").item() == 256.0
    assert reduced(terms, "sum", becomes=torch.float32).item() == 256.0


@pytest.mark.parametrize("shape", [(), (0,), (3, 0), (0, 9), (9, 0, 9)], ids=str)
def test_tensors_of_no_dims_or_no_cells_reduce_too(shape):
    terms = [torch.full(shape, 2), torch.full(shape, 5)]
    torch.testing.assert_close(reduced(terms, "sum"), torch.full(shape, 7), rtol=0, atol=0)


@given(st.lists(st.integers(0, 12), max_size=4).map(tuple))
@settings(max_examples=60)
def test_blocks_cover_every_cell_once_and_are_small(shape):
    found = list(blocks(shape))
    count = np.zeros(shape, dtype=np.int64)
    for at in found:
        count[(*at, ...)] += 1
        assert count[(*at, ...)].size <= reducing.BLOCK
    np.testing.assert_array_equal(count, np.ones(shape))


def test_what_fits_a_block_is_not_cut():
    assert list(blocks((7,))) == list(blocks((1, 7, 1))) == list(blocks(())) == [()]
    assert len(list(blocks((8,)))) == 2


def test_accumulators_are_as_wide_as_they_have_to_be():
    assert {accumulator(dtype) for dtype in SHORT} == {torch.float32}
    assert [accumulator(dtype) for dtype in LONG] == LONG
    assert {accumulator(dtype) for dtype in (torch.uint16, torch.uint32, torch.uint64)} == {torch.int64}
    assert accumulator(torch.int8) == torch.int8


@given(forms, forms, st.sampled_from(OPERATIONS), st.integers(2, 5))
@settings(max_examples=30)
def test_any_number_of_terms_reduces_in_any_memory(form, other, op, count):
    dtype = torch.float64 if op == "avg" else torch.int64
    values = [v.astype(NUMBERS[dtype]) for v in np.random.default_rng(count).integers(-9, 9, (count, 3, 4))]
    found = reduced(tensors_of(values, dtype, form), op, form=other)
    np.testing.assert_array_equal(found.numpy(), exact(op, values))
