"""The kinds of sharded tensors: what can be resharded, and what can be a target."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Protocol, cast, runtime_checkable

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from shardwise.containers.dtensor import DTensorContainer, is_dtensor, is_mesh, on_mesh
from shardwise.containers.memory import is_chunked, whole_shape
from shardwise.containers.own_container import OwnContainer
from shardwise.containers.sharded import ShardedTensor, is_sharded
from shardwise.containers.torch_sharded import ShardedLike, SpecLike, TorchShardedContainer, is_spec, is_torch_sharded
from shardwise.errors import LayoutError, RefusedValueError
from shardwise.exchange.messages import Tensors
from shardwise.layout import Layout, parse
from shardwise.transports import GroupTransport
from shardwise.transports.members import Members, of_job

Sharded = torch.Tensor | ShardedLike  # a DTensor or a ShardedTensor, ours or torch's

TARGETS = (
    "a Layout, its notation, (DeviceMesh, placements), a sharding spec, or a sharded tensor to look like "
    "(DTensor, ShardedTensor)"
)


class Container(Protocol):
    """The layout of a sharded tensor, and how to disassemble and assemble it."""

    @property
    def layout(self) -> Layout:
        """Where every cell is."""
        ...

    @property
    def group(self) -> dist.ProcessGroup | None:
        """The process group that it was given."""
        ...

    @property
    def device(self) -> torch.device | None:
        """The device of local tensors, if known."""
        ...

    def disassemble(self, x: Any) -> Tensors:
        """The tensors of the container that autograd sees."""
        ...

    def local(self, tensors: Tensors) -> Tensors:
        """The plain local tensors of those, apart from autograd."""
        ...

    def from_local(self, local: Tensors) -> Tensors:
        """The inverse of `local`."""
        ...

    def assemble(self, tensors: Tensors) -> torch.Tensor | None:
        """The inverse of `disassemble`; None on a rank that holds nothing."""
        ...

    def gradient(self, arrived: object = None) -> Container:
        """The container of the gradient of such a tensor; `arrived`: the container of the gradient of the result."""
        ...

    def gradient_of(self, grads: Tensors) -> Container | None:
        """The container of these gradients; None where only ranks that hold some of them know it."""
        ...


@runtime_checkable
class ContainerSpec(Protocol):
    """A sharding spec of shardwise.sharded_tensor: it fits tensors of any shape."""

    def container_for(self, shape: Sequence[int], group: dist.ProcessGroup | None) -> Container:
        """The container of a tensor of that shape."""
        ...


Target = Layout | str | tuple[DeviceMesh, object] | SpecLike | ContainerSpec | Sharded


@dataclass(frozen=True)
class Renumbered:
    """A container over ranks of this process's job, in a group over several jobs: its owners are ranks of the group."""

    container: Container
    members: Members

    @cached_property
    def layout(self) -> Layout:
        """Over ranks of the group."""
        return self.members.renumbered(self.container.layout)

    @property
    def group(self) -> dist.ProcessGroup | None:
        """Of its job."""
        return self.container.group

    @property
    def device(self) -> torch.device | None:
        """As in its job."""
        return self.container.device

    def disassemble(self, x: Any) -> Tensors:
        """As in its job."""
        return self.container.disassemble(x)

    def local(self, tensors: Tensors) -> Tensors:
        """As in its job."""
        return self.container.local(tensors)

    def from_local(self, local: Tensors) -> Tensors:
        """As in its job."""
        return self.container.from_local(local)

    def assemble(self, tensors: Tensors) -> torch.Tensor | None:
        """The container of its job."""
        return self.container.assemble(tensors)

    def gradient(self, arrived: object = None) -> Container:
        """As in its job; whole where the value was partial, since other jobs do not know what arrives here."""
        return Renumbered(self.container.gradient(), self.members)

    def gradient_of(self, grads: Tensors) -> Container | None:
        """As in its job."""
        container = self.container.gradient_of(grads)
        return container and Renumbered(container, self.members)


def on_transport(container: Container, transport: GroupTransport | None) -> Container:
    """A container with the owners of a transport; without a transport, with the ranks of this process's job."""
    group = container.group
    if group is not None and transport is not None and group is transport.group:
        return container
    if group is not None and not of_job(group):
        raise RefusedValueError(
            f"{container.layout!r} belongs to a group whose owners are ranks of the group, and not of a job: "
            f"give that group as group="
        )
    if transport is None or not transport.members.joined:
        return container
    renumbered = Renumbered(container, transport.members)
    renumbered.layout  # noqa: B018  # what it refuses is raised here, where all ranks learn of errors
    return renumbered


def container_of(x: object) -> Container:
    """The container of a sharded tensor."""
    if isinstance(x, ShardedTensor):
        return x.container
    if is_chunked(x):
        whole_shape(cast(torch.Tensor, x))  # which raises its own error if the shape is not known
        what = f"a DTensor of {type(x._local_tensor).__name__}" if is_dtensor(x) else f"a {type(x).__name__}"
        raise LayoutError(
            f"{what} only knows the chunks of its own rank, whatever placements it has: checkpoint.save, "
            f"checkpoint.load and Resharder take it; to move it alone, make a ShardedTensor of it "
            f"(sharded_tensor.init_from_local_shards)"
        )
    if is_dtensor(x):
        return DTensorContainer.of(x)
    if is_torch_sharded(x):
        return TorchShardedContainer.of(x)
    what = f"a plain tensor of shape {tuple(x.shape)}" if isinstance(x, torch.Tensor) else repr(x)
    raise LayoutError(
        f"{what} does not say where its cells live: give a DTensor or a ShardedTensor "
        f"(of a plain local tensor: ShardedTensor(tensor, layout))"
    )


def target_container(to: object, shape: Sequence[int], group: dist.ProcessGroup | None) -> Container:
    """The container of a target, for a tensor of that shape."""
    if isinstance(to, str):
        to = parse(to)
    if isinstance(to, Layout):
        return OwnContainer(to.validate(), group)
    if isinstance(to, tuple) and len(to) == 2 and is_mesh(to[0]):
        return on_mesh(*to, shape)
    if not isinstance(to, torch.Tensor) and isinstance(to, ContainerSpec):  # tensors first: the check is slow
        return to.container_for(shape, group)
    if is_spec(to):
        if not of_job(group):
            raise RefusedValueError(
                f"{to!r} is a spec of torch, whose ShardedTensor knows ranks of one job alone, but owners of this "
                f"group are ranks of the group: use a spec of shardwise.sharded_tensor, or a Layout"
            )
        return TorchShardedContainer.by(to, shape, group)
    if is_sharded(to) or is_chunked(to):
        return container_of(to)
    raise LayoutError(f"{to!r} is not a target: give {TARGETS}")


def layout_of(x: Sharded | Target, shape: Sequence[int] | None = None) -> Layout:
    """Where every cell of a sharded tensor lives: a DTensor, our ShardedTensor or torch's.

    Targets of `reshard` are accepted as well. (DeviceMesh, placements) and sharding specs fit any tensor: give the
    `shape`.

    >>> layout_of(ShardedTensor(torch.zeros(8, 6), "8x6/R@1"))
    Layout('8x6/R@1')
    """
    if shape is not None or isinstance(x, Layout | str):
        return target_container(x, shape or (), None).layout
    if is_spec(x) or isinstance(x, ContainerSpec) or (isinstance(x, tuple) and any(map(is_mesh, x[:1]))):
        raise LayoutError(f"{x!r} fits tensors of any shape: give the shape, layout_of(x, shape)")
    return x.layout if isinstance(x, ShardedTensor) else container_of(x).layout
