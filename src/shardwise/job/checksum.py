"""Fingerprints of values: the same under every sharding, different where any two elements are swapped.

The bits of every element are multiplied by pseudo-random weights of its position, one for each axis, and added up
modulo 2**64. Sums can be made in any order and in any parts, so every rank adds up what it holds, and one small
reduction brings the parts together. Elements count as words of at most 32 bits: every one of their bits then reaches
33 bits of the sum or more. Two such sums with weights of their own make the fingerprint.

The weights follow from a key. The fingerprint that people see has a fixed one, so that it can be compared with that of
another day: who knows the weights can make other values with the same sums. What is compared within one run has a key
that was drawn for it: nobody who made the values knew it.
"""

from __future__ import annotations

from collections.abc import Sequence
from hashlib import blake2b

import torch

from shardwise.exchange.reduce import blocks
from shardwise.geometry import Boxes
from shardwise.layout import Layout, places_of

LANES = 2
STABLE = ""  # the key of fingerprints that are the same everywhere and always
WORD = {1: torch.uint8, 2: torch.int16, 4: torch.int32}
MASK = {1: 2**8 - 1, 2: 2**16 - 1, 4: 2**32 - 1}


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
    found = torch.zeros(LANES, dtype=torch.int64, device=local[0].device if local else None)
    if not boxes.count:
        return found.cpu()
    _, places = places_of(layout, me, [t.stride() for t in local]).once(boxes)
    for cut, lo in zip(places.windows(), places.boxes.lo.tolist(), strict=True):
        cells = cut.of(local)
        for at in blocks(cells.shape):
            some = cells[at]
            corner = [a + s.start for a, s in zip(lo, at, strict=False)] + lo[len(at) :]
            found += block_sums(some if dtype is None else some.to(dtype), corner, key)
    return found.cpu()


def block_sums(cells: torch.Tensor, lo: list[int], key: str = STABLE) -> torch.Tensor:
    """The sums of one block of cells that begins at `lo`."""
    words = _words(cells)
    found = list[torch.Tensor]()
    for lane in range(LANES):
        rest = words
        for axis in range(words.ndim - 1, -1, -1):
            start = lo[axis] if axis < len(lo) else 0
            seed = number(f"axis {axis - len(lo)} lane {lane}{key}")
            rest = (rest * _weights(seed, start, words.shape[axis], words.device)).sum(dim=-1)
        found.append(rest)
    return torch.stack(found)


def _words(cells: torch.Tensor) -> torch.Tensor:
    """The bits of every element as numbers below 2**32, one axis more than the cells."""
    size = cells.element_size()
    word = min(size, 4)
    flat = cells.contiguous().as_strided((cells.numel(),), (1,))  # dims of size 1 may have had any stride
    bits = flat.view(WORD[word]).reshape(*cells.shape, size // word)
    return bits.to(torch.int64) & MASK[word]


def _weights(seed: int, start: int, count: int, device: torch.device) -> torch.Tensor:
    """Odd pseudo-random numbers for the positions of an axis; the last axis is that of the words of an element."""
    x = torch.arange(start + 1, start + 1 + count, dtype=torch.int64, device=device) * -7046029254386353131
    x += seed
    for shift, factor in (30, -4658895280553007687), (27, -7723592293110705685):
        x = (x ^ ((x >> shift) & ((1 << (64 - shift)) - 1))) * factor
    return (x ^ ((x >> 31) & ((1 << 33) - 1))) | 1


def number(text: str) -> int:
    return int.from_bytes(blake2b(text.encode(), digest_size=8).digest(), "big", signed=True)
