"""Act 4: two ranks load it tensor parallel."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from typing import NamedTuple

import torch.distributed as dist
from rich.console import Console
from torch.distributed.checkpoint.state_dict_loader import load as dcp_load
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor

from shardwise import checkpoint
from shardwise.demo.figures import Figure, Times, by_turns, check, ranks, seconds_of
from shardwise.demo.folder import DemoFolder
from shardwise.demo.model import DTYPE, SERVERS, TENSOR_PARALLEL, Llama
from shardwise.demo.stage import heading, say
from shardwise.state import empty
from shardwise.tensor import fingerprint


class LoadReport(NamedTuple):
    """What a server reports: fingerprints and times, by way of loading."""

    fingerprints: dict[str, dict[str, str | None]]
    times: Times


def load(console: Console, folder: DemoFolder, llama: Llama, fingerprints: Mapping[str, str | None]) -> list[Figure]:
    """Load it from both directories, and compare with the fingerprints of the trainers."""
    count = len(SERVERS.ranks)
    heading(console, 4, "Two ranks load it tensor parallel")
    say(console, "Each reads its own part: rows of q, k, v, gate and up, columns of o and down.")

    def rank(_: int) -> LoadReport:
        logging.disable(logging.WARNING)
        into = tensor_parallel(llama, init_device_mesh("cpu", (count,)))
        jobs: dict[str, Callable[[int], object]] = {
            "hf": lambda _: checkpoint.load(folder.hf, into),
            "torch": lambda _: dcp_load({"model": into}, checkpoint_id=folder.dcp),
            "dcp": lambda _: checkpoint.load(folder.dcp, {"model": into}),
        }
        fingerprints = dict[str, dict[str, str | None]]()
        for name, job in jobs.items():
            for x in into.values():
                x.to_local().zero_()
            job(0)
            fingerprints[name] = {name: fingerprint(x) for name, x in into.items()}
        return LoadReport(fingerprints, by_turns(jobs, dist.barrier))

    reports = ranks(count, rank)
    for way, found in reports[0].fingerprints.items():
        check(found == fingerprints, f"other weights were loaded than the trainers had ({way})")
    say(console, f"From {folder.hf} and from {folder.dcp}: {len(fingerprints)} fingerprints, all as on the trainers.\n")
    hf, ours, torchs = (seconds_of([report.times for report in reports], way) for way in ("hf", "dcp", "torch"))
    return [
        Figure("load safetensors", llama.bytes, hf),
        Figure("load DCP", llama.bytes, ours, "dcp.load", torchs),
    ]


def tensor_parallel(llama: Llama, mesh: DeviceMesh) -> dict[str, DTensor]:
    """DTensors to fill, placed by the ready rules."""
    rules = TENSOR_PARALLEL.with_mesh(tp=mesh.size())
    return {name: empty((mesh, rules.placements(name)), shape, dtype=DTYPE) for name, shape in llama.shapes().items()}
