"""Runs of large worlds on the simulator: `python -m benchmarks.worlds 256 1024` prints the table of docs/scaling.md."""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator

import shardwise as sw
from shardwise.testing.worlds import SimulatedWorld

SHAPE = (65536, 8192)
SERVERS = 64


def moves(ranks: int) -> Iterator[tuple[str, str, str]]:
    """What to run in a world of so many ranks, eight on each host: a name, source and target."""
    hosts, trainers = ranks // 8, ranks - SERVERS
    yield "agreement alone", f"S0@{ranks}", f"S0@{ranks}"
    yield "FSDP x TP to TP", f"S0,S1@fsdp={hosts},tp=8", f"R,S1@{hosts}x8"
    yield f"{trainers} trainers to {SERVERS} servers", f"S0@{trainers}", f"R,S1@8x8:{trainers}-{ranks - 1}"


def row(ranks: int, name: str, source: str, target: str) -> str:
    """One move, as a row of the table."""
    plan = sw.plan(*(f"{'x'.join(map(str, SHAPE))}/{side}" for side in (source, target)), itemsize=2, hosts=8)
    began = time.perf_counter()
    run = SimulatedWorld(ranks, per_host=8).exchange(plan)
    took = time.perf_counter() - began
    most = f"{run.most.messages:,} | {run.most.bytes / 2**20:,.1f} MiB | {run.most.peers:,}"
    return f"| {ranks:,} | {name} | {run.messages:,} | {most} | {1e3 * run.seconds:.1f} ms | {took:.0f} s |"


def main() -> None:
    """Print it, row by row."""
    print("| ranks | move | messages | most of a rank | bytes | peers | clock | simulated in |")
    print("|---:|---|---:|---:|---:|---:|---:|---:|")
    for ranks in map(int, sys.argv[1:]):
        for move in moves(ranks):
            print(row(ranks, *move), flush=True)


if __name__ == "__main__":
    main()
