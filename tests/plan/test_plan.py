"""Plans between layouts of every kind: right, minimal, merged, even, and the same for everybody."""

import os
import subprocess
import sys
from collections import defaultdict

import numpy as np
import pytest
from copying import carried, rows, staged
from hypothesis import given, settings
from hypothesis import strategies as st
from oracle import any_touch, assert_same_buffers, buffers, held, missing, numbered

from shardwise import Layout, Mesh, Plan, parse, plan
from shardwise.testing import gather, scatter, simulate, strategies

FULL = [kind for kind in strategies.KINDS if kind != "partial"]
LISTED = ["boxes", "overlapping", "flat"]


@st.composite
def hosted(draw, kinds=FULL):
    """A pair of layouts and a host for every owner."""
    source, target = draw(strategies.pairs(kinds))
    owners = sorted({*source.owners(), *target.owners()})
    return source, target, {owner: draw(st.sampled_from("abc")) for owner in owners}


@st.composite
def limited(draw):
    """A plan under a byte limit that is hard to hold."""
    source, target, hosts = draw(hosted(strategies.KINDS))
    itemsize = draw(st.sampled_from([1, 2, 4]))
    least = 2 * len(hosts) - 1
    cells = draw(st.integers(least, least + 12))
    return plan(
        source, target, itemsize=itemsize, max_bytes=cells * itemsize, hosts=draw(st.sampled_from([None, hosts]))
    )


# --- right -----------------------------------------------------------------------------------------------------------


@given(strategies.pairs())
def test_every_plan_proves_itself_and_brings_the_values(pair):
    source, target = pair
    whole = numbered(source.shape)
    made = plan(source, target).verify()
    after = simulate(made, scatter(whole, source))
    np.testing.assert_array_equal(gather(after, target), whole)
    if target.op is None:
        assert_same_buffers(after, buffers(target, whole))


@given(strategies.pairs(FULL))
def test_there_and_back_is_the_identity(pair):
    source, target = pair
    before = scatter(numbered(source.shape), source)
    after = simulate(plan(target, source), simulate(plan(source, target), before))
    assert_same_buffers(after, before)


@given(strategies.pairs(FULL))
def test_cells_that_an_owner_holds_stay_with_it(pair):
    source, target = pair
    copies = plan(source, target).copies
    have, lacks = held(source), missing(source, target)
    for owner, wants in held(target).items():
        kept = carried(copies, source.shape, lambda c, o=owner: c.local and c.target == o)
        got = carried(copies, source.shape, lambda c, o=owner: not c.local and c.target == o)
        np.testing.assert_array_equal(kept, wants & have.get(owner, np.False_))
        np.testing.assert_array_equal(got, lacks[owner])


@given(strategies.pairs(FULL))
def test_what_is_sent_is_held_by_its_sender(pair):
    source, target = pair
    have = held(source)
    for copy in plan(source, target).copies:
        assert have[copy.source][(*copy.box.slices, ...)].all()


@given(strategies.pairs(), st.integers(1, 8))
def test_no_plan_could_move_less(pair, itemsize):
    source, target = pair
    made = plan(source, target, itemsize=itemsize)
    assert made.bytes_moved == made.lower_bound
    if source.op is None and target.op is None:
        assert made.lower_bound == itemsize * sum(int(lacks.sum()) for lacks in missing(source, target).values())


# --- the same for everybody ------------------------------------------------------------------------------------------


@given(hosted(strategies.KINDS), st.booleans())
def test_an_owners_part_is_its_share_of_the_whole_plan(case, with_hosts):
    source, target, hosts = case
    made = plan(source, target, hosts=hosts if with_hosts else None)
    assert_parts_agree(made)


@given(limited())
def test_an_owners_part_is_its_share_of_the_rounds(made):
    assert_parts_agree(made)


def assert_parts_agree(made):
    whole = rows(made.copies)
    for owner in made.owners:
        part = made.for_owner(owner)
        assert rows(part.copies) == [row for row in whole if owner in row[:2]]
        assert rows(part.sends) == [row for row in whole if row[0] == owner != row[1]]
        assert rows(part.receives) == [row for row in whole if row[1] == owner != row[0]]
        assert rows(part.local) == [row for row in whole if row[0] == row[1] == owner]


@given(limited())
def test_plans_are_the_same_however_their_layouts_were_made(made):
    again = Plan(parse(str(made.source)), parse(str(made.target)), made.itemsize, made.max_bytes, made.hosts)
    assert again == made
    assert rows(again.copies) == rows(made.copies)


def test_plans_are_the_same_in_every_process():
    script = "import sys; from shardwise import plan; print(plan(*sys.argv[1:], hosts=2, max_bytes=64).to_json())"
    texts = ["12x10/S0,R@3x2", "12x10/boxes=0:7,0:10+7:12,0:4+7:12,4:10@3"]
    made = plan(*texts, hosts=2, max_bytes=64).to_json()
    for seed in ("0", "77"):
        env = {**os.environ, "PYTHONHASHSEED": seed}
        printed = subprocess.run([sys.executable, "-c", script, *texts], capture_output=True, check=True, env=env)
        assert printed.stdout.decode().strip() == made


def test_owners_may_have_any_numbers():
    far = [2**63 - 1, 2**62, 2**40, 5]
    for source in (Layout.chunk((12, 4), 0, far), Layout.on_mesh((12, 4), Mesh.of((2, 2), ranks=far), ["P", "S0"])):
        for target in (Layout.replicated((12, 4), far[::-1]), parse(f"12x4/flat=0-30,30-48@2:{far[0]},7")):
            made = plan(source, target, max_bytes=40).verify()
            assert_parts_agree(made)
            after = simulate(made, scatter(numbered((12, 4)), source))
            assert_same_buffers(after, buffers(target, numbered((12, 4))))


