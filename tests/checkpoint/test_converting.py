"""Conversions in one process: every format from every other, judged by the libraries that own the formats."""

import json
import os
import subprocess
import sys
from math import prod

import numpy as np
import pytest
import torch
import torch._dynamo  # a process imports it with its first DTensor, which takes seconds: once here, not on every rank
import torch.distributed as dist
import torch.distributed.checkpoint as judge
from checkpoints import names_in
from devices import device_type
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from torch import nn
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Replicate, Shard, distribute_tensor

from shardwise import LayoutError, checkpoint
from shardwise.errors import CheckpointError
from shardwise.job.remap import shapes_after
from shardwise.state import Concat, Stack, Transposed
from shardwise.testing import on_ranks

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning", "ignore::FutureWarning")  # torch's own, as it saves


def converted(source, out, **options):
    """Without a process group, which is the point."""
    assert not dist.is_initialized()
    made = checkpoint.convert(source, out, durable=False, **options)
    assert not dist.is_initialized()
    return made


def bits(tensor):
    return tensor.detach().contiguous().reshape(-1).view(torch.uint8)


def assert_same(found, expected):
    """Trees of dicts, lists and values: the same names, types and bits."""
    assert type(found) is type(expected) or isinstance(expected, torch.Tensor | dict)
    if isinstance(expected, torch.Tensor):
        assert (found.dtype, found.shape) == (expected.dtype, expected.shape)
        torch.testing.assert_close(bits(found), bits(expected), rtol=0, atol=0)
    elif isinstance(expected, dict):
        assert found.keys() == expected.keys()
        for key, value in expected.items():
            assert_same(found[key], value)
    elif isinstance(expected, list):
        assert len(found) == len(expected)
        for one, other in zip(found, expected, strict=True):
            assert_same(one, other)
    else:
        assert found == expected


# --- every source and every target -----------------------------------------------------------------------------------

ODD = torch.tensor([0x7FC00001, 0x7F800001, -0x80000000, 0, -1], dtype=torch.int32).view(torch.float32)  # NaNs, -0.0


def model():
    torch.manual_seed(0)
    return {
        "embed": torch.randn(13, 8).to(torch.bfloat16),
        "rows": torch.randn(8, 6),
        "columns": torch.randn(6, 10, dtype=torch.float64),
        "deep": torch.randn(5, 6, 4).half(),
        "eight": torch.randn(6, 4).to(torch.float8_e4m3fn),
        "words": torch.randint(2**15, (9,)).to(torch.uint16),
        "complex": torch.randn(4, 3, dtype=torch.complex64),
        "flags": torch.randn(7) > 0,
        "odd": ODD,
        "none": torch.zeros(0, 3),
        "seen": torch.tensor(2**40),
    }


VALUES = {
    "step": 17,
    "groups": [{"lr": 0.1, "betas": (0.9, 0.95), "on": None}, {"lr": 1e-300, "name": "rest"}],
    "history": [torch.arange(4), {"loss": torch.tensor([0.5, float("inf")])}],
}
TENSORS = {f"model.{name}": tensor for name, tensor in model().items()} | {
    "history.0": VALUES["history"][0],
    "history.1.loss": VALUES["history"][1]["loss"],
}
OBJECTS = {
    "step": 17,
    "groups.0.lr": 0.1,
    "groups.0.betas": (0.9, 0.95),
    "groups.0.on": None,
    "groups.1.lr": 1e-300,
    "groups.1.name": "rest",
}
NESTED = {"model": model(), **VALUES}


def rules(**mesh):
    """Uneven shards, two axes where there are two, and replicas that are written once."""
    last = list(mesh)[-1]
    return {
        "mesh": mesh,
        "rule": [
            {"name": "model.rows", "placements": {axis: f"S{dim}" for dim, axis in enumerate(mesh)}},
            {"name": ["model.embed", "model.deep", "model.none"], "placements": {last: "S0"}},
            {"name": ["model.columns", "model.eight"], "placements": {last: "S1"}},
            {"name": "*", "placements": "R"},
        ],
    }


def write_one_file(path):
    path.mkdir()
    save_file(TENSORS, path / "model.safetensors", {"format": "pt"})
    return path / "model.safetensors"


