"""Whole models moved between shardings: one exchange for all tensors, against redistribute tensor by tensor."""

from __future__ import annotations

from collections.abc import Iterator
from functools import cache
from math import prod
from statistics import median
from time import perf_counter, process_time
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard

import shardwise as sw
from benchmarks.caches import forget
from benchmarks.measure import Effort, Row, Target, against_the_limit
from benchmarks.memory import rise
from shardwise.bench.clock import Interval, Task, every_repeat, interleaved, together
from shardwise.bench.limit import strided_copies
from shardwise.bench.moves import Way, silence
from shardwise.job.plan import ModelPlan, TensorInfo
from shardwise.job.remap import links
from shardwise.testing import on_ranks

TITLE = "Whole models"
ABOUT = """
A Llama-shaped model in bfloat16 (289 tensors, 0.7 GiB), fully sharded by rows over four ranks, to tensor parallel: rows
of q, k, v, gate and up, columns of o and down, norms replicated. `Resharder.run` writes into the target's own tensors,
as it does after every step of training; `reshard_state_dict` makes new ones. The peer is `DTensor.redistribute`, tensor
by tensor, over the same gloo group. Both sides were found equal before the clock started, and both have run before.
Ours goes through shared memory, unless a case says "over the group"; "source shared" is a model that was given to
`share_`. The limit is that of the section before, for all boxes of all tensors, and so is the memory of a rank.

The model of small tensors has as many, of 64 numbers each: what is left of a run when there is next to nothing to move.
Where all of them stay on their ranks, only checks, the agreement and 289 copies of 32 bytes are left.
Planning is for another world: 1,000 tensors from 1,024 owners (fully sharded) to 512 (tensor parallel by 8), whole and
for one owner.
"""
RANKS = 4
PEER, LIMIT = "redistribute", "limit"
HIDDEN, FFN, LAYERS, WORDS = 1024, 2816, 32, 16_000
Shapes = dict[str, tuple[int, ...]]


