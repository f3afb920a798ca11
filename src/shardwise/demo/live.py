"""A real tensor, moved: a DTensor on four processes of this machine changes its placements, and then its mesh."""

from __future__ import annotations

from collections.abc import Callable
from statistics import median
from time import perf_counter
from typing import Any

from rich.console import Console
from rich.table import Table

from shardwise.layout import Layout
from shardwise.planning import plan, size
from shardwise.testing import on_ranks

RANKS, SIDE, TURNS = 4, 2048, 5  # 16 MiB of float32
TRAINED, SERVED = ["S0", "S1"], ["S1", "S0"]


def move_tensor(console: Console) -> None:
    """Move it, and say what happened."""
    began = perf_counter()
    reports = on_ranks(RANKS, _rank, timeout=120)
    took = perf_counter() - began
    console.print(f"a real DTensor, {SIDE} x {SIDE} float32, on {RANKS} processes of this machine (gloo):")
    table = Table("rank", *(f"{','.join(p)} on 2 x 2" for p in (TRAINED, SERVED)), "S0 on ranks 3 and 1")
    for rank, report in enumerate(reports):
        table.add_row(str(rank), *report["holds"])
    console.print(table)
    ours, torchs = (_slowest([report[side] for report in reports]) for side in ("ours", "torch"))
    layouts = (Layout.on_mesh((SIDE, SIDE), (2, 2), placements) for placements in (TRAINED, SERVED))
    moved = size(plan(*layouts, itemsize=4).bytes_moved)
    console.print(
        f"S0,S1 to S1,S0: {moved} moved in {1e3 * ours:.0f} ms; DTensor.redistribute took {torchs / ours:.1f}x that"
    )
    console.print(f"and on to other ranks, which it refuses; the fingerprint stayed {reports[0]['fingerprint']}")
    console.print(f"gradients came back the same way (all in {took:.1f} s, with starting the processes)")


def _slowest(times: list[list[float]]) -> float:
    """The median over the turns of the slowest rank."""
    return median(max(turn) for turn in zip(*times, strict=True))


def _rank(rank: int) -> dict[str, Any]:
    """What every process does: move, time, check."""
    import logging

    import torch
    from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

    from shardwise.tensor import ShardedTensor, fingerprint, layout_of, reshard

    logging.disable(logging.WARNING)  # torch's remarks on its own way
    square, pair = init_device_mesh("cpu", (2, 2)), DeviceMesh("cpu", [3, 1])
    layout = Layout.on_mesh((SIDE, SIDE), (2, 2), TRAINED)
    x = reshard(ShardedTensor(torch.randn(layout.local_shape(rank)), layout), (square, TRAINED)).requires_grad_()
    y = reshard(x, (square, SERVED))
    times = _timed(lambda: reshard(x, y), lambda: x.redistribute(square, y.placements))
    handle = reshard(y, (pair, ["S0"]), async_op=True)
    z = handle.wait()
    if z is None:
        handle.backward()
    else:
        (3 * z.to_local()).sum().backward()
    torch.testing.assert_close(x.grad.to_local(), torch.full(layout.local_shape(rank), 3.0), rtol=0, atol=0)
    back = reshard(z, (square, TRAINED))
    torch.testing.assert_close(back.to_local(), x.to_local(), rtol=0, atol=0)
    if fingerprint(back) != fingerprint(y):
        raise AssertionError("the fingerprint changed")
    holds = [_box(layout_of(t), rank) if t is not None else "-" for t in (x, y, z)]
    return {"holds": holds, **times, "fingerprint": fingerprint(y)}


def _timed(ours: Callable[[], Any], torchs: Callable[[], Any]) -> dict[str, list[float]]:
    import torch.distributed as dist

    times: dict[str, list[float]] = {"ours": [], "torch": []}
    for turn in range(TURNS + 1):
        for side, move in ("ours", ours), ("torch", torchs):
            dist.barrier()
            began = perf_counter()
            move()
            if turn:  # the first one warms up
                times[side].append(perf_counter() - began)
    return times


def _box(layout: Layout, rank: int) -> str:
    return str(layout.pieces(rank)[0].box)
