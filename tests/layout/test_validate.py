"""validate() finds every gap and every overlap that is not a replica, and says exactly where."""

import re
import sys
from dataclasses import replace
from itertools import combinations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from oracle import any_touch, cover, shares
from rectangles import boxes, full_shapes, tilings

from shardwise import Box, Layout, LayoutError
from shardwise.testing import strategies


def layout_of(shape, pieces, **options):
    return Layout.boxes(shape, [(owner, box.lo, box.hi) for owner, box in pieces], **options)


@st.composite
def broken(draw):
    """A shape and (owner, box) rows: a tiling, then boxes dropped, moved, grown, shrunk, given twice or added."""
    shape = draw(full_shapes())
    owner = st.integers(0, 3)
    pieces = [(draw(owner), box) for box in draw(tilings(shape))]
    for _ in range(draw(st.integers(0, 3))):
        at = draw(st.integers(0, len(pieces) - 1))
        match draw(st.sampled_from(["drop", "move", "twice", "add", "nothing"])):
            case "drop" if len(pieces) > 1:
                del pieces[at]
            case "move":
                pieces[at] = (pieces[at][0], moved(shape, pieces[at][1], draw(_shift(len(shape)))))
            case "twice":
                pieces.append((draw(owner), pieces[at][1]))
            case "add":
                pieces.append((draw(owner), draw(boxes(shape))))
    return shape, pieces


def _shift(ndim):
    return st.lists(st.tuples(st.integers(-1, 1), st.integers(-1, 1)), min_size=ndim, max_size=ndim)


def moved(shape, box, by):
    """The box with its faces moved, kept inside the shape and with at least one cell."""
    lo = [min(max(0, a + d), n - 1) for a, (d, _), n in zip(box.lo, by, shape, strict=True)]
    hi = [min(max(b + d, a + 1), n) for b, (_, d), a, n in zip(box.hi, by, lo, shape, strict=True)]
    return Box(tuple(lo), tuple(hi))


def clashes(pieces):
    """Pairs of pieces that share cells and are no replicas: other boxes, or twice the same box of one owner."""
    return [
        (a, b, owners)
        for (owners, a, b) in (((i, j), a, b) for (i, a), (j, b) in combinations(pieces, 2))
        if shares(a, b) and (a != b or owners[0] == owners[1])
    ]


@given(broken())
@settings(max_examples=100)
def test_gaps_are_exactly_the_cells_that_nobody_holds(case):
    shape, pieces = case
    gaps = layout_of(shape, pieces).diagnosis.gaps
    np.testing.assert_array_equal(cover(gaps, shape), cover([box for _, box in pieces], shape) == 0)
    assert not any_touch(gaps)


@given(broken())
@settings(max_examples=100)
def test_overlaps_are_exactly_the_cells_of_boxes_that_clash(case):
    shape, pieces = case
    found = layout_of(shape, pieces).diagnosis.overlaps
    expected = cover([a & b for a, b, _ in clashes(pieces)], shape) > 0
    np.testing.assert_array_equal(cover([overlap.box for overlap in found], shape) > 0, expected)


@given(broken())
@settings(max_examples=60)
def test_the_owners_named_in_an_overlap_hold_its_cells(case):
    shape, pieces = case
    for overlap in layout_of(shape, pieces).diagnosis.overlaps:
        for owner in overlap.owners:
            mine = cover([box for o, box in pieces if o == owner], shape)
            assert (mine[(*overlap.box.slices, ...)] > (overlap.owners[0] == overlap.owners[1])).all()


@given(broken())
@settings(max_examples=60)
def test_validate_refuses_exactly_what_has_a_gap_or_an_overlap(case):
    shape, pieces = case
    layout = layout_of(shape, pieces)
    whole = (cover([box for _, box in pieces], shape) > 0).all()
    if whole and not clashes(pieces):
        assert layout.validate() is layout
    else:
        with pytest.raises(LayoutError, match=r"do not cover shape .* exactly"):
            layout.validate()


@given(broken())
@settings(max_examples=60)
def test_overlapping_replicas_are_refused_for_gaps_alone(case):
    shape, pieces = case
    diagnosis = layout_of(shape, pieces, overlap="replicas").diagnosis
    assert diagnosis.overlaps == ()
    np.testing.assert_array_equal(cover(diagnosis.gaps, shape), cover([box for _, box in pieces], shape) == 0)


@given(strategies.layouts())
@settings(max_examples=60)
def test_layouts_of_every_kind_are_valid(layout):
    assert layout.validate() is layout
    assert not layout.diagnosis


