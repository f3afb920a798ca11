"""Tiny trainings in DeepSpeed, whose checkpoints are judged."""

import os
import sys
from dataclasses import dataclass, field
from pathlib import Path

import deepspeed
import torch
import torch.distributed as dist
from deepspeed.utils import safe_get_full_fp32_param, safe_get_full_optimizer_state
from torch import nn

STATES = ("exp_avg", "exp_avg_sq")


@dataclass(frozen=True)
class Training:
    """How a model is trained."""

    stage: int
    ranks: int
    options: dict[str, object] = field(default_factory=dict)  # of zero_optimization
    dtype: str = "bf16"
    groups: int = 2
    config: dict[str, object] = field(default_factory=dict)  # more of it


class Model(nn.Module):
    """Odd sizes, so that flat groups need padding; tied embeddings, a frozen parameter, and buffers."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(13, 5)
        self.body = nn.Sequential(nn.Linear(5, 7), nn.Linear(7, 5, bias=False))
        self.norm = nn.LayerNorm(5)
        self.scale = nn.Parameter(torch.tensor([1.5]))
        self.frozen = nn.Parameter(torch.linspace(-1, 1, 11), requires_grad=False)
        self.register_buffer("shift", torch.linspace(0, 1, 5))
        self.register_buffer("seen", torch.tensor([3, 1]))
        self.head = nn.Linear(5, 13, bias=False)
        self.head.weight = self.embedding.weight

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        """A loss."""
        hidden = self.norm(self.body(self.embedding(tokens))) * self.scale + self.frozen[:5]
        hidden = hidden + self.shift.to(hidden.dtype)
        return nn.functional.cross_entropy(self.head(hidden).float(), tokens)


def engine_of(training: Training, **config):
    """An engine of DeepSpeed, on every rank."""
    os.environ["LOCAL_RANK"] = str(dist.get_rank())
    sys.modules["deepspeed.comm.torch"].build_shm_op = lambda: None  # it would be compiled
    torch.manual_seed(7)
    settings = {
        "train_micro_batch_size_per_gpu": 4,
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-2, "torch_adam": True}},
        "zero_optimization": {"stage": training.stage, **training.options},
        "zero_force_ds_cpu_optimizer": False,
        **({training.dtype: {"enabled": True}} if training.dtype else {}),
        **training.config,
        **config,
    }
    model = Model()
    wide = [p for p in model.parameters() if p.requires_grad and p.ndim > 1]
    other = [p for p in model.parameters() if p.requires_grad and p.ndim < 2]
    groups = [{"params": wide}, {"params": other, "weight_decay": 0.0}] if training.groups == 2 else wide + other
    engine, *_ = deepspeed.initialize(model=model, model_parameters=groups, config=settings)
    return engine


def train(engine, steps: int = 3) -> None:
    """Some steps with different data on every rank."""
    generator = torch.Generator().manual_seed(dist.get_rank())
    for _ in range(steps):
        loss = engine(torch.randint(13, (4,), generator=generator))
        engine.backward(loss)
        engine.step()


def states(engine) -> dict[str, torch.Tensor]:
    """What DeepSpeed itself says of all parameters: masters and moments, whole, by the names that we give them."""
    found, optimizer = dict[str, torch.Tensor](), engine.optimizer
    if hasattr(optimizer, "_lazy_init_hp_params_optimizer_state"):  # what it links before the first step is empty
        optimizer._hp_optimizer_states_linked = False
        optimizer._lazy_init_hp_params_optimizer_state()
    for name, parameter in engine.module.named_parameters():
        if parameter.requires_grad:
            found[f"model.{name}"] = safe_get_full_fp32_param(parameter)
            found |= {f"optimizer.state.{name}.{key}": safe_get_full_optimizer_state(parameter, key) for key in STATES}
    return {name: value.clone() for name, value in found.items()}


def write(training: Training, folder: Path):
    """On every rank: train, save, and return what was saved."""
    engine = engine_of(training)
    train(engine)
    engine.save_checkpoint(str(folder), client_state={"tokens": 12})
    return states(engine)


def resume(training: Training, folder: Path):
    """On every rank: load a universal checkpoint, and return what was loaded; then train on."""
    engine = engine_of(training, checkpoint={"load_universal": True})
    _, client = engine.load_checkpoint(str(folder))
    loaded = states(engine)
    train(engine, 1)
    return loaded, client["tokens"]
