"""Nested state dicts: what is a dict, a list or a tuple, and what is a number or a text, stays so in every format."""

import io
from contextlib import suppress
from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as judge
from checkpoints import numbers
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from ranks import ranks  # noqa: F401
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save

import shardwise as sw
from shardwise import checkpoint
from shardwise.testing import on_ranks

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning", "ignore::FutureWarning")  # torch's own, without ranks
WHOLE = {"mesh": {"tp": 2}, "rule": [{"name": "*", "placements": "R"}]}
FORMATS = {
    "dcp": {"format": "dcp"},
    "sharded": {"format": "sharded", "rules": WHOLE},
    "torch.save": {"format": "torch.save"},
}


def trained():
    """A model and an optimizer after a step."""
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(3, 2), torch.nn.Linear(2, 1))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    model(torch.randn(4, 3)).sum().backward()
    optimizer.step()
    return model, optimizer


def identical(found, expected):
    """Equal in everything: containers, the types and the order of keys, values and tensors."""
    assert type(found) is type(expected), (found, expected)
    if isinstance(expected, dict):
        assert [(type(key), key) for key in found] == [(type(key), key) for key in expected]
        for key in expected:
            identical(found[key], expected[key])
    elif isinstance(expected, list | tuple):
        assert len(found) == len(expected)
        for one, other in zip(found, expected, strict=True):
            identical(one, other)
    elif isinstance(expected, torch.Tensor):
        assert found.dtype == expected.dtype
        torch.testing.assert_close(found, expected, rtol=0, atol=0, equal_nan=True)
    else:
        assert repr(found) == repr(expected)


def by_torch(path):
    """A DCP checkpoint as torch rebuilds it."""
    dcp_to_torch_save(path, f"{path}.pt")
    return torch.load(f"{path}.pt")


def as_saved(path, format):
    return by_torch(path) if format == "dcp" else torch.load(Path(path, "model.pt"))


def sorted_keys(value):
    """The same with the keys of dicts in one order: formats list tensors before other values."""
    if isinstance(value, dict):
        return {key: sorted_keys(value[key]) for key in sorted(value, key=lambda key: (type(key).__name__, key))}
    return type(value)(map(sorted_keys, value)) if isinstance(value, list | tuple) else value


@pytest.mark.parametrize("middle", FORMATS)
@pytest.mark.parametrize("last", ["dcp", "torch.save"])
def test_an_optimizer_goes_through_every_format_and_loads(tmp_path, middle, last):
    _, optimizer = trained()
    expected = optimizer.state_dict()
    torch.save(expected, tmp_path / "opt.pt")
    checkpoint.convert(tmp_path / "opt.pt", tmp_path / "a", **FORMATS[middle])
    assert checkpoint.verify(tmp_path / "opt.pt", tmp_path / "a") == []
    checkpoint.convert(tmp_path / "a", tmp_path / "b", **FORMATS[last])
    assert checkpoint.verify(tmp_path / "opt.pt", tmp_path / "b") == []
    found = as_saved(tmp_path / "b", last)
    identical(sorted_keys(found), sorted_keys(expected))
    _, other = trained()
    other.load_state_dict(found)
    identical(other.state_dict()["state"], expected["state"])


@pytest.mark.parametrize("format", ["safetensors", "dcp"])
@pytest.mark.parametrize("count", [1, 2])
def test_an_optimizer_that_ranks_save_loads_in_torch_and_here(tmp_path, format, count):
    def run(rank):
        checkpoint.save({"optimizer": trained()[1].state_dict()}, tmp_path / "c", format=format)

    on_ranks(count, run)
    expected = {"optimizer": trained()[1].state_dict()}
    target = {"optimizer": trained()[1].state_dict()}
    for entry in target["optimizer"]["state"].values():
        for tensor in entry.values():
            tensor.zero_()
    blank = io.BytesIO()
    torch.save(target, blank)
    checkpoint.load(tmp_path / "c", into=target)
    identical(target, expected)
    if format == "dcp":
        identical(sorted_keys(by_torch(tmp_path / "c")), sorted_keys(expected))
        again = torch.load(io.BytesIO(blank.getvalue()))
        judge.load(again, checkpoint_id=tmp_path / "c", no_dist=True)
        identical(again, expected)


