"""The tools for tests of one's own: scatter, gather, simulate, and the strategies."""

import numpy as np
import pytest
from copying import FULL
from hypothesis import Phase, find, given, settings
from hypothesis import strategies as st
from oracle import assert_same_buffers, buffers, numbered

from shardwise import Layout, PlanError, ShardwiseError, parse, plan
from shardwise.notation import OPERATIONS
from shardwise.testing import gather, scatter, simulate, strategies


@given(strategies.layouts(kinds=FULL))
@settings(max_examples=50)
def test_scatter_fills_buffers_as_the_pieces_say(layout):
    whole = numbered(layout.shape)
    assert_same_buffers(scatter(whole, layout), buffers(layout, whole))


@given(strategies.layouts(), st.integers(0, 9))
@settings(max_examples=50)
def test_gather_is_the_inverse_of_scatter(layout, seed):
    whole = numbered(layout.shape)
    np.testing.assert_array_equal(gather(scatter(whole, layout, seed=seed), layout), whole, strict=True)


@pytest.mark.parametrize("op", OPERATIONS)
def test_terms_of_a_partial_layout_differ_and_repeat_with_their_seed(op):
    layout = parse(f"6x5/P{op}@3")
    one, same, other = (scatter(numbered((6, 5)), layout, seed=seed) for seed in (1, 1, 2))
    assert_same_buffers(one, same)
    assert any((one[o][0] != other[o][0]).any() for o in range(3))
    assert (one[0][0] != one[1][0]).any()


@pytest.mark.parametrize("dtype", [np.float32, np.float64, np.int8, np.int64, np.complex64])
def test_dtypes_are_kept(dtype):
    layout, target = parse("6x5/S0@3"), parse("6x5/S1@2")
    whole = numbered((6, 5)).astype(dtype)
    shards = scatter(whole, layout)
    assert {array.dtype for arrays in shards.values() for array in arrays} == {np.dtype(dtype)}
    after = simulate(plan(layout, target), shards)
    np.testing.assert_array_equal(gather(after, target), whole, strict=True)


def test_simulate_leaves_its_input_alone():
    source = parse("6x5/S0@3")
    shards = scatter(numbered((6, 5)), source)
    simulate(plan(source, "6x5/R@3"), shards)
    assert_same_buffers(shards, scatter(numbered((6, 5)), source))


def test_simulate_takes_views_that_are_not_contiguous():
    source, target = parse("6x5/S0@3"), parse("6x5/S1@2")
    whole = numbered((6, 5))
    shards = {owner: [np.asfortranarray(array) for array in arrays] for owner, arrays in scatter(whole, source).items()}
    assert_same_buffers(simulate(plan(source, target), shards), buffers(target, whole))


def test_an_array_of_another_shape_is_refused():
    with pytest.raises(PlanError, match=r"shape \(5, 6\).*\(6, 5\)"):
        scatter(numbered((5, 6)), parse("6x5/S0@3"))


def test_replicas_that_differ_are_found():
    layout = parse("6/R@2")
    shards = scatter(numbered((6,)), layout)
    shards[1][0][3] = 77
    with pytest.raises(PlanError, match=r"owner 1 holds other values in \[0:6\]"):
        gather(shards, layout)


def test_an_average_that_is_not_whole_is_refused_for_integers():
    layout, terms = parse("2/Pavg@2"), {0: [np.array([1, 2])], 1: [np.array([2, 2])]}
    with pytest.raises(PlanError, match="an average of int64 terms is not an integer"):
        gather(terms, layout)
    halves = {owner: [array.astype(np.float64) for array in arrays] for owner, arrays in terms.items()}
    np.testing.assert_array_equal(gather(halves, layout), [1.5, 2.0])


WRONG = {
    "an owner is missing": lambda shards: {0: shards[0]},
    "a buffer is missing": lambda shards: {0: shards[0], 1: []},
    "a buffer is too small": lambda shards: {0: shards[0], 1: [shards[1][0][:1]]},
    "a buffer has another shape": lambda shards: {0: shards[0], 1: [shards[1][0].T]},
}


@pytest.mark.parametrize("wrong", WRONG.values(), ids=WRONG)
def test_buffers_that_do_not_fit_the_layout_are_refused(wrong):
    layout = parse("6x4/S0@2")
    shards = wrong(scatter(numbered((6, 4)), layout))
    with pytest.raises(ShardwiseError, match="owner 1"):
        gather(shards, layout)
    with pytest.raises(ShardwiseError, match="owner 1"):
        simulate(plan(layout, "6x4/S1@2"), shards)


@pytest.mark.parametrize("kind", strategies.KINDS)
def test_strategies_draw_every_kind(kind):
    quick = settings(phases=[Phase.generate], database=None)
    layout = find(strategies.layouts(kinds=[kind]), lambda layout: len(layout.owners()) > 1, settings=quick)
    assert isinstance(layout, Layout)
    assert (layout.op is not None) == (kind == "partial")
    if kind not in ("mesh", "partial"):
        spelled = {"chunk": "S", "replicated": "R"}.get(kind, kind)
        assert str(layout).split("/")[1].startswith(spelled)


@given(strategies.pairs(["chunk"], ["flat"]))
@settings(max_examples=50)
def test_pairs_are_of_one_tensor_and_of_the_kinds_asked_for(pair):
    source, target = pair
    assert source.shape == target.shape
    assert str(target).split("/")[1].startswith("flat")
