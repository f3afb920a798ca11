"""The memory of tensors: of DTensors, of chunks that only their own rank knows, and of meta tensors."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Protocol, TypeGuard, cast

import torch
import torch.distributed as dist
from torch.distributed._functional_collectives import AsyncCollectiveTensor
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._dtensor_spec import DTensorSpec
from torch.multiprocessing.reductions import StorageWeakRef

from shardwise.errors import LayoutError
from shardwise.transports.members import has_default_group

if TYPE_CHECKING:
    from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, MetadataIndex


__all__ = [  # with two classes of torch, for annotations
    "DTensorSpec",
    "StorageWeakRef",
    "chunks_in",
    "is_chunked",
    "is_meta",
    "local_of",
    "storage_of",
    "version_of",
    "watched_storage",
    "whole_shape",
    "with_memory",
    "with_spec",
]


class Chunked(Protocol):
    """A tensor in chunks that only its own rank knows, as torch's distributed checkpoints see it."""

    def __create_chunk_list__(self) -> Sequence[ChunkStorageMetadata]:
        """Which boxes this rank holds."""
        ...

    def __get_tensor_shard__(self, index: MetadataIndex) -> torch.Tensor:
        """The memory of one of them."""
        ...


def local_of(x: torch.Tensor) -> tuple[torch.Tensor, DTensorSpec | None]:
    """The memory of a tensor: of a DTensor the local tensor, and what makes it a DTensor again."""
    local, spec = (x._local_tensor, x._spec) if isinstance(x, DTensor) else (x, None)
    if isinstance(local, AsyncCollectiveTensor):
        local = local.trigger_wait()  # type: ignore[no-untyped-call]
    return local, spec


def with_spec(spec: DTensorSpec, local: torch.Tensor) -> DTensor:
    """The inverse of `local_of` for a DTensor."""
    return DTensor(local, spec, requires_grad=False)  # type: ignore[no-untyped-call]


def version_of(tensor: torch.Tensor) -> int:
    """How often it was changed in place; always 0 for inference tensors, which do not count."""
    return 0 if tensor.is_inference() else tensor._version


def storage_of(tensor: torch.Tensor) -> int:
    """A number that identifies the memory of a tensor, for as long as it lives."""
    return tensor.untyped_storage()._cdata


def watched_storage(tensor: torch.Tensor) -> StorageWeakRef:
    """While this lives, no other memory gets the same number, even after it was freed."""
    return StorageWeakRef(tensor.untyped_storage())  # type: ignore[no-untyped-call]


def is_chunked(x: object) -> bool:
    """True for what lists its chunks for distributed checkpoints: LocalShardsWrapper, also in a DTensor."""
    inner = x._local_tensor if isinstance(x, DTensor) else x
    if type(inner) is torch.Tensor:  # every sync asks this of every tensor, and a failing hasattr is slow
        return False
    return hasattr(inner, "__create_chunk_list__") and hasattr(inner, "__get_tensor_shard__")


def whole_shape(x: torch.Tensor) -> tuple[int, ...]:
    """The shape of the tensor that chunks are of; refused where only a DTensor around them would know it."""
    from torch.distributed.tensor._shards_wrapper import LocalShardsWrapper

    if isinstance(x, LocalShardsWrapper):
        raise LayoutError(
            f"a LocalShardsWrapper outside a DTensor does not know the shape of the whole tensor: its own shape, "
            f"{tuple(x.shape)}, is that of this rank's chunks. For checkpoint.save, checkpoint.load and Resharder, "
            f"wrap it: DTensor.from_local(wrapper, mesh, placements, run_check=False, shape=..., stride=...). "
            f"For reshard, make a ShardedTensor: sharded_tensor.init_from_local_shards"
        )
    return tuple(x.shape)


def chunks_in(x: torch.Tensor) -> list[tuple[tuple[int, ...], torch.Tensor]]:
    """The chunks of this rank that have cells: where each begins in the whole, and its memory; by that place."""
    from torch.distributed.checkpoint.metadata import MetadataIndex

    chunks = list[tuple[tuple[int, ...], torch.Tensor]]()
    inner = cast(Chunked, x._local_tensor if isinstance(x, DTensor) else x)
    for number, chunk in enumerate(inner.__create_chunk_list__()):
        if 0 not in chunk.sizes:
            tensor = inner.__get_tensor_shard__(MetadataIndex("", torch.Size(chunk.offsets), number))
            if tuple(tensor.shape) != tuple(chunk.sizes):
                raise ValueError(
                    f"the chunk at {tuple(chunk.offsets)} should have {tuple(chunk.sizes)} cells, but "
                    f"__get_tensor_shard__ gives a tensor of shape {tuple(tensor.shape)}"
                )
            chunks.append((tuple(chunk.offsets), tensor))
    return sorted(chunks, key=lambda one: one[0])


def is_meta(x: object) -> TypeGuard[torch.Tensor]:
    """True for a plain tensor or DTensor on the meta device: it has a shape, and no memory."""
    plain = (type(x) is torch.Tensor or isinstance(x, torch.nn.Parameter)) and not is_chunked(x)
    return isinstance(x, torch.Tensor) and (plain or isinstance(x, DTensor)) and x.device.type == "meta"


def with_memory(x: torch.Tensor) -> torch.Tensor:
    """The same as a tensor on the meta device, with memory that is not filled: where torch's dcp.load puts it."""
    local, spec = local_of(x)
    if spec is not None:
        return with_spec(spec, torch.empty_like(local, device=spec.mesh.device_type, requires_grad=False))
    device = dist.distributed_c10d._get_object_coll_device() if has_default_group() else "cpu"
    return torch.empty_like(local, device=device, requires_grad=False)