def write_indexed(path):
    path.mkdir()
    where = {name: f"model-{at % 3 + 1:05d}-of-00003.safetensors" for at, name in enumerate(TENSORS)}
    for file in set(where.values()):
        save_file({name: TENSORS[name] for name in where if where[name] == file}, path / file)
    (path / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": where}))
    return path


def dtensors():
    """The model on a mesh of 2 x 2: uneven, and with replicas."""
    mesh = init_device_mesh(device_type(), (2, 2))
    ways = {"rows": [Shard(0), Shard(1)], "columns": [Replicate(), Shard(1)], "deep": [Shard(0), Shard(0)]}
    whole = {"seen": torch.tensor(2**40), "none": torch.zeros(0, 3)}
    return {
        name: whole[name]
        if name in whole
        else distribute_tensor(tensor, mesh, ways.get(name, [Shard(0), Replicate()]), src_data_rank=None)
        for name, tensor in model().items()
    }


def write_sharded(path):
    on_ranks(4, lambda rank: checkpoint.save({"model": dtensors(), **VALUES}, path, durable=False))
    return path


def write_dcp_on_ranks(path):
    on_ranks(4, lambda rank: judge.save({"model": dtensors(), **VALUES}, checkpoint_id=path))
    return path


def write_dcp_alone(path):
    judge.save(NESTED, checkpoint_id=path, no_dist=True)
    return path


def write_torch_save(path):
    path.mkdir()
    torch.save(NESTED, path / "state.pt")
    return path / "state.pt"


def write_rank_files(path):
    path.mkdir()
    for rank in range(2):
        cut = {"embed": 0, "deep": 0, "none": 0, "rows": 0, "columns": 1, "eight": 1}
        shards = {n: t.tensor_split(2, cut[n])[rank].clone() if n in cut else t for n, t in model().items()}
        torch.save({"model": shards, **VALUES}, path / f"rank_{rank}.pt")
    return path


SOURCES = {
    "one safetensors file": (write_one_file, False),
    "safetensors with an index": (write_indexed, False),
    "sharded by shardwise": (write_sharded, True),
    "dcp of 4 ranks": (write_dcp_on_ranks, True),
    "dcp of one process": (write_dcp_alone, True),
    "torch.save": (write_torch_save, True),
    "files of ranks": (write_rank_files, True),
}
RANK_FILES = {"source_rules": rules(tp=2)}


@pytest.fixture(scope="module")
def sources(tmp_path_factory):
    """The same model in every format, each written by who owns it. By name: the path, what to say, if it has values."""
    root = tmp_path_factory.mktemp("sources")
    return {
        kind: (write(root / kind.replace(" ", "-")), RANK_FILES if write is write_rank_files else {}, nested)
        for kind, (write, nested) in SOURCES.items()
    }


def read_one_file(path):
    assert names_in(path) == ["model.safetensors"]
    return load_file(path / "model.safetensors"), None


def read_indexed(path):
    said = json.loads((path / "model.safetensors.index.json").read_text())
    files = sorted(path.glob("*.safetensors"))
    count = len(files)
    assert [file.name for file in files] == [f"model-{at + 1:05d}-of-{count:05d}.safetensors" for at in range(count)]
    assert count > 2
    found = {}
    for file in files:
        tensors = load_file(file)
        assert dict.fromkeys(tensors, file.name).items() <= said["weight_map"].items()
        assert len(tensors) == 1 or sum(t.numel() * t.element_size() for t in tensors.values()) <= 500
        with safe_open(file, "pt") as opened:
            assert opened.metadata()["format"] == "pt"  # transformers asks for it
        found |= tensors
    assert found.keys() == said["weight_map"].keys()
    assert said["metadata"]["total_size"] == sum(t.numel() * t.element_size() for t in found.values())
    return found, None


def read_sharded(path):
    """By the files alone: every part lies at the cell that its name says, and no cell is written twice."""
    said = json.loads((path / "shardwise.json").read_text())
    assert {*said["files"], "shardwise.json"} == set(names_in(path))
    shapes = {name: one["shape"] for name, one in said["tensors"].items()}
    found, times = {}, {name: np.zeros(shape, int) for name, shape in shapes.items()}
    for file in said["files"]:
        for key, part in load_file(path / file).items():
            name, _, lo = key.rpartition("@")
            cells = tuple(
                slice(int(a), int(a) + n) for a, n in zip(filter(None, lo.split(",")), part.shape, strict=True)
            )
            found.setdefault(name, torch.zeros(shapes[name], dtype=part.dtype))[cells] = part
            times[name][cells] += 1
    for count in times.values():
        np.testing.assert_array_equal(count, 1)
    return found, dict(checkpoint.open(path).objects)


def read_dcp(path):
    dcp_to_torch_save(path, path / "judged")
    return torch.load(path / "judged", weights_only=True), "nested"


def read_torch_save(path):
    assert names_in(path) == ["model.pt"]
    mapped = torch.load(path / "model.pt", weights_only=True, mmap=True)
    found = torch.load(path / "model.pt", weights_only=True)
    assert_same(mapped, found)
    return found, "nested"


TARGETS = {
    "one safetensors file": ({}, read_one_file),
    "safetensors with an index": ({"max_shard_size": 500}, read_indexed),
    "sharded on tp=2": ({"format": "sharded", "rules": rules(tp=2)}, read_sharded),
    "sharded on dp=2, tp=3": ({"format": "sharded", "rules": rules(dp=2, tp=3)}, read_sharded),
    "dcp": ({"format": "dcp"}, read_dcp),
    "dcp by rules": ({"format": "dcp", "rules": rules(dp=2, tp=2)}, read_dcp),
    "torch.save": ({"format": "torch.save"}, read_torch_save),
}


@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize("source", SOURCES)
def test_every_format_becomes_every_other(tmp_path, sources, source, target):
    (path, said, nested), (options, read) = sources[source], TARGETS[target]
    made = converted(path, tmp_path / "out", **said, **options)
    assert_same({name: entry.read() for name, entry in made.items()}, TENSORS)
    found, values = read(tmp_path / "out")
    if values == "nested":
        assert_same(found, NESTED if nested else TENSORS)
    else:
        assert_same(found, TENSORS)
        assert values is None or values == (OBJECTS if nested else {})


def test_a_model_and_optimizer_of_fsdp_become_what_torch_itself_makes_of_them(tmp_path):
    def save(rank):
        mesh = init_device_mesh(device_type(), (4,))
        torch.manual_seed(0)
        net = nn.Sequential(nn.Linear(7, 9), nn.LayerNorm(9), nn.Linear(9, 3))
        fully_shard(net, mesh=mesh)
        optimizer = torch.optim.AdamW(net.parameters(), foreach=False)
        net(torch.randn(2, 7)).sum().backward()
        optimizer.step()
        state = get_state_dict(net, optimizer, options=StateDictOptions())
        judge.save({"model": state[0], "optimizer": state[1]}, checkpoint_id=tmp_path / "dcp")

    on_ranks(4, save)
    dcp_to_torch_save(tmp_path / "dcp", tmp_path / "judged.pt")
    expected = torch.load(tmp_path / "judged.pt", weights_only=True)
    converted(tmp_path / "dcp", tmp_path / "ours.pt")
    assert_same(torch.load(tmp_path / "ours.pt", weights_only=True), expected)
    converted(tmp_path / "dcp", tmp_path / "model.safetensors", select="model.*", rename={"model.*": "*"})
    assert_same(load_file(tmp_path / "model.safetensors"), dict(expected["model"]))


def test_torch_loads_a_dcp_conversion_into_any_sharding(tmp_path, sources):
    converted(sources["safetensors with an index"][0], tmp_path / "out", format="dcp", rules=rules(dp=2, tp=2))

    def load(rank):
        mesh = init_device_mesh(device_type(), (3,))
        state = {
            name: distribute_tensor(torch.zeros_like(TENSORS[name]), mesh, [Shard(0)], src_data_rank=None)
            for name in ("model.embed", "model.rows", "model.columns", "model.deep")
        }
        judge.load(state, checkpoint_id=tmp_path / "out")
        for name, tensor in state.items():
            assert_same(tensor.full_tensor(), TENSORS[name])

    on_ranks(3, load)


def test_an_opened_checkpoint_can_be_given_and_the_ending_says_the_format(tmp_path, sources):
    opened = checkpoint.open(sources["torch.save"][0])
    for name, format in {"a.safetensors": "safetensors", "a.pt": "torch.save", "b.bin": "torch.save"}.items():
        assert converted(opened, str(tmp_path / "deep" / name)).format == format
    assert names_in(tmp_path / "deep") == ["a.pt", "a.safetensors", "b.bin"]
    assert_same(load_file(tmp_path / "deep" / "a.safetensors"), TENSORS)
    assert_same(torch.load(tmp_path / "deep" / "b.bin", weights_only=True), NESTED)


# --- names, choice, casts --------------------------------------------------------------------------------------------


@pytest.fixture
def few(tmp_path):
    torch.manual_seed(1)
    tensors = {
        "model.0.up": torch.randn(4, 3),
        "model.1.up": torch.randn(4, 3),
        "model.norm": torch.randn(3, dtype=torch.float64),
        "head": torch.randint(9, (2, 2)),
    }
    save_file(tensors, tmp_path / "few.safetensors")
    return tensors


def became(tmp_path, tensors, **options):
    """What a safetensors file of these tensors becomes, by safetensors itself."""
    save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, tmp_path / "in.safetensors")
    converted(tmp_path / "in.safetensors", tmp_path / "out.safetensors", **options)
    return load_file(tmp_path / "out.safetensors")


