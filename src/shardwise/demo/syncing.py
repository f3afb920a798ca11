"""Act 5: after every step of training the servers get the new weights."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from typing import Any

import torch
import torch.distributed as dist
from rich.console import Console
from torch.distributed.device_mesh import DeviceMesh

from shardwise.demo.figures import TURNS, Figure, by_turns, check, ranks, slowest
from shardwise.demo.loading import tensor_parallel
from shardwise.demo.model import (
    DTYPE,
    FUSE,
    FUSED,
    SERVERS,
    TENSOR_PARALLEL,
    TRAINERS,
    Llama,
    Weights,
    fsdp_model,
    fused,
    served,
)
from shardwise.demo.stage import heading, say, seconds
from shardwise.layout import Shard
from shardwise.planning import size
from shardwise.state import Resharder, empty
from shardwise.state.plan import ModelPlan
from shardwise.tensor import ShardedTensor, fingerprint

TRAINING, SERVING = TRAINERS.ranks.tolist(), SERVERS.ranks.tolist()


def sync(console: Console, llama: Llama, weights: Weights, plan: ModelPlan) -> list[Figure]:
    """Train, sync and compare; then by turns with what torch has."""
    heading(console, 5, "Live: after every step the servers get the weights, q, k and v as one")
    say(console, f"{TURNS + 1} steps on six processes, by turns with what one would do with torch alone.")
    told: list[dict[str, Any]] = ranks(len(TRAINING) + len(SERVING), lambda rank: _rank(rank, llama, weights))
    check(all(report["plan"] == plan.fingerprint for report in told), "the ranks made another plan than act 2")
    times = [report["times"] for report in told]
    trainers = [report["among"] for report in told[: len(TRAINING)]]
    ours, torchs, among, redistribute = (
        slowest(where, way)
        for where, way in ((times, "ours"), (times, "torch"), (trainers, "ours"), (trainers, "torch"))
    )
    say(console, f"A sync moves {size(plan.bytes_moved)} in {seconds(ours)}, by the plan of act 2.")
    say(
        console,
        f"Its part was right on every server after every step; {told[0]['alike']} fingerprints alike.\n",
    )
    return [
        Figure("FSDP to TP, 4 ranks", told[0]["moved"], among, "redistribute", redistribute),
        Figure("sync, 4 to 2 ranks", plan.bytes_moved, ours, "gather, broadcast", torchs),
    ]


def _rank(rank: int, llama: Llama, weights: Weights) -> dict[str, Any]:
    logging.disable(logging.WARNING)
    mesh, line = DeviceMesh("cpu", TRAINING), dist.new_group([TRAINING[0], *SERVING])
    source = fsdp_model(weights, mesh).state_dict() if rank in TRAINING else None
    target = {name: empty(layout, dtype=DTYPE) for name, layout in served(llama).items()} if rank in SERVING else None
    into = _slots(llama, target) if target else {}
    sync = Resharder(source, target, remap=[FUSE])

    def step(turn: int) -> None:
        """Of training: the new weights are those of the beginning, times a power of two."""
        for weight in (source or {}).values():
            weight.to_local().mul_(2)

    def compare(turn: int) -> None:
        for name, slot in into.items():
            expected = _part(name, weights[name], rank) * 2 ** (turn + 1)
            torch.testing.assert_close(slot, expected, rtol=0, atol=0)
            slot.zero_()

    jobs: dict[str, Callable[[int], object]] = {
        "step": step,
        "ours": lambda _: sync.run(),
        "compare": compare,
        "torch": lambda _: _broadcast(rank, source, weights, line, into),
        "compare torch's": compare,
    }
    times = by_turns(jobs, dist.barrier)
    sync.run()
    found = {"times": times, "plan": sync.plan.fingerprint, "alike": _alike(source, target, weights)}
    return found | (_among_trainers(llama, source, mesh) if source else {})


def _slots(llama: Llama, target: Mapping[str, ShardedTensor]) -> dict[str, torch.Tensor]:
    """Where a server keeps each weight of the trainers: q, k and v one after the other."""
    found, servers = dict[str, torch.Tensor](), len(SERVING)
    for name, tensor in target.items():
        local: Any = tensor.local_tensor()
        if FUSED in name:
            parts = local.split([rows // servers for rows in llama.segments])
            found |= {name.replace(FUSED, f"{part}_proj"): slot for part, slot in zip("qkv", parts, strict=True)}
        else:
            found[name] = local
    return found


def _part(name: str, whole: torch.Tensor, rank: int) -> torch.Tensor:
    """What a server holds of a weight, cut by hand."""
    (placement,) = TENSOR_PARALLEL.with_mesh(tp=len(SERVING)).placements(name)
    if not isinstance(placement, Shard):
        return whole
    return whole.chunk(len(SERVING), placement.dim)[SERVING.index(rank)]


def _broadcast(rank: int, source: Any, weights: Weights, line: Any, into: Mapping[str, torch.Tensor]) -> None:
    """The usual way, with torch alone: gather a weight on the trainers, send it whole to all servers, cut it there."""
    for name, like in weights.items():
        whole = source[name].full_tensor() if source else torch.empty_like(like)
        if rank in (TRAINING[0], *SERVING):
            dist.broadcast(whole, TRAINING[0], group=line)
        if into:
            into[name].copy_(_part(name, whole, rank))


def _alike(source: Any, target: Any, weights: Weights) -> int:
    """How many tensors have the same fingerprint on the trainers, as far as these have them as one, and the servers,
    and as whole tensors on a single rank."""
    me, scale = dist.get_rank(), 2 ** (TURNS + 1)
    for name, weight in fused(weights).items():
        whole = ShardedTensor(weight * scale, f"{'x'.join(map(str, weight.shape))}/R@1") if me == 0 else None
        found = {fingerprint(whole), fingerprint((target or {}).get(name))}
        if name in weights:
            found.add(fingerprint((source or {}).get(name), group=dist.group.WORLD))
        check(len(found) == 1, f"the fingerprints of {name} differ")
    return len(fused(weights))


def _among_trainers(llama: Llama, source: Mapping[str, Any], mesh: DeviceMesh) -> dict[str, Any]:
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
    return {"among": times, "moved": sync.plan.bytes_moved}
