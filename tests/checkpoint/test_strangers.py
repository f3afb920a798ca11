"""Small files made to take forever, or all memory: one error each, at once and in little memory."""

import pickle
import zipfile
from pathlib import Path

import pytest
import torch
from checkpoints import numbers, same
from confined import MEMORY, confined, refused

from shardwise import checkpoint
from shardwise.checkpoint import pickles, tables
from shardwise.errors import CheckpointError

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning", "ignore::FutureWarning")  # torch's own, as it saves


@pytest.fixture(autouse=True)
def here(monkeypatch, tmp_path):
    """Every test has a directory of its own to work in."""
    monkeypatch.chdir(tmp_path)


def looked(path):
    """All that a careless reader does with a checkpoint."""
    found = checkpoint.open(path)
    tables.as_json(found), tables.summary(found), tables.table(found), tables.tree(found)
    return {name: entry.read() for name, entry in found.items()}, dict(found.objects)


def archive(text, **storages):
    """A file of torch.save with this pickle."""
    with zipfile.ZipFile("m.pt", "w") as file:
        file.writestr("archive/data.pkl", text)
        file.writestr("archive/byteorder", b"little")
        for key, data in storages.items():
            file.writestr(f"archive/data/{key}", data)
        file.writestr("archive/version", b"3\n")
    return "m.pt"


def all_refused(texts):
    """What is said of files of torch.save with these pickles, all of which are refused."""

    def work():
        said = []
        for text in texts:
            with pytest.raises(CheckpointError, match=r"m\.pt") as error:
                looked(archive(text))
            said.append(str(error.value))
        return said

    ending = confined(work)
    assert ending.error is None, ending.error
    assert ending.memory < MEMORY, ending
    return ending.result


# --- pickles: what is hashed ---------------------------------------------------------------------------------------


def doubled(make, levels=64):
    """A container of twice the one before, again and again; left on the stack, and in memo number `levels`."""
    text = b"\x80\x04)q\x00"
    for level in range(levels):
        text += make(b"h" + bytes([level])) + b"q" + bytes([level + 1]) + b"0"
    return text


TWICE = {
    "tuples": lambda get: get + get + b"\x86",
    "with something after them": lambda get: get + get + b"N\x87",
    "marked": lambda get: b"(" + get + get + b"t",
    "marked, among numbers": lambda get: b"(K\x01" + get + b"K\x02" + get + b"K\x03t",
    "copied on the stack": lambda get: get + b"2\x86",
    "taken off again": lambda get: get + get + b"N0\x86N0",
    "frozensets": lambda get: b"(" + get + get + b"\x85\x91",
    "frozensets in tuples": lambda get: b"(" + get + get + b"\x85\x91" + get + b"\x86",
}
HASHED = {
    "a key": lambda get: b"}" + get + b"Ns.",
    "keys": lambda get: b"}(" + get + b"N" + get + b"Nu.",
    "a marked dict": lambda get: b"(" + get + b"Nd.",
    "a set": lambda get: b"\x8f(" + get + b"\x90.",
    "a frozenset": lambda get: b"(" + get + b"\x91.",
    "set()": lambda get: b"cbuiltins\nset\n(" + get + b"l\x85R.",
    "frozenset()": lambda get: b"cbuiltins\nfrozenset\n(" + get + b"l\x85R.",
    "an ordered dict": lambda get: b"ccollections\nOrderedDict\n)R" + get + b"Ns.",
    "pairs of a dict": lambda get: b"ccollections\nOrderedDict\n(" + get + b"N\x86l\x85R.",
}


@pytest.mark.parametrize("twice", TWICE)
def test_a_pickle_cannot_have_us_hash_forever(twice):
    start = doubled(TWICE[twice])
    assert all("unhashable" in text for text in all_refused(start + hashed(b"h\x40") for hashed in HASHED.values()))


def test_frozensets_that_are_alike_are_not_compared_forever():
    """Two towers of them, each level with the one below twice."""
    text = b"\x80\x04"
    for first in 0, 100:
        for level in range(40):
            get = b"h" + bytes([first + level - 1]) if level else b")"
            text += b"(" + get + get + b"\x85\x91q" + bytes([first + level]) + b"0"
    path = archive(text + b"}(h\x27Nh\x8bNu.")
    refused(lambda: looked(path), CheckpointError, "m.pt", "unhashable")


