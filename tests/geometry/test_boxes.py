"""Many boxes at once, against painted arrays."""

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st
from oracle import any_touch, as_boxes, cover, listed
from rectangles import box_lists, boxes, full_shapes, tilings

from shardwise.geometry import Box, Boxes, cut, distinct, ints, merge, positions, tiles


@st.composite
def some_boxes(draw, empty=True):
    shape = draw(full_shapes())
    return shape, draw(box_lists(shape, empty=empty))


@st.composite
def near_tilings(draw):
    """A tiling, whole or with one box dropped, doubled or replaced."""
    shape = draw(full_shapes())
    found = draw(tilings(shape))
    change = draw(st.sampled_from(["none", "drop", "double", "replace"]))
    at = draw(st.integers(0, len(found) - 1))
    if change == "drop":
        del found[at]
    elif change == "double":
        found.append(found[at])
    elif change == "replace":
        found[at] = draw(boxes(shape))
    return shape, found


@st.composite
def keyed(draw):
    """A tiling whose boxes carry keys."""
    shape = draw(full_shapes())
    found = draw(tilings(shape, most=14))
    return shape, found, draw(st.lists(st.integers(0, 2), min_size=len(found), max_size=len(found)))


@given(some_boxes())
@settings(max_examples=50)
def test_boxes_and_their_list_say_the_same(case):
    shape, found = case
    rows = as_boxes(found, len(shape))
    assert (rows.count, rows.ndim) == (len(found), len(shape))
    assert listed(rows) == found
    assert rows.volumes().tolist() == [box.volume for box in found]
    assert listed(rows.take(ints(range(len(found)))[::-1])) == found[::-1]
    assert listed(rows.take(rows.volumes() > 2)) == [box for box in found if box.volume > 2]
    assert listed(Boxes.concat([rows, rows])) == found * 2


@given(some_boxes(), st.data())
@settings(max_examples=50)
def test_overlap_is_the_shared_box_row_by_row(case, data):
    shape, found = case
    box = data.draw(boxes(shape))
    shared = as_boxes(found, len(shape)).overlap(as_boxes([box], len(shape)))
    meets = (shared.lo < shared.hi).all(axis=1)
    assert listed(shared.take(meets)) == [both for b in found if (both := b & box) is not None]


@given(st.lists(st.integers(0, 9), max_size=3).map(tuple), st.data())
@settings(max_examples=50)
def test_positions_number_points_in_row_major_order(shape, data):
    points = data.draw(st.lists(st.tuples(*(st.integers(0, n) for n in shape)), max_size=6))
    grid = tuple(n + 1 for n in shape)
    expected = [int(np.ravel_multi_index(p, grid)) if shape else 0 for p in points]
    assert positions(ints(points).reshape(len(points), len(shape)), shape).tolist() == expected


@given(near_tilings())
@settings(max_examples=120)
def test_boxes_tile_where_every_cell_is_painted_once(case):
    shape, found = case
    assert tiles(as_boxes(found, len(shape)), shape) == bool((cover(found, shape) == 1).all())


def test_equal_volume_is_not_enough_to_tile():
    # a 4x4 square: one quarter is missing, another is there twice
    quarters = [Box((r, c), (r + 2, c + 2)) for r, c in [(0, 0), (0, 2), (2, 0), (2, 0)]]
    assert not tiles(as_boxes(quarters, 2), (4, 4))


def test_long_thin_boxes_tile():
    strips = [Box((row, 0), (row + 1, 10**9)) for row in range(1000)]
    assert tiles(as_boxes(strips, 2), (1000, 10**9))
    assert not tiles(as_boxes([*strips[:-1], strips[0]], 2), (1000, 10**9))


def test_tensors_without_cells_or_dims_tile():
    assert tiles(as_boxes([], 2), (0, 5))
    assert tiles(as_boxes([Box((0, 2), (0, 5))], 2), (0, 5))
    assert tiles(as_boxes([Box((), ())], 0), ())
    assert not tiles(as_boxes([], 0), ())
    assert not tiles(as_boxes([Box((), ())] * 2, 0), ())
    assert not tiles(as_boxes([], 1), (3,))


@given(some_boxes())
@settings(max_examples=50)
def test_distinct_names_each_different_box_once_in_order(case):
    shape, found = case
    first, number = distinct(as_boxes(found, len(shape)), shape)
    different = [found[i] for i in first.tolist()]
    assert different == sorted(set(found), key=lambda b: (b.lo, b.hi))
    assert [different[n] for n in number.tolist()] == found


@given(keyed())
@settings(max_examples=100)
def test_merge_keeps_the_cells_of_every_key_and_leaves_nothing_to_merge(case):
    shape, found, keys = case
    merged, key = merge(as_boxes(found, len(shape)), ints(keys))
    for which in set(keys):
        mine = listed(merged.take(key == which))
        np.testing.assert_array_equal(
            cover(mine, shape), cover([b for b, k in zip(found, keys, strict=True) if k == which], shape)
        )
        assert not any_touch(mine)


def test_a_tiling_by_a_grid_merges_to_the_whole():
    grid = [Box((r, c), (r + 1, c + 5)) for r in range(7) for c in range(0, 15, 5)]
    merged, key = merge(as_boxes(grid, 2), np.full(len(grid), 9))
    assert listed(merged) == [Box((0, 0), (7, 15))]
    assert key.tolist() == [9]


def test_nothing_merges_to_nothing():
    merged, key = merge(as_boxes([], 2), ints([]))
    assert (merged.count, len(key)) == (0, 0)


@st.composite
def parts(draw):
    """Boxes of one shape, and of each a range of its cells."""
    shape = draw(full_shapes(max_dims=4, max_size=5))
    found = draw(box_lists(shape, empty=True, most=4))
    ranges = [sorted(draw(st.tuples(*[st.integers(0, box.volume)] * 2))) for box in found]
    return shape, found, [a for a, _ in ranges], [b for _, b in ranges]


@given(parts())
@settings(max_examples=100)
def test_cut_takes_the_cells_of_a_range_in_their_order(case):
    shape, found, start, stop = case
    row, pieces = cut(as_boxes(found, len(shape)), ints(start), ints(stop))
    numbers = np.arange(np.prod(shape, dtype=int)).reshape(shape)
    assert (np.diff(row) >= 0).all()
    for i, box in enumerate(found):
        mine = listed(pieces.take(np.flatnonzero(row == i)))
        cells = [cell for piece in mine for cell in numbers[(*piece.slices, ...)].reshape(-1).tolist()]
        assert cells == numbers[(*box.slices, ...)].reshape(-1)[start[i] : stop[i]].tolist()
        assert len(mine) <= max(1, 2 * len(shape) - 1)


def test_cutting_leaves_its_arguments_alone():
    start = ints([3])
    cut(as_boxes([Box((0, 0), (4, 5))], 2), start, ints([17]))
    assert start.tolist() == [3]
