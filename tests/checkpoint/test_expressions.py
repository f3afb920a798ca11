"""Expressions in rules: they are what Python would compute, and nothing else can be asked for."""

import operator

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shardwise.checkpoint.expressions import LARGEST, LONGEST, Expression, expression
from shardwise.errors import LayoutError

NUMBERS = {"expert": 7, "ep": 4, "hidden_size": 64, "zero": 0}
OPERATIONS = {
    "+": operator.add,
    "-": operator.sub,
    "*": operator.mul,
    "//": operator.floordiv,
    "%": operator.mod,
}


def joined(parts):
    """The text of an operation, and its value; None where it divides by 0 or is too large."""
    (left, a), sign, (right, b) = parts
    impossible = a is None or b is None or (b == 0 and sign in ("//", "%"))
    value = None if impossible else OPERATIONS[sign](a, b)
    return f"({left} {sign} {right})", None if value is None or abs(value) >= LARGEST else value


def negated(part):
    text, value = part
    return f"-{text}", None if value is None else -value


LEAVES = st.integers(0, 2**61).map(lambda n: (str(n), n)) | st.sampled_from(sorted(NUMBERS.items()))
TREES = st.recursive(
    LEAVES,
    lambda inner: st.tuples(inner, st.sampled_from(sorted(OPERATIONS)), inner).map(joined) | inner.map(negated),
    max_leaves=6,
)


@given(TREES)
def test_an_expression_has_the_value_that_python_computes(tree):
    text, expected = tree
    if len(text) > LONGEST:
        return
    if expected is None:
        with pytest.raises(LayoutError, match=r"by 0|too large"):
            Expression(text).value(NUMBERS)
    else:
        assert Expression(text).value(NUMBERS) == expected


@given(st.text(max_size=40) | st.text("0129ab_ +-*/%().,[]<>=!'\"if", max_size=40))
def test_any_text_has_a_value_or_is_refused(text):
    try:
        found = Expression(text)
        value = found.value(dict.fromkeys(found.names, 3))
    except LayoutError:
        return
    assert isinstance(value, int)
    assert abs(value) < LARGEST


REFUSED = [
    "",
    "1.5",
    "a.b",
    "f(1)",
    "2 ** 3",
    "1 / 2",
    "a[0]",
    "'a'",
    "True",
    "1 if a else 2",
    "a and b",
    "a == b",
    "~1",
    "+1",
]
REFUSED += [
    "not a",
    "lambda: 1",
    "a := 1",
    "(1, 2)",
    "()",
    "1 2",
    "1 +",
    "1\n+ 1",
    "007",
    "a; b",
    "__import__('os')",
    "0x10",
    "1_0",
]
REFUSED += ["é", "(" * 90 + "1" + ")" * 89, "9" * 30, str(LARGEST), "a" * (LONGEST + 1)]


@pytest.mark.parametrize("text", REFUSED)
def test_nothing_else_is_an_expression(text):
    with pytest.raises(LayoutError, match=r"is not an expression|too long"):
        Expression(text)


@pytest.mark.parametrize("given", [None, True, 1.5, -1, [1], 2**62])
def test_other_values_are_no_expressions(given):
    with pytest.raises(LayoutError, match="owners must be a whole number or an expression"):
        expression(given, "owners")


def test_missing_numbers_are_named():
    with pytest.raises(LayoutError, match="'a % b' needs the number 'b'"):
        Expression("a % b").value({"a": 3})


def test_names_are_those_of_numbers():
    assert Expression("(expert + ep) * 2 // ep").names == {"expert", "ep"}
