"""The sides of a job: the memory of tensors on this rank, and what all ranks know of them together."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, Protocol

import torch

from shardwise.containers.delivered import DeliveredTensor
from shardwise.containers.description import Descriptions, TensorDescription, memory_of, stamp_of
from shardwise.containers.memory import ExpectedMemory, check_local
from shardwise.containers.own_container import OwnContainer
from shardwise.exchange.buffers import fresh
from shardwise.exchange.messages import Tensors
from shardwise.job.plan import TensorInfo
from shardwise.layout import Layout, local_shapes
from shardwise.transports import GroupTransport


@dataclass(frozen=True)
class PlainContainer(OwnContainer):
    """The container of a plain tensor: whole, on every rank that has it."""

    on: torch.device | None = None

    @property
    def device(self) -> torch.device | None:
        """Where it is to be."""
        return self.on

    def disassemble(self, x: torch.Tensor) -> Tensors:
        """Itself."""
        return [x]

    def assemble(self, tensors: Sequence[torch.Tensor]) -> Any:
        """The tensor; None on a rank that has none."""
        return tensors[0] if tensors else None


class Side(Protocol):
    """One side of a job, on this rank: the memory of its tensors."""

    def memory(self, name: str) -> Tensors:
        """This rank's local tensors of the whole, apart from autograd."""
        ...

    def stamp(self) -> object:
        """Equal to an earlier stamp while no memory has moved."""
        ...

    def sent(self, links: Sequence[int]) -> None:
        """These links of the plan, by number, were sent: their sources are not read again."""
        ...

    def filled(self, names: Sequence[str]) -> None:
        """All cells of these targets are written."""
        ...


class LiveSide:
    """Tensors of a state dict, by name. Delivered ones get memory when they are filled."""

    def __init__(self, values: Mapping[str, object], names: Iterable[str]) -> None:
        self.values, self._names = values, list(names)
        self._delivered = {name: one for name in self._names if isinstance(one := values.get(name), DeliveredTensor)}
        self._buffers = dict[str, Tensors]()  # of delivered tensors that are being filled
        self._filled = set[str]()  # delivered tensors that wait for others of their delivery

    def memory(self, name: str) -> Tensors:
        """Of the container."""
        if name in self._delivered:
            if name not in self._buffers:
                self._buffers[name] = self._delivered[name].allocate()
            return self._buffers[name]
        return memory_of(self.values.get(name))

    def lasting(self) -> dict[str, Tensors]:
        """All memory that exists before and after a run: not that of delivered tensors."""
        return {name: memory_of(self.values.get(name)) for name in self._names if name not in self._delivered}

    def device_of(self, name: str) -> torch.device:
        """Of the memory; the CPU where this rank has none."""
        tensors = [self._delivered[name]] if name in self._delivered else self.memory(name)
        return next((tensor.device for tensor in tensors), torch.device("cpu"))

    def stamp(self) -> object:
        """By the places of all tensors."""
        return stamp_of(map(self.values.get, self._names))

    def sent(self, links: Sequence[int]) -> None:
        """They stay as they are."""

    def deliveries(self) -> list[Sequence[str]]:
        """The names of each delivery."""
        return [delivery.names for delivery in dict.fromkeys(one.delivery for one in self._delivered.values())]

    def filled(self, names: Sequence[str]) -> None:
        """Hand over deliveries that are complete."""
        arrived = [name for name in names if name in self._delivered]
        self._filled.update(arrived)
        for delivery in dict.fromkeys(self._delivered[name].delivery for name in arrived):
            if self._filled.issuperset(delivery.names):
                self._filled.difference_update(delivery.names)
                delivery.take({name: self._buffers.pop(name) for name in delivery.names})

    def forget_buffers(self) -> None:
        """Those that a failed run left."""
        self._buffers.clear()
        self._filled.clear()

    def checked(self, what: str, infos: Mapping[str, TensorInfo], me: int) -> dict[str, Tensors]:
        """All lasting memory; refused if it does not fit the layouts."""
        self.forget_buffers()
        memories = self.lasting()
        check_side(what, memories, infos, me)
        for name, one in self._delivered.items():
            absent = [other for other in one.delivery.names if other not in self._delivered]
            if absent:
                raise ValueError(f"{name!r} of the {what} is handed over together with {absent[0]!r}: give both")
        return memories


class FailedSide:
    """A side whose memory cannot be read. A job raises the reason on all ranks."""

    def __init__(self, error: Exception) -> None:
        self._error = error

    def memory(self, name: str) -> Tensors:
        """Nobody gets any."""
        raise self._error

    def stamp(self) -> object:
        """Never equal to an earlier stamp."""
        return object()

    def sent(self, links: Sequence[int]) -> None:
        """Nothing is sent."""

    def filled(self, names: Sequence[str]) -> None:
        """Nothing is written."""


class FreshSide:
    """Memory that is allocated at first use."""

    def __init__(self, infos: Mapping[str, TensorInfo], device_of: Callable[[str], torch.device], me: int) -> None:
        self._infos, self._device_of, self._me = infos, device_of, me
        self._tensors = dict[str, Tensors]()

    def memory(self, name: str) -> Tensors:
        """Not filled yet."""
        if name not in self._tensors:
            info, device = self._infos[name], self._device_of(name)
            shapes = local_shapes(info.layout, self._me)
            self._tensors[name] = [fresh(shape, info.dtype, device) for shape in shapes]
        return self._tensors[name]

    def stamp(self) -> object:
        """Never equal to an earlier stamp."""
        return object()

    def sent(self, links: Sequence[int]) -> None:
        """Nothing is read here."""

    def filled(self, names: Sequence[str]) -> None:
        """They stay here until they are looked up."""