RENAMES = {
    "a mapping": {"model.*": "*", "head": "lm.head"},
    "rules": [("model.*.up", "*.up"), ("model.norm", "norm"), ("h?[a-d]d", "lm.head"), ("head", "never")],
    "a function": lambda name: "lm.head" if name == "head" else name.removeprefix("model."),
}


@pytest.mark.parametrize("kind", RENAMES)
def test_names_change_by(tmp_path, few, kind):
    found = became(tmp_path, few, rename=RENAMES[kind])
    expected = {"0.up": "model.0.up", "1.up": "model.1.up", "norm": "model.norm", "lm.head": "head"}
    assert_same(found, {new: few[old] for new, old in expected.items()})


def test_names_can_be_swapped_and_nested_ones_stay_nested(tmp_path):
    state = {"a": {"x": torch.zeros(2), "y": torch.ones(2)}, "n": 3}
    torch.save(state, tmp_path / "in.pt")
    converted(tmp_path / "in.pt", tmp_path / "out.pt", rename={"a.x": "a.y", "a.y": "a.x"})
    found = torch.load(tmp_path / "out.pt", weights_only=True)
    assert_same(found, {"a": {"x": torch.ones(2), "y": torch.zeros(2)}, "n": 3})


def test_a_tied_weight_gets_two_names_and_views_of_one_storage_are_written_whole(tmp_path, few):
    found = became(tmp_path, few, rename={"head": ["head", "embed"]})
    assert_same(found, few | {"embed": few["head"]})
    whole = torch.arange(12.0).view(3, 4)
    torch.save({"w": whole, "tied": whole, "t": whole.t(), "row": whole[1], "same": torch.ones(1).expand(5)}, "tied.pt")
    converted("tied.pt", tmp_path / "tied.safetensors")
    expected = {"w": whole, "tied": whole, "t": whole.t(), "row": whole[1], "same": torch.ones(5)}
    assert_same(load_file(tmp_path / "tied.safetensors"), expected)


