"""Whole modules sharded by a plan: the names of torch's sharding_plan and sharder."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TypeVar, cast

import torch

from shardwise.containers.torch_sharded import SpecLike, is_spec
from shardwise.sharded_tensor.api import ShardedTensor
from shardwise.sharded_tensor.factories import shard_parameter
from shardwise.sharded_tensor.sharding_spec import Group, ShardingSpec

T = TypeVar("T")


class Sharder(ABC):
    """Makes a sharded module of a module."""

    @abstractmethod
    def shard(self, module: torch.nn.Module) -> torch.nn.Module:
        """The module that takes its place."""


@dataclass
class ShardingPlan:
    """How the parts of a module are sharded, by name: parameters by specs, submodules by Sharders.

    `output_plan`: modules whose output is resharded by a spec; "" is the root. `return_local_tensor`: modules whose
    output becomes this rank's shard.
    """

    plan: dict[str, ShardingSpec | Sharder]
    output_plan: dict[str, ShardingSpec] | None = None
    return_local_tensor: list[str] | None = None


class ShardingPlanner(ABC):
    """Makes plans for modules."""

    @abstractmethod
    def build_plan(self, module: torch.nn.Module) -> ShardingPlan:
        """How to shard it."""


def shard_module(module: torch.nn.Module, plan: ShardingPlan, src_rank: int = 0, process_group: Group = None) -> None:
    """Shard a module in place by a plan, ours or torch's. Every rank of the group calls. The plan is checked first."""
    outputs = plan.output_plan or {}
    _check_plan(module, plan.plan, outputs)
    for name, how in plan.plan.items():
        path, _, last = name.rpartition(".")
        parent = module.get_submodule(path)
        if is_spec(how):
            shard_parameter(parent, last, how, src_rank=src_rank, process_group=process_group)
        else:
            setattr(parent, last, cast(Sharder, how).shard(module.get_submodule(name)))
    for path, spec in outputs.items():
        _reshard_output(module.get_submodule(path), spec)
    for path in plan.return_local_tensor or ():
        _collect_local_shard(module.get_submodule(path))


def _check_plan(module: torch.nn.Module, plan: Mapping[str, object], outputs: Mapping[str, object]) -> None:
    sharders = [name for name, how in plan.items() if not is_spec(how)]
    for name in sharders:
        if not hasattr(plan[name], "shard"):
            raise TypeError(f"Only `ShardingSpec` and `Sharder` are supported to shard '{name}', found {plan[name]!r}")
        if not name:
            raise KeyError("Module path must not be empty for custom sharder!")
        module.get_submodule(name)
    for name in [name for name in plan if name not in sharders]:
        path = name.rpartition(".")[0]
        module.get_submodule(path)
        inside = [sharder for sharder in sharders if f"{path}.".startswith(f"{sharder}.")]
        if inside:
            raise RuntimeError(
                f"ShardingPlan is in-valid, trying to shard a parameter: {name}, but there's already a Sharder entry "
                f"for module {inside[0]}, parameter sharding should not conflict with the submodule tree that a "
                f"Sharder is working with!"
            )
    for name, spec in outputs.items():
        if not is_spec(spec):
            raise TypeError(f"Only `ShardingSpec` is supported as output_plan for '{name}', found {spec!r}")


def _reshard_output(module: torch.nn.Module, resharding_spec: SpecLike) -> torch.nn.Module:
    """Reshard what the module returns, where that is a ShardedTensor."""

    def hook(_: torch.nn.Module, __: object, output: T) -> T | ShardedTensor:
        return output.reshard(resharding_spec) if isinstance(output, ShardedTensor) else output

    module.register_forward_hook(hook)
    return module


def _collect_local_shard(module: torch.nn.Module) -> torch.nn.Module:
    """Return this rank's shard where the module returns a ShardedTensor; a dim in chunks of one is dropped."""

    def hook(_: torch.nn.Module, __: object, output: T) -> T | torch.Tensor:
        if not isinstance(output, ShardedTensor):
            return output
        local, dim = output.local_tensor(), getattr(output.sharding_spec(), "dim", None)
        return local.squeeze(dim) if dim is not None and local.size(dim) == 1 else local

    module.register_forward_hook(hook)
    return module
