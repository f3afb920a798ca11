"""Values beside tensors: one list for all formats. What goes in comes out with its type; anything else is refused."""

import argparse
import dataclasses
import enum
import io
import math
import random
import types
from collections import Counter, OrderedDict, defaultdict, deque, namedtuple
from datetime import UTC, date, datetime, time, timedelta, timezone
from pathlib import Path, PurePosixPath, PureWindowsPath
from uuid import UUID
from zoneinfo import ZoneInfo

import numpy as np
import pytest
import torch
import torch.distributed.checkpoint as judge
from checkpoints import numbers, rewritten
from hypothesis import given, settings
from hypothesis import strategies as st
from ranks import ranks  # noqa: F401
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save

import shardwise as sw
from shardwise import checkpoint
from shardwise.checkpoint.values import decode, encode, same_value
from shardwise.testing import on_ranks

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning", "ignore::FutureWarning")  # torch's own, without ranks

VALUES = {
    "plain": [None, True, False, 0, -1, 2**64, -(2**5000), "", "naïve \ud83d", b"\x00", bytearray(b"x")],
    "floats": [0.0, -0.0, math.inf, -math.inf, math.nan, 5e-324, 0.1, complex(-0.0, math.nan)],
    "containers": [(), (1, (2.5,)), [], [[]], {1, 2}, frozenset("a"), set(), range(3), range(9, 0, -2)],
    "deques": [deque([1.5, 2.5], maxlen=3), deque(), deque([deque([1])])],
    "dicts": deque([{(1, None): 2, 0.5: {True: 1}}, OrderedDict(b=1, a=2), Counter({30: 1, 80: 2}), {}]),
    "defaults": deque([defaultdict(list, {1: [2]}), defaultdict(None), defaultdict(int)]),
    "times": [
        datetime(2026, 1, 2, 3, 4, 5, 6),
        datetime(2026, 1, 2, tzinfo=UTC),
        datetime(2026, 1, 2, tzinfo=timezone(timedelta(hours=-3), "there")),
        date(2026, 1, 2),
        time(3, 4, 5, 6),
        time(3, tzinfo=UTC),
        timedelta(days=-1, microseconds=7),
        timezone(timedelta(hours=2)),
    ],
    "names": [Path("/a/b"), PurePosixPath("c"), UUID(int=5)],
    "torch": [torch.Size([2, 3]), torch.bfloat16, torch.device("cuda", 1), torch.device("cpu")],
    "scalars": [np.float32(1.5), np.float64(-0.0), np.int64(-3), np.bool_(True), np.complex64(1j), np.uint8(255)],
    "arrays": [
        np.arange(6.0).reshape(2, 3),
        np.zeros((0, 2), np.int8),
        np.array(3),
        np.array([True]),
        np.arange(6)[::2],
        np.dtype("float16"),
    ],
    "random": random.Random(0).getstate(),
    "numpy random": np.random.RandomState(0).get_state(),
    "generators": deque(kind(0).state for kind in (np.random.PCG64, np.random.MT19937, np.random.Philox)),
}


def schedules():
    """The states of torch's schedulers."""
    optimizer = torch.optim.SGD([torch.zeros(2)], lr=0.1, momentum=0.9)
    rates = torch.optim.lr_scheduler
    return {
        "steps": rates.MultiStepLR(optimizer, [30, 80]).state_dict(),
        "cosine": rates.CosineAnnealingLR(optimizer, 10).state_dict(),
        "plateau": rates.ReduceLROnPlateau(optimizer).state_dict(),
    }


def alike(found, expected):
    """The same types all the way down, and equal; NaN is equal to itself."""
    assert type(found) is type(expected)
    if isinstance(expected, np.ndarray):
        np.testing.assert_array_equal(found, expected, strict=True)
        assert found.flags.writeable
    else:
        assert same_value(found, expected), (found, expected)


def blank(state):
    return dict.fromkeys(state)


def stored(tmp_path, state, how):
    """A checkpoint of a state dict, written in one of the ways there are."""
    if how in ("safetensors", "dcp"):
        checkpoint.save(state, tmp_path / "c", format=how)
        return tmp_path / "c"
    torch.save(state, tmp_path / "s.pt")
    if how == "read torch.save":
        return tmp_path / "s.pt"
    rules = {"mesh": {"tp": 1}, "rule": [{"name": "*", "placements": "R"}]} if how == "to sharded" else None
    checkpoint.convert(tmp_path / "s.pt", tmp_path / "c", format=how.removeprefix("to "), rules=rules)
    assert checkpoint.verify(tmp_path / "s.pt", tmp_path / "c") == []
    return tmp_path / "c"


