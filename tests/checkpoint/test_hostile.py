"""Callers that contradict each other, files made to hurt, odd names, places and settings: refused in time, or right."""

import json
import os
import pickle
import sys
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as judge
from checkpoints import INDEX, has, names_in, rewritten
from devices import device_type
from fsspec.implementations.memory import MemoryFileSystem
from models import numbers, same
from safetensors.torch import load_file
from safetensors.torch import save as as_safetensors
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Shard, distribute_tensor

import shardwise as sw
from shardwise import checkpoint, cli
from shardwise.checkpoint.formats.dcp_writing import DcpWriter
from shardwise.checkpoint.formats.sharded import ShardedWriter
from shardwise.errors import RefusedValueError
from shardwise.storage.folders import OutputFolder
from shardwise.testing import on_ranks

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning", "ignore::FutureWarning")  # torch's own, as it saves
WRITERS = {"safetensors": ShardedWriter, "dcp": DcpWriter}


@pytest.fixture(autouse=True)
def here(monkeypatch, tmp_path):
    """Every test has a directory of its own to work in, and an empty memory://."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(MemoryFileSystem, "store", {})
    monkeypatch.setattr(MemoryFileSystem, "pseudo_dirs", [""])


def everything():
    """All that is on the disk here and in memory://, to the last byte."""
    found = {str(path): path.read_bytes() if path.is_file() else None for path in Path().rglob("*")}
    return found | {f"memory:/{name}": file.getvalue() for name, file in MemoryFileSystem.store.items()}


@contextmanager
def refused(*words, error=sw.CheckpointError):
    """What is done within raises an error with these words, and leaves everything as it was."""
    before = everything()
    with pytest.raises(error) as said:
        yield
    for word in words:
        assert word in str(said.value), f"{word!r} is not in {said.value}"
    after = everything()
    assert sorted(after) == sorted(before)
    assert [name for name in after if after[name] != before[name]] == []


def rows(parts):
    """Rules: the rows of all tensors over so many ranks."""
    return {"mesh": {"tp": parts}, "rule": [{"name": "*", "placements": "S0"}]}


# --- saving and loading ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("by", ["torch", "shardwise"])
def test_complex128_at_any_offset_of_a_file_is_read(by):
    """torch copies it with loads that end the process where memory is not aligned: so on a rank, not here."""
    whole = torch.complex(numbers(5, 7), numbers(5, 7, start=50)).to(torch.complex128)

    def run(rank):
        for before in range(1, 9):
            state, path = {"a": torch.ones(before, dtype=torch.uint8), "z": whole}, f"before{before}"
            if by == "torch":
                judge.save(dict(state), checkpoint_id=path)
            else:
                checkpoint.save(state, path, format="dcp", durable=False)
            for into in torch.zeros_like(whole), torch.zeros(7, 5, dtype=whole.dtype).t():
                checkpoint.load(path, {"z": into})
                same(into, whole)
            assert checkpoint.verify(path, path) == []

    on_ranks(1, run)


@pytest.mark.parametrize("what", ["path", "read"])
def test_ranks_that_ask_one_load_for_different_things_are_all_refused_at_once(what):
    differing = {"path": ("step6", "step7"), "read": ("once", "each")}
    for step in 6, 7:
        checkpoint.save({"w": torch.full((8,), float(step)), "step": step}, f"step{step}")

    def run(rank):
        asked = {"path": "step6", "read": "once", what: differing[what][rank]}
        state = {"w": torch.full((8,), 9.0), "step": 0}
        with pytest.raises(RefusedValueError) as error:
            checkpoint.load(asked["path"], state, read=asked["read"], group=dist.group.WORLD)
        same(state["w"], torch.full((8,), 9.0))
        assert state["step"] == 0
        return str(error.value)

    said = on_ranks(2, run, timeout=30, patience=10)
    assert said[0] == said[1]
    first, second = differing[what]
    assert f"disagree on the {what} of this load: rank 0: {first}; rank 1: {second}." in said[0]


