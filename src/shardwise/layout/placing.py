"""What a layout gives one owner: boxes, shapes of buffers, and where its cells lie in them, whatever their strides."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache

from shardwise.geometry import Box, Places, Strides
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
    return layout.form.places(owner, strides) if owner in layout else Places.empty(layout.ndim)