@pytest.fixture(autouse=True)
def _elsewhere(tmp_path, monkeypatch):
    """Relative paths are of a place that goes away."""
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")


@pytest.mark.parametrize(
    ("options", "names"),
    [
        ({"select": "model.*"}, ["model.0.up", "model.1.up", "model.norm"]),
        ({"select": ["head", "*.[1-9].*"]}, ["head", "model.1.up"]),
        ({"select": ["*"]}, ["head", "model.0.up", "model.1.up", "model.norm"]),
        ({"exclude": "model.*"}, ["head"]),
        ({"exclude": ["head", "*.0.*"]}, ["model.1.up", "model.norm"]),
        ({"select": ["model.*", "head"], "exclude": ["*.[01].*"]}, ["head", "model.norm"]),
    ],
    ids=str,
)
def test_patterns_choose_source_names(tmp_path, few, options, names):
    found = became(tmp_path, few, **options, rename={"head": "h"})
    assert_same(found, {"h" if name == "head" else name: few[name] for name in names})
    assert not checkpoint.verify(
        tmp_path / "in.safetensors", tmp_path / "out.safetensors", **options, rename={"head": "h"}
    )


LITERAL = {name: torch.full((2, 3), float(at)) for at, name in enumerate(["a0", "a1", "a?", "a[0]", "a[1]"])}


@pytest.mark.parametrize(
    ("options", "becomes"),
    [
        ({"select": "a[0]"}, {"a[0]": "a[0]"}),
        ({"select": ["a?", "a[1]"]}, {"a?": "a?", "a[1]": "a[1]"}),
        ({"select": "a[01]"}, {"a0": "a0", "a1": "a1"}),  # which no tensor is called
        ({"select": "a[[?]*", "exclude": "a[0]"}, {"a?": "a?", "a[1]": "a[1]"}),
        ({"rename": {"a[0]": "b", "a?": "c"}}, {"a0": "a0", "a1": "a1", "a?": "c", "a[0]": "b", "a[1]": "a[1]"}),
        (
            {"select": ["a?", "a[[]*"], "rename": [("a?", "c"), ("a*", "d*")]},
            {"a?": "c", "a[0]": "d[0]", "a[1]": "d[1]"},
        ),
    ],
    ids=str,
)
def test_a_pattern_that_is_the_name_of_a_tensor_means_that_tensor(tmp_path, options, becomes):
    found = became(tmp_path, LITERAL, **options)
    assert_same(found, {new: LITERAL[old] for old, new in becomes.items()})
    assert not checkpoint.verify(tmp_path / "in.safetensors", tmp_path / "out.safetensors", **options)


def test_casts_and_parts_that_are_names_of_tensors_mean_those(tmp_path):
    found = became(tmp_path, LITERAL, cast=[("a[0]", torch.float16), ("a?", torch.int32)])
    assert {name: tensor.dtype for name, tensor in found.items() if tensor.dtype != torch.float32} == {
        "a[0]": torch.float16,
        "a?": torch.int32,
    }
    found = became(tmp_path, LITERAL, remap=[Concat("whole", ["a[0]", "a[1]"]), Transposed("a?")])
    assert found.keys() == {"a0", "a1", "a?", "whole"}
    assert found["whole"][:, 0].tolist() == [3, 3, 4, 4]
    assert [found[name].shape[0] for name in ("a0", "a1", "a?")] == [2, 2, 3]
    into = {"a0": torch.zeros(2, 3), "b": torch.zeros(2, 3, dtype=torch.int64), "a?": torch.zeros(2, 3)}
    rename = {"a[0]": "b", "a[1]": "c"}
    checkpoint.load(tmp_path / "in.safetensors", into, rename=rename, cast=[("b", torch.int64), ("a?", torch.float32)])
    assert {name: tensor[0, 0].item() for name, tensor in into.items()} == {"a0": 0, "b": 3, "a?": 2}


