"""relabel=True: the permutation of target owners that moves the fewest bytes."""

from itertools import permutations

import numpy as np
import pytest
from copying import FULL
from hypothesis import given, settings
from hypothesis import strategies as st
from oracle import held

from shardwise import Layout, parse, plan
from shardwise.testing import strategies


def fewest(source, target):
    """The fewest cells that move under any permutation of the target's owners, by trying all."""
    have, wants = held(source), held(target)
    nothing = np.zeros(source.shape, dtype=np.bool_)
    kept = {(i, j): int((wants[i] & have.get(j, nothing)).sum()) for i in wants for j in wants}
    best = max(sum(kept[pair] for pair in zip(wants, order, strict=True)) for order in permutations(wants))
    return sum(int(mask.sum()) for mask in wants.values()) - best


def small(shape):
    return strategies.layouts(shape, FULL, max_owners=6).filter(lambda layout: len(layout.owners()) <= 6)


@given(strategies.shapes().flatmap(lambda shape: st.tuples(small(shape), small(shape))))
@settings(max_examples=40)
def test_no_permutation_moves_fewer_bytes(pair):
    source, target = pair
    made = plan(source, target, itemsize=4, relabel=True)
    assert made.bytes_moved == 4 * fewest(source, target)


@given(strategies.pairs())
@settings(max_examples=40)
def test_relabelling_is_never_worse_than_leaving_it_and_keeps_the_layout(pair):
    source, target = pair
    made = plan(source, target, relabel=True).verify()
    assert made.bytes_moved <= plan(source, target).bytes_moved
    assert made.target.owners() == target.owners()
    shapes = [sorted(layout.local_shapes(o) for o in layout.owners()) for layout in (made.target, target)]
    assert shapes[0] == shapes[1]


def test_a_permuted_layout_is_undone():
    rows = Layout.chunk((12, 4), 0, 6)
    made = plan(rows, rows.relabel({0: 5, 5: 2, 2: 0}), relabel=True)
    assert made.bytes_moved == 0
    assert made.target == rows


def test_where_nothing_is_gained_nobody_is_renamed():
    target = parse("8x6/S1@4:3,1,2,0")
    made = plan("8x6/S0@4", target, relabel=True)
    assert made.bytes_moved == plan("8x6/S0@4", target).bytes_moved
    assert made.target == target
    assert str(made.target) == str(target)


def test_owners_that_are_not_in_the_target_are_never_used():
    made = plan("8/S0@2:0,1", "8/S0@2:1,7", relabel=True)
    assert made.target.owners() == (1, 7)
    assert made.target == parse("8/S0@2:7,1")


@pytest.mark.parametrize("count", [256, 300])
def test_many_owners_are_matched_too(count):
    order = np.random.default_rng(0).permutation(count).tolist()
    source, target = Layout.chunk((count * 2, 3), 0, count), Layout.chunk((count * 2, 3), 0, order)
    assert plan(source, target).bytes_moved > 0
    assert plan(source, target, relabel=True).bytes_moved == 0


def test_large_worlds_are_never_worse_off():
    random = np.random.default_rng(1)
    source = Layout.chunk((3000, 2), 0, random.permutation(400).tolist())
    target = Layout.cyclic((3000, 2), 0, 5, random.permutation(400).tolist())
    assert plan(source, target, relabel=True).bytes_moved <= plan(source, target).bytes_moved


@pytest.mark.parametrize(
    ("source", "target", "least"),
    [
        ("4x3/S1,P@2x2", "4x3/P,S1@2x2:2,0,1,3", 0),  # terms are carried: only the same term counts
        ("1/S0@2", "1/P@2:1,0", 0),  # a sum needs the value in its first term only
        ("1x3/P,S1@2x2:0,1,3,2", "1x3/S0,R@2x2", 24),  # reduced for several takers: never worse than before
    ],
)
def test_partial_sums_are_relabelled_by_what_they_save(source, target, least):
    made = plan(source, target, relabel=True).verify()
    assert made.bytes_moved == least <= plan(source, target).bytes_moved