def model(layers: int = LAYERS) -> Shapes:
    """The shapes of its tensors."""
    found: Shapes = {"embed": (WORDS, HIDDEN)}
    for n in range(layers):
        found |= {
            f"{n}.{name}": (rows, HIDDEN) for name, rows in (("q", HIDDEN), ("k", HIDDEN // 4), ("v", HIDDEN // 4))
        }
        found |= {f"{n}.o": (HIDDEN, HIDDEN), f"{n}.gate": (FFN, HIDDEN), f"{n}.up": (FFN, HIDDEN)}
        found |= {f"{n}.down": (HIDDEN, FFN), f"{n}.norm1": (HIDDEN,), f"{n}.norm2": (HIDDEN,)}
    return found


def placement(name: str) -> Placement:
    """Under tensor parallelism."""
    last = name.rpartition(".")[2]
    return Replicate() if last.startswith("norm") else Shard(1) if last in ("o", "down") else Shard(0)


PLACES = (lambda _: Shard(0)), placement


def rows(effort: Effort) -> Iterator[Row]:
    """All cases."""
    if dist.is_initialized():  # as another subject left it: ranks make a group of their own
        dist.destroy_process_group()
    small = {name: (8, 8) if len(shape) > 1 else (64,) for name, shape in model().items()}
    yield from _whole(effort)
    found = on_ranks(RANKS, lambda _: _measured(small, effort.small // 4), timeout=300)
    little, theirs = (together(rank.spans[way] for rank in found) for way in ("Resharder.run", PEER))
    note = f"{little / len(small) * 200 * 1e3:.2f} ms for 200 tensors: checks, agreement, packing"
    yield Row(f"Resharder.run, {len(small)} small tensors", little, theirs, PEER, None, note)
    still, checks = _slowest(on_ranks(RANKS, lambda _: _unmoved(small, effort.small), timeout=300))
    note = (
        f"per 200 tensors {still / len(small) * 200 * 1e3:.2f} ms of wall time with four ranks on these cores, and "
        f"{checks / len(small) * 200 * 1e3:.2f} ms of one rank's own time (at most 2 ms wanted)"
    )
    yield Row(f"the same, {len(small)} tensors that stay where they are", still, None, "", None, note)
    whole, part = interleaved(Task(lambda _: _planned().bytes_moved, forget), Task(lambda _: _own_part(), forget))
    yield Row("planning 1,000 tensors, 1,024 -> 512 owners", whole.seconds)
    yield Row("the same, one owner's part", part.seconds)


def _whole(effort: Effort) -> Iterator[Row]:
    found = on_ranks(RANKS, lambda _: _measured(model(), effort.large), timeout=600)
    seconds = {way: together(rank.spans[way] for rank in found) for way in found[0].spans}
    memory = {way: max(rank.memory[way] for rank in found) for way in found[0].memory}
    size = f"{len(model())} tensors, {sum(map(prod, model().values())) * 2 / 2**30:.1f} GiB"
    for way in (way for way in seconds if way not in (PEER, LIMIT)):
        target = Target(10) if way == "Resharder.run" else None
        both = memory[way], memory[PEER]
        row = Row(f"{way}, {size}", seconds[way], seconds[PEER], PEER, target, "", seconds[LIMIT], found[0].moved, both)
        yield row
        if target:
            yield against_the_limit(row, Target(0.7, percent=True))


def _slowest(found: list[list[list[float]]]) -> list[float]:
    """For every job the median of its repeats, each as long as on its slowest rank."""
    return [median(map(max, zip(*ranks, strict=True))) for ranks in zip(*found, strict=True)]


# --- on a rank -------------------------------------------------------------------------------------------------------


class RankTimes(NamedTuple):
    """What a rank found, by the names of ways: when every repeat ran, and the most memory; the bytes of the plan."""

    spans: dict[str, list[Interval]]
    memory: dict[str, int]
    moved: int


def _measured(shapes: Shapes, repeats: int) -> RankTimes:
    silence()
    mesh = DeviceMesh("cpu", list(range(RANKS)))
    source, target = ({name: tensor_of(shape, mesh, place(name)) for name, shape in shapes.items()} for place in PLACES)
    shared = sw.share_({name: x.clone() for name, x in source.items()})
    sync = sw.Resharder(source, target)
    ways = {
        "Resharder.run": Way(lambda _: sync.run()),
        "source shared": _syncing(sw.Resharder(shared, target)),
        "over the group": _syncing(sw.Resharder(source, target, transport="group")),
        "reshard_state_dict": Way(lambda _: sw.reshard_state_dict(source, target)),
        PEER: Way(lambda _: {name: x.redistribute(mesh, [placement(name)]) for name, x in source.items()}),
    }
    _check(ways, target)
    memory = {name: _memory(side) for name, side in ways.items()}
    copies = strided_copies(dist.get_rank(), [(entry.plan, entry.dtype, None) for entry in sync.plan.links])
    assert copies is not None, "models are copied"
    ways[LIMIT] = Way(lambda _: copies())
    spans, _ = every_repeat(*(side.job(repeats) for side in ways.values()))
    return RankTimes(dict(zip(ways, spans, strict=True)), memory, sync.plan.bytes_moved)


def _syncing(sync: sw.Resharder) -> Way:
    return Way(lambda _: sync.run())


def _check(ways: dict[str, Way], target: dict[str, DTensor]) -> None:
    """All must find the same; those that return nothing write into the target."""
    expected = ways[PEER].run(None)
    for way, side in ways.items():
        for x in target.values():
            x.to_local().zero_()
        found = side.run(None) or target
        if not all(torch.equal(found[name].to_local(), x.to_local()) for name, x in expected.items()):
            raise RuntimeError(f"the models differ: {way}")


def _memory(side: Way) -> int:
    sw.release_staging()
    dist.barrier()
    return rise(lambda: side.run(None), "RssAnon", "RssShmem")


def _unmoved(shapes: Shapes, repeats: int) -> list[list[float]]:
    """Wall time, and this rank's own time, of runs that send nothing."""
    mesh = DeviceMesh("cpu", list(range(RANKS)))
    source, target = ({name: tensor_of(shape, mesh, Shard(0)) for name, shape in shapes.items()} for _ in range(2))
    sync, found = sw.Resharder(source, target), [list[float](), list[float]()]
    for _ in range(repeats):
        dist.barrier()
        started = perf_counter(), process_time()
        sync.run()
        for seconds, clock, start in zip(found, (perf_counter, process_time), started, strict=True):
            seconds.append(clock() - start)
    return found


def tensor_of(shape: tuple[int, ...], mesh: DeviceMesh, place: Placement) -> DTensor:
    """A tensor of the model, as one rank has it."""
    local = [size // mesh.size() if place.is_shard(dim) else size for dim, size in enumerate(shape)]
    values = torch.randn(local) if place.is_shard() else torch.ones(local)
    stride = torch.empty(shape, device="meta").stride()
    return DTensor.from_local(
        values.to(torch.bfloat16), mesh, [place], shape=torch.Size(shape), stride=stride, run_check=False
    )


# --- planning --------------------------------------------------------------------------------------------------------


def _planned() -> ModelPlan:
    shapes = dict(list(model(125).items())[:1000])
    trainers, servers = sw.Mesh(fsdp=1024), sw.Mesh(dp=64, tp=8)
    words = {Shard(0): "S0", Shard(1): "S1", Replicate(): "R"}

    @cache  # as those of DTensors are
    def tensor(shape: tuple[int, ...], mesh: sw.Mesh, *placements: str) -> TensorInfo:
        return TensorInfo(shape, torch.bfloat16, sw.Layout.on_mesh(shape, mesh, placements), "cpu")

    sources = {name: tensor(shape, trainers, "S0") for name, shape in shapes.items()}
    targets = {name: tensor(shape, servers, "R", words[placement(name)]) for name, shape in shapes.items()}
    return ModelPlan.of(links(shapes, shapes), sources, targets)


def _own_part() -> int:
    return sum(len(entry.plan.for_owner(77).copies) for entry in _planned().links)
