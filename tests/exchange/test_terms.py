"""Terms that become values on arrival: the same bits in every layout."""

import numpy as np
import pytest
import torch
from exchanges import BITS, DTYPES, arrays, inlines, tensors, within
from hypothesis import assume, given, settings
from oracle import assert_same_buffers, buffers, in_a_tree, numbered
from threads import (
    FORMS,
    arrays_of,
    carried,
    forms,
    spaced,
    untouched,
)

from shardwise import Layout, Mesh, plan
from shardwise.exchange.reduce import BITWISE
from shardwise.notation import OPERATIONS
from shardwise.testing import gather, scatter, strategies

SHAPE = (6, 5)
TARGETS = [
    "6x5/R@4",
    "6x5/S0@4",
    "6x5/S1@3:9,2,0",
    "6x5/R@1:9",
    "6x5/boxes=0:6,0:2+0:3,2:5+3:6,2:5@3:3,1,1",
    "6x5/flat=0-7,7-30@2:30,2",
    "6x5/cyclic0=1@2",
]
ROUNDS, HOSTS = {"max_bytes": 256}, {"hosts": 2}
WAYS = [*((op, {}) for op in OPERATIONS), ("sum", ROUNDS), ("max", ROUNDS), ("sum", HOSTS), ("product", HOSTS)]
APPLY = {
    "sum": torch.add,
    "avg": torch.add,
    "max": torch.maximum,
    "min": torch.minimum,
    "product": torch.mul,
    "band": torch.bitwise_and,
    "bor": torch.bitwise_or,
    "bxor": torch.bitwise_xor,
}


def contributions(dtype, count=4, shape=SHAPE):
    """Terms of very different size, so that every change of order shows."""
    random = np.random.default_rng(count)
    if not dtype.is_floating_point and not dtype.is_complex:
        return list(torch.from_numpy(random.integers(-99, 99, (count, *shape))).to(dtype))
    return list(
        torch.from_numpy(random.standard_normal((count, *shape)) * 10.0 ** random.integers(-3, 4, (count, *shape))).to(
            dtype
        )
    )


def in_order(values, op, wide=None):
    """The reduction of the terms in the tree of their number, rounded at the end."""
    dtype = values[0].dtype
    value = in_a_tree(APPLY[op], [value.to(wide or dtype) for value in values])
    return (value / len(values) if op == "avg" else value).to(dtype)


def assert_value(found, layout, value):
    """Every owner has its cells of the value, bit-for-bit."""
    whole = arrays_of([value], BITS[value.element_size()])[0]
    assert_same_buffers(arrays(found, whole.dtype), buffers(layout, whole))


@pytest.mark.parametrize(("op", "options"), WAYS, ids=str)
def test_every_reduction_gives_the_same_bits_in_every_layout(op, options):
    values = contributions(torch.int32 if op in ("band", "bor", "bxor") else torch.float32)
    owners = [2, 0, 3, 1]  # the owner of each term
    source = Layout.on_mesh(SHAPE, Mesh.of((4,), ranks=owners), [f"P{op}"])
    held = {owner: [value] for owner, value in zip(owners, values, strict=True)}
    for target, most, form in zip(TARGETS, [0, 64, 2**14] * 3, FORMS * 2, strict=False):
        made = plan(source, target, itemsize=4, **options)
        with within(most):
            found = carried(made, held, form=form)
        assert_value(found, made.target, in_order(values, op))


@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize("op", ["sum", "avg"])
def test_sums_of_bfloat16_are_added_in_float32_and_rounded_once(op, target):
    values = [value.bfloat16() for value in contributions(torch.float32, 7)]
    once, always = in_order(values, op, torch.float32), in_order(values, op)
    assert not torch.equal(once, always)
    made = plan(f"6x5/P{op}@7", target, itemsize=2)
    assert_value(carried(made, {owner: [value] for owner, value in enumerate(values)}), made.target, once)


def test_float8_and_complex_sums_are_in_order_too():
    for dtype, wide in (torch.float8_e4m3fn, torch.float32), (torch.complex64, None):
        values = [value.to(dtype) for value in contributions(torch.float32)]
        for target in TARGETS:
            made = plan("6x5/P@4", target, itemsize=dtype.itemsize)
            found = carried(made, {owner: [value] for owner, value in enumerate(values)})
            assert_value(found, made.target, in_order(values, "sum", wide))


@pytest.mark.parametrize("target", ["131072/R@4", "131072/S0@4", "131072/R@3:0,8,9"])
def test_results_that_are_shared_have_the_same_bits(target):
    values = contributions(torch.float32, shape=(131072,))
    made = plan("131072/P@4", target, itemsize=4)
    found = carried(made, {owner: [value] for owner, value in enumerate(values)})
    assert_value(found, made.target, in_order(values, "sum"))


@given(strategies.pairs(["partial"]), forms, inlines)
@settings(max_examples=15)
def test_from_terms_to_terms_the_value_is_kept(pair, form, inline):
    averaged = pair[0].op == "avg"  # of floats: whole numbers have no averages, and floats no bits to reduce
    assume(not (averaged and pair[1].op in BITWISE))
    number, dtype = (np.float64, torch.float64) if averaged else (np.int64, torch.int64)
    made, whole = plan(*pair, itemsize=8), numbered(pair[0].shape).astype(number)
    with within(inline):
        found = carried(made, tensors(scatter(whole, made.source, seed=3), dtype, form), dtype=dtype, form=form)
    np.testing.assert_array_equal(gather(arrays(found, number), made.target), whole)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("op", "neutral"), [("sum", 0), ("product", 1), ("max", None)])
def test_a_whole_value_becomes_terms_of_every_dtype(op, neutral, dtype):
    whole = contributions(torch.float32)[0].to(dtype)
    made = plan("6x5/R@1", f"6x5/P{op}@3", itemsize=dtype.itemsize)
    found = carried(made, {0: [whole]}, form=spaced)
    others = whole if neutral is None else torch.full(SHAPE, neutral).to(dtype)
    for owner, wanted in enumerate([whole, others, others]):
        ours, theirs = (arrays_of([t], BITS[dtype.itemsize])[0] for t in (found[owner][0], wanted))
        np.testing.assert_array_equal(ours, theirs)
    assert all(untouched(some[0]) for some in found.values())


def test_a_reduction_is_rounded_as_its_terms_are_whatever_it_is_cast_to():
    values = [value.bfloat16() for value in contributions(torch.float32)]
    made = plan("6x5/P@4", "6x5/R@1:9", itemsize=2)
    found = carried(made, {o: [value] for o, value in enumerate(values)}, dtype=torch.bfloat16, becomes=torch.float32)
    expected = in_a_tree(torch.add, [v.float() for v in values]).bfloat16().float()
    torch.testing.assert_close(found[9][0], expected, rtol=0, atol=0)
