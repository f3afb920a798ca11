"""Plans between layouts of every kind: right, minimal, merged, even, and the same for everybody."""

import os
import subprocess
import sys
from collections import Counter, defaultdict

import numpy as np
import pytest
from copying import (
    FULL,
    assert_crosses_once,
    assert_parts_agree,
    assert_right,
    carried,
    hosted,
    limited,
    rows,
    staged,
)
from hypothesis import given, settings
from hypothesis import strategies as st
from oracle import any_touch, assert_same_buffers, held, missing, numbered

from shardwise import Layout, Mesh, Plan, parse, plan
from shardwise.testing import scatter, simulate, strategies

LISTED = ["boxes", "overlapping", "flat"]


# --- right -----------------------------------------------------------------------------------------------------------


@given(strategies.pairs())
@settings(max_examples=80)
def test_every_plan_proves_itself_and_brings_the_values(pair):
    assert_right(plan(*pair))


@given(strategies.pairs(FULL))
@settings(max_examples=40)
def test_there_and_back_is_the_identity(pair):
    source, target = pair
    before = scatter(numbered(source.shape), source)
    after = simulate(plan(target, source), simulate(plan(source, target), before))
    assert_same_buffers(after, before)


@given(strategies.pairs(FULL), st.integers(1, 8))
@settings(max_examples=60)
def test_cells_that_an_owner_holds_stay_with_it_and_all_others_come_once(pair, itemsize):
    source, target = pair
    made = plan(source, target, itemsize=itemsize)
    have, lacks = held(source), missing(source, target)
    for owner, wants in held(target).items():
        kept = carried(made.copies, source.shape, lambda c, o=owner: c.local and c.target == o)
        got = carried(made.copies, source.shape, lambda c, o=owner: not c.local and c.target == o)
        np.testing.assert_array_equal(kept, wants & have.get(owner, np.False_))
        np.testing.assert_array_equal(got, lacks[owner])
    assert made.lower_bound == itemsize * sum(int(mask.sum()) for mask in lacks.values())


@given(strategies.pairs(FULL))
@settings(max_examples=40)
def test_what_is_sent_is_held_by_its_sender(pair):
    source, target = pair
    have = held(source)
    for copy in plan(source, target).copies:
        assert have[copy.source][(*copy.box.slices, ...)].all()


@pytest.mark.parametrize("shape", [(), (0,), (4, 0), (1,)])
def test_small_and_empty_tensors_have_plans(shape):
    for source in (Layout.replicated(shape, 2), Layout.on_mesh(shape, (2,), ["P"])):
        for target in (Layout.replicated(shape, [1, 2]), Layout.on_mesh(shape, (3,), ["Pmax"])):
            made = plan(source, target, max_bytes=100, hosts=2)
            assert_right(made)
            assert made.explain()


# --- the same for everybody ------------------------------------------------------------------------------------------


@given(hosted(), st.booleans())
@settings(max_examples=60)
def test_an_owners_part_is_its_share_of_the_whole_plan(case, with_hosts):
    source, target, hosts = case
    assert_parts_agree(plan(source, target, hosts=hosts if with_hosts else None))


@given(limited())
@settings(max_examples=25)
def test_an_owners_part_is_its_share_of_the_rounds(made):
    assert_parts_agree(made)


@given(limited())
@settings(max_examples=30)
def test_plans_are_the_same_however_their_layouts_were_made(made):
    again = Plan(parse(str(made.source)), parse(str(made.target)), made.itemsize, made.max_bytes, made.hosts)
    assert again == made
    assert rows(again.copies) == rows(made.copies)


def test_plans_are_the_same_in_every_process():
    script = "import sys; from shardwise import plan; print(plan(*sys.argv[1:], hosts=2, max_bytes=99).to_json())"
    texts = ["12x10/S0,R@3x2", "12x10/boxes=0:7,0:10+7:12,0:4+7:12,4:10@3"]
    made = plan(*texts, hosts=2, max_bytes=99).to_json()
    for seed in ("0", "77"):
        env = {**os.environ, "PYTHONHASHSEED": seed}
        printed = subprocess.run([sys.executable, "-c", script, *texts], capture_output=True, check=True, env=env)
        assert printed.stdout.decode().strip() == made


@pytest.mark.parametrize("source", ["chunk", "partial"])
@pytest.mark.parametrize("target", ["replicated", "flat"])
def test_owners_may_have_any_numbers(source, target):
    far = [2**63 - 1, 2**62, 2**40, 5]
    layouts = {
        "chunk": Layout.chunk((12, 4), 0, far),
        "partial": Layout.on_mesh((12, 4), Mesh.of((2, 2), ranks=far), ["P", "S0"]),
        "replicated": Layout.replicated((12, 4), far[::-1]),
        "flat": parse(f"12x4/flat=0-30,30-48@2:{far[0]},7"),
    }
    made = plan(layouts[source], layouts[target], max_bytes=160)
    assert_right(made)
    assert_parts_agree(made)


