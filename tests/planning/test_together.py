"""Parts of many plans, made in one go: the same copies in the same order as one by one."""

import sys

import numpy as np
import pytest
from copying import hosted
from hypothesis import given, settings
from hypothesis import strategies as st

from shardwise import PlanError, plan
from shardwise.planning import Plan, plan_parts, together

COLUMNS = ["source", "target", "term", "step", "round"]


def assert_same(part, other):
    assert part.fill == other.fill
    for column in COLUMNS:
        np.testing.assert_array_equal(getattr(part.copies, column), getattr(other.copies, column))
    np.testing.assert_array_equal(part.copies.boxes.lo, other.copies.boxes.lo)
    np.testing.assert_array_equal(part.copies.boxes.hi, other.copies.boxes.hi)


def one_by_one(plans, owner):
    return [Plan(one.source, one.target, one.itemsize, one.max_bytes, one.hosts).part(owner) for one in plans]


@st.composite
def models(draw):
    """Plans of every kind, of several numbers of dims, and how many intervals are laid end to end at a time."""
    plans = []
    for source, target, hosts in draw(st.lists(hosted(), min_size=1, max_size=6)):
        limit = draw(st.sampled_from([None, None, 4 * (2 * len(hosts) + 5)]))
        plans.append(plan(source, target, max_bytes=limit, hosts=draw(st.sampled_from([None, None, hosts]))))
    return plans, draw(st.sampled_from([1, 20, 2**20]))


@given(models())
@settings(max_examples=40, deadline=None)
def test_parts_that_are_made_together_are_those_made_one_by_one(model):
    plans, most = model
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(together, "MOST", most)
        for owner in sorted({owner for one in plans for owner in one.owners}):
            plan_parts(plans, owner)
            for one, expected in zip(plans, one_by_one(plans, owner), strict=True):
                assert_same(one.part(owner), expected)


PAIRS = [
    ("24x18/S0@8", "24x18/S1@4"),
    ("24x18/cyclic0=2@4", "24x18/S0,R@2x4"),
    ("36/S0@5", "36/R@8"),
    ("24x18/S0@8", "24x18/S0@3"),
    ("0x18/S0@8", "0x18/S1@4"),
    ("2x24x18/S0,S1@2x4", "2x24x18/S2,S1@4x2"),
    ("24x18/P,S0@2x4", "24x18/P,S1@2x4"),
    ("24x18/fused0=8,16@4", "24x18/S0,S1@2x2"),
    ("scalar/R@1", "scalar/R@8"),
    ("24x18/S0@8", "24x18/S1@4"),
]


def test_every_kind_of_grid_is_planned_together():
    made = [plan(*pair) for pair in PAIRS]
    assert all(one.together() for one in made)
    for owner in range(8):
        plan_parts(made, owner)
        for one, expected in zip(made, one_by_one(made, owner), strict=True):
            assert_same(one.part(owner), expected)


@pytest.mark.parametrize("hosts", [None, 2])
@pytest.mark.parametrize("target", ["S0@4", "P@4", "boxes=0:2,0:6+2:8,0:6@2"])
def test_an_owner_without_a_part_gets_an_error_with_and_without_hosts(hosts, target):
    for source in ("R@4", "P@4", "S0@4"):
        made = plan(f"8x6/{source}", f"8x6/{target}", hosts=hosts)
        assert not len(made.part(9).copies)
        with pytest.raises(PlanError, match="owner 9 has no part"):
            made.for_owner(9)


@pytest.mark.parametrize(
    ("source", "target", "options"),
    [
        ("R,S0@2x4", "S1@8", {}),
        ("S0@8", "S1@8", {"hosts": 4}),
        ("S0@8", "S1@8", {"max_bytes": 200}),
        ("P@8", "S1@8", {}),
        ("S0@8", "P@8", {}),
        ("boxes=0:5,0:18+5:24,0:9+5:24,9:18@3", "S1@8", {}),
    ],
)
def test_plans_with_a_choice_are_made_one_by_one(source, target, options):
    made = plan(f"24x18/{source}", f"24x18/{target}", **options)
    plan_parts([made], 1)
    assert made.together() is None
    (expected,) = one_by_one([made], 1)
    assert_same(made.part(1), expected)


def test_tensors_that_share_a_plan_are_planned_once(monkeypatch):
    counted = []

    def counting(pairs, owner):
        counted.append(len(pairs))
        return together.copies_together(pairs, owner)

    monkeypatch.setattr(sys.modules["shardwise.planning.plan"], "copies_together", counting)
    one, other = (plan(f"{rows}x8/S0@4", f"{rows}x8/S1@2") for rows in (8, 12))
    plan_parts([one, other, one, other, one], 0)
    plan_parts([one, other], 0)
    assert counted == [2, 0]


def test_places_of_thousands_of_huge_tensors_do_not_overflow():
    made = plan(f"{2**49}/S0@4", f"{2**49}/S0@3")
    (expected,) = one_by_one([made], 1)
    for copies in together.copies_together([made.together()] * 20_000, 1)[::1999]:
        np.testing.assert_array_equal(copies.boxes.lo, expected.copies.boxes.lo)
        np.testing.assert_array_equal(copies.source, expected.copies.source)