@pytest.mark.parametrize("format", WRITERS)
@pytest.mark.parametrize("key", [1.5, None, (1, 2), b"x", True], ids=repr)
def test_a_key_that_no_file_can_hold_is_refused_before_the_old_checkpoint_goes(format, key):
    checkpoint.save({"old": numbers(2)}, "p", format=format)
    for value in numbers(3), 7:
        with refused(f"m.{key}", "neither a string nor an integer", repr(key), error=TypeError):
            checkpoint.save({"m": {key: value}, "big": numbers(5)}, "p", format=format)
    has("p", {"old": numbers(2)})


@pytest.mark.parametrize("format", WRITERS)
@pytest.mark.parametrize("where", ["", "memory://two/"])
def test_of_two_saves_to_one_path_at_once_the_later_to_begin_is_refused(monkeypatch, tmp_path, format, where):
    """Object stores have no locks: there both are whole, and the later index counts."""
    writer, path = WRITERS[format], f"{where}{tmp_path.name if where else 'p'}"
    finish = writer.finish
    checkpoint.save({"w": numbers(4)}, path, format=format)

    def late(self, *args):
        """Between its files and its index, another process saves from start to end."""
        monkeypatch.setattr(writer, "finish", finish)
        if where:
            checkpoint.save({"w": numbers(4, start=100)}, path, format=format)
            has(path, {"w": numbers(4, start=100)})
        else:
            with pytest.raises(sw.CheckpointError, match="another save or conversion is writing to p"):
                checkpoint.save({"w": numbers(4, start=100)}, path, format=format)
        return finish(self, *args)

    monkeypatch.setattr(writer, "finish", late)
    checkpoint.save({"w": numbers(4, start=200)}, path, format=format)
    has(path, {"w": numbers(4, start=200)})
    assert len(checkpoint.open(path).files.names()) == 3


@pytest.mark.parametrize("format", WRITERS)
def test_whole_numbers_of_any_length_are_saved(format):
    large = {"n": 10**5000, "list": [-(10**5000), 3]}
    checkpoint.save({"w": numbers(4), **large}, "p", format=format)
    assert dict(checkpoint.open("p").objects) == large


def test_a_tensor_on_ranks_that_do_not_save_is_refused_by_name():
    def run(rank):
        group, mesh = dist.new_group([0, 1]), DeviceMesh(device_type(), [0, 1, 2])
        state = {"w": distribute_tensor(numbers(9), mesh, [Shard(0)])}
        if rank == 2:
            return None
        with pytest.raises(RefusedValueError) as error:
            checkpoint.save(state, "p", group=group)
        return str(error.value)

    first, second, _ = on_ranks(3, run)
    assert first == second
    assert "'w' of the state dict" in first
    assert "names rank 2, but those who call are ranks 0, 1" in first
    assert everything() == {}


# --- conversions that would lose something ---------------------------------------------------------------------------


@pytest.fixture
def source():
    """Two tensors in a file of torch.save."""
    torch.save({"b": numbers(3), "d": numbers(5)}, "source.pt")
    return "source.pt"


def test_a_conversion_into_a_directory_leaves_files_of_other_names_alone(source):
    checkpoint.convert(source, "exports/llama-v1.safetensors")
    with refused("exports/llama-v1.safetensors", "give another path"):
        checkpoint.convert(source, "exports", max_shard_size=13)


def test_a_dtype_that_cannot_be_held_is_refused_before_the_old_conversion_goes(source):
    checkpoint.convert(source, "out", max_shard_size=13)
    torch.save({"b": numbers(3).to(torch.complex128), "d": numbers(5)}, "other.pt")
    with refused("'b' is torch.complex128", "safetensors cannot hold"):
        checkpoint.convert("other.pt", "out", max_shard_size=13)
    has("out", {"b": numbers(3), "d": numbers(5)})


@pytest.mark.parametrize("verify", [True, False])
def test_a_conversion_by_other_source_rules_is_not_taken_for_the_old_one(verify):
    Path("ranks").mkdir()
    for rank in range(2):
        parts = {"module": {"w": numbers(4, start=4 * rank)}, "ema": {"w": numbers(4, start=100 + 4 * rank)}}
        torch.save(parts, f"ranks/m_{rank}.pt")
    for prefix, start in (("module.", 0), ("ema.", 100), ("module.", 0)):
        said = {**rows(2), "files": {"pattern": "m_{rank}.pt", "prefix": prefix}}
        made = checkpoint.convert("ranks", "out.safetensors", source_rules=said, verify=verify)
        same(made["w"].read(), numbers(8, start=start))


