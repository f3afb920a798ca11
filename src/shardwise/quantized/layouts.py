"""Coupled layouts: where the scales of a tensor lie follows from where its codes lie."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from functools import lru_cache

from shardwise.errors import LayoutError
from shardwise.geometry import Box
from shardwise.layout import Layout
from shardwise.quantized.formats import GROUP, Format, Shape, format_of

OwnedBox = tuple[int, Shape, Shape]


def scales_layout(codes: Layout, format: Format | str, shape: Sequence[int] | None = None) -> Layout:
    """The layout of the scales of a tensor whose codes have this layout: each owner has those of the blocks it touches.

    Where a cut goes through a block, the owners on both sides have its scale. `shape` is that of the scales, where they
    lack dims of size 1. An owner has one buffer, or one for each box where the blocks that it touches are not one box.

    >>> print(scales_layout(Layout.chunk((576, 256), 0, 2), "fp8-block"))
    5x2/overlapping=0:3,0:2+2:5,0:2@2
    """
    found = format_of(format)
    if codes.op is not None:
        raise LayoutError(f"{codes!r} is partial: codes cannot be reduced")
    values = found.value_shape(codes.shape)
    scales = found.grid(values) if shape is None else tuple(shape)
    if scales not in found.scales_shapes(values):
        raise LayoutError(wrong_shape("the tensor", codes.shape, scales, found))
    return _coupled(codes, found, values, scales)


def wrong_shape(what: str, codes: Shape, scales: Shape, format: Format) -> str:
    """Scales that do not fit, in words."""
    wanted = " or ".join(map(str, format.scales_shapes(format.value_shape(codes))))
    return f"the scales of {what} have shape {scales}, but codes of shape {codes} in {format.name} need {wanted}"


@lru_cache(maxsize=4096)
def _coupled(codes: Layout, format: Format, values: Shape, scales: Shape) -> Layout:
    nothing = Box((0,) * len(scales), (0,) * len(scales))
    pieces = list[OwnedBox]()
    for owner in codes.owners():
        seen = (values_box(piece.box, format) for piece in codes.pieces(owner))
        boxes = distinct(format.scales_box(box, values, scales) for box in seen)
        pieces += [(owner, box.lo, box.hi) for box in boxes or [nothing]]
    return layout_of_boxes(scales, pieces)


def layout_of_boxes(shape: Shape, pieces: Sequence[OwnedBox]) -> Layout:
    """Boxes of owners. They may overlap, since the values in them are equal."""
    apart = Layout.boxes(shape, pieces)
    return Layout.boxes(shape, pieces, overlap="replicas") if apart.diagnosis else apart.shortest()


def values_box(codes: Box, format: Format) -> Box:
    """The values of a box of codes: of whole groups where a byte has two codes."""
    if not format.pairs:
        return codes
    return Box((*codes.lo[:-2], codes.lo[-2] * GROUP), (*codes.hi[:-2], codes.hi[-2] * GROUP))


def distinct(boxes: Iterable[Box]) -> list[Box]:
    """Boxes that have cells, each once, in order.

    >>> [str(box) for box in distinct([Box((0,), (1,)), Box((2,), (2,)), Box((0,), (1,))])]
    ['[0:1]']
    """
    return list(dict.fromkeys(box for box in boxes if box.volume))
