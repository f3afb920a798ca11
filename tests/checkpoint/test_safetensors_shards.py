"""Shards of torch's HuggingFaceStorageWriter: boxes by their saved offsets."""

import json
import shutil

import pytest
import torch
import torch.distributed.checkpoint as judge
from checkpoints import names_in, rewritten, same_tensors
from safetensors.torch import save_file
from torch.distributed.checkpoint import HuggingFaceStorageReader, HuggingFaceStorageWriter
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, Shard, distribute_tensor

from shardwise import checkpoint
from shardwise.errors import CheckpointError
from shardwise.testing import on_ranks


def model():
    torch.manual_seed(0)
    return {
        "even": torch.randn(8, 6),
        "uneven": torch.randn(13, 5).to(torch.bfloat16),
        "few": torch.randn(3, 2),
        "deep": torch.randn(5, 6, 7, dtype=torch.float64),
        "one": torch.tensor(7.0),
        "plain": torch.randn(4),
    }


def test_shards_that_an_earlier_save_on_more_ranks_left_are_refused(tmp_path):
    for ranks in (4, 2):
        for rank in range(ranks):
            said = {"DCP_SHARDING_INFO": json.dumps({"w": {"saved_offsets": [8 // ranks * rank, 0]}})}
            name = f"shard-{rank:05d}-model-00001-of-00001.safetensors"
            save_file({"w": torch.full((8 // ranks, 3), float(ranks))}, tmp_path / name, said)
    with pytest.raises(CheckpointError, match="remove the shards of other saves"):
        checkpoint.open(tmp_path)


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """The same model as shards in one folder, in several files for each rank, and consolidated."""
    folder = tmp_path_factory.mktemp("shards")

    def save(rank):
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
        ways = {"even": (Shard(0), Shard(1)), "uneven": (Shard(0), Shard(0)), "few": (Replicate(), Shard(0))}
        ways |= {"deep": (Shard(2), Shard(1)), "one": (Replicate(), Replicate())}
        whole = model()
        state = {name: distribute_tensor(whole[name], mesh, list(way)) for name, way in ways.items()}
        state["plain"] = whole["plain"]
        several = {name: 1 + (name > "f") for name in state}
        for path, more in {
            "shards": {},
            "several": {"fqn_to_index_mapping": several},
            "whole": {"fqn_to_index_mapping": several, "enable_consolidation": True},
        }.items():
            writer = HuggingFaceStorageWriter(str(folder / path), save_distributed=True, **more)
            judge.save(state, storage_writer=writer)

    on_ranks(4, save)
    return folder


@pytest.mark.parametrize("path", ["shards", "several", "whole", "whole/sharded"])
def test_every_tensor_is_put_together_from_its_boxes(saved, path):
    found, expected = checkpoint.open(saved / path), model()
    if path == "whole":
        expected["one"] = torch.tensor(0.0)  # torch 2.13 loses 0-d tensors when it consolidates
    same_tensors({name: entry.read() for name, entry in found.items()}, expected)


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
def test_torch_and_a_conversion_read_the_same_cells(saved, tmp_path):
    into = {name: torch.zeros_like(value) for name, value in model().items()}
    judge.load(into, storage_reader=HuggingFaceStorageReader(str(saved / "several")), no_dist=True)
    made = checkpoint.convert(saved / "several", tmp_path / "model.safetensors")
    same_tensors({name: entry.read() for name, entry in made.items()}, into)


def test_a_sharding_of_another_kind_is_loaded(saved):
    def load(rank):
        mesh = init_device_mesh("cpu", (2,))
        into = {name: torch.zeros_like(value) for name, value in model().items()}
        into["even"] = distribute_tensor(into["even"], mesh, [Shard(1)])
        checkpoint.load(saved / "shards", into=into)
        return into["even"].full_tensor()

    torch.testing.assert_close(on_ranks(2, load)[1], model()["even"], rtol=0, atol=0)


def changed(file, change):
    def edit(header):
        said = json.loads(header["__metadata__"]["DCP_SHARDING_INFO"])
        change(said)
        header["__metadata__"]["DCP_SHARDING_INFO"] = json.dumps(said)

    rewritten(file, edit)


def test_what_is_missing_is_named(saved, tmp_path):
    folder = shutil.copytree(saved / "several", tmp_path / "copy")
    first = names_in(folder)[0]
    with pytest.raises(CheckpointError, match=r"is one of 8 shards: open the folder"):
        checkpoint.open(folder / first)
    (folder / first).unlink()
    with pytest.raises(CheckpointError, match=r"no file has \[0:5, 0:3, 0:4\] of 'deep'"):
        checkpoint.open(folder)
    for name in names_in(folder):
        if "model-00001" in name:
            (folder / name).unlink()
    with pytest.raises(CheckpointError, match="but no shard of model-00001-of-00002"):
        checkpoint.open(folder)


@pytest.mark.parametrize("offset", [None, [1], [-1, 0], [0, "0"], [2**62, 0], "00"])
def test_offsets_that_are_none_are_refused_with_file_and_tensor(saved, tmp_path, offset):
    folder = shutil.copytree(saved / "shards", tmp_path / "copy")
    changed(folder / names_in(folder)[1], lambda said: said["even"].update(saved_offsets=offset))
    with pytest.raises(CheckpointError, match=r"shard-00002.*no saved_offsets of 2 numbers for 'even'"):
        checkpoint.open(folder)


def test_shards_of_two_checkpoints_are_refused(saved, tmp_path):
    folder = shutil.copytree(saved / "shards", tmp_path / "copy")

    def other(header):
        header["even"]["dtype"] = "I32"

    rewritten(folder / names_in(folder)[3], other)
    with pytest.raises(CheckpointError, match=r"'even' is torch.float32 .* but torch.int32 .* different checkpoints"):
        checkpoint.open(folder)
