"""What torch.distributed.checkpoint writes with other serializations, extensions and state dicts."""

import shutil

import pytest
import torch
import torch.distributed.checkpoint as judge
from checkpoints import has, same_tensors, split
from models import sharded
from torch.distributed.checkpoint import FileSystemReader, FileSystemWriter
from torch.distributed.checkpoint._extension import ZStandard
from torch.distributed.checkpoint.filesystem import SerializationFormat
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor

from shardwise import checkpoint
from shardwise.errors import CheckpointError
from shardwise.testing import on_ranks

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
SAFETENSORS = {"serialization_format": SerializationFormat.SAFETENSORS}
WRITERS = {
    "safetensors": SAFETENSORS,
    "safetensors of several threads": {**SAFETENSORS, "thread_count": 2},
    "zstd": {"_extensions": [ZStandard()]},
    "zstd in a file for each tensor": {"_extensions": [ZStandard()], "single_file_per_rank": False},
}
FLAT = StateDictOptions(flatten_optimizer_state_dict=True)


def model():
    torch.manual_seed(0)
    return {
        "even": torch.randn(8, 6),
        "uneven": torch.randn(7, 5).to(torch.bfloat16),
        "none": torch.zeros(0, 3),
        "one": torch.tensor(7),
        "plain": torch.arange(1000.0),
    }


class Counter:
    """A Stateful of torch."""

    def state_dict(self):
        return {"steps": 3, "sums": torch.arange(4.0), "inner": {"names": ["a", "b"]}}

    def load_state_dict(self, state):
        raise NotImplementedError


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """A model in every way; and a training, with the tensors and values that it has."""
    folder = tmp_path_factory.mktemp("variants")

    def save(rank):
        mesh, whole = init_device_mesh("cpu", (2,)), model()
        state = {**whole, **{name: distribute_tensor(whole[name], mesh, [Shard(0)]) for name in ("even", "uneven")}}
        for way, options in WRITERS.items():
            judge.save({"model": state, "step": 7}, storage_writer=FileSystemWriter(folder / way, **options))
        judge.save({"app": Counter(), "w": state["even"]}, checkpoint_id=folder / "stateful")
        trained = sharded("fsdp", 3, range(2))
        optimizer = torch.optim.AdamW(trained.parameters(), lr=0.01)
        for parameter in trained.parameters():
            parameter.grad = parameter.detach() * 0.5
        optimizer.step()
        weights, flat = get_state_dict(trained, optimizer, options=FLAT)
        judge.save({"model": weights, "optimizer": flat}, checkpoint_id=folder / "flat")
        return split({"model": weights, "optimizer": flat})

    return folder, on_ranks(2, save)[0]


@pytest.mark.parametrize("way", WRITERS)
def test_tensors_and_values_are_read(saved, way):
    has(saved[0] / way, {f"model.{name}": value for name, value in model().items()}, {"step": 7})


@pytest.mark.parametrize("way", [way for way in WRITERS if "zstd" in way])
def test_torch_reads_the_same(saved, way):
    into = {"model": {name: torch.zeros_like(value) for name, value in model().items()}}
    judge.load(into, storage_reader=FileSystemReader(saved[0] / way))
    same_tensors(into["model"], model())


@pytest.mark.parametrize("way", WRITERS)
def test_they_become_other_formats_and_load_into_other_shardings(saved, tmp_path, way):
    made = checkpoint.convert(saved[0] / way, tmp_path / "out", format="dcp", max_bytes=4096)
    has(tmp_path / "out", {f"model.{name}": value for name, value in model().items()}, {"step": 7})
    assert not checkpoint.verify(saved[0] / way, made)
    into = {"model": {"even": torch.zeros(8, 6)}, "step": 0}
    checkpoint.load(saved[0] / way, into=into)
    same_tensors(into["model"], {"even": model()["even"]})


def test_a_stateful_is_a_dict_of_what_it_says(saved):
    sums, even = torch.arange(4.0), model()["even"]
    values = {"app.steps": 3, "app.inner.names": ["a", "b"]}
    has(saved[0] / "stateful", {"app.sums": sums, "w": even}, values)


def test_a_flattened_optimizer_has_a_name_for_every_state(saved):
    folder, (tensors, values) = saved
    found = checkpoint.open(folder / "flat")
    same_tensors({name: entry.read() for name, entry in found.items()}, tensors)
    assert dict(found.objects) == values
    assert any(name.startswith("optimizer.state.") and name.endswith(".exp_avg") for name in found)


def damaged(saved, tmp_path, way, change):
    folder = shutil.copytree(saved[0] / way, tmp_path / "copy")
    file = next(folder.glob("__0_*.distcp"))
    file.write_bytes(change(file.read_bytes()))
    found = checkpoint.open(folder)
    with pytest.raises(CheckpointError) as caught:
        _ = [entry.read() for entry in found.values()]
    return str(caught.value)


def test_damage_is_named_with_the_file(saved, tmp_path):
    said = damaged(saved, tmp_path, "zstd", lambda data: data[:-400] + b"\0" * 400)
    assert "__0_0.distcp, bytes " in said
    assert "is not compressed with zstd, or damaged" in said


def test_a_box_that_torch_lost_is_named(saved, tmp_path):
    """It keeps boxes by the name of the tensor: of two in one file the second one stays."""
    said = damaged(
        saved,
        tmp_path,
        "safetensors",
        lambda data: data.replace(b'saved_offsets\\": [0, 0]', b'saved_offsets\\": [1, 0]'),
    )
    assert "__0_0.distcp: [0:4, 0:6] of 'model.even' should be" in said
    assert "torch keeps one box of a tensor in each such file" in said


def test_a_file_that_is_cut_off_is_named(saved, tmp_path):
    assert "truncated" in damaged(saved, tmp_path, "safetensors", lambda data: data[:-8])


def test_few_bytes_do_not_become_very_many(tmp_path):
    writer = FileSystemWriter(tmp_path / "c", _extensions=[ZStandard()])
    judge.save({"w": torch.zeros(2**25)}, storage_writer=writer)
    with pytest.raises(CheckpointError, match=r"__0_0.distcp, bytes .* would become more than"):
        checkpoint.open(tmp_path / "c")["w"].read()


def test_both_together_cannot_be_read_by_torch_either_and_are_refused(tmp_path):
    writer = FileSystemWriter(tmp_path / "c", _extensions=[ZStandard()], **SAFETENSORS)
    judge.save({"a": torch.ones(9), "b": torch.ones(3)}, storage_writer=writer)
    with pytest.raises(CheckpointError, match=r"belong to both|not compressed"):
        checkpoint.open(tmp_path / "c")["a"].read()
