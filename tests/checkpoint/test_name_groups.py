"""Patterns that stand for names."""

from itertools import product

from hypothesis import given
from hypothesis import strategies as st

from shardwise.checkpoint.name_groups import grouped, products, rename_between

numbers = st.integers(0, 3)


@given(st.sets(st.tuples(numbers, numbers, numbers)))
def test_each_row_is_in_one_product_and_nothing_else_is(rows):
    found = [row for slots in products(rows) for row in product(*slots)]
    assert sorted(found) == sorted(rows)


@given(st.dictionaries(st.from_regex(r"\A(a|0|1|2|00|10)(\.(a|0|1|2|00|10)){0,3}\Z"), st.booleans()))
def test_each_name_has_one_pattern_of_its_kind(names):
    groups = grouped(names)
    assert sorted(name for _, alike in groups for name in alike) == sorted(names)
    for pattern, alike in groups:
        assert len({names[name] for name in alike}) == 1
        assert len(alike) > 1 or pattern == alike[0]


part = st.sampled_from(["a", "b", "model", "w"])
dotted = st.lists(part, min_size=1, max_size=3).map(".".join)
prefixes = st.lists(part, max_size=2).map(lambda parts: "".join(f"{one}." for one in parts))


@given(st.sets(dotted, min_size=1), prefixes, prefixes, st.booleans())
def test_a_rename_of_prefixes_is_right_where_one_is_found(names, before, after, broken):
    one, other = {before + name for name in names}, {after + name for name in names} | ({"odd"} if broken else set())
    found = rename_between(one, other)
    if found is None:
        assert broken or one == other or one & other
        return
    old, new = (pattern.removesuffix("*") for pattern in found)
    lacking = one - other
    assert all(name.startswith(old) for name in lacking)
    assert {new + name.removeprefix(old) for name in lacking} == other - one
