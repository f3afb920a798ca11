"""Files with objects of unknown classes: their tensors are read, and the objects are listed, carried on or left out."""

import argparse
import dataclasses
import datetime
import enum
import json
import pickle
import sys
import types
import zipfile
import zoneinfo
from collections import OrderedDict, defaultdict
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.distributed.checkpoint as judge
from checkpoints import has, numbers, same
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save

import shardwise as sw
from shardwise import checkpoint
from shardwise.checkpoint.opaque import opaque_in, tensors_in
from shardwise.cli import main

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning", "ignore::FutureWarning")  # torch's own, without ranks
WHOLE = {"mesh": {"tp": 1}, "rule": [{"name": "*", "placements": "R"}]}


@dataclasses.dataclass
class Settings:
    rate: float
    weight: object = None


class Color(enum.Enum):
    RED = 1


class Scaler:
    """As DeepSpeed's LossScaler: attributes, some of them tensors."""

    def __init__(self, scale):
        self.cur_scale, self.history = scale, [numbers(3)]


class Slotted:
    __slots__ = ("a", "b")

    def __init__(self):
        self.a, self.b = 1, "x"


class Listed(list):
    pass


class RanError(Exception):
    """Raised where a file makes something run."""


class Trap:
    def __init__(self, *args):
        raise RanError

    def __setstate__(self, state):
        raise RanError

    def __reduce__(self):
        return (Trap, (1,), {"a": 2})


def objects():
    listed = Listed([1, numbers(2)])
    listed.more = 5
    return {
        "args": argparse.Namespace(lr=0.1, name="run", nested=argparse.Namespace(deep=(1, 2))),
        "settings": Settings(0.5, numbers(4)),
        "color": Color.RED,
        "scaler": Scaler(2.0**16),
        "slots": Slotted(),
        "listed": listed,
        "class": Settings,
        "function": json.dumps,
        "in": {"side": [Color.RED, {"x": Settings(1.5)}], "tuple": (1, Color.RED)},
        "named tuple": types.SimpleNamespace(x=1),
    }


def write(path, state=None):
    torch.save({"w": numbers(4, 2), "step": 7, **(objects() if state is None else state)}, path)
    return path


def test_the_tensors_of_a_file_with_unknown_classes_are_read(tmp_path):
    found = checkpoint.open(write(tmp_path / "s.pt"))
    assert list(found) == ["w"]
    same(found["w"].read(), numbers(4, 2))
    into = {"w": torch.zeros(4, 2), "step": 0}
    checkpoint.load(tmp_path / "s.pt", into=into)
    same(into["w"], numbers(4, 2))
    assert into["step"] == 7


@pytest.mark.parametrize("protocol", [2, 3, 4, 5])
def test_an_object_says_what_it_is(tmp_path, protocol):
    torch.save({"w": numbers(2), **objects()}, tmp_path / "s.pt", pickle_protocol=protocol)
    found = checkpoint.open(tmp_path / "s.pt").objects
    args = found["args"]
    assert isinstance(args, checkpoint.Opaque)
    assert (args.name, args.state["lr"]) == ("argparse.Namespace", 0.1)
    assert args.state["nested"].state == {"deep": (1, 2)}
    assert "argparse.Namespace(lr=0.1, name='run'" in repr(args)
    assert (found["color"].name.rpartition(".")[2], found["color"].args) == ("Color", (1,))
    assert found["scaler"].tensors == 1
    same(found["scaler"].state["history"][0], numbers(3))
    same(found["settings"].state["weight"], numbers(4))
    assert found["class"].name.endswith("Settings")
    assert found["function"].name == "json.dumps"
    assert found["in.side.0"].args == (1,)
    assert opaque_in(found["in.tuple"]) is found["in.tuple"][1]


def test_the_oldest_protocol_makes_objects_too(tmp_path):
    torch.save({"w": numbers(2), "args": objects()["args"]}, tmp_path / "s.pt", pickle_protocol=1)
    found = checkpoint.open(tmp_path / "s.pt").objects["args"]
    assert (found.name, found.state["lr"]) == ("argparse.Namespace", 0.1)


def test_nothing_runs(tmp_path):
    write(tmp_path / "s.pt", {"trap": Trap.__new__(Trap)})
    found = checkpoint.open(tmp_path / "s.pt").objects["trap"]
    assert (found.args, found.state) == ((1,), {"a": 2})
    for format in "torch.save", "dcp":
        made = checkpoint.convert(tmp_path / "s.pt", tmp_path / format, format=format, objects="carry")
        assert made.objects["trap"].state == {"a": 2}
    with pytest.raises(TypeError, match="cannot be saved: its class is unknown"):
        pickle.dumps(found)
    with pytest.raises(RanError):  # the file is a trap where classes are rebuilt
        torch.load(tmp_path / "s.pt", weights_only=False)


