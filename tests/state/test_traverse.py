"""Nested state dicts: visited, looked up, set, flattened and back. The judge is torch, where it is right."""

from collections import OrderedDict
from copy import deepcopy

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.distributed.checkpoint import _nested_dict as torchs_nested
from torch.distributed.checkpoint import _traverse as torchs

import shardwise as sw
from shardwise import state as ours

A, B = torch.zeros(2), torch.ones(3)
LIKE_TORCH = {
    "flat": {"a": A, "b": 1, "c": "text", "d": None},
    "nested": {"a": {"b": {"c": A}}, "d": {"e": 5}},
    "a list of values": {"a": [1, 2, 3], "b": [[1], [2]], "c": []},
    "a list of tensors": {"a": [A, B], "b": [A, 1, "x"]},
    "a list of dicts": {"a": [{"x": 1}, {"y": A}], "b": [1, {"x": 2}]},
    "lists in lists": {"a": [[A], [1]], "b": [1, [2, [3, [B]]]], "c": [[[{"x": 1}]]]},
    "a tuple of values": {"a": (1, 2), "b": (), "c": torch.Size([2, 3])},
    "the same thing twice": {"a": {"x": [A]}, "b": {"x": [A]}},
    "an ordered dict": OrderedDict(b=OrderedDict(y=1, x=2), a=A),
}
PATHS = {
    "a key": ({}, ("a",), 1),
    "a key that is there": ({"a": 0}, ("a",), 1),
    "keys": ({}, ("a", "b", "c"), 1),
    "beside others": ({"a": {"x": 0}}, ("a", "b"), 1),
    "a place": ({}, ("a", 2), 1),
    "a place that is there": ({"a": [5, 6, 7]}, ("a", 1), 1),
    "past the end": ({"a": [5]}, ("a", 3), 1),
    "places": ({}, ("a", 1, 0, "b"), 1),
    "inside of a list": ({"a": [{"x": 0}, {"y": 0}]}, ("a", 1, "z"), 1),
    "in place of None": ({"a": [None, None]}, ("a", 1, "b"), 1),
}
LOOKED_UP = [
    *(("a",), ("a", "b"), ("a", "b", "c"), ("x",), ("a", "x"), ("a", "b", "c", "d"), (), ("l", 0), ("l", 1, "y")),
    *(("l", 1, "x"), ("l", "y"), ("t", "x"), ("l", 7), ("a", 0)),
]


def visits(state_dict, api=ours, **kwargs):
    found = []
    api.traverse_state_dict(state_dict, lambda path, value: found.append((path, value)), **kwargs)
    return found


def unchanged(found, expected):
    """Equal, of the same types at every depth, and leaves are the same objects."""
    assert type(found) is type(expected)
    if isinstance(expected, dict):
        assert [(type(key), key) for key in found] == [(type(key), key) for key in expected]
        for key, value in expected.items():
            unchanged(found[key], value)
    elif isinstance(expected, list | tuple):
        assert len(found) == len(expected)
        for one, other in zip(found, expected, strict=True):
            unchanged(one, other)
    else:
        assert found is expected


def there_and_back(state_dict):
    return ours.unflatten_state_dict(*ours.flatten_state_dict(state_dict))


# --- where torch is right --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("state_dict", LIKE_TORCH.values(), ids=LIKE_TORCH)
def test_the_leaves_that_torch_visits_are_visited_in_its_order(state_dict):
    found, expected = visits(state_dict), visits(state_dict, torchs)
    assert [path for path, _ in found] == [path for path, _ in expected]
    assert all(one is other for (_, one), (_, other) in zip(found, expected, strict=True))


@pytest.mark.parametrize("name", [name for name in LIKE_TORCH if "tuple" not in name])  # which torch never enters
@pytest.mark.parametrize("keep", [None, lambda _: False, lambda value: isinstance(value, int)])
def test_what_is_worth_entering_a_list_for_is_the_callers_to_say_as_in_torch(name, keep):
    found, expected = (visits(LIKE_TORCH[name], api, keep_traversing=keep) for api in (ours, torchs))
    assert [path for path, _ in found] == [path for path, _ in expected]


