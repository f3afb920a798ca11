"""Sums of values: the same under every sharding, whoever adds up which rectangle of cells.

The trailing axes of a tensor are joined to lines of at least 1024 bytes, and lines are cut into spans of 2048 bytes.
The bytes of a span are multiplied by a table of small pseudo-random weights, which gives 16 integers. These are
multiplied by pseudo-random weights of 64 bits, of their column, line and span, and added up modulo 2**64, twice. So
the data are read once, by an integer matrix product, and all further work is on 1/32 of the bytes or less.

Every step adds up, so sums can be made in any order and in any parts: what of a span is missing counts as zero.
The weights follow from a key. docs/decisions/0007 says how strong they are.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from hashlib import blake2b
from math import prod
from typing import NamedTuple

import torch

from shardwise.containers.torch_private import byte_product, exact_byte_products
from shardwise.exchange import view_of
from shardwise.exchange.reduce import blocks
from shardwise.geometry import Boxes
from shardwise.layout import Layout, places_of

LANES = 2
STABLE = ""  # the key of fingerprints that are the same everywhere and always
LINE, SPAN, COLUMNS = 1024, 2048, 16
BLOCK = 2**22  # bytes that are summed at a time
COPIED_BLOCK = 2**21  # the same where they are copied or cast first: copies stay in the cache
DEVICE_BLOCK = 2**24  # the same on an accelerator, where every block takes launches, and 8 times its bytes in float64


def sums(
    boxes: Boxes,
    layout: Layout,
    me: int,
    local: Sequence[torch.Tensor],
    dtype: torch.dtype | None = None,
    *,
    key: str = STABLE,
) -> torch.Tensor:
    """Over the cells of boxes, as they lie in our tensors of a layout; as if they were cast to `dtype`."""
    totals = torch.zeros(LANES, dtype=torch.int64, device=local[0].device if local else None)
    if not boxes.count:
        return totals.cpu()
    _, places = places_of(layout, me, [t.stride() for t in local]).once(boxes)
    for cut, lo in zip(places.windows(), places.boxes.lo.tolist(), strict=True):
        totals += box_sums(view_of(cut, local), lo, layout.shape, dtype, key=key)
    return totals.cpu()


def box_sums(
    cells: torch.Tensor,
    lo: Sequence[int],
    shape: Sequence[int],
    dtype: torch.dtype | None = None,
    *,
    key: str = STABLE,
) -> torch.Tensor:
    """The sums of a box of a tensor of that shape: its cells, which begin at `lo`."""
    cells, totals = cells.detach(), torch.zeros(LANES, dtype=torch.int64, device=cells.device)
    ready = dtype in (None, cells.dtype) and cells.stride()[-1:] in ((), (1,))
    bytes_of_block = DEVICE_BLOCK if cells.device.type != "cpu" else BLOCK if ready else COPIED_BLOCK
    most = bytes_of_block // cells.element_size()
    scratch = None if ready else cells.new_empty((2, min(most, cells.numel())), dtype=dtype)
    for at in blocks(cells.shape, most):
        corner = [start + (at[axis].start if axis < len(at) else 0) for axis, start in enumerate(lo)]
        some = cells[at] if scratch is None else _copied(cells[at], *scratch)
        totals += _block_sums(some, corner, shape, key)
    return totals


def _copied(cells: torch.Tensor, first: torch.Tensor, second: torch.Tensor) -> torch.Tensor:
    """One after the other, into this memory. Where another axis than the last is nearest, two copies are faster."""
    strides = [stride if size > 1 else 2**62 for size, stride in zip(cells.shape, cells.stride(), strict=True)]
    near = strides.index(min(strides)) if strides else -1
    turned = cells.transpose(near, -1)
    copied = first[: cells.numel()].view(turned.shape).copy_(turned).transpose(near, -1)
    return copied if copied.is_contiguous() else second[: cells.numel()].view(cells.shape).copy_(copied)


def _block_sums(cells: torch.Tensor, lo: Sequence[int], shape: Sequence[int], key: str) -> torch.Tensor:
    axis, weights = _line_axis(shape, cells.element_size()), _weights(key, cells.device)
    runs = _runs(_completed(cells, lo, shape, axis), axis)
    step = prod(shape[axis + 1 :]) * cells.element_size()  # the bytes of a cell of that axis
    start, end = (lo[axis] * step, shape[axis] * step) if shape else (0, step)
    found = _products(runs, start % SPAN, weights.table).to(torch.int64)
    span = torch.arange(start // SPAN, start // SPAN + found.shape[1], device=cells.device)
    place = _line_numbers(lo, cells.shape[:axis], shape, cells.device)[:, None] * -(-end // SPAN) + span
    of_spans = torch.stack([(found * columns).sum(dim=-1) for columns in weights.columns])
    return (of_spans * _numbers(weights.seeds, place)).sum(dim=(1, 2))


class Weights(NamedTuple):
    """What the bytes of a span are multiplied by, then the sums of that, and what the weights of spans start with."""

    table: torch.Tensor
    columns: torch.Tensor
    seeds: torch.Tensor


@lru_cache(maxsize=4)
def _weights(key: str, device: torch.device) -> Weights:
    """The bytes have weights from -64 to 64 without 0: CPUs without VNNI add up two products with them in 16 bits."""
    seeds = [[number(f"{what} {lane}{key}") for lane in range(LANES)] for what in ("columns", "spans")]
    columns, spans = torch.tensor(seeds, device="cpu")[..., None]
    bits = _numbers(number(f"table{key}"), torch.arange(SPAN * COLUMNS // 8, device="cpu"))
    small = bits.view(torch.int8) >> 1
    table = small.masked_fill(small == 0, 64).reshape(SPAN, COLUMNS)
    of_columns = _numbers(columns, torch.arange(COLUMNS, device="cpu"))
    return Weights(table.to(device), of_columns.to(device), spans[..., None].to(device))


def _line_axis(shape: Sequence[int], size: int) -> int:
    """The first of the trailing axes that make a line."""
    axis = max(0, len(shape) - 1)
    while axis and prod(shape[axis:]) * size < LINE:
        axis -= 1
    return axis


def _completed(cells: torch.Tensor, lo: Sequence[int], shape: Sequence[int], axis: int) -> torch.Tensor:
    """Cells that are a run of bytes in every line: where a later axis of a line is cut, with zeros for the others."""
    later = tuple(shape[axis + 1 :])
    if tuple(cells.shape[axis + 1 :]) == later:
        return cells
    whole = torch.zeros((*cells.shape[: axis + 1], *later), dtype=cells.dtype, device=cells.device)
    part = whole
    for later_axis, (start, size) in enumerate(zip(lo[axis + 1 :], cells.shape[axis + 1 :], strict=True), axis + 1):
        part = part.narrow(later_axis, start, size)
    part.copy_(cells)
    return whole


def _runs(cells: torch.Tensor, axis: int) -> torch.Tensor:
    """The bytes of every line, one row for each."""
    rows = cells.reshape(prod(cells.shape[:axis]), prod(cells.shape[axis:]))
    if rows.stride(1) != 1:  # it has one column, which may have any stride
        rows = rows.contiguous().as_strided(rows.shape, (rows.shape[1], 1))
    return rows.view(torch.int8)


def _products(runs: torch.Tensor, offset: int, table: torch.Tensor) -> torch.Tensor:
    """For every run and span: its bytes times the table. Runs begin at that byte of their first span."""
    count, length = runs.shape
    first = min(length, -offset % SPAN)
    whole = (length - first) // SPAN
    last = first + whole * SPAN
    parts = [_full_products(runs[:, first:last].view(count, whole, SPAN), table)] if whole else []
    if first:
        parts.insert(0, _product(runs[:, :first], table[offset : offset + first])[:, None])
    if last < length:
        parts.append(_product(runs[:, last:], table[: length - last])[:, None])
    return torch.cat(parts, dim=1)


def _full_products(spans: torch.Tensor, table: torch.Tensor) -> torch.Tensor:
    """The same for whole spans, by as few matrix products as their strides allow."""
    if len(spans) == 1 or spans.stride(0) == spans.shape[1] * SPAN:
        return _product(spans.flatten(0, 1), table).view(*spans.shape[:2], COLUMNS)
    axis = int(len(spans) > spans.shape[1])
    return torch.stack([_product(some, table) for some in spans.unbind(axis)], dim=axis)


def _product(rows: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
    """Without rounding, in any order: no sum exceeds 128 * 64 * SPAN = 2**24."""
    if rows.device.type == "cpu" and exact_byte_products():
        return byte_product(rows, weights)
    wide = torch.float32 if rows.device.type == "cpu" else torch.float64  # accelerators may round float32
    found = torch.empty(len(rows), COLUMNS, dtype=wide, device=rows.device)
    return torch.mm(rows.to(wide), weights.to(wide), out=found)  # autocast leaves alone what has `out`


def _line_numbers(lo: Sequence[int], sizes: Sequence[int], shape: Sequence[int], device: torch.device) -> torch.Tensor:
    lines = torch.zeros(1, dtype=torch.int64, device=device)
    for start, size, extent in zip(lo, sizes, shape, strict=False):
        lines = (lines[:, None] * extent + torch.arange(start, start + size, device=device)).reshape(-1)
    return lines


def _numbers(seed: int | torch.Tensor, place: torch.Tensor) -> torch.Tensor:
    """Odd pseudo-random numbers of 64 bits for places."""
    x = (place + 1) * -7046029254386353131 + seed
    for shift, factor in (30, -4658895280553007687), (27, -7723592293110705685):
        x = (x ^ ((x >> shift) & ((1 << (64 - shift)) - 1))) * factor
    return (x ^ ((x >> 31) & ((1 << 33) - 1))) | 1


def number(text: str) -> int:
    return int.from_bytes(blake2b(text.encode(), digest_size=8).digest(), "big", signed=True)
