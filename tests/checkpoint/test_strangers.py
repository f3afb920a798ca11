"""Small files made to take forever, or all memory: one error each, at once and in little memory."""

import json
import pickle
import re
import zipfile
from fnmatch import translate
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.distributed.checkpoint as dcp
from checkpoints import INDEX, numbers, rewritten, same
from confined import MEMORY, confined, refused
from hypothesis import example, given
from hypothesis import strategies as st
from safetensors.torch import save_file
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)

from shardwise import checkpoint
from shardwise.checkpoint import listing, pickles, terminal
from shardwise.checkpoint.formats.archives import MAX_EXPANSION
from shardwise.errors import CheckpointError, LayoutError
from shardwise.job.names import matched

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning", "ignore::FutureWarning")  # torch's own, as it saves


@pytest.fixture(autouse=True)
def here(monkeypatch, tmp_path):
    """Every test has a directory of its own to work in."""
    monkeypatch.chdir(tmp_path)


def looked(path):
    """All that a careless reader does with a checkpoint."""
    found = checkpoint.open(path)
    terminal.as_json(found), terminal.summary(found), list(listing.rows(found)), terminal.tree(found)
    terminal.page(found)
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
    assert pickles.without_stubs(pickles.unpickle(pickle.dumps(value), "here"), "here", None) == value


@pytest.mark.parametrize("protocol", range(6))
def test_large_tuples_that_are_no_keys_come_back(protocol):
    value = {"t": (tuple(range(1000)), tuple("abc" * 200), ((1, 2),) * 300, (1.5, None, True) * 100), "n": [()]}
    found = pickles.without_stubs(pickles.unpickle(pickle.dumps(value, protocol), "here"), "here", None)
    assert found == value
    assert [type(item) for item in found["t"]] == [tuple] * 4


def test_long_pickles_in_frames_come_back():
    value = [(str(at), (at, (at, f"{at}" * 50)), frozenset({at})) for at in range(2000)]
    assert pickles.without_stubs(pickles.unpickle(pickle.dumps(value, 4), "here"), "here", None) == value


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


@pytest.mark.parametrize("bytes_", [1, 2**20])
def test_what_is_repeated_up_to_the_limit_is_read_and_nothing_more(bytes_):
    most = MAX_EXPANSION * (bytes_ + 2**20) // bytes_
    for times, fits in (most, True), (most + 1, False):
        torch.save({"a": torch.ones(bytes_, dtype=torch.uint8).expand(times, bytes_)}, "m.pt")
        if fits:
            assert checkpoint.open("m.pt")["a"].shape == (times, bytes_)
        else:
            refused(lambda: checkpoint.open("m.pt")["a"], CheckpointError, "m.pt", "'a'", "clone()")


def test_expanded_tensors_of_usual_sizes_are_read():
    state = {"mask": torch.ones(1, 1, dtype=torch.bool).expand(1024, 1024), "w": numbers(4).expand(3, 4)}
    torch.save(state, "m.pt")
    found, _ = looked("m.pt")
    for name, value in state.items():
        same(found[name], value)


def test_what_stands_for_a_name_of_torch_is_called_the_same_every_time():
    path = archive(b"\x80\x02}(ctorch\nFloatStorage\nK\x01u.")
    assert list(checkpoint.open(path).objects) == ["<StorageType>"]


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


def test_names_of_classes_inside_of_others_do_not_grow_without_end():
    text = b"\x80\x02cbuiltins\ngetattr\nq\x000X\xf0\x00\x00\x00" + b"x" * 240 + b"q\x010ca\nb\nq\x020"
    all_refused([text + b"h\x00h\x02h\x01\x86Rq\x020" * 9000 + b"h\x02."])


def test_numbers_of_any_length_are_values_and_are_shown():
    torch.save({"n": 10**6000, "w": numbers(2)}, "m.pt")
    ending = confined(lambda: looked("m.pt")[1])
    assert ending.result == {"n": 10**6000}
    assert ending.error is None


