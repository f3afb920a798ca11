"""Quantized tensors of a checkpoint as values, and values of a checkpoint as codes and scales, computed when read."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

import numpy as np
import torch

from shardwise.checkpoint.entry import Checkpoint, Entry, Positions, whole_box
from shardwise.checkpoint.files import Files
from shardwise.checkpoint.model_config import CONFIG, read_config
from shardwise.checkpoint.zeros import ZERO_FILES
from shardwise.errors import CheckpointError
from shardwise.geometry import Box, Boxes, Ints, Window, row_major
from shardwise.job.casts import PLAIN
from shardwise.quantized.arithmetic import Scaling, check_finite, dequantize_box, encode_box, largest_magnitudes
from shardwise.quantized.formats import Shape
from shardwise.quantized.recognition import KnownTensors, Quantized, QuantizedTensor, recognize
from shardwise.quantized.tensors import check_can_quantize, scales_dtype
from shardwise.storage.appending import OutputFile

PART = 2**20  # cells that are quantized at a time
NO_FILES: tuple[Files, list[str]] = ZERO_FILES, ZERO_FILES.names()  # of values that are all padding, or no values
Read = Callable[[Box], torch.Tensor]


class ComputedEntry(Entry):
    """A tensor whose cells are computed from those of other entries when they are read. It has no bytes in files.

    Its windows are those of a tensor that lies row-major from byte 0 on.
    """

    def __init__(
        self, name: str, shape: Shape, dtype: torch.dtype, compute: Read, origins: Sequence[Entry], made_by: str
    ) -> None:
        stored, nowhere = whole_box(shape), np.zeros(1, np.int64)
        read = [one for one in origins if one.files is not ZERO_FILES]
        files, paths = (read[0].files, sorted({path for one in read for path in one.used()})) if read else NO_FILES
        where = nowhere[: stored.boxes.count]
        super().__init__(name, shape, dtype, stored, where, _from_zero, paths, files, None, made_by)
        self._compute, self.origins = compute, tuple(origins)

    def check(self, boxes: Boxes | None) -> None:
        """Refuse cells that no file has."""
        for one in self.origins:
            one.check(Boxes.of([Box.whole(one.shape)], len(one.shape)))

    @property
    def near(self) -> bool:
        """Never: it has no bytes."""
        return False

    def used(self) -> list[str]:
        """The files of all entries that it is computed from."""
        return list(self.paths)

    def views(self, windows: Sequence[Window]) -> list[torch.Tensor]:
        """The elements of windows, computed."""
        return [self._view(window) for window in windows]

    def _view(self, window: Window) -> torch.Tensor:
        """All cells from the first to the last one along every dim are computed, and those of the window are seen."""
        strides = row_major(self.shape)
        lo = np.unravel_index(window.offset // self.dtype.itemsize, self.shape) if self.shape else ()
        first = tuple(map(int, lo))
        dims = [_step_along(stride, strides) for stride in window.strides]
        last = [start + 1 for start in first]
        for (dim, step), size in zip(dims, window.shape, strict=True):
            last[dim] += (size - 1) * step
        cells = self._compute(Box(first, tuple(last)))
        return cells.as_strided(window.shape, [cells.stride(dim) * step for dim, step in dims])

    def show(self, windows: Sequence[Window], views: Sequence[torch.Tensor]) -> None:
        """The entries that it is computed from have shown what was read."""

    def copy(self, window: Window, file: OutputFile) -> None:
        """There are no bytes to copy: cells are packed."""
        raise NotImplementedError(f"{self.name!r} is computed")


def _step_along(stride: int, strides: Sequence[int]) -> tuple[int, int]:
    """The dim of a row-major tensor along which a stride goes, and its steps there."""
    dim = next(dim for dim, one in enumerate(strides) if one <= stride)
    return dim, stride // strides[dim]


def _from_zero(rows: Ints) -> Positions:
    return Positions(np.zeros(len(rows), np.int64))


# --- codes and scales as values ---------------------------------------------------------------------------------------


class ValueEntry(ComputedEntry):
    """A quantized tensor as its values, in float32."""

    def __init__(self, quantized: QuantizedTensor, codes: Entry, scales: Entry, rule: Quantized) -> None:
        self.quantized, self.rule = quantized, rule
        made_by = f"dequantized from {quantized}"
        super().__init__(quantized.value, quantized.shape, torch.float32, self._values, [codes, scales], made_by)

    @property
    def becomes(self) -> torch.dtype:
        """By the rule."""
        return self.rule.dtype

    def _values(self, box: Box) -> torch.Tensor:
        (codes, scales), one = self.origins, self.quantized
        values = torch.empty(box.shape, dtype=torch.float32, device="cpu")
        grid = one.format.scales_box(box, one.shape, one.scales_shape)
        dequantize_box(values, codes.read(one.format.codes_box(box)), scales.read(grid), one.format, box, one.shape)
        return values


def with_values(checkpoint: Checkpoint, rules: Sequence[Quantized]) -> Checkpoint:
    """The same checkpoint with values in the place of codes and scales, as far as rules name them."""
    if not rules:
        return checkpoint
    found = _recognized(checkpoint, rules)
    entries = dict[str, Entry]()
    codes, scales = {one.codes: (one, rule) for one, rule in found}, {one.scales for one, _ in found}
    for name in checkpoint:
        if name in codes:
            one, rule = codes[name]
            entries[one.value] = ValueEntry(one, checkpoint[one.codes], checkpoint[one.scales], rule)
        elif name not in scales:
            entries[name] = checkpoint[name]
    paths = {name: path for name, path in checkpoint.paths.items() if name not in scales}
    return checkpoint.replaced(entries, paths=paths)


def quantized_in(checkpoint: Checkpoint) -> list[str]:
    """The names of values that are computed from codes and scales."""
    return [name for name in checkpoint if isinstance(checkpoint[name], ValueEntry)]


def _recognized(checkpoint: Checkpoint, rules: Sequence[Quantized]) -> list[tuple[QuantizedTensor, Quantized]]:
    """The quantized tensors of a checkpoint, each with its rule."""
    config = read_config(checkpoint.files) if checkpoint.files.has(CONFIG) else None
    try:
        recognize(checkpoint, rules, config)  # which refuses tensors that two rules name
        return [(one, rule) for rule in rules for one in recognize(checkpoint, [rule], config).values()]
    except ValueError as error:
        raise CheckpointError(f"{checkpoint.path}: {error}") from error


# --- values as codes and scales ---------------------------------------------------------------------------------------


class Quantizer:
    """Codes and scales of a tensor whose values are read in parts."""

    def __init__(self, quantized: QuantizedTensor, read: Read) -> None:
        self._one, self._read = quantized, read
        self._last: tuple[Box, Scaling] | None = None  # many parts need the scale of a whole tensor

    def codes(self, box: Box) -> torch.Tensor:
        """Of a box of values."""
        one, scaling, grid = self._one, self._scaling(box), self._one.format.grid_box(box, self._one.shape)
        codes = torch.empty(box.shape, dtype=one.format.codes, device="cpu")
        for part in _parts(box):
            forward = scaling.forward[one.format.grid_box(part, one.shape).within(grid).slices]
            encode_box(codes[part.within(box).slices], self._read(part), forward, one.format, part, one.shape)
        return codes

    def scales(self, box: Box) -> torch.Tensor:
        """Of a box of scales."""
        one = self._one
        missing = len(one.shape) - len(box.lo)
        grid = Box((*box.lo, *[0] * missing), (*box.hi, *[1] * missing))
        return self._scaling(one.format.cells(grid, one.shape)).stored.reshape(box.shape)

    def _scaling(self, box: Box) -> Scaling:
        """Of all blocks that a box touches."""
        grid, last = self._one.format.grid_box(box, self._one.shape), self._last  # which other threads change, too
        if last is None or last[0] != grid:
            largest = self._largest(self._one.format.whole_blocks(box, self._one.shape))
            check_finite(largest, repr(self._one.value))
            last = self._last = grid, Scaling.of(largest, self._one.format, self._one.scales_dtype)
        return last[1]

    def _largest(self, box: Box) -> torch.Tensor:
        format, shape = self._one.format, self._one.shape
        grid = format.grid_box(box, shape)
        largest = torch.zeros(grid.shape, dtype=torch.float32, device="cpu")
        for part in _parts(box):
            here = largest[format.grid_box(part, shape).within(grid).slices]
            torch.maximum(here, largest_magnitudes(self._read(part), format, part, shape), out=here)
        return largest


def _parts(box: Box) -> Iterator[Box]:
    """A box in parts of limited size: cut across its first dims."""
    dim = next((dim for dim, size in enumerate(box.shape) if size > 1), None)
    if box.volume <= PART or dim is None:
        yield box
        return
    middle = (box.lo[dim] + box.hi[dim]) // 2
    yield from _parts(Box(box.lo, (*box.hi[:dim], middle, *box.hi[dim + 1 :])))
    yield from _parts(Box((*box.lo[:dim], middle, *box.lo[dim + 1 :]), box.hi))


def coded_entries(
    quantized: QuantizedTensor, read: Read, origins: Sequence[Entry]
) -> tuple[ComputedEntry, ComputedEntry]:
    """The codes and the scales of a tensor whose values are read in parts."""
    format = quantized.format
    check_can_quantize(format, quantized.scales_dtype)
    quantizer, made_by, dtype = Quantizer(quantized, read), f"quantized to {quantized}", quantized.scales_dtype
    return (
        ComputedEntry(quantized.codes, quantized.codes_shape, format.codes, quantizer.codes, origins, made_by),
        ComputedEntry(quantized.scales, quantized.scales_shape, dtype, quantizer.scales, origins, made_by),
    )


class Becoming(NamedTuple):
    """Values that a rule turns into codes and scales."""

    tensor: QuantizedTensor
    rule: Quantized


def quantized_names(values: KnownTensors, rules: Sequence[Quantized]) -> dict[str, Becoming]:
    """The values that rules turn into codes and scales: matrices, and stacks of them, of plain numbers."""
    found = dict[str, Becoming]()
    for rule, format in ((rule, rule.known_format()) for rule in rules):
        for name, tensor in values.items() if format is not None else ():
            names, shape = rule.of_value(name, values), tuple(tensor.shape)
            if names is not None and format is not None and len(shape) >= 2 and tensor.dtype in PLAIN:
                one = QuantizedTensor.new(names, format, shape, scales_dtype(format))
                found.setdefault(name, Becoming(one, rule))
    return found