CASTS = {
    "all floats": (torch.bfloat16, {"0.up": torch.bfloat16, "1.up": torch.bfloat16, "norm": torch.bfloat16}),
    "to float8": ([("0.up", torch.float8_e5m2)], {"0.up": torch.float8_e5m2}),
    "by new names": ([("1.*", None), ("*.up", torch.float64), ("head", torch.int8)], {"0.up": torch.float64}),
}


@pytest.mark.parametrize("kind", CASTS)
def test_casts_are_those_of_torch(tmp_path, few, kind):
    cast, expected = CASTS[kind]
    found = became(tmp_path, few, cast=cast, rename={"model.*": "*"})
    named = {name.removeprefix("model."): tensor for name, tensor in few.items()}
    expected = expected | ({"head": torch.int8} if kind == "by new names" else {})
    assert_same(found, {name: tensor.to(expected.get(name, tensor.dtype)) for name, tensor in named.items()})


@pytest.mark.parametrize("format", ["sharded", "dcp", "torch.save"])
def test_renames_casts_and_remaps_go_into_every_format(tmp_path, format):
    parts = {f"{at}.{name}": torch.randn(4, 6) for at in range(3) for name in "qkv"}
    save_file(parts, tmp_path / "in.safetensors")
    said = {"mesh": {"tp": 3}, "rule": [{"name": "*", "placements": {"tp": "S1"}}]} if format != "torch.save" else None
    made = converted(
        tmp_path / "in.safetensors",
        tmp_path / "out",
        format=format,
        rules=said,
        rename={"*": "h.*"},
        remap=[Concat("h.*.qkv", ["h.*.q", "h.*.k", "h.*.v"])],
        cast=torch.float16,
    )
    expected = {f"h.{at}.qkv": torch.cat([parts[f"{at}.{name}"] for name in "qkv"]).half() for at in range(3)}
    assert_same({name: entry.read() for name, entry in made.items()}, expected)


# --- several tensors that become one, and back -----------------------------------------------------------------------


def layers(*shapes, dtype=torch.bfloat16):
    torch.manual_seed(2)
    names = "qkv" if len(shapes) == 3 else ["gate", "up"]
    return {f"h.{at}.{n}.w": torch.randn(s).to(dtype) for at in range(2) for n, s in zip(names, shapes, strict=True)}


CONCATS = {
    "q, k, v of unequal heads": (layers((8, 6), (2, 6), (2, 6)), list("qkv"), 0, [8, 2, 2]),
    "q, k, v along the last dim": (layers((3, 8), (3, 4), (3, 4)), list("qkv"), -1, (8, 4, 4)),
    "biases": (layers((5,), (1,), (2,), dtype=torch.float32), list("qkv"), 0, [5, 1, 2]),
    "gate and up": (layers((8, 6), (8, 6)), ["gate", "up"], 0, None),
    "gate and up along dim 1 of 3": (layers((4, 8, 3), (4, 8, 3)), ["gate", "up"], 1, None),
}


@pytest.mark.parametrize("kind", CONCATS)
def test_parts_become_one_and_one_becomes_its_parts(tmp_path, kind):
    parts, names, dim, sizes = CONCATS[kind]
    rule = Concat("h.*.all.w", [f"h.*.{name}.w" for name in names], dim=dim, sizes=sizes)
    wholes = {f"h.{at}.all.w": torch.cat([parts[f"h.{at}.{n}.w"] for n in names], dim) for at in range(2)}
    beside = {"norm": torch.ones(3), "h.0.other": torch.zeros(2)}
    assert_same(became(tmp_path, parts | beside, remap=[rule]), wholes | beside)
    assert_same(became(tmp_path, wholes | beside, remap=[rule]), parts | beside)


@pytest.mark.parametrize("dim", [0, 1, 2, -1, -3])
def test_experts_are_stacked_and_taken_apart(tmp_path, dim):
    torch.manual_seed(3)
    parts = {f"{layer}.experts.{at}.w": torch.randn(3, 5) for at in range(12) for layer in range(2)}
    wholes = {f"{n}.experts.w": torch.stack([parts[f"{n}.experts.{at}.w"] for at in range(12)], dim) for n in range(2)}
    rule = Stack("*.experts.w", "*.experts.{}.w", dim=dim)
    assert_same(became(tmp_path, parts, remap=[rule]), wholes)
    assert_same(became(tmp_path, wholes, remap=[rule]), parts)


