"""Make ShardedTensors: empty or filled, from local shards, from a whole tensor; hooks for modules that have some."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from inspect import Parameter, signature
from typing import Any, NamedTuple, TypedDict, TypeVar, Unpack, cast

import torch
import torch.distributed as dist

import shardwise.containers.sharded as plain
from shardwise.containers.torch_sharded import PropertiesLike, ShardLike, SpecLike, is_torch_sharded
from shardwise.job.agree import together
from shardwise.layout import Layout
from shardwise.sharded_tensor.api import ShardedTensor
from shardwise.sharded_tensor.metadata import TensorProperties
from shardwise.sharded_tensor.sharding_spec import ShardingSpec
from shardwise.sharded_tensor.spec_container import Group, SpecContainer, SpecTarget
from shardwise.sharded_tensor.utils import _raise_if_mismatch
from shardwise.tensor.call import Options, Source
from shardwise.tensor.resharding import result_of, start_call
from shardwise.transports.members import owner_here

Factory = TypeVar("Factory", bound=Callable[..., ShardedTensor])
Size = int | Sequence[int]


class TensorOptions(TypedDict, total=False):
    """The options of ShardedTensor."""

    dtype: torch.dtype | None
    layout: torch.layout
    requires_grad: bool
    pin_memory: bool
    memory_format: torch.memory_format
    process_group: Group
    init_rrefs: bool


def _factory(make: Factory) -> Factory:
    """Shows the options of ShardedTensor where the function has `how`."""
    own = [p for p in signature(make).parameters.values() if p.kind is not Parameter.VAR_KEYWORD]
    options = [p for p in signature(ShardedTensor.__new__).parameters.values() if p.kind is Parameter.KEYWORD_ONLY]
    make.__signature__ = signature(make).replace(parameters=[*own, *options])  # type: ignore[attr-defined]
    return make


@_factory
def empty(sharding_spec: SpecLike, *size: Size, **how: Unpack[TensorOptions]) -> ShardedTensor:
    """Uninitialized; `how` is that of ShardedTensor: dtype, requires_grad, pin_memory, process_group."""
    return ShardedTensor(sharding_spec, *size, **how)


@_factory
def full(sharding_spec: SpecLike, size: Size, fill_value: complex, **how: Unpack[TensorOptions]) -> ShardedTensor:
    """Filled with one value."""
    return _filled(empty(sharding_spec, size, **how), lambda shard: shard.fill_(fill_value))


@_factory
def zeros(sharding_spec: SpecLike, *size: Size, **how: Unpack[TensorOptions]) -> ShardedTensor:
    """Filled with zeros."""
    return _filled(empty(sharding_spec, *size, **how), torch.Tensor.zero_)


@_factory
def ones(sharding_spec: SpecLike, *size: Size, **how: Unpack[TensorOptions]) -> ShardedTensor:
    """Filled with ones."""
    return _filled(empty(sharding_spec, *size, **how), lambda shard: shard.fill_(1))


@_factory
def rand(sharding_spec: SpecLike, *size: Size, **how: Unpack[TensorOptions]) -> ShardedTensor:
    """Numbers between 0 and 1, from the generator of every rank."""
    return _filled(empty(sharding_spec, *size, **how), torch.Tensor.uniform_)


@_factory
def randn(sharding_spec: SpecLike, *size: Size, **how: Unpack[TensorOptions]) -> ShardedTensor:
    """Numbers with mean 0 and variance 1, from the generator of every rank."""
    return _filled(empty(sharding_spec, *size, **how), torch.Tensor.normal_)


def _filled(st: ShardedTensor, fill: Callable[[torch.Tensor], object]) -> ShardedTensor:
    with torch.no_grad():
        for shard in st.shards:
            fill(shard)
    return st


def _create_tensor_from_params(
    *size: int, local_device: torch.device | str, tensor_properties: PropertiesLike
) -> torch.Tensor:
    """An uninitialized tensor with these properties.

    >>> _create_tensor_from_params(2, 3, local_device="cpu", tensor_properties=TensorProperties(torch.int8)).dtype
    torch.int8
    """
    known = tensor_properties
    how: dict[str, Any] = {"layout": known.layout, "memory_format": known.memory_format, "pin_memory": known.pin_memory}
    return torch.empty(*size, dtype=known.dtype, device=local_device, requires_grad=known.requires_grad, **how)


def init_from_local_shards(
    local_shards: Sequence[ShardLike],
    *global_size: int | Sequence[int | None] | None,
    process_group: Group = None,
    init_rrefs: bool = False,
) -> ShardedTensor:
    """From the shards that the ranks have. Every rank of the group calls, also one that has none.

    A None in the size says that the shards lie one after the other along that dim, by rank: their offsets and the size
    are computed. Of several Nones the first is that dim (`None, None`: rows, as in torch), and the others are as long
    as the shards. An error on one rank is raised on all.
    """
    return ShardedTensor._init_from_local_shards(
        local_shards, *global_size, process_group=process_group, init_rrefs=init_rrefs
    )


def shard_tensor(
    tensor: torch.Tensor | None, sharding_spec: SpecLike, src_rank: int = 0, process_group: Group = None
) -> ShardedTensor:
    """The tensor of one rank, sharded by any spec. Every rank of the group calls.

    `src_rank` is a rank of the group, as in torch. The other ranks give a tensor of the same size and dtype, or None.
    The shards are leaves for autograd, followed if the tensor is. A spec with its own `shard` method is used.
    """
    source, whole = _agreed(tensor, sharding_spec, src_rank, process_group)
    if whole.sharder is None:
        return _scattered(tensor, sharding_spec, source, whole, process_group)
    made = sharding_spec.shard(tensor, src_rank=src_rank, process_group=process_group or dist.group.WORLD)
    torchs = is_torch_sharded(made) and not isinstance(made, plain.ShardedTensor)
    return ShardedTensor.from_torch(made) if torchs else cast(ShardedTensor, made)


_shard_tensor = shard_tensor


def shard_by_metadata(
    tensor: torch.Tensor | None, sharding_spec: SpecLike, src_rank: int = 0, process_group: Group = None
) -> ShardedTensor:
    """The same by the metadata that a spec builds: how specs shard by default."""
    source, whole = _agreed(tensor, sharding_spec, src_rank, process_group)
    return _scattered(tensor, sharding_spec, source, whole, process_group)


def _scattered(
    tensor: torch.Tensor | None, sharding_spec: SpecLike, source: int, whole: Whole, process_group: Group
) -> ShardedTensor:
    def mine() -> plain.ShardedTensor | None:
        if tensor is None or owner_here(process_group) != source:
            return None
        return plain.ShardedTensor(tensor.detach(), Layout.replicated(whole.size, [source]), process_group)

    target = SpecTarget(sharding_spec, TensorProperties(whole.dtype))
    call = start_call(Source.of(mine), target, Options(), group=process_group)
    assert call is not None, "every rank of the group has a part in it"
    sharded: ShardedTensor = result_of(call.run())[0]
    return sharded.requires_grad_(whole.requires_grad)


def shard_parameter(
    module: torch.nn.Module, param_name: str, sharding_spec: SpecLike, src_rank: int = 0, process_group: Group = None
) -> None:
    """Replace a parameter of a module by a ShardedTensor of it: see `shard_tensor`. Every rank of the group calls."""
    if not hasattr(module, param_name):
        raise AttributeError(f"{type(module).__name__} has no attribute `{param_name}`")
    tensor = getattr(module, param_name)
    if not isinstance(tensor, torch.Tensor):
        raise ValueError(
            f"Expected {type(module).__name__}.{param_name} to be a Tensor, but found {type(tensor).__name__}"
        )
    sharded = shard_tensor(tensor, sharding_spec, src_rank, process_group)
    module.register_parameter(param_name, torch.nn.Parameter(sharded))


class Whole(NamedTuple):
    """A whole tensor that is to be sharded, as one rank describes it."""

    size: torch.Size
    dtype: torch.dtype
    requires_grad: bool
    layout: Layout
    sharder: str | None = None  # the class of a spec with its own `shard` method


class ShardRequest(NamedTuple):
    """What a rank passes to shard_tensor."""

    src_rank: int
    whole: Whole | None


def _agreed(tensor: torch.Tensor | None, spec: SpecLike, src_rank: int, group: Group) -> tuple[int, Whole]:
    """The global rank that has the tensor, and what it is. Every rank raises where they disagree."""
    return together("shard_tensor", lambda: ShardRequest(src_rank, _whole(tensor, spec)), _source, group=group)


def _sharder(spec: SpecLike) -> str | None:
    """The class of a spec whose `shard` method is neither ours nor torch's."""
    shard = getattr(type(spec), "shard", None)
    known = shard in (None, ShardingSpec.shard) or str(getattr(shard, "__module__", "")).startswith("torch.")
    return None if known else type(spec).__qualname__