WAYS = ["safetensors", "dcp", "read torch.save", "to sharded", "to dcp", "to torch.save"]


@pytest.mark.parametrize("how", WAYS)
def test_what_is_saved_is_loaded_with_its_type(tmp_path, how):
    state = {"w": numbers(2), **{name: (value,) for name, value in VALUES.items()}}  # a tuple is not entered
    path = stored(tmp_path, state, how)
    into = {"w": torch.zeros(2), **dict.fromkeys(VALUES, (None,))}
    checkpoint.load(path, into=into)
    for name, value in VALUES.items():
        alike(into[name][0], value)
        for one, other in zip(into[name][0], value, strict=True) if isinstance(value, list) else ():
            alike(one, other)


@pytest.mark.parametrize("how", WAYS)
def test_training_state_comes_back_as_it_was(tmp_path, how):
    state = {
        "w": numbers(2),
        "schedule": schedules(),
        "numpy": {"generator": np.random.default_rng(3).bit_generator.state},
    }
    into = {
        "w": torch.zeros(2),
        "schedule": schedules(),
        "numpy": {"generator": np.random.default_rng(9).bit_generator.state},
    }
    into["schedule"]["cosine"]["last_epoch"] = 99
    checkpoint.load(stored(tmp_path, state, how), into=into)
    alike(into["schedule"], state["schedule"])
    rng = np.random.default_rng(1)
    rng.bit_generator.state = into["numpy"]["generator"]
    assert rng.random() == np.random.default_rng(3).random()


def test_torch_reads_the_values_of_a_dcp_checkpoint(tmp_path):
    state = {"w": numbers(2), **VALUES, "schedule": schedules()}
    checkpoint.save(state, tmp_path / "c", format="dcp")
    dcp_to_torch_save(tmp_path / "c", tmp_path / "c.pt")
    found = torch.load(tmp_path / "c.pt", weights_only=False)
    state["schedule"]["steps"]["milestones"] = dict(
        state["schedule"]["steps"]["milestones"]
    )  # a dict of the state dict
    for name in (*VALUES, "schedule"):
        alike(found[name], state[name])
    again = {"w": torch.zeros(2), "times": None, "deques": None}
    judge.load(again, checkpoint_id=tmp_path / "c", no_dist=True)
    alike(again["times"], VALUES["times"])
    alike(again["deques"], VALUES["deques"])


Point = namedtuple("Point", "x y")


@dataclasses.dataclass
class Settings:
    rate: float = 0.1


class Color(enum.Enum):
    RED = 1


class Level(enum.IntEnum):
    LOW = 1


class Text(str):
    pass


REFUSED = {
    "Namespace": (argparse.Namespace(lr=1), r"vars\(value\)"),
    "SimpleNamespace": (types.SimpleNamespace(lr=1), r"vars\(value\)"),
    "Settings": (Settings(), r"dataclasses.asdict\(value\)"),
    "Color": (Color.RED, "value.name or value.value"),
    "Level": (Level.LOW, "value.name or value.value"),
    "Point": (Point(1, 2), r"value._asdict\(\)"),
    "Text": (Text("x"), r"str\(value\)"),
    "PureWindowsPath": (PureWindowsPath("c:/x"), r"str\(value\)"),
    "datetime": (datetime(2026, 1, 2, tzinfo=ZoneInfo("UTC")), "astimezone"),
    "defaultdict": (defaultdict(lambda: 3), r"dict\(value\)"),
    "ndarray": (np.array([object()]), r"value.tolist\(\)"),
    "mappingproxy": (types.MappingProxyType({}), r"dict\(value\)"),
    "Generator": (torch.Generator(), r"value.get_state\(\)"),
    "object": (object(), "leave it out"),
    "function": (len, "leave it out"),
    "type": (int, "leave it out"),
}


@pytest.mark.parametrize("format", ["safetensors", "dcp"])
def test_anything_else_is_refused_on_all_ranks_before_anything_is_written(tmp_path, format):
    def run(rank):
        found = []
        for value, remedy in REFUSED.values():
            name = type(value).__name__
            with pytest.raises(
                sw.CheckpointError, match=rf"'cfg\.inner\[1\]\S*' is {name}.* cannot be stored: .*{remedy}"
            ) as error:
                checkpoint.save({"w": numbers(2), "cfg": {"inner": [1, deque([value])]}}, tmp_path / "c", format=format)
            found.append(str(error.value))
        return found

    assert len({tuple(found) for found in on_ranks(2, run)}) == 1
    assert not (tmp_path / "c").exists()


