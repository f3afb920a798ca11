"""Cuts and places: boxes of cells found in tensors that lie in memory in any way."""

import numpy as np
import torch
from copying import FULL
from hypothesis import given, settings
from hypothesis import strategies as st
from oracle import as_boxes, listed, numbered, shares
from rectangles import box_lists, boxes, full_shapes
from threads import forms, plain, spaced, tensors_of, turned

from shardwise import Box, Layout
from shardwise.exchange import view_of
from shardwise.geometry import Places, Window
from shardwise.layout import places_of
from shardwise.testing import scatter, strategies


def laid(layout, owner, form=plain):
    """A numbered tensor, an owner's tensors of it, and their places."""
    whole = numbered(layout.shape)
    tensors = tensors_of(scatter(whole, layout)[owner], torch.int64, form)
    return whole, tensors, places_of(layout, owner, [t.stride() for t in tensors])


def cells(whole, box):
    return whole[(*box.slices, ...)]


def assert_hold(places, tensors, whole):
    """At every place lie the cells of its box."""
    assert places.boxes.count == len(places.windows())
    for box, cut in zip(listed(places.boxes), places.windows(), strict=True):
        np.testing.assert_array_equal(view_of(cut, tensors).numpy(), cells(whole, box), strict=True)


@st.composite
def owned(draw):
    """A layout and one of its owners."""
    layout = draw(strategies.layouts(kinds=FULL))
    return layout, draw(st.sampled_from(layout.owners()))


@given(st.lists(st.tuples(st.integers(1, 3), st.integers(0, 6)), max_size=4))
@settings(max_examples=40)
def test_a_cut_is_contiguous_where_torch_says_so(dims):
    cut = Window(0, tuple(size for size, _ in dims), tuple(stride for _, stride in dims), 0)
    assert cut.contiguous == view_of(cut, [torch.zeros(64)]).is_contiguous()


@given(owned(), forms)
@settings(max_examples=40)
def test_a_place_is_made_of_runs_of_consecutive_elements(held, form):
    _, _, places = laid(*held, form)
    for runs, cut in zip(places.runs().tolist(), places.windows(), strict=True):
        assert (runs == 1) == cut.contiguous
        assert (np.diff(cut.elements().reshape(runs, -1), axis=1) == 1).all()


def test_a_cut_counts_from_the_first_element_of_its_tensor():
    tensors = [torch.zeros(3), torch.arange(40)[10:]]
    assert view_of(Window(1, (2, 3), (5, 2), 1), tensors).tolist() == [[11, 13, 15], [16, 18, 20]]


def test_a_cut_is_a_view_of_its_tensor():
    tensor = torch.zeros(4, 3).t()
    view_of(Window(0, (2,), (tensor.stride(1),), 1), [tensor]).fill_(7)
    assert tensor.tolist() == [[0, 0, 0, 0], [7, 7, 0, 0], [0, 0, 0, 0]]


@given(owned(), forms)
@settings(max_examples=25)
def test_the_pieces_of_an_owner_are_found_whatever_the_strides(layout_and_owner, form):
    layout, owner = layout_and_owner
    whole, tensors, places = laid(layout, owner, form)
    assert listed(places.boxes) == [piece.box for piece in layout.pieces(owner)]
    assert_hold(places, tensors, whole)


def test_an_owner_that_a_layout_does_not_have_holds_nothing():
    places = places_of(Layout.chunk((4, 3), 0, owners=2), 5, [])
    assert (places.boxes.count, places.boxes.ndim) == (0, 2)
    assert places.windows() == []


def test_buffers_are_told_apart():
    whole, tensors, places = laid(Layout.chunk((8, 6), 0, [0, 1, 0]), 0, turned)
    assert places.tensor.tolist() == [0, 1]
    assert_hold(places, tensors, whole)


def test_flat_ranges_are_found_in_a_tensor_with_gaps():
    whole, tensors, places = laid(Layout.flat((4, 6), [(0, 0, 9), (1, 9, 24)]), 1, spaced)
    assert tensors[0].stride() == (2,)
    assert [cut.strides for cut in places.windows()] == [(12, 2), (12, 2)]
    assert_hold(places, tensors, whole)


def test_a_scalar_lies_at_its_first_element():
    for layout in (Layout.replicated((), 1), Layout.flat((), [(0, 0, 1)])):
        whole, tensors, places = laid(layout, 0, spaced)
        assert_hold(places, tensors, whole)


@given(full_shapes().flatmap(lambda shape: st.tuples(st.just(shape), box_lists(shape))))
@settings(max_examples=40)
def test_packed_boxes_follow_each_other_row_by_row(shape_and_boxes):
    shape, found = shape_and_boxes
    whole = numbered(shape)
    message = torch.from_numpy(np.concatenate([np.zeros(0, np.int64), *(cells(whole, b).reshape(-1) for b in found)]))
    places = Places.packed(as_boxes(found, len(shape)))
    assert_hold(places, [message], whole)
    assert all(cut.contiguous for cut in places.windows())
    assert places.offset.tolist() == [sum(b.volume for b in found[:i]) for i in range(len(found))]


@st.composite
def asked(draw):
    """A layout with cells, one of its owners, and boxes inside its shape."""
    layout = draw(full_shapes().flatmap(lambda shape: strategies.layouts(shape, FULL)))
    return layout, draw(st.sampled_from(layout.owners())), draw(box_lists(layout.shape, most=4))


@given(asked(), forms)
@settings(max_examples=25)
def test_what_places_hold_of_boxes_is_found_box_by_box(layout_owner_boxes, form):
    layout, owner, wanted = layout_owner_boxes
    whole, tensors, places = laid(layout, owner, form)
    number, parts = places.within(as_boxes(wanted, layout.ndim))
    held = [piece.box for piece in layout.pieces(owner)]
    assert list(zip(number.tolist(), listed(parts.boxes), strict=True)) == [
        (i, box & piece) for i, box in enumerate(wanted) for piece in held if shares(box, piece)
    ]
    assert_hold(parts, tensors, whole)


@st.composite
def inner(draw):
    """A box, and boxes inside it."""
    shape = draw(full_shapes())
    outer = draw(boxes(shape))
    lows = draw(st.lists(boxes(outer.shape), min_size=1, max_size=4))
    moved = [
        Box(*(tuple(a + b for a, b in zip(side, outer.lo, strict=True)) for side in (box.lo, box.hi))) for box in lows
    ]
    return shape, outer, moved


@given(inner())
@settings(max_examples=40)
def test_a_box_inside_another_is_found_from_its_place(case):
    shape, outer, found = case
    whole = numbered(shape)
    tensors = [torch.zeros(2), torch.from_numpy(cells(whole, outer).copy())]
    row = Places(as_boxes([outer], len(shape)), *(np.array([n]) for n in (1, 0)), np.array([tensors[1].stride()]))
    inside = row.inside(np.zeros(len(found), np.int64), as_boxes(found, len(shape)))
    assert listed(inside.boxes) == found
    assert_hold(inside, tensors, whole)


def test_some_places_and_all_places():
    layout = Layout.cyclic((9, 2), 0, block=2, owners=2)
    whole, tensors, places = laid(layout, 0)
    few = places.take(np.array([2, 0]))
    assert [box.lo for box in listed(few.boxes)] == [(8, 0), (0, 0)]
    assert_hold(few, tensors, whole)
    both = Places.concat([few, places])
    assert both.windows() == [*few.windows(), *places.windows()]
    assert_hold(both, tensors, whole)
