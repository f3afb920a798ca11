"""One dimension cut into parts, against lists of its cells."""

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st
from oracle import chunked, strided

from shardwise.geometry import Axis, Spans, ints

sizes = st.integers(0, 30)
cuts = st.lists(st.tuples(st.integers(1, 4), st.integers(1, 5)), min_size=1, max_size=3)  # (split factor, count)


def cells(spans):
    """The cells of every part, in order; parts without cells are not there."""
    found = {}
    for start, stop, part in zip(*(column.tolist() for column in spans), strict=True):
        found.setdefault(part, []).extend(range(start, stop))
    return {part: where for part, where in found.items() if where}


def cut_up(size, steps):
    """Spans after several cuts, and the list of every part by the same rule on lists."""
    spans, parts = Spans.whole(size), [list(range(size))]
    for factor, count in steps:
        spans = spans.chunk(count) if factor == 1 else spans.strided(factor, count)
        parts = [chunk for part in parts for chunk in strided(part, factor, count)]
    return spans, parts


def labels(axis):
    """The interval of every cell."""
    return np.repeat(np.arange(len(axis.part)), np.diff(axis.cuts))


@given(sizes, st.integers(1, 9))
@settings(max_examples=60)
def test_chunk_follows_the_ceil_rule(size, count):
    expected = {i: part for i, part in enumerate(chunked(list(range(size)), count)) if part}
    assert cells(Spans.whole(size).chunk(count)) == expected


@given(sizes, cuts)
@settings(max_examples=60)
def test_cuts_of_cuts_follow_the_same_rule_inside_every_part(size, steps):
    spans, parts = cut_up(size, steps)
    assert cells(spans) == {i: part for i, part in enumerate(parts) if part}


@given(sizes, st.integers(1, 6))
@settings(max_examples=60)
def test_a_split_factor_of_one_is_a_chunk(size, count):
    assert cells(Spans.whole(size).strided(1, count)) == cells(Spans.whole(size).chunk(count))


@given(st.lists(st.integers(0, 6), min_size=1, max_size=6))
@settings(max_examples=60)
def test_pieces_lie_one_after_the_other(lengths):
    spans = Spans.pieces(ints(lengths), np.arange(len(lengths)))
    ends = np.cumsum(lengths).tolist()
    assert cells(spans) == {
        i: list(range(end - n, end)) for i, (n, end) in enumerate(zip(lengths, ends, strict=True)) if n
    }


@given(sizes, cuts)
@settings(max_examples=60)
def test_an_axis_keeps_every_part_that_has_cells(size, steps):
    spans, parts = cut_up(size, steps)
    axis, kept = Axis.of(spans)
    found = [np.flatnonzero(axis.part[labels(axis)] == p).tolist() for p in range(axis.parts)]
    assert [sorted(parts[k]) for k in kept.tolist()] == found
    assert axis.size == size


@given(sizes, cuts)
@settings(max_examples=60)
def test_an_axis_is_in_normal_form(size, steps):
    axis, _ = Axis.of(cut_up(size, steps)[0])
    assert (np.diff(axis.cuts) > 0).all()
    assert (np.diff(axis.part) != 0).all()
    first_seen = list(dict.fromkeys(axis.part.tolist()))
    assert first_seen == list(range(axis.parts))


@given(sizes, cuts)
@settings(max_examples=60)
def test_axes_that_mean_the_same_are_the_same_arrays(size, steps):
    spans, _ = cut_up(size, steps)
    single = [(cell, part) for part, where in cells(spans).items() for cell in where]
    start, part = (ints(column) for column in zip(*sorted(single), strict=True)) if single else (ints([]), ints([]))
    axis, _ = Axis.of(spans)
    other, _ = Axis.of(Spans(start, start + 1, part + 7))
    np.testing.assert_array_equal(axis.cuts, other.cuts)
    np.testing.assert_array_equal(axis.part, other.part)


@given(sizes, cuts)
@settings(max_examples=60)
def test_lengths_and_intervals_belong_to_their_part(size, steps):
    axis, _ = Axis.of(cut_up(size, steps)[0])
    for part in range(axis.parts):
        mine = np.flatnonzero(axis.part == part)
        np.testing.assert_array_equal(axis.intervals(part), mine)
        assert axis.lengths[part] == np.diff(axis.cuts)[mine].sum()


@given(st.integers(1, 30), cuts, cuts, st.data())
@settings(max_examples=60)
def test_crossing_finds_every_pair_of_intervals_that_share_cells(size, one, other, data):
    a, b = (Axis.of(cut_up(size, steps)[0])[0] for steps in (one, other))
    every = list(range(len(a.part)))
    only = data.draw(st.none() | st.lists(st.sampled_from(every), min_size=1, unique=True).map(sorted))
    found = a.cross(b, None if only is None else ints(only))
    rows = [(lo, hi, i, j) for lo, hi, i, j in zip(*(column.tolist() for column in found), strict=True)]
    expected = {}
    for cell, pair in enumerate(zip(labels(a).tolist(), labels(b).tolist(), strict=True)):
        if only is None or pair[0] in only:
            expected.setdefault(pair, []).append(cell)
    assert rows == [(where[0], where[-1] + 1, i, j) for (i, j), where in sorted(expected.items())]


def test_an_axis_without_cells_has_no_parts():
    axis, kept = Axis.of(Spans.whole(0).chunk(4))
    assert (axis.size, axis.parts, kept.tolist()) == (0, 0, [])
    other, _ = Axis.of(Spans.whole(0))
    assert len(axis.cross(other).lo) == 0
