"""Boxes that meet, and cells that no box holds, against all pairs and painted arrays."""

import sys
from itertools import pairwise
from unittest.mock import patch

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from oracle import any_touch, as_boxes, box_of, cover, listed, pairs_that_meet
from rectangles import box_lists, boxes, full_shapes, sides, tilings

from shardwise.geometry import Box, gaps, join, spread

JOIN = sys.modules["shardwise.geometry.join"]  # the function has the module's name


def joined(left, right, ndim):
    """The pairs that join reports, sorted; each once or it shows."""
    found = join(as_boxes(left, ndim), as_boxes(right, ndim))
    return sorted(zip(*(side.tolist() for side in found), strict=True))


def joined_by_cuts(left, right, ndim, leaf):
    """The same where space is cut however few boxes there are, until at most `leaf` pairs are left in a region."""
    with patch.multiple(JOIN, FEW=0, LEAF=leaf):
        return joined(left, right, ndim)


def check(left, right, ndim):
    """Every way of joining finds the pairs that meet, each once."""
    expected = pairs_that_meet(left, right)
    assert joined(left, right, ndim) == expected
    for leaf in (0, 3, JOIN.LEAF):
        assert joined_by_cuts(left, right, ndim, leaf) == expected


def shifted(box, by):
    """The box, moved."""
    return Box(tuple(x + by for x in box.lo), tuple(x + by for x in box.hi))


@st.composite
def two_lists(draw, most=8):
    shape = draw(full_shapes())
    return len(shape), draw(box_lists(shape, most=most)), draw(box_lists(shape, most=most))


@st.composite
def scattered(draw):
    """Small, long, thin and huge boxes, up to a million million cells apart, of any axis."""
    size = st.sampled_from([1, 2, 1000, 10**6])
    place = st.sampled_from([0, 1, 999, 10**6, 10**12]) | st.integers(0, 3000)
    far = st.tuples(place, size).map(lambda s: (s[0], s[0] + s[1]))
    axes = draw(st.permutations([far, sides(30), sides(30)]))[: draw(st.integers(1, 3))]
    box = st.tuples(*axes).map(box_of)
    return len(axes), draw(st.lists(box, max_size=12)), draw(st.lists(box, max_size=12))


@given(two_lists())
@settings(max_examples=60)
def test_join_finds_every_pair_that_shares_a_cell_once(case):
    ndim, left, right = case
    check(left, right, ndim)


@given(scattered())
@settings(max_examples=60)
def test_join_works_far_out_and_for_sizes_that_differ_widely(case):
    ndim, left, right = case
    check(left, right, ndim)


@given(st.integers(0, 2**32), st.integers(1, 3))
@settings(max_examples=25)
def test_join_of_crowded_lists_agrees_with_trying_all_pairs(seed, ndim):
    random = np.random.default_rng(seed)
    lists = []
    for _ in range(2):
        lo = random.integers(0, 60, (70, ndim))  # 4,900 pairs: beyond FEW
        hi = lo + random.integers(1, random.choice([3, 30], (70, 1)) + 1, (70, ndim))
        lists.append([Box(a, b) for a, b in zip(lo.tolist(), hi.tolist(), strict=True)])
    check(*lists, ndim)


@st.composite
def strips(draw, axis):
    """Boxes that stand behind each other on an axis, in any order, with gaps; of any extent on the other one."""
    edges = sorted(draw(st.sets(st.integers(0, 60), min_size=2, max_size=24)))
    found = []
    for low, high in pairwise(edges):
        if draw(st.booleans()) or not found:
            first = draw(st.integers(0, 3))
            side = first, first + draw(st.integers(1, 4))
            corners = [(low, high), side] if axis == 0 else [side, (low, high)]
            found.append(Box(*zip(*corners, strict=True)))
    return draw(st.permutations(found))


@given(st.data(), st.integers(0, 1))
@settings(max_examples=60)
def test_strips_are_joined_along_the_axis_that_cuts_them(data, axis):
    left, right = data.draw(strips(axis)), data.draw(strips(axis))
    with patch.object(JOIN, "FEW", 0), patch.object(JOIN, "_Buckets", None):  # no other way is there
        assert joined(left, right, 2) == pairs_that_meet(left, right)


def test_rows_meet_columns_in_every_pair():
    rows = [Box((i, 0), (i + 1, 40)) for i in range(30)]
    columns = [Box((0, i), (30, i + 1)) for i in range(40)]
    check(rows, columns, 2)
    assert len(joined(rows, columns, 2)) == 1200


def test_boxes_of_zero_dims_all_meet():
    check([Box((), ())] * 2, [Box((), ())] * 3, 0)
    assert len(joined([Box((), ())] * 2, [Box((), ())] * 3, 0)) == 6


