"""Who holds which block, against plain lists."""

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from shardwise.geometry import ints
from shardwise.layout.form import Holders

OWNERS = st.sampled_from([0, 1, 2, 3, 5, 8, 40, 10**6, 10**9])  # near each other or far apart: two ways to look up


@st.composite
def rows_of_owners(draw):
    """Rows of rising owners, of any lengths; an owner may be in several rows."""
    return draw(st.lists(st.lists(OWNERS, unique=True, max_size=7).map(sorted), min_size=1, max_size=6))


def held_by(rows):
    return Holders.of(ints([len(row) for row in rows]), ints([owner for row in rows for owner in row]))


@given(rows_of_owners(), st.data())
def test_hold_says_pair_by_pair_whether_an_owner_is_in_a_row(rows, data):
    pairs = data.draw(st.lists(st.tuples(st.integers(0, len(rows) - 1), OWNERS), min_size=1, max_size=20))
    row, owner = (ints(side) for side in zip(*pairs, strict=True))
    expected = [asked in rows[at] for at, asked in pairs]
    if any(rows):  # a layout has an owner at least
        np.testing.assert_array_equal(held_by(rows).hold(row, owner), expected)


@given(rows_of_owners())
def test_expand_and_filter_keep_rows_and_owners_together(rows):
    holders = held_by(rows)
    index, owner = holders.expand(np.arange(len(rows)))
    assert list(zip(index.tolist(), owner.tolist(), strict=True)) == [(i, o) for i, row in enumerate(rows) for o in row]
    odd = holders.filtered(holders.owners % 2 == 1)
    assert [odd.owners[a:b].tolist() for a, b in zip(odd.edges, odd.edges[1:], strict=False)] == [
        [o for o in row if o % 2] for row in rows
    ]


@given(st.lists(OWNERS, unique=True, min_size=1))
def test_row_of_finds_the_one_row_of_an_owner(owners):
    rows = [sorted(owners[:2]), sorted(owners[2:])]
    expected = {owner: at for at, row in enumerate(rows) for owner in row}
    asked = sorted(expected) + [owner for owner in (4, 7, 10**7) if owner not in expected]
    np.testing.assert_array_equal(held_by(rows).row_of(ints(asked)), [expected.get(owner, -1) for owner in asked])


@given(rows_of_owners(), st.integers(0, 20))
def test_pick_takes_turns_among_the_owners_of_a_row(rows, turn):
    holders = held_by(rows)
    picked = holders.pick(np.arange(len(rows)), np.full(len(rows), turn))
    assert picked.tolist() == [row[turn % len(row)] if row else -1 for row in rows]
