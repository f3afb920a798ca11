"""Plans as JSON: they come back the same, or are refused in words."""

import json

import pytest
from copying import rows
from hypothesis import given, settings
from hypothesis import strategies as st

from shardwise import Layout, Plan, PlanError, ShardwiseError, parse, plan
from shardwise.testing import strategies

MADE = plan("8x6/S0@4", "8x6/R@3", itemsize=4, max_bytes=40, hosts={0: "a", 1: "a", 2: "b", 3: "b"})


def edited(text=None, **changes):
    """The file of a plan with some entries replaced; "source.layout" reaches inside."""
    found = json.loads(text or MADE.to_json())
    for path, value in changes.items():
        *outer, last = path.split("__")
        place = found
        for name in outer:
            place = place[name]
        place[last] = value
    return json.dumps(found)


@given(strategies.pairs(), st.sampled_from([None, 1, 2]), st.booleans())
@settings(max_examples=40)
def test_a_plan_comes_back_the_same(pair, hosts, copies):
    made = plan(*pair, itemsize=2, hosts=hosts, max_bytes=4000)
    again = Plan.from_json(made.to_json(copies=copies))
    assert again == made
    assert rows(again.copies) == rows(made.copies)


@pytest.mark.parametrize(
    "hosts", [{0: "a", 1: "b"}, {0: 7, 1: 8}, {0: None, 1: True}, {0: ("rack", 1), 1: ("rack", 2)}]
)
def test_hosts_of_any_kind_come_back(hosts):
    made = plan("8/S0@2", "8/R@2", hosts=hosts)
    assert Plan.from_json(made.to_json()) == made


def test_a_relabelled_plan_comes_back():
    made = plan("8/S0@2", "8/S0@2:1,0", relabel=True)
    assert Plan.from_json(made.to_json()).target == parse("8/S0@2")


def test_the_file_says_what_moves_for_other_tools():
    found = json.loads(plan("4x2/S0@2", "4x2/S1@2", itemsize=4).to_json(copies=True))
    assert found["source"]["layout"] == "4x2/S0@2"
    assert found["source"]["fingerprint"] == parse("4x2/S0@2").fingerprint
    assert (found["bytes_moved"], found["messages"]) == (16, 2)
    copy = {"source": 0, "target": 1, "lo": [0, 1], "hi": [2, 2], "term": 0, "step": 0, "round": 0}
    assert copy in found["copies"]
    assert len(found["copies"]) == 4


def test_a_plan_without_its_copies_is_short():
    assert len(plan("4096x4096/S0@64", "4096x4096/S1@64").to_json()) < 1000


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("", ["not a plan file"]),
        (MADE.to_json()[:-20], ["not a plan file"]),
        ("[]", ["not a plan file", "version 1"]),
        ("{}", ["not a plan file", "version 1", "None"]),
        ("[" * 100_000, ["not a plan file"]),
        (edited(shardwise_plan=2), ["version 1", "2"]),
        (edited(source__layout="8x6/S0@2"), ["fingerprint of the source"]),
        (edited(target__layout="8x6/S0@3"), ["fingerprint of the target"]),
        (edited(source__layout="8x6/S0@"), ["how many owners"]),
        (edited(source__layout="6x8/S0@4"), ["(6, 8)", "(8, 6)"]),
        (edited(source__layout=7), ["not a whole plan file"]),
        (edited(source=None), ["not a whole plan file"]),
        (edited(source__fingerprint="0" * 32), ["fingerprint of the source", "0" * 32]),
        (edited(target__fingerprint="0" * 32), ["fingerprint of the target"]),
        (edited(copies_fingerprint="0" * 32), ["fingerprint of the copies"]),
        (edited(max_bytes=80), ["fingerprint of the copies"]),
        (edited(hosts=None), ["fingerprint of the copies"]),
        (edited(itemsize="4"), ["itemsize"]),
        (edited(hosts=[[0], [0]]), ["no host"]),
        (edited(hosts=5), ["not a whole plan file"]),
        (edited(plan("8/S0@2", "8/R@2", itemsize=4).to_json(), itemsize=2), ["bytes_moved"]),
        (edited(bytes_moved=1), ["bytes_moved"]),
    ],
)
def test_a_damaged_file_is_refused(text, words):
    with pytest.raises(ShardwiseError) as caught:
        Plan.from_json(text)
    assert [word for word in words if word not in str(caught.value)] == [], str(caught.value)


@pytest.mark.parametrize("name", json.loads(MADE.to_json()))
def test_a_file_that_lacks_an_entry_is_refused(name):
    found = json.loads(MADE.to_json())
    del found[name]
    with pytest.raises(PlanError, match="plan file"):
        Plan.from_json(json.dumps(found))


def test_a_plan_is_for_its_own_layouts_only():
    assert MADE.check(Layout.chunk((8, 6), 0, 4), parse("8x6/R@3:2,1,0")) is MADE
    with pytest.raises(PlanError, match=r"source layout Layout\('8x6/S0@4'\), not for Layout\('8x6/S0@2'\)"):
        MADE.check(parse("8x6/S0@2"), MADE.target)
    with pytest.raises(PlanError, match=r"target layout .*8x6/R@3.*plan again"):
        MADE.check(MADE.source, parse("8x6/S1@2"))
