"""The arithmetic of quantized tensors, on any box of one: codes and scales to values, and values to codes and scales.

Cells are computed in chunks of rows that stay in the processor's cache, in float32, through buffers that are reused.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import cache, lru_cache
from itertools import product
from typing import NamedTuple

import torch
from torch.nn.functional import pad

from shardwise.errors import RefusedValueError
from shardwise.geometry import Box
from shardwise.quantized.formats import EXPONENTS, GROUP, Format, Shape

INTEGERS = {2: torch.int16, 4: torch.int32, 8: torch.int64}  # by their bytes
NAN = 0x7F  # the bits of an fp8 code, without the sign
CELLS = 2**18  # that are computed at a time
E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)  # the values of 4-bit codes; the fourth bit is the sign
LARGEST_CODE = {torch.float8_e4m3fn: 448.0, torch.int8: 127.0}


class Rows(NamedTuple):
    """Rows of a matrix that are computed together, and the rows of the grid of scales that they need."""

    start: int
    stop: int
    first: int
    last: int


def _rows(count: int, width: int, first: int, block: int) -> Iterator[Rows]:
    """All rows from number `first` on: several with a scale each, or some of those that share scales."""
    most, start = max(1, CELLS // max(width, 1)), 0
    while start < count:
        stop = min(count, start + most)
        at = (first + start) // block
        if block > 1:
            stop = min(stop, (at + 1) * block - first)
        yield Rows(start, stop, at - first // block, (first + stop - 1) // block + 1 - first // block)
        start = stop


class Matrix(NamedTuple):
    """A matrix of a box of values: where it starts, and the rows and columns that share a scale."""

    row: int
    column: int
    block: tuple[int, int]

    def rows(self, count: int, width: int) -> Iterator[Rows]:
        """In chunks."""
        return _rows(count, width, self.row, self.block[0])

    def multiply(self, cells: torch.Tensor, grid: torch.Tensor) -> None:
        """Multiply rows of float32 cells by their rows of the grid, in place."""
        width, (count, columns) = cells.shape[1], grid.shape
        if columns == 1:
            cells.mul_(grid)
        elif count > 1 and width == columns * self.block[1]:
            cells.view(len(cells), columns, -1).mul_(grid[:, :, None])
        else:
            cells.mul_(grid.index_select(1, _block_of(width, self.column, self.block[1], grid.device)))

    def largest(self, magnitudes: torch.Tensor) -> torch.Tensor:
        """The largest of every block of columns."""
        size, before = self.block[1], self.column % self.block[1]
        after = -(before + magnitudes.shape[1]) % size
        padded = pad(magnitudes, (before, after)) if before or after else magnitudes
        return padded.view(len(padded), -1, size).amax(2)


@lru_cache(maxsize=256)
def _block_of(width: int, first: int, block: int, device: torch.device) -> torch.Tensor:
    """The number of every column's block, counted from the first."""
    return (torch.arange(width, device=device) + first % block) // block


def _matrices(box: Box, values: Shape, format: Format) -> tuple[Matrix, list[tuple[int, ...]]]:
    """The matrices of a box of values: how each lies, and the indices of all."""
    blocks = (1, 1, *format.blocks(values))[-2:]
    row, column = (0, 0, *box.lo)[-2:]
    return Matrix(row, column, (blocks[0], blocks[1])), list(product(*map(range, box.shape[:-2])))


def _as_matrices(tensor: torch.Tensor, dims: int) -> torch.Tensor:
    """With two dims or more: a row where there is one dim, a cell where there is none."""
    for _ in range(dims, 2):
        tensor = tensor.unsqueeze(0)
    return tensor


# --- codes to values --------------------------------------------------------------------------------------------------


