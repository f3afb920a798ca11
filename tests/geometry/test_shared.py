"""Parts that share cells, against sets of cells."""

from itertools import pairwise

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from shardwise.geometry import Spans, fold, ints, overlap
from shardwise.geometry.shared import merge_spans, refine_spans

cells = st.sets(st.integers(0, 7))
families = st.lists(cells, min_size=1, max_size=5) | st.lists(cells, min_size=1, max_size=3).map(lambda f: f + f)


def spans_of(family):
    """One interval per cell, rising."""
    rows = sorted((cell, part) for part, mine in enumerate(family) for cell in mine)
    start, part = (ints([row[i] for row in rows]) for i in (0, 1))
    return Spans(start, start + 1, part)


def cells_of(spans, count):
    found = [set() for _ in range(count)]
    for start, stop, part in zip(*(column.tolist() for column in spans), strict=True):
        assert found[part].isdisjoint(range(start, stop))
        found[part] |= set(range(start, stop))
    return found


@given(families)
@settings(max_examples=100)
def test_merged_and_refined_parts_have_the_same_cells(family):
    for same in merge_spans(spans_of(family)), refine_spans(spans_of(family)):
        assert cells_of(same, len(family)) == family
    start, stop, part = merge_spans(spans_of(family))
    assert not ((part[1:] == part[:-1]) & (start[1:] == stop[:-1])).any()


@given(families)
@settings(max_examples=100)
def test_refined_intervals_are_equal_or_disjoint(family):
    start, stop, _ = refine_spans(spans_of(family))
    intervals = sorted({*zip(start.tolist(), stop.tolist(), strict=True)})
    assert all(a[1] <= b[0] for a, b in pairwise(intervals))


@given(families)
@settings(max_examples=200)
def test_equal_parts_fold_where_all_have_as_many_copies_and_others_are_disjoint(family):
    full = {frozenset(part) for part in family if part}
    copies = {family.count(set(part)) for part in full}
    folds = sum(map(len, full)) == len(set().union(*family)) and len(copies) == 1
    if not full:
        return
    folded = fold(spans_of(family), len(family))
    assert (folded is not None) == folds
    if folded is not None:
        different = cells_of(folded.spans, len(folded.copies))
        assert [[family[part] for part in row] for row in folded.copies.tolist()] == [
            [mine] * len(row) for mine, row in zip(different, folded.copies.tolist(), strict=True)
        ]
        assert sorted(folded.copies.reshape(-1).tolist()) == [p for p, mine in enumerate(family) if mine]
        assert (np.diff(folded.spans.start) >= 0).all()


@given(families)
@settings(max_examples=50)
def test_overlap_is_seen_by_the_number_of_cells(family):
    whole = set().union(*family)
    assert overlap(spans_of(family), len(whole)) == (sum(map(len, family)) > len(whole))
