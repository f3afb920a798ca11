"""vLLM's own models, built and loaded without an engine, on the ranks of one world."""

import os
from collections.abc import Iterator
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from vllm.config import VllmConfig, set_current_vllm_config
from vllm.distributed import parallel_state
from vllm.engine.arg_utils import EngineArgs
from vllm.model_executor.model_loader import get_model_loader
from vllm.model_executor.model_loader.utils import initialize_model
from vllm.model_executor.models import registry
from vllm.utils.torch_utils import set_default_torch_dtype

# vLLM looks at a class in a new process, which takes ten seconds for each: here there is no GPU to keep away from
registry._run_in_subprocess = lambda function: function()


def config_of(folder: Path, ranks: int) -> VllmConfig:
    """The configuration of an engine for a folder, for so many ranks of tensor parallelism."""
    options: dict[str, Any] = {"enforce_eager": True, "skip_tokenizer_init": True, "max_model_len": 64}
    options["use_tqdm_on_load"] = False
    return EngineArgs(str(folder), tensor_parallel_size=ranks, dtype="bfloat16", **options).create_engine_config()


def join(config: VllmConfig, ranks: int) -> None:
    """Make vLLM's groups in this world: its ranks, so many at a time, are engines beside each other."""
    ident = [
        f"judges-{os.getppid()}-{os.getpid()}"
    ]  # names shared memory: another for every world, and the same on its ranks
    dist.broadcast_object_list(ident)
    os.environ["VLLM_DIST_IDENT"] = ident[0]
    rank, world = dist.get_rank(), dist.get_world_size()
    with set_current_vllm_config(config):
        parallel_state.init_distributed_environment(world, rank, "env://", rank, "gloo")
        parallel_state.initialize_model_parallel(ranks)


def build(folder: Path, ranks: int) -> tuple[VllmConfig, nn.Module]:
    """A model as vLLM makes it before it loads: memory for all parameters, no values."""
    config = config_of(folder, ranks)
    with set_current_vllm_config(config), set_default_torch_dtype(config.model_config.dtype):
        return config, initialize_model(config)


def current(config: VllmConfig) -> AbstractContextManager[None]:
    """Loaders of some models ask for the configuration."""
    return set_current_vllm_config(config)


def loaded(folder: Path, ranks: int) -> nn.Module:
    """A model as vLLM's own loader fills it."""
    config, model = build(folder, ranks)
    poison(model)
    with current(config):
        model.load_weights(get_model_loader(config.load_config).get_all_weights(config.model_config, model))
    return model


def tensors_of(model: nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    """All parameters, and the buffers that a state dict has."""
    kept = model.state_dict(keep_vars=True)
    yield from kept.items()
    yield from ((name, value) for name, value in model.named_parameters() if name not in kept)


def poison(model: nn.Module) -> None:
    """Fill all parameters with bytes that no weight has (a NaN in every float dtype)."""
    for _, parameter in model.named_parameters():
        parameter.data.view(torch.uint8).fill_(0xFF)


def bits(tensor: torch.Tensor) -> bytes:
    """The bytes of a tensor: unlike values, equal NaNs and zeros of equal sign."""
    return tensor.detach().contiguous().view(-1).view(torch.uint8).numpy().tobytes()


def poisoned(model: nn.Module) -> list[str]:
    """The names of parameters of which at least a cell has no value."""
    return [name for name, parameter in model.named_parameters() if parameter.isnan().any()]


def differences(model: nn.Module, reference: nn.Module) -> list[str]:
    """The names of parameters whose bits differ."""
    ours, theirs = dict(tensors_of(model)), dict(tensors_of(reference))
    assert list(ours) == list(theirs)
    return [name for name in ours if ours[name].shape != theirs[name].shape or bits(ours[name]) != bits(theirs[name])]
