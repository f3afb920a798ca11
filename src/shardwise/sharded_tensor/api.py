"""ShardedTensor under torch's names: made from specs, from local shards and from whole tensors."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, replace
from typing import Any
from warnings import warn

import torch
import torch.distributed as dist

import shardwise.tensor.sharded as plain
from shardwise.dtensor import Shards, metadata_layout, owner_of, shards_of, torchs_sharded
from shardwise.sharded_tensor.metadata import Shard, ShardedTensorMetadata, ShardMetadata, TensorProperties, same_device
from shardwise.sharded_tensor.sharding_spec import _infer_sharding_spec_from_shards_metadata
from shardwise.sharded_tensor.utils import (
    _flatten_tensor_size,
    _parse_and_validate_remote_device,
    _raise_if_mismatch,
    _validate_output_tensor_for_gather,
    build_global_metadata,
    build_metadata_from_local_shards,
)
from shardwise.tensor import reshard
from shardwise.tensor.resharding import gather
from shardwise.tensor.together import together

Tensors = Sequence[torch.Tensor]
Group = dist.ProcessGroup | None


@dataclass(frozen=True)
class Familiar(Shards):
    """How such a ShardedTensor lies."""

    @classmethod
    def by(cls, spec: Any, shape: Sequence[int], group: Group = None) -> Familiar:
        """How a tensor of that shape lies by a spec, ours or torch's."""
        return cls.of_metadata(spec.build_metadata(torch.Size(shape), TensorProperties()), spec, group)

    @classmethod
    def of_metadata(cls, metadata: Any, spec: Any, group: Group) -> Familiar:
        """How a tensor with that metadata lies."""
        return cls(metadata_layout(metadata), ShardedTensorMetadata.of(metadata), spec, group)

    def closed(self, tensors: Tensors) -> ShardedTensor | None:
        """A ShardedTensor; None on a rank that holds nothing."""
        return self.holding(tensors) if tensors else None

    def on(self, device: torch.device) -> Familiar:
        """The same on other devices. Of those of other ranks only the kind is known."""
        me = dist.get_rank()
        shards = [_placed(m, device if owner_of(m) == me else device.type) for m in self.metadata.shards_metadata]
        spec = _infer_sharding_spec_from_shards_metadata(shards)
        return replace(self, metadata=replace(self.metadata, shards_metadata=shards), spec=spec)

    def holding(self, tensors: Tensors, properties: TensorProperties | None = None) -> ShardedTensor:
        """A ShardedTensor, also on a rank that holds nothing: that one is told the properties."""
        return ShardedTensor.__new__(ShardedTensor)._become(self, tensors, properties)


def _placed(shard: ShardMetadata, device: torch.device | str) -> ShardMetadata:
    assert shard.placement is not None, "it has an owner"
    name = shard.placement.worker_name() or f"rank:{shard.placement.rank()}"
    return ShardMetadata(shard.shard_offsets, shard.shard_sizes, f"{name}/{device}")


@dataclass(frozen=True)
class Target:
    """A spec, ours or torch's, asked for as a ShardedTensor of ours."""

    spec: Any

    def kind_for(self, shape: Sequence[int], group: Group) -> Familiar:
        """How it lies."""
        return Familiar.by(self.spec, shape, group)


