"""Tensors moved between processes: reshard against torch's ShardedTensor and DTensor."""

from __future__ import annotations

import logging
import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from importlib import import_module
from math import isqrt
from statistics import median
from typing import Any, NamedTuple
from unittest.mock import patch

import torch
import torch.distributed as dist
from torch.distributed._shard.sharded_tensor import ShardedTensor
from torch.distributed._shard.sharding_spec import ChunkShardingSpec
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Placement, Replicate, Shard

import shardwise as sw
from benchmarks.measure import Effort, Job, Row, Target, every_repeat
from shardwise import sharded_tensor
from shardwise.exchange.run import inline_bytes
from shardwise.sharded_tensor import ShardedTensor as FamiliarTensor
from shardwise.testing import on_ranks

TITLE = "Tensors between processes"
ABOUT = """
`shardwise.reshard` of a square float32 tensor on four processes of one host with gloo between them, one thread each, so
that they share the cores. A barrier stands before every call, every rank times its own, and a call takes as long as its
slowest rank. Both sides have run before the clock starts: as in training, where the same tensor moves step after step,
both may remember how (plans here, redistribute's own caches there). Before, the local tensors of both sides were found
equal on every rank, and the bytes that ours sent between ranks were counted: "on the wire" in a note is what was found
and what the plan says; messages of up to 16 KiB travel inside of the agreement that every call starts with.

S0 is Shard(0), R is Replicate(), P is Partial(); two of them in brackets are for the axes of a 2 x 2 mesh. The
peer is `DTensor.redistribute`, except for "rows -> columns": there it is `reshard` of torch's ShardedTensor, which is
made before the clock starts. The result is a fresh tensor on both sides; with `out=` ours writes into one that is
there, which torch does not offer. A move to fewer ranks is more than redistribute can do; there the peer is
`DTensor.full_tensor` on all four, and a view of the part that is asked for. The familiar names of `sharded_tensor` are
held against `shardwise.reshard` with layouts; making their container is on the clock.
"""
RANKS = 4
KIB, MIB, GIB = 2**10, 2**20, 2**30
Shape = tuple[int, int]


class Sides(NamedTuple):
    """A comparison on one rank: what is planned, all calls, and how to look at the local tensor of their results."""

    plan: sw.Plan
    ours: tuple[Callable[[Any], Any], ...]
    peer: Callable[[Any], Any]
    peer_input: Callable[[], Any] = lambda: None
    local: Callable[[Any], torch.Tensor | None] = lambda found: None if found is None else found.to_local()