def _whole(tensor: torch.Tensor | None, spec: SpecLike) -> Whole | None:
    if not hasattr(spec, "build_metadata"):
        raise ValueError(f"Expecting ShardingSpec but got: {type(spec)}")
    if tensor is None:
        return None
    if isinstance(tensor, plain.ShardedTensor) or not isinstance(tensor, torch.Tensor):
        raise TypeError(f"only a plain tensor can be sharded, not {tensor!r}")
    if tensor.layout != torch.strided:
        raise ValueError(f"Only torch.strided layout is currently supported, not {tensor.layout}")
    return Whole(
        tensor.size(), tensor.dtype, tensor.requires_grad, SpecContainer.by(spec, tensor.size()).layout, _sharder(spec)
    )


def _source(requests: dict[int, ShardRequest]) -> tuple[int, Whole]:
    """The rank that has the tensor, and what it is; others may have one only if it is the same."""
    (first, (src_rank, _)), *_ = requests.items()
    for rank, other in requests.items():
        _raise_unless_same("src_rank", (first, src_rank), (rank, other.src_rank))
    ranks = list(requests)
    if src_rank not in range(len(ranks)):
        raise ValueError(f"src_rank={src_rank} is not in the group: it has {len(ranks)} ranks")
    source = ranks[int(src_rank)]
    whole = requests[source].whole
    if whole is None:
        raise ValueError(f"rank {source} has to pass the tensor (src_rank={src_rank}), but passed None")
    for rank, (_, given) in requests.items():
        if given is not None:
            _raise_if_mismatch(whole.size, given.size, "size", (source, rank), is_local=False)
            _raise_if_mismatch(whole.dtype, given.dtype, "dtype", (source, rank), is_local=False)
            _raise_unless_same("sharding_spec", (source, whole.layout), (rank, given.layout))
            _raise_unless_same("sharding_spec", (source, whole.sharder), (rank, given.sharder))
    return source, whole


