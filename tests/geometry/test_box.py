"""One box at a time, against masks of cells."""

import dataclasses
import pickle

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from oracle import cover
from rectangles import boxes, full_shapes

from shardwise import Box, LayoutError
from shardwise.geometry import row_major


@st.composite
def two_boxes(draw, empty=False):
    shape = draw(full_shapes())
    return shape, draw(boxes(shape, empty=empty)), draw(boxes(shape, empty=empty))


@given(two_boxes(empty=True))
@settings(max_examples=50)
def test_the_shared_cells_are_those_of_both(case):
    shape, a, b = case
    shared = a & b
    both = cover([a], shape) & cover([b], shape)
    np.testing.assert_array_equal(cover([] if shared is None else [shared], shape), both)
    assert (shared is None) == (not both.any())


@given(two_boxes())
@settings(max_examples=50)
def test_minus_leaves_disjoint_boxes_of_the_other_cells(case):
    shape, a, b = case
    rest = a.minus(b)
    np.testing.assert_array_equal(cover(rest, shape), cover([a], shape) & ~cover([b], shape))
    assert len(rest) <= max(1, 2 * len(shape))
    assert all(part.volume for part in rest)


@given(two_boxes())
@settings(max_examples=50)
def test_a_box_is_in_another_where_all_its_cells_are(case):
    shape, a, b = case
    assert (a in b) == bool((cover([a], shape) <= cover([b], shape)).all())


@given(two_boxes(empty=True))
@settings(max_examples=50)
def test_shape_volume_and_slices_describe_the_same_cells(case):
    shape, a, _ = case
    cut = np.zeros(shape)[(*a.slices, ...)]
    assert a.shape == cut.shape
    assert a.volume == cut.size


@given(two_boxes())
@settings(max_examples=50)
def test_within_counts_from_the_corner_of_the_outer_box(case):
    shape, a, b = case
    shared = a & b
    if shared is not None:
        numbers = np.arange(np.prod(shape, dtype=int)).reshape(shape)
        inner = numbers[(*a.slices, ...)][(*shared.within(a).slices, ...)]
        np.testing.assert_array_equal(inner, numbers[(*shared.slices, ...)])


def test_a_box_without_dims_is_one_cell():
    point = Box((), ())
    assert (point.shape, point.volume, str(point)) == ((), 1, "[]")
    assert point & point == point
    assert point.minus(point) == []
    assert point in point


def test_boxes_are_values():
    box = Box((0, 2), (4, 6))
    assert box == Box(np.array([0, 2]), [4, 6])
    assert hash(box) == hash(Box((0, 2), (4, 6)))
    assert pickle.loads(pickle.dumps(box)) == box
    assert all(type(x) is int for x in Box(np.array([0, 2]), np.array([4, 6])).lo)
    with pytest.raises(dataclasses.FrozenInstanceError):
        box.lo = (1, 1)


def test_coordinates_have_no_bound():
    far = Box((10**30,), (10**30 + 5,))
    assert far.volume == 5
    assert far & Box((0,), (10**30 + 1,)) == Box((10**30,), (10**30 + 1,))


@pytest.mark.parametrize(
    ("lo", "hi", "words"),
    [
        ((0, 0), (4,), ["one length", "(0, 0)", "(4,)"]),
        ((3,), (2,), ["lo <= hi", "(3,)", "(2,)"]),
        ((0, 5), (4, 4), ["lo <= hi", "(0, 5)"]),
        ((0.5,), (2,), ["whole number", "0.5"]),
        (("0",), (2,), ["whole number", "'0'"]),
        ((True,), (2,), ["whole number", "True"]),
        (3, 4, ["whole numbers", "3"]),
    ],
)
def test_what_is_no_box_is_refused(lo, hi, words):
    with pytest.raises(LayoutError) as caught:
        Box(lo, hi)
    assert [word for word in words if word not in str(caught.value)] == []


@pytest.mark.parametrize("ask", [lambda a, b: a & b, lambda a, b: a in b, lambda a, b: a.minus(b)])
def test_boxes_of_different_dims_do_not_compare(ask):
    with pytest.raises(LayoutError, match="dims"):
        ask(Box((0, 0), (4, 4)), Box((0,), (4,)))


@given(full_shapes(max_dims=4))
@settings(max_examples=50)
def test_row_major_strides_are_those_of_a_contiguous_array(shape):
    assert row_major(shape) == tuple(s // 8 for s in np.zeros(shape, dtype=np.int64).strides)


def test_row_major_strides_of_an_empty_buffer_are_never_zero():
    assert row_major((4, 0, 3)) == (3, 3, 1)
