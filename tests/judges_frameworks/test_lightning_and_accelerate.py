"""Lightning's and accelerate's own code writes checkpoints, and loads what they became."""

import shutil
import warnings
from argparse import Namespace
from contextlib import chdir
from types import SimpleNamespace

import accelerate
import lightning
import pytest
import torch
from accelerate.utils import fsdp_utils
from lightning.fabric.strategies.fsdp import FSDPStrategy
from lightning.fabric.strategies.model_parallel import _load_checkpoint, _save_checkpoint
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict, get_optimizer_state_dict
from torch.distributed.fsdp import FullyShardedDataParallel, StateDictType, fully_shard
from torch.distributed.tensor import DTensor

from shardwise import checkpoint
from shardwise.errors import CheckpointError
from shardwise.state.traverse import flatten_state_dict
from shardwise.testing import on_ranks

VALUES = {"epoch": 3, "best": torch.tensor(0.5), "callbacks": {"stop": {"patience": 2}}, "args": Namespace(lr=0.1)}


class Module(lightning.LightningModule):
    """Two layers, whose settings are a Namespace."""

    def __init__(self, args):
        super().__init__()
        self.save_hyperparameters()
        self.net = torch.nn.Sequential(torch.nn.Linear(6, args.width), torch.nn.Linear(args.width, 1))

    def training_step(self, batch, index):
        loss = self.net(batch[0]).square().sum()
        self.log("loss", loss)
        return loss

    def configure_optimizers(self):
        optimizer = torch.optim.AdamW(self.parameters(), lr=0.01)
        return [optimizer], [torch.optim.lr_scheduler.StepLR(optimizer, 1)]


def layers():
    torch.manual_seed(0)
    return torch.nn.Sequential(torch.nn.Linear(6, 5), torch.nn.Linear(5, 3, bias=False))


def stepped(model):
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    model(torch.ones(2, 6)).square().sum().backward()
    optimizer.step()
    return optimizer


def whole(state):
    """The whole tensors of a nested state dict, by dotted names."""
    flat, _ = flatten_state_dict(state)
    found = {name: value for name, value in flat.items() if isinstance(value, torch.Tensor)}
    return {name: value.full_tensor() if isinstance(value, DTensor) else value for name, value in found.items()}


def same(found, expected):
    assert sorted(found) == sorted(expected)
    for name, value in expected.items():
        torch.testing.assert_close(found[name].read(), value.detach(), rtol=0, atol=0)


def trainer(folder, epochs):
    options = {"logger": False, "enable_progress_bar": False, "enable_model_summary": False, "accelerator": "cpu"}
    stop = lightning.pytorch.callbacks.EarlyStopping("loss")
    keep = lightning.pytorch.callbacks.ModelCheckpoint(dirpath=folder, monitor="loss")
    return lightning.Trainer(max_epochs=epochs, callbacks=[stop, keep], **options)


@pytest.fixture(autouse=True)
def no_safe_globals():
    """Other frameworks tell torch that a Namespace is safe, and shardwise would rebuild it."""
    known = torch.serialization.get_safe_globals()
    torch.serialization.clear_safe_globals()
    yield
    torch.serialization.add_safe_globals(known)


@pytest.fixture
def data():
    dataset = torch.utils.data.TensorDataset(torch.arange(24.0).reshape(4, 6) / 24)
    return torch.utils.data.DataLoader(dataset)


@pytest.mark.judged("lightning", "`.ckpt`", "read and written", "a Trainer that resumes")
@pytest.mark.filterwarnings("ignore")
def test_a_ckpt_is_read_and_goes_on_after_a_conversion(tmp_path, data):
    with chdir(tmp_path):
        model, first = Module(Namespace(width=4)), trainer(tmp_path / "kept", 2)
        first.fit(model, data)
        first.save_checkpoint("last.ckpt")
        found = checkpoint.open("last.ckpt")
        judge = torch.load("last.ckpt", weights_only=False)
        same(found, whole(judge))
        assert found.objects["epoch"] == judge["epoch"]
        assert found.objects["hyper_parameters.args"].name == "argparse.Namespace"
        made = checkpoint.convert("last.ckpt", "again.pt", objects="carry")
        assert not checkpoint.verify("last.ckpt", made)
        shutil.move("again.pt", "again.ckpt")
        back = Module.load_from_checkpoint("again.ckpt", weights_only=False)
        same(checkpoint.open("again.ckpt"), whole(judge))
        torch.testing.assert_close(back.state_dict(), model.state_dict(), rtol=0, atol=0)
        second = trainer(tmp_path / "kept", 3)
        second.fit(back, data, ckpt_path="again.ckpt", weights_only=False)
        assert second.current_epoch == 3


