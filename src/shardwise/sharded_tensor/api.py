"""ShardedTensor under torch's names: made from specs and from local shards, resharded in place, gathered, pickled."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from copy import deepcopy
from dataclasses import replace
from operator import add
from typing import TYPE_CHECKING, Any, Self
from warnings import warn

import torch
import torch.distributed as dist

import shardwise.containers.sharded as plain
from shardwise.containers.torch_sharded import (
    MetadataLike,
    ShardedLike,
    ShardLike,
    SpecLike,
    device_of,
    in_order,
    torchs_sharded,
)
from shardwise.errors import ExchangeError, LayoutError
from shardwise.exchange.messages import Tensors
from shardwise.exchange.overflow import Overflow
from shardwise.geometry import Box
from shardwise.job.agree import together
from shardwise.layout import Layout
from shardwise.sharded_tensor.gathered_metadata import (
    checked_metadata,
    container_from,
    local_metadata,
    refuse,
)
from shardwise.sharded_tensor.instances import TorchNamedTensor
from shardwise.sharded_tensor.metadata import (
    Shard,
    ShardedTensorMetadata,
    ShardMetadata,
    TensorProperties,
    same_device,
)
from shardwise.sharded_tensor.pickling import loaded, place, unplaced
from shardwise.sharded_tensor.sharding_spec import _infer_sharding_spec_from_shards_metadata
from shardwise.sharded_tensor.spec_container import Group, SpecContainer, SpecTarget
from shardwise.sharded_tensor.utils import _flatten_tensor_size, check_local_tensor, check_owners
from shardwise.tensor.call import Options, Source
from shardwise.tensor.resharding import gather, result_of, start_call
from shardwise.transports.members import of_job, owner_here

if TYPE_CHECKING:
    from shardwise.containers.torch_sharded import TorchShardedTensor


class ShardedTensorBase(plain.ShardedTensor, metaclass=TorchNamedTensor):
    """torch's base class of ShardedTensor: makes one where there is no process group."""

    @staticmethod
    def _init_from_local_shards_and_global_metadata(
        local_shards: Sequence[ShardLike], sharded_tensor_metadata: MetadataLike, sharding_spec: SpecLike | None = None
    ) -> ShardedTensor:
        """From shards of any ranks and the metadata of all. There is no process group to check the ranks against."""
        metadata = checked_metadata(sharded_tensor_metadata)
        spec = sharding_spec or _infer_sharding_spec_from_shards_metadata(metadata.shards_metadata)
        container = SpecContainer.by_metadata(metadata, spec, None)
        own = tuple(ShardMetadata.of(shard.metadata) for shard in local_shards)
        return replace(container, own=own).holding([shard.tensor for shard in local_shards])


