"""Windows of row-major memory as boxes, against numpy."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from shardwise.errors import LayoutError
from shardwise.geometry import Step, StridedPair, strided_boxes
from shardwise.geometry.strided import MOST_BOXES


@st.composite
def windows(draw):
    """A row-major tensor and a view of it, made by random slices, splits, permutations and reshapes."""
    shape = tuple(draw(st.lists(st.integers(1, 6), min_size=0, max_size=4)))
    whole = np.arange(int(np.prod(shape))).reshape(shape)
    view = whole
    for _ in range(draw(st.integers(0, 4))):
        kind = draw(st.sampled_from(["slice", "step", "permute", "split", "flatten", "broadcast"]))
        if kind in ("slice", "step") and view.ndim:
            dim = draw(st.integers(0, view.ndim - 1))
            lo = draw(st.integers(0, view.shape[dim]))
            hi = draw(st.integers(lo, view.shape[dim]))
            step = draw(st.integers(1, 3)) if kind == "step" else 1
            view = view[(slice(None),) * dim + (slice(lo, hi, step),)]
        elif kind == "permute":
            view = view.transpose(draw(st.permutations(range(view.ndim))))
        elif kind == "split" and view.ndim and view.size:
            dim = draw(st.integers(0, view.ndim - 1))
            size = view.shape[dim]
            inner = draw(st.sampled_from([n for n in range(1, size + 1) if size % n == 0]))
            shape_now = (*view.shape[:dim], size // inner, inner, *view.shape[dim + 1 :])
            strides = (*view.strides[:dim], view.strides[dim] * inner, *view.strides[dim:])
            view = np.lib.stride_tricks.as_strided(view, shape_now, strides)
        elif kind == "flatten" and view.flags.c_contiguous and view.size:
            view = view.reshape(-1)
        elif kind == "broadcast" and view.ndim < 5:
            view = np.broadcast_to(view, (draw(st.integers(1, 3)), *view.shape))
    return whole, view


def pair_of(whole, view):
    """The view in its memory, beside a row-major copy of it."""
    here = [stride // whole.itemsize for stride in view.strides]
    there = [int(np.prod(view.shape[d + 1 :])) for d in range(view.ndim)]
    first = int(view.reshape(-1)[0]) if view.size else 0
    return StridedPair(first, 0, tuple(map(Step, view.shape, here, there)))


@given(windows())
def test_boxes_hold_exactly_the_cells_of_a_window_and_say_where_they_go(drawn):
    whole, view = drawn
    copy = np.full(view.size, -1)
    for box, offset, strides in strided_boxes(pair_of(whole, view), whole.shape):
        cells = whole[box.slices]
        index = offset + sum(
            np.arange(size).reshape([-1 if d == dim else 1 for d in range(cells.ndim)]) * strides[dim]
            for dim, size in enumerate(cells.shape)
        )
        places = np.broadcast_to(index, cells.shape)
        assert (copy[places] == -1).all(), "a cell is written twice"
        copy[places] = cells
    np.testing.assert_array_equal(copy, np.ascontiguousarray(view).reshape(-1))


@pytest.mark.parametrize(
    ("steps", "count"),
    [
        (((4, 6, 6), (6, 1, 1)), 1),  # whole
        (((6, 1, 4), (4, 6, 1)), 1),  # transposed
        (((24, 1, 1),), 1),  # flat
        (((2, 12, 6), (6, 1, 1)), 2),  # every second row
    ],
)
def test_few_boxes_are_enough(steps, count):
    assert len(strided_boxes(StridedPair(0, 0, tuple(Step(*step) for step in steps)), (4, 6))) == count


def test_a_window_that_falls_into_very_many_boxes_is_refused():
    size = 2 * MOST_BOXES
    with pytest.raises(LayoutError, match="boxes"):
        strided_boxes(StridedPair(0, 0, (Step(size, 2, 1),)), (2 * size,))
