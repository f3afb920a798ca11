"""DTensor as a container: its mesh and layout, its local tensor, and the DTensor made again from a local tensor.

torch numbers shards in two ways. Collectives (distribute_tensor's scatter, full_tensor's gather) go by the rank in
the process group of a mesh axis, which torch sorts; offsets and local splits go by the coordinate in the mesh. Where
the ranks of a mesh do not rise, the two differ, and the data is where the collectives put it: see decision 18.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache
from typing import Any, TypeGuard, get_args

import numpy as np
import numpy.typing as npt
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Placement, Replicate, Shard
from torch.distributed.tensor._dtensor_spec import DTensorSpec, TensorMeta
from torch.distributed.tensor.placement_types import _StridedShard

import shardwise.layout.placements as ours
from shardwise.errors import LayoutError
from shardwise.exchange.messages import Tensors
from shardwise.layout import Layout, Mesh
from shardwise.layout.checks import checked_dim

NestedRanks = list["NestedRanks"] | list[int]  # of a mesh: lists of lists, one level for each axis
Ranks = npt.NDArray[np.integer]
ShardOrder = Any  # torch's ShardOrder, which older versions do not have: the mesh dims that split each tensor dim
TORCHS = (Shard, _StridedShard, Replicate, Partial)  # placements that need no reading


@dataclass(frozen=True)
class DTensorContainer:
    """DTensors of one shape on a device mesh."""

    mesh: DeviceMesh
    placements: tuple[Placement, ...]
    shape: tuple[int, ...]
    order: ShardOrder = None  # where torch keeps it apart from the placements

    @staticmethod
    def of(x: DTensor) -> DTensorContainer:
        """The container of a DTensor. Cached by value, apart from the mesh, as in `_spec` below."""
        mesh, fields = x.device_mesh, (x.placements, tuple(x.shape), getattr(x._spec, "shard_order", None))
        known = _container(mesh, *fields)
        return known if known.mesh is mesh else DTensorContainer(mesh, *fields)

    @cached_property
    def layout(self) -> Layout:
        """Cached by value: making one takes longer than moving a small tensor."""
        return _mesh_layout(self, () if rises(self.mesh) else unsorted_axes(self.mesh))

    @property
    def group(self) -> None:
        """A mesh has groups of its own: see `home_of`."""

    @property
    def device(self) -> torch.device | None:
        """The device of its local tensors."""
        return torch.device(self.mesh.device_type)

    def disassemble(self, x: torch.Tensor) -> Tensors:
        """A DTensor is itself what autograd sees."""
        return [x]

    def local(self, tensors: Tensors) -> Tensors:
        """This rank's part, where it is in the mesh. Detached: `from_local` keeps tensors that autograd follows."""
        with torch.no_grad():
            return [x.to_local().detach() for x in tensors if isinstance(x, DTensor) and self._here]

    def from_local(self, local: Tensors) -> Tensors:
        """The DTensor with this local tensor. The shape is given: torch cannot know it where shards are uneven."""
        if not self._here:
            return []
        # as DTensor.from_local, which takes ten times as long
        return [DTensor(local[0], _spec(self, local[0].dtype), requires_grad=False)]  # type: ignore[no-untyped-call]

    def assemble(self, tensors: Tensors) -> torch.Tensor | None:
        """The DTensor that the user gets: None outside the mesh."""
        return tensors[0] if tensors else None

    def gradient(self, arrived: object = None) -> DTensorContainer:
        """The container of the gradient: replicated where the value was partial, as in torch.

        A gradient that `arrived` as such terms keeps them.
        """
        same = arrived if isinstance(arrived, DTensorContainer) and arrived.mesh == self.mesh else None
        terms = same.placements if same else (None,) * len(self.placements)
        pairs = zip(self.placements, terms, strict=True)
        return replace(self, placements=tuple(Replicate() if p.is_partial() and p != term else p for p, term in pairs))

    def gradient_of(self, grads: Tensors) -> DTensorContainer | None:
        """From the DTensor itself: operations may have left other placements."""
        return DTensorContainer.of(grads[0]) if grads else None  # type: ignore[arg-type]

    @property
    def _here(self) -> bool:
        return self.mesh.get_coordinate() is not None


_container = lru_cache(maxsize=4096)(DTensorContainer)


def is_dtensor(x: object) -> TypeGuard[DTensor]:
    """True for a DTensor."""
    return isinstance(x, DTensor)


def mesh_of(to: object) -> DeviceMesh | None:
    """The mesh of a target: of (DeviceMesh, placements), or of a DTensor."""
    if isinstance(to, DTensor):
        return to.device_mesh
    return to[0] if isinstance(to, tuple) and to and is_mesh(to[0]) else None


