"""The tensors of a state dict: their memory on this rank, and their descriptions, which all ranks share."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from operator import add
from typing import Any, NamedTuple, Protocol, TypeGuard

import torch

from shardwise.containers.container import container_of, is_sharded, on_transport
from shardwise.containers.delivered import DeliveredTensor
from shardwise.containers.memory import check_memory
from shardwise.containers.own_container import OwnContainer
from shardwise.containers.sharded import ShardedTensor
from shardwise.errors import LayoutError
from shardwise.exchange.buffers import fresh
from shardwise.job.plan import TensorInfo
from shardwise.layout import Layout, local_shapes
from shardwise.torch_internals import is_dtensor
from shardwise.torch_internals.memory import chunks_in, is_chunked, local_of, whole_shape
from shardwise.transports import GroupTransport
from shardwise.transports.members import job_rank

Tensors = list[torch.Tensor]


@dataclass(frozen=True)
class PlainContainer(OwnContainer):
    """The container of a plain tensor: whole, on every rank that has it."""

    on: torch.device | None = None

    @property
    def device(self) -> torch.device | None:
        """Where it is to be."""
        return self.on

    def disassemble(self, x: torch.Tensor) -> list[torch.Tensor]:
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

    def sent(self, entries: Sequence[int]) -> None:
        """These entries of the plan were sent: their sources are not read again."""
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
        """All memory that is there before and after a run."""
        return {name: self.memory(name) for name in self._names if name not in self._delivered}

    def device_of(self, name: str) -> torch.device:
        """Of the memory; the CPU where this rank has none."""
        tensors = [self._delivered[name]] if name in self._delivered else self.memory(name)
        return next((tensor.device for tensor in tensors), torch.device("cpu"))

    def stamp(self) -> object:
        """Addresses, and the inference mode, which decides what may be written."""
        tensors = (t for name in self._names for t in memory_of(self.values.get(name), apart=False))
        return [_place(tensor) for tensor in tensors], torch.is_inference_mode_enabled()

    def sent(self, entries: Sequence[int]) -> None:
        """They stay as they are."""

    def deliveries(self) -> list[Sequence[str]]:
        """The names that are handed over together."""
        return [delivery.names for delivery in dict.fromkeys(one.delivery for one in self._delivered.values())]

    def filled(self, names: Sequence[str]) -> None:
        """Hand over deliveries that are complete."""
        arrived = [name for name in names if name in self._delivered]
        self._filled.update(arrived)
        for delivery in dict.fromkeys(self._delivered[name].delivery for name in arrived):
            if self._filled.issuperset(delivery.names):
                self._filled.difference_update(delivery.names)
                delivery.take([(name, self._buffers.pop(name)[0]) for name in delivery.names])

    def checked(self, what: str, infos: Mapping[str, TensorInfo], me: int) -> dict[str, Tensors]:
        """All lasting memory; refused where it is not what the layouts give this rank. Forgets a run that failed."""
        self._buffers.clear()
        self._filled.clear()
        memories = self.lasting()
        for name, memory in memories.items():
            check_local(f"{name!r} of the {what}", memory, infos[name], me)
        for name, one in self._delivered.items():
            absent = [other for other in one.delivery.names if other not in self._delivered]
            if absent:
                raise ValueError(f"{name!r} of the {what} is handed over together with {absent[0]!r}: give both")
        return memories


def _place(tensor: torch.Tensor) -> object:
    if tensor.layout != torch.strided:
        return id(tensor)
    return tensor.data_ptr(), tensor.dtype, tensor.shape, tensor.stride()


class FreshSide:
    """Memory that is allocated at first use."""

    def __init__(self, infos: Mapping[str, TensorInfo], device_of: Callable[[str], torch.device], me: int) -> None:
        self._infos, self._device_of, self._me = infos, device_of, me
        self._made = dict[str, Tensors]()

    def memory(self, name: str) -> Tensors:
        """Not filled yet."""
        if name not in self._made:
            info, device = self._infos[name], self._device_of(name)
            shapes = local_shapes(info.layout, self._me)
            self._made[name] = [fresh(shape, info.dtype, device) for shape in shapes]
        return self._made[name]

    def stamp(self) -> object:
        """Never equal to an earlier stamp."""
        return object()

    def sent(self, entries: Sequence[int]) -> None:
        """Nothing is read here."""

    def filled(self, names: Sequence[str]) -> None:
        """They stay here until they are looked up."""


def memory_of(value: object, *, apart: bool = True) -> Tensors:
    """This rank's memory of a tensor of any kind, apart from autograd; none where it holds nothing."""
    if not isinstance(value, torch.Tensor) and not is_tensor(value):
        return []
    if lists_chunks(value):
        tensors = [tensor for _, tensor in chunks_in(value)]
    elif is_dtensor(value) or not is_sharded(value):
        local, spec = local_of(value)
        tensors = [local] if spec is None or spec.mesh.get_coordinate() is not None else []
    else:
        tensors = list(container_of(value).disassemble(value))
    return [tensor.detach() for tensor in tensors] if apart else tensors


def check_local(what: str, tensors: Tensors, info: TensorInfo, me: int) -> None:
    """Refuse memory that is not what the layout gives this rank."""
    shapes, given = local_shapes(info.layout, me), [(tuple(t.shape), t.dtype) for t in tensors]
    if not tensors and all(0 in shape for shape in shapes):
        return
    if given != [(shape, info.dtype) for shape in shapes]:
        raise ValueError(f"{what} should have {list(shapes)} of {info.dtype} on this rank, but has {given}")
    for one in tensors:
        check_memory(one, what)
        if one.is_conj() or one.is_neg():
            raise ValueError(f"{what} is a conjugate or negative view: resolve_conj() and resolve_neg() make it plain")


