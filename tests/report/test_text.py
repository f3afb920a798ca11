"""Text pictures show who holds what, and the command line speaks plainly."""

import re
import subprocess
import sys
from math import prod

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shardwise import parse, plan
from shardwise.report import draw, matrix
from shardwise.testing.strategies import layouts


def picture(text):
    return [line.rstrip() for line in text.strip("\n").splitlines()]


def test_lines_stand_only_where_the_holders_change():
    assert draw(parse("8x6/flat=0-20,20-48@2")).splitlines() == picture("""
      0:2   2:6
    ┌───────────┐
0:3 │  0     0  │
    │     ┌─────┤
3:4 │  0  │  1  │
    ├─────┘     │
4:8 │  1     1  │
    └───────────┘
""")


def test_many_owners_are_counted_and_still_told_apart():
    assert draw(parse("8x6/R,S0,R@4x2x4")).splitlines() == picture("""
         0:6
    ┌───────────┐
0:4 │ 16 owners │
    ├───────────┤
4:8 │ 16 owners │
    └───────────┘
""")


def test_replicas_have_commas_and_terms_plus_signs():
    assert "│ 0,1+2,3 │" in draw(parse("8x6/P,R@2x2"))


def test_dims_before_the_last_two_are_slices():
    drawn = draw(parse("4x2x2/S0@2"))
    assert "[0:2, :, :]" in drawn
    assert "[2:4, :, :]" in drawn


@given(layouts())
def test_a_picture_says_no_cells_exactly_where_there_are_none(layout):
    assert draw(layout).startswith("no cells") == (prod(layout.shape) == 0)


@given(st.integers(1, 40), st.integers(1, 40))
def test_of_many_intervals_the_first_ones_and_the_last_are_drawn(rows, columns):
    heads, *table = draw(parse(f"{rows}x{columns}/S0,S1@{rows}x{columns}")).splitlines()
    assert heads.split() == intervals(columns, most=12)
    names = [re.split("[│├┌└]", line)[0].strip() for line in table]
    assert [name for name in names if name] == intervals(rows, most=16)


def intervals(count, most):
    every = [f"{at}:{at + 1}" for at in range(count)]
    return every if count <= most else [*every[: most - 2], "…", every[-1]]


def test_the_matrix_has_a_row_per_sender():
    assert matrix(plan("4x4/S0@2", "4x4/S1@2")).splitlines() == [
        "from \\ to     0     1",
        "        0     .  16 B",
        "        1  16 B     .",
    ]


def test_of_many_flows_the_largest_are_named():
    assert matrix(plan("64x64/S0@32", "64x64/S1@32")).startswith("the 10 largest of 992 flows:")


def shardwise(*words):
    command = [sys.executable, "-m", "shardwise", *words]
    return subprocess.run(command, capture_output=True, encoding="utf-8", timeout=60, check=False)


def test_owners_with_nothing_are_named():
    assert shardwise("show", "5x6/S0@4").stdout.rstrip().endswith("nothing on owner 3")


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["show", "8x6/s0@4"], "did you mean S0?"),
        (["show", "8x6/boxes=0:4,0:6@1"], "[4:8, 0:6] has no owner"),
        (["plan", "8x6/S0@4", "6x8/S0@4"], "a plan needs one shape"),
        (["plan", "8x6/S0@4", "8x6/S1@4", "--dtype", "int4"], "'int4' is not a dtype of whole bytes"),
        (["plan", "8x6/S0@4", "8x6/S1@4", "--dtype", "bf16", "--itemsize", "2"], "give one of them"),
        (["plan", "8x6/S0@4", "8x6/S1@4", "--max-bytes", "3 apples"], "is not a size"),
        (["plan", "8x6/S0@4", "8x6/S1@4", "--max-bytes", "3"], "give at least 28"),
        (["plan", "8x6/S0@4", "8x6/S1@4", "--json", "/no/such/folder/plan.json"], "No such file"),
    ],
)
def test_bad_input_ends_with_one_message_and_code_2(words, said):
    done = shardwise(*words)
    assert done.returncode == 2
    assert said in done.stderr
    assert "Traceback" not in done.stderr


def test_a_plan_is_written_to_a_file_that_can_be_read(tmp_path):
    path = tmp_path / "plan.json"
    done = shardwise("plan", "8x6/S0@4", "8x6/S1@3", "--json", str(path), "--verify")
    assert done.returncode == 0, done.stderr
    assert type(plan("8x6/S0@4", "8x6/S1@3")).from_json(path.read_text()) == plan("8x6/S0@4", "8x6/S1@3")
    printed = shardwise(
        "plan", "8x6/S0@4", "8x6/S1@3", "--dtype", "bf16", "--max-bytes", "0.5KiB", "--json", "-"
    ).stdout
    made = plan("8x6/S0@4", "8x6/S1@3", itemsize=2, max_bytes=512)
    assert type(made).from_json(printed) == made
