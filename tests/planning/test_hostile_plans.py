"""Small layouts and plan files made to take forever, or all memory: one error each, at once and in little memory."""

import json

import pytest
from confined import refused

import shardwise as sw
from shardwise import report
from shardwise.errors import LayoutError, NotationError, PlanError

COLUMNS = "+".join(f"0:262144,{n}:{n + 1}" for n in range(8))
DEEP = "[" * 3000 + "]" * 3000


def plan_file(**changes):
    """The text of a plan of rows to columns, changed."""
    said = json.loads(sw.plan("8x6/S0@2", "8x6/S1@2").to_json()) | changes
    return json.dumps(said)


def of_layouts(source, target):
    return plan_file(source={"layout": source, "fingerprint": ""}, target={"layout": target, "fingerprint": ""})


LAYOUTS = {
    "many owners": "8x6/S0@4194304",
    "very many owners": "8x6/S0@" + "9" * 19,
    "owners by axes": "8x6/R,R,R@1048576x1048576x2",
    "very many axes": "8/" + ",".join("R" * 3000) + "@" + "x".join(["9" * 19] * 3000),
    "100 axes": "8/" + ",".join("R" * 100) + "@" + "x".join("1" * 100),
    "very many dims": "x".join(["9" * 18] * 3000) + "/R@2",
    "a long number": "8/S0@" + "9" * 5000,
    "a long dim": "8/S" + "9" * 5000 + "@2",
    "a long factor": "8/S0:" + "9" * 5000 + "@2",
    "many blocks": "1099511627776/cyclic0=1@2",
    "many strides": "1099511627776/S0:1099511627776@2",
    "escape sequences": "8x6/S0@4\x1b]0;owned\x07\x1b[2J\u202e\ud800",
}


@pytest.mark.parametrize("text", LAYOUTS.values(), ids=LAYOUTS)
def test_a_short_layout_cannot_ask_for_much(text):
    said = refused(lambda: sw.parse(text), LayoutError)
    assert len(said) < 2000


def test_what_is_wrong_with_many_boxes_in_many_dims_is_not_looked_for_forever():
    sides = [",".join(f"{(n * (d + 3)) % 3}:{4 + (n * (d + 5)) % 3}" for d in range(12)) for n in range(20)]
    text = "x".join(["6"] * 12) + f"/overlapping={'+'.join(sides)}@20"
    refused(lambda: report.draw(sw.parse(text).validate()), LayoutError)


PLANS = {
    "64 GiB": of_layouts("65536x65536/S0@65536", "65536x65536/S1@65536"),
    "replicas everywhere": of_layouts("262144/S0@262144", "262144/R@262144"),
    "terms": of_layouts("4096/P@4096", "4096/S0@4096"),
    "a listing": of_layouts("262144x8/S0@262144", f"262144x8/boxes={COLUMNS}@8"),
    "strides": of_layouts("1048576x1048576/S0:1048576,S1:1048576@1x1", "1048576x1048576/R@1"),
    "hosts": plan_file(hosts="x"),
    "half of the hosts": plan_file(hosts=[[0, 1]]),
    "hosts that are lists": plan_file(hosts=[[0, 1], [[], []]]),
    "owners that are lists": plan_file(hosts=[[[], []], [0, 1]]),
    "no layouts": plan_file(source="x", target=None),
    "a long number": plan_file(itemsize=0).replace('"itemsize": 0', '"itemsize": ' + "9" * 4000),
    "a longer number": plan_file(itemsize=0).replace('"itemsize": 0', '"itemsize": ' + "9" * 5000),
    "a number that is none": plan_file(itemsize=float("nan")),
    "an endless number": plan_file(max_bytes=float("inf")),
    "deep": plan_file(hosts=0).replace('"hosts": 0', f'"hosts": {DEEP}'),
    "deep in the version": f'{{"shardwise_plan": {DEEP[2200:-2200]}}}',
    "escape sequences": plan_file(itemsize="\x1b[2J\ud800"),
}


@pytest.mark.parametrize("text", PLANS.values(), ids=PLANS)
def test_a_short_plan_file_cannot_ask_for_much(text):
    refused(lambda: sw.Plan.from_json(text), (PlanError, LayoutError))


def test_a_large_plan_is_read_where_that_is_asked_for():
    made = sw.plan("600x600/S0@600", "600x600/S1@600")
    with pytest.raises(PlanError, match="max_copies="):
        sw.Plan.from_json(made.to_json())
    assert sw.Plan.from_json(made.to_json(), max_copies=2**20) == made


@pytest.mark.parametrize(
    ("source", "target"),
    [
        ("8x6/S0@4", "8x6/S1@3"),
        ("8x6/S0@4", "8x6/R@3"),
        ("8x6/P@3", "8x6/S0@3"),
        ("8x6/P,S0@3x2", "8x6/P,S1@3x2"),
        ("8x6/R@3", "8x6/P@3"),
        ("8x6/boxes=0:8,0:2+0:8,2:6@2", "8x6/S0@4"),
        ("8x6/S0@4", "8x6/flat=0-9,9-48@2"),
        ("8x6/flat=0-20,20-48@2", "8x6/flat=0-9,9-48@2"),
        ("scalar/R@2", "scalar/R@4"),
    ],
)
def test_there_are_never_more_copies_than_said(source, target):
    made = sw.plan(source, target)
    assert made.most_copies() >= len(made.copies)


def test_the_error_of_a_layout_is_one_that_can_be_printed():
    with pytest.raises(NotationError) as error:
        sw.parse("8x6/\x1b[31m@2\ud800")
    assert "\\x1b[31m" in str(error.value)
    assert str(error.value).replace("\n", "").isprintable()