class TensorDescription(NamedTuple):
    """A tensor as all ranks must know it. `layout` is None for a plain one: every rank with the state dict has it."""

    shape: tuple[int, ...]
    dtype: torch.dtype | None  # not known to a rank that has none of its shards
    layout: Layout | None
    device: str | None
    delivered: bool = False


Descriptions = Mapping[str, TensorDescription | None]


def is_tensor(value: object) -> TypeGuard[torch.Tensor]:
    """True for tensors that can be moved."""
    return is_sharded(value) or (isinstance(value, torch.Tensor) and not value.is_nested) or is_chunked(value)


def lists_chunks(value: object) -> TypeGuard[torch.Tensor]:
    """True if a rank only knows its own chunks: torch's LocalShardsWrapper, and tensors without a process group."""
    return is_chunked(value) and not (isinstance(value, ShardedTensor) and value.placed)


def describe(value: torch.Tensor, transport: GroupTransport | None) -> TensorDescription | None:
    """This rank's description of a tensor, with the owners of a transport; None if it holds nothing of it."""
    if lists_chunks(value):
        return _known_chunks(whole_shape(value), chunks_in(value), job_rank() if transport is None else transport.me)
    if not is_sharded(value):
        return TensorDescription(tuple(value.shape), value.dtype, None, value.device.type)
    container = on_transport(container_of(value), transport)
    tensors = container.disassemble(value)
    device = tensors[0].device if tensors else container.device
    kind, delivered = None if device is None else device.type, isinstance(value, DeliveredTensor)
    return TensorDescription(container.layout.shape, value.dtype, container.layout, kind, delivered)


def _known_chunks(
    shape: tuple[int, ...], chunks: Sequence[tuple[tuple[int, ...], torch.Tensor]], me: int
) -> TensorDescription | None:
    if not chunks:
        return None
    pieces = [(me, lo, tuple(map(add, lo, tensor.shape))) for lo, tensor in chunks]
    first = chunks[0][1]
    return TensorDescription(shape, first.dtype, Layout.boxes(shape, pieces, overlap="replicas"), first.device.type)


def describe_all(flat: Mapping[str, object], transport: GroupTransport | None) -> Descriptions:
    """This rank's descriptions of the tensors of a flat state dict; None for one of which it holds nothing.

    Owners are those of the transport; without one, ranks of this process's job.
    """
    descriptions = dict[str, TensorDescription | None]()
    for name, value in flat.items():
        if value is None or is_tensor(value):
            try:
                descriptions[name] = None if value is None else describe(value, transport)
            except LayoutError as error:
                raise LayoutError(f"{name!r}: {error}") from error
    return descriptions


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
    alike = dict[int, tuple[list[int], Descriptions]]()  # usually all ranks send the same, as one object
    for rank, known in by_rank.items():
        if known is not None:
            alike.setdefault(id(known), ([], known))[0].append(rank)
    if not alike:
        raise ValueError(
            f"no rank has a {side}: at least one must give it. Jobs that were started separately are one "
            f"group only if all of them give group="
        )
    (first, *_), names = next(iter(alike.values()))
    for (rank, *_), other in alike.values():
        if list(other) != list(names):
            strange = sorted(set(names) ^ set(other)) or [a for a, b in zip(names, other, strict=True) if a != b]
            raise ValueError(
                f"the {side} has other names on rank {rank} than on rank {first}: {', '.join(map(repr, strange[:5]))}"
            )
    infos = {name: _one(f"{name!r} of the {side}", [(r, known[name]) for r, known in alike.values()]) for name in names}
    return {name: tensor for name, tensor in infos.items() if tensor is not None}


def _one(what: str, descriptions: Iterable[tuple[list[int], TensorDescription | None]]) -> TensorInfo | None:
    given = [(ranks, one) for ranks, one in descriptions if one is not None]
    if not given:
        return None

    def same(field: str) -> Any:
        values = [(ranks[0], value) for ranks, one in given if (value := getattr(one, field)) is not None]
        for rank, value in values[1:]:
            if value != values[0][1]:
                there = f"{values[0][1]} on rank {values[0][0]}"
                raise ValueError(f"{what} has {field} {there}, but {value} on rank {rank}")
        return values[0][1] if values else None

    shape, dtype, device = same("shape"), same("dtype") or torch.get_default_dtype(), same("device") or "cpu"
    plain = [ranks for ranks, one in given if one.layout is None]
    if len(plain) == len(given):
        return TensorInfo(
            shape, dtype, _replicated(shape, tuple(sorted(rank for ranks in plain for rank in ranks))), device
        )
    if plain:
        raise ValueError(f"{what} is sharded on some ranks, but a plain tensor on rank {plain[0][0]}")
    layout = _joined(tuple({one.layout: None for _, one in given})) or same("layout")
    return TensorInfo(shape, dtype, layout, device, delivered=any(one.delivered for _, one in given))


@lru_cache(maxsize=4096)
def _replicated(shape: tuple[int, ...], holders: tuple[int, ...]) -> Layout:
    return Layout.replicated(shape, holders)


@lru_cache(maxsize=1024)
def _joined(layouts: tuple[Layout, ...]) -> Layout | None:
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