@pytest.mark.parametrize("order", [None, (2, 0, 1), (1, 0, 2), (0, -1, 1)])
def test_dims_change_their_order_there_and_back(tmp_path, order):
    target = {"h.w": torch.randn(2, 3, 4), "h.b": torch.randn(3)}
    dims = (2, 1, 0) if order is None else order
    source = target | {"h.w": target["h.w"].permute(dims).contiguous()}
    assert_same(became(tmp_path, source, remap=[Transposed("*.w", order)]), target)
    back = [(tuple(d % 3 for d in dims)).index(at) for at in range(3)]
    assert_same(became(tmp_path, target, remap=[Transposed("*.w", back)]), source)


def test_several_rules_after_a_rename(tmp_path):
    torch.manual_seed(4)
    source = {f"m.{n}": torch.randn(4, 6) for n in "qkv"} | {f"m.e.{at}": torch.randn(2, 3) for at in range(3)}
    source |= {"m.out": torch.randn(5, 2), "m.rest": torch.randn(2)}
    remap = [Concat("qkv", list("qkv"), dim=1), Stack("experts", "e.{}", dim=1), Transposed("out")]
    expected = {
        "qkv": torch.cat([source[f"m.{n}"] for n in "qkv"], 1),
        "experts": torch.stack([source[f"m.e.{at}"] for at in range(3)], 1),
        "out": source["m.out"].t(),
        "rest": source["m.rest"],
    }
    found = became(tmp_path, source, rename={"m.*": "*"}, remap=remap, max_bytes=4096)
    assert_same(found, expected)
    back = [Concat("qkv", list("qkv"), dim=1), Stack("experts", "e.{}", dim=1), Transposed("out")]
    assert_same(became(tmp_path, found, remap=back, rename=None), {n.removeprefix("m."): t for n, t in source.items()})


REFUSED = {
    "two tensors of one name": ({"rename": {"q": "k"}}, ValueError, "would both be 'k': give them"),
    "a rename that gives no name": ({"rename": lambda name: 3}, ValueError, "must give a name"),
    "parts of unlike dtypes": (
        {"remap": [Concat("qh", ["q", "half"])]},
        CheckpointError,
        "'qh' is put together from torch.float",
    ),
    "parts of unlike shapes": ({"remap": [Concat("qw", ["q", "wide"])]}, ValueError, "'wide' has shape (4, 5)"),
    "parts of unlike dims": ({"remap": [Concat("qb", ["q", "b"])]}, ValueError, "a part has 1 dims"),
    "sizes that do not add up": (
        {"remap": [Concat("q", ["x", "y"], sizes=[1, 2])]},
        ValueError,
        "sizes [1, 2] are not 2 parts of the 4",
    ),
    "unequal parts without sizes": ({"remap": [Concat("q", ["x", "y", "z"])]}, ValueError, "give their sizes="),
    "a whole that is there beside its parts": ({"remap": [Concat("wide", ["q", "k"])]}, ValueError, "wide"),
    "a dim that is not there": ({"remap": [Concat("qk", ["q", "k"], dim=2)]}, ValueError, "no dim 2"),
    "an order that is none": ({"remap": [Transposed("q", (0, 0))]}, ValueError, "Transposed"),
    "remap that is no rule": ({"remap": ["q"]}, TypeError, "remap= must be a list of Concat"),
    "patterns that fit nothing": ({"select": ["z*"]}, CheckpointError, "select= has 'z*', which matches no name"),
    "a format that nobody knows": ({"format": "gguf"}, ValueError, "format= must be one of 'safetensors'"),
    "sharded without rules": ({"format": "sharded"}, ValueError, "needs rules="),
    "rules for one file": ({"format": "safetensors", "rules": rules(tp=2)}, ValueError, "'sharded' and 'dcp' can"),
    "several files of torch.save": ({"format": "torch.save", "max_shard_size": "1GB"}, ValueError, "max_shard_size="),
    "no jobs": ({"jobs": 0}, ValueError, "jobs= must be 1 or more"),
    "no memory": ({"max_bytes": 100}, ValueError, "max_bytes=100 is too little"),
    "progress that is none": ({"progress": 3}, ValueError, "progress= must be"),
    "a cast that is no dtype": ({"cast": [("*", "bf16")]}, TypeError, "torch.dtype"),
    "rules that fit nothing": (
        {"format": "sharded", "rules": {"mesh": {"tp": 2}, "rule": [{"name": "x", "placements": "R"}]}},
        LayoutError,
        "none of 1 rules matches 'b'",
    ),
    "rules without a mesh": (
        {"format": "sharded", "rules": {"rule": [{"name": "*", "placements": "R"}]}},
        LayoutError,
        "there is no mesh",
    ),
}


