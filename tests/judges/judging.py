"""One judgement: what shardwise puts into a model of vLLM, beside what vLLM's own loader puts there."""

import traceback
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import NamedTuple, TypeVar

import torch
import torch.distributed as dist
import vllm_models as vllm
from safetensors.torch import load_file
from torch import nn
from torch.distributed.tensor import DeviceMesh, Shard, distribute_tensor

import shardwise as sw

T = TypeVar("T")
FILE = "model.safetensors"


@dataclass(frozen=True)
class Judged:
    """Of one rank of an engine: parameters that differ from vLLM's own after each way, bytes, ways of names."""

    loaded: list[str]
    synced: list[str]
    moved: int
    bound: int
    needed: int  # bytes of the parameters of all ranks, with padding and replicas
    split_otherwise: list[str]  # names of which the built-in rules give this rank other cells than vLLM does
    explanation: sw.engines.Explanation


class Loaded(NamedTuple):
    """A model of vLLM that shardwise filled from files, and its own load."""

    config: vllm.VllmConfig
    model: nn.Module
    reference: nn.Module
    recorded: sw.engines.Recorded
    differences: list[str]


@dataclass(frozen=True)
class World:
    """The first ranks train; the others are the ranks of one engine."""

    trainers: int
    ranks: int

    @property
    def size(self) -> int:
        return self.trainers + self.ranks

    def join(self, config) -> None:
        """Make vLLM's groups, a mesh of the trainers and a group of the engine."""
        vllm.join(config, self.ranks)
        self.__dict__["mesh"] = DeviceMesh("cpu", list(range(self.trainers)))
        self.__dict__["engine"] = dist.new_group(list(range(self.trainers, self.size)))

    def judge(self, folder: Path) -> Judged | str | None:
        """On every rank: load and sync one model. None on trainers; the error of the first rank that has one."""
        engine = dist.get_rank() >= self.trainers
        loaded, error = attempt(lambda: self._loaded(folder) if engine else None)
        return first(error) or self._synced(folder, loaded)

    def _loaded(self, folder: Path) -> Loaded:
        """A model of the engine, filled from files."""
        reference = vllm.loaded(folder, self.ranks)
        config, model = vllm.build(folder, self.ranks)
        vllm.poison(model)
        assert set(vllm.differences(model, reference)) >= set(dict(model.named_parameters()))  # poison is noticed
        with vllm.current(config):
            recorded = sw.engines.record(model.load_weights, folder, group=self.engine)
            sw.checkpoint.load(folder, into=recorded, group=self.engine)
        return Loaded(config, model, reference, recorded, vllm.differences(model, reference))

    def _synced(self, folder: Path, engine: Loaded | None) -> Judged | None:
        """The same model, filled by trainers. None on those."""
        if engine is None:
            self._sync(trained(folder, self.mesh), None)
            return None
        vllm.poison(engine.model)
        engine.recorded.resolve()
        with vllm.current(engine.config):
            plan = self._sync(None, engine.recorded)
        bound = sum(entry.plan.lower_bound for entry in plan.links)
        synced = vllm.differences(engine.model, engine.reference)
        needed = total(engine.model, self.engine)
        otherwise = split_otherwise(engine.recorded, sw.checkpoint.Rules.of(folder, {"tp": self.ranks}), self.engine)
        return Judged(
            engine.differences, synced, plan.bytes_moved, bound, needed, otherwise, engine.recorded.explanation
        )

    def _sync(self, source, target) -> sw.ModelPlan:
        sync = sw.Resharder(source, target, cast=True)
        sync.run()
        return sync.plan


def split_otherwise(recorded, rules, group) -> list[str]:
    """The names whose cells on this rank, by the built-in rules, are not those that vLLM's loader takes."""
    rank, through = dist.get_rank(group), recorded.explanation.through_loader
    ours = {name: rules.layout(name, tensor.shape) for name, tensor in recorded.items() if name not in through}
    me = dist.get_rank()  # who owns cells of an engine is numbered as in the whole world
    return [name for name, layout in ours.items() if cells(layout, rank) != cells(recorded[name].layout, me)]


def cells(layout: sw.Layout, rank: int) -> set[tuple[int, ...]]:
    """The indices along all dims, so that boxes may be cut in any way."""
    held = torch.zeros(layout.shape, dtype=torch.bool)
    for piece in layout.pieces(rank) if rank in layout else ():
        held[piece.box.slices] = True
    return set(map(tuple, held.nonzero().tolist()))


def attempt(work: Callable[[], T]) -> tuple[T | None, str]:
    """The result, or the traceback."""
    try:
        return work(), ""
    except Exception:
        return None, traceback.format_exc()


def first(error: str) -> str:
    """The same on all ranks, so that none of them waits for one that failed."""
    errors: list[str] = [""] * dist.get_world_size()
    dist.all_gather_object(errors, error)
    return next(filter(None, errors), "")


def trained(folder: Path, mesh: DeviceMesh) -> Mapping[str, torch.Tensor]:
    """The files' tensors as FSDP2 holds them: split along the first dim."""
    return {name: distribute_tensor(value, mesh, [Shard(0)]) for name, value in load_file(folder / FILE).items()}


def total(model, group) -> int:
    """Bytes of the parameters of all ranks."""
    mine = torch.tensor(sum(prod(p.shape) * p.itemsize for p in model.parameters()))
    dist.all_reduce(mine, group=group)
    return int(mine)
