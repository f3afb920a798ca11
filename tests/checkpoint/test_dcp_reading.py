"""Checkpoints of torch.distributed, written by itself on real ranks, read bit-for-bit; damaged ones raise one error."""

import pickle
import random
import resource
import shutil
from dataclasses import replace
from math import prod

import pytest
import torch
import torch._dynamo  # a process imports it with its first DTensor, which takes seconds: once here, not on every rank
import torch.distributed.checkpoint as judge
from devices import device_type
from torch import nn
from torch.distributed.checkpoint.filesystem import FileSystemWriter
from torch.distributed.checkpoint.metadata import MetadataIndex
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

from shardwise import Box, checkpoint
from shardwise.checkpoint.formats import dcp
from shardwise.checkpoint.local_files import files_at
from shardwise.errors import CheckpointError
from shardwise.state.traverse import get_element, set_element, traverse_state_dict
from shardwise.testing import on_ranks

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning", "ignore::FutureWarning")  # torch's own, as it saves
DTYPES = (torch.bfloat16, torch.float8_e4m3fn, torch.complex64, torch.bool, torch.uint16, torch.int64, torch.float64)


def opened(path):
    return dcp.open_dcp(files_at(path)[0])


def bits(tensor):
    return tensor.detach().contiguous().reshape(-1).view(torch.uint8)


def assert_same(found, expected):
    """Every tensor and value of a nested state dict of plain tensors."""
    names = set()

    def visit(path, value):
        name = ".".join(map(str, path))
        names.add(name)
        if isinstance(value, torch.Tensor):
            assert (found[name].shape, found[name].dtype) == (value.shape, value.dtype)
            torch.testing.assert_close(bits(found[name].read()), bits(value), rtol=0, atol=0)
        else:
            assert found.objects[name] == value

    traverse_state_dict(expected, visit)
    assert names == {*found, *found.objects}


def full(state):
    """The same state dict of whole tensors."""
    whole = {}

    def visit(path, value):
        set_element(whole, path, value.full_tensor() if isinstance(value, DTensor) else value)

    traverse_state_dict(state, visit)
    return whole


def model():
    torch.manual_seed(0)
    return {
        "even": torch.randn(8, 6),
        "uneven": torch.randn(13, 5),
        "few": torch.randn(3, 2),
        "long": torch.randn(29),
        "deep": torch.randn(5, 6, 7),
        **{str(dtype).replace(".", " "): torch.randint(2, (6, 3)).to(dtype) for dtype in DTYPES},
    }


OTHERS = {
    "plain": {"t": torch.arange(12.0).view(3, 4).t(), "scalar": torch.tensor(3), "none": torch.zeros(0, 3)},
    "step": 17,
    "groups": [{"lr": 0.1, "betas": (0.9, 0.95), "names": ["a", "b"], "on": None}, {"lr": 1e-3}],
    "history": [torch.ones(2), {"x": torch.zeros(3)}],
    "notes": {"text": "x", "sizes": torch.Size([2, 3]), "set": {1, 2}},
}


def sharded(tensor, mesh, placements):
    dims = [p if isinstance(p, Replicate) or p.dim < tensor.ndim else Replicate() for p in placements]
    return distribute_tensor(tensor, mesh, dims, src_data_rank=None)  # gloo has no float8


WAYS = {
    "one rank": ((1,), [Shard(0)]),
    "rows on 2": ((2,), [Shard(0)]),
    "columns on 2": ((2,), [Shard(1)]),
    "copies on 2": ((2,), [Replicate()]),
    "rows on 4": ((4,), [Shard(0)]),
    "blocks on 4": ((2, 2), [Shard(0), Shard(1)]),
    "rows twice on 4": ((2, 2), [Shard(0), Shard(0)]),
    "rows and copies on 4": ((2, 2), [Shard(0), Replicate()]),
}