@pytest.mark.parametrize("what", REFUSED)
def test_it_refuses(tmp_path, what):
    options, error, text = REFUSED[what]
    tensors = {"q": torch.ones(4, 6), "k": torch.ones(4, 6), "half": torch.ones(4, 6).half()}
    save_file(tensors | {"wide": torch.ones(4, 5), "b": torch.ones(4)}, tmp_path / "in.safetensors")
    with pytest.raises(error) as caught:
        converted(tmp_path / "in.safetensors", tmp_path / "out", **options)
    assert text in str(caught.value)
    assert not (tmp_path / "out").exists() or os.listdir(tmp_path / "out") == []


@pytest.mark.parametrize("size", [0, -1, True, "", "x", "-1GB", "0GB", "GB", "1XB", "1,5GB"])
def test_sizes_of_files_that_are_none(tmp_path, few, size):
    with pytest.raises(ValueError, match="is not a size"):
        converted(tmp_path / "few.safetensors", tmp_path / "out", max_shard_size=size)
    assert not (tmp_path / "out").exists() or os.listdir(tmp_path / "out") == []


def test_dtypes_that_a_format_cannot_hold_are_refused_and_others_hold_them(tmp_path):
    tensor = torch.randn(3, 2, dtype=torch.complex128)
    torch.save({"z": tensor}, tmp_path / "in.pt")
    for format in ("safetensors", "sharded"):
        with pytest.raises(CheckpointError, match=r"complex128.* which safetensors cannot hold"):
            converted(
                tmp_path / "in.pt",
                tmp_path / format,
                format=format,
                rules=rules(tp=2) if format == "sharded" else None,
            )
        assert not (tmp_path / format).exists() or os.listdir(tmp_path / format) == []
    converted(tmp_path / "in.pt", tmp_path / "dcp", format="dcp")
    assert_same(read_dcp(tmp_path / "dcp")[0], {"z": tensor})


def test_a_tensor_renamed_to_the_name_of_a_value_is_refused(tmp_path):
    torch.save({"w": torch.ones(2), "step": 3}, tmp_path / "in.pt")
    with pytest.raises((ValueError, CheckpointError), match="step"):
        converted(tmp_path / "in.pt", tmp_path / "out.pt", rename={"w": "step"})


@pytest.mark.parametrize("kind", ["joined", "apart"])
def test_parts_without_cells_keep_their_dtype(tmp_path, kind):
    none, some = torch.zeros(0, 4, dtype=torch.bfloat16), torch.ones(4, 4, dtype=torch.bfloat16)
    if kind == "joined":
        assert_same(became(tmp_path, {"q": none, "k": none}, remap=[Concat("qk", ["q", "k"])]), {"qk": none})
    else:
        found = became(tmp_path, {"qk": some}, remap=[Concat("qk", ["q", "k"], sizes=[4, 0])])
        assert_same(found, {"q": some, "k": none})


# --- shapes alone ----------------------------------------------------------------------------------------------------

SIZES = st.integers(1, 5)


@st.composite
def models(draw):
    """Shapes, the rules that join them, and what numpy makes of them."""
    layers, ndim, experts = draw(st.integers(1, 3)), draw(st.integers(1, 3)), draw(st.integers(1, 11))
    dim, at = draw(st.integers(-ndim, ndim - 1)), draw(st.integers(-ndim - 1, ndim))
    shape = draw(st.tuples(*[SIZES] * ndim))
    lengths = draw(st.lists(SIZES, min_size=2, max_size=4))
    order = tuple(draw(st.permutations(range(ndim))))
    parts = {}
    for layer in range(layers):
        for part, length in enumerate(lengths):
            sizes = list(shape)
            sizes[dim] = length
            parts[f"{layer}.p{part}.w"] = tuple(sizes)
        parts |= {f"{layer}.e.{expert}.w": shape for expert in range(experts)}
        parts |= {f"{layer}.t": shape, f"{layer}.other": shape}
    names = list(parts)
    shuffled = {name: parts[name] for name in draw(st.permutations(names))}
    concat = Concat("*.whole.w", [f"*.p{part}.w" for part in range(len(lengths))], dim=dim, sizes=lengths)
    return shuffled, [concat, Stack("*.e.w", "*.e.{}.w", dim=at)], order, layers, (len(lengths), experts)


def oracle(shapes, rules, layers, counts):
    concat, stack = rules
    found = {name: shape for name, shape in shapes.items() if name.endswith((".t", ".other"))}
    for at in range(layers):
        parts = [np.empty(shapes[f"{at}.p{part}.w"]) for part in range(counts[0])]
        found[f"{at}.whole.w"] = np.concatenate(parts, concat.dim).shape
        experts = [np.empty(shapes[f"{at}.e.{expert}.w"]) for expert in range(counts[1])]
        found[f"{at}.e.w"] = np.stack(experts, stack.dim).shape
    return found