def test_tuples_in_tuples_are_keys_as_long_as_they_are_small():
    deep = ((1, "a"), (2, ("b", (None, 2.5))), frozenset({3}))
    value = {"d": {deep: 1, (deep, deep): 2, ("x",) * 200: 3, tuple(range(100)): 4, frozenset("ab"): 5}}
    assert pickles.settled(pickles.unpickle(pickle.dumps(value), "here"), "here", None) == value


@pytest.mark.parametrize("protocol", range(6))
def test_large_tuples_that_are_no_keys_come_back(protocol):
    value = {"t": (tuple(range(1000)), tuple("abc" * 200), ((1, 2),) * 300, (1.5, None, True) * 100), "n": [()]}
    found = pickles.settled(pickles.unpickle(pickle.dumps(value, protocol), "here"), "here", None)
    assert found == value
    assert [type(item) for item in found["t"]] == [tuple] * 4


def test_long_pickles_in_frames_come_back():
    value = [(str(at), (at, (at, f"{at}" * 50)), frozenset({at})) for at in range(2000)]
    assert pickles.settled(pickles.unpickle(pickle.dumps(value, 4), "here"), "here", None) == value


# --- pickles: what is large ----------------------------------------------------------------------------------------


def tensor(shape, strides, key=b"0", count=1, dtype=b"ctorch\nFloatStorage\n"):
    """The instructions of a tensor."""

    def many(sizes):
        return b"(" + b"".join(b"\x8a\x08" + size.to_bytes(8, "little") for size in sizes) + b"t"

    pid = b"(X\x07\x00\x00\x00storage" + dtype + b"X\x01\x00\x00\x00" + key + b"X\x03\x00\x00\x00cpuK" + bytes([count])
    return b"ctorch._utils\n_rebuild_tensor_v2\n(" + pid + b"tQK\x00" + many(shape) + many(strides) + b"\x89}tR"


def named(*tensors):
    items = b"".join(b"X\x01\x00\x00\x00%c" % (97 + at) + text for at, text in enumerate(tensors))
    return b"\x80\x02}(" + items + b"u."


@pytest.mark.parametrize("dims", [65, 300_000])
def test_a_tensor_of_very_many_dims_is_refused_before_they_are_multiplied(dims):
    path = archive(named(tensor([2**61] * dims, [1] * dims)), **{"0": b"1234"})
    refused(lambda: looked(path), CheckpointError, "m.pt", "at most 64")


def test_few_bytes_are_not_a_million_tensors():
    text = b"\x80\x02" + tensor([1], [1]) + b"q\x000"
    for level in range(12):
        get = b"h" + bytes([level])
        text += b"](" + get * 3 + b"eq" + bytes([level + 1]) + b"0"
    path = archive(text + b"h\x0c.", **{"0": b"1234"})
    assert Path(path).stat().st_size < 1000
    refused(lambda: looked(path), CheckpointError, "m.pt", "again and again")


@pytest.mark.parametrize("shape", [(2**40,), (2**20, 2**20), (2**30, 1)])
def test_a_tensor_that_says_to_be_far_larger_than_its_bytes_is_refused(shape):
    path = archive(named(tensor(shape, [0] * len(shape))), **{"0": b"1234"})
    refused(lambda: looked(path), CheckpointError, "m.pt", "'a'", "clone()")


def test_expanded_tensors_of_usual_sizes_are_read():
    state = {"mask": torch.ones(1, 1, dtype=torch.bool).expand(1024, 1024), "w": numbers(4).expand(3, 4)}
    torch.save(state, "m.pt")
    found, _ = looked("m.pt")
    for name, value in state.items():
        same(found[name], value)


def test_values_that_refer_to_the_same_ones_again_and_again_are_shown_shortly():
    text = b"\x80\x02]q\x000"
    for level in range(64):
        get = b"h" + bytes([level])
        text += b"](" + get * 2 + b"eq" + bytes([level + 1]) + b"0"
    asked = (
        b"cnumpy\ndtype\n(h\x40K\x00K\x01tR.",
        b"c_codecs\nencode\n(X\x01\x00\x00\x00ah\x40tR.",
        b"ctorch\ndevice\n(h\x40tR.",
        b"cpathlib\nPosixPath\n(h\x40tR.",
        b"cbuiltins\ncomplex\n(h\x40K\x01tR.",
        b"h\x40.",
        b"}X\x01\x00\x00\x00ah\x40s.",
    )
    assert max(map(len, all_refused(text + end for end in asked))) < 1000


def test_numbers_of_any_length_are_values_and_are_shown():
    torch.save({"n": 10**6000, "w": numbers(2)}, "m.pt")
    ending = confined(lambda: looked("m.pt")[1])
    assert ending.result == {"n": 10**6000}
    assert ending.error is None