@pytest.mark.parametrize("dtype", ["qint8", "quint8", "quint4x2", "qint32", "uint4", "int1"])
def test_quantized_and_sub_byte_tensors_are_refused_by_name_and_the_others_are_read(dtype):
    kind = b"ctorch\nByteStorage\n"
    strange = tensor([2], [1], count=8, dtype=kind).replace(b"_v2", b"_v3")[:-2] + b"ctorch\n%b\ntR" % dtype.encode()
    path = archive(named(strange, tensor([2], [1], count=2, key=b"1")), **{"0": bytes(8), "1": bytes(8)})
    same(checkpoint.open(path)["b"].read(), torch.zeros(2))
    for read in (
        lambda: checkpoint.open(path)["a"].read(),
        lambda: checkpoint.verify(path, path),
        lambda: checkpoint.convert(path, "o.pt"),
    ):
        refused(read, CheckpointError, "'a'", dtype)


# --- torch.distributed.checkpoint ----------------------------------------------------------------------------------


def described(shape, chunks, **more):
    """A directory with metadata that describe a tensor by these chunks; without any data."""
    index = [MetadataIndex("w", torch.Size(lo), at) for at, (lo, size) in enumerate(chunks) if 0 not in size]
    stored = {one: _StorageInfo("__0_0.distcp", 1000 * at, 1000) for at, one in enumerate(index)}
    listed = [ChunkStorageMetadata(torch.Size(lo), torch.Size(size)) for lo, size in chunks]
    kind = TensorStorageMetadata(TensorProperties(dtype=torch.float32), torch.Size(shape), listed)
    Path("d").mkdir(exist_ok=True)
    names = dict.fromkeys(more.get("names", ["w"]), kind)
    Path("d/.metadata").write_bytes(pickle.dumps(Metadata(names, more.get("planner"), stored)))
    Path("d/__0_0.distcp").write_bytes(b"PK\x03\x04" * 250 * len(stored))
    return "d"


@pytest.mark.parametrize(("long", "dims"), [(16, 3), (2, 7), (1, 9)])
def test_chunks_that_overlap_are_not_looked_at_forever(long, dims):
    """As many cells as the tensor has, at random places."""
    random = np.random.default_rng(0)
    corners = random.integers(0, [long, *[3] * dims], (long * 2**dims, dims + 1)).tolist()
    path = described([long, *[4] * dims], [(lo, [1, *[2] * dims]) for lo in sorted(map(tuple, corners))])
    refused(lambda: looked(path), CheckpointError, "d")
    refused(lambda: checkpoint.open(path)["w"].read(), CheckpointError, "'w'")


def test_chunks_along_very_many_dims_are_refused():
    corners = [[int(at >= dim) for dim in range(24)] for at in range(1, 24)]
    refused(
        lambda: looked(described([2] * 24, [([0] * 24, [2] * 24), *((lo, [0] * 24) for lo in corners)])),
        CheckpointError,
    )
    refused(lambda: looked(described([1] * 65, [([0] * 65, [1] * 65)])), CheckpointError, "at most 64")
    refused(lambda: looked(described([1] * 100_000, [])), CheckpointError, "at most 64")


def test_a_list_of_chunks_is_not_shared_by_very_many_tensors():
    empty = [([0], [0])] * 3000
    path = described([0], empty, names=map(str, range(3000)))
    refused(lambda: looked(path), CheckpointError, "copies")


def test_a_path_in_dcp_is_not_endless():
    path = described([0], [], planner={"w": ("w",) * 5000})
    refused(lambda: looked(path), CheckpointError, "planner_data")


def test_a_tuple_in_dcp_has_no_more_places_than_there_are_names():
    path = described([0], [], planner={"w": ("w", (2**40,))})
    for work in looked, lambda path: checkpoint.convert(path, "o.pt"):
        refused(lambda work=work: work(path), CheckpointError, ".metadata", "tuples")


def replanned(state, change):
    """A checkpoint of torch.distributed whose metadata say something else of its paths."""
    dcp.save(state, checkpoint_id="d", no_dist=True)
    about = pickle.loads(Path("d/.metadata").read_bytes())
    change(about.planner_data)
    Path("d/.metadata").write_bytes(pickle.dumps(about))


@pytest.mark.parametrize("values", [(1, 2), (numbers(2), numbers(2, start=5)), (numbers(2), 1)], ids=str)
def test_two_names_of_one_place_are_refused_before_one_of_them_is_lost(values):
    replanned(dict(zip("ab", values, strict=True)), lambda paths: paths.update(b=("a",)))
    refused(lambda: checkpoint.convert("d", "o.pt"), CheckpointError, "'a'", "'b'", "same path")
    assert not Path("o.pt").exists()


