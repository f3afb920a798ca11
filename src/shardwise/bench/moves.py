"""A move, made in every way: ours, torch's, and the plain memory copies that none can avoid."""

from __future__ import annotations

import logging
import warnings
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from time import perf_counter, sleep
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch.distributed._shard.sharded_tensor.api import ShardedTensor as TorchShardedTensor
from torch.distributed._shard.sharding_spec import ChunkShardingSpec
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Placement, Replicate, Shard

from shardwise.bench.clock import Task
from shardwise.bench.limit import strided_copies
from shardwise.containers.torch_sharded import RemoteDevice
from shardwise.layout import Layout, Mesh
from shardwise.planning import Plan, plan
from shardwise.state import empty
from shardwise.tensor import ShardedTensor, reshard
from shardwise.transports import TransportChoice

Shape = tuple[int, int]
Lying = Layout | tuple[DeviceMesh, list[Placement]]  # how a tensor is sharded
AHEAD = 2e-3  # seconds in which everybody has heard when to start
REDISTRIBUTE, FULL_TENSOR, SHARDED_TENSOR = "redistribute", "full_tensor", "ShardedTensor"


class Way(NamedTuple):
    """One way to make a move: `run` is timed, `prepare` makes what it is called with."""

    run: Callable[[Any], object]
    prepare: Callable[[], object] = lambda: None

    def job(self, repeats: int, calls: int = 1) -> Task:
        """Of all ranks, which start together."""
        return Task(self.run, self.prepare, repeats, calls, meet)


def synchronized(way: Way, kind: str) -> Way:
    """The same on an accelerator: it is done when the device is."""
    if kind == "cpu":
        return way
    synchronize = torch.get_device_module(kind).synchronize

    def run(given: Any) -> object:
        result = way.run(given)
        synchronize()
        return result

    return Way(run, way.prepare)


class Ways(NamedTuple):
    """All ways to make a move, by name, on one rank; `limit` is None where a move does more than copy.

    `out` is the tensor that ours write into with out=.
    """

    plan: Plan
    ours: dict[str, Way]
    peers: dict[str, Way]
    limit: Way | None
    out: torch.Tensor | None = None


@dataclass(frozen=True, slots=True)
class Variant:
    """How `reshard` is called: into an existing tensor, from one in shared memory, over which transport.

    >>> str(Variant(out=True, shared=True)), str(Variant())
    ('source shared, out=', '')
    """

    out: bool = False
    shared: bool = False
    transport: TransportChoice = "auto"

    def __str__(self) -> str:
        words = {"over the group": self.transport == "group", "source shared": self.shared, "out=": self.out}
        return ", ".join(word for word, holds in words.items() if holds)


PLAIN, OUT = Variant(), Variant(out=True)
SHARED, GROUP = Variant(out=True, shared=True), Variant(out=True, transport="group")


def rows_to_columns(shape: Shape, variants: Iterable[Variant]) -> Ways:
    """Containers of ours; torch's ShardedTensor and DTensor can do the same."""
    rows, columns = (Layout.chunk(shape, dim, dist.get_world_size()) for dim in (0, 1))
    made, mesh = _ways(shape, rows, columns, rows, columns, variants), mesh_of(1)
    local = numbers(rows)
    x = wrapped(local, (mesh, [Shard(0)]), shape)
    peers = {
        SHARDED_TENSOR: _torch_sharded(local, shape),
        REDISTRIBUTE: Way(lambda _: x.redistribute(mesh, [Shard(1)])),
    }
    return made._replace(peers=peers)


def redistributed(source: Sequence[str], target: Sequence[str], shape: Shape, variants: Iterable[Variant]) -> Ways:
    """DTensors, on all ranks in a row or in two rows; words as in ["S0", "R"]."""
    mesh = mesh_of(len(source))
    here, there = (Layout.on_mesh(shape, _ours(mesh), list(words)) for words in (source, target))
    goal = placements(target)
    made = _ways(shape, here, there, (mesh, placements(source)), (mesh, goal), variants)
    x = wrapped(numbers(here), (mesh, placements(source)), shape)
    peers = {REDISTRIBUTE: Way(lambda _: x.redistribute(mesh, goal))}
    if set(target) == {"R"}:
        peers[FULL_TENSOR] = Way(lambda _: x.full_tensor())
    return made._replace(peers=peers)


