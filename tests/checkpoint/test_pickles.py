"""Pickles that nobody vouches for: values come out as torch wrote them, hostile ones raise and run nothing."""

import copyreg
import io
import pickle
import resource
import zipfile
from collections import Counter, OrderedDict, defaultdict
from contextlib import suppress
from pathlib import Path, PurePosixPath

import numpy as np
import pytest
import torch

from shardwise.checkpoint import pickles
from shardwise.checkpoint.formats import dcp, torch_save
from shardwise.checkpoint.local_files import files_at
from shardwise.checkpoint.pickles import check_tree, unpickle, without_stubs
from shardwise.errors import CheckpointError

PLAIN = {
    "numbers": [1, -(2**70), 2.5, True, None, 1 - 2j],
    "texts": ("a", "\u00fc\n", b"\x00\xff", bytearray(b"xyz"), ""),
    "sets": [{1, 2}, frozenset("ab"), set()],
    "numpy": [np.float32(1.5), np.int64(-3), np.bool_(True), np.complex128(1j)],
    "torch": (torch.Size([2, 3]), torch.bfloat16, torch.device("cuda", 1), torch.device("cpu")),
    "dicts": [OrderedDict(b=1, a=2), {(1, "x"): {}}],
    "path": PurePosixPath("a/b"),
}


def read(value, protocol):
    found = unpickle(pickle.dumps(value, protocol), "here")
    check_tree(found, "here", 10_000)
    return without_stubs(found, "here", None)


@pytest.mark.parametrize("protocol", range(1, 6))
def test_plain_values_come_back_in_every_protocol(protocol):
    found = read(PLAIN, protocol)
    assert found == PLAIN
    assert [type(item) for item in found["texts"]] == [type(item) for item in PLAIN["texts"]]
    assert [type(item) for item in found["torch"]] == [type(item) for item in PLAIN["torch"]]
    assert type(found["dicts"][0]) is OrderedDict


def test_protocol_0_has_numbers_texts_and_containers():
    value = {"a": [1, 2.5, None, True, "x"], "b": ("y", {"c": -(2**70)})}
    assert read(value, 0) == value


@pytest.mark.parametrize("protocol", [2, 3, 4])
def test_arrays_and_generators_of_numpy(protocol):
    state = np.random.RandomState(0).get_state()
    found = read(state, protocol)
    assert found[0] == state[0]
    np.testing.assert_array_equal(found[1], state[1])
    for array in (np.arange(6.0).reshape(2, 3), np.asfortranarray(np.arange(6).reshape(2, 3)), np.zeros((0, 2))):
        np.testing.assert_array_equal(read(array, protocol), array, strict=True)


def test_dicts_of_other_kinds_become_plain_ones():
    value = [defaultdict(list, {1: [2]}), Counter("aab")]
    assert read(value, 2) == [{1: [2]}, {"a": 2, "b": 1}]


def test_paths_of_this_machine_become_pure_ones():
    assert read(Path("/x/y"), 4) == PurePosixPath("/x/y")


class Reduced:
    """Pickles as a call."""

    def __init__(self, *call):
        self.call = call

    def __reduce__(self):
        return self.call


def named(module, name, args=b"(S'x'\ntR."):
    return b"\x80\x02c%b\n%b\n" % (module.encode(), name.encode()) + args