def test_no_module_is_imported(tmp_path, monkeypatch):
    module = types.ModuleType("soon_gone")
    module.Thing = type("Thing", (), {"__module__": "soon_gone"})
    monkeypatch.setitem(sys.modules, "soon_gone", module)
    write(tmp_path / "s.pt", {"thing": module.Thing()})
    monkeypatch.delitem(sys.modules, "soon_gone")
    checkpoint.convert(tmp_path / "s.pt", tmp_path / "o.pt", objects="carry")
    assert checkpoint.open(tmp_path / "o.pt").objects["thing"].name == "soon_gone.Thing"
    assert "soon_gone" not in sys.modules
    monkeypatch.setitem(sys.modules, "soon_gone", module)
    assert type(torch.load(tmp_path / "o.pt", weights_only=False)["thing"]) is module.Thing


FORMATS = {"dcp": {}, "sharded": {"rules": WHOLE}, "torch.save": {}}


@pytest.mark.parametrize("format", FORMATS)
def test_conversions_leave_them_out_unless_asked(tmp_path, format):
    write(tmp_path / "s.pt", without_tensors())
    write(tmp_path / "t.pt")
    checkpoint.convert(tmp_path / "s.pt", tmp_path / "o", format=format, **FORMATS[format])
    has(tmp_path / "o", {"w": numbers(4, 2)}, {"step": 7})
    with pytest.raises(sw.CheckpointError, match=r"'settings' in .* its tensors would be lost.*Remedy"):
        checkpoint.convert(tmp_path / "t.pt", tmp_path / "p", format=format, **FORMATS[format])
    assert not (tmp_path / "p").exists()
    checkpoint.convert(tmp_path / "t.pt", tmp_path / "p", format=format, objects="drop", **FORMATS[format])
    has(tmp_path / "p", {"w": numbers(4, 2)}, {"step": 7})


def test_safetensors_files_do_not_lose_tensors_in_objects_either(tmp_path):
    write(tmp_path / "t.pt")
    with pytest.raises(sw.CheckpointError, match="its tensors would be lost"):
        checkpoint.convert(tmp_path / "t.pt", tmp_path / "o.safetensors")
    made = checkpoint.convert(tmp_path / "t.pt", tmp_path / "o.safetensors", objects="drop")
    assert list(made) == ["w"]


HIDING = {
    "an object": lambda: Scaler(1.0),
    "a module": lambda: torch.nn.Linear(2, 2),
    "a set": lambda: {numbers(3)},
    "the second object of a tuple": lambda: (Color.RED, Settings(0.5, numbers(2))),
}


@pytest.mark.parametrize("asked", [None, "carry"])
@pytest.mark.parametrize("hiding", HIDING)
@pytest.mark.parametrize("format", ["safetensors", "sharded"])
def test_no_tensor_is_lost_in_a_format_that_cannot_hold_it(tmp_path, format, hiding, asked):
    write(tmp_path / "s.pt", {"m": HIDING[hiding]()})
    how = FORMATS.get(format, {})
    with pytest.raises(sw.CheckpointError, match=r"convert to dcp or torch.save|tensors are stored in dicts"):
        checkpoint.convert(tmp_path / "s.pt", tmp_path / "o", format=format, objects=asked, **how)
    assert not (tmp_path / "o").exists()
    made = checkpoint.convert(tmp_path / "s.pt", tmp_path / "p", format=format, select="w", objects=asked, **how)
    assert list(made) == ["w"]


@pytest.mark.parametrize("hiding", HIDING)
@pytest.mark.parametrize("format", ["dcp", "torch.save"])
def test_formats_that_hold_objects_carry_their_tensors(tmp_path, format, hiding):
    write(tmp_path / "s.pt", {"m": HIDING[hiding]()})
    made = checkpoint.convert(tmp_path / "s.pt", tmp_path / "o", format=format, objects="carry")
    assert tensors_in(made.objects["m"]) == tensors_in(checkpoint.open(tmp_path / "s.pt").objects["m"]) > 0
    if hiding != "a set":
        with pytest.raises(sw.CheckpointError, match=r"its tensors would be lost. Remedy: objects='carry'"):
            checkpoint.convert(tmp_path / "s.pt", tmp_path / "p", format=format)


