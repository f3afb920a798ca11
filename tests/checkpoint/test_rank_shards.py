"""Files that every rank wrote with torch.save, with DTensors or torch's ShardedTensors in them."""

import shutil
import warnings

import pytest
import torch
from checkpoints import has, names_in, same_tensors
from torch.distributed._shard.sharded_tensor import ShardedTensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel, StateDictType
from torch.distributed.tensor import Partial, Replicate, Shard, distribute_tensor

from shardwise import checkpoint
from shardwise.errors import CheckpointError
from shardwise.testing import on_ranks

KINDS = {"local": StateDictType.LOCAL_STATE_DICT, "sharded": StateDictType.SHARDED_STATE_DICT}


def layers():
    torch.manual_seed(0)
    return torch.nn.Sequential(torch.nn.Linear(6, 5), torch.nn.Linear(5, 3, bias=False))


def whole():
    torch.manual_seed(1)
    return {"rows": torch.randn(7, 4), "blocks": torch.randn(5, 6).to(torch.bfloat16), "copies": torch.randn(3)}


def gathered(tensor, rank):
    """By torch itself, on the first rank."""
    if not isinstance(tensor, ShardedTensor):
        return tensor
    out = torch.zeros(tensor.size()) if rank == 0 else None
    tensor.gather(0, out)
    return out


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """A training with FSDP1 in both ways, and DTensors of every kind; with the tensors that a training has."""
    folder = tmp_path_factory.mktemp("ranks")
    for name in (*KINDS, "dtensors"):
        (folder / name).mkdir()

    def save(rank):
        warnings.simplefilter("ignore")
        model = FullyShardedDataParallel(layers(), device_id=torch.device("cpu"), use_orig_params=True)
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
        model(torch.ones(2, 6)).square().sum().backward()
        optimizer.step()
        with FullyShardedDataParallel.state_dict_type(model, StateDictType.FULL_STATE_DICT):
            weights = {name: one.detach().clone() for name, one in model.state_dict().items()}
        for name, kind in KINDS.items():
            with FullyShardedDataParallel.state_dict_type(model, kind):
                torch.save(model.state_dict(), folder / name / f"model_rank{rank}.bin")
                state = FullyShardedDataParallel.optim_state_dict(model, optimizer)
                torch.save({"optimizer": state, "step": 3}, folder / name / f"optimizer_rank{rank}.bin")
        states = {
            f"optimizer.state.{n}.{k}": gathered(v, rank) for n, one in state["state"].items() for k, v in one.items()
        }
        mesh, tensors = init_device_mesh("cpu", (2, 2)), whole()
        ways = {"rows": (Shard(0), Shard(0)), "blocks": (Shard(1), Shard(0)), "copies": (Replicate(), Replicate())}
        split = {name: distribute_tensor(tensors[name], mesh, list(way)) for name, way in ways.items()}
        torch.save({"model": split, "step": 3, "plain": torch.arange(4)}, folder / "dtensors" / f"{rank}.pt")
        torch.save(
            {"sums": distribute_tensor(torch.ones(2), mesh, [Partial(), Replicate()])}, folder / f"sums{rank}.pt"
        )
        return weights, states

    return folder, *on_ranks(4, save)[0]


def test_sharded_state_dicts_of_fsdp1_are_read_whole(saved):
    folder, weights, states = saved
    found = checkpoint.open(folder / "sharded")
    same_tensors({name: entry.read() for name, entry in found.items()}, {**weights, **states})
    assert found.objects["step"] == 3
    assert found.objects["optimizer.param_groups.0.lr"] == 0.01


def test_local_state_dicts_of_fsdp1_are_flat_ranges(saved):
    folder, weights, states = saved
    found = checkpoint.open(folder / "local")
    flat = found["_flat_param"].read()
    same_tensors({name: found[name].read() for name in states}, states)
    for value in weights.values():  # the order of parameters is not in the file
        assert any(torch.equal(part, value.flatten()) for part in flat.unfold(0, value.numel(), 1))
    assert found["_flat_param"].shards == 4


def test_dtensors_of_every_rank_are_put_together(saved, tmp_path):
    expected = {**{f"model.{name}": value for name, value in whole().items()}, "plain": torch.arange(4)}
    has(saved[0] / "dtensors", expected, {"step": 3})
    checkpoint.convert(saved[0] / "dtensors", tmp_path / "out.pt")
    has(tmp_path / "out.pt", expected, {"step": 3})


def test_the_file_of_one_rank_and_missing_ones_are_refused(saved, tmp_path):
    folder = shutil.copytree(saved[0] / "dtensors", tmp_path / "copy")
    with pytest.raises(CheckpointError, match=r"no file has .* of 'model.rows' .* 2\.pt is the file of one rank: open"):
        checkpoint.open(folder / "2.pt")
    (folder / names_in(folder)[3]).unlink()
    with pytest.raises(CheckpointError, match=r"no file has \[6:7, 0:4\] of 'model.rows' .*: shards are missing"):
        checkpoint.open(folder)


def test_files_of_two_checkpoints_are_refused(saved, tmp_path):
    folder = shutil.copytree(saved[0] / "dtensors", tmp_path / "copy")

    def save(rank):
        split = distribute_tensor(torch.zeros(9, 4), init_device_mesh("cpu", (2,)), [Shard(0)])
        torch.save({"model": {"rows": split}}, folder / f"{rank + 4}.pt")

    on_ranks(2, save)
    with pytest.raises(CheckpointError, match=r"'model.rows' is torch.float32 of shape \(9, 4\), but .* different"):
        checkpoint.open(folder)


def test_terms_of_a_sum_are_refused(saved):
    with pytest.raises(CheckpointError, match=r"sums0\.pt.*placement Partial is not Shard or Replicate"):
        checkpoint.open(saved[0] / "sums0.pt")
