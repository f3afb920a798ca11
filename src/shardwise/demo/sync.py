"""A whole model, synced step after step: four ranks train it fully sharded, and serve it tensor parallel."""

from __future__ import annotations

from statistics import median
from time import perf_counter
from typing import Any

from rich.console import Console

from shardwise.planning import size
from shardwise.testing import on_ranks

RANKS, HIDDEN, FFN, LAYERS, TURNS = 4, 512, 1408, 8, 5


def sync_model(console: Console) -> None:
    """Sync it, and say what happened."""
    reports = on_ranks(RANKS, _rank, timeout=120)
    report = reports[0]
    ours, torchs = (median(map(max, zip(*(r[side] for r in reports), strict=True))) for side in ("ours", "torch"))
    console.print(
        f"a model of {report['tensors']} tensors, {size(report['bytes'])} in bfloat16, from fully sharded to tensor "
        f"parallel (q, k and v into one tensor on the way):"
    )
    console.print(report["plan"], highlight=False)
    console.print(
        f"a sync takes {1e3 * ours:.0f} ms; DTensor.redistribute, tensor by tensor, {torchs / ours:.1f}x that; "
        f"every weight arrived bit by bit, after every step"
    )


def _shapes() -> dict[str, tuple[int, ...]]:
    found: dict[str, tuple[int, ...]] = {"embed.weight": (4096, HIDDEN)}
    for n in range(LAYERS):
        found |= {f"layers.{n}.{name}.weight": (HIDDEN, HIDDEN) for name in ("q", "k", "v", "o")}
        found |= {f"layers.{n}.{name}.weight": (FFN, HIDDEN) for name in ("gate", "up")}
        found |= {f"layers.{n}.down.weight": (HIDDEN, FFN), f"layers.{n}.norm.weight": (HIDDEN,)}
    return found


def _placement(name: str) -> str:
    part = name.split(".")[-2]
    return "R" if part == "norm" else "S1" if part in ("o", "down") else "S0"


def _rank(rank: int) -> dict[str, Any]:
    import logging

    import torch
    from torch.distributed.device_mesh import init_device_mesh

    from shardwise.state import Concat, Resharder, reshard_state_dict

    logging.disable(logging.WARNING)  # torch's remarks on its own way
    mesh = init_device_mesh("cpu", (RANKS,))
    torch.manual_seed(0)
    whole = {name: torch.randn(shape).to(torch.bfloat16) for name, shape in _shapes().items()}
    trained = reshard_state_dict(whole, lambda _: "S0", mesh=mesh)
    fused = {f"layers.{n}.qkv.weight": torch.zeros(3 * HIDDEN, HIDDEN, dtype=torch.bfloat16) for n in range(LAYERS)}
    others = {name: torch.zeros_like(w) for name, w in whole.items() if name.split(".")[-2] not in ("q", "k", "v")}
    served = reshard_state_dict({**others, **fused}, _placement, mesh=mesh)
    sync = Resharder(trained, served, remap=[Concat("*.qkv.weight", ["*.q.weight", "*.k.weight", "*.v.weight"])])
    times: dict[str, list[float]] = {"ours": [], "torch": []}
    for step in range(TURNS):
        for weight in trained.values():
            weight.to_local().mul_(-1)
        times["ours"].append(_timed(sync.run))
        plain = reshard_state_dict(trained, _placement, mesh=mesh)
        goals = [(weight, plain[name].placements) for name, weight in trained.items()]
        times["torch"].append(_timed(lambda goals=goals: [w.redistribute(mesh, goal) for w, goal in goals]))
        for n in range(LAYERS):
            parts = [(-1) ** (step + 1) * whole[f"layers.{n}.{p}.weight"] for p in ("q", "k", "v")]
            found = served[f"layers.{n}.qkv.weight"].full_tensor()
            torch.testing.assert_close(found, torch.cat(parts), rtol=0, atol=0)
        for name in others:
            torch.testing.assert_close(served[name].to_local(), plain[name].to_local(), rtol=0, atol=0)
    total = sum(w.numel() * w.element_size() for w in whole.values())
    lines = "\n".join(sync.plan.explain().splitlines()[:2])
    return {"tensors": len(whole), "bytes": total, "plan": lines, **times}


def _timed(work: Any) -> float:
    import torch.distributed as dist

    dist.barrier()
    began = perf_counter()
    work()
    return perf_counter() - began