class ShardedTensor(plain.ShardedTensor):
    """A tensor that is sharded by a spec: `ShardedTensor(spec, 8, 6)` has shards of this rank that are not filled.

    It is a `shardwise.ShardedTensor` that also knows its spec and metadata, and has the methods that torch's has.
    """

    _local_shards: list[Shard]
    _metadata: ShardedTensorMetadata
    _sharding_spec: Any

    def __init__(
        self,
        sharding_spec: Any,
        *size: Any,
        dtype: torch.dtype | None = None,
        layout: torch.layout = torch.strided,
        requires_grad: bool = False,
        pin_memory: bool = False,
        memory_format: torch.memory_format = torch.contiguous_format,
        process_group: Group = None,
        init_rrefs: bool = False,
    ) -> None:
        if not hasattr(sharding_spec, "build_metadata"):
            raise ValueError(f"Expecting ShardingSpec but got: {type(sharding_spec)}")
        _refuse(init_rrefs, layout, memory_format)
        dtype = dtype or torch.get_default_dtype()
        kind = Familiar.by(sharding_spec, _flatten_tensor_size(size), process_group)
        _check_placements(kind.metadata, process_group)
        how: dict[str, Any] = {"dtype": dtype, "requires_grad": requires_grad, "pin_memory": pin_memory}
        tensors = [torch.empty(m.shard_sizes, device=m.placement.device(), **how) for m in kind.mine()]
        self._become(kind, tensors, TensorProperties(**how))

    def _become(self, kind: Familiar, tensors: Tensors, properties: TensorProperties | None = None) -> ShardedTensor:
        """Take over what another is."""
        properties = TensorProperties.create_from_tensor(tensors[0]) if tensors else properties
        self._metadata = replace(kind.metadata, tensor_properties=properties or kind.metadata.tensor_properties)
        self._local_shards = [Shard(tensor, m) for tensor, m in zip(tensors, kind.mine(), strict=True)]
        self._sharding_spec, self.layout, self.group = kind.spec, kind.layout, kind.group
        return self

    # --- made from what the ranks have -------------------------------------------------------------------------------

    @classmethod
    def _init_from_local_shards(
        cls, local_shards: Sequence[Any], *global_size: Any, process_group: Group = None, init_rrefs: bool = False
    ) -> ShardedTensor:
        _refuse(init_rrefs)
        told = together(
            "init_from_local_shards", lambda: _said(local_shards, global_size, process_group), process_group
        )
        metadata = _agreed(told)
        spec = _infer_sharding_spec_from_shards_metadata(metadata.shards_metadata)
        kind = Familiar.of_metadata(metadata, spec, process_group)
        return kind.holding([shard.tensor for shard in local_shards])

    @classmethod
    def _init_from_local_tensor(
        cls,
        local_tensor: torch.Tensor | Tensors,
        sharding_spec: Any,
        *global_size: Any,
        process_group: Group = None,
        init_rrefs: bool = False,
    ) -> ShardedTensor:
        """From this rank's tensor, or tensors where it has several shards, by a spec. Nothing is sent.

        On a rank without a shard, the tensor only tells the dtype.
        """
        _refuse(init_rrefs)
        tensors = [local_tensor] if isinstance(local_tensor, torch.Tensor) else list(local_tensor)
        kind = Familiar.by(sharding_spec, _flatten_tensor_size(global_size), process_group)
        _check_placements(kind.metadata, process_group)
        mine, properties = kind.mine(), TensorProperties.create_from_tensor(tensors[0])
        found = [list(tensor.size()) for tensor in tensors]
        if mine and found != [m.shard_sizes for m in mine]:
            raise ValueError(
                f"the spec gives rank {dist.get_rank()} shards of sizes {[m.shard_sizes for m in mine]}, "
                f"but it brought {found}"
            )
        return kind.holding(tensors if mine else [], properties)

    @classmethod
    def init_from_local_shards_and_global_metadata(
        cls,
        local_shards: Sequence[Any],
        sharded_tensor_metadata: Any,
        process_group: Group = None,
        init_rrefs: bool = False,
        sharding_spec: Any = None,
    ) -> ShardedTensor:
        """From this rank's shards and the metadata of all, ours or torch's. Nothing is sent: each rank is believed."""
        metadata = ShardedTensorMetadata.of(sharded_tensor_metadata)
        if not metadata.shards_metadata:
            raise ValueError("shards_metadata must not be empty!")
        _refuse(init_rrefs, metadata.tensor_properties.layout)
        _check_placements(metadata, process_group)
        spec = sharding_spec or _infer_sharding_spec_from_shards_metadata(metadata.shards_metadata)
        kind = Familiar.of_metadata(metadata, spec, process_group)
        return kind.holding(_in_order(local_shards, metadata), metadata.tensor_properties)

    _init_from_local_shards_and_global_metadata = init_from_local_shards_and_global_metadata

    @classmethod
    def from_torch(cls, other: Any) -> ShardedTensor:
        """torch's own ShardedTensor as one of ours. The tensors are shared."""
        kind = Familiar.of_metadata(other.metadata(), other.sharding_spec(), other._process_group)
        return kind.holding(kind.taken(other), kind.metadata.tensor_properties)

    def to_torch(self) -> Any:
        """The same as torch's own ShardedTensor. The tensors are shared."""
        return torchs_sharded(self.shards, self._metadata, self._sharding_spec, self.group)

    # --- what it is --------------------------------------------------------------------------------------------------

    @property
    def shards(self) -> tuple[torch.Tensor, ...]:
        """This rank's tensors."""
        return tuple(shard.tensor for shard in self._local_shards)

    @property
    def kind(self) -> Familiar:
        """How it lies, with its group."""
        return Familiar(self.layout, self._metadata, self._sharding_spec, self.group)

    @property
    def dtype(self) -> torch.dtype:
        """Of the tensor, known on every rank."""
        return self._metadata.tensor_properties.dtype

    @property
    def requires_grad(self) -> bool:
        """True where autograd follows it."""
        return super().requires_grad or self._metadata.tensor_properties.requires_grad

    def requires_grad_(self, requires_grad: bool = True) -> ShardedTensor:
        """Let autograd follow the shards, in place."""
        super().requires_grad_(requires_grad)
        properties = replace(self._metadata.tensor_properties, requires_grad=requires_grad)
        self._metadata = replace(self._metadata, tensor_properties=properties)
        return self

    @property
    def _process_group(self) -> Group:
        return self.group or dist.group.WORLD

    def metadata(self) -> ShardedTensorMetadata:
        """Of all shards."""
        return self._metadata

    def sharding_spec(self) -> Any:
        """The spec by which it is sharded."""
        return self._sharding_spec

    def local_shards(self) -> list[Shard]:
        """This rank's shards, none on a rank that holds nothing."""
        return self._local_shards

    def local_tensor(self) -> torch.Tensor:
        """This rank's only shard."""
        if len(self._local_shards) != 1:
            raise NotImplementedError(
                f"Only single local shard is supported. Number of shards: {len(self._local_shards)}; "
                f"local_shards() has all of them"
            )
        return self._local_shards[0].tensor

    def size(self, dim: int | None = None) -> Any:
        """Of the whole tensor, or of one of its dims."""
        return self.shape if dim is None else self.shape[dim]

    def dim(self) -> int:
        """How many dims."""
        return self.ndim

    def numel(self) -> int:
        """How many elements all shards have."""
        return self.shape.numel()

    def is_pinned(self) -> bool:
        """True where the shards are in pinned memory."""
        return self._metadata.tensor_properties.pin_memory

    # --- what can be done with it ------------------------------------------------------------------------------------

    def reshard(self, resharding_spec: Any) -> ShardedTensor:
        """Shard it by another spec, in place. Any spec to any other; every rank of the group calls; autograd follows.

        Where it fails, it stays as it was.
        """
        found = reshard(self, Target(resharding_spec), group=self.group)
        kind = found.kind if found else Familiar.by(resharding_spec, self.shape, self.group)
        return self._become(kind, found.shards if found else (), self._metadata.tensor_properties)

    def gather(
        self,
        dst: int | None = 0,
        out: torch.Tensor | None = None,
        enforce_dtype: bool = False,
        dtype: torch.dtype | None = None,
    ) -> torch.Tensor | None:
        """The whole tensor on (global) rank `dst`: in `out`, given there alone, or as what is returned.

        The values keep their dtype, or get `dtype`, and are then written to `out` as copy_ does. All ranks call.
        """
        if enforce_dtype:
            warn("`enforce_dtype` is deprecated. Please use `dtype` instead.", FutureWarning, stacklevel=2)
        error = None
        try:
            if out is not None and dst is not None:
                _validate_output_tensor_for_gather(dist.get_rank(), dst, self.shape, out)
        except ValueError as found:  # the others have to hear of it first
            error = found
        return gather(self.detach(), dst, out, dtype, error)

    def to(self, *args: Any, process_group: Group = None, **kwargs: Any) -> ShardedTensor:
        """Shards on another device or of another dtype, as Tensor.to; itself where nothing changes."""
        found = self._each(lambda tensor: tensor.to(*args, **kwargs))
        same = all(a is b for a, b in zip(found.shards, self.shards, strict=True)) and found.dtype == self.dtype
        if same and found.kind.device == self.kind.device and process_group in (None, self.group):
            return self
        found.group = process_group or self.group
        return found

    def cpu(
        self, memory_format: torch.memory_format = torch.preserve_format, process_group: Group = None
    ) -> ShardedTensor:
        """Shards on the CPU; itself where they are."""
        return self.to("cpu", memory_format=_format(memory_format), process_group=process_group)

    def cuda(
        self,
        device: Any = None,
        non_blocking: bool = False,
        memory_format: torch.memory_format = torch.preserve_format,
        process_group: Group = None,
    ) -> ShardedTensor:
        """Shards on a GPU, the current one unless told; itself where they are."""
        target = torch.device("cuda", torch.cuda.current_device()) if device is None else torch.device(device)
        how = {"non_blocking": non_blocking, "memory_format": _format(memory_format)}
        return self.to(target, process_group=process_group, **how)

    def _each(self, change: Callable[[torch.Tensor], torch.Tensor]) -> ShardedTensor:
        """The same with other tensors. What they are is known on every rank, by one without elements."""
        properties, device = self._metadata.tensor_properties, self.kind.device or torch.device("cpu")
        like = change(torch.empty(0, dtype=self.dtype, device=device, requires_grad=properties.requires_grad))
        properties = replace(properties, dtype=like.dtype, requires_grad=like.requires_grad)
        kind = self.kind if like.device == device else self.kind.on(like.device)
        return kind.holding([change(tensor) for tensor in self.shards], properties)

    def __reduce__(self) -> tuple[Any, ...]:
        """Pickled with its place in the group: it can only be loaded there, see `load_with_process_group`."""
        kind = replace(self.kind, group=None)
        return _loaded, (kind, self.shards, self._metadata.tensor_properties, _place(self.group))


