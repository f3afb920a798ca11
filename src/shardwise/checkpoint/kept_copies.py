"""Copies of the files of other ranks, which a rank's keeper holds beside its own.

Which cells they have is a layout whose owners are the ranks that hold the copies. They are filled by a plan from the
live tensors to this layout: what a rank has already, it copies; only the rest is sent.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import lru_cache
from math import prod

import torch

from shardwise.checkpoint.formats.writers import Contents, TensorPart
from shardwise.checkpoint.staging import Vacancy
from shardwise.containers.description import memory_of
from shardwise.exchange.messages import Tensors
from shardwise.geometry import Box
from shardwise.job.agree import Callers, agree_on
from shardwise.job.job import Job
from shardwise.job.plan import HostsOfGroup, ModelPlan, TensorInfo
from shardwise.job.remap import Link
from shardwise.job.subtensor import Subtensor
from shardwise.layout import Layout

OPERATION = "keep in memory"
Holders = tuple[tuple[int, tuple[int, ...]], ...]  # of every rank: those that hold a copy of its file


def holders(hosts: Sequence[Sequence[int]], copies: int) -> Holders:
    """Who holds the copies: ranks of other hosts; on one host, other ranks. As many as there are.

    >>> holders([[0, 1], [2, 3]], 2)
    ((0, (2,)), (1, (3,)), (2, (0,)), (3, (1,)))
    >>> holders([[0, 1, 2]], 3)
    ((0, (1, 2)), (1, (2, 0)), (2, (0, 1)))
    """
    lost_together = hosts if len(hosts) > 1 else [[rank] for some in hosts for rank in some]
    several, found = len(lost_together), dict[int, tuple[int, ...]]()
    for number, ranks in enumerate(lost_together):
        others = [lost_together[(number + turn) % several] for turn in range(1, min(copies, several))]
        found |= {rank: tuple(some[at % len(some)] for some in others) for at, rank in enumerate(ranks)}
    return tuple(sorted(found.items()))


class Vacancies:
    """The tensors of copied files on this rank, before they are filled: by name, in the order of the layout."""

    def __init__(self, contents: Contents, held: Sequence[int]) -> None:
        self._contents, self._parts = contents, dict[int, list[TensorPart]]()
        self._open = dict[str, list[Vacancy]]()
        self._aside = dict[str, Tensors]()
        for owner in held:
            self._parts[owner] = [part for name in written(contents) for part in self._of(name, owner)]

    def _of(self, name: str, owner: int) -> list[TensorPart]:
        dtype, layout = self._contents.tensors[name]
        if owner not in layout:
            return []
        parts = list[TensorPart]()
        for box in _boxes(layout, owner):
            shape = (*box.shape, 2) if dtype.is_complex else box.shape
            vacancy = Vacancy(shape, dtype.to_real() if dtype.is_complex else dtype)
            self._open.setdefault(name, []).append(vacancy)
            parts.append(TensorPart(name, box, dtype, vacancy.write))
        return parts

    def parts(self, owner: int) -> list[TensorPart]:
        """What the file of an owner has."""
        return self._parts[owner]

    def memory(self, name: str) -> Tensors:
        """The rooms of a tensor. Complex numbers come to aligned memory first."""
        rooms = [one.room for one in self._open.get(name, []) if one.room is not None]
        if not self._contents.tensors[name][0].is_complex:
            return rooms
        if name not in self._aside:
            self._aside[name] = [torch.view_as_complex(torch.empty_like(room)) for room in rooms]
        return self._aside[name]

    def stamp(self) -> object:
        """They are filled once."""
        return object()

    def sent(self, links: Sequence[int]) -> None:
        """They are only a target."""

    def filled(self, names: Sequence[str]) -> None:
        """Move what came aside to its place."""
        for name in names:
            for room, values in zip(self._open.get(name, []), self._aside.pop(name, []), strict=False):
                assert room.room is not None
                room.room.copy_(torch.view_as_real(values))


class _Live:
    """The tensors of a state dict, on the ranks whose values count."""

    def __init__(self, flat: Mapping[str, object], infos: Mapping[str, TensorInfo], me: int) -> None:
        self._flat, self._infos, self._me = flat, infos, me

    def memory(self, name: str) -> Tensors:
        """Of the container."""
        return memory_of(self._flat.get(name)) if self._me in self._infos[name].layout else []

    def stamp(self) -> object:
        """They are read once."""
        return object()

    def sent(self, links: Sequence[int]) -> None:
        """They stay as they are."""

    def filled(self, names: Sequence[str]) -> None:
        """They are only a source."""


class CopyJob:
    """Fills the copies of all ranks, save after save. The plan is made anew when the state has other layouts."""

    def __init__(self) -> None:
        self._job: Job | None = None
        self._made_for: object = None

    def run(
        self,
        callers: Callers,
        flat: Mapping[str, object],
        infos: Mapping[str, TensorInfo],
        contents: Contents,
        who: Holders,
        vacancies: Vacancies,
    ) -> None:
        """All ranks call."""
        sources = {name: infos[name] for name in written(contents) if prod(infos[name].shape)}
        made_for = sources, {name: contents.tensors[name] for name in sources}, who
        if callers.transport is None or not any(some for _, some in who):
            return
        if self._job is None or self._made_for != made_for:
            plan, _ = agree_on(callers.transport, OPERATION, lambda: (_plan(callers, sources, contents, who), None))
            self._job, self._made_for = Job(callers.transport, plan, OPERATION), made_for
        self._job.run(_Live(flat, sources, callers.me), vacancies, check=lambda: None)


def _plan(callers: Callers, sources: Mapping[str, TensorInfo], contents: Contents, who: Holders) -> ModelPlan:
    """From where the cells are to where their copies will be."""
    targets, links = dict[str, TensorInfo](), list[Link]()
    for name, one in sources.items():
        targets[name] = TensorInfo(one.shape, one.dtype, _copied(contents.tensors[name][1], who), "cpu")
        whole = Subtensor.whole(one.shape)
        links.append(Link(name, name, whole, whole))
    hosts = None if callers.transport is None else callers.transport.hosts
    return ModelPlan.of(links, sources, targets, hosts=HostsOfGroup.of("auto", hosts))


@lru_cache(maxsize=1024)
def _copied(layout: Layout, who: Holders) -> Layout:
    """Where the copies are of what each owner writes. A rank holds those of several in the order of the owners."""
    of = dict(who)
    pieces = [
        (holder, piece.box.lo, piece.box.hi)
        for owner in layout.owners()
        for piece in layout.pieces(owner)
        for holder in of[owner]
    ]
    return Layout.boxes(layout.shape, pieces)


@lru_cache(maxsize=4096)
def _boxes(layout: Layout, owner: int) -> list[Box]:
    """Cached: many tensors share a layout, and are kept again and again."""
    return [piece.box for piece in layout.pieces(owner)]


def written(contents: Contents) -> list[str]:
    """The tensors that have parts of their own."""
    return [name for name in contents.tensors if name not in contents.tied]