@pytest.mark.parametrize("state_dict", LIKE_TORCH.values(), ids=LIKE_TORCH)
def test_flat_names_are_those_of_torch(state_dict):
    flat, paths = ours.flatten_state_dict(state_dict)
    their_flat, their_paths = torchs_nested.flatten_state_dict(state_dict)
    assert (list(flat), paths) == (list(their_flat), their_paths)
    assert all(flat[name] is value for name, value in their_flat.items())
    assert there_and_back(state_dict) == torchs_nested.unflatten_state_dict(their_flat, their_paths)


@pytest.mark.parametrize(("root", "path", "value"), PATHS.values(), ids=PATHS)
def test_values_are_set_as_torch_sets_them(root, path, value):
    found, expected = deepcopy(root), deepcopy(root)
    ours.set_element(found, path, value)
    torchs.set_element(expected, path, value)
    assert found == expected
    assert ours.get_element(found, path) == value


@pytest.mark.parametrize("path", LOOKED_UP)
def test_values_are_found_as_torch_finds_them(path):
    root = {"a": {"b": {"c": 1}}, "l": [5, {"y": 2}], "t": "text"}
    default = object()
    assert ours.get_element(root, path, default) == torchs.get_element(root, path, default)
    assert ours.get_element(root, path) == torchs.get_element(root, path)


# --- where it is not -------------------------------------------------------------------------------------------------


def test_keys_that_print_alike_keep_their_values():
    state_dict = {1: A, "1": B, "x": {2: {"3": 1, 3: 2}}, "a.b": 3, "a": {"b": 4}}
    assert len({path for path, _ in visits(state_dict)}) == 6
    flat, paths = ours.flatten_state_dict(state_dict)
    assert len(flat) == len(paths) == 6
    assert {id(value) for value in flat.values()} >= {id(A), id(B)}
    unchanged(there_and_back(state_dict), state_dict)


def test_a_name_that_looks_like_one_given_to_tell_others_apart_keeps_its_value():
    for state_dict in {"'1':str": 1, 1: 2, "1": 3}, {1: 2, "1": 3, "'1':str": 1}, {"1": 3, "1:Key": 1, 1: 2}:
        unchanged(there_and_back(state_dict), state_dict)


@pytest.mark.parametrize(
    "state_dict",
    [
        *(
            {1: A},
            {"a": {0: {1: A}}},
            {"state": {0: {"step": 1}, 1: {"step": 2}}, "param_groups": [{"params": [0, 1]}]},
        ),
        *({}, {"a": {}}, {"a": [{}, {"b": {}}]}, {"a": {"b": []}, "c": ()}, {"a": [[], {}]}, {"a": ({},)}),
        *({"a": (A, B)}, {"a": [(1, (A,))]}, {"a": ({"x": (1, B)}, [A])}, {"a": ((), (A, ()))}),
        *({"a": None}, {"a": [None, A, None]}, {"a": (None, {"b": None})}, {None: 1, 2.5: A, ("a", 1): B}),
        *({True: A, 0: B}, {"a": {False: 1}}, {-1: A, "x": {-2: B}}),
        {"": A, "a": {"": B}, ".": 1, "a.": 2},
    ],
)
def test_keys_and_containers_stay_what_they_are(state_dict):
    unchanged(there_and_back(state_dict), state_dict)


def test_named_tuples_and_ordered_dicts_hold_the_same_afterwards():
    state_dict = {"a": torch.ones(2, 3).max(dim=0), "b": OrderedDict(y=A, x=[B])}
    found = there_and_back(state_dict)
    assert list(found["b"]) == ["y", "x"]
    assert all(one is other for one, other in zip(found["a"], state_dict["a"], strict=True))


def test_tensors_inside_of_tuples_and_empty_containers_are_visited():
    state_dict = {"a": (A, (1, B)), "b": {}, "c": [], "d": ({},), "e": {1: A}}
    assert [path for path, _ in visits(state_dict)] == [
        ("a", 0),
        ("a", 1, 0),
        ("a", 1, 1),
        ("b",),
        ("c",),
        ("d", 0),
        ("e", 1),
    ]
    assert visits({}) == []


