"""Tensors moved between processes: reshard against torch's ShardedTensor and DTensor, and plain memory copies."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import partial
from importlib import import_module
from math import isqrt
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Shard

import shardwise as sw
from benchmarks.counting import Counted
from benchmarks.measure import Effort, Row, Target, against_the_limit
from benchmarks.memory import rise
from benchmarks.table import binary
from shardwise import sharded_tensor
from shardwise.bench.clock import Interval, every_repeat, together
from shardwise.bench.limit import strided_copies
from shardwise.bench.moves import (
    FULL_TENSOR,
    GROUP,
    OUT,
    PLAIN,
    SHARED,
    Shape,
    Variant,
    Way,
    Ways,
    check,
    mesh_of,
    numbers,
    redistributed,
    rows_to_columns,
    silence,
    wrapped,
)
from shardwise.exchange.exchange import inline_bytes
from shardwise.sharded_tensor import ShardedTensor as FamiliarTensor
from shardwise.testing import on_ranks

TITLE = "Tensors between processes"
ABOUT = """
`shardwise.reshard` of a square float32 tensor on four processes of one host with a gloo group, one thread each, so that
they share the cores. All ranks start a call at one time; it takes from when the first one starts until the last one is
done. Tensors of up to 1 MiB are moved ten times in a row, and a call takes a tenth of that. All sides have run before
the clock starts: as in training, where the same tensor moves step after step, they may remember how (plans here,
redistribute's own caches there). Before, the local tensors of all sides were found equal on every rank, and the bytes
that ours brought from rank to rank were counted, and found to be what the plan says ("between ranks"); messages of up
to 16 KiB travel inside the agreement that every call starts with.

Ours goes the way that it chooses by itself, through shared memory, unless a case says "over the group". The result is
a fresh tensor on both sides; with `out=` ours writes into one that is there, which torch does not offer. "Source
shared" is a source that `empty(shared=True)` made.

S0 is Shard(0), R is Replicate(), P is Partial(); two of them in brackets are for the axes of a 2 x 2 mesh. The peers
are `reshard` of torch's ShardedTensor (made before the clock starts), `DTensor.redistribute`, and, to have it whole
everywhere, `DTensor.full_tensor`. A move to fewer ranks is more than redistribute can do; there the peer is full_tensor
on all four, and a view of the part that is asked for. The familiar names of `sharded_tensor` are held against
`shardwise.reshard` with layouts; making their container is on the clock.

The limit is what no way can beat: all ranks at the same time copy the very same boxes, each out of memory of its own
that is laid out as the source's parts are, into its part of the target, and nobody talks to anybody. Pages are warm.
"Of the limit" is the limit's time as a part of ours. Memory is the most that a rank takes above what it had before the
call (RssAnon and RssShmem, looked at every millisecond, with staging given back before); pages that several ranks have
mapped count for each of them.
"""
RANKS = 4
KIB, MIB, GIB = 2**10, 2**20, 2**30
IN_A_ROW = 10  # calls, of what is small
SLOW = 256 * MIB  # from here on, peers that gather whole tensors take seconds


class Aims(NamedTuple):
    """What a way of ours is to reach: against the first peer, and of the limit."""

    ratio: Target | None = None
    limit: float | None = None


@dataclass(frozen=True)
class Case:
    """A move, made anew on every rank; for each way of ours its aims. The first way is held against all peers."""

    name: str
    bytes: int
    make: Callable[[Shape], Ways]
    aims: Mapping[str, Aims]
    ranks: int = RANKS
    without: frozenset[str] = field(default=frozenset())  # peers that would take too long

    @property
    def shape(self) -> Shape:
        """Of a square of float32."""
        side = isqrt(self.bytes // 4)
        return side, side


class RankTimes(NamedTuple):
    """What a rank found, by the names of ways: when every repeat ran, the most memory, bytes that ours brought.

    `moved` and `inline` are the plan's: all bytes, and those that travel inside the agreement.
    """

    spans: dict[str, list[Interval]]
    memory: dict[str, int]
    brought: dict[str, int]
    moved: int
    inline: int


def rows(effort: Effort) -> Iterator[Row]:
    """All cases."""
    ready()
    for case in _cases():
        yield from _rows(case, effort, on_ranks(case.ranks, partial(_measured, case, effort), timeout=600))


def ready() -> None:
    """For ranks to be forked."""
    for name in "torch._dynamo", "shardwise.tensor":  # what the first DTensor imports: once, and not on every rank
        import_module(name)
    if dist.is_initialized():  # as another subject left it: ranks make a group of their own
        dist.destroy_process_group()


def _cases() -> Iterator[Case]:
    at_most = Aims(Target(1, most=True))
    aims = {OUT: Aims(Target(10), 0.6), SHARED: Aims(Target(15), 0.9), PLAIN: Aims(Target(2)), GROUP: Aims(Target(4))}
    yield _case("rows -> columns", 256 * MIB, aims)
    yield _case("rows -> columns", GIB, aims, without={"redistribute"})
    yield _case("S0 -> S1", 256 * MIB, {OUT: Aims(Target(10)), PLAIN: Aims(Target(10)), SHARED: Aims(), GROUP: Aims()})
    for move in "S0,S1 -> S1,S0", "S0,S0 -> S1,S1":
        yield _case(move, 256 * MIB, {OUT: Aims(Target(20)), PLAIN: Aims(Target(6)), SHARED: Aims(), GROUP: Aims()})
    yield _case("S0 -> R", 128 * MIB, {OUT: Aims(Target(4)), SHARED: Aims(), GROUP: Aims()})
    for move in "S0 -> R", "S0,R -> S0,S0", "S0,S0 -> S0,R", "S0,R -> R,S0", "P -> S0", "P -> R":
        yield _case(move, 64 * MIB, {PLAIN: at_most})
    for move in "S0,R -> R,S0", "S0 -> S1", "S0 -> R", "S0,S1 -> S1,S0":
        yield _case(move, 4 * KIB, {PLAIN: Aims(Target(3))})
    for size in 64 * KIB, MIB, 16 * MIB:
        yield _case("S0 -> S1", size, {PLAIN: Aims()})
    yield Case("S0 on 4 ranks -> S1 on 2", 64 * MIB, _to_fewer, {"": Aims()})
    by_spec = "sharded_tensor's reshard(spec), rows -> columns"
    yield Case(by_spec, 64 * MIB, _by_spec, {"": Aims(Target(1.05, most=True))})


def _case(move: str, size: int, aims: Mapping[Variant, Aims], without: Any = ()) -> Case:
    """As in "S0,S1 -> S1,S0", of DTensors."""
    source, _, target = move.partition(" -> ")
    name = (f"[{source}] -> [{target}]" if "," in move else move).replace(",", ", ")
    make = partial(redistributed, source.split(","), target.split(",")) if source != "rows" else rows_to_columns
    named = {str(variant): found for variant, found in aims.items()}
    return Case(name, size, partial(make, variants=tuple(aims)), named, without=frozenset(without))


# --- what is compared beside these -----------------------------------------------------------------------------------


def _by_spec(shape: Shape) -> Ways:
    rows, columns = (sw.Layout.chunk(shape, dim, RANKS) for dim in (0, 1))
    by_rows, by_columns = (
        sharded_tensor.ChunkShardingSpec(dim, [f"rank:{n}/cpu" for n in range(RANKS)]) for dim in (0, 1)
    )
    x = sw.ShardedTensor(numbers(rows), rows)

    def ours(_: Any) -> Any:  # a container of the same tensor is made every time: reshard changes it in place
        return FamiliarTensor._init_from_local_tensor(x.local_tensor(), by_rows, shape).reshard(by_columns)

    plan, theirs = sw.plan(rows, columns, itemsize=4), Way(lambda _: sw.reshard(x, columns))
    return Ways(plan, {"": Way(ours)}, {"reshard by layouts": theirs}, _limit(plan))


def _to_fewer(shape: Shape) -> Ways:
    half, me = RANKS // 2, dist.get_rank()
    x = wrapped(numbers(sw.Layout.chunk(shape, 0, RANKS)), (mesh_of(1), [Shard(0)]), shape)
    fewer, width = DeviceMesh("cpu", list(range(half))), shape[1] // half

    def theirs(_: Any) -> torch.Tensor | None:
        whole = x.full_tensor()
        return whole[:, me * width : (me + 1) * width] if me < half else None

    plan = sw.plan(sw.layout_of(x), sw.Layout.chunk(shape, 1, half), itemsize=4)
    ours = Way(lambda _: sw.reshard(x, (fewer, [Shard(1)])))
    return Ways(plan, {"": ours}, {FULL_TENSOR: Way(theirs)}, _limit(plan))


def _limit(plan: sw.Plan) -> Way | None:
    copies = strided_copies(dist.get_rank(), [(plan, torch.float32, None)])
    return None if copies is None else Way(lambda _: copies())


# --- on a rank -------------------------------------------------------------------------------------------------------


def _measured(case: Case, effort: Effort, _rank: int) -> RankTimes:
    silence()
    sides = case.make(case.shape)
    for name in case.without:
        del sides.peers[name]
    check(sides)
    brought = {name: _brought(side) for name, side in sides.ours.items()}
    memory = {name: _memory(side) for name, side in (sides.ours | sides.peers).items()} if case.bytes >= MIB else {}
    ways = sides.ours | sides.peers | ({"limit": sides.limit} if sides.limit else {})
    often, calls = repeats(case.bytes, effort)
    slow = min(often, effort.slow_peer) if case.bytes >= SLOW else often
    jobs = [side.job(slow if name == "redistribute" else often, calls) for name, side in ways.items()]
    spans, _ = every_repeat(*jobs)
    messages = sides.plan.traffic.size
    inline = int(messages[messages <= inline_bytes(case.ranks)].sum())
    return RankTimes(dict(zip(ways, spans, strict=True)), memory, brought, sides.plan.bytes_moved, inline)


def repeats(size: int, effort: Effort) -> tuple[int, int]:
    """How often a tensor of this size is moved, and how many times in a row each time."""
    if size <= MIB:
        return effort.small // IN_A_ROW, IN_A_ROW
    return (effort.medium if size <= 64 * MIB else effort.large), 1


def _brought(side: Way) -> int:
    with Counted() as counted:
        side.run(side.prepare())
    return counted.bytes


def _memory(side: Way) -> int:
    sw.release_staging()
    given = side.prepare()
    dist.barrier()
    return rise(lambda: side.run(given), "RssAnon", "RssShmem")


# --- what they found -------------------------------------------------------------------------------------------------


def _rows(case: Case, effort: Effort, found: list[RankTimes]) -> Iterator[Row]:
    _check_bytes(case, found)
    _, calls = repeats(case.bytes, effort)
    seconds = {way: together(rank.spans[way] for rank in found) / calls for way in found[0].spans}
    memory = {way: max(rank.memory[way] for rank in found) for way in found[0].memory}
    limit = seconds.pop("limit", None)
    peers = [way for way in seconds if way not in case.aims]
    for number, (way, (target, share)) in enumerate(case.aims.items()):
        name = ", ".join(filter(None, (case.name, way, binary(case.bytes))))
        for peer in peers if number == 0 else peers[:1]:
            aim = target if peer == peers[0] else None
            both = (memory[way], memory[peer]) if memory else None
            missed = limit is not None and aim is not None and not aim.most and seconds[peer] < aim.bound * seconds[way]
            note = f"memory copies would be {seconds[peer] / limit:.3g}x" if limit and missed else ""
            row = Row(name, seconds[way], seconds[peer], peer, aim, note, limit, found[0].moved, both)
            yield row
            if share is not None and peer == peers[0]:
                yield against_the_limit(row, Target(share, percent=True))


def _check_bytes(case: Case, found: list[RankTimes]) -> None:
    moved, inline = found[0].moved, found[0].inline
    for way in found[0].brought:
        brought = sum(rank.brought[way] for rank in found)
        if brought != moved - inline:
            raise RuntimeError(
                f"{case.name} {way}: {brought} bytes went between ranks, but {moved} were planned, {inline} of them "
                f"in the agreement"
            )
