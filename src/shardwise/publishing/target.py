"""The tensors that a subscriber pulls into, and the memory aside in which a version arrives first."""

from __future__ import annotations

import time
from collections.abc import Sequence

import torch

from shardwise.containers.memory import check_written
from shardwise.errors import ExchangeError
from shardwise.exchange.buffers import copy_all
from shardwise.job.job import local_subtensors
from shardwise.job.remap import Link, partly_filled
from shardwise.job.side import LiveSide, Side
from shardwise.job.snapshot import MemorySpec, Snapshot
from shardwise.layout import local_shapes
from shardwise.publishing.catalog import Infos
from shardwise.publishing.orders import Version
from shardwise.state.memory_checks import check_apart


class PullTarget:
    """This rank's target. `infos`: the tensors that versions are pulled into; `known`: those of the state dict.

    A version that another host sent lies in memory aside until the next one: other jobs of this host read it there.
    """

    def __init__(self, side: LiveSide, known: Infos, infos: Infos, links: Sequence[Link], me: int) -> None:
        self.side, self.infos = side, infos
        self._known, self._links, self._me = known, links, me
        self._stamp: object = None  # of memory that was checked
        self._aside: Snapshot | None = None
        self.version_aside: Version | None = None  # None while it is not whole

    def check(self) -> None:
        """Refuse tensors that do not match their layouts, cannot be written, or would be written twice."""
        stamp = self.side.stamp()
        if stamp == self._stamp:
            self.side.forget_buffers()
            return
        targets = self.side.checked("target", {**self._known, **self.infos}, self._me)
        for name, memory in targets.items():
            for tensor in memory:
                check_written(tensor, f"{name!r} of the target")
        check_apart(targets, {})
        self._stamp = stamp

    def memory_to_receive(self, *, aside: bool) -> Side:
        """Where the next version is received: the version aside is overwritten."""
        self.version_aside = None
        if aside and self._aside is None:
            self._aside = self._new_aside()
        return self.side if self._aside is None else self._aside

    def received(self, version: Version) -> None:
        """All ranks have the whole version."""
        self.version_aside = version if self._aside is not None else None

    def abandon_aside(self) -> None:
        """Somebody may still read the memory aside: the next version gets new memory, and no delta builds on this."""
        self._aside = self.version_aside = None

    def _new_aside(self) -> Snapshot:
        like = dict[str, list[MemorySpec]]()
        for name, info in self.infos.items():
            device, shapes = self.side.device_of(name), local_shapes(info.layout, self._me)
            like[name] = [MemorySpec(shape, info.dtype, device) for shape in shapes]
        return Snapshot(like)

    def copy_aside(self) -> None:
        """Copy the version aside into the tensors. Cells that no link writes stay as they are."""
        if self._aside is None:
            return
        partly = set(partly_filled(self._links, {name: info.shape for name, info in self.infos.items()}))
        targets, sources = list[torch.Tensor](), list[torch.Tensor]()
        for name, info in self.infos.items():
            ends = self.side.memory(name), self._aside.memory(name)
            views = [link.target_view for link in self._links if link.target == name] if name in partly else [None]
            for view in views:
                ours, theirs = ends if view is None else [local_subtensors(one, info, view, self._me) for one in ends]
                targets += ours
                sources += theirs[: len(ours)]
        copy_all(targets, sources)
        self.side.filled(list(self.infos))

    def wait_for_aside(self, version: Version, patience: float) -> Side:
        """The memory aside, once it has a version. Another rank may have been faster to say that all have it."""
        end = time.monotonic() + patience
        while self.version_aside != version and time.monotonic() < end:
            time.sleep(0.005)
        aside = self._aside
        if aside is None or self.version_aside != version:
            raise ExchangeError(f"version {version[1]} is not available on this rank")
        return aside