def _raise_unless_same(what: str, one: tuple[int, object], other: tuple[int, object]) -> None:
    if one[1] != other[1]:
        raise ValueError(f"{what}={one[1]} on rank: {one[0]} does not match with {what}={other[1]} on rank: {other[0]}")


def state_dict_hook(
    module: torch.nn.Module, destination: dict[str, object], prefix: str, local_metadata: object
) -> None:
    """Add ShardedTensors that are attributes of a module or its submodules to a state dict.

    To be registered by `module._register_state_dict_hook`.
    """
    for name, submodule in module.named_modules():
        for attribute, value in vars(submodule).items():
            if _is_sharded(value):
                destination[_key(prefix, name, attribute)] = value


def pre_load_state_dict_hook(
    module: torch.nn.Module,
    state_dict: dict[str, object],
    prefix: str,
    local_metadata: object,
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
            key = _key(prefix, name, attribute)
            if _is_sharded(state_dict.get(key)):
                setattr(submodule, attribute, state_dict.pop(key))


def _is_sharded(value: object) -> bool:
    return isinstance(value, plain.ShardedTensor) or is_torch_sharded(value)


def _key(prefix: str, module: str, attribute: str) -> str:
    """The prefix ends in a dot, if it is not empty."""
    return f"{prefix}{module}.{attribute}" if module else prefix + attribute
