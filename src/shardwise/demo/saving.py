"""Act 1: trainers save a checkpoint, by torch alone."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from time import perf_counter
from typing import NamedTuple

import torch._dynamo  # noqa: F401  fully_shard imports it, which takes long: once here, not on every rank
from rich.console import Console
from torch.distributed.checkpoint.state_dict_saver import save as dcp_save
from torch.distributed.device_mesh import init_device_mesh

from shardwise.bench.table import seconds
from shardwise.demo.figures import ranks
from shardwise.demo.folder import DemoFolder
from shardwise.demo.model import TRAINERS, Llama, Weights, fsdp_model
from shardwise.demo.stage import heading, say
from shardwise.planning import size
from shardwise.tensor import fingerprint

STEP = 300  # of the training


class SaveReport(NamedTuple):
    """What a trainer reports."""

    seconds: float
    fingerprints: Mapping[str, str | None]


def save(console: Console, folder: DemoFolder, llama: Llama, weights: Weights) -> Mapping[str, str | None]:
    """Save it, and return the fingerprints of all weights as the trainers hold them."""
    count = len(TRAINERS.ranks)
    heading(console, 1, "Four trainers save a checkpoint")
    say(
        console,
        f"A Llama-shaped model: {len(weights)} tensors, {size(llama.bytes)} of bfloat16, under FSDP2.",
    )

    def rank(_: int) -> SaveReport:
        logging.disable(logging.WARNING)  # torch's remarks on itself
        model = fsdp_model(weights, init_device_mesh("cpu", (count,))).state_dict()
        began = perf_counter()
        dcp_save({"model": model, "step": STEP}, checkpoint_id=folder.dcp)
        return SaveReport(perf_counter() - began, {name: fingerprint(x) for name, x in model.items()})

    reports = ranks(count, rank)
    files = len(list(folder.dcp.iterdir()))
    took = seconds(max(report.seconds for report in reports))
    say(console, f"torch.distributed.checkpoint.save wrote {folder.dcp}: {files} files, {took}.\n")
    return reports[0].fingerprints