@pytest.mark.parametrize("way", WAYS)
def test_every_sharding_that_torch_saves_is_read(tmp_path, way):
    shape, placements = WAYS[way]

    def save(rank):
        mesh = init_device_mesh(device_type(), shape)
        tensors = {name: sharded(tensor, mesh, placements) for name, tensor in model().items()}
        judge.save({"model": tensors, **OTHERS}, checkpoint_id=tmp_path / "c")

    on_ranks(prod(shape), save)
    found, expected = opened(tmp_path / "c"), {"model": model(), **OTHERS}
    assert found.format == "dcp"
    assert_same(found, expected)
    for name in ("groups.0.betas", "history.0", "history.1.x", "model.uneven"):
        assert found.paths[name] == tuple(int(key) if key.isdigit() else key for key in name.split("."))
        assert get_element(expected, found.paths[name]) is not None
    cut = Box((1, 2), (7, 5))
    torch.testing.assert_close(found["model.even"].read(cut), model()["even"][1:7, 2:5], rtol=0, atol=0)


@pytest.mark.parametrize("flat", [False, True])
@pytest.mark.parametrize("count", [2, 4])
def test_models_and_optimizers_of_fsdp(tmp_path, count, flat):
    def save(rank):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(7, 5), nn.BatchNorm1d(5), nn.Linear(5, 3))
        fully_shard(model, mesh=init_device_mesh(device_type(), (count,)))
        optimizer = torch.optim.AdamW(model.parameters())
        model(torch.randn(4, 7)).sum().backward()
        optimizer.step()
        options = StateDictOptions(flatten_optimizer_state_dict=flat)
        weights, moments = get_state_dict(model, optimizer, options=options)
        judge.save({"model": weights, "optimizer": moments}, checkpoint_id=tmp_path / "c")
        return full({"model": weights, "optimizer": moments})

    expected = on_ranks(count, save)[0]
    assert_same(opened(tmp_path / "c"), expected)


@pytest.mark.parametrize("options", [{"single_file_per_rank": False}, {"thread_count": 3}], ids=str)
def test_other_numbers_of_files(tmp_path, options):
    saved = {"a": torch.randn(3, 4), "b": {"c": torch.randn(2), "n": 3}, "d": torch.tensor(1.0)}
    judge.save(saved, storage_writer=FileSystemWriter(tmp_path / "c", **options))
    assert_same(opened(tmp_path / "c"), saved)


def test_values_that_hold_tensors_are_read_with_them(tmp_path):
    planner = judge.DefaultSavePlanner(flatten_state_dict=False)
    base = torch.randn(4, 3)
    value = {"x": [base, base.t(), base[1]], "y": (torch.tensor(True), torch.zeros(0)), "z": torch.ones(2).bfloat16()}
    judge.save({"all": value}, checkpoint_id=tmp_path / "c", planner=planner)
    found = opened(tmp_path / "c").objects["all"]
    torch.testing.assert_close(found, value, rtol=0, atol=0)
    assert found["x"][0].untyped_storage().data_ptr() == found["x"][1].untyped_storage().data_ptr()


def test_a_value_that_is_not_known_does_not_hide_the_others(tmp_path):
    judge.save({"a": 1, "odd": slice(3), "b": [2]}, checkpoint_id=tmp_path / "c")
    found = opened(tmp_path / "c").objects
    assert (found["a"], found["b"], sorted(found)) == (1, [2], ["a", "b", "odd"])
    assert repr(found["odd"]) == "<__builtin__.slice(None, 3, None), not rebuilt>"
    with pytest.raises(KeyError):
        found["missing"]


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """A small checkpoint of 2 ranks."""
    folder = tmp_path_factory.mktemp("saved") / "c"

    def save(rank):
        tensor = distribute_tensor(torch.arange(12.0).view(6, 2), init_device_mesh(device_type(), (2,)), [Shard(0)])
        judge.save({"w": tensor, "step": 3, "b": torch.ones(2)}, checkpoint_id=folder)

    on_ranks(2, save)
    return folder


@pytest.fixture
def copied(saved, tmp_path):
    """A copy of it that may be damaged."""
    return shutil.copytree(saved, tmp_path / "copy")


def change(folder, edit):
    path = folder / ".metadata"
    metadata = pickle.loads(path.read_bytes())
    edit(metadata)
    path.write_bytes(pickle.dumps(metadata))


def edit_row(name, lo, **fields):
    def edit(metadata):
        index = next(i for i in metadata.storage_data if (i.fqn, i.offset) == (name, lo))
        metadata.storage_data[index] = replace(metadata.storage_data[index], **fields)

    return edit


