"""Partial layouts: terms reduced in their order, shared when that is cheaper, kept, and made from whole values."""

import numpy as np
import pytest
from copying import FULL
from hypothesis import given, settings
from hypothesis import strategies as st
from oracle import assert_same_buffers, buffers, held, in_a_tree, numbered

from shardwise import Box, Layout, Mesh, parse, plan
from shardwise.notation import OPERATIONS
from shardwise.testing import gather, scatter, simulate, strategies

SHAPE = (6, 5)
COMBINE = {
    "sum": np.add,
    "avg": np.add,
    "max": np.maximum,
    "min": np.minimum,
    "product": np.multiply,
    "band": np.bitwise_and,
    "bor": np.bitwise_or,
    "bxor": np.bitwise_xor,
}
TARGETS = [
    "6x5/R@4",
    "6x5/S0@4",
    "6x5/R@1:9",
    "6x5/boxes=0:6,0:2+0:3,2:5+3:6,2:5@3:3,1,1",
    "6x5/flat=0-7,7-30@2",
    "6x5/R@6",
]


def terms(count, dtype=np.int64, seed=0):
    return np.random.default_rng(seed).integers(-9, 9, (count, *SHAPE)).astype(dtype)


def result(op, values):
    """The reduction of the terms in the tree of their number."""
    value = in_a_tree(COMBINE[op], values)
    return (value / len(values)).astype(value.dtype) if op == "avg" else value


@pytest.mark.parametrize("op", OPERATIONS)
@pytest.mark.parametrize("target", TARGETS)
def test_every_reduction_gives_its_value_in_every_layout(op, target):
    values = terms(4)
    values[0] += (-values.sum(axis=0)) % 4 if op == "avg" else 0  # so that the average is whole
    made = plan(f"6x5/P{op}@4", target).verify()
    after = simulate(made, {owner: [values[owner]] for owner in range(4)})
    assert_same_buffers(after, buffers(made.target, result(op, values)))


@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize("options", [{}, {"max_bytes": 64}, {"hosts": 2}], ids=str)
def test_terms_are_reduced_in_the_order_of_the_mesh(target, options):
    values = terms(4, np.float64) * np.array([1e16, 3.0, -1e16, 1e-3]).reshape(4, 1, 1)
    owners = [2, 0, 3, 1]  # the owner of each term
    made = plan(Layout.on_mesh(SHAPE, Mesh.of((4,), ranks=owners), ["P"]), parse(target), **options)
    after = simulate(made, {owner: [values[term]] for term, owner in enumerate(owners)})
    assert_same_buffers(after, buffers(made.target, result("sum", values)))


@given(strategies.pairs(["partial"], FULL))
@settings(max_examples=50)
def test_reducing_moves_each_term_once_and_each_result_once(pair):
    source, target = pair
    if source.terms > 1:
        takers = np.sum(list(held(target).values()), axis=0)
        sent_by = held(source)
        having = np.any([mask & sent_by[o] for o, mask in held(target).items() if o in sent_by] or [takers < 0], axis=0)
        least = int((source.terms - having + takers - 1).sum())
        assert plan(source, target, itemsize=1).bytes_moved == least


@pytest.mark.parametrize(
    ("source", "target", "cells", "steps"),
    [
        ("12/P@4", "12/S0@4", 3 * 12, 1),  # a reduce-scatter
        ("12/P@4", "12/R@4", 6 * 12, 2),  # and the sharing of its results, not 12 times 12
        ("12/P@4", "12/R@1", 3 * 12, 1),
        ("12/P@4", "12/R@1:9", 4 * 12, 1),
        ("12/P@2", "12/R@2", 2 * 12, 1),  # no dearer than sharing, and one step less
        ("12/P@4", "12/R@2:8,9", 5 * 12, 2),
        ("12/P@1", "12/R@4", 3 * 12, 1),
        ("12/P,R@2x2", "12/R@4", 4 * 12, None),
    ],
)
def test_results_are_shared_where_that_moves_fewer_bytes(source, target, cells, steps):
    made = plan(source, target, itemsize=4).verify()
    assert made.bytes_moved == made.lower_bound == cells * 4
    if steps is not None:
        assert {copy.step for copy in made.copies} == set(range(steps))


def test_the_load_of_a_reduction_is_even():
    size = 2**20
    made = plan(f"{size}/P@4", f"{size}/R@4", itemsize=1)
    assert set(made.sent.values()) == set(made.received.values()) == {6 * size // 4}
    assert made.balance == 1.0


@given(strategies.layouts(kinds=["partial"]))
@settings(max_examples=40)
def test_a_partial_layout_to_itself_stays_where_it_is(layout):
    made = plan(layout, layout).verify()
    assert made.bytes_moved == 0
    shards = scatter(numbered(layout.shape), layout)
    assert_same_buffers(simulate(made, shards), shards)


@pytest.mark.parametrize("op", OPERATIONS)
def test_shards_of_terms_move_and_stay_terms(op):
    values = terms(2)
    source = Layout.on_mesh(SHAPE, (2, 2), [f"P{op}", "S0"])
    target = Layout.on_mesh(SHAPE, (2, 2), [f"P{op}", "S1"])
    made = plan(source, target).verify()
    assert {(c.source // 2, c.target // 2) for c in made.copies} == {(0, 0), (1, 1)}
    before, wanted = (
        {owner: buffers(layout, values[owner // 2])[owner] for owner in range(4)} for layout in (source, target)
    )
    assert_same_buffers(simulate(made, before), wanted)


@pytest.mark.parametrize("op", OPERATIONS)
@pytest.mark.parametrize("source", ["6x5/R@3", "6x5/S0@3", "6x5/R@1:7", "6x5/flat=0-7,7-30@2"])
def test_a_whole_value_becomes_terms_as_torch_makes_them(op, source):
    whole = numbered(SHAPE)
    made = plan(source, f"6x5/P{op}@3").verify()
    after = simulate(made, scatter(whole, made.source))
    neutral = {"sum": 0, "product": 1, "bxor": 0}.get(op)
    others = whole if neutral is None else np.full(SHAPE, neutral)
    assert_same_buffers(after, {0: [whole], 1: [others], 2: [others]})
    assert made.for_owner(1).fill == neutral


def test_a_whole_value_that_is_there_already_moves_nothing_to_become_a_sum():
    assert plan("6x5/R@3", "6x5/P@3").bytes_moved == 0
    assert plan("6x5/R@3", "6x5/Pmax@3").bytes_moved == 0
    assert plan("6x5/R@1", "6x5/P@3").bytes_moved == 0
    assert plan("6x5/R@1", "6x5/Pmax@3", itemsize=1).bytes_moved == 2 * 30


@given(strategies.pairs(["partial"], ["partial"]), st.integers(0, 5))
@settings(max_examples=40)
def test_from_terms_to_other_terms_the_value_is_kept(pair, seed):
    source, target = pair
    whole = numbered(source.shape)
    after = simulate(plan(source, target).verify(), scatter(whole, source, seed=seed))
    np.testing.assert_array_equal(gather(after, target), whole)


def test_partial_layouts_know_their_terms():
    layout = Layout.on_mesh(SHAPE, Mesh(a=2, b=3, c=2), ["P", "S0", "P"])
    assert (layout.op, layout.terms) == ("sum", 4)
    assert layout.owners(Box((0, 0), (1, 1))) == (0, 1, 6, 7)
    assert Layout.replicated(SHAPE, 3).terms == 1
