"""Weights from trainers to servers: how long a trainer waits, and what comes over a link."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from math import prod
from time import perf_counter
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Placement, Shard

import shardwise as sw
from benchmarks.link import bytes_on_the_link, plain_socket
from benchmarks.measure import Effort, Row, Target
from benchmarks.model import Shapes, model, placement, tensor_of
from benchmarks.publishing import (
    deltas_over_the_link,
    pulls_on_one_host,
    pulls_over_the_link,
    servers_of_one_host,
    stalls,
    steps_over_the_link,
)
from benchmarks.table import size
from shardwise.bench.clock import Interval, Task, every_repeat, interleaved, together
from shardwise.bench.moves import Way, silence
from shardwise.bench.table import seconds
from shardwise.job.snapshot import Snapshot
from shardwise.testing import Host, hosts, on_ranks, why_no_hosts

TITLE = "Weights from trainers to servers"
ABOUT = """
The Llama-shaped model of "Whole models" in bfloat16. A snapshot copies a trainer's tensors into shared memory that it
used before; the trainer waits that long. It is compared with `copy_`, tensor by tensor, into plain memory that was used
before, too. Both run on one rank, with one thread.

Over a link, the model has four layers. Trainers are two ranks of one host and hold it fully sharded by rows. Servers
are two ranks of another host and hold it tensor parallel. Hosts are network namespaces of one machine, and each sends
at most 1 Gbit/s. The limit is a plain socket that moves as many bytes as the plan over the same link: one connection
between two processes, in turn with the rest. The peer gathers every tensor on the trainers (`full_tensor`), broadcasts
it from one of them to all servers over gloo, and each server cuts its part out; gloo sends it to every server
separately. Both sides were found equal before the clock started. Bytes on the link are those that the trainers' host
sent, with the headers of packets.
"""
RATE, LINK = "1gbit", "1 Gbit/s"
LAYERS = 4  # a second per run over the link
RANKS = 2  # of trainers, and of servers
SYNC, SOCKET, WHOLE = "Resharder.run", "plain socket", "gather, broadcast, cut"
State = dict[str, DTensor]


def rows(effort: Effort) -> Iterator[Row]:
    """All cases; those that need a link are left out where hosts cannot be made."""
    if dist.is_initialized():  # as another subject left it: ranks make a group of their own
        dist.destroy_process_group()
    for case in CASES:
        yield from case(effort)
    if why := why_no_hosts():
        print(f"sync: cases over a link are left out: {why}", file=sys.stderr)
        return
    with hosts(2, rate=RATE) as (trainers, servers):
        for linked in LINK_CASES:
            yield from linked(effort, trainers, servers)


# --- a trainer's stall -----------------------------------------------------------------------------------------------


def snapshot_stall(effort: Effort) -> Iterator[Row]:
    """A snapshot, against a plain copy."""
    (found,) = on_ranks(1, lambda _: _stall(model(), effort.ours), timeout=300)
    note = f"the first one, into new memory, took {seconds(found.first)}"
    case = f"Snapshot.take, {size(_bytes(model()))}"
    yield Row(case, found.ours, found.copy, "copy_ into warm memory", Target(1.15, most=True), note)


class Stall(NamedTuple):
    """Seconds of the first snapshot, of a later one, and of a plain copy."""

    first: float
    ours: float
    copy: float


def _stall(shapes: Shapes, repeats: int) -> Stall:
    values = {name: [torch.randn(shape).to(torch.bfloat16)] for name, shape in shapes.items()}
    warm = {name: tensor.clone() for name, (tensor,) in values.items()}
    start = perf_counter()
    snapshot = Snapshot(values)
    snapshot.take(values)
    first = perf_counter() - start
    if not all(torch.equal(snapshot.memory(name)[0], tensor) for name, tensor in warm.items()):
        raise RuntimeError("the snapshot differs")

    def copy() -> None:
        for name, (tensor,) in values.items():
            warm[name].copy_(tensor)

    ours, plain = interleaved(
        Task(lambda _: snapshot.take(values), repeats=repeats), Task(lambda _: copy(), repeats=repeats)
    )
    return Stall(first, ours.seconds, plain.seconds)


# --- over a link -----------------------------------------------------------------------------------------------------


def resharder_over_the_link(effort: Effort, trainers: Host, servers: Host) -> Iterator[Row]:
    """`Resharder.run` from host to host, against the link itself and against whole tensors."""
    places = [trainers] * RANKS + [servers] * RANKS
    found = on_ranks(len(places), lambda _: _over_the_link(effort.medium, trainers, servers), hosts=places, timeout=900)
    took = {way: together(rank.spans[way] for rank in found) for way in found[0].spans}
    moved, crossed = found[0].moved, found[0].crossed
    case = f"{SYNC}, {size(_bytes(model(LAYERS)))} over {LINK}"
    rate = f"the socket has {moved / took[SOCKET] / 1e6:.0f} MB/s, {SYNC} {moved / took[SYNC] / 1e6:.0f} MB/s"
    yield Row(f"{case}, against the link", took[SYNC], took[SOCKET], SOCKET, Target(0.9, percent=True), rate)
    note = (
        f"bytes on the link: {size(crossed[SYNC])} ({crossed[SYNC] / moved:.3f} of the plan's), {WHOLE} "
        f"{size(crossed[WHOLE])}, {SOCKET} {size(crossed[SOCKET])}"
    )
    yield Row(case, took[SYNC], took[WHOLE], WHOLE, None, note, took[SOCKET], moved)


class LinkTimes(NamedTuple):
    """What a rank found, by the names of ways: when every repeat ran, and bytes on the link; the bytes of the plan."""

    spans: dict[str, list[Interval]]
    crossed: dict[str, int]
    moved: int


def _over_the_link(repeats: int, trainers: Host, servers: Host) -> LinkTimes:
    silence()
    shapes = model(LAYERS)
    source, target = _models(shapes)
    sync = sw.Resharder(source, target)
    whole = _whole(shapes, source, target)
    _check(target, sync.run, whole)
    socket = plain_socket(sync.plan.bytes_moved, 0, RANKS, servers.address)
    ways = {SYNC: sync.run, WHOLE: whole, SOCKET: socket}
    crossed = {way: bytes_on_the_link(trainers, run) for way, run in ways.items()}
    spans, _ = every_repeat(*(Way(lambda _, run=run: run()).job(repeats) for run in ways.values()))
    return LinkTimes(dict(zip(ways, spans, strict=True)), crossed, sync.plan.bytes_moved)


def _models(shapes: Shapes) -> tuple[State | None, State | None]:
    """The trainers' model and the servers'; None for the one of which this rank has nothing."""
    trainers, servers = (DeviceMesh("cpu", list(range(first, first + RANKS))) for first in (0, RANKS))
    if dist.get_rank() < RANKS:
        return {name: tensor_of(shape, trainers, Shard(0)) for name, shape in shapes.items()}, None
    return None, {name: tensor_of(shape, servers, placement(name)) for name, shape in shapes.items()}


def _whole(shapes: Shapes, source: State | None, target: State | None) -> Callable[[], None]:
    """Every tensor gathered on the trainers, broadcast by the first of them, and cut by every server."""
    group = dist.new_group([0, *range(RANKS, 2 * RANKS)])

    def trainer() -> None:
        for x in (source or {}).values():
            whole = x.full_tensor()
            if dist.get_rank() == 0:
                dist.broadcast(whole, 0, group)

    def server() -> None:
        for name, x in (target or {}).items():
            whole = torch.empty(shapes[name], dtype=x.dtype)
            dist.broadcast(whole, 0, group)
            x.to_local().copy_(_cut(whole, placement(name)))

    return server if target else trainer


def _cut(whole: torch.Tensor, place: Placement) -> torch.Tensor:
    return whole.chunk(RANKS, place.dim)[dist.get_rank() - RANKS] if isinstance(place, Shard) else whole


def _check(target: State | None, *ways: Callable[[], object]) -> None:
    """All ways must write the same."""
    found = list[dict[str, torch.Tensor]]()
    for way in ways:
        for x in (target or {}).values():
            x.to_local().zero_()
        way()
        found.append({name: x.to_local().clone() for name, x in (target or {}).items()})
    if not all(torch.equal(tensor, other[name]) for other in found for name, tensor in found[0].items()):
        raise RuntimeError("the models differ")


def _bytes(shapes: Shapes) -> int:
    return 2 * sum(map(prod, shapes.values()))


# A new case is one function here: of the effort, or of that and the hosts of trainers and servers.
CASES: tuple[Callable[[Effort], Iterator[Row]], ...] = (snapshot_stall, stalls, pulls_on_one_host)
LINK_CASES: tuple[Callable[[Effort, Host, Host], Iterator[Row]], ...] = (
    resharder_over_the_link,
    pulls_over_the_link,
    servers_of_one_host,
    deltas_over_the_link,
    steps_over_the_link,
)
