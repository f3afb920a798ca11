"""Whole models moved between shardings: one exchange for all tensors, against redistribute tensor by tensor."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from functools import cache
from math import prod
from statistics import median
from time import perf_counter, process_time
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard

import shardwise as sw
from benchmarks.caches import forget
from benchmarks.measure import Effort, Job, Row, Target, every_repeat, interleaved
from shardwise.state.links import links
from shardwise.state.plan import ModelPlan, Tensor
from shardwise.testing import on_ranks

TITLE = "Whole models"
ABOUT = """
A Llama-shaped model in bfloat16 (289 tensors, 0.7 GiB), fully sharded by rows over four ranks, to tensor parallel: rows
of q, k, v, gate and up, columns of o and down, norms replicated. `Resharder.run` writes into the target's own tensors,
as it does after every step of training; `reshard_state_dict` makes new ones. The peer is `DTensor.redistribute`, tensor
by tensor, over the same gloo group. Both sides were found equal before the clock started, and both have run before.

The model of small tensors has as many, of 64 numbers each: what is left of a run when there is next to nothing to move.
Where all of them stay on their ranks, only checks, the agreement and 289 copies of 32 bytes are left.
Planning is for another world: 1,000 tensors from 1,024 owners (fully sharded) to 512 (tensor parallel by 8), whole and
for one owner.
"""
RANKS = 4
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


def rows(effort: Effort) -> Iterator[Row]:
    """All cases."""
    if dist.is_initialized():  # as another subject left it: ranks make a group of their own
        dist.destroy_process_group()
    small = {name: (8, 8) if len(shape) > 1 else (64,) for name, shape in model().items()}
    synced, fresh, theirs = _slowest(on_ranks(RANKS, lambda _: _measured(model(), effort.large), timeout=600))
    size = f"{len(model())} tensors, {sum(map(prod, model().values())) * 2 / 2**30:.1f} GiB"
    yield Row(f"Resharder.run, {size}", synced, theirs, "redistribute", Target(4))
    yield Row(f"reshard_state_dict, {size}", fresh, theirs, "redistribute")
    little, _, theirs = _slowest(on_ranks(RANKS, lambda _: _measured(small, effort.small // 4), timeout=300))
    note = f"{little / len(small) * 200 * 1e3:.2f} ms for 200 tensors: checks, agreement, packing"
    yield Row(f"Resharder.run, {len(small)} small tensors", little, theirs, "redistribute", None, note)
    still, checks = _slowest(on_ranks(RANKS, lambda _: _unmoved(small, effort.small), timeout=300))
    note = (
        f"per 200 tensors {still / len(small) * 200 * 1e3:.2f} ms of wall time with four ranks on these cores, and "
        f"{checks / len(small) * 200 * 1e3:.2f} ms of one rank's own time (at most 2 ms wanted)"
    )
    yield Row(f"the same, {len(small)} tensors that stay where they are", still, None, "", None, note)
    whole, part = interleaved(Job(lambda _: _planned().bytes_moved, forget), Job(lambda _: _own_part(), forget))
    yield Row("planning 1,000 tensors, 1,024 -> 512 owners", whole.seconds)
    yield Row("the same, one owner's part", part.seconds)


def _slowest(found: list[list[list[float]]]) -> list[float]:
    """For every job the median of its repeats, each as long as on its slowest rank."""
    return [median(map(max, zip(*ranks, strict=True))) for ranks in zip(*found, strict=True)]


# --- on a rank -------------------------------------------------------------------------------------------------------


def _measured(shapes: Shapes, repeats: int) -> list[list[float]]:
    logging.getLogger("torch.distributed.tensor._collective_utils").setLevel(logging.ERROR)
    mesh = DeviceMesh("cpu", list(range(RANKS)))
    torch.manual_seed(dist.get_rank())
    source = {name: tensor_of(shape, mesh, Shard(0)) for name, shape in shapes.items()}
    target = {name: tensor_of(shape, mesh, placement(name)) for name, shape in shapes.items()}
    sync = sw.Resharder(source, target)
    jobs: list[Callable[[Any], Any]] = [
        lambda _: sync.run(),
        lambda _: sw.reshard_state_dict(source, target),
        lambda _: {name: x.redistribute(mesh, [placement(name)]) for name, x in source.items()},
    ]
    expected = jobs[2](None)
    for found in (jobs[0](None) or target, jobs[1](None)):
        if not all(torch.equal(found[name].to_local(), x.to_local()) for name, x in expected.items()):
            raise RuntimeError("the models differ")
    del expected, found
    seconds, _ = every_repeat(*(Job(job, lambda: dist.barrier(), repeats) for job in jobs))
    return seconds


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
    local = [size // RANKS if place.is_shard(dim) else size for dim, size in enumerate(shape)]
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
    def tensor(shape: tuple[int, ...], mesh: sw.Mesh, *placements: str) -> Tensor:
        return Tensor(shape, torch.bfloat16, sw.Layout.on_mesh(shape, mesh, placements), "cpu")

    sources = {name: tensor(shape, trainers, "S0") for name, shape in shapes.items()}
    targets = {name: tensor(shape, servers, "R", words[placement(name)]) for name, shape in shapes.items()}
    return ModelPlan.of(links(shapes, shapes), sources, targets)


def _own_part() -> int:
    return sum(len(entry.plan.for_owner(77).copies) for entry in _planned().entries)