# --- under a byte limit ----------------------------------------------------------------------------------------------


@given(limited())
@settings(max_examples=40)
def test_no_owner_stages_more_than_the_limit(made):
    found = staged(made)
    assert max(found.values(), default=0) == made.peak_bytes
    assert made.peak_bytes <= made.max_bytes
    assert made.rounds == len({(step, turn) for _, step, turn in found})


@given(limited())
@settings(max_examples=20)  # every owner looks at all its copies in each of very many rounds
def test_plans_in_rounds_prove_themselves_and_bring_the_values(made):
    assert_right(made)


def test_a_limit_that_is_never_reached_changes_nothing():
    texts = "12x10/S0@3", "12x10/S1@3"
    assert rows(plan(*texts, max_bytes=10**6).copies) == rows(plan(*texts).copies)


def test_slices_end_between_rows_where_the_limit_has_room():
    made = plan("64x32/P@4", "64x32/R@4", itemsize=4, max_bytes=6000)
    copies = made.copies
    slices = Counter(zip(copies.source, copies.target, copies.term, copies.step, copies.round, strict=True))
    assert made.rounds > 4
    assert set(slices.values()) == {1}
    assert made.peak_bytes <= 6000


# --- hosts -----------------------------------------------------------------------------------------------------------


@given(hosted(FULL))
@settings(max_examples=60)
def test_a_host_receives_each_cell_that_it_lacks_once_and_no_other(case):
    source, target, hosts = case
    assert_crosses_once(plan(source, target, hosts=hosts), hosts)


@given(hosted())
@settings(max_examples=40)
def test_plans_with_hosts_are_right(case):
    source, target, hosts = case
    assert_right(plan(source, target, hosts=hosts))


@pytest.mark.parametrize(
    ("source", "target", "hosts"),
    [
        ("2/P@2", "2/R,R,S0@2x3x3", {owner: owner == 1 for owner in range(18)}),
        ("1/P@2", "1/P,R@2x2", {0: "a", 1: "b", 2: "a", 3: "a"}),
    ],
)
def test_terms_that_are_handed_on_inside_hosts_come_from_one_owner(source, target, hosts):
    made = plan(source, target, hosts=hosts)
    assert_parts_agree(made)
    assert_right(made)


def test_hosts_are_given_by_number_by_map_or_by_mesh():
    source, target = parse("8x6/S0@4"), parse("8x6/S1@4")
    made = plan(source, target, hosts=2)
    assert made == plan(source, target, hosts={0: "a", 1: "a", 2: "b", 3: "b"})
    assert made == plan(source, target, hosts=Mesh(x=4, hosts=2))


# --- replicas --------------------------------------------------------------------------------------------------------


@given(st.integers(1, 3), st.integers(1, 6), strategies.layouts((7, 5), FULL))
@settings(max_examples=60)
def test_replicas_share_what_is_asked_of_their_block_to_the_cell(blocks, replicas, target):
    source = Layout.on_mesh((7, 5), (blocks, replicas), ["S0", "R"])
    made = plan(source, target, itemsize=1)
    for block in range(blocks):
        sent = [made.sent[block * replicas + r] for r in range(replicas)]
        assert max(sent) - min(sent) <= 1


def test_of_very_many_replicas_only_some_are_asked_for_a_box():
    made = plan(Layout.replicated((1000,), 500), Layout.replicated((1000,), [1000]), itemsize=1)
    assert 2 <= made.messages <= 8
    assert max(made.sent.values()) <= 1000 // made.messages + 1


def test_a_replica_on_the_same_host_is_preferred():
    source = Layout.replicated((8, 6), [0, 2, 4])
    made = plan(source, Layout.chunk((8, 6), 0, [1, 3, 5]), hosts=2)
    assert {(c.source, c.target) for c in made.copies} == {(0, 1), (2, 3), (4, 5)}


# --- merged ----------------------------------------------------------------------------------------------------------


def assert_merged(made):
    groups = defaultdict(list)
    for copy in made.copies:
        groups[copy.source, copy.target, copy.step, copy.term].append(copy.box)
    assert not any(any_touch(boxes) for boxes in groups.values())


@given(strategies.pairs(FULL))
@settings(max_examples=50)
def test_copies_of_one_pair_that_touch_are_one(pair):
    assert_merged(plan(*pair))


@given(strategies.pairs(["partial"], LISTED))
@settings(max_examples=40)
def test_terms_of_one_pair_that_touch_are_one(pair):
    assert_merged(plan(*pair))


def test_rows_to_the_same_rows_in_pieces_is_one_copy_per_pair():
    pieces = [(0, (row, 0), (row + 1, 10)) for row in range(8)]
    made = plan(Layout.boxes((8, 10), pieces), Layout.replicated((8, 10), [1]))
    assert [str(copy.box) for copy in made.copies] == ["[0:8, 0:10]"]