# --- checks ----------------------------------------------------------------------------------------------------------


def _refuse(
    init_rrefs: bool,
    layout: torch.layout = torch.strided,
    memory_format: torch.memory_format = torch.contiguous_format,
) -> None:
    if init_rrefs:
        raise NotImplementedError(
            "init_rrefs=True: references to remote shards are not kept; gather or reshard brings what is needed"
        )
    if layout != torch.strided:
        raise ValueError(f"Only torch.strided layout is currently supported, not {layout}")
    _format(memory_format)
    if memory_format == torch.preserve_format:
        raise ValueError("Only torch.contiguous_format memory_format is currently supported")


def _format(memory_format: torch.memory_format) -> torch.memory_format:
    if memory_format not in (torch.preserve_format, torch.contiguous_format):
        raise RuntimeError(
            f"Only `torch.contiguous_format` or `torch.preserve_format` is supported, not {memory_format}"
        )
    return memory_format


def _check_placements(metadata: ShardedTensorMetadata, group: Group) -> None:
    """Refuse shards on ranks that are not in the group."""
    known = set(dist.get_process_group_ranks(group))
    for shard in metadata.shards_metadata:
        if shard.placement is None or shard.placement.rank() not in known:
            _parse_and_validate_remote_device(group or dist.group.WORLD, shard.placement)