KEYS = st.one_of(st.sampled_from("abc"), st.integers(-3, 9), st.sampled_from([2**40, -(2**52)]))
LEAVES = st.one_of(st.integers(0, 3).map(numbers), st.integers(-2, 2), st.none(), st.sampled_from([0.5, "x", (1, 2)]))
NESTED = st.recursive(
    LEAVES,
    lambda inner: st.one_of(
        st.dictionaries(KEYS, inner, max_size=3),
        st.lists(inner, max_size=3),
        st.lists(inner, max_size=2).map(tuple),
    ),
    max_leaves=8,
)
STATES = st.dictionaries(st.sampled_from("pqrs"), NESTED, min_size=1, max_size=3)


@settings(max_examples=40, suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None)
@given(STATES)
def test_what_dcp_does_not_refuse_torch_rebuilds_as_it_was(tmp_path_factory, state):
    path = tmp_path_factory.mktemp("c")
    with suppress(sw.CheckpointError):  # before anything is written
        checkpoint.save(state, path / "c", format="dcp", durable=False)
        identical(sorted_keys(by_torch(path / "c")), sorted_keys(state))
    checkpoint.save(state, path / "own", durable=False)
    checkpoint.convert(path / "own", path / "back.pt")
    identical(sorted_keys(torch.load(path / "back.pt")), sorted_keys(state))
    if (path / "c").exists():
        assert checkpoint.verify(path / "own", path / "c") == []
        checkpoint.convert(path / "c", path / "other.pt")
        identical(sorted_keys(torch.load(path / "other.pt")), sorted_keys(state))


REFUSED = {
    "values beside tensors": {"state": {0: {"step": 5, "m": numbers(2)}}},
    "a tuple with tensors": {"h": (numbers(2), numbers(3))},
    "numbers at the top": {0: numbers(2)},
    "a name twice": {"a.b": numbers(2), "a": {"b": numbers(2)}},
    "a value's name twice": {"a.b": 1, "a": {"b": {1: 2}}},
    "a number and its text": {"a": {1: numbers(2), "1": numbers(2)}},
    "a very large key": {"a": {2**60 + 1: numbers(2)}},
}


@pytest.mark.parametrize("what", REFUSED)
def test_what_torch_would_change_is_refused_before_anything_is_written(tmp_path, what):
    def run(rank):
        with pytest.raises(sw.CheckpointError, match=r"Remedy: .* another format") as error:
            checkpoint.save(REFUSED[what], tmp_path / "c", format="dcp")
        return str(error.value)

    assert len(set(on_ranks(2, run))) == 1
    assert not (tmp_path / "c").exists()
    checkpoint.save(REFUSED[what], tmp_path / "own")  # which can hold it
    checkpoint.convert(tmp_path / "own", tmp_path / "own.pt")
    identical(sorted_keys(torch.load(tmp_path / "own.pt")), sorted_keys(REFUSED[what]))
    with pytest.raises(sw.CheckpointError, match="Remedy"):
        checkpoint.convert(tmp_path / "own.pt", tmp_path / "c", format="dcp")
    assert not (tmp_path / "c").exists()


@pytest.mark.parametrize("key", [(1, 2), None, 0.5, True, b"x"])
@pytest.mark.parametrize("inner", [numbers(2), 5])
def test_keys_that_are_neither_texts_nor_numbers_are_refused(tmp_path, key, inner):
    state = {"a": {key: inner}}
    for format in "safetensors", "dcp":
        with pytest.raises((TypeError, sw.CheckpointError), match="a"):
            checkpoint.save(state, tmp_path / "c", format=format)
    torch.save(state, tmp_path / "s.pt")
    for format in "dcp", "sharded":
        with pytest.raises(sw.CheckpointError, match=r"has the key .*Remedy"):
            checkpoint.convert(tmp_path / "s.pt", tmp_path / "c", **FORMATS[format])
    assert not (tmp_path / "c").exists()
    checkpoint.convert(tmp_path / "s.pt", tmp_path / "t.pt")
    identical(torch.load(tmp_path / "t.pt"), state)