# --- under a byte limit ----------------------------------------------------------------------------------------------


@given(limited())
@settings(max_examples=150)
def test_no_owner_stages_more_than_the_limit(made):
    found = staged(made)
    assert max(found.values(), default=0) == made.peak_bytes
    assert made.peak_bytes <= made.max_bytes
    assert made.rounds == len({(step, turn) for _, step, turn in found})


@given(limited())
@settings(max_examples=20)  # one by one, every owner looks at all its copies in each of very many rounds
def test_plans_in_rounds_prove_themselves_and_bring_the_values(made):
    whole = numbered(made.source.shape)
    after = simulate(made.verify(), scatter(whole, made.source))
    np.testing.assert_array_equal(gather(after, made.target), whole)
    assert made.bytes_moved == plan(made.source, made.target, itemsize=made.itemsize).bytes_moved


def test_a_limit_that_is_never_reached_changes_nothing():
    texts = "12x10/S0@3", "12x10/S1@3"
    assert rows(plan(*texts, max_bytes=10**6).copies) == rows(plan(*texts).copies)


# --- hosts -----------------------------------------------------------------------------------------------------------


@given(hosted())
@settings(max_examples=150)
def test_a_host_receives_each_cell_that_it_lacks_once_and_no_other(case):
    source, target, hosts = case
    made = plan(source, target, hosts=hosts).verify()
    have, lacks = held(source), missing(source, target)
    for host in set(hosts.values()):
        here = [owner for owner, where in hosts.items() if where == host]
        wanted = np.any([lacks[o] for o in here if o in lacks] or [np.zeros(source.shape, bool)], axis=0)
        at_hand = np.any([have[o] for o in here if o in have] or [np.zeros(source.shape, bool)], axis=0)
        arrived = carried(made.copies, source.shape, lambda c, h=host: hosts[c.target] == h and hosts[c.source] != h)
        np.testing.assert_array_equal(arrived, wanted & ~at_hand)


@given(hosted(strategies.KINDS))
def test_what_is_handed_on_stays_on_its_host_and_values_arrive(case):
    source, target, hosts = case
    made = plan(source, target, hosts=hosts)
    if source.op is None:
        assert all(hosts[c.source] == hosts[c.target] for c in made.copies if c.step)
    whole = numbered(source.shape)
    np.testing.assert_array_equal(gather(simulate(made, scatter(whole, source)), target), whole)
    assert made.bytes_moved == made.lower_bound


def test_hosts_are_given_by_number_by_map_or_by_mesh():
    source, target = parse("8x6/S0@4"), parse("8x6/S1@4")
    made = plan(source, target, hosts=2)
    assert rows(made.copies) == rows(plan(source, target, hosts={0: "a", 1: "a", 2: "b", 3: "b"}).copies)
    assert made == plan(source, target, hosts=Mesh(x=4, hosts=2))


# --- replicas --------------------------------------------------------------------------------------------------------


@given(st.integers(1, 3), st.integers(1, 6), strategies.layouts((7, 5), FULL))
def test_replicas_share_what_is_asked_of_their_block_to_the_cell(blocks, replicas, target):
    source = Layout.on_mesh((7, 5), (blocks, replicas), ["S0", "R"])
    made = plan(source, target)
    for block in range(blocks):
        sent = [made.sent[block * replicas + r] for r in range(replicas)]
        assert max(sent) - min(sent) <= 1


def test_of_very_many_replicas_only_some_are_asked_for_a_box():
    made = plan(Layout.replicated((1000,), 500), Layout.replicated((1000,), [1000]))
    assert 2 <= made.messages <= 8
    assert max(made.sent.values()) <= 1000 // made.messages + 1


def test_a_replica_on_the_same_host_is_preferred():
    source = Layout.replicated((8, 6), [0, 2, 4])
    made = plan(source, Layout.chunk((8, 6), 0, [1, 3, 5]), hosts=2)
    assert {(c.source, c.target) for c in made.copies} == {(0, 1), (2, 3), (4, 5)}


# --- merged ----------------------------------------------------------------------------------------------------------


@given(strategies.pairs(FULL))
@settings(max_examples=150)
def test_copies_of_one_pair_that_touch_are_one(pair):
    source, target = pair
    groups = defaultdict(list)
    for copy in plan(source, target).copies:
        groups[copy.source, copy.target, copy.step].append(copy.box)
    assert not any(any_touch(boxes) for boxes in groups.values())


@given(strategies.pairs(["partial"], LISTED))
@settings(max_examples=50)
def test_terms_of_one_pair_that_touch_are_one(pair):
    groups = defaultdict(list)
    for copy in plan(*pair).copies:
        groups[copy.source, copy.target, copy.step, copy.term].append(copy.box)
    assert not any(any_touch(boxes) for boxes in groups.values())


def test_rows_to_the_same_rows_in_pieces_is_one_copy_per_pair():
    pieces = [(0, (row, 0), (row + 1, 10)) for row in range(8)]
    made = plan(Layout.boxes((8, 10), pieces), Layout.replicated((8, 10), [1]))
    assert [str(copy.box) for copy in made.copies] == ["[0:8, 0:10]"]


@pytest.mark.parametrize("shape", [(), (0,), (4, 0), (1,)])
def test_small_and_empty_tensors_have_plans(shape):
    for source in (Layout.replicated(shape, 2), Layout.on_mesh(shape, (2,), ["P"])):
        for target in (Layout.replicated(shape, [1, 2]), Layout.on_mesh(shape, (3,), ["Pmax"])):
            made = plan(source, target, max_bytes=100, hosts=2).verify()
            whole = numbered(shape)
            np.testing.assert_array_equal(gather(simulate(made, scatter(whole, source)), target), whole)
            assert made.explain()
