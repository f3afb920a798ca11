"""Megatron's `torch_dist` folders: tensors, values of `common.pt`, values of single ranks; and what is missing."""

import pytest
import torch
from megatron_folders import arguments, write_dist

from shardwise import CheckpointError, checkpoint

TENSORS = {
    "embedding.word_embeddings.weight": torch.randn(48, 16),
    "decoder.layers.self_attention.linear_proj.weight": torch.randn(4, 16, 16),
    "optimizer.state.exp_avg.decoder.layers.self_attention.linear_proj.weight": torch.randn(4, 16, 16),
}
STATE = "decoder.layers.self_attention.linear_proj._extra_state/shard_0_4"


@pytest.fixture
def folder(tmp_path):
    common = {"args": arguments(), "iteration": 7, "optimizer": {"param_groups": [{"lr": 0.1}]}}
    write_dist(tmp_path / "in", TENSORS, values={STATE: {"scale": 2}}, common=common)
    return tmp_path / "in"


def test_tensors_and_all_values_are_there(folder):
    opened = checkpoint.open(folder)
    assert (opened.format, set(opened)) == ("megatron-dist", {*TENSORS})
    for name, value in TENSORS.items():
        torch.testing.assert_close(opened[name].read(), value, rtol=0, atol=0)
    assert opened.objects["iteration"] == 7
    assert opened.objects["optimizer.param_groups.0.lr"] == 0.1
    assert opened.objects[STATE] == [{"scale": 2}]
    assert opened.objects["args"].name == "argparse.Namespace"
    assert opened.objects["args"].state["num_query_groups"] == 2


@pytest.mark.parametrize("name", ["common.pt", "metadata.json", ".metadata"])
def test_a_folder_that_is_there_in_part_is_refused(folder, name):
    (folder / name).unlink()
    with pytest.raises(CheckpointError, match=f"{name} is missing.*interrupted"):
        checkpoint.open(folder)


def test_a_truncated_file_is_named_with_the_tensor(folder):
    file = next(folder.glob("*.distcp"))
    file.write_bytes(file.read_bytes()[:-100])
    opened = checkpoint.open(folder)
    with pytest.raises(CheckpointError, match=rf"{file.name} has .* bytes, but .* should be at bytes"):
        [*(entry.read() for entry in opened.values()), *opened.objects.values()]


def test_a_name_in_both_places_is_refused(folder):
    torch.save({"embedding": {"word_embeddings": {"weight": torch.ones(2)}}}, folder / "common.pt")
    with pytest.raises(CheckpointError, match=r"both in .*common.pt and in"):
        checkpoint.open(folder)


def test_another_backend_of_megatron_is_named(tmp_path):
    (tmp_path / "metadata.json").write_text('{"sharded_backend": "zarr"}')
    torch.save({}, tmp_path / "common.pt")
    (tmp_path / "weight").mkdir()
    with pytest.raises(CheckpointError, match="stored by 'zarr', and only torch_dist is read"):
        checkpoint.open(tmp_path)