class ShardedTensor(ShardedTensorBase):
    """A tensor that is sharded by a spec: `ShardedTensor(spec, 8, 6)` has this rank's shards, uninitialized.

    It is a `shardwise.ShardedTensor` that also knows its spec and metadata, with the methods that torch's has.
    """

    _container: SpecContainer
    _local_shards: list[Shard]
    _stand_in: torch.Tensor | None

    def __new__(
        cls,
        sharding_spec: SpecLike,
        *size: int | Sequence[int],
        dtype: torch.dtype | None = None,
        layout: torch.layout = torch.strided,
        requires_grad: bool = False,
        pin_memory: bool = False,
        memory_format: torch.memory_format = torch.contiguous_format,
        process_group: Group = None,
        init_rrefs: bool = False,
    ) -> Self:
        refuse(init_rrefs, layout)
        if memory_format != torch.contiguous_format:
            raise ValueError(f"Only torch.contiguous_format memory_format is currently supported, not {memory_format}")
        how: dict[str, Any] = {"requires_grad": requires_grad, "pin_memory": pin_memory}
        how["dtype"] = dtype or torch.get_default_dtype()
        container = SpecContainer.by(sharding_spec, _flatten_tensor_size(size), process_group, TensorProperties(**how))
        check_owners(container.layout, process_group)
        return cls.holding(container, [torch.empty(m.shard_sizes, device=device_of(m), **how) for m in container.mine])

    @classmethod
    def holding(cls, container: SpecContainer, tensors: Tensors) -> Self:
        """One of that container with these tensors of this rank."""
        dtype, device = (tensors[0].dtype, tensors[0].device) if tensors else (container.properties.dtype, None)
        return cls._wrapper(container.layout.shape, dtype, device)._become(container, tensors)

    def _become(self, container: SpecContainer, tensors: Tensors, stand_in: torch.Tensor | None = None) -> Self:
        """Take over another container and its tensors."""
        known = vars(TensorProperties.create_from_tensor(tensors[0])) if tensors else {}
        self._container, self._stand_in = container.with_properties(**known).with_fields(everywhere=False), stand_in
        self._owner = owner_here(container.group)
        self._local_shards = [Shard(tensor, m) for tensor, m in zip(tensors, container.mine, strict=True)]
        return self

    # --- made from local shards ---------------------------------------------------------------------------------------

    @staticmethod
    def _init_from_local_shards(
        local_shards: Sequence[ShardLike] | None,
        *global_size: int | Sequence[int | None] | None,
        process_group: Group = None,
        init_rrefs: bool = False,
    ) -> ShardedTensor:
        container = together(
            "init_from_local_shards",
            lambda: local_metadata(local_shards, global_size, process_group, init_rrefs),
            lambda by_rank: container_from(by_rank, process_group),
            group=process_group,
        )
        return container.holding([shard.tensor for shard in local_shards or ()])

    @staticmethod
    def _init_from_local_tensor(
        local_tensor: torch.Tensor | Sequence[torch.Tensor],
        sharding_spec: SpecLike,
        *global_size: int | Sequence[int],
        process_group: Group = None,
        init_rrefs: bool = False,
    ) -> ShardedTensor:
        """From this rank's tensor, or tensors where it has several shards, by a spec. Nothing is sent.

        A rank without a shard passes a tensor for its dtype.
        """
        tensors = [local_tensor] if isinstance(local_tensor, torch.Tensor) else list(local_tensor)
        if not tensors:
            raise ValueError("local_tensor is empty: a rank without a shard passes a tensor, too, for its dtype")
        properties = TensorProperties.create_from_tensor(tensors[0])
        refuse(init_rrefs, properties.layout)
        container = SpecContainer.by(sharding_spec, _flatten_tensor_size(global_size), process_group, properties)
        check_owners(container.layout, process_group)
        sizes = [list(tensor.size()) for tensor in tensors]
        if container.mine and sizes != [m.shard_sizes for m in container.mine]:
            raise ValueError(
                f"the spec gives rank {owner_here(process_group)} shards of sizes "
                f"{[m.shard_sizes for m in container.mine]}, but it passed {sizes}"
            )
        for tensor, shard in zip(tensors, container.mine, strict=False):
            check_local_tensor(tensor, shard, properties, owner_here(process_group))
        return container.holding(tensors if container.mine else [])

    @staticmethod
    def init_from_local_shards_and_global_metadata(
        local_shards: Sequence[ShardLike],
        sharded_tensor_metadata: MetadataLike,
        process_group: Group = None,
        init_rrefs: bool = False,
        sharding_spec: SpecLike | None = None,
    ) -> ShardedTensor:
        """From this rank's shards and the metadata of all, ours or torch's. Nothing is sent: ranks are not compared."""
        metadata, me = checked_metadata(sharded_tensor_metadata), owner_here(process_group)
        refuse(init_rrefs)
        spec = sharding_spec or _infer_sharding_spec_from_shards_metadata(metadata.shards_metadata)
        container = SpecContainer.by_metadata(metadata, spec, process_group)
        check_owners(container.layout, process_group)
        if len(local_shards) != len(container.mine):
            raise RuntimeError(
                f"Number of local shards ({len(local_shards)}) does not match number of local shards metadata in "
                f"sharded_tensor_metadata ({len(container.mine)}) on rank ({me})"
            )
        tensors = in_order(local_shards, container.mine, metadata.size)
        for tensor, shard in zip(tensors, container.mine, strict=True):
            check_local_tensor(tensor, shard, metadata.tensor_properties, me)
        return container.holding(tensors)

    _init_from_local_shards_and_global_metadata = init_from_local_shards_and_global_metadata  # type: ignore[assignment]

    @staticmethod
    def from_torch(other: ShardedLike) -> ShardedTensor:
        """torch's own ShardedTensor as one of ours. The tensors are shared."""
        container = SpecContainer.of(other)
        return container.holding(container.disassemble(other))

    def to_torch(self) -> TorchShardedTensor:
        """The same as torch's own ShardedTensor. The tensors are shared."""
        return torchs_sharded(list(self.shards), self.metadata(), self.sharding_spec(), self.group)

    # --- what it is --------------------------------------------------------------------------------------------------

    @property
    def shards(self) -> tuple[torch.Tensor, ...]:
        """This rank's tensors."""
        return tuple(shard.tensor for shard in self._local_shards)

    @property
    def dtype(self) -> torch.dtype:  # type: ignore[override]
        """The dtype of the tensor, known on every rank."""
        return self._container.properties.dtype

    @property
    def device(self) -> torch.device:  # type: ignore[override]
        """Of the shards; on a rank that has none, the type of device that others have."""
        return self.shards[0].device if self.shards else torch.device(self._container.devices[0].type)

    @property
    def requires_grad(self) -> bool:
        """True where autograd follows it, known on every rank."""
        return any(shard.requires_grad for shard in self.shards) or self._container.properties.requires_grad

    @requires_grad.setter
    def requires_grad(self, value: bool) -> None:
        self.requires_grad_(value)

    def requires_grad_(self, requires_grad: bool = True) -> Self:
        """Let autograd follow the shards, in place."""
        if requires_grad and not (self.dtype.is_floating_point or self.dtype.is_complex):
            raise RuntimeError(
                f"only tensors of floating point and complex dtype can require gradients, not {self.dtype}"
            )
        super().requires_grad_(requires_grad)
        self._container = self._container.with_properties(requires_grad=requires_grad)
        return self

    @property
    def _process_group(self) -> Group:
        """Under the name that code written for torch looks for."""
        return self.group or dist.group.WORLD

    def metadata(self) -> ShardedTensorMetadata:
        """The metadata of all shards."""
        return self._container.metadata

    def sharding_spec(self) -> SpecLike:
        """The spec by which it is sharded."""
        return self._container.spec

    @property
    def _metadata(self) -> ShardedTensorMetadata:
        """Under the name that code written for torch looks for."""
        return self.metadata()

    @_metadata.setter
    def _metadata(self, metadata: MetadataLike) -> None:
        container = SpecContainer.by_metadata(ShardedTensorMetadata.of(metadata), self.sharding_spec(), self.group)
        self._take_over(replace(container, own=self._container.own))

    @property
    def _sharding_spec(self) -> SpecLike:
        """Under the name that code written for torch looks for."""
        return self.sharding_spec()

    @_sharding_spec.setter
    def _sharding_spec(self, spec: SpecLike) -> None:
        container = SpecContainer.by(spec, self.shape, self.group, self._container.properties)
        self._take_over(replace(self._container, layout=container.layout, spec=spec))

    def _take_over(self, container: SpecContainer) -> None:
        """Other metadata or another spec, if they say the same of where the cells are."""
        if container.layout != self.layout:
            raise ValueError(
                f"the tensor lies as {self.layout}, but that says {container.layout}: reshard(spec) moves it there"
            )
        self._become(container, in_order(self._local_shards, container.mine, self.shape), self._stand_in)

    def remote_shards(self) -> dict[int, list[object]]:
        """Not supported, as in torch without `init_rrefs`: use `gather` or `reshard`."""
        raise RuntimeError("ShardedTensor created with init_rrefs=False, no RRefs to remote shards available")

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

    def is_pinned(self) -> bool:  # type: ignore[override]
        """True where the shards are in pinned memory."""
        return self._container.properties.pin_memory

    # --- what can be done with it ------------------------------------------------------------------------------------

    def reshard(self, resharding_spec: SpecLike) -> ShardedTensor:
        """Shard it by another spec, in place. Every rank of the group calls; autograd follows.

        Where it fails, it stays as it was.
        """
        target = SpecTarget(resharding_spec, self._container.properties)
        call = start_call(Source.of(lambda: self), target, Options(), group=self.group)
        assert call is not None, "every rank of the group has a part in it"
        moved, stand_in = result_of(call.run())
        if resharding_spec == self.sharding_spec():  # all ranks ask for that, as is known now
            return self
        container = moved.container.by_rank().with_properties(requires_grad=call.followed)
        return self._become(container, moved.shards, stand_in)

    def backward(self) -> None:  # type: ignore[override]
        """Take part in the backward pass on a rank that holds nothing since `reshard`: it has nothing to call it on.

        The others call backward on what they computed from their shards; this rank calls this instead.
        """
        if self._stand_in is None:
            raise ExchangeError(
                "this rank has nothing to take part in: it holds shards, on which backward is called, or autograd did "
                "not follow the last reshard"
            )
        torch.autograd.backward(self._stand_in, torch.empty_like(self._stand_in))

    def gather(  # type: ignore[override]
        self,
        dst: int | None = 0,
        out: torch.Tensor | None = None,
        enforce_dtype: bool = False,
        dtype: torch.dtype | None = None,
        *,
        overflow: Overflow = "refuse",
    ) -> torch.Tensor | None:
        """The whole tensor on (global) rank `dst`: in `out`, given there alone, or as what is returned.

        The values keep their dtype, or get `dtype`, and are then written to `out`: of any plain floating point dtype,
        or of that one. All ranks call. Autograd does not follow, as in torch; it follows `shardwise.reshard`.
        `overflow`: as there.
        """
        if enforce_dtype:
            warn("`enforce_dtype` is deprecated. Please use `dtype` instead.", FutureWarning, stacklevel=2)
        return gather(self, dst, out, dtype, overflow=overflow, apart=True)

    def to(self, *args: Any, process_group: Group = None, **kwargs: Any) -> ShardedTensor:
        """Shards on another device or of another dtype, as Tensor.to; itself where nothing changes."""
        if process_group is not None and process_group is not self.group and not of_job(process_group):
            raise ValueError(
                f"{self!r} cannot be taken to a group whose owners are ranks of the group, and not of a job: "
                f"shardwise.reshard(st, layout, group=process_group) moves it there"
            )
        probe = self._probe()
        same = probe.to(*args, **kwargs) is probe and "memory_format" not in kwargs
        if same and self._all_on(probe.device) and process_group in (None, self.group):
            return self
        moved = self._each(lambda tensor: tensor.to(*args, **kwargs))
        if process_group is not None:
            moved._container = replace(moved._container, group=process_group)
        return moved

    def cpu(
        self, memory_format: torch.memory_format = torch.preserve_format, process_group: Group = None
    ) -> ShardedTensor:
        """Shards on the CPU; itself where they are there already."""
        return self.to("cpu", process_group=process_group, **_formatted(memory_format))

    def cuda(
        self,
        device: torch.device | str | int | None = None,
        non_blocking: bool = False,
        memory_format: torch.memory_format = torch.preserve_format,
        process_group: Group = None,
    ) -> ShardedTensor:
        """Shards on a GPU, by default the current one; itself where they are there already."""
        target = torch.device("cuda", torch.cuda.current_device()) if device is None else torch.device(device)
        return self.to(target, non_blocking=non_blocking, process_group=process_group, **_formatted(memory_format))

    def _each(self, change: Callable[[torch.Tensor], torch.Tensor]) -> ShardedTensor:
        """The same with other tensors. What they are is known on every rank, by one without elements."""
        like = change(self._probe())
        container = self._container if self._all_on(like.device) else self._container.on(like.device)
        container = container.with_properties(dtype=like.dtype, requires_grad=like.requires_grad)
        changed = container.holding([change(tensor) for tensor in self.shards])
        changed._owner = self._owner
        return changed

    def _probe(self) -> torch.Tensor:
        """A tensor like the shards, without elements."""
        device = self.shards[0].device if self.shards else self._container.devices[0]
        dims = [0] * self.ndim or [1]
        return torch.empty(
            dims, dtype=self.dtype, device=device, requires_grad=self._container.properties.requires_grad
        )

    def _all_on(self, device: torch.device) -> bool:
        """True where no placement has to change for shards on that kind of device."""
        mine = self._container.device or device
        return same_device(mine, device) and all(other.type == device.type for other in self._container.devices)

    @property
    def placed(self) -> bool:
        """False where it was made without a process group: then it holds shards of any ranks."""
        return self._container.own is None

    @property
    def container(self) -> SpecContainer:
        """How it lies, with its group; refused where the shards are not known to be those of this rank."""
        if not self.placed:
            raise LayoutError(
                f"{self!r} was made without a process group: it can be saved and loaded, and not moved between ranks; "
                f"ShardedTensor._init_from_local_shards_and_global_metadata makes one that can"
            )
        self._check_rank()
        return self._container

    def _part(self) -> tuple[Layout, int]:
        """Where no process group says which rank this is: what it holds, as the only owner."""
        if self._container.own is None:
            return super()._part()
        return Layout.boxes(self.layout.shape, [(0, box.lo, box.hi) for box in self._own_boxes()]), 0

    def _own_boxes(self) -> list[Box]:
        corners = [(tuple(m.shard_offsets), m.shard_sizes) for m in self._container.mine]
        return [Box(lo, tuple(map(add, lo, size))) for lo, size in corners]

    def __repr__(self) -> str:  # type: ignore[override]
        """Where no process group says which rank this is: what it holds."""
        if self._container.own is None:
            return super().__repr__()
        boxes = ", ".join(map(str, self._own_boxes()))
        return f"ShardedTensor({self.layout.brief()}, {self.dtype}, this process holds {boxes})"

    def _deepcopied(self, memo: dict[int, object]) -> ShardedTensor:
        """Copied shards with metadata of their own, in the same group."""
        metadata, spec = deepcopy(self.metadata(), memo), deepcopy(self.sharding_spec(), memo)
        container = replace(self._container, metadata=metadata, spec=spec, own=deepcopy(self._container.own, memo))
        return container.holding([deepcopy(shard, memo) for shard in self.shards])

    def __reduce__(self) -> tuple[object, ...]:
        """Pickled with its place in the group, if it has one: it can only be loaded there (see pickling.py)."""
        if self._container.own is not None:
            return unplaced, (self.metadata(), self.sharding_spec(), self.shards, self._container.own)
        self._check_rank()
        return loaded, (self.metadata(), self.sharding_spec(), self.shards, place(self.group))


def _formatted(memory_format: torch.memory_format) -> dict[str, torch.memory_format]:
    if memory_format not in (torch.preserve_format, torch.contiguous_format):
        raise RuntimeError(
            f"Only `torch.contiguous_format` or `torch.preserve_format` is supported! Found {memory_format}"
        )
    return {} if memory_format == torch.preserve_format else {"memory_format": memory_format}
