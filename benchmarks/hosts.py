"""Two hosts with four ranks each: what crosses the links between them, and how long it takes."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Placement, Replicate, Shard

import shardwise as sw
from benchmarks.measure import Effort, Row, Target
from benchmarks.rounds import small_calls
from benchmarks.table import size
from shardwise.bench.clock import Interval, every_repeat, together
from shardwise.bench.moves import Way, meet, silence
from shardwise.testing import Host, hosts, on_ranks, why_no_hosts

TITLE = "Between hosts"
ABOUT = """
Eight ranks on two hosts, which are network namespaces of one machine; each host sends at most 1 Gbit/s. Calls are
`shardwise.reshard` and `Resharder.run` as they are by default, and with `hosts=None`, beside `DTensor.redistribute`; a
sync that torch has no call for is compared with one broadcast for each tensor over gloo. All ways were found equal
before the clock started, ours bit-for-bit with and without hosts. Bytes are those that both hosts sent over their
links, with the headers of packets; "of the tensor" says how many times the tensor that is.

Small calls are those of four ranks on two hosts, between which every packet takes 20 ms one
way; the fastest of several.
"""
RATE = "1gbit"
PER_HOST = 4
RANKS = 2 * PER_HOST
SHAPE, SMALL = (3072, 768), (64, 64)
DEFAULT, FLAT, TORCH = "default", "hosts=None", "torch"


class Case(NamedTuple):
    """A move of one tensor, and how many times its bytes may cross the links."""

    source: str
    target: str
    dtype: torch.dtype
    shape: tuple[int, int] = SHAPE
    most: float | None = None

    def __str__(self) -> str:
        dtype = "" if self.dtype == torch.float32 else f", {str(self.dtype).removeprefix('torch.')}"
        return f"{self.source} -> {self.target}, {size(self.bytes)}{dtype}"

    @property
    def bytes(self) -> int:
        """Of the whole tensor."""
        return self.shape[0] * self.shape[1] * self.dtype.itemsize


CASES = [
    Case("S0", "R", torch.float32, most=1.07),
    Case("P", "R", torch.float32, most=2.1),
    Case("P", "R", torch.bfloat16, most=3.2),
    Case("P", "S0", torch.float32, most=1.07),
    Case("S0", "R", torch.float32, SMALL),
]
PLACEMENTS: dict[str, Callable[[], Placement]] = {"S0": lambda: Shard(0), "R": Replicate, "P": Partial}


class Found(NamedTuple):
    """When every repeat ran, and bytes on all links, by the names of ways."""

    spans: dict[str, list[Interval]]
    crossed: dict[str, int]


def rows(effort: Effort) -> Iterator[Row]:
    """All cases, if hosts can be made."""
    if why := why_no_hosts():
        print(f"hosts: all cases are left out: {why}", file=sys.stderr)
        return
    if dist.is_initialized():  # as another subject left it: ranks make a group of their own
        dist.destroy_process_group()
    with hosts(2, rate=RATE) as both:
        for case in CASES:
            yield from _compared(str(case), case.bytes, case.most, both, lambda case=case: _moves(case), effort)
        yield from _compared(
            "sync from 4 ranks of a host to 4 replicas on the other", 4 * SYNCED, 1.05, both, _syncs, effort
        )
    yield from small_calls(effort)


def _compared(
    name: str, whole: int, most: float | None, both: Sequence[Host], make: Callable[[], dict[str, Way]], effort: Effort
) -> Iterator[Row]:
    places = [host for host in both for _ in range(PER_HOST)]
    found = on_ranks(RANKS, lambda _: _measured(make, both, effort.medium), hosts=places, timeout=900)
    took = {way: together(rank.spans[way] for rank in found) for way in found[0].spans}
    crossed = found[0].crossed
    words = ", ".join(f"{way} {size(crossed[way])} ({crossed[way] / whole:.2f} of the tensor)" for way in crossed)
    for against in (TORCH, FLAT):
        yield Row(f"{name}, time", took[DEFAULT], took[against], against, None, words if against == TORCH else "")
    if most is not None:
        case, bound = f"{name}, bytes on all links", Target(most, most=True)
        yield Row(case, crossed[DEFAULT], whole, "the tensor", bound, unit="bytes")


def _measured(make: Callable[[], dict[str, Way]], both: Sequence[Host], repeats: int) -> Found:
    silence()
    ways = make()
    crossed = dict[str, int]()
    for name, way in ways.items():
        way.run(way.prepare())
        meet()
        before = sum(host.sent_bytes() for host in both)
        meet()
        way.run(way.prepare())
        meet()
        crossed[name] = sum(host.sent_bytes() for host in both) - before
    spans, _ = every_repeat(*(way.job(repeats) for way in ways.values()))
    return Found(dict(zip(ways, spans, strict=True)), crossed)


def _moves(case: Case) -> dict[str, Way]:
    """Of one tensor."""
    mesh = DeviceMesh("cpu", list(range(RANKS)))
    torch.manual_seed(dist.get_rank())
    rows_ = case.shape[0] // RANKS if case.source == "S0" else case.shape[0]
    local = torch.randn(rows_, case.shape[1]).to(case.dtype)
    x = DTensor.from_local(local, mesh, [PLACEMENTS[case.source]()], run_check=False)
    to = [PLACEMENTS[case.target]()]
    ways = {
        DEFAULT: lambda _: sw.reshard(x, (mesh, to)),
        FLAT: lambda _: sw.reshard(x, (mesh, to), hosts=None),
        TORCH: lambda _: x.redistribute(mesh, to),
    }
    ours, flat, theirs = (way(None).to_local() for way in ways.values())
    if not torch.equal(ours, flat):
        raise RuntimeError(f"{case}: the results differ with and without hosts")
    torch.testing.assert_close(ours.float(), theirs.float(), rtol=0.05, atol=0.05)
    return {name: Way(way) for name, way in ways.items()}


SYNC_SHAPES = {f"layer.{n}.weight": (1024, 768) for n in range(4)}
SYNCED = 1024 * 768 * 4  # bytes of one of them


def _syncs() -> dict[str, Way]:
    """From shards on one host to replicas on the other."""
    rank = dist.get_rank()
    trains = rank < PER_HOST
    trainers = DeviceMesh("cpu", list(range(PER_HOST)))
    source = target = None
    torch.manual_seed(7)
    values = {name: torch.randn(shape) for name, shape in SYNC_SHAPES.items()}
    if trains:
        source = {
            name: DTensor.from_local(value.chunk(PER_HOST)[rank].clone(), trainers, [Shard(0)], run_check=False)
            for name, value in values.items()
        }
    else:
        servers = list(range(PER_HOST, RANKS))
        target = {name: sw.empty(sw.Layout.replicated(shape, servers)) for name, shape in SYNC_SHAPES.items()}
    syncs = {DEFAULT: sw.Resharder(source, target), FLAT: sw.Resharder(source, target, hosts=None)}
    for sync in syncs.values():
        sync.run()
        if target and not all(torch.equal(target[name].local_tensor(), value) for name, value in values.items()):
            raise RuntimeError("a sync brought other values")
    group = dist.new_group([0, *range(PER_HOST, RANKS)])

    def broadcast(_: object) -> None:
        for name, value in values.items():
            whole = source[name].full_tensor() if source else torch.empty_like(value)
            if rank == 0 or not trains:
                dist.broadcast(whole, 0, group)

    return {name: Way(lambda _, sync=sync: sync.run()) for name, sync in syncs.items()} | {TORCH: Way(broadcast)}
