"""Activations kept in parts: input_reshard against the plain module and against torch's own."""

from __future__ import annotations

import logging
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.distributed.tensor.parallel.input_reshard import input_reshard as torchs

import shardwise as sw
from benchmarks.measure import Effort, Row, Target
from benchmarks.memory import resident
from shardwise.bench.clock import Interval, Task, every_repeat, together
from shardwise.testing import on_ranks

TITLE = "Activations"
ABOUT = """
A step (forward and backward) of four MLPs one after the other, hidden size 1024, 4096 tokens, tensor parallel over the
ranks by `parallelize_module`; each MLP under `input_reshard`, or under torch's function of that name, or as it is. The
gradients of ours equal those of the plain modules, bit-for-bit, which was checked first (torch's are not equal:
it mixes what differs between ranks). "Peak" is how far the resident memory of a rank rises during a step above where it
was, the median over steps, on the rank where it rises most; "kept" is what is left of the saved inputs on a rank.
"""
HIDDEN, TOKENS, LAYERS = 1024, 4096, 4
MIB = 2**20
KINDS = ("plain", "torch", "ours")


class MLP(torch.nn.Module):
    """Two linear layers."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = torch.nn.Linear(HIDDEN, 4 * HIDDEN), torch.nn.Linear(4 * HIDDEN, HIDDEN)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """With a relu in between."""
        found: torch.Tensor = self.down(torch.relu(self.up(x)))
        return found


class RankTimes(NamedTuple):
    """What a rank found: when every repeat of each kind ran, its bytes, and the account of ours."""

    spans: list[list[Interval]]
    peaks: list[list[int]]
    account: sw.activation.Account


def rows(effort: Effort) -> Iterator[Row]:
    """Two and four ranks."""
    if dist.is_initialized():  # as another subject left it: ranks make a group of their own
        dist.destroy_process_group()
    for tp, bound in ((2, 1.10), (4, 1.2)):
        found = on_ranks(tp, lambda _: _measured(effort.slow_peer), timeout=600)
        plain, theirs, ours = (together(rank.spans[n] for rank in found) for n in range(len(KINDS)))
        note = _note(found)
        case = f"step of four MLPs, tp={tp}"
        yield Row(case, ours, plain, "plain", Target(bound, most=True), note)
        yield Row(f"{case}, against torch's", ours, theirs, "torch", Target(1))


def _note(found: list[RankTimes]) -> str:
    peaks = [max(median(rank.peaks[n]) for rank in found) / MIB for n in range(len(KINDS))]
    account = found[0].account
    kept, saved = account.bytes_kept / MIB, account.bytes_saved / MIB
    return f"kept {kept:g} of {saved:g} MiB, gathered {account.bytes_gathered / MIB:g} MiB; peak " + ", ".join(
        f"{kind} +{peak:.0f} MiB" for kind, peak in zip(KINDS, peaks, strict=True)
    )


# --- on a rank -------------------------------------------------------------------------------------------------------


def _measured(repeats: int) -> RankTimes:
    logging.getLogger("torch.distributed.tensor._collective_utils").setLevel(logging.ERROR)
    warnings.simplefilter("ignore", FutureWarning)
    mesh = DeviceMesh("cpu", list(range(dist.get_world_size())))
    nets = [_net(kind, mesh) for kind in KINDS]
    torch.manual_seed(1)
    x = torch.randn(TOKENS, HIDDEN)
    plain, _, ours = (_gradients(net, x) for net in nets)
    if not all(torch.equal(a, b) for a, b in zip(plain, ours, strict=True)):
        raise RuntimeError("the gradients of ours are not those of the plain modules")
    del plain, ours
    peaks: list[list[int]] = [[] for _ in nets]
    jobs = [Task(_step(net, x, rises), lambda: dist.barrier(), repeats) for net, rises in zip(nets, peaks, strict=True)]
    spans, _ = every_repeat(*jobs)
    with sw.activation.measure() as measure:
        _gradients(nets[-1], x)
    return RankTimes(spans, peaks, measure.total)


def _net(kind: str, mesh: DeviceMesh) -> torch.nn.Module:
    torch.manual_seed(0)
    net = torch.nn.Sequential(*(MLP() for _ in range(LAYERS)))
    plan = {f"{n}.up": ColwiseParallel() for n in range(LAYERS)} | {
        f"{n}.down": RowwiseParallel() for n in range(LAYERS)
    }
    parallelize_module(net, mesh, plan)
    reshard: dict[str, Callable[..., Any]] = {"torch": torchs, "ours": sw.input_reshard}
    for mlp in net:
        if kind in reshard:
            reshard[kind](mlp, mesh, 0)
    return net


def _step(net: torch.nn.Module, x: torch.Tensor, rises: list[int]) -> Callable[[Any], None]:
    def step(_: Any) -> None:
        Path("/proc/self/clear_refs").write_text("5")  # the high-water mark starts anew
        before = resident("VmRSS")
        net(x.clone()).square().sum().backward()
        rises.append(resident("VmHWM") - before)
        net.zero_grad()

    return step


def _gradients(net: torch.nn.Module, x: torch.Tensor) -> list[torch.Tensor]:
    net(x.clone()).square().sum().backward()
    found = [p.grad.to_local() for p in net.parameters()]  # type: ignore[union-attr]
    net.zero_grad()
    return found