def test_a_file_of_the_source_that_select_does_not_use_is_not_written_over(source):
    checkpoint.convert(source, "src", max_shard_size=13)
    with refused("src/model-00002-of-00002.safetensors is the source"):
        checkpoint.convert("src", "src/model-00002-of-00002.safetensors", select="b")


def test_a_source_directory_named_like_a_file_is_not_written_over(source):
    checkpoint.convert(source, "m.safetensors/")
    assert names_in("m.safetensors") == ["model.safetensors"]
    with refused("m.safetensors/ is the source"):
        checkpoint.convert("m.safetensors", "m.safetensors/", cast=torch.bfloat16)


def test_a_remote_source_is_not_written_over_by_its_name_with_a_slash(source):
    checkpoint.convert(source, "memory://src", format="sharded", rules=rows(1))
    with refused("src is the source"):
        checkpoint.convert("memory://src", "memory://src/", format="sharded", rules=rows(2))


@pytest.mark.parametrize("verify", [True, False])
@pytest.mark.parametrize("order", ["ac", "ca"])
def test_a_renamed_tensor_does_not_take_the_place_of_a_dict_of_others(order, verify):
    whole = {"a": {"b": numbers(3)}, "c": numbers(2)}
    torch.save({key: whole[key] for key in order}, "s.pt")
    with refused("'a.b' would be inside 'a'", "rename="):
        checkpoint.convert("s.pt", "o.pt", rename={"c": "a"}, verify=verify)


def test_a_tensor_called_as_the_metadata_of_safetensors_is_refused(source):
    checkpoint.convert(source, "o.safetensors")
    torch.save({"__metadata__": numbers(3), "x": numbers(2)}, "s.pt")
    with refused("cannot be called '__metadata__'", "rename="):
        checkpoint.convert("s.pt", "o.safetensors")
    same(load_file("o.safetensors")["d"], numbers(5))
    made = checkpoint.convert("s.pt", "o.safetensors", rename={"__metadata__": "m"})
    same(made["m"].read(), numbers(3))


def test_values_that_cannot_be_stored_are_refused_before_writing_and_can_be_left_out():
    torch.save({"w": numbers(4), "step": 7, "rng": [{numbers(2)}]}, "s.pt")
    with refused("'rng[0]' is Tensor, which cannot be stored: tensors are stored in dicts, lists and tuples only"):
        checkpoint.convert("s.pt", "o", format="sharded", rules=rows(2))
    checkpoint.convert("s.pt", "o", format="sharded", rules=rows(2), select=["w", "step"])
    has("o", {"w": numbers(4)}, {"step": 7})
    checkpoint.convert("s.pt", "bare", format="sharded", rules=rows(2), select="w")
    has("bare", {"w": numbers(4)})


def test_a_tensor_inside_of_a_set_survives_to_torch_save_and_is_refused_elsewhere():
    torch.save({"w": numbers(4), "s": {numbers(2)}}, "s.pt")
    checkpoint.convert("s.pt", "o.pt")
    found = torch.load("o.pt")
    same(found["w"], numbers(4))
    (inner,) = found["s"]
    same(inner, numbers(2))
    with refused("'s' is Tensor, which cannot be stored"):
        checkpoint.convert("s.pt", "o", format="sharded", rules=rows(2))


# --- files made to hurt ----------------------------------------------------------------------------------------------


def pipes():
    """FIFOs, which nobody writes to, where checkpoints could be."""
    os.mkfifo("direct.safetensors")
    os.mkfifo("direct.pt")
    for folder in "index", "only", "beside":
        os.mkdir(folder)
    os.mkfifo("index/x.safetensors")
    Path("index/model.safetensors.index.json").write_text(json.dumps({"weight_map": {"a": "x.safetensors"}}))
    os.mkfifo("only/x.safetensors")
    os.mkfifo("beside/pipe")
    torch.save({"a": numbers(2)}, "beside/m.pt")


