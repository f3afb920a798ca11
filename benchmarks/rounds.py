"""Cases of `benchmarks.hosts`: how often small calls between two hosts wait for a slow link."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard

import shardwise as sw
from benchmarks.measure import Effort, Row
from shardwise.testing import hosts, on_ranks

DELAY = 0.02
ROWS, COLUMNS, ALL, TERMS = "64x64/S0@4", "64x64/S1@4", "64x64/R@4", "64x64/P@4"
TORCH = "redistribute"


def fastest(call: Callable[[], object], repeats: int) -> float:
    """Seconds of the fastest of some calls, which all ranks begin together."""
    took = list[float]()
    for _ in range(repeats):
        dist.barrier()
        start = time.perf_counter()
        call()
        took.append(time.perf_counter() - start)
    return min(took)


def small_calls(effort: Effort) -> Iterator[Row]:
    """Four ranks on two hosts, and a switch between them that delays every packet."""
    with hosts(2, delay=DELAY) as (a, b):
        found = on_ranks(4, lambda rank: _seconds(rank, effort.medium), hosts=[a, a, b, b], timeout=600)[0]
    for case, (ours, theirs) in found.items():
        words = f"ways over the link, each {1e3 * DELAY:.0f} ms: {ours / DELAY:.1f}"
        words += f", {TORCH} {theirs / DELAY:.1f}" if theirs else ""
        yield Row(f"16.4 kB, 20 ms to the other host: {case}", ours, theirs, TORCH if theirs else "", None, words)


def _seconds(rank: int, repeats: int) -> dict[str, tuple[float, float | None]]:
    """Of ours, and of torch where it has such a call."""
    rows, terms = (sw.ShardedTensor(torch.ones(sw.parse(text).local_shape(rank)), text) for text in (ROWS, TERMS))
    some = sw.ShardedTensor(torch.ones(64, 64), "64x64/R@1") if rank == 0 else None
    mesh, sync = DeviceMesh("cpu", list(range(4))), list[sw.Resharder]()
    split = DTensor.from_local(torch.ones(16, 64), mesh, [Shard(0)], run_check=False)
    partial = DTensor.from_local(torch.ones(64, 64), mesh, [Partial()], run_check=False)

    def took(
        call: Callable[[], object], peer: Callable[[], object] | None = None, times: int = repeats
    ) -> tuple[float, float | None]:
        return fastest(call, times), None if peer is None else fastest(peer, times)

    return {
        "first reshard": took(lambda: sw.reshard(rows, COLUMNS), lambda: split.redistribute(mesh, [Shard(1)]), 1),
        "S0 -> S1": took(lambda: sw.reshard(rows, COLUMNS), lambda: split.redistribute(mesh, [Shard(1)])),
        "S0 -> R": took(lambda: sw.reshard(rows, ALL), lambda: split.redistribute(mesh, [Replicate()])),
        "P -> R": took(lambda: sw.reshard(terms, ALL), lambda: partial.redistribute(mesh, [Replicate()])),
        "S0 -> S1, verify=True": took(lambda: sw.reshard(rows, COLUMNS, verify=True)),
        "P -> R, verify=True": took(lambda: sw.reshard(terms, ALL, verify=True)),
        "fingerprint of S0": took(lambda: sw.fingerprint(rows)),
        "fingerprint of P": took(lambda: sw.fingerprint(terms)),
        "reshard, None on three ranks": took(lambda: sw.reshard(some, ALL)),
        "Resharder(...)": took(lambda: sync.append(sw.Resharder({"w": rows}, {"w": sw.empty(COLUMNS)})), times=2),
        "Resharder.run": took(lambda: sync[0].run()),
    }