def on_mesh(mesh: DeviceMesh, placements: object, shape: Sequence[int]) -> DTensorContainer:
    """DTensors with these placements: words such as "S0", ours or torch's. Negative dims count from the end."""
    if isinstance(placements, (Placement, *get_args(ours.Placement))):
        placements = [placements]
    if isinstance(placements, list | tuple) and all(map(_is_ready, placements)):
        return DTensorContainer(mesh, tuple(placements), tuple(shape))
    known = our_mesh(mesh).placements(placements)
    return DTensorContainer(mesh, tuple(_torchs(p, tuple(shape)) for p in known), tuple(shape))


def _is_ready(placement: object) -> bool:
    return type(placement) in TORCHS and getattr(placement, "dim", 0) >= 0


def _torchs(placement: ours.Placement, shape: tuple[int, ...]) -> Placement:
    """One of our placements as torch's."""
    match placement:
        case ours.Shard(dim):
            return Shard(checked_dim(dim, shape))
        case ours.StridedShard(dim, factor):
            return _StridedShard(checked_dim(dim, shape), split_factor=factor)
        case ours.Partial(op):
            return Partial(op)
        case ours.Replicate():
            return Replicate()
    raise LayoutError(
        f"DTensor has no placement {placement}: use Layout.on_mesh(shape, mesh, placements), for a ShardedTensor"
    )


@lru_cache(maxsize=4096)
def _mesh_layout(container: DTensorContainer, unsorted: tuple[int, ...]) -> Layout:
    mesh, placements, shape = container.mesh, container.placements, container.shape
    if not _default(container.order):
        placements = DTensorSpec._convert_shard_order_to_StridedShard(container.order, placements, mesh)
    by_coordinate = Layout.on_mesh(shape, our_mesh(mesh), placements)
    ranks = in_group_order(mesh, placements, unsorted)
    if ranks == mesh.mesh.tolist():
        return by_coordinate
    by_group = Layout.on_mesh(shape, mesh_with_ranks(mesh, ranks), placements)
    for rank in mesh_ranks(mesh):
        check_sizes(container, rank, by_group.local_shape(rank), by_coordinate.local_shape(rank))
    return by_group


def _spec(container: DTensorContainer, dtype: torch.dtype) -> DTensorSpec:
    """Cached by value, apart from the mesh: an equal one may belong to process groups that are gone."""
    spec = _cached_spec(container, dtype)
    return spec if spec.mesh is container.mesh else _cached_spec.__wrapped__(container, dtype)


@lru_cache(maxsize=4096)
def _cached_spec(container: DTensorContainer, dtype: torch.dtype) -> DTensorSpec:
    meta = TensorMeta(torch.Size(container.shape), _contiguous(container.shape), dtype)
    order = {} if _default(container.order) else {"shard_order": container.order}
    return DTensorSpec(container.mesh, container.placements, meta, **order)


def _default(order: ShardOrder) -> bool:
    return order is None or DTensorSpec.is_default_device_order(order)


def _contiguous(shape: tuple[int, ...]) -> tuple[int, ...]:
    """The strides of a contiguous tensor of that shape, as torch counts them."""
    strides = [1]
    for size in reversed(shape[1:]):
        strides.append(strides[-1] * max(size, 1))
    return tuple(reversed(strides)) if shape else ()


def replicated_along(x: DTensor, mesh: DeviceMesh) -> bool:
    """True where the ranks along a mesh's first dim have the same local tensor: a dim of the DTensor's mesh."""
    ranks = sorted_line(mesh, 0)
    return any(p.is_replicate() and sorted_line(x.device_mesh, axis) == ranks for axis, p in enumerate(x.placements))


# --- device meshes ---------------------------------------------------------------------------------------------------


def default_group() -> dist.ProcessGroup:
    """The group of all ranks."""
    group = dist.group.WORLD
    assert group is not None, "torch.distributed is initialised"
    return group


def home_of(mesh: DeviceMesh) -> tuple[dist.ProcessGroup, tuple[int, ...]]:
    """The process group of a mesh, and its ranks; a mesh of several axes uses the default group."""
    one = mesh.ndim == 1 and mesh.get_coordinate() is not None
    return mesh.get_group() if one else default_group(), mesh_ranks(mesh)


def is_mesh(x: object) -> TypeGuard[DeviceMesh]:
    """True for a DeviceMesh."""
    return isinstance(x, DeviceMesh)


def is_placement(x: object) -> TypeGuard[Placement]:
    """True for one of torch's placements."""
    return isinstance(x, Placement)