@given(strategies.layouts(kinds=["flat"]), st.data())
@settings(max_examples=60)
def test_flat_ranges_are_held_to_the_same_rule(layout, data):
    ranges = list(zip(layout.spelling.owners or range(99), layout.spelling.items, strict=False))
    full = [n for n, (_, (start, stop)) in enumerate(ranges) if stop > start]
    if full:
        lost = data.draw(st.sampled_from(full))
        kept = [(owner, *ends) for n, (owner, ends) in enumerate(ranges) if n != lost]
        start, stop = ranges[lost][1]
        gaps = Layout.flat(layout.shape, [*kept, (99, 0, 0)]).diagnosis.gaps
        found = np.flatnonzero(cover(gaps, layout.shape).reshape(-1))
        assert found.tolist() == list(range(start, stop))


def test_the_message_names_rectangles_owners_shape_and_remedy():
    layout = layout_of((8, 6), [(3, Box((0, 0), (4, 6))), (5, Box((3, 2), (7, 6)))])
    with pytest.raises(LayoutError) as caught:
        layout.validate()
    words = [
        "shape (8, 6)",
        "[4:7, 0:2] has no owner",
        "[7:8, 0:6] has no owner",
        "owners 3 and 5 both hold [3:4, 2:6]",
        "Remedy",
        'overlap="replicas"',
    ]
    assert [word for word in words if word not in str(caught.value)] == []


def test_an_owner_that_holds_a_box_twice_is_named():
    layout = layout_of((4,), [(2, Box((0,), (4,))), (2, Box((0,), (4,))), (7, Box((0,), (4,)))])
    with pytest.raises(LayoutError, match=r"owner 2 holds \[0:4\] twice"):
        layout.validate()


def test_gaps_and_overlaps_are_merged_where_they_touch():
    strips = [(o, Box((row, 0), (row + 1, 6))) for row, o in zip([0, 1, 5, 6, 7], [0, 0, 1, 1, 1], strict=True)]
    layout = layout_of((8, 6), [*strips, (2, Box((0, 0), (2, 3)))])
    assert [str(gap) for gap in layout.diagnosis.gaps] == ["[2:5, 0:6]"]
    assert [str(overlap) for overlap in layout.diagnosis.overlaps] == ["owners 0 and 2 both hold [0:2, 0:3]"]


def test_a_long_list_is_cut_short_in_the_message_and_whole_in_the_diagnosis():
    layout = layout_of((99,), [(0, Box((i,), (i + 1,))) for i in range(0, 99, 2)])
    assert len(layout.diagnosis.gaps) == 49
    with pytest.raises(LayoutError, match=r"and 43 more boxes without an owner") as caught:
        layout.validate()
    assert len(re.findall("has no owner", str(caught.value))) == 6


@pytest.mark.parametrize("shape", [(0,), (4, 0), (0, 0, 3)])
def test_a_tensor_without_cells_has_no_gaps(shape):
    layout = layout_of(shape, [(0, Box((0,) * len(shape), shape)), (0, Box((0,) * len(shape), shape))])
    assert layout.validate().diagnosis.gaps == ()


def test_a_0d_tensor_is_held_or_not():
    layout_of((), [(0, Box((), ())), (1, Box((), ()))]).validate()
    assert [str(o) for o in layout_of((), [(0, Box((), ()))] * 2).diagnosis.overlaps] == ["owner 0 holds [] twice"]


def big(kind, count=4096):
    """(owner, box) of a large valid layout."""
    side = int(count**0.5)
    match kind:
        case "grid":
            cells = [(r, c) for r in range(side) for c in range(side)]
            found = [Box((9 * r, 9 * c), (9 * r + 9, 9 * c + 9)) for r, c in cells]
        case "rows":
            found = [Box((9 * r, 0), (9 * r + 9, 9 * side)) for r in range(side)]
        case "tall":
            found = [
                Box((half * count, c), (half * count + count, c + 1)) for half in (0, 1) for c in range(count // 2)
            ]
    return tuple(max(box.hi[axis] for box in found) for axis in (0, 1)), list(enumerate(found))


@pytest.mark.parametrize("kind", ["grid", "rows", "tall"])
def test_that_a_large_layout_is_whole_is_seen_without_comparing_boxes(kind, monkeypatch):
    shape, pieces = big(kind)
    pieces += [(owner + len(pieces), box) for owner, box in pieces[:3]]  # replicas
    diagnosis = sys.modules["shardwise.layout.diagnosis"]
    for name in ("join", "gaps"):
        monkeypatch.setattr(diagnosis, name, lambda *_: pytest.fail("compared boxes with boxes"))
    layout_of(shape, pieces).validate()


@pytest.mark.parametrize("kind", ["grid", "rows", "tall"])
def test_one_wrong_box_of_a_large_layout_is_found(kind):
    shape, pieces = big(kind)
    owner, box = pieces[77 % len(pieces)]
    pieces[77 % len(pieces)] = (owner, replace(box, hi=(box.hi[0] - 2, box.hi[1])))
    diagnosis = layout_of(shape, pieces).diagnosis
    assert diagnosis.gaps == (replace(box, lo=(box.hi[0] - 2, box.lo[1])),)
    assert diagnosis.overlaps == ()