FIRST = torch.Size([0, 0])


def drop_row(metadata):
    del metadata.storage_data[MetadataIndex("w", FIRST)]


def drop_chunk(metadata):
    metadata.state_dict_metadata["w"].chunks.pop()


def move_chunk(metadata):
    metadata.state_dict_metadata["w"].chunks[1].offsets = torch.Size([4, 0])


def other_shape(metadata):
    metadata.state_dict_metadata["w"].size = torch.Size([2**40, 2])


def no_storage(metadata):
    metadata.storage_data = None


OPENING = {
    "missing row": (drop_row, r"'w' is invalid: no file has \('w', \(0, 0\)\)"),
    "missing chunk": (drop_chunk, "'w' .* its boxes have 6 cells, but its shape .* has 12"),
    "chunk outside": (move_chunk, "'w' .* a box is outside its shape"),
    "other shape": (other_shape, "'w' .* cells"),
    "overlap": (
        edit_row("w", FIRST, relative_path="__1_0.distcp", offset=1300),
        r"__1_0.distcp: bytes .* belong to both",
    ),
    "outside": (edit_row("w", FIRST, relative_path="../x.distcp"), "not inside the checkpoint"),
    "absolute": (edit_row("w", FIRST, relative_path="/etc/passwd"), "not inside the checkpoint"),
    "no text": (edit_row("w", FIRST, relative_path=5), "storage_data"),
    "negative": (edit_row("w", FIRST, offset=-5), "whole numbers"),
    "compressed": (edit_row("w", FIRST, transform_descriptors=["zstd"]), r"'w' went through \['zstd'\]"),
    "no storage": (no_storage, "does not describe a checkpoint"),
}


@pytest.mark.parametrize("name", OPENING)
def test_metadata_that_does_not_fit_is_refused(copied, name):
    edit, message = OPENING[name]
    change(copied, edit)
    with pytest.raises(CheckpointError, match=message) as caught:
        opened(copied)
    assert ".metadata" in str(caught.value)


def place(folder, name, lo):
    """The file and bytes of a box."""
    rows = pickle.loads((folder / ".metadata").read_bytes()).storage_data
    return next(info for index, info in rows.items() if (index.fqn, index.offset) == (name, lo))


def test_missing_and_truncated_files_are_named_with_the_tensor_and_the_bytes(copied):
    info = place(copied, "w", torch.Size([3, 0]))
    path, stop = copied / info.relative_path, info.offset + info.length
    path.write_bytes(path.read_bytes()[: stop - 1])
    found = opened(copied)
    message = f"{path.name} has {stop - 1} bytes, but 'w' should be at bytes {info.offset} to {stop}"
    with pytest.raises(CheckpointError, match=message):
        found["w"].read()
    torch.testing.assert_close(found["w"].read(Box((0, 0), (3, 2))), torch.arange(6.0).view(3, 2))
    path.unlink()
    with pytest.raises(CheckpointError, match=f"{path.name} is missing"):
        opened(copied)["w"].read()


def test_boxes_that_are_something_else_are_refused(copied):
    def swap(metadata):
        rows = {index.fqn: index for index in metadata.storage_data}
        stored = metadata.storage_data
        stored[rows["b"]], stored[rows["step"]] = stored[rows["step"]], stored[rows["b"]]

    change(copied, swap)
    found = opened(copied)
    with pytest.raises(CheckpointError, match=r"distcp, bytes .*: \[0:2\] of 'b' should be torch.float32 .* not a t"):
        found["b"].read()
    assert found.objects["step"].tolist() == [1, 1]


@pytest.mark.parametrize(("shift", "length"), [(3, -3), (0, -100), (0, -1570)])
def test_bytes_that_are_no_archive_are_refused(copied, shift, length):
    info = place(copied, "w", torch.Size([3, 0]))
    change(copied, edit_row("w", torch.Size([3, 0]), offset=info.offset + shift, length=info.length + length))
    with pytest.raises(CheckpointError, match=f"{info.relative_path}, bytes .* truncated or damaged"):
        opened(copied)["w"].read()


