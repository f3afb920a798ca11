"""The memory of tensors: of DTensors, chunks and meta tensors; whether it can be read and written, and is shared."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, NamedTuple, Protocol, TypeGuard, cast

import torch
import torch.distributed as dist
from torch.distributed._functional_collectives import AsyncCollectiveTensor
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._dtensor_spec import DTensorSpec
from torch.multiprocessing.reductions import StorageWeakRef

from shardwise.containers.sharded import is_sharded
from shardwise.errors import ExchangeError, LayoutError
from shardwise.transports.members import has_default_group

if TYPE_CHECKING:
    from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, MetadataIndex


__all__ = [  # with two classes of torch, for annotations
    "DTensorSpec",
    "StorageWeakRef",
    "ExpectedMemory",
    "check_local",
    "check_memory",
    "check_written",
    "chunks_in",
    "is_chunked",
    "is_meta",
    "local_of",
    "plain_memory",
    "shared",
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


def plain_memory(x: object) -> list[torch.Tensor] | None:
    """The memory of a plain tensor, or of a DTensor of one; None for other kinds. Every sync calls it for all."""
    inner = x._local_tensor if isinstance(x, DTensor) else x
    if type(inner) is not torch.Tensor:
        return None
    return [inner] if not isinstance(x, DTensor) or x._spec.mesh.get_coordinate() is not None else []


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


def check_memory(tensor: torch.Tensor, what: str) -> None:
    """Refuse what has no elements that could be read or written."""
    if is_sharded(tensor):
        raise ExchangeError(f"{what} is a sharded tensor inside another: flatten_sharded_tensors makes one of them")
    if tensor.layout != torch.strided or tensor.is_meta or tensor.is_quantized:
        kind = "quantized" if tensor.is_quantized else tensor.layout
        remedy = "; module.to_empty(device=...) gives it some" if tensor.is_meta else ""
        raise ExchangeError(f"{what} has no memory to read or write: it is {kind} on {tensor.device}{remedy}")
    if tensor.numel() and _range(tensor)[1] - tensor.data_ptr() > _bytes_from(tensor):
        raise ExchangeError(f"the memory of {what} was given back (its storage is too short for {tuple(tensor.shape)})")


class ExpectedMemory(NamedTuple):
    """Local tensors, and what a layout says that they are. `what` is how errors call them."""

    what: str
    tensors: Sequence[torch.Tensor]
    shapes: tuple[tuple[int, ...], ...]
    dtype: torch.dtype


def check_local(memories: Iterable[ExpectedMemory]) -> None:
    """Refuse memory that is not what the layout gives this rank."""
    for what, tensors, shapes, dtype in memories:
        kinds = [(tuple(t.shape), t.dtype) for t in tensors]
        if not tensors and all(0 in shape for shape in shapes):
            continue
        if kinds != [(shape, dtype) for shape in shapes]:
            raise ValueError(f"{what} should have {list(shapes)} of {dtype} on this rank, but has {kinds}")
        for one in tensors:
            check_memory(one, what)
            if one.is_conj() or one.is_neg():
                raise ValueError(
                    f"{what} is a conjugate or negative view: resolve_conj() and resolve_neg() make it plain"
                )


def check_written(tensor: torch.Tensor, what: str) -> None:
    """Refuse what must not be written."""
    if tensor.is_conj() or tensor.is_neg():
        raise ExchangeError(f"{what} must not be a conjugate or negative view: write into a tensor of its own")
    if tensor.is_inference() and not torch.is_inference_mode_enabled():
        raise ExchangeError(f"{what} was made in inference mode, and can only be written there")
    if _overlaps_itself(tensor.stride(), tensor.shape):
        raise ExchangeError(f"elements of {what} share memory: shape {tuple(tensor.shape)}, strides {tensor.stride()}")


def shared(written: Sequence[torch.Tensor], read: Sequence[torch.Tensor]) -> Iterator[tuple[int, int]]:
    """Pairs of tensors with common elements, at least one of them written: numbers in the one list after the other."""
    everything = [*written, *read]
    order = sorted((tensor.device.type, *_range(tensor), at) for at, tensor in enumerate(everything) if tensor.numel())
    open_ones = list[tuple[str, int, int, int]]()  # those that reach past where the next one starts
    for one in order:
        open_ones = [other for other in open_ones if other[0] == one[0] and other[2] > one[1]]
        for other in open_ones:
            a, b = sorted((other[3], one[3]))
            if a < len(written) and _meet(everything[a], everything[b]):
                yield a, b
        open_ones.append(one)


def _meet(a: torch.Tensor, b: torch.Tensor) -> bool:
    """True if they have elements in common, or if that is not known."""
    if a.dtype != b.dtype or a.stride() != b.stride() or _overlaps_itself(a.stride(), _larger(a, b)):
        return True
    apart, odd = divmod(b.data_ptr() - a.data_ptr(), a.element_size())
    dims = sorted(zip(a.stride(), a.shape, b.shape, strict=True), reverse=True)
    dims = [dim for dim in dims if dim[1:] != (1, 1)]
    return bool(odd) or not all(stride for stride, _, _ in dims) or _reached(apart, dims)


def _reached(apart: int, dims: Sequence[tuple[int, int, int]]) -> bool:
    """True where two blocks of these strides and sizes, that start so many elements apart, have some in common."""
    if not dims:
        return apart == 0
    (stride, ours, theirs), rest = dims[0], dims[1:]
    steps = apart // stride  # the other dims together do not reach as far as one more or less
    return any(-theirs < at < ours and _reached(apart - at * stride, rest) for at in (steps, steps + 1))


def _larger(a: torch.Tensor, b: torch.Tensor) -> tuple[int, ...]:
    """The sizes of a block that contains both."""
    return tuple(map(max, a.shape, b.shape))


def _overlaps_itself(strides: Sequence[int], sizes: Sequence[int]) -> bool:
    """True where a stride does not pass over all that the smaller ones reach."""
    reach = 0
    for stride, size in sorted(zip(strides, sizes, strict=True)):
        if size > 1 and stride <= reach:
            return True
        reach += (size - 1) * stride
    return False


def _range(tensor: torch.Tensor) -> tuple[int, int]:
    """The addresses between the first and the last element."""
    if not tensor.numel():
        return tensor.data_ptr(), tensor.data_ptr()
    last = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    return tensor.data_ptr(), tensor.data_ptr() + (last + 1) * tensor.element_size()


def _bytes_from(tensor: torch.Tensor) -> int:
    """What the storage has from the first element on."""
    return int(tensor.untyped_storage().nbytes()) - int(tensor.storage_offset()) * tensor.element_size()
