"""Quantize and dequantize on one core, beside a plain copy of the same values in bfloat16."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch

from benchmarks.measure import Effort, Row, Target
from shardwise.bench.clock import Task, interleaved
from shardwise.geometry import Box
from shardwise.quantized import FORMATS, Format, quantize
from shardwise.quantized.arithmetic import Scaling, dequantize_box, encode_box, largest_magnitudes

TITLE = "Quantized tensors"
ABOUT = """
Values in bfloat16, 64 MiB of them, on one core: `dequantize` writes them from codes and scales, `quantize` reads them
and writes codes and scales. The peer is `copy_` of the values into memory that exists, the fastest way to have them in
another place. Both take turns in one process. The target is half of the copy's speed.
"""
SHAPE = (4096, 8192)
HALF = Target(0.5, percent=True)


def rows(effort: Effort) -> Iterator[Row]:
    """All formats, each way."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        for format in FORMATS.values():
            yield _dequantized(format, effort)
        for format in FORMATS.values():
            if not format.pairs:
                yield _quantized(format, effort)
    finally:
        torch.set_num_threads(threads)


def _values() -> torch.Tensor:
    return torch.randn(SHAPE, generator=torch.Generator().manual_seed(0)).bfloat16()


def _dequantized(format: Format, effort: Effort) -> Row:
    codes, scales = _coded(format)
    out, box = torch.zeros(SHAPE, dtype=torch.bfloat16), Box((0, 0), SHAPE)
    return _row(
        f"{format.name} to bfloat16", lambda: dequantize_box(out, codes, scales, format, box, SHAPE), effort, out
    )


def _coded(format: Format) -> tuple[torch.Tensor, torch.Tensor]:
    if not format.pairs:
        return quantize(_values(), format)
    codes = torch.randint(0, 256, format.codes_shape(SHAPE), dtype=torch.uint8)
    return codes, torch.randint(100, 140, format.grid(SHAPE), dtype=torch.uint8)


def _quantized(format: Format, effort: Effort) -> Row:
    values, out, box = _values(), torch.empty(SHAPE, dtype=format.codes), Box((0, 0), SHAPE)
    dtype = quantize(values[:1], format)[1].dtype

    def run() -> None:
        scaling = Scaling.of(largest_magnitudes(values, format, box, SHAPE), format, dtype)
        encode_box(out, values, scaling.forward, format, box, SHAPE)

    return _row(f"bfloat16 to {format.name}", run, effort, torch.zeros_like(values))


def _row(case: str, run: Callable[[], None], effort: Effort, other: torch.Tensor) -> Row:
    values = _values()
    ours, copy = interleaved(
        Task(lambda _: run(), repeats=effort.medium),
        Task(lambda _: other.copy_(values), repeats=effort.medium),
    )
    return Row(case, ours.seconds, copy.seconds, "a plain copy", HALF)