STRUCTURES = {
    "a list for a dict": ({"s": {0: numbers(2)}}, {"s": [numbers(2)]}),
    "a text for a number": ({"s": {0: numbers(2)}}, {"s": {"0": numbers(2)}}),
    "a tuple for a list": ({"s": [numbers(2)]}, {"s": (numbers(2),)}),
    "a flat name": ({"s": {"a": numbers(2)}}, {"s.a": numbers(2)}),
    "a value's key": ({"s": {0: 5}}, {"s": {"0": 5}}),
    "minus zero": ({"s": 0.0}, {"s": -0.0}),
    "one and true": ({"s": [1]}, {"s": [True]}),
    "one and 1.0": ({"s": (1,)}, {"s": (1.0,)}),
    "an empty list": ({"s": []}, {"s": ()}),
    "complex zeros": ({"s": complex(0.0, 0.0)}, {"s": complex(0.0, -0.0)}),
    "sets": ({"s": {1, 2}}, {"s": {True, 2}}),
    "bytes": ({"s": b"x"}, {"s": bytearray(b"x")}),
}


@pytest.mark.parametrize("what", STRUCTURES)
def test_verify_tells_structures_and_values_apart(tmp_path, what):
    for name, state in zip("ab", STRUCTURES[what], strict=True):
        torch.save(state, tmp_path / f"{name}.pt")
        torch.save(state, tmp_path / f"{name}2.pt")
        assert checkpoint.verify(tmp_path / f"{name}.pt", tmp_path / f"{name}2.pt") == []
    assert len(checkpoint.verify(tmp_path / "a.pt", tmp_path / "b.pt")) == 1


def test_nan_is_equal_to_itself_in_values(tmp_path):
    for name in "ab":
        torch.save({"s": [float("nan"), {"x": complex(0, float("nan"))}]}, tmp_path / f"{name}.pt")
    assert checkpoint.verify(tmp_path / "a.pt", tmp_path / "b.pt") == []


ONE_NAME = {
    "dots": {"a.b": 1.0, "a": {"b": 2.0}},
    "dots inside": {"m": {"a.b.c": 1.0, "a": {"b.c": 2.0, "b": {"c": 3.0}}}},
    "numbers and texts": {"s": {1: 1.0, "1": 2.0}},
}


def leaves(tree, path=()):
    for key, value in tree.items():
        yield from leaves(value, (*path, key)) if isinstance(value, dict) else [((*path, key), value)]


def nested(tree, leaf, order=1):
    return {
        key: nested(value, leaf, order) if isinstance(value, dict) else leaf(value)
        for key, value in [*tree.items()][::order]
    }


def written(tree, how):
    if how == "torch.save":
        torch.save(tree, "one.pt")
        return "one.pt"
    checkpoint.save(tree, "one")
    return "one"


@pytest.mark.parametrize("how", ["torch.save", "save"])
@pytest.mark.parametrize("tree", ONE_NAME.values(), ids=ONE_NAME)
def test_leaves_of_one_name_are_told_apart_by_their_paths(tmp_path, monkeypatch, tree, how):
    monkeypatch.chdir(tmp_path)
    for make in (lambda value: torch.full((2,), value), lambda value: value):
        path = written({"w": numbers(2), "t": nested(tree, make)}, how)
        for order in (1, -1):
            into = {"t": nested(tree, lambda value, make=make: make(value) * 0, order), "w": torch.zeros(2)}
            checkpoint.load(path, into=into)
            identical(into["t"], nested(tree, make, order))
        for (*around, last), value in leaves(tree):
            one = {last: make(0.0)}
            into = one
            for key in reversed(around):
                into = {key: into}
            checkpoint.load(path, into={"t": into})
            identical(one[last], make(value))


def test_a_leaf_is_not_filled_from_another_of_its_name(tmp_path):
    torch.save({"a.b": numbers(2)}, tmp_path / "one.pt")
    into = {"a": {"b": torch.zeros(2)}, "a.b": torch.zeros(2)}
    with pytest.raises(sw.CheckpointError, match="nothing for"):
        checkpoint.load(tmp_path / "one.pt", into=into)
    checkpoint.load(tmp_path / "one.pt", into=into, strict=False)
    identical(into, {"a": {"b": torch.zeros(2)}, "a.b": numbers(2)})


def test_leaves_of_one_name_are_not_written_to_safetensors(tmp_path):
    torch.save({"a.b": numbers(2), "a": {"b": numbers(2)}}, tmp_path / "one.pt")
    with pytest.raises(sw.CheckpointError, match=r"both called 'a.b'"):
        checkpoint.convert(tmp_path / "one.pt", tmp_path / "one.safetensors")
    made = checkpoint.convert(tmp_path / "one.pt", tmp_path / "o.safetensors", rename={"'a':str/'b':str": "c"})
    assert list(made) == ["a.b", "c"]
