"""verify() sees through every change to a plan's copies that changes what they do."""

from dataclasses import replace

import numpy as np
import pytest
from copying import FULL
from hypothesis import given, settings
from hypothesis import strategies as st
from oracle import held

from shardwise import PlanError, plan
from shardwise.geometry import Boxes, ints
from shardwise.planning.verify import verify
from shardwise.testing import strategies

PLANS = {
    "grids": plan("8x6/S0@4", "8x6/S1@3"),
    "replicas": plan("8x6/S0,R@2x3", "8x6/S1@4"),
    "boxes": plan("8x6/boxes=0:5,0:6+5:8,0:2+5:8,2:6@3", "8x6/flat=0-11,11-30,30-48@3"),
    "overlapping": plan("8x6/overlapping=0:5,0:6+3:8,0:6@2", "8x6/R@3"),
    "relayed": plan("8x6/S0@2", "8x6/R@6", hosts=2),
    "reduced": plan("8x6/P@3", "8x6/S0@3"),
    "shared": plan("8x6/P@4", "8x6/R@4"),
    "shared and relayed": plan("8x6/P,R@2x2", "8x6/R@8", hosts=2),
    "added up on hosts": plan("8x6/P@4", "8x6/R@8", hosts=2).legs[0],
    "taken from hosts": plan("8x6/P@4", "8x6/R@8", hosts=2).legs[1],
    "odd sums": plan("8x6/P@6", "8x6/R@6", hosts=3).legs[0],
    "of odd sums": plan("8x6/P@6", "8x6/R@6", hosts=3).legs[1],
    "reduced in rounds": plan("12/P@3", "12/S0@3", itemsize=1, max_bytes=7),
    "terms": plan("8x6/P,S0@2x2", "8x6/P,S1@2x2"),
    "terms with replicas": plan("8x6/P,R@2x2", "8x6/P,S1@2x2"),
    "terms relayed": plan("8x6/P@2", "8x6/P,R@2x2", hosts=2),
    "filled": plan("8x6/S0@3", "8x6/P@3"),
    "rounds": plan("8x6/S0@4", "8x6/S1@4", itemsize=1, max_bytes=12),
    "scalar": plan("scalar/R@1", "scalar/R@3"),
}
every_plan = pytest.mark.parametrize("made", PLANS.values(), ids=PLANS)


def check(made, copies):
    edges = made.sums.edges if made.sums and made.sums.made else None
    verify(made.source, made.target, copies, reducing=made.reducing, edges=edges)


def assert_caught(made, copies):
    with pytest.raises(PlanError, match=r"owner \d+ (does not get|is to send|gets term)"):
        check(made, copies)


def changed(copies, row, **columns):
    """The copies with one row of some columns replaced."""
    found = {name: getattr(copies, name).copy() for name in columns}
    for name, value in columns.items():
        found[name][row] = value
    return replace(copies, **found)


def everything(copies):
    return range(len(copies))


def moved(copies, row, axis, by):
    """The copies with one box shifted."""
    lo, hi = copies.boxes.lo.copy(), copies.boxes.hi.copy()
    lo[row, axis] += by
    hi[row, axis] += by
    return replace(copies, boxes=Boxes(lo, hi))


@every_plan
def test_plans_as_they_are_pass(made):
    check(made, made.copies)


@every_plan
def test_a_dropped_copy_is_missed(made):
    for row in everything(made.copies):
        assert_caught(made, made.copies.take(np.delete(np.arange(len(made.copies)), row)))


@every_plan
def test_a_doubled_copy_is_seen(made):
    for row in everything(made.copies):
        assert_caught(made, made.copies.take(ints([*everything(made.copies), row])))


@every_plan
def test_a_shifted_box_is_seen(made):
    for row in everything(made.copies):
        for axis in range(made.source.ndim):
            assert_caught(made, moved(made.copies, row, axis, 1))
            if made.copies.boxes.lo[row, axis]:
                assert_caught(made, moved(made.copies, row, axis, -1))