def test_nobody_waits_for_a_pipe():
    """On a rank, which is ended where it hangs."""
    pipes()

    def run(rank):
        said = []
        for path in "direct.safetensors", "direct.pt", "index", "only":
            with pytest.raises(sw.CheckpointError) as error:
                checkpoint.open(path)["a"].read()
            said.append(str(error.value))
        same(checkpoint.open("beside")["a"].read(), numbers(2))
        return said

    (said,) = on_ranks(1, run, timeout=10)
    for text, file in zip(said, ("direct.safetensors", "direct.pt", "index/x.safetensors"), strict=False):
        assert f"{file} is not a regular file" in text
    assert "only is not a recognized checkpoint" in said[-1]


@pytest.mark.parametrize("file", ["x.safetensors", "model.safetensors.index.json"])
def test_a_name_that_comes_twice_is_found_among_very_many(file):
    """Comparing every name with every other would take a minute."""
    text = ("{" + ",".join(f'"k{n}":0' for n in range(40_000)) + ',"z":0,"z":0}').encode()
    Path("p").mkdir()
    Path("p", file).write_bytes(text if file.endswith("json") else len(text).to_bytes(8, "little") + text)
    with refused(file, "'z' comes twice"):
        checkpoint.open("p")


def test_checkpoints_with_no_name_in_common_differ_by_all_names():
    """Looking for the nearest of all names for each would take half a minute."""
    for file, name in (("a.pt", "model.layers.{}.self_attn.q_proj.weight"), ("b.pt", "transformer.h.{}.query.kernel")):
        torch.save({name.format(at): torch.ones(1) for at in range(400)}, file)
    found = checkpoint.verify("a.pt", "b.pt")
    assert len(found) == 800
    assert len({str(one).partition(":")[0] for one in found}) == 800


def test_a_path_to_a_place_of_a_list_that_cannot_be_so_long_is_refused():
    checkpoint.save({"w": {"a": numbers(4)}}, "p")
    rewritten(Path("p", INDEX), lambda said: said.update(paths={"w.a": ["w", 2_000_000]}))
    with refused(f"'w.a' in p/{INDEX} has the path ['w', 2000000]", "no list of 1 names is so long"):
        checkpoint.convert("p", "o.pt")


def test_a_number_in_a_path_of_dcp_that_no_list_reaches_is_the_key_of_a_dict():
    checkpoint.save({"w": {"2000000": numbers(4)}}, "p", format="dcp", sums=False)
    about = pickle.loads(Path("p/.metadata").read_bytes())
    about.planner_data = {"w.2000000": ("w", 2_000_000)}
    Path("p/.metadata").write_bytes(pickle.dumps(about))
    checkpoint.convert("p", "o.pt")
    found = torch.load("o.pt")
    assert list(found["w"]) == [2_000_000]
    same(found["w"][2_000_000], numbers(4))
    assert Path("o.pt").stat().st_size < 10_000


@pytest.mark.parametrize("format", WRITERS)
def test_dicts_with_large_whole_numbers_as_keys_come_back_as_dicts(format):
    """Not as lists, which would be long."""
    checkpoint.save({"w": {2_000_000: numbers(4), -5: numbers(1), "n": [numbers(2)]}}, "p", format=format)
    checkpoint.convert("p", "o.pt")
    found = torch.load("o.pt")["w"]
    assert list(found) == [2_000_000, -5, "n"]
    same(found[2_000_000], numbers(4))
    same(found["n"][0], numbers(2))


def test_a_shape_beyond_all_numbers_is_refused_by_name():
    header = json.dumps({"x": {"dtype": "F32", "shape": [2**61, 2**61, 0], "data_offsets": [0, 0]}}).encode()
    Path("x.safetensors").write_bytes(len(header).to_bytes(8, "little") + header)
    with refused("'x' has shape (2305843009213693952, 2305843009213693952, 0), which no tensor has"):
        checkpoint.open("x.safetensors")["x"].read()


# --- names, places, settings -----------------------------------------------------------------------------------------


