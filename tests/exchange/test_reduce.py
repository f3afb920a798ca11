"""Reductions: in a tree that the number of terms makes, wide enough, block by block."""

from functools import reduce as fold

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from oracle import in_a_tree
from threads import FORMS, forms, plain, spaced, tensors_of

from shardwise import ExchangeError
from shardwise.exchange import reduce as reducing
from shardwise.exchange.reduce import Rule, accumulator, blocks, check, reduce, sum_dtype
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
    reduce(target, terms, Rule(op), terms[0].dtype)
    return target


def fractions(dtype, count=4, seed=0):
    """Terms of very different size, so that their order and every rounding shows."""
    random = np.random.default_rng(seed)
    values = random.standard_normal((count, 5, 6)) * 10.0 ** random.integers(-2, 3, (count, 5, 6))
    return list(torch.from_numpy(values).to(dtype))


def exact(op, values):
    """What whole numbers reduce to, by numpy."""
    return fold(COMBINE[op], values) if op != "avg" else sum(values) / len(values)


def by_the_tree(op, terms, wide):
    """The terms, two and two, in a wide dtype; rounded once."""
    apply = {"sum": torch.add, "avg": torch.add, "product": torch.mul, "max": torch.maximum, "min": torch.minimum}
    value = in_a_tree(apply[op], [term.to(wide) for term in terms])
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
def test_long_floats_are_reduced_in_the_tree_of_their_number(op, dtype):
    if dtype.is_complex and op in ("max", "min"):
        with pytest.raises(ExchangeError, match=f"terms of dtype {dtype} cannot be reduced by '{op}'"):
            check(op, dtype)
        return
    check(op, dtype)
    terms = fractions(dtype)
    torch.testing.assert_close(reduced(terms, op), by_the_tree(op, terms, dtype), rtol=0, atol=0)


@pytest.mark.parametrize("op", FRACTIONS)
@pytest.mark.parametrize("dtype", SHORT, ids=str)
def test_short_floats_are_reduced_in_float32_and_rounded_once(op, dtype):
    check(op, dtype)
    terms = [term.to(dtype) for term in fractions(torch.float32)]
    found, wanted = reduced(terms, op), by_the_tree(op, terms, torch.float32)
    torch.testing.assert_close(found.float(), wanted.float(), rtol=0, atol=0, equal_nan=True)


def test_a_sum_of_bfloat16_keeps_what_rounding_every_term_would_lose():
    terms = [torch.tensor([256.0], dtype=torch.bfloat16), *[torch.tensor([1.0], dtype=torch.bfloat16)] * 8]
    assert fold(torch.add, terms).item() == 256.0
    assert reduced(terms, "sum").item() == 264.0


def test_neighbours_are_added_first():
    large, small = torch.tensor([1e16], dtype=torch.float64), torch.tensor([1.0], dtype=torch.float64)
    assert reduced([large, small, -large, small], "sum").item() == 0.0
    assert reduced([large, -large, small, small], "sum").item() == 2.0
    assert reduced([large, small, -large], "sum").item() == 0.0


@pytest.mark.parametrize("op", FRACTIONS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float8_e5m2, torch.complex64], ids=str)
@given(count=st.integers(2, 21), data=st.data())
@settings(max_examples=10)
def test_sums_of_subtrees_in_place_of_their_terms_change_no_bit(op, dtype, count, data):
    if dtype.is_complex and op in ("max", "min"):
        return
    terms = [term.to(dtype) for term in fractions(torch.complex64 if dtype.is_complex else torch.float32, count)]
    sizes = data.draw(subtrees(count))
    edges = np.cumsum([0, *sizes]).tolist()
    sums = [torch.empty(terms[0].shape, dtype=sum_dtype(dtype)) for _ in sizes]
    for one, first, last in zip(sums, edges, edges[1:], strict=False):
        reduce(one, terms[first:last], Rule(op, partial=True), dtype)
    found = torch.empty_like(terms[0])
    reduce(found, sums, Rule(op, sizes=sizes), dtype)
    bits = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[found.itemsize]
    torch.testing.assert_close(found.view(bits), reduced(terms, op).view(bits), rtol=0, atol=0)


@st.composite
def subtrees(draw, count):
    """Sizes of subtrees that together are the tree of so many terms."""
    if count == 1 or draw(st.booleans()):
        return (count,)
    half = 1 << ((count - 1).bit_length() - 1)
    return (*draw(subtrees(half)), *draw(subtrees(count - half)))


@pytest.mark.parametrize("op", OPERATIONS)
@pytest.mark.parametrize("dtype", NUMPY, ids=lambda dtype: dtype.__name__)
def test_sums_of_whole_numbers_wrap_as_their_terms_do(op, dtype):
    raw = np.random.default_rng(3).integers(0, 256, (5, 5, 6 * np.dtype(dtype).itemsize)).astype(np.uint8)
    terms = [torch.from_numpy(raw_ % 2 == 1 if dtype is np.bool_ else raw_.view(dtype)) for raw_ in raw]
    try:
        check(op, terms[0].dtype)
    except ExchangeError:
        return
    sums = [torch.empty(terms[0].shape, dtype=sum_dtype(terms[0].dtype)) for _ in range(2)]
    for one, some in zip(sums, (terms[:4], terms[4:]), strict=True):
        reduce(one, some, Rule(op, partial=True), terms[0].dtype)
    found = torch.empty_like(terms[0])
    reduce(found, sums, Rule(op, sizes=(4, 1)), terms[0].dtype)
    np.testing.assert_array_equal(found.numpy(), exact(op, [term.numpy() for term in terms]))


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
