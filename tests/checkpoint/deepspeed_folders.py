"""Folders as DeepSpeed's ZeRO writes them, made with torch alone: for tests of their layout, and of damaged ones."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from math import ceil, prod
from pathlib import Path

import torch

KEYS = ("exp_avg", "exp_avg_sq")
Groups = Sequence[Mapping[str, tuple[int, ...]]]


class Fragment:
    """Takes the place of DeepSpeed's fragment_address: files name its class, which readers do not import."""

    def __init__(self, start: int, numel: int) -> None:
        self.start, self.numel = start, numel


@dataclass
class Zero:
    """A training: groups of parameters with random values, which is saved at some step."""

    groups: Groups
    stage: int
    ranks: int
    step: int = 3
    frozen: Mapping[str, tuple[int, ...]] = field(default_factory=dict)
    ties: Mapping[str, str] = field(default_factory=dict)
    seed: int = 0
    tensors: dict[str, torch.Tensor] = field(init=False)  # by the names that they have in shardwise

    def __post_init__(self) -> None:
        generator = torch.Generator().manual_seed(self.seed)
        trained = {name: shape for group in self.groups for name, shape in group.items()}
        self.tensors = {f"model.{n}": torch.randn(shape, generator=generator) for n, shape in trained.items()}
        self.tensors |= {f"model.{n}": torch.ones(shape, dtype=torch.bfloat16) for n, shape in self.frozen.items()}
        for name, shape in trained.items():
            states = {key: torch.rand(shape, generator=generator) for key in KEYS} | {
                "step": torch.tensor(float(self.step))
            }
            self.tensors |= {f"optimizer.state.{name}.{key}": value for key, value in states.items()}
        self.tensors |= {f"model.{name}": self.tensors[f"model.{owner}"] for name, owner in self.ties.items()}
        self.tensors["model.shift"] = torch.arange(4.0)

    def save(self, folder: Path, *, latest: bool = True) -> Path:
        """Write the files of all ranks. Returns the folder of the step."""
        step = folder / f"global_step{self.step}"
        step.mkdir(parents=True)
        if latest:
            (folder / "latest").write_text(step.name)
        for rank in range(self.ranks):
            torch.save(self.part(rank), step / f"bf16_zero_pp_rank_{rank}_mp_rank_00_optim_states.pt")
            if self.stage == 3:
                torch.save(self.model(rank), step / f"zero_pp_rank_{rank}_mp_rank_00_model_states.pt")
        if self.stage < 3:
            torch.save(self.model(0), step / "mp_rank_00_model_states.pt")
        return step

    def model(self, rank: int) -> dict[str, object]:
        """The model states."""
        weights = {n: self.tensors[f"model.{n}"] for group in self.groups for n in group}
        module = {name: value.bfloat16() for name, value in weights.items()}
        module |= {name: module[owner] for name, owner in self.ties.items()}
        module |= {name: self.tensors[f"model.{name}"] for name in self.frozen}
        fragments = {name: module[name] for name in self.frozen}
        if self.stage == 3:
            fragments = {name: padded_part(value, rank, self.ranks) for name, value in fragments.items()}
            module = {name: value.new_empty(0) for name, value in module.items()}
        return {
            "module": {**module, "shift": self.tensors["model.shift"]},
            "buffer_names": ["shift"],
            "optimizer": None,
            "param_shapes": [{n: torch.Size(shape) for n, shape in group.items()} for group in self.groups],
            "frozen_param_shapes": {n: torch.Size(shape) for n, shape in self.frozen.items()},
            "frozen_param_fragments": fragments,
            "shared_params": dict(self.ties) if rank == 0 else {},
            "global_steps": self.step,
            "skipped_steps": 0,
            "lr_scheduler": None,
            "dp_world_size": self.ranks,
            "mp_world_size": 1,
            "tokens": 12,
        }

    def part(self, rank: int) -> dict[str, object]:
        """The part of the optimizer that a rank has."""
        flat = [{key: self.flat(group, key, rank) for key in ("fp32", *KEYS)} for group in self.groups]
        states = {
            at: {key: one[key] for key in KEYS} | {"step": torch.tensor(float(self.step))}
            for at, one in enumerate(flat)
        }
        settings = [{"lr": 0.1 / self.step, "betas": (0.9, 0.99), "params": [at]} for at in range(len(flat))]
        inner, masters = {"state": states, "param_groups": settings}, [one["fp32"] for one in flat]
        if self.stage == 3:
            state = {"optimizer_state_dict": inner, "fp32_flat_groups": masters, "partition_count": self.ranks}
        else:
            last = rank == self.ranks - 1
            lean = [m[:-p] if last and (p := self.padding(g)) else m for m, g in zip(masters, self.groups, strict=True)]
            state = {"base_optimizer_state": inner, "single_partition_of_fp32_groups": lean}
            state |= {"partition_count": [self.ranks] * len(flat), "param_slice_mappings": self.fragments(rank)}
        return {"optimizer_state_dict": {**state, "zero_stage": self.stage, "overflow": False}, "ds_config": {}}

    def padding(self, group: Mapping[str, tuple[int, ...]]) -> int:
        """Of ZeRO-1 and 2, at the end of a group."""
        return -sum(map(prod, group.values())) % (2 * self.ranks)

    def flat(self, group: Mapping[str, tuple[int, ...]], key: str, rank: int) -> torch.Tensor:
        """The partition of a group on a rank, with its padding."""
        names = [f"model.{name}" if key == "fp32" else f"optimizer.state.{name}.{key}" for name in group]
        values = [self.tensors[name].reshape(-1) for name in names]
        if self.stage == 3:
            return torch.cat([padded_part(value, rank, self.ranks) for value in values])
        return torch.cat([*values, torch.zeros(self.padding(group))]).chunk(self.ranks)[rank].clone()

    def fragments(self, rank: int) -> list[dict[str, Fragment]]:
        """Where each parameter is in the partition of a rank, as DeepSpeed lists it."""
        found = list[dict[str, Fragment]]()
        for group in self.groups:
            size, at, here = (sum(map(prod, group.values())) + self.padding(group)) // self.ranks, 0, {}
            for name, shape in group.items():
                lo, hi = max(at, rank * size), min(at + prod(shape), (rank + 1) * size)
                here |= {name: Fragment(lo - rank * size, hi - lo)} if lo < hi else {}
                at += prod(shape)
            found.append(here)
        return found


def padded_part(value: torch.Tensor, rank: int, ranks: int) -> torch.Tensor:
    """The part of a parameter that a rank of ZeRO-3 has."""
    size = ceil(value.numel() / ranks)
    padded = torch.cat([value.reshape(-1), value.new_zeros(size * ranks - value.numel())])
    return padded[rank * size : (rank + 1) * size].clone()
