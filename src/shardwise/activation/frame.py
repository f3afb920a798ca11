"""One forward pass of a module: which of the tensors that autograd saves are the same on all ranks."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

import torch

from shardwise.activation.account import Account
from shardwise.activation.digest import digest
from shardwise.activation.kept import Home, Kept
from shardwise.activation.saved import Cells, Saved, has_memory
from shardwise.containers.container import is_sharded
from shardwise.torch_internals import is_dtensor, replicated_along
from shardwise.torch_internals.autograd import random_state
from shardwise.torch_internals.memory import local_of, storage_of, watched_storage


@dataclass(frozen=True)
class Rule:
    """What is to be kept in parts, and how it is compared."""

    everything: bool = False  # all that is saved is known to be the same on all ranks
    check: bool | None = None  # compare all values, a sample of them (None), or nothing
    least: int = 2**16  # bytes: what is smaller stays whole


@dataclass
class Frame:
    """A module in its forward pass. What modules inside of it keep, they keep for the outermost one."""

    home: Home
    mesh: Any
    module: torch.nn.Module
    name: str
    rule: Rule
    account: Account
    outermost: Frame | None = None  # unless it is this
    compare: bool = False  # across ranks, when it ends
    kept: dict[Any, Kept] = field(default_factory=dict)  # by what they are parts of
    _watched: list[Any] = field(default_factory=list)  # their storages: none must be taken for another
    _inputs: dict[int, list[tuple[torch.Tensor, int, str]]] = field(default_factory=dict)  # by storage, with version
    _own: set[int] | None = None
    _chance: torch.Tensor | None = None

    def take(self, leaves: Iterable[tuple[str, Any]]) -> Frame:
        """These are the module's inputs."""
        self._chance = random_state(self.mesh.device_type)
        for label, leaf in leaves:
            if isinstance(leaf, torch.Tensor) and not isinstance(leaf, torch.nn.Parameter) and not is_sharded(leaf):
                tensor, _ = local_of(leaf)
                if has_memory(tensor) and not tensor.is_inference():
                    self._inputs.setdefault(storage_of(tensor), []).append((tensor, tensor._version, label))
        return self

    def saved(self, tensor: torch.Tensor) -> Saved | None:
        """What to save instead; None where it has to stay as it is."""
        local, spec = local_of(tensor)
        if not has_memory(local) or local.numel() * local.element_size() < max(self.rule.least, 1):
            return None
        found = self._same_everywhere(tensor, local)
        if found is None or storage_of(local) in self.own:
            return None
        whole, label = found
        cells = Cells.of(whole)
        start = cells.place_of(local)
        if start is None:
            return None
        stride = local.stride() if cells.start is not None else cells.stride
        return Saved(self._kept(whole, cells, f"{label} of {self.name}"), local.dtype, local.shape, stride, start, spec)

    def _same_everywhere(self, tensor: torch.Tensor, local: torch.Tensor) -> tuple[torch.Tensor, str] | None:
        """A tensor with this memory that all ranks are known to have alike, and what it is.

        Of an input all of it: what a rank sees of it may be its own part.
        """
        for whole, version, label in self._inputs.get(storage_of(local), ()):
            if Cells.of(whole).place_of(local) is not None:
                return (whole, label) if whole._version == version else None  # changed in place, by who knows what
        known = replicated_along(tensor, self.mesh) if is_dtensor(tensor) else self.rule.everything
        if not known or (not self.rule.everything and self.chance):
            return None
        return local, f"a saved tensor of shape {tuple(tensor.shape)}"

    @property
    def chance(self) -> bool:
        """True once random numbers were drawn: what a DTensor says of them does not hold on every kind of device."""
        assert self._chance is not None, "it has its inputs"
        return not torch.equal(self._chance, random_state(self.mesh.device_type))

    @property
    def own(self) -> set[int]:
        """The storages of parameters and buffers: they stay anyway."""
        if self._own is None:
            tensors = [local_of(tensor)[0] for tensor in (*self.module.parameters(), *self.module.buffers())]
            self._own = {storage_of(tensor) for tensor in tensors if has_memory(tensor)}
        return self._own

    def _kept(self, local: torch.Tensor, cells: Cells, label: str) -> Kept:
        outermost = self.outermost or self
        key = storage_of(local), local._version, cells.key
        if key not in outermost.kept:
            whole = cells.bytes(local)
            site = self.name, len(outermost.kept)
            outermost.kept[key] = self.home.keep(whole, self._digest(whole), site, label, self.account)
            outermost._watched.append(watched_storage(local))
        outermost.kept[key].uses += 1
        return outermost.kept[key]

    def _digest(self, whole: torch.Tensor) -> int:
        if self.rule.check is False or (whole.device.type != "cpu" and not self.rule.check):
            return 0  # on other devices it would stop the stream
        return digest(whole, sample=not self.rule.check)
