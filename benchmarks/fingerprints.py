"""Fingerprints on one core, beside a plain copy of the same cells."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from benchmarks.measure import Effort, Row, Target
from shardwise.bench.clock import Task, interleaved
from shardwise.job.sums import box_sums

TITLE = "Fingerprints"
ABOUT = """
The sums of all cells of a tensor of 64 MiB, on one core: what `fingerprint`, `receipt` and `verify=True` do with every
tensor. The peer is `copy_` of the same cells into contiguous memory that exists. Both take turns in one process. The
target is 4 copies.
"""
BYTES = 2**26
MOST = Target(4, most=True)


def rows(effort: Effort) -> Iterator[Row]:
    """Dtypes, shapes and strides."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        for case, cells in _cases():
            yield _row(case, cells, effort)
    finally:
        torch.set_num_threads(threads)


def _cases() -> Iterator[tuple[str, torch.Tensor]]:
    for dtype in (torch.float32, torch.bfloat16, torch.float8_e4m3fn):
        yield f"{dtype}, 4096 columns".removeprefix("torch."), _bits(dtype).view(-1, 4096)
    yield "bfloat16, 512 columns", _bits(torch.bfloat16).view(-1, 512)
    yield "bfloat16, N x 32 x 3 x 3", _bits(torch.bfloat16)[: BYTES // 2 // 288 * 288].view(-1, 32, 3, 3)
    yield "bfloat16, half of the columns", _bits(torch.bfloat16).view(-1, 8192)[:, :4096]
    yield "float32, every second column", _bits(torch.float32).view(-1, 8192)[:, ::2]
    yield "float32, transposed", _bits(torch.float32).view(4096, -1).T


def _bits(dtype: torch.dtype) -> torch.Tensor:
    generator = torch.Generator().manual_seed(0)
    return torch.randint(-128, 128, (BYTES,), dtype=torch.int8, generator=generator).view(dtype)


def _row(case: str, cells: torch.Tensor, effort: Effort) -> Row:
    out = torch.zeros(cells.shape, dtype=cells.dtype)
    ours, copy = interleaved(
        Task(lambda _: box_sums(cells, [0] * cells.ndim, cells.shape), repeats=effort.medium),
        Task(lambda _: out.copy_(cells), repeats=effort.medium),
    )
    return Row(case, ours.seconds, copy.seconds, "a plain copy", MOST)
