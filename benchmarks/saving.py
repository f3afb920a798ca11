"""Saves beside training: how long they keep the training waiting, and what the steps beside them lose."""

from __future__ import annotations

import logging
import shutil
import warnings
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from itertools import count
from math import prod
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Shard

from benchmarks.measure import Effort, Row, Target
from benchmarks.model import model, tensor_of
from benchmarks.table import size
from shardwise import checkpoint
from shardwise.bench.clock import Interval, Task, every_repeat, together
from shardwise.bench.moves import meet
from shardwise.testing import on_ranks

TITLE = "Saves beside training"
ABOUT = """
The model of the sections before, fully sharded over two ranks, one for each core, is saved again and again (`fsync`).
The stall is the time until `save(..., async_op=True)` returns. Earlier saves have ended then, and memory was prepared.
It is compared with `copy_` of the same tensors into warm memory, and with `dcp.async_save`. Steps are forward,
backward and AdamW of three linear layers. They begin when a save has returned, and are compared with steps that begin
when `dcp.async_save` has returned.

`Run(memory=2)` keeps each step in memory, too: once beside each rank that has it, and once beside the other. How long
`keep` takes, and `resume` to fill a rank's shard from there, is compared with `copy_` of that shard. What the ranks
take of it to agree is the time to resume the smallest tensor alone.
"""
RANKS = 2
OURS, AS_DCP, PEER, COPY = "ours", "ours, dcp", "dcp.async_save", "copy"
KEEP, RESUME, AGREE = "keep in memory", "resume from memory", "resume one small tensor"
STEPS, ALONE = ("steps beside ours", "steps beside dcp.async_save"), "steps alone"
FEW = 20  # steps in a repeat


def rows(effort: Effort) -> Iterator[Row]:
    """All cases."""
    if dist.is_initialized():
        dist.destroy_process_group()
    with TemporaryDirectory() as folder:
        found = on_ranks(RANKS, lambda _: _measured(Path(folder), effort.medium), timeout=900)
        kept = on_ranks(RANKS, lambda _: _kept(Path(folder, "kept"), effort.medium), timeout=900)
    seconds = {way: together(rank[way] for rank in found) for way in found[0]}
    each = size(2 * sum(map(prod, model().values())) // RANKS)
    stall, target = f"stall of an asynchronous save, {each} per rank", Target(1.15, most=True)
    yield Row(stall, seconds[OURS], seconds[COPY], "copy_ into warm memory", target)
    yield Row(f"{stall}, in DCP's format", seconds[AS_DCP], seconds[COPY], "copy_ into warm memory", target)
    yield Row(stall, seconds[OURS], seconds[PEER], "dcp.async_save", Target(2))
    ours, theirs = (seconds[way] / seconds[ALONE] for way in STEPS)
    note = f"{ours:.2f}x and {theirs:.2f}x of the steps alone"
    yield Row(
        f"{FEW} training steps beside a save", seconds[STEPS[0]], seconds[STEPS[1]], "beside dcp's", Target(1), note
    )

    yield from _kept_rows({way: together(rank[way] for rank in kept) for way in kept[0]}, each)


def _kept_rows(seconds: dict[str, float], each: str) -> Iterator[Row]:
    note = f"{1e3 * seconds[AGREE]:.0f} ms of it to agree"
    yield Row(
        f"recover a shard of {each} from memory",
        seconds[RESUME],
        seconds[COPY],
        "copy_ into warm memory",
        Target(5, most=True),
        note,
    )
    yield Row(f"keep a shard of {each} in two places", seconds[KEEP], seconds[COPY], "copy_ into warm memory")


def _kept(folder: Path, repeats: int) -> dict[str, list[Interval]]:
    """Each rank's shard, from memory to memory."""
    logging.disable(logging.WARNING)
    torch.set_num_threads(1)
    mesh = DeviceMesh("cpu", list(range(RANKS)))
    state, into = ({name: tensor_of(shape, mesh, Shard(0)) for name, shape in model().items()} for _ in range(2))
    small = min(into, key=lambda name: into[name].numel())
    steps = count()
    with checkpoint.Run(folder, memory=2) as run:
        run.keep(next(steps), state)
        run.keep(next(steps), state)

        def copy(_: object) -> None:
            for name, tensor in state.items():
                into[name].to_local().copy_(tensor.to_local())

        ways = {
            KEEP: Task(lambda _: run.keep(next(steps), state), repeats=repeats, start=meet),
            RESUME: Task(lambda _: run.resume(into=into), repeats=repeats, start=meet),
            AGREE: Task(lambda _: run.resume(into={small: into[small]}), repeats=repeats, start=meet),
            COPY: Task(copy, repeats=repeats, start=meet),
        }
        spans, _ = every_repeat(*ways.values())
    return {way: one[1:] or one for way, one in zip(ways, spans, strict=True)}


def _measured(folder: Path, repeats: int) -> dict[str, list[Interval]]:
    warnings.simplefilter("ignore")
    logging.disable(logging.WARNING)
    torch.set_num_threads(1)
    mesh, numbers = DeviceMesh("cpu", list(range(RANKS))), count()
    state = {name: tensor_of(shape, mesh, Shard(0)) for name, shape in model().items()}
    warm = {name: tensor.to_local().clone() for name, tensor in state.items()}
    train, own = _training(), dist.new_group(backend="gloo")  # async_save must not share a group with anybody
    running = list[checkpoint.SaveHandle | Future[Any]]()

    def save(format: str) -> None:
        running.append(checkpoint.save(state, folder / str(next(numbers)), format=format, async_op=True))

    def peer(_: object) -> None:
        future = dcp.async_save(state, checkpoint_id=folder / str(next(numbers)), process_group=own)
        running.append(future if isinstance(future, Future) else future.upload_completion)

    def copy(_: object) -> None:
        for name, tensor in state.items():
            warm[name].copy_(tensor.to_local())

    def steps(_: object) -> None:
        for _step in range(FEW):
            train()

    def ended() -> None:
        while running:
            one = running.pop()
            one.wait() if isinstance(one, checkpoint.SaveHandle) else one.result()
        dist.barrier()
        if dist.get_rank() == 0:
            for old in folder.iterdir():
                shutil.rmtree(old)
        meet()

    def after(start: Callable[[], None]) -> Callable[[], None]:
        def ready() -> None:
            ended()
            start()
            meet()

        return ready

    checkpoint.prepare(state)
    ways = {
        OURS: Task(lambda _: save("safetensors"), repeats=repeats, start=ended),
        AS_DCP: Task(lambda _: save("dcp"), repeats=repeats, start=ended),
        PEER: Task(peer, repeats=repeats, start=ended),
        COPY: Task(copy, repeats=repeats, start=ended),
        ALONE: Task(steps, repeats=repeats, start=ended),
        STEPS[0]: Task(steps, repeats=repeats, start=after(lambda: save("safetensors"))),
        STEPS[1]: Task(steps, repeats=repeats, start=after(lambda: peer(None))),
    }
    spans, _ = every_repeat(*ways.values())
    ended()
    return {way: one[1:] or one for way, one in zip(ways, spans, strict=True)}


def _training() -> Callable[[], None]:
    """A step of a small model of this rank alone, bound by arithmetic."""
    layers = torch.nn.Sequential(*(torch.nn.Linear(512, 512) for _ in range(3)))
    optimizer, batch = torch.optim.AdamW(layers.parameters()), torch.randn(256, 512)

    def step() -> None:
        optimizer.zero_grad()
        layers(batch).square().mean().backward()
        optimizer.step()

    return step