@pytest.mark.parametrize("ndim", [0, 1, 3])
def test_nothing_meets_nothing(ndim):
    one = [Box((0,) * ndim, (1,) * ndim)]
    assert joined([], [], ndim) == joined(one, [], ndim) == joined([], one, ndim) == []


@given(two_lists())
@settings(max_examples=30)
def test_join_does_not_depend_on_where_the_origin_is(case):
    ndim, left, right = case
    far = [[shifted(box, 10**5) for box in side] for side in (left, right)]
    check(*far, ndim)


# --- work, counted and not timed -------------------------------------------------------------------------------------


@pytest.fixture
def work(monkeypatch):
    """Counts what join enters into tiles and tries as pairs: both pass through `spread`."""
    total = [0]

    def counting(counts):
        total[0] += int(counts.sum())
        assert total[0] < 2_000_000, "join takes far more than linear work"
        return spread(counts)

    monkeypatch.setattr(JOIN, "spread", counting)
    return total


def square(side, cell=10):
    """A square cut into side x side equal boxes."""
    step = [(i * cell, (i + 1) * cell) for i in range(side)]
    return [Box((a, c), (b, d)) for a, b in step for c, d in step]


def test_tilings_are_joined_in_near_linear_work(work):
    left = square(40)
    right = [Box(b.lo, b.hi) for b in square(40)][::-1]
    assert len(joined(left, right, 2)) == 1600
    assert work[0] < 60 * 3200


def test_tiles_are_twice_the_size_of_a_box_wherever_the_boxes_are():
    far = as_boxes([shifted(box, 1000) for box in square(40)], 2)
    tiles = JOIN._Buckets.tiled(far.count, far).region
    np.testing.assert_array_equal(tiles.hi - tiles.lo, 20)
    assert tiles.count == 400


def test_strips_are_joined_in_near_linear_work(work):
    strips = [Box((i, 0), (i + 1, 10**6)) for i in range(3000)]
    assert len(joined(strips, strips, 2)) == 3000
    assert work[0] < 60 * 6000


def test_one_huge_box_among_small_ones_costs_no_more_than_all_pairs(work):
    size = 3000
    corner = [Box((0, 0, i), (1, 1, i + 1)) for i in range(size)]
    rest = [Box((0, 1, 0), (1, size, size)), Box((1, 0, 0), (size, size, size))]
    tiling = corner + rest
    assert len(joined(tiling, [Box((0, 0, 0), (size,) * 3)], 3)) == len(tiling)
    assert work[0] < 60 * len(tiling)


# --- gaps ------------------------------------------------------------------------------------------------------------


def clean(found):
    """True for every box that overlaps no other."""
    return np.array([len(pairs_that_meet([box], found)) == 1 for box in found], dtype=np.bool_)


def missing(found, shape):
    return gaps(as_boxes(found, len(shape)), Box((0,) * len(shape), shape), clean(found))


@st.composite
def holed(draw):
    """Any boxes, or a tiling that lost some."""
    shape = draw(full_shapes())
    found = draw(box_lists(shape) | tilings(shape))
    keep = draw(st.lists(st.booleans(), min_size=len(found), max_size=len(found)))
    return shape, [box for box, kept in zip(found, keep, strict=True) if kept]


@given(holed())
@settings(max_examples=100)
def test_gaps_are_the_cells_that_no_box_holds(case):
    shape, found = case
    holes = missing(found, shape)
    np.testing.assert_array_equal(cover(holes, shape), cover(found, shape) == 0)
    assert not any_touch(holes)
    assert holes == sorted(holes, key=lambda b: (b.lo, b.hi))


@given(st.data())
@settings(max_examples=30)
def test_one_missing_box_of_a_tiling_is_found_as_it_was(data):
    shape = data.draw(full_shapes(max_size=1000))
    found = data.draw(tilings(shape, most=20))
    hole = found.pop()
    holes = missing(found, shape)
    assert sum(box.volume for box in holes) == hole.volume
    assert all(box in hole for box in holes)


def test_without_boxes_everything_is_a_gap():
    assert missing([], (3, 4)) == [Box((0, 0), (3, 4))]
    assert missing([], ()) == [Box((), ())]


def test_missing_rows_of_long_strips_are_found():
    strips = [Box((i, 0), (i + 1, 10**9)) for i in range(200) if i not in (7, 8, 199)]
    assert missing(strips, (200, 10**9)) == [Box((7, 0), (9, 10**9)), Box((199, 0), (200, 10**9))]


@given(st.data())
@settings(max_examples=50)
def test_boxes_that_hold_a_box_leave_no_gap_in_it(data):
    shape = data.draw(full_shapes())
    inner = data.draw(boxes(shape))
    cells = as_boxes(data.draw(tilings(shape)), len(shape))
    assert gaps(cells, inner, np.ones(cells.count, dtype=np.bool_)) == []
    assert listed(cells)
