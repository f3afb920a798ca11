"""Act 6: a trainer publishes versions of its weights, and servers that were started separately pull them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from itertools import count
from pathlib import Path
from statistics import median
from time import perf_counter, sleep
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from rich.console import Console
from rich.table import Table
from torch.distributed.device_mesh import init_device_mesh

from shardwise.bench.table import seconds
from shardwise.demo.figures import check
from shardwise.demo.folder import DemoFolder
from shardwise.demo.jobs import Channel, Job, Jobs
from shardwise.demo.model import DTYPE, FUSE, SERVERS, TRAINERS, Llama, Weights, fsdp_model, fused, served
from shardwise.demo.stage import heading, say, show
from shardwise.layout import Mesh
from shardwise.planning import size
from shardwise.publishing import publish, subscribe
from shardwise.state import empty
from shardwise.testing import scatter

NAME, PATIENCE = "policy", 60.0  # a busy machine is slow, and not dead
STEP = 0.2  # seconds that a step of training takes, at least
REPORTS = 3  # commits or pulls, until something happens
DOUBLINGS = 16  # steps that double all weights, which is exact; the next one makes them what they were at first


class Report(NamedTuple):
    """A version that was committed or pulled."""

    version: int
    seconds: float
    bytes: int  # that all ranks have copied


def publish_versions(console: Console, folder: DemoFolder, llama: Llama, weights: Weights) -> None:
    """A trainer and two servers; one server is killed and started again."""
    heading(console, 6, "Separate jobs: a trainer publishes versions, servers pull them")
    say(console, "Jobs with their own process groups meet in a file. Server B is killed (-9).\n")
    with folder.aside() as aside, Jobs(aside) as jobs:
        at = aside / "meeting"
        trainer = jobs.start("trainer", TRAINERS.ranks.size, partial(_train, weights, at))
        one = jobs.start("server A", SERVERS.ranks.size, partial(_serve, partial(_sharded, llama, weights), at))
        two = jobs.start("server B", 1, partial(_serve, partial(_whole, weights), at))
        jobs.wait_until(lambda: _has(one, REPORTS) and _has(two, REPORTS), "the first pulls of both servers")
        two.kill()
        missed = len(trainer.reports) + REPORTS
        jobs.wait_until(lambda: _has(trainer, missed), "commits while a server is dead")
        back = jobs.start("server B again", 1, partial(_serve, partial(_whole, weights), at))
        jobs.wait_until(lambda: _has(back, REPORTS), "pulls of the server that was started again")
        for job in (back, one, trainer):
            jobs.end(job)
    names = "trainer: 4 ranks, FSDP", "server A: 2 ranks, TP", "server B: 1 process", "server B, started again"
    show(console, _table(dict(zip(names, jobs.started, strict=True))))
    slowest = seconds(max(report.seconds for report in trainer.reports))
    say(console, f"Whole versions only, bit-for-bit, on every rank. Slowest commit: {slowest}.")
    say(console, "On one host a server maps the trainer's copy of a version, and copies a part.\n")


def _has(job: Job, reports: int) -> bool:
    return len(job.reports) >= reports


def _table(jobs: Mapping[str, Job]) -> Table:
    """Versions, bytes and times of every job; the first is the trainer."""
    table = Table("job", "versions", "in all", "bytes copied", "median", box=None, pad_edge=False)
    for column in table.columns[2:5]:
        column.justify = "right"
    for number, (name, job) in enumerate(jobs.items()):
        versions = [report.version for report in job.reports]
        took = seconds(median(report.seconds for report in job.reports))
        what = f"{'pulls' if number else 'commits'} {versions[0]} to {versions[-1]}"
        table.add_row(name, what, str(len(versions)), size(sum(report.bytes for report in job.reports)), took)
    return table


# --- on the ranks ----------------------------------------------------------------------------------------------------


def _scale(version: int) -> int:
    """What the weights of a version are, times those of the beginning."""
    return int(2 ** (version % DOUBLINGS))


def _train(weights: Weights, at: Path, channel: Channel) -> None:
    model = fsdp_model(weights, init_device_mesh("cpu", (dist.get_world_size(),))).state_dict()
    with publish(model, at=at, name=NAME, patience=PATIENCE) as publisher:
        for version in count(1):
            if channel.ended():
                break
            for weight in model.values():
                weight.to_local().mul_(_scale(version) / _scale(version - 1))
            sleep(STEP)
            began = perf_counter()
            publisher.commit(version)
            took = perf_counter() - began
            copied = channel.total(sum(weight.to_local().nbytes for weight in model.values()))
            channel.report(Report(version, took, copied))


Local = Mapping[str, torch.Tensor]


def _serve(made: Callable[[int], tuple[dict[str, Any], Local, Local]], at: Path, channel: Channel) -> None:
    """Pull what is new, and compare all cells with the version that they should be of."""
    state, local, first = made(channel.rank)
    with subscribe(state, at=at, name=NAME, remap=[FUSE], patience=PATIENCE) as subscriber:
        while not channel.ended():
            before, began = subscriber.version, perf_counter()
            version = subscriber.pull()
            took = perf_counter() - began
            if version is None or version == before:
                sleep(STEP / 20)
                continue
            for name, tensor in local.items():
                check(torch.equal(tensor, first[name] * _scale(version)), f"{name} is not of version {version}")
            channel.report(Report(version, took, channel.total(sum(tensor.nbytes for tensor in local.values()))))


def _sharded(llama: Llama, weights: Weights, rank: int) -> tuple[dict[str, Any], Local, Local]:
    """Tensors to pull into, tensor parallel; this rank's memory of them, and what the weights are at first."""
    layouts, whole = served(llama, Mesh(tp=dist.get_world_size())), fused(weights)
    state = {name: empty(layout, dtype=DTYPE) for name, layout in layouts.items()}
    first = dict[str, torch.Tensor]()
    for name, layout in layouts.items():
        (part,) = scatter(whole[name].view(torch.int16).numpy(), layout)[rank]  # numpy has no bfloat16
        first[name] = torch.from_numpy(part).view(DTYPE)
    return state, {name: tensor.local_tensor() for name, tensor in state.items()}, first


def _whole(weights: Weights, rank: int) -> tuple[dict[str, Any], Local, Local]:
    """The same in one process: plain tensors."""
    first = fused(weights)
    state = {name: torch.empty_like(weight) for name, weight in first.items()}
    return state, state, first