def test_safetensors_refuse_to_carry_objects_that_they_cannot_hold(tmp_path, capsys):
    write(tmp_path / "s.pt", {"args": argparse.Namespace(lr=0.1)})
    with pytest.raises(
        sw.CheckpointError, match=r"'args' in .*: it would be lost, as .* hold tensors only. Remedy: convert to dcp"
    ):
        checkpoint.convert(tmp_path / "s.pt", tmp_path / "o.safetensors", objects="carry")
    assert run(capsys, "convert", tmp_path / "s.pt", tmp_path / "o.safetensors", "--objects", "carry")[0] == 2
    assert not (tmp_path / "o.safetensors").exists()
    assert list(checkpoint.convert(tmp_path / "s.pt", tmp_path / "o.safetensors")) == ["w"]


def test_tensors_in_rebuilt_objects_are_not_lost(tmp_path):
    write(tmp_path / "s.pt", {"m": Scaler(1.0)})
    with torch.serialization.safe_globals([Scaler]):
        found = checkpoint.open(tmp_path / "s.pt")
        assert type(found.objects["m"]) is Scaler
    for format in "safetensors", "dcp", "torch.save":
        with pytest.raises(sw.CheckpointError, match="its tensors would be lost"):
            checkpoint.convert(found, tmp_path / "o", format=format)


def without_tensors():
    return {key: value for key, value in objects().items() if key not in ("settings", "scaler", "listed")}


@pytest.mark.parametrize("format", FORMATS)
def test_conversions_carry_them_and_back(tmp_path, format):
    state = without_tensors() if format == "sharded" else objects()
    write(tmp_path / "s.pt", state)
    made = checkpoint.convert(tmp_path / "s.pt", tmp_path / "o", format=format, objects="carry", **FORMATS[format])
    assert made.objects["args"].state["nested"].state == {"deep": (1, 2)}
    assert checkpoint.verify(tmp_path / "s.pt", tmp_path / "o") == []
    checkpoint.convert(tmp_path / "o", tmp_path / "back.pt", objects="carry")
    found = torch.load(tmp_path / "back.pt", weights_only=False)
    assert found["args"] == objects()["args"]
    assert (found["color"], found["class"], found["function"]) == (Color.RED, Settings, json.dumps)
    assert (found["slots"].a, found["slots"].b) == (1, "x")
    assert found["in"]["side"][1]["x"] == Settings(1.5)
    assert found["in"]["tuple"] == (1, Color.RED)
    if "listed" in state:
        assert (type(found["listed"]), found["listed"][0], found["listed"].more) == (Listed, 1, 5)
        same(found["listed"][1], numbers(2))
        same(found["scaler"].history[0], numbers(3))
        same(found["settings"].weight, numbers(4))


def test_tensors_in_objects_are_refused_by_the_sharded_format(tmp_path):
    write(tmp_path / "s.pt")
    with pytest.raises(
        sw.CheckpointError, match=r"the sharded format holds no tensors inside objects. Remedy: convert to dcp"
    ):
        checkpoint.convert(tmp_path / "s.pt", tmp_path / "o", format="sharded", rules=WHOLE, objects="carry")
    assert not (tmp_path / "o").exists()


def test_torch_reads_carried_objects_of_a_dcp_checkpoint(tmp_path):
    write(tmp_path / "s.pt", {"args": objects()["args"]})
    checkpoint.convert(tmp_path / "s.pt", tmp_path / "o", format="dcp", objects="carry")
    dcp_to_torch_save(tmp_path / "o", tmp_path / "o.pt")
    assert torch.load(tmp_path / "o.pt", weights_only=False)["args"] == objects()["args"]


def test_objects_of_a_dcp_checkpoint_are_listed(tmp_path):
    judge.save({"w": numbers(2), "args": argparse.Namespace(lr=1)}, checkpoint_id=tmp_path / "c", no_dist=True)
    found = checkpoint.open(tmp_path / "c").objects
    assert (found["args"].name, found["args"].state) == ("argparse.Namespace", {"lr": 1})


def test_verify_compares_what_they_are_made_of(tmp_path):
    for name, lr in ("a", 1), ("b", 1), ("c", 1.0):
        write(tmp_path / f"{name}.pt", {"args": argparse.Namespace(lr=lr)})
    assert checkpoint.verify(tmp_path / "a.pt", tmp_path / "b.pt") == []
    assert [one.name for one in checkpoint.verify(tmp_path / "a.pt", tmp_path / "c.pt")] == ["args"]


