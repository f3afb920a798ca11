"""The memory of tensors: that of DTensors, of chunks that only their own rank knows, and of tensors that have none."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch.distributed._functional_collectives import AsyncCollectiveTensor
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._dtensor_spec import DTensorSpec
from torch.multiprocessing.reductions import StorageWeakRef

from shardwise.errors import LayoutError
from shardwise.transports.members import has_default_group


def local_of(x: torch.Tensor) -> tuple[torch.Tensor, DTensorSpec | None]:
    """The memory of a tensor: of a DTensor the local tensor, and what makes it a DTensor again."""
    local, spec = (x._local_tensor, x._spec) if isinstance(x, DTensor) else (x, None)
    if isinstance(local, AsyncCollectiveTensor):
        local = local.trigger_wait()  # type: ignore[no-untyped-call]
    return local, spec


def dressed_as(spec: DTensorSpec, local: torch.Tensor) -> DTensor:
    """The DTensor that was taken apart."""
    return DTensor(local, spec, requires_grad=False)  # type: ignore[no-untyped-call]


def storage_of(tensor: torch.Tensor) -> int:
    """What tells the memory of tensors apart, for as long as it lives."""
    return tensor.untyped_storage()._cdata


def watched_storage(tensor: torch.Tensor) -> Any:
    """While this lives, no other memory is told by the same number, also after it was given back."""
    return StorageWeakRef(tensor.untyped_storage())  # type: ignore[no-untyped-call]


def is_chunked(x: Any) -> bool:
    """True for what lists its chunks as distributed checkpoints ask for them: LocalShardsWrapper, also in a DTensor."""
    inner = x._local_tensor if isinstance(x, DTensor) else x
    if type(inner) is torch.Tensor:  # asked of every tensor in every sync, and what is missing takes long to look for
        return False
    return hasattr(inner, "__create_chunk_list__") and hasattr(inner, "__get_tensor_shard__")


def whole_shape(x: Any) -> tuple[int, ...]:
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


def chunks_in(x: Any) -> list[tuple[tuple[int, ...], torch.Tensor]]:
    """The chunks of this rank that have cells: where each begins in the whole, and its memory; by that place."""
    from torch.distributed.checkpoint.metadata import MetadataIndex

    found = list[tuple[tuple[int, ...], torch.Tensor]]()
    inner: Any = x._local_tensor if isinstance(x, DTensor) else x
    for number, chunk in enumerate(inner.__create_chunk_list__()):
        if 0 not in chunk.sizes:
            tensor = inner.__get_tensor_shard__(MetadataIndex("", torch.Size(chunk.offsets), number))
            if tuple(tensor.shape) != tuple(chunk.sizes):
                raise ValueError(
                    f"the chunk at {tuple(chunk.offsets)} should have {tuple(chunk.sizes)} cells, but "
                    f"__get_tensor_shard__ gives a tensor of shape {tuple(tensor.shape)}"
                )
            found.append((tuple(chunk.offsets), tensor))
    return sorted(found, key=lambda one: one[0])


def is_meta(x: Any) -> bool:
    """True for a plain tensor or DTensor on the meta device: it has a shape, and no memory."""
    plain = (type(x) is torch.Tensor or isinstance(x, torch.nn.Parameter)) and not is_chunked(x)
    return (plain or isinstance(x, DTensor)) and x.device.type == "meta"


def with_memory(x: torch.Tensor) -> torch.Tensor:
    """The same as a tensor on the meta device, with memory that is not filled: where torch's dcp.load puts it."""
    local, spec = local_of(x)
    if spec is not None:
        return dressed_as(spec, torch.empty_like(local, device=spec.mesh.device_type, requires_grad=False))
    device = dist.distributed_c10d._get_pg_default_device() if has_default_group() else "cpu"
    return torch.empty_like(local, device=device, requires_grad=False)
