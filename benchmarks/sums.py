"""Checksums of blocks: what they add to loads and saves."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from tempfile import TemporaryDirectory
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Shard

from benchmarks.measure import Effort, Row, Target
from benchmarks.model import RANKS, model, placement, tensor_of
from shardwise import checkpoint
from shardwise.bench.clock import Interval, Task, every_repeat, together
from shardwise.bench.moves import meet
from shardwise.testing import on_ranks

TITLE = "Checksums"
ABOUT = """
The model and the ranks of the section about checkpoints. Each row is a load that checks, or a save that writes, the
checksums beside the files, next to the same without them (`check=False`, `sums=False`). Loads of the same sharding read
long runs of bytes. Loads that reshard read strided elements, too, and check what lies in whole blocks. The page cache
is warm but for "cold", where it is dropped before each load.
"""
WARM, COLD, SAVE, ALL = (Target(ratio, most=True) for ratio in (1.15, 1.05, 1.05, 1.5))


def rows(effort: Effort) -> Iterator[Row]:
    """All cases."""
    if dist.is_initialized():
        dist.destroy_process_group()
    with TemporaryDirectory(dir=os.environ.get("SHARDWISE_BENCH", None)) as folder:
        ranks = on_ranks(RANKS, lambda _: _measured(folder, effort.medium), timeout=1800)
        times = [together(several) for several in zip(*ranks, strict=True)]
    cases = {
        "load of the same sharding, from our safetensors": WARM,
        "load of the same sharding, from DCP": WARM,
        "load of another sharding, from our safetensors": WARM,
        "load of another sharding, cold": COLD,
        'load of the same sharding, check="all"': ALL,
        "save, fsync": SAVE,
        "save, no fsync": WARM,
    }
    for at, (case, target) in enumerate(cases.items()):
        without = "sums=False" if case.startswith("save") else "check=False"
        yield Row(case, times[2 * at], times[2 * at + 1], without, target)


def _measured(folder: str, repeats: int) -> list[list[Interval]]:
    mesh = DeviceMesh("cpu", list(range(RANKS)))
    torch.manual_seed(dist.get_rank())
    state = {name: tensor_of(shape, mesh, Shard(0)) for name, shape in model().items()}
    other = {name: tensor_of(shape, mesh, placement(name)) for name, shape in model().items()}
    ours, as_dcp = f"{folder}/ours", f"{folder}/dcp"
    checkpoint.save(state, ours)
    checkpoint.save(state, as_dcp, format="dcp")
    warm: list[Callable[[Any], Any]] = [
        lambda _: checkpoint.load(ours, state),
        lambda _: checkpoint.load(ours, state, check=False),
        lambda _: checkpoint.load(as_dcp, state),
        lambda _: checkpoint.load(as_dcp, state, check=False),
        lambda _: checkpoint.load(ours, other),
        lambda _: checkpoint.load(ours, other, check=False),
    ]
    cold: list[Callable[[Any], Any]] = [
        lambda _: checkpoint.load(ours, other),
        lambda _: checkpoint.load(ours, other, check=False),
    ]
    whole: list[Callable[[Any], Any]] = [
        lambda _: checkpoint.load(ours, state, check="all", group=dist.group.WORLD, read="each"),
        lambda _: checkpoint.load(ours, state, check=False, group=dist.group.WORLD, read="each"),
    ]
    saves: list[Callable[[Any], Any]] = [
        lambda _: checkpoint.save(state, f"{folder}/a"),
        lambda _: checkpoint.save(state, f"{folder}/b", sums=False),
        lambda _: checkpoint.save(state, f"{folder}/c", durable=False),
        lambda _: checkpoint.save(state, f"{folder}/d", durable=False, sums=False),
    ]
    for job in (*warm, *saves):
        job(None)
    jobs = [*(Task(job, meet, repeats) for job in warm), *(Task(job, lambda: _dropped(ours), repeats) for job in cold)]
    jobs += [*(Task(job, meet, repeats) for job in whole), *(Task(job, _settled, repeats) for job in saves)]
    times, _ = every_repeat(*jobs)
    return times


def _settled() -> None:
    """All ranks, once the disk has what was written before."""
    dist.barrier()
    os.sync()
    dist.barrier()


def _dropped(folder: str) -> None:
    """All ranks, once nothing of the files is in the page cache."""
    _settled()
    for entry in os.scandir(folder) if dist.get_rank() == 0 else ():
        file = os.open(entry.path, os.O_RDONLY)
        os.posix_fadvise(file, 0, 0, os.POSIX_FADV_DONTNEED)
        os.close(file)
    dist.barrier()