@given(models())
def test_shapes_go_inward_as_in_numpy_and_come_back(drawn):
    shapes, rules, order, layers, counts = drawn
    inward = shapes_after(shapes, remap=rules)
    assert inward == oracle(shapes, rules, layers, counts)
    assert shapes_after(inward, remap=rules) == shapes
    turned = shapes_after(shapes, remap=[*rules, Transposed("*.t", order)])
    for name, shape in shapes.items():
        if name.endswith(".t"):
            assert np.empty(turned[name]).transpose(order).shape == shape
    back = tuple(order.index(at) for at in range(len(order)))
    assert shapes_after(turned, remap=[*reversed(rules), Transposed("*.t", back)]) == shapes


@settings(max_examples=15, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(models(), st.sampled_from([4096, 2**20]))
def test_values_go_inward_and_come_back(tmp_path, drawn, most):
    shapes, rules, order, _, _ = drawn
    tensors = {
        n: torch.arange(prod(s), dtype=torch.float32).view(s) + 1000 * at for at, (n, s) in enumerate(shapes.items())
    }
    inward = became(tmp_path, tensors, remap=[*rules, Transposed("*.t", order)], max_bytes=most)
    back = [order.index(at) for at in range(len(order))]
    assert_same(became(tmp_path, inward, remap=[*rules, Transposed("*.t", back)], max_bytes=most), tensors)


# --- memory, threads, progress ---------------------------------------------------------------------------------------

MEASURE = """
import os, sys, threading, torch
from shardwise import checkpoint
from shardwise.state import Concat, Transposed

WAYS = {
    "plain": {},
    "cast": {"cast": torch.bfloat16, "jobs": 2, "max_shard_size": "40MB"},
    "turned": {"remap": [Transposed("*.w")], "format": "torch.save"},
    "joined": {"remap": [Concat("ab", ["a.w", "b.w"], dim=1)], "format": "dcp"},
}

def anonymous():
    with open("/proc/self/status") as file:
        return next(int(line.split()[1]) * 1024 for line in file if line.startswith("RssAnon"))

def measure(source, small, out, name):
    options = {"max_bytes": 2**23, "durable": False, **WAYS[name]}
    checkpoint.convert(small, out + "small" + name, **options)
    before, peak, done = anonymous(), 0, threading.Event()
    thread = threading.Thread(target=lambda: (checkpoint.convert(source, out + name, **options), done.set()))
    thread.start()
    while thread.is_alive():
        done.wait(0.001)
        peak = max(peak, anonymous())
    assert done.is_set()
    print(name, peak - before, flush=True)

torch.set_num_threads(1)
for name in WAYS:  # each in a process of its own: what the allocator keeps of one is not of the next
    if not (child := os.fork()):
        measure(*sys.argv[1:], name)
        os._exit(0)
    os.waitpid(child, 0)
"""


@pytest.mark.slow
def test_memory_stays_within_max_bytes(tmp_path):
    large = {f"{name}.w": torch.ones(4000, 3000) for name in "abcd"}
    save_file(large, tmp_path / "large.safetensors")
    del large
    save_file({f"{name}.w": torch.ones(4, 3) for name in "abcd"}, tmp_path / "small.safetensors")
    paths = [tmp_path / "large.safetensors", tmp_path / "small.safetensors", tmp_path / "out"]
    ran = subprocess.run([sys.executable, "-c", MEASURE, *map(str, paths)], capture_output=True, text=True)
    assert ran.returncode == 0, ran.stderr
    peaks = dict(line.split() for line in ran.stdout.splitlines())
    assert list(peaks) == ["plain", "cast", "turned", "joined"], ran.stderr
    for name, peak in peaks.items():
        assert int(peak) < 2**23 + 2**22, f"{name} took {peak} bytes"


def everything(path):
    return {file.name: file.read_bytes() for file in path.iterdir()}


@pytest.mark.parametrize("target", TARGETS)
def test_the_same_bytes_again_and_by_any_number_of_threads(tmp_path, sources, target):
    path, _, _ = sources["dcp of 4 ranks"]
    for name, jobs in {"one": 1, "again": 1, "four": 4}.items():
        converted(
            path, tmp_path / name, jobs=jobs, max_bytes=2**15, cast=[("*.rows", torch.half)], **TARGETS[target][0]
        )
    found = everything(tmp_path / "one")
    assert found == everything(tmp_path / "again")
    assert found == everything(tmp_path / "four")


@pytest.mark.parametrize("jobs", [1, 4])
@pytest.mark.parametrize("target", TARGETS)
def test_progress_rises_to_the_total(tmp_path, sources, target, jobs):
    told = []
    converted(
        sources["torch.save"][0],
        tmp_path / "out",
        jobs=jobs,
        verify=False,
        progress=lambda done, total: told.append((done, total)),
        **TARGETS[target][0],
    )
    total = sum(tensor.numel() * tensor.element_size() for tensor in TENSORS.values())
    assert {one[1] for one in told} == {total}
    done = [one[0] for one in told]
    assert done == sorted(done)
    assert done[-1] == total
    assert len(set(done)) > 5
