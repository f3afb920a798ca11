"""Files of a checkpoint that keepers hold in memory, each on some hosts; others of the same save are on the disk."""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping, Sequence
from functools import cached_property
from math import prod

import numpy as np
import torch

from shardwise.checkpoint.files import ByteRange, Bytes, Files, elements
from shardwise.checkpoint.local_files import map_privately
from shardwise.errors import CheckpointError
from shardwise.exchange.messages import Tensors
from shardwise.geometry import Window
from shardwise.job.plan import ModelPlan
from shardwise.layout import local_shapes
from shardwise.storage.appending import Descriptor
from shardwise.storage.sums import data_name

Readers = tuple[tuple[int, ...], ...]  # ranks, in groups: each group can read all of a file


class KeptFiles(Files):
    """Files by name: `kept` ones are in memory of this host, the others on the disk, or only on other hosts.

    `readers`: the ranks of each host that have a file in memory; without an entry, all ranks read it from the disk.
    `from_memory`, `from_disk` and `from_hosts` (others) count the bytes that came to this rank.
    """

    def __init__(
        self,
        root: str,
        kept: Mapping[str, KeptMemory],
        readers: Mapping[str, Readers],
        sizes: Mapping[str, int],
        disk: Files | None,
        *,
        near: bool,
        host_of: Mapping[int, str],
    ) -> None:
        self.root, self.readers, self.near, self._host_of = root, readers, near, host_of
        self._memory, self._sizes, self._disk = dict(kept), sizes, disk
        self.from_memory = self.from_disk = self.from_hosts = 0
        self._arriving: int | None = None  # where a plan says it

    def add(self, name: str, data: bytes) -> None:
        """One more file, in memory of this process."""
        self._memory[name] = KeptMemory(Descriptor.of_memory("shardwise index", data), len(data))

    def planned(self, plan: ModelPlan, me: int) -> None:
        """What comes from other hosts, and at all: ranks of several hosts may be able to read the same."""
        arriving = 0
        for one in plan.links:
            size, copies = one.dtype.itemsize, one.plan.for_owner(me).copies
            senders, volumes = copies.source[copies.target == me].tolist(), copies.boxes.volumes()[copies.target == me]
            far = [self._host_of[sender] != self._host_of[me] for sender in senders]
            self.from_hosts += size * sum(volume for volume, away in zip(volumes.tolist(), far, strict=True) if away)
            arriving += size * sum(map(prod, local_shapes(one.plan.target, me)))
        self._arriving = (self._arriving or 0) + arriving

    @property
    def own_memory(self) -> int:
        """Bytes that came from memory of this host."""
        if self._arriving is None:
            return self.from_memory
        return max(0, self._arriving - self.from_hosts - self.from_disk)

    def names(self, *, recursive: bool = False) -> list[str]:
        """Of all hosts, and of the disk where it is needed."""
        return sorted({*self._memory, *self.readers, *(self._disk.names() if self._disk else ())})

    def has(self, name: str) -> bool:
        """Wherever it is. (What is in memory has no checksums: those on the disk are of the file there.)"""
        return self._kept(name) or (self._disk is not None and not self._kept(data_name(name)) and self._disk.has(name))

    def _kept(self, name: str) -> bool:
        return name in self._memory or name in self.readers

    def size(self, name: str) -> int:
        """As its keeper says."""
        if name in self._memory:
            return self._memory[name].size
        return self._sizes[name] if name in self.readers else self._on_disk(name).size(name)

    def stamp(self, name: str) -> str:
        """Memory of a step never changes."""
        return f"{self.size(name)}"

    def fetch(self, ranges: Sequence[ByteRange]) -> list[Bytes]:
        """Views of memory; from the disk in memory of its own. (Headers and the like: they do not count.)"""
        return [
            self._view(one) if one.file in self._memory else self._on_disk(one.file).fetch([one])[0] for one in ranges
        ]

    def _view(self, one: ByteRange) -> Bytes:
        self.check(one)
        return self._memory[one.file].data[one.start : one.stop]

    def read_into(self, name: str, start: int, memory: Bytes) -> None:
        """Copy bytes."""
        if name in self._memory:
            self.check(ByteRange(name, start, start + len(memory)))
            self._memory[name].read(start, memory)
            self.from_memory += len(memory)
        else:
            self._on_disk(name).read_into(name, start, memory)
            self.from_disk += len(memory)

    def elements(self, windows: Sequence[tuple[str, Window]], dtype: torch.dtype) -> Tensors:
        """As views of the memory."""
        return [self._elements(file, window, dtype) for file, window in windows]

    def _elements(self, file: str, window: Window, dtype: torch.dtype) -> torch.Tensor:
        size = window.volume * dtype.itemsize
        if file not in self._memory:
            self.from_disk += size
            return self._on_disk(file).elements([(file, window)], dtype)[0]
        self.check(ByteRange.of(file, window, dtype.itemsize))
        self.from_memory += size
        return elements(self._memory[file].data, window.offset, dtype, window.shape, window.strides)

    def cached(self, bytes: ByteRange) -> bool:
        """Memory always is."""
        return bytes.file in self._memory or self._on_disk(bytes.file).cached(bytes)

    def check_unchanged(self, names: Iterable[str], *, within: float = 0) -> None:
        """On the disk."""
        if self._disk is not None:
            self._disk.check_unchanged([name for name in names if name not in self._memory], within=within)

    def mark_opened(self) -> None:
        """On the disk."""
        if self._disk is not None:
            self._disk.mark_opened()

    def _on_disk(self, name: str) -> Files:
        if name in self.readers or self._disk is None:
            raise CheckpointError(f"{self.label(name)} is in memory of other hosts only")
        return self._disk


class KeptMemory:
    """A file in memory that a keeper has sent. It is read by calls of the system: page faults would take longer."""

    def __init__(self, file: Descriptor, size: int) -> None:
        self._file, self.size = file, size

    @cached_property
    def data(self) -> Bytes:
        """Mapped. (Memory has whole pages.)"""
        return np.frombuffer(map_privately(self._file.number) if self.size else b"", dtype=np.uint8)[: self.size]

    def read(self, start: int, memory: Bytes) -> None:
        """Copy the bytes from `start` on."""
        done = 0
        while done < len(memory):
            count = os.preadv(self._file.number, [memory[done:].data], start + done)
            if not count:
                raise CheckpointError("the memory of a keeper is shorter than it says")
            done += count
