"""What a plan costs, on cases counted by hand; and one owner's part of a very large plan."""

from collections import Counter

import numpy as np
import pytest
from copying import itemsizes, rows, staged
from hypothesis import given, settings
from hypothesis import strategies as st

from shardwise import Box, Copy, Layout, Mesh, plan
from shardwise.testing import strategies

TRANSPOSE = plan("4x4/S0@2", "4x4/S1@2", itemsize=4)


def test_rows_to_columns_of_two_is_counted_by_hand():
    assert (TRANSPOSE.bytes_moved, TRANSPOSE.bytes_local, TRANSPOSE.lower_bound) == (32, 32, 32)
    assert (TRANSPOSE.messages, TRANSPOSE.rounds, TRANSPOSE.peak_bytes) == (2, 1, 32)
    assert TRANSPOSE.sent == TRANSPOSE.received == {0: 16, 1: 16}
    assert TRANSPOSE.matrix().tolist() == [[0, 16], [16, 0]]
    assert TRANSPOSE.balance == 1.0
    assert TRANSPOSE.copies[1] == Copy(0, 1, Box((0, 2), (2, 4)))
    assert [copy.local for copy in TRANSPOSE.copies] == [True, False, False, True]


def test_one_to_three_others_is_counted_by_hand():
    made = plan("12/R@1:5", "12/split0=6,4,2@3:5,7,9", itemsize=1)
    assert made.owners == (5, 7, 9)
    assert made.matrix().tolist() == [[0, 4, 2], [0, 0, 0], [0, 0, 0]]
    assert made.sent == {5: 6, 7: 0, 9: 0}
    assert made.received == {5: 0, 7: 4, 9: 2}
    assert made.balance == pytest.approx((6 + 4 + 2) / 3 / 6)
    assert (made.messages, made.peak_bytes) == (2, 6)


def test_nothing_to_move_costs_nothing():
    made = plan("8x6/S0@4", "8x6/S0@4", itemsize=2)
    assert (made.bytes_moved, made.messages, made.rounds, made.peak_bytes) == (0, 0, 0, 0)
    assert (made.balance, made.estimate()) == (1.0, 0.0)
    assert made.bytes_local == 96


def test_a_relay_is_two_rounds():
    made = plan("8/R@1", "8/R@4", itemsize=1, hosts=2)
    # 0 -> 1 at hand; 2 fetches and gives to 3
    assert made.matrix().tolist() == [[0, 8, 8, 0], [0, 0, 0, 0], [0, 0, 0, 8], [0, 0, 0, 0]]
    assert (made.rounds, made.messages, made.peak_bytes) == (2, 3, 16)


def test_a_relay_of_much_is_shared_by_its_takers():
    half = 2**20
    made = plan(f"{2 * half}/R@1", f"{2 * half}/R@4", itemsize=1, hosts=2)
    # 0 -> 1 at hand; 2 and 3 fetch half each, then swap halves
    assert made.matrix().tolist() == [[0, 2 * half, half, half], [0] * 4, [0, 0, 0, half], [0, 0, half, 0]]
    assert (made.rounds, made.messages, made.peak_bytes) == (2, 5, 4 * half)


def test_the_estimate_adds_up_the_busiest_owner_of_every_round():
    model = {"latency": 1.0, "bandwidth": 2.0, "host_latency": 0.25, "host_bandwidth": 8.0}
    assert TRANSPOSE.estimate(**model) == 1 + 16 / 2
    one_host = plan("4x4/S0@2", "4x4/S1@2", itemsize=4, hosts=2)
    assert one_host.estimate(**model) == 0.25 + 16 / 8
    relay = plan("8/R@1", "8/R@4", itemsize=1, hosts=2)
    assert relay.estimate(**model) == (0.25 + 8 / 8) + (1 + 8 / 2) + (0.25 + 8 / 8)


def test_rounds_cost_latency_and_nothing_else():
    whole, cut = (plan("8x6/S0@2", "8x6/S1@2", itemsize=1, max_bytes=limit) for limit in (1000, 12))
    assert cut.rounds > whole.rounds == 1
    free = {"latency": 0.0, "bandwidth": 1.0}
    assert cut.estimate(**free) == pytest.approx(whole.estimate(**free))
    assert cut.estimate(latency=1.0, bandwidth=1e9) > whole.estimate(latency=1.0, bandwidth=1e9)


