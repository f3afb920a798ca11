"""What a layout gives one owner: boxes, shapes of buffers, and where its cells lie in them, whatever their strides."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache

import numpy as np

from shardwise.geometry import Box, Boxes, Places, Strides, ints
from shardwise.layout.layout import Layout


def local_boxes(layout: Layout, owner: int) -> list[Box]:
    """The cells of an owner, none for who is no owner."""
    return [piece.box for piece in layout.pieces(owner)] if owner in layout else []


@lru_cache(maxsize=4096)
def local_shapes(layout: Layout, owner: int) -> tuple[tuple[int, ...], ...]:
    """The shapes of an owner's tensors, none for who is no owner. Kept by value: they are asked for at every call."""
    return tuple(layout.local_shapes(owner)) if owner in layout else ()


def places_of(layout: Layout, owner: int, strides: Sequence[Strides]) -> Places:
    """The pieces of an owner, in buffers of the layout's local shapes that have these strides. None for other owners.

    >>> places_of(Layout.chunk((8, 6), 0, 4), 1, [(6, 1)]).windows()
    [Window(tensor=0, shape=(2, 6), strides=(6, 1), offset=0)]
    """
    pieces = layout.pieces(owner) if owner in layout else ()
    shapes = layout.local_shapes(owner) if owner in layout else ()
    lying = [_lying(p.offset, p.strides, shapes[p.buffer], strides[p.buffer]) for p in pieces]
    return Places(
        Boxes.of([p.box for p in pieces], layout.ndim),
        ints([p.buffer for p in pieces]),
        ints([offset for offset, _ in lying]),
        ints([steps for _, steps in lying]).reshape(len(pieces), layout.ndim),
    )


def _lying(offset: int, strides: Strides, shape: tuple[int, ...], real: Strides) -> tuple[int, Strides]:
    """The first element and the strides of a piece in a buffer that need not be contiguous.

    Buffers of boxes have the dims of the layout, so the piece is a block of the buffer; flat ranges have one dim, in
    which the piece is strided.
    """
    if len(shape) == len(strides):
        corner = np.unravel_index(offset, shape) if shape else ()
        return sum(int(at) * step for at, step in zip(corner, real, strict=True)), real
    return offset * real[0], tuple(stride * real[0] for stride in strides)
