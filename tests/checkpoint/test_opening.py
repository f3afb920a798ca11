"""What is at a path: one checkpoint, several, or something else that is named."""

import gzip
import json

import numpy as np
import pytest
import torch
import torch.distributed.checkpoint as judge
from safetensors.torch import save_file

from shardwise import checkpoint
from shardwise.errors import CheckpointError

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning", "ignore::FutureWarning")  # torch's own
ONE = {"w": torch.ones(2, 3)}


def refused(path):
    with pytest.raises(CheckpointError) as caught:
        checkpoint.open(path)
    return str(caught.value)


@pytest.mark.parametrize(
    ("model", "adapter"),
    [
        ("model.safetensors", "adapter_model.safetensors"),
        ("pytorch_model.bin", "adapter_model.safetensors"),
        ("model.safetensors", "adapter_model.bin"),
        ("model.safetensors.index.json", "adapter_model.safetensors"),
    ],
)
def test_a_model_and_an_adapter_in_one_folder_are_two_checkpoints(tmp_path, model, adapter):
    for name in (model, adapter):
        if name.endswith(".json"):
            save_file(ONE, tmp_path / "part.safetensors")
            (tmp_path / name).write_text(json.dumps({"weight_map": {"w": "part.safetensors"}}))
        else:
            (save_file if name.endswith(".safetensors") else torch.save)(ONE, tmp_path / name)
    said = refused(tmp_path)
    assert f"has 2 checkpoints: {model}, {adapter}." in said
    assert f"such as {tmp_path / model}; convert with merge=" in said
    assert list(checkpoint.open(tmp_path / model)) == list(checkpoint.open(tmp_path / adapter)) == ["w"]
    (tmp_path / model).unlink()
    if not model.endswith(".json"):
        assert list(checkpoint.open(tmp_path)) == ["w"]


def test_what_another_writer_saved_to_the_same_folder_is_not_passed_over(tmp_path):
    checkpoint.save(ONE, tmp_path)
    judge.save({"w": torch.zeros(2, 3)}, checkpoint_id=tmp_path)
    assert "has 2 checkpoints: shardwise.json, .metadata." in refused(tmp_path)
    assert checkpoint.open(tmp_path / ".metadata")["w"].read().sum() == 0


def test_a_single_file_beside_an_index_of_others_is_a_second_checkpoint(tmp_path):
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": {"w": "part.safetensors"}}))
    for name in ("part.safetensors", "model.safetensors"):
        save_file(ONE, tmp_path / name)
    assert "has 2 checkpoints: model.safetensors.index.json, model.safetensors." in refused(tmp_path)
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": {"w": "model.safetensors"}}))
    assert list(checkpoint.open(tmp_path)) == ["w"]


def test_an_adapter_beside_an_optimizer_is_opened(tmp_path):
    save_file(ONE, tmp_path / "adapter_model.safetensors")
    torch.save({"state": {}}, tmp_path / "optimizer.pt")
    assert list(checkpoint.open(tmp_path)) == ["w"]


def test_several_checkpoints_are_named(tmp_path):
    torch.save(ONE, tmp_path / "a.pt")
    torch.save(ONE, tmp_path / "b.bin")
    checkpoint.save(ONE, tmp_path / "step1")
    checkpoint.save(ONE, tmp_path / "step2", format="dcp")
    (tmp_path / "logs").mkdir()
    said = refused(tmp_path)
    assert (
        f"has 4 checkpoints: a.pt, b.bin, step1, step2. Give the path of one of them, such as {tmp_path / 'a.pt'}"
        in said
    )


SEEN = {
    "m.gguf": (b"GGUF\x03\0\0\0", "GGUF, of llama.cpp"),
    "m.h5": (b"\x89HDF\r\n\x1a\n", "HDF5"),
    "m.txt": (b"hello world", "data that begins with b'hello wo'"),
    "m.gz": (gzip.compress(b"x"), "compressed with gzip"),
    "m.pkl": (b"\x80\x04N.", "a plain pickle"),
    "m": (b"", "empty"),
    "x.json": (b"{}", "JSON"),
    "model.distcp": (b"version https://git-lfs.github.com/spec/v1\n", "a pointer of Git LFS"),
}


@pytest.mark.parametrize("name", SEEN)
def test_an_unknown_file_is_named_with_what_it_seems_to_be(tmp_path, name):
    data, kind = SEEN[name]
    (tmp_path / name).write_bytes(data)
    (tmp_path / "below").mkdir()
    for path in (tmp_path, tmp_path / name):
        said = refused(path)
        assert "is not a recognized checkpoint: it " in said
        assert kind in said
        assert "Expected safetensors (a file, " in said
    assert f"it has {name} ({kind}" in refused(tmp_path)
    assert "; folders: below." in refused(tmp_path)


def test_of_many_files_the_first_are_named(tmp_path):
    for at in range(9):
        np.save(tmp_path / f"{at}.npy", np.zeros(1))
    assert "it has 0.npy (a numpy array), 1.npy" in refused(tmp_path)
    assert "5.npy (a numpy array), .... Expected" in refused(tmp_path)


def test_a_pointer_in_place_of_weights_is_called_one(tmp_path):
    (tmp_path / "model.safetensors").write_bytes(b"version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 9\n")
    assert "is a pointer of Git LFS" in refused(tmp_path)
