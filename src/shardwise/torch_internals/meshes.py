"""Device meshes: their axes as ours, their ranks and their process groups."""

from __future__ import annotations

from functools import lru_cache
from typing import TypeGuard

import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Placement

from shardwise.errors import LayoutError
from shardwise.layout import Mesh
from shardwise.torch_internals.group_order import NestedRanks, line


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