@every_plan
def test_a_shrunk_box_is_seen(made):
    for row in everything(made.copies):
        hi = made.copies.boxes.hi.copy()
        hi[row] -= 1
        if made.source.ndim:
            assert_caught(made, replace(made.copies, boxes=Boxes(made.copies.boxes.lo, hi)))


@every_plan
def test_another_receiver_is_seen(made):
    for row, copy in enumerate(made.copies):
        for owner in made.owners:
            if owner != copy.target:
                assert_caught(made, changed(made.copies, row, target=owner))


@every_plan
def test_a_sender_that_lacks_the_cells_is_seen(made):
    have = held(made.source)
    for row, copy in enumerate(made.copies):
        for owner in {*made.owners} if copy.step == 0 else ():
            if owner not in have or not have[owner][(*copy.box.slices, ...)].all():
                assert_caught(made, changed(made.copies, row, source=owner))


def test_a_sender_of_another_term_is_seen():
    for name in ("terms", "terms with replicas"):
        made = PLANS[name]
        for row, copy in enumerate(made.copies):
            assert_caught(made, changed(made.copies, row, source=(copy.source + 2) % 4))
    made = PLANS["reduced"]
    for row, copy in enumerate(made.copies):
        assert_caught(made, changed(made.copies, row, source=(copy.source + 1) % 3))


def test_another_replica_may_send():
    made = PLANS["replicas"]
    for row, copy in enumerate(made.copies):
        check(made, changed(made.copies, row, source=copy.source // 3 * 3 + (copy.source + 1) % 3))


@pytest.mark.parametrize("name", ["relayed", "shared", "shared and relayed"])
def test_cells_cannot_be_handed_on_before_they_arrive(name):
    made = PLANS[name]
    for row, copy in enumerate(made.copies):
        if copy.step:
            assert_caught(made, changed(made.copies, row, step=0))
    swapped = replace(made.copies, step=made.copies.step.max() - made.copies.step)
    assert_caught(made, swapped)


@pytest.mark.parametrize("name", ["relayed", "shared", "shared and relayed"])
def test_cells_cannot_be_handed_on_by_one_that_never_got_them(name):
    made = PLANS[name]
    got = {(c.target, c.box) for c in made.copies if c.step == 0 and c.term == 0}
    for row, copy in enumerate(made.copies):
        for owner in made.owners if copy.step == 1 else ():
            if not any(owner == who and copy.box in box for who, box in got):
                assert_caught(made, changed(made.copies, row, source=owner))


@pytest.mark.parametrize("name", ["reduced", "shared", "shared and relayed", "reduced in rounds"])
def test_a_missing_or_misnamed_term_is_seen(name):
    made = PLANS[name]
    for row, copy in enumerate(made.copies):
        if copy.step == 0:
            assert_caught(made, changed(made.copies, row, term=(copy.term + 1) % made.source.terms))
    for term in range(made.source.terms):
        assert_caught(made, made.copies.take((made.copies.term != term) | (made.copies.step > 0)))


def test_terms_out_of_order_are_seen():
    made = PLANS["reduced"]
    assert_caught(made, replace(made.copies, term=made.source.terms - 1 - made.copies.term))


def test_terms_of_one_cell_in_different_rounds_are_seen():
    made = PLANS["reduced in rounds"]
    assert made.rounds > 1
    for row, copy in enumerate(made.copies):
        assert_caught(made, changed(made.copies, row, round=(copy.round + 1) % made.rounds))


@given(strategies.pairs(FULL), st.data())
@settings(max_examples=50)
def test_no_plan_can_lose_or_double_a_copy_unseen(pair, data):
    made = plan(*pair)
    if len(made.copies):
        row = data.draw(st.integers(0, len(made.copies) - 1))
        assert_caught(made, made.copies.take(np.delete(np.arange(len(made.copies)), row)))
        assert_caught(made, made.copies.take(ints([*everything(made.copies), row])))


def test_a_plan_that_stages_more_than_it_promised_is_refused():
    made = plan("8x6/S0@4", "8x6/S1@4", itemsize=1, max_bytes=9)
    broken = replace(made)
    broken.__dict__["copies"] = replace(made.copies, round=made.copies.round * 0)
    with pytest.raises(PlanError, match="max_bytes=9"):
        broken.verify()
