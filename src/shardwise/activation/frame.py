"""One forward pass of a module: which of the tensors that autograd saves are the same on all ranks."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

import torch

from shardwise.activation.account import Account
from shardwise.activation.announcement import Announcement, digest
from shardwise.activation.kept import Home, Kept, Saved
from shardwise.dtensor import is_dtensor, local_of, random_state, replicated_along, storage_of, watched_storage

PLAIN = (torch.Tensor, torch.nn.Parameter)


@dataclass(frozen=True)
class Rule:
    """What is to be kept in parts, and how it is compared."""

    everything: bool = False  # all that is saved is known to be the same on all ranks
    check: bool | None = None  # compare all values, a sample of them (None), or nothing
    least: int = 2**16  # bytes: what is smaller stays whole


@dataclass
class Frame:
    """A module in its forward pass, and the one outside of it in which what they keep is announced."""

    home: Home
    mesh: Any
    module: torch.nn.Module
    name: str
    rule: Rule
    account: Account
    root: Frame | None = None
    inputs: dict[int, tuple[torch.Tensor, int, str]] = field(default_factory=dict)  # by storage, with their version
    kept: list[Kept] = field(default_factory=list)
    digests: list[int] = field(default_factory=list)
    _own: set[int] | None = None
    _chance: torch.Tensor | None = None

    def take(self, tensors: Iterable[tuple[str, Any]]) -> Frame:
        """These are the module's inputs."""
        self._chance = random_state(self.mesh.device_type)
        for label, leaf in tensors:
            if isinstance(leaf, torch.Tensor) and not isinstance(leaf, torch.nn.Parameter) and not is_dtensor(leaf):
                tensor, _ = local_of(leaf)
                if _has_memory(tensor) and not tensor.is_inference():
                    self.inputs.setdefault(storage_of(tensor), (tensor, tensor._version, label))
        return self

    def saved(self, tensor: torch.Tensor) -> Saved | None:
        """What to save instead; None where it has to stay as it is."""
        local, spec = local_of(tensor)
        if not _has_memory(local) or local.numel() * local.element_size() < max(self.rule.least, 1):
            return None
        label = self._same_everywhere(tensor, local)
        return None if label is None else self._keep(local, spec, f"{label} of {self.name}")

    def _same_everywhere(self, tensor: torch.Tensor, local: torch.Tensor) -> str | None:
        """What it is, if all ranks are known to have the same."""
        storage = storage_of(local)
        if storage in self.own:
            return None
        if storage in self.inputs:
            whose, version, label = self.inputs[storage]
            return label if whose._version == version else None  # changed in place, by who knows what
        known = replicated_along(tensor, self.mesh) if is_dtensor(tensor) else self.rule.everything
        if not known or (self.chance and not self.rule.everything):
            return None
        return f"a saved tensor of shape {tuple(tensor.shape)}"

    @property
    def chance(self) -> bool:
        """True once random numbers were drawn: what a DTensor says of them does not hold on every kind of device."""
        assert self._chance is not None, "of a module with its inputs"
        return not torch.equal(self._chance, random_state(self.mesh.device_type))

    @property
    def own(self) -> set[int]:
        """The storages of parameters and buffers: they stay anyway."""
        if self._own is None:
            tensors = [local_of(tensor)[0] for tensor in (*self.module.parameters(), *self.module.buffers())]
            self._own = {storage_of(tensor) for tensor in tensors if _has_memory(tensor)}
        return self._own

    def _keep(self, local: torch.Tensor, spec: Any, label: str) -> Saved:
        cells = Cells.of(local)
        key = storage_of(local), local._version, *cells.key
        kept = self.home.known(key)
        if kept is None:
            whole = cells.bytes(local)
            kept = self.home.keep(key, whole, watched_storage(local), label, self.account)
            self._announce_later(kept, whole)
        kept.uses += 1
        return Saved(kept, local.dtype, tuple(local.shape), cells.stride, spec)

    def _announce_later(self, kept: Kept, whole: torch.Tensor) -> None:
        root = self.root or self
        root.kept.append(kept)
        if self.rule.check is not False and whole.device.type == "cpu":  # elsewhere it would stop the stream
            root.digests.append(digest(whole, sample=not self.rule.check))
        else:
            root.digests.append(kept.bytes)

    def announce(self) -> None:
        """Tell the other ranks what was kept. They tell the same, and all know before it is restored."""
        if self.kept and self.root is None:
            labels = [kept.label for kept in self.kept]
            announcement = Announcement(self.home, self.kept[0].number, labels, self.digests)
            for kept in self.kept:
                kept.announcement = announcement


@dataclass(frozen=True)
class Cells:
    """How the elements of a tensor lie in memory: densely, in some order of dims, or as a copy that does."""

    key: tuple[Any, ...]  # tensors of a storage with equal keys are made of the same bytes
    start: int | None  # in bytes; None for a copy
    count: int  # of elements
    stride: tuple[int, ...]  # in what is kept

    @staticmethod
    def of(tensor: torch.Tensor) -> Cells:
        """Dims that are only repeated count once."""
        dims = sorted((stride, size) for stride, size in zip(tensor.stride(), tensor.shape, strict=True) if size > 1)
        count, dense = 1, True
        for stride, size in dims:
            if stride:
                dense = dense and stride == count
                count *= size
        if dense:
            start = int(tensor.storage_offset()) * tensor.element_size()
            return Cells((start, count * tensor.element_size()), start, count, tensor.stride())
        key = tensor.dtype, tensor.storage_offset(), tuple(tensor.shape), tensor.stride()
        return Cells(key, None, count, _repeated(tensor, _once(tensor).contiguous().stride()))

    def bytes(self, tensor: torch.Tensor) -> torch.Tensor:
        """All of them, in a row."""
        if self.start is None:
            return _once(tensor).contiguous().view(-1).view(torch.uint8)
        flat = torch.empty(0, dtype=torch.uint8, device=tensor.device)
        return flat.set_(tensor.untyped_storage(), self.start, (self.count * tensor.element_size(),), (1,))


def _once(tensor: torch.Tensor) -> torch.Tensor:
    """Without what is only repeated."""
    for dim, stride in enumerate(tensor.stride()):
        if not stride:
            tensor = tensor.narrow(dim, 0, 1)
    return tensor


def _repeated(tensor: torch.Tensor, stride: tuple[int, ...]) -> tuple[int, ...]:
    return tuple(new if old else 0 for old, new in zip(tensor.stride(), stride, strict=True))


def _has_memory(tensor: torch.Tensor) -> bool:
    """True for what is made of bytes in memory: no meta tensors, wrappers, or views that are negated when read."""
    plain = type(tensor) in PLAIN and tensor.layout == torch.strided and not tensor.is_meta
    return plain and not tensor.is_conj() and not tensor.is_neg()