@dataclass(frozen=True)
class Case:
    """A comparison, made anew on every rank; for each call of ours a name and a target."""

    names: tuple[str, ...]
    bytes: int
    sides: Callable[[Shape], Sides]
    targets: tuple[Target | None, ...]
    against: str = "redistribute"

    @property
    def shape(self) -> Shape:
        """Of a square of float32."""
        side = isqrt(self.bytes // 4)
        return side, side


class Measured(NamedTuple):
    """What a rank found: the bytes that a call of ours sent, and the seconds of every repeat, ours and then the peer's.

    `moved` and `inline` are the plan's: all bytes, and those that travel inside of the agreement.
    """

    sent: list[int]
    moved: int
    inline: int
    seconds: list[list[float]]


def rows(effort: Effort) -> Iterator[Row]:
    """All cases."""
    for name in "torch._dynamo", "shardwise.tensor":  # what the first DTensor imports: once, and not on every rank
        import_module(name)
    if dist.is_initialized():  # as another subject left it: ranks make a group of their own
        dist.destroy_process_group()
    for case in _cases():
        yield from _rows(case, on_ranks(RANKS, lambda _, case=case: _measured(case, effort), timeout=300))


def _cases() -> Iterator[Case]:
    at_most = Target(1, most=True)
    for size in 256 * MIB, GIB:
        names, targets = ("rows -> columns, out=", "rows -> columns"), (Target(4), Target(2))
        yield Case(names, size, _rows_to_columns, targets, "ShardedTensor")
    yield _case("S0 -> S1", 256 * MIB, Target(4))
    yield _case("S0,S1 -> S1,S0", 256 * MIB, Target(6))
    yield _case("S0,S0 -> S1,S1", 256 * MIB, Target(6))
    for move in "S0 -> R", "S0,R -> S0,S0", "S0,S0 -> S0,R", "S0,R -> R,S0", "P -> S0", "P -> R":
        yield _case(move, 64 * MIB, at_most)
    for move in "S0,R -> R,S0", "S0 -> S1", "S0 -> R", "S0,S1 -> S1,S0":
        yield _case(move, 4 * KIB, at_most)
    for size in 64 * KIB, MIB, 16 * MIB:
        yield _case("S0 -> S1", size)
    yield Case(("S0 on 4 ranks -> S1 on 2",), 64 * MIB, _to_fewer, (None,), "full_tensor")
    by_spec = "sharded_tensor's reshard(spec), rows -> columns"
    yield Case((by_spec,), 64 * MIB, _by_spec, (Target(1.05, most=True),), "reshard by layouts")


def _case(move: str, size: int, target: Target | None = None) -> Case:
    """DTensors, as in "S0,S1 -> S1,S0"."""
    source, _, goal = move.partition(" -> ")
    name = f"[{source}] -> [{goal}]" if "," in move else move
    return Case((name.replace(",", ", "),), size, _redistributed(source.split(","), goal.split(",")), (target,))


# --- what is compared ------------------------------------------------------------------------------------------------


def _rows_to_columns(shape: Shape) -> Sides:
    rows, columns = (sw.Layout.chunk(shape, dim, RANKS) for dim in (0, 1))
    by_rows, by_columns = (
        ChunkShardingSpec(dim=dim, placements=[f"rank:{n}/cpu" for n in range(RANKS)]) for dim in (0, 1)
    )
    local, out = _numbers(rows), torch.zeros(columns.local_shape(dist.get_rank()))
    x = sw.ShardedTensor(local, rows)
    return Sides(
        sw.plan(rows, columns, itemsize=4),
        (lambda _: sw.reshard(x, columns, out=out), lambda _: sw.reshard(x, columns)),
        lambda given: given.reshard(by_columns),
        # reshard changes the container in place, but not the tensor that it was made of
        lambda: ShardedTensor._init_from_local_tensor(local, by_rows, shape),
        lambda found: found.local_tensor(),
    )


def _by_spec(shape: Shape) -> Sides:
    rows, columns = (sw.Layout.chunk(shape, dim, RANKS) for dim in (0, 1))
    by_rows, by_columns = (
        sharded_tensor.ChunkShardingSpec(dim, [f"rank:{n}/cpu" for n in range(RANKS)]) for dim in (0, 1)
    )
    x = sw.ShardedTensor(_numbers(rows), rows)
    return Sides(
        sw.plan(rows, columns, itemsize=4),
        # a container of the same tensor is made every time: reshard changes it in place
        (lambda _: FamiliarTensor._init_from_local_tensor(x.local_tensor(), by_rows, shape).reshard(by_columns),),
        lambda _: sw.reshard(x, columns),
        local=lambda found: found.local_tensor(),
    )


def _redistributed(source: list[str], target: list[str]) -> Callable[[Shape], Sides]:
    def sides(shape: Shape) -> Sides:
        mesh = _mesh(len(source))
        x, placements = _dtensor(shape, mesh, source), _placements(target)
        return Sides(
            sw.plan(sw.layout_of(x), sw.Layout.on_mesh(shape, _ours(mesh), target), itemsize=4),
            (lambda _: sw.reshard(x, (mesh, placements)),),
            lambda _: x.redistribute(mesh, placements),
        )

    return sides


def _to_fewer(shape: Shape) -> Sides:
    half = RANKS // 2
    x, fewer = _dtensor(shape, _mesh(1), ["S0"]), DeviceMesh("cpu", list(range(half)))
    width, me = shape[1] // half, dist.get_rank()
    return Sides(
        sw.plan(sw.layout_of(x), sw.Layout.chunk(shape, 1, half), itemsize=4),
        (lambda _: sw.reshard(x, (fewer, [Shard(1)])),),
        lambda _: x.full_tensor()[:, me * width : (me + 1) * width],
        local=lambda found: found.to_local() if isinstance(found, DTensor) else found if me < half else None,
    )


def _dtensor(shape: Shape, mesh: DeviceMesh, words: list[str]) -> DTensor:
    local = _numbers(sw.Layout.on_mesh(shape, _ours(mesh), words))
    return DTensor.from_local(local, mesh, _placements(words), run_check=False)


def _numbers(layout: sw.Layout) -> torch.Tensor:
    """This rank's part of a tensor whose cells are told apart, small enough that sums of four are exact."""
    me = dist.get_rank()
    (piece,) = layout.pieces(me)
    rows, columns = (torch.arange(a, b, dtype=torch.float32) for a, b in zip(piece.box.lo, piece.box.hi, strict=True))
    return torch.add(rows[:, None] * 1009, columns).add_(me if layout.op else 0)


def _mesh(ndim: int) -> DeviceMesh:
    """All ranks in a row, or in a square."""
    return DeviceMesh("cpu", torch.arange(RANKS).reshape((RANKS,) if ndim == 1 else (2, 2)))


def _ours(mesh: DeviceMesh) -> sw.Mesh:
    return sw.Mesh.of(tuple(mesh.mesh.shape))


def _placements(words: list[str]) -> list[Placement]:
    known = {"R": Replicate(), "P": Partial(), "S0": Shard(0), "S1": Shard(1)}
    return [known[word] for word in words]


# --- on a rank -------------------------------------------------------------------------------------------------------


def _measured(case: Case, effort: Effort) -> Measured:
    _silence()
    sides = case.sides(case.shape)
    expected = sides.local(sides.peer(sides.peer_input()))
    sent = [_checked(sides.local, ours, expected) for ours in sides.ours]
    del expected
    repeats = effort.small if case.bytes <= MIB else effort.medium if case.bytes <= 64 * MIB else effort.large
    seconds, _ = every_repeat(
        *(Job(ours, lambda: dist.barrier(), repeats) for ours in sides.ours),
        Job(sides.peer, lambda: (sides.peer_input(), dist.barrier())[0], repeats),
    )
    messages = sides.plan.traffic.size
    inline = int(messages[messages <= inline_bytes(RANKS)].sum())
    return Measured(sent, sides.plan.bytes_moved, inline, seconds)


def _checked(local: Callable[[Any], torch.Tensor | None], run: Callable[[Any], Any], peer: torch.Tensor | None) -> int:
    """The bytes that a call of ours sends, once its result is found to be the peer's."""
    with _Sent() as sent:
        ours = local(run(None))
    if (ours is None) != (peer is None) or (ours is not None and not torch.equal(ours, peer)):
        raise RuntimeError(f"rank {dist.get_rank()} has {ours}, but the peer {peer}")
    return sent.bytes


def _silence() -> None:
    """What the peers say once: that redistribute gathers and cuts over gloo, and that ShardedTensor grows old."""
    logging.getLogger("torch.distributed.tensor._collective_utils").setLevel(logging.ERROR)
    warnings.simplefilter("ignore", FutureWarning)


class _Sent:
    """Counts the bytes of messages that this rank sends."""

    def __init__(self) -> None:
        self.bytes, self._isend = 0, dist.isend

    def __enter__(self) -> _Sent:
        self._patch = patch.object(dist, "isend", self._count)
        self._patch.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._patch.stop()

    def _count(self, tensor: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        self.bytes += tensor.nbytes
        return self._isend(tensor, *args, **kwargs)


# --- what they found -------------------------------------------------------------------------------------------------


def _rows(case: Case, found: list[Measured]) -> Iterator[Row]:
    moved, inline = found[0].moved, found[0].inline
    sent = [sum(ranks) for ranks in zip(*(rank.sent for rank in found), strict=True)]
    if set(sent) != {moved - inline}:
        raise RuntimeError(f"{case.names}: {sent} bytes sent, but planned {moved}, {inline} of them in the agreement")
    *ours, peer = (_slowest(side) for side in zip(*(rank.seconds for rank in found), strict=True))
    note = f"{_size(moved)} on the wire" if moved else "nothing on the wire"
    note += ", inside of the agreement" if inline and inline == moved else ""
    for name, seconds, target in zip(case.names, ours, case.targets, strict=True):
        yield Row(f"{name}, {_size(case.bytes)}", seconds, peer, case.against, target, note)


def _slowest(ranks: Sequence[list[float]]) -> float:
    """The median of repeats, each as long as on its slowest rank.

    >>> _slowest([[1.0, 2.0, 6.0], [3.0, 1.0, 1.0]])
    3.0
    """
    return median(map(max, zip(*ranks, strict=True)))


def _size(value: int) -> str:
    """
    >>> _size(3 * 2**28), _size(3 * 2**10)
    ('768 MiB', '3 KiB')
    """
    scale, unit = next((s, u) for s, u in ((GIB, "GiB"), (MIB, "MiB"), (KIB, "KiB"), (1, "B")) if value >= s or s == 1)
    return f"{value / scale:g} {unit}"