@given(strategies.pairs(), st.sampled_from([None, 2]), st.sampled_from([None, 60]))
@settings(max_examples=40)
def test_all_totals_follow_from_the_copies(pair, hosts, limit):
    made = plan(*pair, itemsize=1, hosts=hosts, max_bytes=limit)
    remote, widths = [c for c in made.copies if not c.local], itemsizes(made)
    expected = np.zeros((len(made.owners), len(made.owners)), dtype=int)
    for c in remote:
        expected[made.owners.index(c.source), made.owners.index(c.target)] += c.box.volume * widths[c.step]
    np.testing.assert_array_equal(made.matrix(), expected)
    assert list(made.sent.values()) == expected.sum(axis=1).tolist()
    assert list(made.received.values()) == expected.sum(axis=0).tolist()
    assert made.bytes_moved == expected.sum()
    assert made.bytes_moved + made.bytes_local == sum(c.box.volume * widths[c.step] for c in made.copies)
    assert made.messages == len({(c.source, c.target, c.step, c.round) for c in remote})
    assert made.peak_bytes == max(staged(made).values(), default=0) + made.bytes_between


def test_explain_says_what_moves_and_who_is_busy():
    text = plan("8x6/P@4", "8x6/R@4", itemsize=4, hosts=2).explain()
    words = ["8x6/P@4", "8x6/R@4", "no plan can move less", "sum of 4 terms", "owner", "keeps", "sends", "receives"]
    assert [word for word in words if word not in text] == []


def test_explain_is_short_for_large_worlds():
    text = plan("4096x64/S0@1024", "4096x64/S1@64").explain()
    assert len(text.splitlines()) < 40
    assert "more owners" in text


def test_counts_of_bytes_do_not_overflow():
    cells = 2**49
    made = plan(f"{cells}/R@1:0", f"{cells}/R@1:1", itemsize=2**10)
    assert made.bytes_moved == made.lower_bound == made.peak_bytes == made.sent[0] == cells * 2**10


def test_very_many_replicas_of_very_many_cells_do_not_overflow():
    size, count = 2**50 - 1, 2**14
    half = np.array([[0], [size // 2]] * count), np.array([[size // 2], [size]] * count)
    source = Layout.boxes((size,), (np.repeat(np.arange(count), 2), *half))
    made = plan(source, Layout.replicated((size,), [0]))
    assert made.bytes_moved == 0


# --- one of 16,384 owners --------------------------------------------------------------------------------------------

WORLD = (16, 32, 32)
SHAPE = (64, 96, 160)


def corners(dims):
    """lo and hi of every owner's box, where mesh axis n splits dim `dims[n]`."""
    place = np.indices(WORLD).reshape(3, -1)
    lo, hi = np.empty((2, place.shape[1], 3), dtype=int)
    for axis, dim in enumerate(dims):
        size = -(-SHAPE[dim] // WORLD[axis])
        lo[:, dim] = np.minimum(place[axis] * size, SHAPE[dim])
        hi[:, dim] = np.minimum(lo[:, dim] + size, SHAPE[dim])
    return lo, hi


def meeting(owner, own, others):
    """(other owner, box) wherever the box of `owner` in one layout shares cells with a box in the other."""
    lo, hi = np.maximum(own[0][owner], others[0]), np.minimum(own[1][owner], others[1])
    return {(int(i), Box(lo[i], hi[i])) for i in np.flatnonzero((lo < hi).all(axis=1))}


def test_one_owners_part_of_a_very_large_plan_is_what_its_boxes_meet():
    source, target = (Layout.on_mesh(SHAPE, WORLD, [f"S{d}" for d in dims]) for dims in ((0, 1, 2), (2, 0, 1)))
    made = plan(source, target)
    here, there = corners((0, 1, 2)), corners((2, 0, 1))
    for owner in (0, 777, 9999, 16383):
        copies = made.for_owner(owner).copies
        assert {(c.target, c.box) for c in copies if c.source == owner} == meeting(owner, here, there)
        assert {(c.source, c.box) for c in copies if c.target == owner} == meeting(owner, there, here)
    assert "copies" not in made.__dict__  # nobody had to look at everybody


def test_parts_of_a_large_plan_with_replicas_agree_with_the_whole():
    mesh = Mesh(a=8, b=8, c=8)
    made = plan(
        Layout.on_mesh((64, 64), mesh, ["S0", "R", "S1"]), Layout.on_mesh((64, 64), mesh, ["R", "S1", "S0"]), hosts=8
    )
    whole = rows(made.copies)
    for owner in (0, 77, 511):
        assert rows(made.for_owner(owner).copies) == [row for row in whole if owner in row[:2]]


@given(strategies.pairs(), st.integers(1, 3))
@settings(max_examples=50)
def test_flows_are_the_bytes_of_every_pair_of_owners_that_talks(case, itemsize):
    made = plan(*case, itemsize=itemsize)
    counted = Counter()
    for copy in made.copies:
        if not copy.local:
            counted[copy.source, copy.target] += copy.box.volume * itemsize
    source, target, size = made.traffic.flows()
    owners = made.owners
    found = {(owners[s], owners[t]): n for s, t, n in zip(source.tolist(), target.tolist(), size.tolist(), strict=True)}
    assert found == dict(counted)
    assert len(size) == len(found)