@lru_cache(maxsize=256)
def our_mesh(mesh: DeviceMesh) -> Mesh:
    """A device mesh as ours."""
    return mesh_with_ranks(mesh, mesh.mesh.tolist())


def mesh_with_ranks(mesh: DeviceMesh, ranks: NestedRanks) -> Mesh:
    """A mesh of the same axes with these ranks."""
    try:
        return Mesh.of(tuple(mesh.mesh.shape), mesh.mesh_dim_names, ranks=ranks)
    except LayoutError:  # torch allows any string as a name
        return Mesh.of(tuple(mesh.mesh.shape), ranks=ranks)


@lru_cache(maxsize=256)
def mesh_ranks(mesh: DeviceMesh) -> tuple[int, ...]:
    """The ranks of a mesh, rising."""
    return tuple(sorted(mesh.mesh.flatten().tolist()))


@lru_cache(maxsize=256)
def sorted_line(mesh: DeviceMesh, axis: int) -> tuple[int, ...]:
    """The ranks that differ from this one only along an axis, rising."""
    return tuple(sorted(line(mesh, axis)))


# --- the order of ranks in a mesh ------------------------------------------------------------------------------------


def in_group_order(mesh: DeviceMesh, placements: Sequence[Placement], unsorted: tuple[int, ...]) -> NestedRanks:
    """The ranks of a mesh in the places that collectives give them, as nested lists."""
    ranks = mesh.mesh.numpy()
    for axis, placement in enumerate(placements):
        if isinstance(placement, Shard | _StridedShard) and axis not in unsorted:
            _check_lines(mesh, ranks, placements, axis)
            ranks = np.sort(ranks, axis=axis)
    return ranks.tolist()


@lru_cache(maxsize=256)
def rises(mesh: DeviceMesh) -> bool:
    """True where ranks rise along every axis: group order and coordinates are the same."""
    return all((np.diff(mesh.mesh.numpy(), axis=axis) > 0).all() for axis in range(mesh.ndim))


def unsorted_axes(mesh: DeviceMesh) -> tuple[int, ...]:
    """Axes whose process groups keep the order of the mesh: made by `new_group(sort_ranks=False)`, for `from_group`.

    Equal meshes may have different groups, so this is never kept by value.
    """
    inside = mesh.get_coordinate() is not None
    return tuple(axis for axis in range(mesh.ndim) if inside and _keeps_order(mesh, axis))


def _keeps_order(mesh: DeviceMesh, axis: int) -> bool:
    group = dist.get_process_group_ranks(mesh.get_group(axis))
    return group != sorted(group) and group == line(mesh, axis)


def line(mesh: DeviceMesh, axis: int) -> list[int]:
    """The ranks that differ from this one only along an axis, in the order of the mesh; none outside the mesh."""
    here = mesh.get_coordinate()
    if here is None:
        return []
    along: tuple[int | slice, ...] = (*here[:axis], slice(None), *here[axis + 1 :])
    ranks: list[int] = mesh.mesh[along].tolist()
    return ranks


def _check_lines(mesh: DeviceMesh, ranks: Ranks, placements: Sequence[Placement], axis: int) -> None:
    """Refuse a mesh on which distribute_tensor loses shards: lines along an axis whose ranks are not ordered alike.

    Lines may differ along an axis that is scattered before; but not for partial and strided placements, which torch
    gathers in another order.
    """
    order = ranks.argsort(axis=axis)
    for other, placement in enumerate(placements):
        before = other < axis and {type(placement), type(placements[axis])} <= {Shard, Replicate}
        if other != axis and not before and (order != order.take([0], axis=other)).any():
            raise LayoutError(
                f"mesh {mesh.mesh.tolist()} cannot hold {list(placements)}: its lines along axis {axis} order their "
                f"ranks differently, and torch's distribute_tensor loses shards there: use a mesh whose ranks rise, "
                f"such as {np.sort(ranks, axis=None).reshape(ranks.shape).tolist()}"
            )


def check_sizes(
    container: DTensorContainer, rank: int, by_group: tuple[int, ...], by_coordinate: tuple[int, ...]
) -> None:
    """Refuse uneven shards that torch cuts to the sizes of others."""
    if by_group != by_coordinate:
        raise LayoutError(
            f"mesh {container.mesh.mesh.tolist()} cannot hold shape {container.shape} as "
            f"{list(container.placements)}: its ranks do not rise, so rank {rank} has a shard of shape {by_group} for "
            f"torch's collectives, but of {by_coordinate} by its coordinate, and distribute_tensor loses data: use a "
            f"mesh whose ranks rise, or dims that divide evenly"
        )