def dequantize_box(
    out: torch.Tensor, codes: torch.Tensor, scales: torch.Tensor, format: Format, box: Box, values: Shape
) -> None:
    """Write the values of `box`, cells of a tensor of shape `values`, to `out`.

    `codes` has those of `format.codes_box(box)`, and `scales` those of all blocks that the box touches.
    """
    if not box.volume:
        return
    dims = len(values)
    grid = factors(scales).reshape(*scales.shape, *[1] * (dims - scales.ndim))
    matrix, indices = _matrices(box, values, format)
    if format.pairs:  # whole groups are computed
        codes = codes.reshape(*codes.shape[:-2], -1)
        matrix = matrix._replace(column=matrix.column // GROUP * GROUP)
    targets, sources, factor = (_as_matrices(tensor, dims) for tensor in (out, codes, grid))
    for index in indices:
        _dequantize_matrix(targets[index], sources[index], factor[index], format, matrix, box.lo[-1] if dims else 0)


def _dequantize_matrix(
    out: torch.Tensor, codes: torch.Tensor, grid: torch.Tensor, format: Format, matrix: Matrix, column: int
) -> None:
    width, skipped = codes.shape[1] * (2 if format.pairs else 1), column - matrix.column
    rows = min(len(codes), max(1, CELLS // width))
    decoder = _decoder(format, codes, grid, rows)
    cells, grid = torch.empty(rows, width, device=codes.device), grid * decoder.factor
    for start, stop, first, last in matrix.rows(len(codes), width):
        here = _first(cells, stop - start)
        decoder.decode(here, codes[start:stop])
        matrix.multiply(here, grid[first:last])
        if format.divisor != 1:
            here.mul_(1 / format.divisor)
        out[start:stop].copy_(here if out.shape[1] == width else here[:, skipped : skipped + out.shape[1]])


class Decoder:
    """Codes as the numbers that they stand for, divided by `factor`."""

    factor = 1.0

    def decode(self, cells: torch.Tensor, codes: torch.Tensor) -> None:
        """Write numbers to float32 cells."""
        cells.copy_(codes)


class Fp8Decoder(Decoder):
    """fp8 on the CPU, ten times as fast as torch's own conversion: the bits of a code, moved, are those of a float16.

    The exponents of float16 have a bias of 15 where those of fp8 have 7, so numbers are divided by 2**8. That is exact,
    and so is the factor of the scales. nan is the only code that differs: codes with nan are left to torch.
    """

    factor = 2.0**8

    def __init__(self, codes: torch.Tensor, rows: int) -> None:
        self._bits = torch.empty(rows, codes.shape[1], dtype=torch.int16, device=codes.device)

    def decode(self, cells: torch.Tensor, codes: torch.Tensor) -> None:
        """Write numbers to float32 cells."""
        bits = _first(self._bits, len(codes)).copy_(codes.view(torch.int8))  # the sign is in bits 7 to 15 now
        cells.copy_(bits.mul_(2**7).bitwise_and_(~0x4000).view(torch.float16))


def has_nan(codes: torch.Tensor) -> bool:
    """True where fp8 codes have a nan: all bits but the sign are set."""
    rows = max(1, CELLS // max(codes.shape[1], 1))
    scratch = torch.empty(min(len(codes), rows), codes.shape[1], dtype=torch.uint8, device=codes.device)
    for some in torch.split(codes.view(torch.uint8), rows):
        if int(torch.bitwise_and(some, NAN, out=_first(scratch, len(some))).amax()) == NAN:
            return True
    return False


def _first(tensor: torch.Tensor, rows: int) -> torch.Tensor:
    """Some rows. To make a view takes about as long as to compute a thousand cells."""
    return tensor if len(tensor) == rows else tensor[:rows]


class PairDecoder(Decoder):
    """Two codes of four bits in a byte, by a table of all bytes."""

    def __init__(self, codes: torch.Tensor, rows: int) -> None:
        self._index = torch.empty(rows * codes.shape[1], dtype=torch.int32, device=codes.device)

    def decode(self, cells: torch.Tensor, codes: torch.Tensor) -> None:
        """Write numbers to float32 cells."""
        index = self._index[: codes.numel()].copy_(codes.reshape(-1))
        torch.index_select(_pair_values(codes.device), 0, index, out=cells.view(torch.int64).view(-1))


def _decoder(format: Format, codes: torch.Tensor, grid: torch.Tensor, rows: int) -> Decoder:
    if format.pairs:
        return PairDecoder(codes, rows)
    if codes.device.type != "cpu" or codes.dtype != torch.float8_e4m3fn or has_nan(codes):
        return Decoder()
    fits = float(grid.abs().amax()) * Fp8Decoder.factor < torch.finfo(torch.float32).max
    return Fp8Decoder(codes, rows) if fits else Decoder()


@cache
def _pair_values(device: torch.device) -> torch.Tensor:
    """The two numbers of every byte, as one integer: that of the lower four bits comes first."""
    numbers = torch.tensor([*E2M1, *(-number for number in E2M1)], device=device)
    byte = torch.arange(256, device=device)
    return torch.stack([numbers[byte % 16], numbers[byte // 16]], 1).view(torch.int64).view(-1)


def factors(scales: torch.Tensor) -> torch.Tensor:
    """What codes are multiplied by, in float32."""
    if scales.dtype == torch.uint8:  # exponents
        return _powers(scales.device)[scales.long()]
    return scales.to(torch.float32)


@cache
def _powers(device: torch.device) -> torch.Tensor:
    """The powers of two of all exponents, from 2**-127 on. The last exponent stands for nan."""
    return torch.arange(256, dtype=torch.uint8, device=device).view(torch.float8_e8m0fnu).to(torch.float32)


# --- values to codes --------------------------------------------------------------------------------------------------


class Scaling(NamedTuple):
    """How blocks are quantized: values times `forward` are rounded to codes, and `stored` is the scale of the codes."""

    forward: torch.Tensor
    stored: torch.Tensor

    @staticmethod
    def of(largest: torch.Tensor, format: Format, dtype: torch.dtype) -> Scaling:
        """By the largest magnitude of every block, in float32, with scales of that dtype."""
        forward = LARGEST_CODE[format.codes] / largest
        forward = torch.where(forward.isfinite(), forward, 1.0)  # what is too small for a scale becomes 0
        if format.divisor != 1:
            return Scaling(forward, largest.to(dtype))
        inverse = 1.0 / forward
        if dtype not in EXPONENTS:
            return Scaling(forward, inverse.to(dtype))
        tiny = torch.finfo(torch.float32).tiny
        exponent = inverse.clamp(min=tiny).log2().ceil()
        stored = (exponent + 127).to(torch.uint8) if dtype == torch.uint8 else exponent.exp2().to(dtype)
        return Scaling(1.0 / factors(stored), stored)


def largest_magnitudes(cells: torch.Tensor, format: Format, box: Box, values: Shape) -> torch.Tensor:
    """The largest magnitude of every block that `box` touches, among the cells of the box, in float32.

    Magnitudes have the same order as their bits. Integers are compared faster, and nan is larger than all others.
    """
    dims, grid, integers = len(values), format.grid_box(box, values), INTEGERS[cells.dtype.itemsize]
    found = torch.zeros(grid.shape, dtype=torch.float32, device=cells.device)
    matrix, indices = _matrices(box, values, format)
    sources, targets = _as_matrices(cells, dims), _as_matrices(found, dims)
    for index in indices if box.volume else ():
        _find_largest(targets[index], sources[index].view(integers), matrix, cells.dtype)
    return found


def _find_largest(grid: torch.Tensor, bits: torch.Tensor, matrix: Matrix, dtype: torch.dtype) -> None:
    """Of a matrix, given by its bits, of this dtype."""
    scratch = torch.empty(
        min(len(bits), max(1, CELLS // bits.shape[1])), bits.shape[1], dtype=bits.dtype, device=bits.device
    )
    unsigned = torch.iinfo(bits.dtype).max
    for start, stop, first, last in matrix.rows(*bits.shape):
        magnitudes = torch.bitwise_and(bits[start:stop], unsigned, out=_first(scratch, stop - start))
        if matrix.block[0] > 1:
            magnitudes = magnitudes.amax(0, keepdim=True)
        here = grid[first:last]
        torch.maximum(here, matrix.largest(magnitudes).view(dtype).to(torch.float32), out=here)


def check_finite(largest: torch.Tensor, what: str) -> None:
    """Refuse values that no scale brings into the range of codes."""
    if not bool(largest.isfinite().all()):
        raise RefusedValueError(f"{what} has values that are not finite (inf or nan): they cannot be quantized")


def encode_box(
    out: torch.Tensor, cells: torch.Tensor, forward: torch.Tensor, format: Format, box: Box, values: Shape
) -> None:
    """Write the codes of the cells of `box` to `out`. `forward` has the factors of all blocks that the box touches."""
    if not box.volume:
        return
    dims = len(values)
    matrix, indices = _matrices(box, values, format)
    targets, sources, factor = (_as_matrices(tensor, dims) for tensor in (out, cells, forward))
    for index in indices:
        target, source = targets[index], sources[index]
        scratch = torch.empty(min(len(source), max(1, CELLS // source.shape[1])), source.shape[1], device=cells.device)
        for start, stop, first, last in matrix.rows(*source.shape):
            here = _first(scratch, stop - start).copy_(source[start:stop])
            matrix.multiply(here, factor[index][first:last])
            if not format.codes.is_floating_point:
                here.round_()
            target[start:stop].copy_(here)  # no larger than the largest code, once it is rounded