def _ways(shape: Shape, here: Layout, there: Layout, kind: Lying, to: Lying, variants: Iterable[Variant]) -> Ways:
    every = list(variants)
    made, rank = plan(here, there, itemsize=4), dist.get_rank()
    x = wrapped(numbers(here), kind, shape)
    shared = _shared(kind, shape, here) if any(variant.shared for variant in every) else None
    room = torch.zeros(there.local_shape(rank)) if any(variant.out for variant in every) else None
    out = None if room is None else wrapped(room, to, shape)

    def side(variant: Variant) -> Way:
        source, target = shared if variant.shared else x, out if variant.out else None
        return Way(lambda _: reshard(source, to, out=target, transport=variant.transport))

    copies = strided_copies(rank, [(made, torch.float32, None if room is None else [room])])
    limit = None if copies is None else Way(lambda _: copies())
    return Ways(made, {str(variant): side(variant) for variant in every}, {}, limit, room)


def _torch_sharded(local: torch.Tensor, shape: Shape) -> Way:
    kind = torch.get_default_device().type
    places = {"cpu": "cpu", "cuda": "cuda:{n}"}.get(kind, f"{kind}:0")
    names: list[str | RemoteDevice] = [f"rank:{n}/{places.format(n=n)}" for n in range(dist.get_world_size())]
    by_rows, by_columns = (ChunkShardingSpec(dim=dim, placements=names) for dim in (0, 1))
    return Way(
        lambda given: given.reshard(by_columns),
        # reshard changes the container in place, but not the tensor that it was made of
        lambda: TorchShardedTensor._init_from_local_tensor(local, by_rows, shape),
    )


# --- tensors ---------------------------------------------------------------------------------------------------------


def wrapped(local: torch.Tensor, kind: Lying, shape: Shape) -> Any:
    """This rank's part as a sharded tensor: of a layout, or of (mesh, placements)."""
    if isinstance(kind, Layout):
        return ShardedTensor(local, kind)
    mesh, places = kind
    return DTensor.from_local(local, mesh, places, run_check=False, shape=torch.Size(shape), stride=(shape[1], 1))


def _shared(kind: Lying, shape: Shape, layout: Layout) -> torch.Tensor:
    x = empty(kind, shape, shared=True)
    local = local_of(x)
    assert local is not None, "all ranks have a part"
    local.copy_(numbers(layout))
    return x


def local_of(x: object) -> torch.Tensor | None:
    """This rank's tensor of a sharded tensor of any kind, or of a plain one."""
    if isinstance(x, DTensor):
        return x.to_local()
    if isinstance(x, ShardedTensor | TorchShardedTensor):
        return x.local_tensor()
    return x if isinstance(x, torch.Tensor) else None


def numbers(layout: Layout) -> torch.Tensor:
    """This rank's part of a tensor whose cells are told apart, small enough that sums of a few are exact."""
    me = dist.get_rank()
    (piece,) = layout.pieces(me)
    rows, columns = (torch.arange(a, b, dtype=torch.float32) for a, b in zip(piece.box.lo, piece.box.hi, strict=True))
    return torch.add(rows[:, None] * 1009, columns).add_(me if layout.op else 0)


def mesh_of(ndim: int) -> DeviceMesh:
    """All ranks in a row, or in two rows, of the default kind of device."""
    ranks = torch.arange(dist.get_world_size(), device="cpu")
    return DeviceMesh(torch.get_default_device().type, ranks if ndim == 1 else ranks.reshape(2, -1))


def _ours(mesh: DeviceMesh) -> Mesh:
    return Mesh.of(tuple(mesh.mesh.shape))


def placements(words: Iterable[str]) -> list[Placement]:
    """As torch has them."""
    known = {"R": Replicate(), "P": Partial(), "S0": Shard(0), "S1": Shard(1)}
    return [known[word] for word in words]


def silence() -> None:
    """Silence warnings of the peers: redistribute gathers and cuts over gloo, and ShardedTensor is deprecated."""
    logging.getLogger("torch.distributed.tensor._collective_utils").setLevel(logging.ERROR)
    warnings.simplefilter("ignore", FutureWarning)


def meet() -> None:
    """Return on all ranks at about the same time: from a barrier they come one after the other, as it wakes them."""
    dist.barrier()
    start = torch.tensor(perf_counter() + AHEAD, dtype=torch.float64)
    dist.broadcast(start, 0)  # the clock is that of the machine
    sleep(max(0.0, start.item() - perf_counter()))


def check(sides: Ways) -> None:
    """All ways must lead to the same: every rank compares its local tensors, bit-for-bit."""
    expected: torch.Tensor | None = None
    for number, (name, side) in enumerate((sides.peers | sides.ours).items()):
        if sides.out is not None:
            sides.out.zero_()
        local = local_of(side.run(side.prepare()))
        if number == 0:
            expected = None if local is None else local.clone()
        elif not _same(local, expected):
            raise RuntimeError(f"rank {dist.get_rank()}: {name or 'ours'} finds {local}, but others {expected}")


def _same(a: torch.Tensor | None, b: torch.Tensor | None) -> bool:
    return a is b if a is None or b is None else torch.equal(a, b)