def _in_order(local_shards: Sequence[Any], metadata: ShardedTensorMetadata) -> list[torch.Tensor]:
    """This rank's tensors in the order of the metadata, which they must be what it says."""
    me = dist.get_rank()
    mine = shards_of(metadata, me)
    if len(local_shards) != len(mine):
        raise RuntimeError(
            f"Number of local shards ({len(local_shards)}) does not match number of local shards metadata in "
            f"sharded_tensor_metadata ({len(mine)}) on rank ({me})"
        )
    found = {_corner(shard.metadata): shard.tensor for shard in local_shards}
    for shard in mine:
        if _corner(shard) not in found:
            raise ValueError(f"no local shard on rank {me} is {shard}: there are {[s.metadata for s in local_shards]}")
        _check_tensor(found[_corner(shard)], shard, metadata.tensor_properties, me)
    return [found[_corner(shard)] for shard in mine]


def _check_tensor(tensor: torch.Tensor, shard: ShardMetadata, properties: TensorProperties, me: int) -> None:
    said = "local ShardMetadata", "tensor property"
    found = TensorProperties.create_from_tensor(tensor)
    device = shard.placement.device() if shard.placement else tensor.device
    pairs = [
        ("layout", properties.layout, found.layout, said[1]),
        ("size", shard.shard_sizes, list(tensor.size()), said[0]),
        ("pin_memory", properties.pin_memory, found.pin_memory, said[1]),
        ("device", device, device if same_device(device, tensor.device) else tensor.device, said[0]),
        ("dtype", properties.dtype, found.dtype, said[1]),
        ("requires_grad", properties.requires_grad, found.requires_grad, said[1]),
    ]
    for name, expected, actual, where in pairs:
        if expected != actual:
            raise ValueError(
                f"Local shards' tensor {name} property is incompatible with {where} on rank {me}: "
                f"{where} {name}={expected}, local shard tensor {name}={actual}."
            )


