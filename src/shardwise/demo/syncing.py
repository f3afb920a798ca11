"""Act 5: after every step of training the servers get the new weights."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from typing import NamedTuple

import torch
import torch.distributed as dist
from rich.console import Console
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from shardwise.bench.table import seconds
from shardwise.demo.by_hand import ByHand
from shardwise.demo.figures import TURNS, Figure, Times, by_turns, check, ranks, seconds_of
from shardwise.demo.loading import tensor_parallel
from shardwise.demo.model import (
    DTYPE,
    FUSE,
    SERVERS,
    TRAINERS,
    Llama,
    Weights,
    fsdp_model,
    fused,
    served,
)
from shardwise.demo.stage import heading, say
from shardwise.job.plan import ModelPlan
from shardwise.layout import Layout
from shardwise.planning import size
from shardwise.state import Resharder, empty
from shardwise.tensor import ShardedTensor, fingerprint

TRAINING, SERVING = TRAINERS.ranks.tolist(), SERVERS.ranks.tolist()


class SyncReport(NamedTuple):
    """What a rank reports: times of the sync, its plan, and (from trainers) of a move among the trainers."""

    times: Times
    plan: str
    alike: int  # fingerprints
    among: Times
    moved: int


def sync(console: Console, llama: Llama, weights: Weights, plan: ModelPlan) -> list[Figure]:
    """Train, sync and compare; then by turns with what torch has."""
    heading(console, 5, "Live: after every step the servers get the weights, q, k and v as one")
    say(console, f"{TURNS + 1} steps on six processes, by turns with what one would do with torch alone.")
    reports = ranks(len(TRAINING) + len(SERVING), lambda rank: _rank(rank, llama, weights))
    check(all(report.plan == plan.fingerprint for report in reports), "the ranks made another plan than act 2")
    times = [report.times for report in reports]
    trainers = [report.among for report in reports[: len(TRAINING)]]
    ours, torchs, among, redistribute = (
        seconds_of(where, way)
        for where, way in ((times, "ours"), (times, "torch"), (trainers, "ours"), (trainers, "torch"))
    )
    say(console, f"A sync moves {size(plan.bytes_moved)} in {seconds(ours)}, by the plan of act 2.")
    alike = f"{reports[0].alike} fingerprints alike"
    say(console, f"Its part was right on every server after every step; {alike}.\n")
    return [
        Figure("FSDP to TP, 4 ranks", reports[0].moved, among, "redistribute", redistribute),
        Figure("sync, 4 to 2 ranks", plan.bytes_moved, ours, "gather, broadcast", torchs),
    ]


def _rank(rank: int, llama: Llama, weights: Weights) -> SyncReport:
    logging.disable(logging.WARNING)
    mesh = DeviceMesh("cpu", TRAINING)
    source = fsdp_model(weights, mesh).state_dict() if rank in TRAINING else None
    target = {name: empty(layout, dtype=DTYPE) for name, layout in served(llama).items()} if rank in SERVING else None
    sync, by_hand = Resharder(source, target, remap=[FUSE]), ByHand.of(rank, llama, weights, target)
    jobs: dict[str, Callable[[int], object]] = {
        "step": lambda _: _train(source or {}),
        "ours": lambda _: sync.run(),
        "compare": lambda turn: by_hand.compare(_scale(turn)),
        "torch": lambda _: by_hand.sync(source),
        "compare torch's": lambda turn: by_hand.compare(_scale(turn)),
    }
    times = by_turns(jobs, dist.barrier)
    sync.run()
    alike = _alike(source, target, weights)
    among, moved = _among_trainers(llama, source, mesh) if source else ({}, 0)
    return SyncReport(times, sync.plan.fingerprint, alike, among, moved)


def _train(source: Mapping[str, DTensor]) -> None:
    """A step: all weights twice as large, which is exact."""
    for weight in source.values():
        weight.to_local().mul_(2)


def _scale(turn: int) -> int:
    """What the weights are by then, times those of the beginning."""
    return 2 ** (turn + 1)


def _alike(source: Mapping[str, DTensor] | None, target: Mapping[str, ShardedTensor] | None, weights: Weights) -> int:
    """How many have one fingerprint: on the servers, whole on a rank, and (except for q, k, v) on the trainers."""
    expected = fused(weights)
    for name, weight in expected.items():
        whole = (
            ShardedTensor(weight * _scale(TURNS), Layout.replicated(weight.shape, [0]))
            if dist.get_rank() == 0
            else None
        )
        different = {fingerprint(whole), fingerprint((target or {}).get(name))}
        if name in weights:
            different.add(fingerprint((source or {}).get(name), group=dist.group.WORLD))
        check(len(different) == 1, f"the fingerprints of {name} differ")
    return len(expected)


def _among_trainers(llama: Llama, source: Mapping[str, DTensor], mesh: DeviceMesh) -> tuple[Times, int]:
    """From fully sharded to tensor parallel on the ranks of one mesh, which redistribute can do, too."""
    target = tensor_parallel(llama, mesh)
    sync = Resharder(source, target, group=mesh.get_group())
    goals = [(weight, target[name].placements) for name, weight in source.items()]
    jobs: dict[str, Callable[[int], object]] = {
        "ours": lambda _: sync.run(),
        "torch": lambda _: [weight.redistribute(mesh, goal) for weight, goal in goals],
    }
    times = by_turns(jobs, lambda: dist.barrier(mesh.get_group()))
    for name, weight in source.items():
        theirs = weight.redistribute(mesh, target[name].placements).to_local()
        torch.testing.assert_close(target[name].to_local(), theirs, rtol=0, atol=0)
    return times, sync.plan.bytes_moved