@pytest.mark.judged("lightning", "folders of FSDPStrategy and ModelParallelStrategy", "read", "the model, bit-for-bit")
def test_folders_of_fsdp_strategy_and_model_parallel_strategy_are_read_whole(tmp_path):
    def save(rank):
        warnings.simplefilter("ignore")
        model = fully_shard(layers(), mesh=torch.distributed.device_mesh.init_device_mesh("cpu", (2,)))
        optimizer = stepped(model)
        state = {"model": model, "optimizer": optimizer, **VALUES}
        _save_checkpoint(tmp_path / "parallel", state, full_state_dict=False, rank=rank)
        old = FullyShardedDataParallel(layers(), device_id=torch.device("cpu"), use_orig_params=True)
        strategy = SimpleNamespace(_state_dict_type="sharded", global_rank=rank, broadcast=lambda path: path)
        state = {"model": old, "optimizer": stepped(old), **VALUES}
        FSDPStrategy.save_checkpoint(strategy, tmp_path / "fsdp", state)
        weights, states = get_model_state_dict(model), get_optimizer_state_dict(model, optimizer)
        return whole({"model": weights, "optimizer": states, **VALUES})

    expected = on_ranks(2, save)[0]
    for path in ("parallel", "fsdp"):
        found = checkpoint.open(tmp_path / path)
        assert found.format == "lightning"
        same(found, expected)
        assert (found.objects["epoch"], found.objects["callbacks.stop.patience"]) == (3, 2)
        assert found.objects["args"].state == {"lr": 0.1}
    made = checkpoint.convert(tmp_path / "parallel", tmp_path / "model.safetensors", select="model.*")
    same(made, {name: value for name, value in expected.items() if name.startswith("model.")})

    def load(rank):
        model = fully_shard(layers(), mesh=torch.distributed.device_mesh.init_device_mesh("cpu", (2,)))
        for parameter in model.parameters():
            parameter.data.zero_()
        state = {"model": get_model_state_dict(model), "epoch": 0}
        checkpoint.load(tmp_path / "fsdp", into=state)
        return whole(state["model"]), state["epoch"]

    tensors, epoch = on_ranks(2, load)[1]
    torch.testing.assert_close(
        tensors, {name.removeprefix("model."): one for name, one in expected.items() if name.startswith("model.")}
    )
    assert epoch == 3


@pytest.mark.judged("lightning", "folder of ModelParallelStrategy", "written", "its own load")
def test_lightning_loads_a_folder_that_was_converted(tmp_path):
    def save(rank):
        warnings.simplefilter("ignore")
        model = fully_shard(layers(), mesh=torch.distributed.device_mesh.init_device_mesh("cpu", (2,)))
        state = {"model": model, "optimizer": stepped(model), "epoch": 3}
        _save_checkpoint(tmp_path / "parallel", state, full_state_dict=False, rank=rank)
        return whole(get_model_state_dict(model))

    expected = on_ranks(2, save)[0]
    checkpoint.convert(tmp_path / "parallel", tmp_path / "made", format="dcp")
    shutil.copy(tmp_path / "parallel" / "meta.pt", tmp_path / "made")

    def load(rank):
        warnings.simplefilter("ignore")
        model = fully_shard(layers(), mesh=torch.distributed.device_mesh.init_device_mesh("cpu", (2,)))
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
        for parameter in model.parameters():
            parameter.data.zero_()
        _load_checkpoint(tmp_path / "made", {"model": model, "optimizer": optimizer, "epoch": 0})
        return whole(get_model_state_dict(model)), len(optimizer.state)

    tensors, states = on_ranks(2, load)[1]
    torch.testing.assert_close(tensors, expected, rtol=0, atol=0)
    assert states == 3


@pytest.mark.judged("accelerate", "folders of FSDP 1 and 2", "read", "the model and the optimizer, bit-for-bit")
@pytest.mark.parametrize("version", [1, 2])
def test_folders_of_accelerate_are_one_checkpoint(tmp_path, version):
    def save(rank):
        warnings.simplefilter("ignore")
        model = layers()
        if version == 2:
            model = fully_shard(model, mesh=torch.distributed.device_mesh.init_device_mesh("cpu", (2,)))
        else:
            model = FullyShardedDataParallel(model, device_id=torch.device("cpu"), use_orig_params=True)
        optimizer = stepped(model)
        accelerate.PartialState(cpu=True)  # its messages need one
        plugin = accelerate_plugin(version)
        accelerator = SimpleNamespace(num_processes=2, process_index=rank, wait_for_everyone=lambda: None)
        fsdp_utils.save_fsdp_model(plugin, accelerator, model, str(tmp_path))
        fsdp_utils.save_fsdp_optimizer(plugin, accelerator, optimizer, model, str(tmp_path))
        full = StateDictOptions(full_state_dict=True)
        states = get_optimizer_state_dict(model, optimizer, options=full)
        return whole({"model": get_model_state_dict(model, options=full), "optimizer": states})

    expected = on_ranks(2, save)[0]
    torch.save({"last_epoch": 1}, tmp_path / "scheduler.bin")
    found = checkpoint.open(tmp_path)
    assert found.format == "accelerate (optimizer_0, pytorch_model_fsdp_0)"
    same(found, expected)
    made = checkpoint.convert(tmp_path, tmp_path / "out", format="dcp")
    same(made, expected)
    shutil.copytree(tmp_path / "pytorch_model_fsdp_0", tmp_path / "pytorch_model_fsdp_1")
    with pytest.raises(CheckpointError, match=r"in both pytorch_model_fsdp_0 and pytorch_model_fsdp_1: open one"):
        checkpoint.open(tmp_path)


def accelerate_plugin(version):
    from accelerate.utils import FullyShardedDataParallelPlugin

    plugin = FullyShardedDataParallelPlugin(fsdp_version=version, state_dict_type="SHARDED_STATE_DICT")
    assert plugin.state_dict_type == StateDictType.SHARDED_STATE_DICT
    return plugin