def test_another_dtype_or_shape_than_the_metadata_says_is_refused(copied):
    def other_dtype(metadata):
        metadata.state_dict_metadata["w"].properties.dtype = torch.int32

    def other_boxes(metadata):
        metadata.state_dict_metadata["w"].size = torch.Size([2, 6])
        first, second = metadata.state_dict_metadata["w"].chunks
        first.sizes = second.sizes = torch.Size([2, 3])
        rows = {index.offset: index for index in metadata.storage_data if index.fqn == "w"}
        info = metadata.storage_data.pop(rows[second.offsets])
        second.offsets = torch.Size([0, 3])
        metadata.storage_data[replace(rows[torch.Size([0, 0])], offset=second.offsets)] = info

    for edit, message in (
        (other_dtype, r"torch.int32 .* but is torch.float32"),
        (other_boxes, r"of shape \(2, 3\), but is"),
    ):
        good = (copied / ".metadata").read_bytes()
        change(copied, edit)
        with pytest.raises(CheckpointError, match=message):
            opened(copied)["w"].read()
        (copied / ".metadata").write_bytes(good)


def test_a_directory_without_metadata_is_refused(tmp_path):
    with pytest.raises(CheckpointError, match=r"\.metadata is missing"):
        opened(tmp_path)


@pytest.mark.parametrize("target", [".metadata", "__0_0.distcp", "__1_0.distcp"])
def test_damage_leads_to_other_values_or_to_one_error_and_to_nothing_else(saved, tmp_path, target):
    good, chance, raised = (saved / target).read_bytes(), random.Random(1), 0
    busy = [at for at, byte in enumerate(good) if byte not in b"Z\0"]
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    for turn in range(250):
        data = bytearray(good)
        if turn % 6 == 0:
            data = data[: chance.randrange(len(data))]
        else:
            for _ in range(chance.choice([1, 1, 3])):
                data[chance.choice(busy)] = chance.randrange(256)
        folder = shutil.copytree(saved, tmp_path / str(turn))
        (folder / target).write_bytes(data)
        try:
            found = opened(folder)
            for entry in found.values():
                entry.read()
            repr(dict(found.objects))
        except CheckpointError:
            raised += 1
    assert 40 < raised < 250
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 300_000


def test_archives_of_one_kind_that_lie_otherwise_are_read_as_they_are(tmp_path):
    """One tells of all that are like it, byte by byte; these have other strides, or another offset."""
    whole = torch.arange(32.0).reshape(8, 4)
    state = {
        "a": torch.randn(4, 4),
        "turned": torch.randn(4, 4).t(),
        "b": torch.randn(4, 4),
        "again": torch.randn(4, 4).t(),
    }
    judge.save(dict(state), checkpoint_id=tmp_path / "c", no_dist=True)
    judge.save({"half": whole[4:], "other": whole[:4].clone()}, checkpoint_id=tmp_path / "d", no_dist=True)
    for names in (state, reversed(state)):
        found = checkpoint.open(tmp_path / "c")
        for name in names:
            torch.testing.assert_close(found[name].read(), state[name], rtol=0, atol=0)
    found = checkpoint.open(tmp_path / "d")
    torch.testing.assert_close(found["other"].read(), whole[:4], rtol=0, atol=0)
    torch.testing.assert_close(found["half"].read(), whole[4:], rtol=0, atol=0)


def test_damage_to_archives_of_one_kind_has_the_same_outcome_in_each(tmp_path):
    """One of them tells of the others, but only where they are like it."""
    state = {name: torch.full((4,), value) for name, value in (("a", 1.0), ("b", 2.0))}
    judge.save(dict(state), checkpoint_id=tmp_path, no_dist=True)
    (path,) = tmp_path.glob("*.distcp")
    text = path.read_bytes()

    def outcome(at):
        path.write_bytes(text[:at] + bytes([text[at] ^ 0x55]) + text[at + 1 :])
        found = opened(tmp_path)
        try:
            return "read" if all(found[name].read().equal(value) for name, value in state.items()) else "other values"
        except CheckpointError:
            return "refused"

    length = len(text) // 2
    first, second = ([outcome(start + at) for at in range(0, length, 7)] for start in (0, length))
    assert set(first) == {"read", "other values", "refused"}
    assert second == first