def test_a_leaf_that_wants_one_is_told_what_it_is(tmp_path):
    write(tmp_path / "s.pt")
    into = {"w": torch.zeros(4, 2), "args": None}
    with pytest.raises(sw.CheckpointError, match=r"'args' in .* is <argparse.Namespace\(lr=0.1.*add_safe_globals"):
        checkpoint.load(tmp_path / "s.pt", into=into)
    checkpoint.load(tmp_path / "s.pt", into=into, strict=False)
    same(into["w"], numbers(4, 2))
    assert into["args"] is None


def test_classes_that_torch_was_told_are_safe_are_rebuilt(tmp_path):
    write(tmp_path / "s.pt")
    safe = [argparse.Namespace, Settings, Scaler, Color, Listed, Slotted]
    with torch.serialization.safe_globals(safe):
        found = dict(checkpoint.open(tmp_path / "s.pt").objects)
        into = {"w": torch.zeros(4, 2), "args": None}
        checkpoint.load(tmp_path / "s.pt", into=into)
    assert found["args"] == into["args"] == objects()["args"]
    assert (found["color"], found["class"], found["in.side.0"]) == (Color.RED, Settings, Color.RED)
    same(found["settings"].weight, numbers(4))
    same(found["scaler"].history[0], numbers(3))
    same(found["listed"][1], numbers(2))
    assert (found["listed"].more, found["slots"].b) == (5, "x")
    assert isinstance(found["function"], checkpoint.Opaque)
    assert isinstance(checkpoint.open(tmp_path / "s.pt").objects["args"], checkpoint.Opaque)


def test_a_whole_model_is_refused_with_a_remedy(tmp_path):
    for state in torch.nn.Linear(2, 2), {"model": torch.nn.Linear(2, 2), "step": 1}:
        torch.save(state, tmp_path / "s.pt")
        with pytest.raises(sw.CheckpointError, match=r"asks for 'torch.nn.modules.linear.Linear'.*Remedy.*state_dict"):
            checkpoint.open(tmp_path / "s.pt")


def test_objects_that_contain_themselves_do_not_hide_tensors(tmp_path):
    loop = argparse.Namespace()
    loop.me, loop.weight = loop, numbers(2)
    write(tmp_path / "s.pt", {"loop": loop, "model": torch.nn.Linear(2, 2)})
    found = checkpoint.open(tmp_path / "s.pt")
    same(found["w"].read(), numbers(4, 2))
    assert (found.objects["loop"].tensors, found.objects["model"].tensors) == (1, 2)
    with pytest.raises(sw.CheckpointError, match="or contain themselves"):
        _ = found.objects["loop"].state


class Marked(torch.Tensor):
    """A tensor of another class."""


def test_tensors_of_unknown_classes_do_not_hide_others(tmp_path):
    write(tmp_path / "s.pt", {"marked": numbers(3).as_subclass(Marked), "dict": dict, "layout": torch.strided})
    found = checkpoint.open(tmp_path / "s.pt")
    same(found["w"].read(), numbers(4, 2))
    assert found.objects["marked"].tensors == 1
    same(found.objects["marked"].args[0], numbers(3))
    assert found.objects["dict"].name == "builtins.dict"
    with pytest.raises(sw.CheckpointError, match="has no name that can be written: objects='drop'"):
        checkpoint.convert(tmp_path / "s.pt", tmp_path / "o.pt", objects="carry")


def test_odd_keys_and_factories_do_not_hide_tensors(tmp_path):
    state = {"by": {Color.RED: numbers(2)}, "made": defaultdict(Settings, {"a": numbers(3)})}
    found = checkpoint.open(write(tmp_path / "s.pt", state))
    assert len(found) == 3
    same(found["made.a"].read(), numbers(3))
    for format in FORMATS:
        with pytest.raises(sw.CheckpointError, match="has the key"):
            checkpoint.convert(tmp_path / "s.pt", tmp_path / "o", format=format, **FORMATS[format])


def test_hostile_objects_cannot_write_other_names(tmp_path):
    name = b"x\ncos\nsystem"
    text = b"\x80\x04}(\x8c\x01w]\x8c\x01a\x8c\x01m\x8c%c%b\x93)\x81u." % (len(name), name)
    with zipfile.ZipFile(tmp_path / "s.pt", "w") as archive:
        archive.writestr("s/data.pkl", text)
    with pytest.raises(sw.CheckpointError, match="has no name that can be written"):
        checkpoint.convert(tmp_path / "s.pt", tmp_path / "o.pt", objects="carry")