def test_a_name_that_is_not_that_of_its_path_is_found_by_its_path():
    replanned({"a": {"b": numbers(2)}, "c": 1}, lambda paths: paths.update({"a.b": ("x", "y")}))
    checkpoint.convert("d", "o.pt")
    found = torch.load("o.pt")
    same(found["x"]["y"], numbers(2))
    assert found["c"] == 1


def test_a_file_name_in_dcp_is_a_text():
    deep = []
    for _ in range(64):
        deep = [deep, deep]
    described([4], [([0], [4])])
    about = pickle.loads(Path("d/.metadata").read_bytes())
    for name in deep, "x\x1b[2J", 10**5000:
        for one in about.storage_data.values():
            one.relative_path = name
        Path("d/.metadata").write_bytes(pickle.dumps(about))
        refused(lambda: looked("d"), CheckpointError, ".metadata")


# --- our own index -------------------------------------------------------------------------------------------------


def indexed(**changes):
    """A checkpoint whose index says something else of its tensors."""
    if not Path("p").exists():
        checkpoint.save({"w": numbers(8, 6)}, "p")
        Path("index.json").write_bytes(Path("p", INDEX).read_bytes())
    Path("p", INDEX).write_bytes(Path("index.json").read_bytes())
    rewritten(Path("p", INDEX), lambda said: said.update(changes))
    return "p"


def listed(layout, shape=(8, 6), count=1):
    return {"tensors": {str(n): {"dtype": "F32", "shape": shape, "layout": layout(n)} for n in range(count)}}


@pytest.mark.parametrize(
    "said",
    [
        listed(lambda n: f"8x6/S0@{200_000 + n}", count=50),
        listed(lambda n: f"{2**20 - n}/cyclic0=1@1", count=50, shape=[2**20]),
        listed(lambda n: "8x6/S0:1000000@1"),
        listed(lambda n: "x".join("2" * 17) + "/R@1", shape=[2] * 17),
        listed(lambda n: "8x6/S0@1\x1b[2J"),
        listed(lambda n: "8x6/S0@1", shape=[[8], 6]),
        listed(lambda n: "8x6/S0@1", shape=[2] * 100_000),
        listed(lambda n: 10**4000),
        {"shardwise": 10**4000},
        {"paths": {"w": ["w", {"int": "0x" + "f" * 10_000}]}},
        {"values": {"w": {"unknown": [[[[1]]]]}}},
        {"files": [["x"]]},
        {"files": ["a\x1b[2J\u202e.safetensors"]},
    ],
    ids=str,
)
def test_a_short_index_cannot_ask_for_much(said):
    refused(lambda: looked(indexed(**said)), CheckpointError, "p")


def test_a_tensor_without_cells_in_two_files_is_refused():
    for name in "ab":
        save_file({"z": torch.zeros(0, 3)}, f"{name}.safetensors")
    refused(lambda: looked("."), CheckpointError, "'z'", "a.safetensors", "b.safetensors")


def header(**tensors):
    text = json.dumps(tensors).encode()
    Path("x.safetensors").write_bytes(len(text).to_bytes(8, "little") + text)
    return "x.safetensors"


@pytest.mark.parametrize(
    "said",
    [
        {"dtype": "F32", "shape": [2**61] * 65, "data_offsets": [0, 0]},
        {"dtype": "F32", "shape": [2**61] * 200_000, "data_offsets": [0, 0]},
        {"dtype": "F32", "shape": [2**61] * 60, "data_offsets": [0, 0]},
        {"dtype": "F32", "shape": [10**4000], "data_offsets": [0, 0]},
        {"dtype": "F32", "shape": [0], "data_offsets": [0] * 100_000},
        {"dtype": ["F32"] * 10_000, "shape": [0], "data_offsets": [0, 0]},
        {"dtype": "F4\x1b[2J", "shape": [0], "data_offsets": [0, 0]},
        {"dtype": "F4", "shape": [2], "data_offsets": [0, 1]},
        {"dtype": "I4", "shape": [2], "data_offsets": [0, 1]},
        {"dtype": "F6_E2M3", "shape": [4], "data_offsets": [0, 3]},
    ],
    ids=lambda said: str(said)[:60],
)
def test_a_header_cannot_ask_for_much(said):
    text = refused(lambda: looked(header(w=said)), CheckpointError, "'w'", "x.safetensors")
    assert len(text) < 3000


