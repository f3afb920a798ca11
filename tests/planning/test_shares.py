"""Work that several owners share: the same promises where every share is worth a message.

Plans share relays and reductions out only where shares are large. Here two cells are large.
"""

import sys

import pytest
from copying import FULL, assert_crosses_once, assert_parts_agree, assert_right, hosted, limited, staged
from hypothesis import given, settings

from shardwise import plan
from shardwise.testing import strategies


@pytest.fixture(scope="module", autouse=True)
def shares_of_two_cells():
    made = sys.modules["shardwise.planning.plan"]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys.modules["shardwise.planning.choose"], "LEAST_SHARE", 2)
        made._part.cache_clear()
        yield
    made._part.cache_clear()


@given(hosted(FULL))
@settings(max_examples=30)
def test_relays_that_are_shared_cross_between_hosts_once(case):
    source, target, hosts = case
    made = plan(source, target, hosts=hosts)
    assert_crosses_once(made, hosts)
    assert_right(made)


@given(hosted())
@settings(max_examples=30)
def test_parts_agree_on_who_has_which_share(case):
    source, target, hosts = case
    assert_parts_agree(plan(source, target, hosts=hosts))


@given(strategies.pairs(["partial"]))
@settings(max_examples=30)
def test_reductions_that_are_shared_are_right(pair):
    made = plan(*pair)
    assert_right(made)
    assert_parts_agree(made)


@given(limited())
@settings(max_examples=30)
def test_no_owner_stages_more_than_the_limit(made):
    made.verify()
    assert max(staged(made).values(), default=0) == made.peak_bytes <= made.max_bytes


def test_shares_are_even():
    made = plan("24/P@4", "24/R@4", itemsize=1)
    assert set(made.sent.values()) == set(made.received.values()) == {36}
    relayed = plan("24/R@1", "24/R@1:1", itemsize=1, hosts={0: "a", 1: "b"})
    assert relayed.matrix().tolist() == [[0, 24], [0, 0]]
    swapped = plan("24/R@1", "24/R@4", itemsize=1, hosts=2)
    assert swapped.matrix().tolist() == [[0, 24, 12, 12], [0] * 4, [0, 0, 0, 12], [0, 0, 12, 0]]
