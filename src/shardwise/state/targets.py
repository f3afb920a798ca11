"""Targets by name: from a mapping, rules, a function, or a state dict to look like."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from collections.abc import Container as Names
from types import FunctionType

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from shardwise.containers.container import Container, on_transport, target_container
from shardwise.containers.description import is_tensor
from shardwise.containers.dtensor import is_mesh, is_placement
from shardwise.containers.memory import is_chunked
from shardwise.containers.sharded import is_sharded
from shardwise.job.names import matched, missing
from shardwise.job.remap import Shapes
from shardwise.job.side import PlainContainer
from shardwise.layout import Layout, Placement, Replicate
from shardwise.state.traverse import StateDict
from shardwise.transports import GroupTransport

Targets = StateDict | Sequence[tuple[str, object]] | Callable[[str], object]


def containers_for(
    shapes: Shapes,
    to: Targets,
    mesh: DeviceMesh | None,
    transport: GroupTransport,
    group: dist.ProcessGroup | None,
) -> dict[str, Container]:
    """The target container of every tensor. Tensors that stay as they are, are left out."""
    target_of, containers = _target_by_name(to, list(shapes)), dict[str, Container]()
    for name, shape in shapes.items():
        try:
            target = target_of(name)
            target = target(shape) if isinstance(target, FunctionType) else target
            if target is not None:
                containers[name] = _container(_on(mesh, target), shape, transport, group)
        except Exception as error:
            reason = f"{error}" if isinstance(error, ValueError | TypeError) else f"{type(error).__name__}: {error}"
            raise ValueError(f"the target of {name!r}: {reason}") from error
    return containers


def _on(mesh: DeviceMesh | None, target: object) -> object:
    """Add the mesh to bare placements. A single Replicate applies to all axes."""
    if not _are_placements(target):
        return target
    if mesh is None:
        raise ValueError(f"{target!r} has no mesh: give mesh=, or a target with a mesh of its own")
    everywhere = isinstance(target, Replicate) or target == "R" or (is_placement(target) and target.is_replicate())
    return mesh, [target] * mesh.ndim if everywhere else target


def _container(
    target: object, shape: tuple[int, ...], transport: GroupTransport, group: dist.ProcessGroup | None
) -> Container:
    if isinstance(target, torch.Tensor) and not (is_sharded(target) or is_chunked(target)):
        container: Container = PlainContainer(
            Layout.replicated(target.shape, transport.owners), group, on=target.device
        )
    else:
        container = on_transport(target_container(target, shape, group), transport)
    if container.layout.shape != shape:
        raise ValueError(f"the tensor has shape {shape}, but the target {container.layout.shape}")
    return container


def _target_by_name(to: Targets, names: Sequence[str]) -> Callable[[str], object]:
    """A function from names to targets."""
    if isinstance(to, Mapping):
        known = set(names)
        tensors = dict(_targets_in(to, "", known))
        extra = [name for name in tensors if name not in known]
        if extra:
            raise ValueError(missing("the state dict has no", extra, names))
        left = [name for name in names if name not in tensors]
        if left:  # a misspelt key may have a value that is a target only for a tensor of that name
            keys = [name for name in _keys(to, "") if name not in left]
            raise ValueError(missing("to= has no target for", left, keys) + "; None leaves a tensor as it is")
        return tensors.__getitem__
    return to if callable(to) else _Rules(to, set(names))


class _Rules:
    """Ordered rules: the first match wins."""

    def __init__(self, rules: object, names: Names[str]) -> None:
        if not isinstance(rules, list | tuple):
            raise TypeError(
                f"to= must be a mapping, rules [(pattern, target), ...] or a function, not {rules!r}; "
                f"[('*', target)] gives all tensors one target"
            )
        self._rules, self._names = list[tuple[str, object]](), names
        for rule in rules:
            if not isinstance(rule, list | tuple) or len(rule) != 2 or not isinstance(rule[0], str):
                raise ValueError(f"a rule is a pair (pattern, target), such as ('*', target), not {rule!r}")
            self._rules.append((rule[0], rule[1]))

    def __call__(self, name: str) -> object:
        for pattern, target in self._rules:
            if matched(pattern, name, self._names) is not None:
                return target
        rules = ", ".join(repr(pattern) for pattern, _ in self._rules)
        raise ValueError(f"no rule matches: the patterns are {rules or 'none'}; end with '*'")


def _targets_in(to: StateDict, prefix: str, names: set[str]) -> Iterator[tuple[str, object]]:
    """The targets of a mapping by name: nested as the state dict, or with dotted keys. Other values are left out."""
    for key, value in to.items():
        name = f"{prefix}{key}"
        if name in names:
            yield name, value
        elif isinstance(value, Mapping):
            yield from _targets_in(value, f"{name}.", names)
        elif isinstance(value, list | tuple) and not (value and is_mesh(value[0])) and any(map(_is_target, value)):
            yield from _targets_in(dict(enumerate(value)), f"{name}.", names)
        elif _is_target(value):
            yield name, value


def _keys(to: StateDict, prefix: str) -> Iterator[str]:
    for key, value in to.items():
        yield f"{prefix}{key}"
        if isinstance(value, Mapping):
            yield from _keys(value, f"{prefix}{key}.")


def _is_target(value: object) -> bool:
    """True for a value that can only be a target, or contains one."""
    if isinstance(value, str):
        return "/" in value
    certain = isinstance(value, Layout | Mapping) or is_tensor(value) or hasattr(value, "build_metadata")
    return certain or (isinstance(value, tuple) and bool(value) and is_mesh(value[0]))


def _are_placements(target: object) -> bool:
    """True for placements without a mesh: strings, placement objects, or a sequence of those."""
    if isinstance(target, str):
        return "/" not in target  # which the notation of layouts has
    if isinstance(target, list | tuple):
        return not (target and is_mesh(target[0]))
    if isinstance(target, Mapping):
        return True  # by the names of the axes
    return isinstance(target, Placement) or is_placement(target)