def _corner(shard: Any) -> tuple[int, ...]:
    return (*shard.shard_offsets, *shard.shard_sizes)


# --- what the ranks say of their shards ------------------------------------------------------------------------------

Said = tuple[tuple[int | None, ...], ShardedTensorMetadata | None]


def _said(local_shards: Sequence[Any], global_size: Sequence[Any], group: Group) -> Said:
    """The size, None where it is to be computed, and the metadata of this rank's shards if it has any."""
    one = len(global_size) == 1 and isinstance(global_size[0], Sequence)
    dims = list(global_size[0] if one else global_size)
    size = _flatten_tensor_size([0 if dim is None else dim for dim in dims])
    known = tuple(None if dim is None else length for dim, length in zip(dims, size, strict=True))
    if known.count(None) > 1:
        raise ValueError(f"only one dim of the size can be None, to be computed from the shards, found {known}")
    group = group or dist.group.WORLD
    return known, build_metadata_from_local_shards(local_shards, size, dist.get_rank(), group) if local_shards else None


def _agreed(told: dict[int, Said]) -> ShardedTensorMetadata:
    """The metadata of all, from what every rank said."""
    first, (size, _) = next(iter(told.items()))
    for rank, (other, _) in told.items():
        _raise_if_mismatch(size, other, "global_size", (first, rank), is_local=False)
    gathered = [told[rank][1] if rank in told else None for rank in range(max(told) + 1)]
    computed = size.index(None) if None in size else None
    metadata = build_global_metadata(gathered, computed is not None, computed or 0)
    if any(said not in (None, found) for said, found in zip(size, metadata.size, strict=True)):
        raise ValueError(f"the shards make a tensor of size {tuple(metadata.size)}, but the size was said to be {size}")
    return metadata


# --- pickling --------------------------------------------------------------------------------------------------------

_loading = ContextVar[Group]("the process group of what is loaded", default=None)


@contextmanager
def load_with_process_group(process_group: Group) -> Iterator[Group]:
    """ShardedTensors that are loaded inside live in this process group, which is the one they had."""
    if _loading.get() is not None:
        raise RuntimeError('ProcessGroup already set by previous "load_with_process_group" context manager')
    token = _loading.set(process_group)
    try:
        yield process_group
    finally:
        _loading.reset(token)


def _place(group: Group) -> dict[str, int]:
    """Where this rank is in the group."""
    return {
        "Local rank": dist.get_rank(group),
        "Global rank": dist.get_rank(),
        "Local world size": dist.get_world_size(group),
        "Global world size": dist.get_world_size(),
    }


def _loaded(kind: Familiar, tensors: Tensors, properties: TensorProperties, place: dict[str, int]) -> ShardedTensor:
    if not dist.is_initialized():
        raise RuntimeError(
            'Need to initialize default process group using "init_process_group" before loading ShardedTensor'
        )
    group = _loading.get()
    for what, now in _place(group).items():
        if place[what] != now:
            raise RuntimeError(f"{what} at save time was {place[what]}, but at load time was {now}")
    return replace(kind, group=group).holding(tensors, properties)
