"""In which order torch's collectives number the ranks of a mesh.

torch numbers shards in two ways. Collectives (distribute_tensor's scatter, full_tensor's gather) go by the rank in
the process group of a mesh axis, which torch sorts; offsets and local splits go by the coordinate in the mesh. Where
the ranks of a mesh do not rise, the two differ, and the data is where the collectives put it: see decision 18.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Placement, Replicate, Shard
from torch.distributed.tensor.placement_types import _StridedShard

from shardwise.errors import LayoutError

if TYPE_CHECKING:
    from shardwise.torch_internals.dtensor import DTensorContainer

NestedRanks = list["NestedRanks"] | list[int]  # of a mesh: lists of lists, one level for each axis
Ranks = npt.NDArray[np.integer]


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
