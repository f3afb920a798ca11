"""Ranks with tensors on the test device, over the three kinds of groups that GPUs have."""

import socket

import pytest
import torch

from shardwise.testing import on_ranks
from shardwise.testing.device import use_device
from shardwise.testing.ordered_group import ALONE, BESIDE_GLOO

GROUPS = {"gloo": "gloo", "as nccl alone": ALONE, "as cpu:gloo,cuda:nccl": BESIDE_GLOO}
every_group = pytest.mark.parametrize("backend", GROUPS.values(), ids=GROUPS.keys())


def on_devices(count, work, backend, *, hosts=False):
    """`work(rank, device)` on ranks; with `hosts`, each is on a host of its own as far as shardwise can see."""

    def run(rank):
        if hosts:
            socket.gethostname = lambda: f"host {rank}"
        return work(rank, use_device())

    return on_ranks(count, run, backend=backend, timeout=180.0)


def numbered(layout, rank, device, dtype=torch.float32):
    """This rank's tensors of a layout: numbers that tell cells apart; terms differ from rank to rank, too."""
    return [
        (torch.arange(local.numel(), dtype=dtype) + 1000 * rank).view(local.shape).to(device)
        for local in (torch.empty(shape) for shape in layout.local_shapes(rank))
    ]
