"""Nested runs of cells: what two have in common, and how many cells lie before a cell."""

from itertools import product

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shardwise.errors import LayoutError
from shardwise.geometry.nests import Nest, Run, cells_before, common


@st.composite
def nests(draw):
    """Runs from the inside to the outside: each step is at least as long as what is inside."""
    runs, reach = [], 1
    for axis in range(draw(st.integers(0, 3))):
        step, size = reach + draw(st.sampled_from([0, 0, 1, 2, 5])), draw(st.integers(0 if axis else 1, 4))
        runs.append(Run(size, step, axis))
        reach = (size - 1) * step + reach if size else reach
    return Nest.of(draw(st.integers(0, 12)), draw(st.permutations(runs)))


def cells(nest):
    """Every cell, with the index along each axis."""
    found = {}
    for indices in product(*(range(run.size) for run in nest.runs)):
        at = dict.fromkeys((run.axis for run in nest.runs), 0)
        for axis, start in nest.at:
            at[axis] = at.get(axis, 0) + start
        for index, run in zip(indices, nest.runs, strict=True):
            at[run.axis] += index * run.stride
        found[nest.first + sum(i * run.step for i, run in zip(indices, nest.runs, strict=True))] = at
    return found


@settings(max_examples=300)
@given(nests(), nests())
def test_pairs_have_every_common_cell_once_with_its_index_on_both_sides(one, other):
    ours, theirs = cells(one), cells(other)
    seen = []
    for a, b in common(one, other):
        assert [run[:2] for run in a.runs] == [run[:2] for run in b.runs]
        for part, whole in (a, ours), (b, theirs):
            for cell, at in cells(part).items():
                assert {axis: index for axis, index in at.items() if index} == {
                    axis: index for axis, index in whole[cell].items() if index
                }
        seen += cells(a)
    assert sorted(seen) == sorted(ours.keys() & theirs.keys())


@given(nests(), st.lists(st.integers(-5, 60), min_size=1))
def test_cells_before_are_counted(nest, points):
    ours = [cell - nest.first for cell in cells(nest)]
    expected = [sum(cell < point for cell in ours) for point in points]
    np.testing.assert_array_equal(cells_before(nest.runs, np.array(points)), expected)


def test_runs_that_meet_in_too_many_parts_are_refused():
    one, other = Nest.of(0, [Run(2**20, 3, 0), Run(2, 1, 1)]), Nest.of(0, [Run(2**20, 4, 0), Run(2, 1, 1)])
    with pytest.raises(LayoutError, match="have over 16384 parts in common"):
        common(one, other)


def test_groups_and_a_part_of_all_rows_meet_in_few_parts():
    heads, rows = Nest.of(64, [Run(32, 192, 0), Run(64, 1, 1)]), Nest.of(0, [Run(1500, 1, 0)])
    assert len(common(heads, rows)) <= 3