def test_sharded_tensors_in_lists_are_visited_as_tensors_are():
    x = sw.ShardedTensor(torch.zeros(4, 6), "4x6/R@1")
    assert [path for path, _ in visits({"a": [1, x], "b": (x,), "c": x})] == [("a", 0), ("a", 1), ("b", 0), ("c",)]


def test_one_place_past_the_end_is_not_there():
    root = {"a": [1], "t": (1, 2), "n": {0: "zero"}}
    for path in ("a", 1), ("a", 2), ("t", 2), ("n", 1), ("n", "0"), ("a", "0"), ("a", 0, 0), ("a", -2):
        assert ours.get_element(root, path, "nothing") == "nothing"
    assert (ours.get_element(root, ("t", 1)), ours.get_element(root, ("n", 0))) == (2, "zero")
    assert ours.get_element({"a": "text"}, ("a", 0), "nothing") == "nothing"
    assert ours.get_element({"a": A}, ("a", 0), "nothing") == "nothing"


def test_every_visited_path_leads_to_its_value():
    state_dict = {1: A, "1": B, "x": [({"y": (A, None)}, B)], "z": {2: [{3: 4}]}, "e": {}}
    for path, value in visits(state_dict):
        assert ours.get_element(state_dict, path) is value


def test_a_value_can_be_set_inside_of_a_tuple_which_is_then_another():
    inner = (1, {"x": 2})
    root = {"a": inner}
    ours.set_element(root, ("a", 0), 5)
    ours.set_element(root, ("a", 1, "y"), 6)
    assert root == {"a": (5, {"x": 2, "y": 6})}
    assert inner[0] == 1


@pytest.mark.parametrize(
    ("root", "path"),
    [({}, ()), ({"a": 5}, ("a", "b")), ({"a": "text"}, ("a", 0)), ({"a": [1]}, ("a", "b")), ({"a": A}, ("a", 0))],
)
def test_a_path_that_leads_nowhere_is_refused_and_nothing_is_set(root, path):
    before = dict(root)
    with pytest.raises(ValueError, match=r"is empty|is not a key or index"):
        ours.set_element(root, path, 1)
    assert list(root.items()) == list(before.items())


def test_nothing_that_is_given_is_ever_changed():
    shared = {"x": [A]}
    state_dict = {"a": shared, "b": shared, 1: (shared, {}), "e": [], "o": OrderedDict(k=B)}
    before = deepcopy(state_dict)
    flat, paths = ours.flatten_state_dict(state_dict)
    names = dict(paths)
    found = ours.unflatten_state_dict(flat, paths)
    ours.set_element(found, ("a", "x", 0), "other")
    ours.set_element(found, ("b", "z"), "other")
    assert str(state_dict) == str(before)
    assert paths == names
    assert flat["a.x.0"] is A


def test_what_is_shared_is_visited_at_every_place_and_a_state_dict_inside_of_itself_is_refused():
    shared = [A, {"x": 1}]
    assert [path for path, _ in visits({"a": shared, "b": [shared, shared]})][-1] == ("b", 1, 1, "x")
    itself, through = {"a": {}}, {"a": [A, {}]}
    itself["a"]["b"] = itself
    through["a"][1]["b"] = (1, through["a"])
    loop = [1]
    loop.append(loop)
    for state_dict in itself, through, {"x": {"y": loop}}, {"x": ([loop], A)}:
        with pytest.raises(ValueError, match="contains itself"):
            visits(state_dict)


LEAVES = st.none() | st.booleans() | st.integers() | st.text(max_size=3) | st.sampled_from([A, B])
KEYS = st.text(max_size=3) | st.sampled_from(["a", "b", "a.b", "0", "1", ""]) | st.integers(-2, 3)


def containers(inside):
    lists = st.lists(inside, max_size=3)
    return st.dictionaries(KEYS, inside, max_size=4) | lists | lists.map(tuple)


@given(st.dictionaries(KEYS, st.recursive(LEAVES, containers, max_leaves=12), max_size=4))
def test_flattened_and_back_is_the_identity(state_dict):
    flat, paths = ours.flatten_state_dict(state_dict)
    assert list(flat) == list(paths)
    assert len(flat) == len(visits(state_dict))
    unchanged(ours.unflatten_state_dict(flat, paths), state_dict)
