"""The formats of quantized tensors: which dtypes, which cells share a scale, and which boxes belong together."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from math import prod

import torch

from shardwise.errors import LayoutError
from shardwise.geometry import Box

Shape = tuple[int, ...]
FLOATS = (torch.float32, torch.bfloat16, torch.float16)
VALUES = FLOATS  # what codes and scales become
EXPONENTS = (torch.uint8, torch.float8_e8m0fnu)  # of powers of two, with a bias of 127
GROUP = 32  # cells that share a scale in the formats of the OCP microscaling standard
BYTES = 16  # of a group with two codes in a byte


@dataclass(frozen=True)
class Format:
    """How codes and scales give values: value = code * scale, or code * scale / `divisor`.

    `block`: the rows and columns that share a scale; None stands for all of them. Other dims have a scale for each
    index. `pairs`: a byte has two codes of 4 bits, and the last two dims of the codes are groups and their 16 bytes.

    >>> FP8_BLOCK.grid((576, 256))
    (5, 2)
    """

    name: str
    codes: torch.dtype
    scales: tuple[torch.dtype, ...]
    block: tuple[int | None, int | None]
    divisor: int = 1
    pairs: bool = False

    def with_block(self, block: Sequence[int]) -> Format:
        """The same with blocks of another size.

        >>> FP8_BLOCK.with_block((64, 128)).grid((576, 256))
        (9, 2)
        """
        sizes = tuple(block)
        if len(sizes) != 2 or min(sizes) < 1:
            raise LayoutError(f"a block is two whole numbers, rows and columns, not {block!r}")
        return replace(self, block=(sizes[0], sizes[1]))

    # --- shapes -------------------------------------------------------------------------------------------------------

    def value_shape(self, codes: Shape) -> Shape:
        """The shape of the values that codes of this shape have.

        >>> MXFP4.value_shape((8, 64, 3, 16))
        (8, 64, 96)
        """
        return (*codes[:-2], codes[-2] * GROUP) if self.pairs else codes

    def codes_shape(self, values: Shape) -> Shape:
        """The shape of the codes of values of this shape."""
        return (*values[:-1], values[-1] // GROUP, BYTES) if self.pairs else values

    def blocks(self, values: Shape) -> Shape:
        """How many cells share a scale along every dim of the values."""
        sizes = [1] * len(values)
        for dim, size in zip(range(len(values))[-2:], self.block[-len(values) :], strict=True):
            sizes[dim] = max(values[dim], 1) if size is None else size
        return tuple(sizes)

    def grid(self, values: Shape) -> Shape:
        """How many scales there are along every dim of the values."""
        return tuple(-(-size // block) for size, block in zip(values, self.blocks(values), strict=True))

    def scales_shapes(self, values: Shape) -> list[Shape]:
        """The shapes that scales may have: the grid, with or without the dims of size 1 at its end.

        >>> FP8_ROW.scales_shapes((576, 256))
        [(576, 1), (576,)]
        """
        grid, shapes = self.grid(values), list[Shape]()
        while True:
            shapes.append(grid)
            if not grid or grid[-1] != 1:
                return shapes
            grid = grid[:-1]

    def fits(self, codes: Shape, scales: Shape) -> bool:
        """True where these are shapes of codes and scales of one tensor."""
        if self.pairs and (len(codes) < 2 or codes[-1] != BYTES):
            return False
        return scales in self.scales_shapes(self.value_shape(codes))

    # --- boxes --------------------------------------------------------------------------------------------------------

    def codes_box(self, box: Box) -> Box:
        """The codes of a box of values: of whole groups where a byte has two codes."""
        if not self.pairs:
            return box
        lo, hi = box.lo[-1] // GROUP, -(-box.hi[-1] // GROUP)
        return Box((*box.lo[:-1], lo, 0), (*box.hi[:-1], hi, BYTES))

    def grid_box(self, box: Box, values: Shape) -> Box:
        """The scales that a box of values needs: those of all blocks that it touches.

        >>> print(FP8_BLOCK.grid_box(Box((288, 0), (576, 256)), (576, 256)))
        [2:5, 0:2]
        """
        blocks = self.blocks(values)
        lo = tuple(start // size for start, size in zip(box.lo, blocks, strict=True))
        hi = tuple(-(-stop // size) for stop, size in zip(box.hi, blocks, strict=True))
        return Box(lo, tuple(map(max, lo, hi))) if box.volume else Box(lo, lo)

    def scales_box(self, box: Box, values: Shape, scales: Shape) -> Box:
        """The same as a box of the tensor of scales, which may lack dims of size 1."""
        touched = self.grid_box(box, values)
        return Box(touched.lo[: len(scales)], touched.hi[: len(scales)])

    def whole_blocks(self, box: Box, values: Shape) -> Box:
        """The cells of all blocks that a box of values touches."""
        return self.cells(self.grid_box(box, values), values)

    def cells(self, grid: Box, values: Shape) -> Box:
        """The values that a box of the grid scales.

        >>> print(FP8_BLOCK.cells(Box((2, 0), (5, 2)), (576, 256)))
        [256:576, 0:256]
        """
        blocks = self.blocks(values)
        lo = tuple(start * size for start, size in zip(grid.lo, blocks, strict=True))
        hi = (min(stop * size, end) for stop, size, end in zip(grid.hi, blocks, values, strict=True))
        return Box(lo, tuple(map(max, lo, hi)))

    def cuts_blocks(self, boxes: Sequence[Box], values: Shape) -> bool:
        """True where a box has a part of a block."""
        return any(prod(self.whole_blocks(box, values).shape) != box.volume for box in boxes if box.volume)


FP8_BLOCK = Format("fp8-block", torch.float8_e4m3fn, (*FLOATS, *EXPONENTS), (128, 128))
FP8_ROW = Format("fp8-row", torch.float8_e4m3fn, FLOATS, (1, None))
FP8_TENSOR = Format("fp8-tensor", torch.float8_e4m3fn, FLOATS, (None, None))
INT8_ROW = Format("int8-row", torch.int8, FLOATS, (1, None))
INT8_SCB = Format("int8-scb", torch.int8, FLOATS, (1, None), divisor=127)
MXFP8 = Format("mxfp8", torch.float8_e4m3fn, EXPONENTS, (1, GROUP))
MXFP4 = Format("mxfp4", torch.uint8, EXPONENTS, (1, GROUP), pairs=True)
FORMATS = {one.name: one for one in (FP8_BLOCK, FP8_ROW, FP8_TENSOR, INT8_ROW, INT8_SCB, MXFP8, MXFP4)}


def format_of(format: object) -> Format:
    """A format by its name, or itself.

    >>> format_of("mxfp8").block
    (1, 32)
    """
    if isinstance(format, Format):
        return format
    if isinstance(format, str) and format in FORMATS:
        return FORMATS[format]
    raise LayoutError(f"{format!r} is not a format of quantized tensors: there are {', '.join(FORMATS)}")
