"""One forward pass of a module: which of the tensors that autograd saves are the same on all ranks."""

from __future__ import annotations

from collections.abc import Hashable, Iterable
from dataclasses import dataclass, field

import torch
from torch.distributed.device_mesh import DeviceMesh

from shardwise.activation.account import Account
from shardwise.activation.digest import digest
from shardwise.activation.saved import PackedTensor, StorageRegion, has_memory
from shardwise.activation.sharded_activation import ActivationStore, ShardedActivation
from shardwise.containers.dtensor import is_dtensor, replicated_along
from shardwise.containers.memory import StorageWeakRef, local_of, storage_of, version_of, watched_storage
from shardwise.containers.sharded import is_sharded
from shardwise.containers.torch_private import random_state


@dataclass(frozen=True)
class SavePolicy:
    """Which saved tensors become shards, and how ranks compare them."""

    everything: bool = False  # all that is saved is known to be the same on all ranks
    check: bool | None = None  # compare all values, a sample of them (None), or nothing
    least: int = 2**16  # bytes: smaller tensors stay whole


@dataclass
class ForwardScope:
    """A module in its forward pass. Modules inside it save their tensors in the outermost one."""

    store: ActivationStore
    mesh: DeviceMesh
    module: torch.nn.Module
    name: str
    policy: SavePolicy
    account: Account
    outermost: ForwardScope | None = None  # None where this is the outermost
    compare: bool = False  # across ranks, when it ends
    activations: dict[Hashable, ShardedActivation] = field(default_factory=dict)  # by the memory they are parts of
    _watched: list[StorageWeakRef] = field(default_factory=list)  # their storages: a number must stay theirs
    _inputs: dict[int, list[tuple[torch.Tensor, int, str]]] = field(default_factory=dict)  # by storage, with version
    _own: set[int] | None = None
    _random_state: torch.Tensor | None = None

    def take_inputs(self, leaves: Iterable[tuple[str, object]]) -> ForwardScope:
        """Remember the module's inputs, each with a label for errors."""
        self._random_state = random_state(self.mesh.device_type)
        for label, leaf in leaves:
            if isinstance(leaf, torch.Tensor) and not isinstance(leaf, torch.nn.Parameter) and not is_sharded(leaf):
                tensor, _ = local_of(leaf)
                if has_memory(tensor) and not tensor.is_inference():
                    self._inputs.setdefault(storage_of(tensor), []).append((tensor, version_of(tensor), label))
        return self

    def save(self, tensor: torch.Tensor) -> PackedTensor | None:
        """What to save instead of a tensor; None where it has to stay whole."""
        local, spec = local_of(tensor)
        if not has_memory(local) or local.numel() * local.element_size() < max(self.policy.least, 1):
            return None
        same = self._same_everywhere(tensor, local)
        if same is None or storage_of(local) in self.own:
            return None
        whole, label = same
        region = StorageRegion.of(whole)
        start = region.offset_of(local)
        if start is None:
            return None
        stride = local.stride() if region.start is not None else region.stride
        activation = self._activation(whole, region, f"{label} of {self.name}")
        return PackedTensor(activation, local.dtype, local.shape, stride, start, spec)

    def _same_everywhere(self, tensor: torch.Tensor, local: torch.Tensor) -> tuple[torch.Tensor, str] | None:
        """A tensor with this memory that is known to be the same on all ranks, and its label.

        For an input, all of it: the view that a rank saves may be its own part.
        """
        for whole, version, label in self._inputs.get(storage_of(local), ()):
            if StorageRegion.of(whole).offset_of(local) is not None:
                return (whole, label) if version_of(whole) == version else None  # changed in place since
        known = replicated_along(tensor, self.mesh) if is_dtensor(tensor) else self.policy.everything
        if not known or (not self.policy.everything and self.drew_random):
            return None
        return local, f"a saved tensor of shape {tuple(tensor.shape)}"

    @property
    def drew_random(self) -> bool:
        """True once random numbers were drawn: not every kind of device draws the same for a replicated DTensor."""
        assert self._random_state is not None, "it has its inputs"
        return not torch.equal(self._random_state, random_state(self.mesh.device_type))

    @property
    def own(self) -> set[int]:
        """The storages of parameters and buffers: they stay in memory anyway."""
        if self._own is None:
            tensors = [local_of(tensor)[0] for tensor in (*self.module.parameters(), *self.module.buffers())]
            self._own = {storage_of(tensor) for tensor in tensors if has_memory(tensor)}
        return self._own

    def _activation(self, local: torch.Tensor, region: StorageRegion, label: str) -> ShardedActivation:
        outermost = self.outermost or self
        key = storage_of(local), version_of(local), region.key
        if key not in outermost.activations:
            whole = region.bytes(local)
            site = self.name, len(outermost.activations)
            outermost.activations[key] = self.store.shard(whole, self._digest(whole), site, label, self.account)
            outermost._watched.append(watched_storage(local))
        outermost.activations[key].uses += 1
        return outermost.activations[key]

    def _digest(self, whole: torch.Tensor) -> int:
        if self.policy.check is False or (whole.device.type != "cpu" and not self.policy.check):
            return 0  # on other devices it would stop the stream
        return digest(whole, sample=not self.policy.check)