def run(capsys, *args):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "argv", ["shardwise", *map(str, args)])
        with pytest.raises(SystemExit) as ended:
            main()
    return ended.value.code, capsys.readouterr().out


def test_the_shell_lists_them_and_says_what_became_of_them(tmp_path, capsys):
    write(tmp_path / "s.pt", {"args": objects()["args"], "scaler": Scaler(1.0)})
    _, said = run(capsys, "inspect", tmp_path / "s.pt")
    assert "argparse.Namespace" in said
    assert "with 1 tensor inside" in said
    code, said = run(capsys, "convert", tmp_path / "s.pt", tmp_path / "o.pt", "--no-bar", "--objects", "drop")
    assert code == 0
    assert "left out: 2 other values, such as args (argparse.Namespace)\n" in said
    assert "--objects" not in said
    write(tmp_path / "n.pt", {"args": objects()["args"]})
    _, said = run(capsys, "convert", tmp_path / "n.pt", tmp_path / "n2.pt", "--no-bar")
    assert "left out: 1 other value, such as args (argparse.Namespace): --objects carry keeps them" in said
    _, said = run(capsys, "convert", tmp_path / "s.pt", tmp_path / "p.pt", "--no-bar", "--objects", "carry")
    assert "carried on, not rebuilt: 2 objects, such as args (argparse.Namespace)" in said
    _, said = run(capsys, "inspect", tmp_path / "p.pt", "--json")
    assert "argparse.Namespace" in json.loads(said)["objects"]["args"]
    with pytest.raises(ValueError, match="objects= must be 'drop' or 'carry'"):
        checkpoint.convert(tmp_path / "s.pt", tmp_path / "q.pt", objects="run")


def test_an_ordered_dict_with_metadata_is_a_plain_value(tmp_path):
    model = torch.nn.Linear(2, 2)
    write(tmp_path / "s.pt", {"model": model.state_dict()})
    assert isinstance(model.state_dict(), OrderedDict)
    assert sorted(checkpoint.open(tmp_path / "s.pt")) == ["model.bias", "model.weight", "w"]
    assert Path(tmp_path / "s.pt").exists()


class Outer:
    """Old protocols, which torch.save writes, name what is inside it as attributes."""

    class Inner:
        def __init__(self):
            self.rate, self.weight = 0.5, numbers(2)

    class Kind(enum.Enum):
        FIRST = 1


class Bound:
    """Made by a method of an object."""

    def __reduce__(self):
        return Slotted().__str__, ()


ZONE = zoneinfo.ZoneInfo("UTC")
ODD = {
    "nested class": (Outer.Inner(), "Outer.Inner"),
    "nested enum": (Outer.Kind.FIRST, "Outer.Kind"),
    "name of a nested class": (Outer.Inner, "Outer.Inner"),
    "zone": (ZONE, "zoneinfo.ZoneInfo._unpickle"),
    "moment": (datetime.datetime(2020, 1, 2, tzinfo=ZONE), "datetime.datetime"),
    "time": (datetime.time(1, 2, tzinfo=ZONE), "datetime.time"),
    "method": ("x".join, "builtins.getattr"),
    "made by a method": (Bound(), "operator.call"),
    "texts": (np.array(["a", "bc"]), "multiarray._reconstruct"),
    "objects": (np.array([{"x": 1}, None], dtype=object), "multiarray._reconstruct"),
    "days": (np.array(["2020-01-01"], dtype="M8[D]"), "multiarray._reconstruct"),
    "big-endian": (np.array([1.0, 2.0], dtype=">f4"), "multiarray._reconstruct"),
    "rows": (np.array([(1, 2.0)], dtype=[("a", "i4"), ("b", ">f8")]), "multiarray._reconstruct"),
    "records": (np.rec.array([(1, 2)], dtype=[("a", "i4"), ("b", "i4")]), "multiarray._reconstruct"),
    "scalar": (np.datetime64("2020"), "multiarray.scalar"),
    "dtype": (np.dtype([("a", "i4")]), "numpy.dtype"),
}


