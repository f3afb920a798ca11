"""ShardedTensors from nothing, from the ranks' own shards and from a whole tensor; hooks for modules with some."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist

import shardwise.tensor.sharded as plain
from shardwise.layout import Layout
from shardwise.sharded_tensor.api import Familiar, ShardedTensor, Target
from shardwise.sharded_tensor.metadata import TensorProperties
from shardwise.tensor import reshard
from shardwise.tensor.together import together

Group = dist.ProcessGroup | None


def empty(sharding_spec: Any, *size: Any, **how: Any) -> ShardedTensor:
    """Not filled; `how` is that of ShardedTensor: dtype, requires_grad, pin_memory, process_group."""
    return ShardedTensor(sharding_spec, *size, **how)


def full(sharding_spec: Any, size: Any, fill_value: Any, **how: Any) -> ShardedTensor:
    """Filled with one value."""
    return _filled(empty(sharding_spec, size, **how), lambda shard: shard.fill_(fill_value))


def zeros(sharding_spec: Any, *size: Any, **how: Any) -> ShardedTensor:
    """Filled with zeros."""
    return _filled(empty(sharding_spec, *size, **how), torch.Tensor.zero_)


def ones(sharding_spec: Any, *size: Any, **how: Any) -> ShardedTensor:
    """Filled with ones."""
    return _filled(empty(sharding_spec, *size, **how), lambda shard: shard.fill_(1))


def rand(sharding_spec: Any, *size: Any, **how: Any) -> ShardedTensor:
    """Numbers between 0 and 1, from the generator of every rank."""
    return _filled(empty(sharding_spec, *size, **how), torch.Tensor.uniform_)


def randn(sharding_spec: Any, *size: Any, **how: Any) -> ShardedTensor:
    """Numbers with mean 0 and variance 1, from the generator of every rank."""
    return _filled(empty(sharding_spec, *size, **how), torch.Tensor.normal_)


def _filled(st: ShardedTensor, fill: Callable[[torch.Tensor], Any]) -> ShardedTensor:
    with torch.no_grad():
        for shard in st.shards:
            fill(shard)
    return st


def init_from_local_shards(
    local_shards: Sequence[Any], *global_size: Any, process_group: Group = None, init_rrefs: bool = False
) -> ShardedTensor:
    """From the shards that the ranks have. Every rank of the group calls, also one that has none.

    A None in the size says that the shards lie one after the other along that dim, by rank: their offsets and the size
    are computed. What is wrong on one rank is raised on all.
    """
    return ShardedTensor._init_from_local_shards(
        local_shards, *global_size, process_group=process_group, init_rrefs=init_rrefs
    )


def shard_tensor(
    tensor: torch.Tensor | None, sharding_spec: Any, src_rank: int = 0, process_group: Group = None
) -> ShardedTensor:
    """The tensor of one rank, sharded by any spec. Every rank of the group calls.

    `src_rank` is a rank of the group. The other ranks give a tensor of the same size and dtype, or None. The shards are
    leaves for autograd, followed if the tensor is.
    """
    told = together("shard_tensor", lambda: _seen(tensor, sharding_spec, src_rank), process_group)
    source, seen = _source(told)
    kind = Familiar.by(sharding_spec, seen["size"], process_group)
    whole = Layout.replicated(seen["size"], [source])
    mine = plain.ShardedTensor(tensor.detach(), whole) if tensor is not None and dist.get_rank() == source else None
    found = reshard(mine, Target(sharding_spec), group=process_group)
    properties = TensorProperties(seen["dtype"], pin_memory=False)
    return kind.holding(found.shards if found else (), properties).requires_grad_(seen["requires_grad"])


_shard_tensor = shard_tensor

Seen = dict[str, Any]


def _seen(tensor: torch.Tensor | None, spec: Any, src_rank: int) -> Seen:
    """What this rank was asked to do, and with what."""
    asked = {"src_rank": src_rank, "sharding_spec": spec}
    if tensor is None:
        return asked
    if tensor.layout != torch.strided:
        raise ValueError(f"Only torch.strided layout is currently supported, not {tensor.layout}")
    return {**asked, "size": tensor.size(), "dtype": tensor.dtype, "requires_grad": tensor.requires_grad}


def _source(told: dict[int, Seen]) -> tuple[int, Seen]:
    """The rank that has the tensor, and what it has, if all ranks ask for the same."""
    first, asked = next(iter(told.items()))
    ranks = list(told)
    for name in ("src_rank", "sharding_spec"):
        _check_same(name, told, first)
    if asked["src_rank"] not in range(len(ranks)):
        raise ValueError(f"src_rank={asked['src_rank']} is not in the group: it has {len(ranks)} ranks")
    source = ranks[asked["src_rank"]]
    if "size" not in told[source]:
        raise ValueError(f"rank {source} is the one to give the tensor (src_rank={asked['src_rank']}), but gave None")
    for name in ("size", "dtype"):
        _check_same(name, {rank: seen for rank, seen in told.items() if name in seen}, source)
    return source, told[source]


def _check_same(name: str, told: dict[int, Seen], first: int) -> None:
    expected = told[first][name]
    for rank, seen in told.items():
        if seen[name] != expected:
            raise ValueError(
                f"{name}={seen[name]} on rank: {rank} does not match with {name}={expected} on rank: {first}"
            )


def state_dict_hook(module: torch.nn.Module, destination: dict[str, Any], prefix: str, local_metadata: Any) -> None:
    """Add ShardedTensors that are attributes of a module or its submodules to a state dict.

    To be registered by `module._register_state_dict_hook`.
    """
    for name, submodule in module.named_modules():
        for attribute, value in vars(submodule).items():
            if isinstance(value, plain.ShardedTensor):
                destination[_joined(prefix + name, attribute)] = value


def pre_load_state_dict_hook(
    module: torch.nn.Module,
    state_dict: dict[str, Any],
    prefix: str,
    local_metadata: Any,
    strict: bool,
    missing_keys: list[str],
    unexpected_keys: list[str],
    error_msgs: list[str],
) -> None:
    """Set ShardedTensors of a state dict as attributes of the module, and take them out, so that strict loading works.

    To be registered by `module._register_load_state_dict_pre_hook(pre_load_state_dict_hook, True)`.
    """
    for name, submodule in module.named_modules():
        for attribute in list(vars(submodule)):
            key = _joined(prefix + name, attribute)
            if isinstance(state_dict.get(key), plain.ShardedTensor):
                setattr(submodule, attribute, state_dict.pop(key))


def _joined(prefix: str, attribute: str) -> str:
    return f"{prefix}.{attribute}" if prefix else attribute