def test_what_only_another_rank_has_is_refused_on_all(tmp_path):
    def run(rank):
        with pytest.raises(sw.ShardwiseError, match="'cfg' is Color, which cannot be stored"):
            checkpoint.save({"w": numbers(2), "cfg": Color.RED if rank else 1}, tmp_path / "c", format="dcp")

    on_ranks(2, run)
    assert not (tmp_path / "c").exists()


SCALARS = st.one_of(
    st.none(), st.booleans(), st.integers(), st.floats(), st.complex_numbers(), st.text(), st.binary(), st.dates(),
    st.datetimes().map(lambda t: t.replace(fold=0)), st.times().map(lambda t: t.replace(fold=0)), st.timedeltas(),
    st.uuids(),
)  # fmt: skip
HASHABLE = st.one_of(SCALARS, st.tuples(SCALARS, SCALARS), st.frozensets(SCALARS, max_size=3))
NESTED = st.recursive(
    HASHABLE,
    lambda inner: st.one_of(
        st.lists(inner, max_size=3),
        st.dictionaries(HASHABLE, inner, max_size=3),
        st.lists(inner, max_size=3).map(deque),
        st.dictionaries(HASHABLE, inner, max_size=3).map(OrderedDict),
    ),
    max_leaves=6,
)


@settings(max_examples=150, deadline=None)
@given(NESTED)
def test_json_and_pickles_give_the_same_back(tmp_path_factory, value):
    alike(decode(encode(value, "x")), value)
    path = tmp_path_factory.mktemp("s") / "s.pt"
    torch.save({"x": deque([value])}, path)  # which is not entered
    alike(checkpoint.open(path).objects["x"], deque([value]))


@settings(max_examples=100, deadline=None)
@given(NESTED, NESTED)
def test_values_are_the_same_only_if_they_pickle_alike(a, b):
    assert same_value(a, a)
    if type(a) is not type(b):
        assert not same_value(a, b)
    assert same_value(a, b) == same_value(b, a)


def test_indexes_of_earlier_versions_are_read(tmp_path):
    checkpoint.save({"w": numbers(2), "x": 1}, tmp_path / "c")
    before = {
        "big": ({"int": hex(2**80)}, 2**80),
        "pair": ({"tuple": [1, {"float": "0x1.0p-1"}]}, (1, 0.5)),
        "set": ({"set": [1, 2]}, {1, 2}),
        "dict": ({"dict": [[1, {"dict": []}], ["a", {"size": [2]}]]}, {1: {}, "a": torch.Size([2])}),
        "bytes": ({"bytes": "AA=="}, b"\x00"),
        "complex": ({"complex": ["0x1.0p+0", "-0x0.0p+0"]}, complex(1, -0.0)),
        "kinds": ([{"dtype": "float32"}, {"device": "cuda:1"}], [torch.float32, torch.device("cuda:1")]),
    }
    said = {name: one for name, (one, _) in before.items()}
    rewritten(tmp_path / "c" / "shardwise.json", lambda index: index["values"].update(said))
    found = checkpoint.open(tmp_path / "c").objects
    for name, (_, value) in before.items():
        alike(found[name], value)


@pytest.mark.parametrize("said", [
    {"array": ["f4", [3], {"bytes": "AAAA"}]},
    {"array": ["O8", [1], {"bytes": "AAAAAAAAAAA="}]},
    {"array": ["f4", [-1], {"bytes": "AAAAAA=="}]},
    {"defaultdict": ["eval", {"dict": []}]},
    {"defaultdict": ["object", {"dict": []}]},
    {"datetime": [0, 0, 0, 0, 0, 0, 0, None]},
    {"datetime": []},
    {"deque": [[1], -1]},
    {"range": [1, 2, 0]},
    {"uuid": "no"},
    {"timezone": [5]},
    {"counter": [[[], 1]]},
    {"tensor": ["torch.float32", [1], {"bytes": "AAAAAA=="}]},
])  # fmt: skip
def test_damaged_values_are_one_error(tmp_path, said):
    checkpoint.save({"w": numbers(2), "x": 1}, tmp_path / "c")
    rewritten(tmp_path / "c" / "shardwise.json", lambda index: index["values"].update(x=said))
    with pytest.raises(sw.CheckpointError, match=r"'x' in .* is not a recognized value"):
        dict(checkpoint.open(tmp_path / "c").objects)


def test_a_stored_array_is_a_copy_that_can_be_written(tmp_path):
    file = io.BytesIO()
    torch.save({"x": (np.zeros(3),)}, file)
    (tmp_path / "s.pt").write_bytes(file.getvalue())
    checkpoint.open(tmp_path / "s.pt").objects["x"][0][1] = 5
    np.testing.assert_array_equal(checkpoint.open(tmp_path / "s.pt").objects["x"][0], np.zeros(3))
