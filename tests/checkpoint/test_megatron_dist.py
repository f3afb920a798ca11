"""Megatron's `torch_dist` folders: tensors, values of `common.pt`, values of single ranks; and what is missing."""

import pickle

import pytest
import torch
from megatron_folders import arguments, write_dist

from shardwise import Box, CheckpointError, checkpoint

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


def write_flat(folder, whole, grid, ranges, shape):
    """Optimizer states as older versions wrote them: shards of a grid, each flat and in `ranges` parts."""
    local = [size // count for size, count in zip(whole.shape, grid, strict=True)]
    split = [size for pair in zip(grid, local, strict=True) for size in pair]
    order = [*range(0, 2 * len(grid), 2), *range(1, 2 * len(grid), 2)]
    torch.save({"exp_avg": whole.reshape(split).permute(order).reshape(*grid, -1)}, folder.with_suffix(".pt"))
    words = [f"S{dim}" for dim in range(len(grid) + 1)]
    mesh = {f"axis{dim}": size for dim, size in enumerate((*grid, ranges))}
    rules = {"mesh": mesh, "rule": [{"name": "*", "placements": words}]}
    checkpoint.convert(folder.with_suffix(".pt"), folder, format="megatron-dist", rules=rules, sums=False)
    metadata = pickle.loads((folder / ".metadata").read_bytes())
    metadata.mcore_data = {"exp_avg": {"nd_reformulated_orig_global_shape": shape}}
    (folder / ".metadata").write_bytes(pickle.dumps(metadata))


@pytest.mark.parametrize(("grid", "ranges"), [((1, 1, 1), 1), ((2, 1, 1), 3), ((2, 2, 1), 2), ((2, 2, 3), 5)])
def test_flat_ranges_of_shards_have_the_shape_of_their_parameter(tmp_path, grid, ranges):
    whole = torch.randn(4, 6, 9)
    write_flat(tmp_path / "out", whole, grid, ranges, (4, 6, 9))
    entry = checkpoint.open(tmp_path / "out")["exp_avg"]
    torch.testing.assert_close(entry.read(), whole, rtol=0, atol=0)
    torch.testing.assert_close(entry.read(Box((1, 2, 3), (4, 5, 8))), whole[1:4, 2:5, 3:8], rtol=0, atol=0)


@pytest.mark.parametrize("shape", [(4, 6, 8), (4, 54), (2, 6, 9)])
def test_a_shape_that_flat_ranges_do_not_fill_is_refused(tmp_path, shape):
    write_flat(tmp_path / "out", torch.randn(4, 6, 9), (2, 2, 1), 2, shape)
    with pytest.raises(CheckpointError, match=r"'exp_avg' is stored as \(2, 2, 1, 54\), which is not a grid"):
        checkpoint.open(tmp_path / "out")


def test_another_backend_of_megatron_is_named(tmp_path):
    (tmp_path / "metadata.json").write_text('{"sharded_backend": "zarr"}')
    torch.save({}, tmp_path / "common.pt")
    (tmp_path / "weight").mkdir()
    with pytest.raises(CheckpointError, match="stored by 'zarr', and only torch_dist is read"):
        checkpoint.open(tmp_path)