def hostile(mark):
    import functools
    import operator
    import os
    import subprocess
    import types

    touch = f"touch {mark}"
    made = f"open({str(mark)!r}, 'w').close()"
    return {
        "os.system": pickle.dumps(Reduced(os.system, (touch,))),
        "posix.system": named("posix", "system", b"(S'%b'\ntR." % touch.encode()),
        "eval": pickle.dumps(Reduced(eval, (made,))),
        "exec": pickle.dumps(Reduced(exec, (made,)), 2),
        "open": pickle.dumps(Reduced(open, (str(mark), "w"))),
        "subprocess": pickle.dumps(Reduced(subprocess.Popen, (["touch", str(mark)],))),
        "getattr": pickle.dumps(Reduced(getattr, (Reduced(__import__, ("os",)), "system"))),
        "attrgetter": pickle.dumps(operator.attrgetter("system")),
        "partial": pickle.dumps(functools.partial(os.system, touch)),
        "torch.load": pickle.dumps(Reduced(torch.load, (str(mark),))),
        "torch.hub": named("torch.hub", "load"),
        "storage": named("torch.storage", "_load_from_bytes"),
        "dotted module": named("os.path", "join"),
        "dotted name": named("torch", "serialization.os.system", b"(S'%b'\ntR." % touch.encode()),
        "dotted stand-in": named("collections", "OrderedDict.fromkeys", b"(S'ab'\ntR."),
        "stand-in's method": b"\x80\x04\x8c\x05torch\x8c\x0fTensor.__init__\x93.",
        "its own module": named("shardwise.checkpoint.pickles", "FunctionStub"),
        "code": pickle.dumps(Reduced(types.SimpleNamespace, ())),
        "type": named("builtins", "type"),
        "object": named("builtins", "object", b"."),
        "copyreg": pickle.dumps(Reduced(copyreg._reconstructor, (dict, object, None))),
        "instance": b"(S'%b'\nios\nsystem\n." % touch.encode(),
        "object opcode": b"\x80\x02(cos\nsystem\nS'%b'\no." % touch.encode(),
        "unregistered extension": b"\x80\x02\x82\x01.",
    }


def sites(tmp_path, data):
    """The same pickle wherever one is read."""
    (tmp_path / ".metadata").write_bytes(data)
    with zipfile.ZipFile(tmp_path / "model.pt", "w") as archive:
        archive.writestr("model/data.pkl", data)
    files, _ = files_at(tmp_path)
    yield lambda: unpickle(data, "here")
    yield lambda: torch_save.open_files(files, ["model.pt"])
    yield lambda: dcp.open_dcp(files)


@pytest.mark.parametrize("name", hostile("mark"))
def test_hostile_pickles_raise_and_run_nothing(tmp_path, name):
    mark = tmp_path / "mark"
    for opened in sites(tmp_path, hostile(mark)[name]):
        with pytest.raises(CheckpointError):
            opened()
    assert not mark.exists()


def test_the_error_names_the_file_and_what_was_asked_for(tmp_path):
    for place, opened in zip(("here", "model.pt", ".metadata"), sites(tmp_path, named("os.path", "join")), strict=True):
        with pytest.raises(CheckpointError, match=rf"{place}.* asks for 'os.path.join'.* nothing of it was run"):
            opened()


def test_extensions_that_another_library_registered_are_not_reached():
    copyreg.add_extension("os", "system", 200)
    try:
        copyreg._extension_cache[200] = print
        with pytest.raises(CheckpointError, match="0x82"):
            unpickle(b"\x80\x02\x82\xc8(S'x'\ntR.", "here")
    finally:
        copyreg._extension_cache.pop(200)
        copyreg.remove_extension("os", "system", 200)


NAMES = {**pickles.KNOWN, **pickles.COPIES, **dcp.NAMES}
STATES = {
    "dict": b"}S'x'\nI1\nsb.",
    "attributes": b"N}S'x'\nI1\ns\x86b.",
    "its own attribute": b"N}S'_work'\nNs\x86b.",
    "text": b"S'x'\nb.",
}


@pytest.mark.parametrize("state", STATES)
def test_no_name_in_the_tables_can_be_changed(state):
    for key in NAMES:
        with pytest.raises(CheckpointError):
            unpickle(named(*key, STATES[state]), "here", dcp.NAMES)
    for value in NAMES.values():
        assert not hasattr(value, "x")
        assert not isinstance(value, pickles.FunctionStub) or value._work is not None


CALLS = {"nothing": b")R.", "a number": b"(I1000000000000\ntR.", "numbers": b"(I1\nI2\nI3\nI4\nI5\nI6\nI7\nI8\ntR."}
CALLS |= {
    "a text": b"(S'x'\ntR.",
    "none": b"(NNNNtR.",
    "new": b")\x81.",
    "new with": b"(I7\nt\x81.",
    "tuples": b"()))t)R.",
}


@pytest.mark.parametrize("call", CALLS)
def test_whatever_a_name_is_called_with_gives_a_small_value_or_an_error(call):
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    for key in NAMES:
        with suppress(CheckpointError):
            unpickle(named(*key, CALLS[call]), "here", dcp.NAMES)
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 100_000


def test_attributes_of_ordered_dicts_are_left_out():
    value = OrderedDict(a=1)
    value.note = "not a method"
    found = unpickle(pickle.dumps(value, 2).replace(b"X\x04\x00\x00\x00note", b"X\x05\x00\x00\x00items"), "here")
    assert list(found.items()) == [("a", 1)]