@pytest.fixture
def inspected(monkeypatch, capsys):
    """What `shardwise inspect` prints of a state dict."""
    monkeypatch.setenv("COLUMNS", "160")
    monkeypatch.setenv("NO_COLOR", "1")

    def run(state, *options):
        torch.save(state, "p.pt")
        monkeypatch.setattr(sys, "argv", ["shardwise", "inspect", "p.pt", *options])
        code = 0
        try:
            cli.main()
        except SystemExit as ended:
            code = ended.code or 0
        said = capsys.readouterr()
        assert (code, said.err) == (0, "")
        return said.out

    return run


@pytest.mark.parametrize("options", [[], ["--tree"]], ids=["table", "tree"])
@pytest.mark.parametrize("names", [["a[/foo]"], ["w[bias]", "w[mean]"], ["[red]x[/red]"]], ids=repr)
def test_inspect_shows_names_with_brackets_as_they_are(inspected, names, options):
    shown = inspected({name: numbers(2) for name in names}, *options)
    for name in names:
        assert name in shown


def test_inspect_shows_values_with_brackets_as_they_are(inspected):
    shown = inspected({"a": numbers(2), "template": "[INST] hi [/INST]"})
    assert "1 other value" in shown
    assert "template" in shown
    assert "[INST] hi [/INST]" in shown


@pytest.mark.parametrize("names", [["a."], ["a", "a..b"], [".a"], [""]], ids=repr)
def test_the_tree_of_inspect_takes_names_with_empty_parts(inspected, names):
    assert f"{len(names)} tensor" in inspected({name: numbers(2) for name in names}, "--tree")


def test_the_tree_of_inspect_takes_very_deep_names(inspected):
    assert "1 tensor " in inspected({"x" + ".a" * 3000: numbers(2)}, "--tree")


def test_files_at_the_top_of_a_remote_place_are_read_and_written(source):
    MemoryFileSystem().pipe("/top.safetensors", as_safetensors({"a": numbers(3)}))
    has("memory://top.safetensors", {"a": numbers(3)})
    checkpoint.convert(source, "memory://x.safetensors")
    has("memory://x.safetensors", {"b": numbers(3), "d": numbers(5)})
    assert sorted(MemoryFileSystem.store) == ["/top.safetensors", "/x.safetensors", "/x.safetensors.sums.json"]


def test_the_top_of_a_remote_place_is_a_directory_like_others():
    checkpoint.save({"a": numbers(3)}, "memory://")
    has("memory://", {"a": numbers(3)})
    shard, sums, index = sorted(MemoryFileSystem.store)
    assert index == f"/{INDEX}"
    assert shard.startswith("/shard-00000-of-00001-")
    assert sums == f"{shard}.sums.json"


@pytest.mark.parametrize("file", ["", "/model.safetensors"], ids=["directory", "file"])
def test_chained_urls_are_opened(source, file):
    checkpoint.convert(source, "memory://d/x")
    has(f"simplecache::memory://d/x{file}", {"b": numbers(3), "d": numbers(5)})


def test_the_default_device_does_not_matter():
    expected = numbers(3)
    with torch.device("meta"):
        checkpoint.save({"a": expected}, "p")
        same(checkpoint.open("p")["a"].read(), expected)
        made = checkpoint.convert("p", "o.pt", cast=torch.bfloat16)
        same(made["a"].read(), expected.bfloat16())
        assert checkpoint.verify("p", "p") == []
        into = {"a": torch.zeros(3, device="cpu")}
        checkpoint.load("p", into)
        same(into["a"], expected)


EMPTY = {
    "open": lambda: checkpoint.open(""),
    "load": lambda: checkpoint.load("", {"b": torch.ones(3)}),
    "save": lambda: checkpoint.save({"b": torch.ones(3)}, ""),
    "verify": lambda: checkpoint.verify("source.pt", ""),
    "convert from": lambda: checkpoint.convert("", "out"),
    "convert to": lambda: checkpoint.convert("source.pt", ""),
}


@pytest.mark.parametrize("verb", EMPTY)
def test_an_empty_path_is_refused(source, monkeypatch, verb):
    monkeypatch.setattr(OutputFolder, "write", None)  # were it not refused, it would be the root of this machine
    with refused("'' is not a path or URL"):
        EMPTY[verb]()
