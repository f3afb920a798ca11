"""Parts of tensors, seen through strides: against numpy's own views."""

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from shardwise.geometry import Box, Boxes
from shardwise.job.subtensor import Subtensor, uncovered


def seen(view, whole):
    """The cells of a part, as a view of the whole."""
    first = whole[(..., *(slice(at, None) for at in view.start))]
    strides = [whole.strides[dim.of] * dim.step for dim in view.dims]
    return np.lib.stride_tricks.as_strided(first, view.shape, strides)


@st.composite
def views(draw, shape):
    """A part with cells, taken in a few steps."""
    view = Subtensor.whole(shape)
    for _ in range(draw(st.integers(0, 4))):
        if not view.shape:
            return view
        dim = draw(st.integers(0, len(view.shape) - 1))
        size = view.shape[dim]
        start = draw(st.integers(0, size - 1))
        match draw(st.sampled_from(["narrow", "select", "unflatten", "permute"])):
            case "narrow":
                view = view.narrow(dim, start, draw(st.integers(1, size - start)))
            case "select":
                view = view.select(dim, start)
            case "unflatten":
                inner = draw(st.integers(1, size))
                view = view.unflatten(dim, [size // inner, inner])
            case "permute":
                view = view.permute(draw(st.permutations(range(len(view.shape)))))
    return view


shapes = st.lists(st.integers(1, 8), min_size=1, max_size=3).map(tuple)


@st.composite
def several(draw, count):
    shape = draw(shapes)
    return shape, [draw(views(shape)) for _ in range(draw(st.integers(*count)))]


@settings(max_examples=150)
@given(several((2, 2)))
def test_common_cells_are_found_once_and_lie_alike_in_both(drawn):
    shape, (one, other) = drawn
    whole = np.arange(np.prod(shape)).reshape(shape)
    ours, theirs = seen(one, whole), seen(other, whole)
    found = []
    for here, there in one.common(other):
        np.testing.assert_array_equal(seen(here, ours), seen(there, theirs), strict=True)
        found += seen(here, ours).reshape(-1).tolist()
    assert sorted(found) == sorted(set(ours.reshape(-1).tolist()) & set(theirs.reshape(-1).tolist()))


@settings(max_examples=150)
@given(several((1, 1)), st.data())
def test_what_is_seen_of_a_box_are_boxes_of_the_part(drawn, data):
    shape, (view,) = drawn
    lo = [data.draw(st.integers(0, size - 1)) for size in shape]
    hi = [data.draw(st.integers(at + 1, size)) for at, size in zip(lo, shape, strict=True)]
    whole = np.zeros(shape, np.int64)
    whole[tuple(map(slice, lo, hi))] = 1
    rows, boxes = view.seen(Boxes.of([Box(tuple(lo), tuple(hi))], len(shape)))
    found = np.zeros(view.shape, np.int64)
    for row in range(len(rows)):
        found[boxes.box(row).slices] += 1  # no cell twice
    np.testing.assert_array_equal(found, seen(view, whole))


@settings(max_examples=150)
@given(several((1, 5)))
def test_cells_in_no_part_are_noticed(drawn):
    shape, parts = drawn
    whole = np.zeros(shape, np.bool_)
    for view in parts:
        seen(view, whole)[...] = True
    left = uncovered(parts, shape)
    assert (left is None) == bool(whole.all())
    if left is not None:
        assert not whole[left.slices].any()