@pytest.mark.parametrize("protocol", [2, 4])
@pytest.mark.parametrize("odd", ODD)
def test_no_object_hides_the_tensors_beside_it(tmp_path, odd, protocol):
    value, name = ODD[odd]
    torch.save({"w": numbers(4, 2), "odd": value}, tmp_path / "s.pt", pickle_protocol=protocol)
    found = checkpoint.open(tmp_path / "s.pt")
    same(found["w"].read(), numbers(4, 2))
    assert found.objects["odd"].name.endswith(name)
    carried = checkpoint.convert(tmp_path / "s.pt", tmp_path / "c.pt", objects="carry")
    assert checkpoint.verify(tmp_path / "s.pt", carried) == []
    back, expected = (torch.load(tmp_path / name, weights_only=False)["odd"] for name in ("c.pt", "s.pt"))
    assert type(back) is type(expected)
    if isinstance(expected, np.ndarray):
        np.testing.assert_array_equal(back, expected)
    elif not isinstance(expected, Outer.Inner | str) and odd != "method":
        assert back == expected


def test_tensors_in_an_array_of_objects_are_counted_and_carried(tmp_path):
    write(tmp_path / "s.pt", {"a": np.array([numbers(3), {"b": numbers(2)}], dtype=object)})
    assert checkpoint.open(tmp_path / "s.pt").objects["a"].tensors == 2
    with pytest.raises(sw.CheckpointError, match="its tensors would be lost"):
        checkpoint.convert(tmp_path / "s.pt", tmp_path / "c.pt")
    checkpoint.convert(tmp_path / "s.pt", tmp_path / "c.pt", objects="carry")
    same(torch.load(tmp_path / "c.pt", weights_only=False)["a"][0], numbers(3))


def test_an_array_that_has_itself_in_it_is_refused_when_it_is_carried(tmp_path):
    array = np.array([None], dtype=object)
    array[0] = array
    found = checkpoint.open(write(tmp_path / "s.pt", {"a": array}))
    same(found["w"].read(), numbers(4, 2))
    with pytest.raises(sw.CheckpointError, match="or contain themselves"):
        checkpoint.convert(tmp_path / "s.pt", tmp_path / "c.pt", objects="carry")


def test_nested_classes_that_the_user_called_safe_are_rebuilt(tmp_path):
    write(tmp_path / "s.pt", {"inner": Outer.Inner()})
    with torch.serialization.safe_globals([Outer.Inner]):
        found = checkpoint.open(tmp_path / "s.pt").objects["inner"]
    assert type(found) is Outer.Inner
    same(found.weight, numbers(2))


def test_tensors_beside_a_quantized_one_are_read_and_it_is_never_dropped_by_default(tmp_path):
    quantized = torch.quantize_per_tensor(torch.ones(3), 0.1, 0, torch.qint8)
    found = checkpoint.open(write(tmp_path / "s.pt", {"q": quantized}))
    same(found["w"].read(), numbers(4, 2))
    assert found.objects["q"].name.endswith("_rebuild_qtensor")
    with pytest.raises(sw.CheckpointError, match="its tensors would be lost"):
        checkpoint.convert(tmp_path / "s.pt", tmp_path / "c.pt")
    with pytest.raises(sw.CheckpointError, match="StorageStub that is not part of a tensor"):
        checkpoint.convert(tmp_path / "s.pt", tmp_path / "c.pt", objects="carry")
    assert list(checkpoint.convert(tmp_path / "s.pt", tmp_path / "c.pt", objects="drop")) == ["w"]


def test_the_name_of_a_class_is_shown_without_control_characters():
    assert repr(checkpoint.Opaque("a\x1b[2J", "b\nc", "name", tuple)) == r"<a\x1b[2J.b\nc, not rebuilt>"


def test_an_object_has_the_parts_that_its_errors_name(tmp_path):
    parts = {
        "color": (Color.RED, "args"),
        "args": (argparse.Namespace(lr=0.1), "state"),
        "items": (Listed([1]), "items"),
    }
    write(tmp_path / "s.pt", {name: value for name, (value, _) in parts.items()})
    found = checkpoint.open(tmp_path / "s.pt").objects
    for name, (_, part) in parts.items():
        assert getattr(found[name], part)
        with pytest.raises(sw.CheckpointError, match=rf"what it holds is in \.([a-z .]* )?\.?{part}\b"):
            checkpoint.load(tmp_path / "s.pt", into={name: 0})
    assert (found["items"].items, found["items"].pairs) == ((1,), ())


def test_values_of_a_dcp_show_themselves_as_a_dict_does(tmp_path):
    torch.save({"w": numbers(2), "step": 7, "name": "run"}, tmp_path / "s.pt")
    made = checkpoint.convert(tmp_path / "s.pt", tmp_path / "o", format="dcp")
    assert eval(repr(made.objects)) == {"step": 7, "name": "run"}