@pytest.mark.parametrize(
    "text", ["[" * 100_000, '{"a":' * 100_000, '{"w": ' + "9" * 5000 + "}", '{"w": 1e400}', '"\\ud800"']
)
def test_json_of_any_kind_is_refused(text):
    Path("x.safetensors").write_bytes(len(text).to_bytes(8, "little") + text.encode())
    refused(lambda: looked("x.safetensors"), CheckpointError, "x.safetensors")


# --- rules ---------------------------------------------------------------------------------------------------------


def rules(mesh="tp = 2", name="*", rule='placements = "S0"', files=""):
    return f"[mesh]\n{mesh}\n[[rule]]\nname = {json.dumps(name)}\n{rule}\n[files]\n{files}\n"


RULES = {
    "wide numbers": rules(files='pattern = "m_{rank:2000000000d}.pt"'),
    "filled numbers": rules(files='pattern = "m_{rank:x>2000000000}.pt"'),
    "exact numbers": rules(files='pattern = "m_{rank:.2000000000f}.pt"'),
    "numbers as wide as others": rules(files='pattern = "m_{rank:{tp}}.pt"'),
    "attributes": rules(files='pattern = "m_{rank.real}.pt"'),
    "backtracking": rules(name="*a" * 40 + "b"),
    "backtracking over names": rules(name="*.*" * 30 + "[!.]x", files='pattern = "m_{rank}.pt"'),
    "many ranks": rules(mesh="tp = 4194304"),
    "many ranks by a pattern": rules(mesh="tp = 262144", files='pattern = "m_{rank}.pt"'),
    "many ranks without a pattern": rules(mesh="tp = 262144"),
    "a long number": rules(mesh="tp = " + "9" * 4000),
    "a longer number": rules(mesh="tp = " + "9" * 5000),
    "long numbers": rules(mesh="\n".join(f"a{n} = {'9' * 1000}" for n in range(10))),
    "100 axes": rules(mesh="\n".join(f"a{n} = 1" for n in range(100))),
    "10,000 axes": rules(mesh="\n".join(f"a{n} = 2" for n in range(10_000))),
    "a long dim": rules(rule=f'placements = "S{"9" * 5000}"'),
    "a dim far away": rules(rule='placements = "S99999"'),
    "a long segment": rules(rule=f"fused = {{dim = 0, segments = [{'9' * 4000}, {'9' * 4000}]}}"),
    "a fused dim far away": rules(rule=f"fused = {{dim = {'9' * 4000}, segments = [4, 4]}}"),
    "deep": "a = " + "[" * 3000 + "]" * 3000,
    "deep tables": "[" + "a." * 3000 + "a]",
    "deep in rules": f"rule = {'[' * 200}{']' * 200}",
    "escape sequences": rules(name="x\x1b[2J\u202e"),
    "escape sequences in keys": '["\\u001b[2J"]\na = 1',
}


@pytest.mark.parametrize("text", RULES.values(), ids=RULES)
def test_rules_cannot_ask_for_much(text):
    Path("ranks").mkdir()
    for rank in range(2):
        torch.save({"a" * 80 + "." * 20: numbers(4), "w": numbers(4)}, f"ranks/m_{rank}.pt")
    Path("rules.toml").write_text(text)
    refused(lambda: looked_by_rules("ranks", "rules.toml"), (CheckpointError, LayoutError))


def looked_by_rules(path, by):
    return {name: entry.read() for name, entry in checkpoint.open(path, rules=by).items()}


@given(st.lists(st.sampled_from("ab*?[]!-"), max_size=12).map("".join), st.text("ab[]!-", max_size=12))
@example("[!a]*[]]", "b]")
@example("a[]", "a[]")
@example("*[!]", "b[!]")
@example("**", "")
def test_stars_stand_for_what_a_regular_expression_says(pattern, name):
    parts = (translate(part).removeprefix("(?s:").removesuffix(r")\Z") for part in pattern.split("*"))
    found = re.compile("(.*?)".join(parts), re.DOTALL).fullmatch(name)
    itself = pattern == name and "*" not in pattern
    assert matched(pattern, name) == (() if itself else found and found.groups())