BOMBS = {
    "memo": b"\x80\x02Nr\xff\xff\xff\x7f.",
    "memo in text": b"Np99999999999\n.",
    "frame": b"\x80\x04\x95\xff\xff\xff\xff\xff\xff\xff\x00N.",
    "bytes": b"\x80\x04\x8e\x00\x00\x00\x00\xff\x00\x00\x00N.",
    "bytearray": b"\x80\x05\x96\x00\x00\x00\x00\xff\x00\x00\x00N.",
    "text": b"\x80\x02X\xff\xff\xff\x7fN.",
    "long": b"\x80\x02\x8b\xff\xff\xff\x7fN.",
    "digits": b"L" + b"9" * 100_000 + b"L\n.",
    "copies": b"\x80\x02(" + b"K\x01" * 50_000 + b"lq\x00c__builtin__\nset\nq\x01" + b"h\x01h\x00\x85R" * 50_000 + b".",
    "empty": b"",
    "stop": b".",
    "no stop": b"\x80\x02N",
    "pops": b"0000.",
    "marks": b"((((.",
    "unknown opcode": b"\x80\x02\xfe.",
    "later protocol": b"\x80\x09N.",
    "no memo": b"h\x07.",
    "buffers": b"\x80\x05\x97.",
}
PIDS = [(), "storage", ("storage",), ("storage", 1, "0", "cpu", 4), ("storage", None, 0, "cpu", 4), 7, ("module", 1, 2)]


@pytest.mark.parametrize("name", BOMBS)
def test_damaged_pickles_raise_and_take_no_memory(name):
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    with pytest.raises(CheckpointError, match="here"):
        unpickle(BOMBS[name], "here")
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 200_000  # kilobytes


@pytest.mark.parametrize("pid", PIDS)
def test_storages_that_are_described_otherwise_raise(pid):
    with pytest.raises(CheckpointError):
        unpickle(pickle.dumps(pid, 2)[:-1] + b"Q.", "here")


@pytest.mark.parametrize("count", ["-1", "1.5", "4611686018427387904", "'4'"])
@pytest.mark.parametrize("key", ["'0'", "0", "None"])
def test_storages_with_other_keys_or_sizes_raise(key, count):
    tail = pickle.dumps((eval(key), "cpu", eval(count)), 2)[2:-1]
    whole = b"\x80\x02(S'storage'\nctorch\nFloatStorage\n" + tail.replace(b"\x87", b"t").replace(b"q\x00", b"")
    with pytest.raises(CheckpointError):
        unpickle(whole + b"Q.", "here")


def test_what_refers_to_itself_or_to_one_thing_too_often_raises():
    loop = []
    loop.append(loop)
    laughs = [0]
    for _ in range(60):
        laughs = [laughs, laughs]
    deep = [[]]
    chain = [deep]
    for _ in range(5_000):
        deep = [deep]
        chain.append(deep)
    for value, protocol in ((loop, 2), (laughs, 4), (loop, 0)):
        with pytest.raises(CheckpointError):
            check_tree(unpickle(pickle.dumps(value, protocol), "here"), "here", 1_000_000)
    nested = b"]" * 20_000 + b"a" * 19_999 + b"."
    for value in (unpickle(nested, "here"), chain):
        with pytest.raises(CheckpointError, match="deep"):
            check_tree(value, "here", 1_000_000)


def test_a_long_memo_is_no_bomb():
    value = [[at] for at in range(100_000)]
    for protocol in (0, 1, 2, 4):
        assert unpickle(pickle.dumps(value, protocol), "here") == value


def test_tensors_with_attributes_and_parameters_are_tensors(tmp_path):
    tensor, parameter = torch.arange(3.0), torch.nn.Parameter(torch.arange(2.0))
    tensor.note, parameter.note = "x", "y"
    stream = io.BytesIO()
    torch.save({"a": tensor, "b": parameter, "c": torch.nn.Parameter(torch.ones(1))}, stream)
    (tmp_path / "x.pt").write_bytes(stream.getvalue())
    files, name = files_at(tmp_path / "x.pt")
    found = torch_save.open_files(files, [name])
    assert [found[key].read().tolist() for key in "abc"] == [[0, 1, 2], [0, 1], [1]]