def check_side(what: str, memories: Mapping[str, Tensors], infos: Mapping[str, TensorInfo], me: int) -> None:
    """Refuse memory, by the name of its tensor, that is not what the layouts give this rank."""
    layouts = {id(infos[name].layout): infos[name].layout for name in memories}  # few, however many tensors
    shapes = {key: local_shapes(layout, me) for key, layout in layouts.items()}
    check_local(
        [
            ExpectedMemory(f"{name!r} of the {what}", memory, shapes[id(infos[name].layout)], infos[name].dtype)
            for name, memory in memories.items()
        ]
    )


def refuse_several_jobs(by_rank: Mapping[int, Descriptions | None], transport: GroupTransport | None) -> None:
    """Refuse a source that several jobs give, each on its own ranks: equal names do not make them replicas."""
    jobs = transport.members.jobs if transport is not None else ()
    layouts = defaultdict[str, dict[int, set[str]]](lambda: defaultdict(set))
    for rank, known in by_rank.items() if jobs else ():
        for name, tensor in (known or {}).items():
            if tensor is not None:  # nobody says that plain ones of two jobs are equal
                plain = f"a plain tensor on rank {rank}"
                layouts[name][jobs[rank]].add(plain if tensor.layout is None else str(tensor.layout))
    for name, (first, *others) in ((name, list(by_job.values())) for name, by_job in layouts.items()):
        for other in others:
            if other != first:
                raise ValueError(
                    f"{name!r} is given by several jobs, as {min(first)} and as {min(other)}: give it on ranks of one "
                    f"job, and None on the others; one over ranks of the group, replicas too, is "
                    f"ShardedTensor(shards, layout, group)"
                )


def combine_descriptions(by_rank: Mapping[int, Descriptions | None], side: str) -> dict[str, TensorInfo]:
    """The infos of all tensors for a plan; raises if the ranks with the state dict do not agree.

    A name that is None on all ranks is left out: it is not a tensor.
    """
    groups = dict[int, tuple[list[int], Descriptions]]()  # usually all ranks send the same, as one object
    for rank, known in by_rank.items():
        if known is not None:
            groups.setdefault(id(known), ([], known))[0].append(rank)
    if not groups:
        raise ValueError(
            f"no rank has a {side}: at least one must give it. Jobs that were started separately are one "
            f"group only if all of them give group="
        )
    (first, *_), names = next(iter(groups.values()))
    for (rank, *_), other in groups.values():
        if list(other) != list(names):
            strange = sorted(set(names) ^ set(other)) or [a for a, b in zip(names, other, strict=True) if a != b]
            raise ValueError(
                f"the {side} has other names on rank {rank} than on rank {first}: {', '.join(map(repr, strange[:5]))}"
            )
    infos = {name: _one(f"{name!r} of the {side}", [(r, one[name]) for r, one in groups.values()]) for name in names}
    return {name: tensor for name, tensor in infos.items() if tensor is not None}


Present = Sequence[tuple[list[int], TensorDescription]]  # ranks, and what they all say of a tensor


def _one(what: str, descriptions: Iterable[tuple[list[int], TensorDescription | None]]) -> TensorInfo | None:
    present = [(ranks, one) for ranks, one in descriptions if one is not None]
    if not present:
        return None
    shape, dtype, device = (_same(what, field, present) for field in ("shape", "dtype", "device"))
    delivered = any(one.delivered for _, one in present)
    dtype = dtype or torch.get_default_dtype()
    return TensorInfo(shape, dtype, _layout(what, shape, present), device or "cpu", delivered=delivered)


def _same(what: str, field: str, present: Present) -> Any:
    """A field of all descriptions; None if nobody knows it."""
    values = [(ranks[0], value) for ranks, one in present if (value := getattr(one, field)) is not None]
    for rank, value in values[1:]:
        if value != values[0][1]:
            there = f"{values[0][1]} on rank {values[0][0]}"
            raise ValueError(f"{what} has {field} {there}, but {value} on rank {rank}")
    return values[0][1] if values else None


def _layout(what: str, shape: tuple[int, ...], present: Present) -> Layout:
    """Over the ranks of all descriptions. Plain tensors are the same on every rank that has them."""
    plain = [ranks for ranks, one in present if one.layout is None]
    if len(plain) == len(present):
        return _replicated(shape, tuple(sorted(rank for ranks in plain for rank in ranks)))
    if plain:
        raise ValueError(f"{what} is sharded on some ranks, but a plain tensor on rank {plain[0][0]}")
    layouts = tuple({id(one.layout): one.layout for _, one in present if one.layout is not None}.values())
    if len(layouts) == 1:  # as usual
        return layouts[0]
    layout: Layout = _join(tuple(dict.fromkeys(layouts))) or _same(what, "layout", present)
    return layout


@lru_cache(maxsize=4096)
def _replicated(shape: tuple[int, ...], holders: tuple[int, ...]) -> Layout:
    return Layout.replicated(shape, holders)


@lru_cache(maxsize=1024)
def _join(layouts: tuple[Layout, ...]) -> Layout | None:
    """One layout for several on disjoint ranks, each of the whole tensor. None if they share ranks."""
    if len(layouts) == 1:
        return layouts[0]
    owners = [owner for layout in layouts for owner in layout.owners()]
    if any(layout.op for layout in layouts) or len(owners) != len(set(owners)):
        return None
    pieces = [(o, piece.box.lo, piece.box.hi) for one in layouts for o in one.owners() for piece in one.pieces(o)]
    both = Layout.boxes(layouts[0].shape, pieces, overlap="replicas")
    same = all(both.local_shapes(o) == one.local_shapes(o) for one in layouts for o in one.owners() if o in both)
    return both if same else None
