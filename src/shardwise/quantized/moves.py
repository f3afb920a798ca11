"""Moves of quantized tensors: codes and scales travel as two tensors, and become values where they are needed."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache, partial
from typing import NamedTuple

import torch
import torch.distributed as dist

from shardwise.containers.delivered import DeliveredTensor, Delivery
from shardwise.containers.description import memory_of
from shardwise.errors import RefusedValueError
from shardwise.exchange import view_of
from shardwise.exchange.overflow import Losses, may_overflow
from shardwise.geometry import Box, Boxes
from shardwise.job.plan import TensorInfo
from shardwise.job.remap import Link, Remap
from shardwise.job.remap_rules import list_rules
from shardwise.job.subtensor import Subtensor
from shardwise.layout import Layout, places_of
from shardwise.quantized.arithmetic import dequantize_box
from shardwise.quantized.formats import VALUES, Format, Shape
from shardwise.quantized.layouts import OwnedBox, distinct, layout_of_boxes
from shardwise.quantized.recognition import KnownTensors, Quantized, QuantizedTensor

Rule = Remap | Quantized


def split_rules(remap: object) -> tuple[list[Quantized], list[Remap]]:
    """The rules of quantized tensors, and all others."""
    rules = list_rules(remap)
    quantized = [rule for rule in rules if isinstance(rule, Quantized)]
    return quantized, [rule for rule in rules if not isinstance(rule, Quantized)]


def value_shapes(tensors: KnownTensors, quantized: Mapping[str, QuantizedTensor]) -> dict[str, Shape]:
    """The shapes of a side with values in the place of codes, and without scales."""
    values, scales = {one.codes: one for one in quantized.values()}, {one.scales for one in quantized.values()}
    shapes = dict[str, Shape]()
    for name, tensor in tensors.items():
        if name in values:
            shapes[values[name].value] = values[name].shape
        elif name not in scales:
            shapes[name] = tuple(tensor.shape)
    return shapes


def check_used(rules: Sequence[Quantized], *sides: Collection[str]) -> None:
    """Refuse rules where no side has a quantized tensor."""
    if rules and not any(sides):
        raise ValueError(f"{rules[0]} fits nothing: neither side has codes and scales that it names")


# --- codes and scales to codes and scales -----------------------------------------------------------------------------


def coded_links(link: Link, source: QuantizedTensor, target: QuantizedTensor) -> tuple[Link, Link]:
    """The links of codes and of scales, for a link of values. Refused where a part is not made of whole blocks."""
    if source.format != target.format:
        raise RefusedValueError(
            f"{source.value!r} is {_in_words(source.format)} in the source, but {target.value!r} is "
            f"{_in_words(target.format)} in the target: dequantize it first"
        )
    if source.scales_dtype != target.scales_dtype:
        raise RefusedValueError(
            f"{source.scales!r} is {source.scales_dtype}, but {target.scales!r} is {target.scales_dtype}: scales "
            f"define what codes mean, and are not cast. Give a target with scales of {source.scales_dtype}, or values"
        )
    ends = (source, link.source_view), (target, link.target_view)
    for tensor, view in ends:
        if not view.is_box:
            raise RefusedValueError(
                f"the part {view} of {tensor.value!r} is not a box: its codes and scales cannot be moved together. "
                f"Dequantize it first"
            )
        if not _whole_blocks(tensor, view):
            raise RefusedValueError(
                f"the part {view.region} of {tensor.value!r} does not end where blocks of {tensor.format.name} end, "
                f"{tensor.format.blocks(tensor.shape)}: a scale would be shared by two tensors. Dequantize it first"
            )
    kept = [at for at in range(len(link.source_view.order)) if all(_has_scales(*end, at) for end in ends)]
    codes = Link(source.codes, target.codes, _codes_view(*ends[0]), _codes_view(*ends[1]))
    scales = Link(source.scales, target.scales, _scales_view(*ends[0], kept), _scales_view(*ends[1], kept))
    if codes.source_view.shape != codes.target_view.shape or scales.source_view.shape != scales.target_view.shape:
        raise RefusedValueError(f"blocks of {source.value!r} are not blocks of {target.value!r}: dequantize it first")
    return codes, scales


def _in_words(format: Format) -> str:
    return f"{format.name} with blocks of {' x '.join('all' if size is None else str(size) for size in format.block)}"


def _whole_blocks(tensor: QuantizedTensor, view: Subtensor) -> bool:
    return tensor.format.whole_blocks(view.region, tensor.shape) == view.region


def _has_scales(tensor: QuantizedTensor, view: Subtensor, at: int) -> bool:
    """True where scales have a dim for a dim of the view."""
    return view.order[at] < len(tensor.scales_shape)


def _codes_view(tensor: QuantizedTensor, view: Subtensor) -> Subtensor:
    region = tensor.format.codes_box(view.region)
    if not tensor.format.pairs:
        return Subtensor.of_box(region, view.order)
    last = len(tensor.shape) - 1
    if view.order[-1:] != (last,):
        raise RefusedValueError(f"{tensor.value!r} has two codes in a byte of its last dim, which must stay the last")
    return Subtensor.of_box(region, (*view.order, last + 1))


def _scales_view(tensor: QuantizedTensor, view: Subtensor, kept: Sequence[int]) -> Subtensor:
    region = tensor.format.scales_box(view.region, tensor.shape, tensor.scales_shape)
    return Subtensor.of_box(region, tuple(view.order[at] for at in kept))


# --- codes and scales to values ---------------------------------------------------------------------------------------


class RegionBuffers(NamedTuple):
    """What owners of values need of codes or scales: a region of the tensor, and the layout of their buffers of it."""

    region: Box
    layout: Layout

    @staticmethod
    def of(region: Box, boxes: Mapping[int, Sequence[Box]]) -> RegionBuffers:
        """From the boxes of every owner."""
        pieces = list[OwnedBox]()
        for owner, several in boxes.items():
            inside = [box.within(region) for box in distinct(several)]
            pieces += [(owner, box.lo, box.hi) for box in inside]
        between = Box.whole(region.shape).without(Box(lo, hi) for _, lo, hi in pieces)  # of other targets: not needed
        pieces += [(pieces[0][0], box.lo, box.hi) for box in between if pieces]
        return RegionBuffers(region, layout_of_boxes(region.shape, pieces))

    @property
    def view(self) -> Subtensor:
        """The region, of the tensor in the source."""
        return Subtensor.of_box(self.region, tuple(range(len(self.region.lo))))

    def by_box(self, owner: int, tensors: Sequence[torch.Tensor]) -> dict[Box, torch.Tensor]:
        """An owner's tensors by their boxes, in coordinates of the whole tensor."""
        pieces = self.layout.pieces(owner) if owner in self.layout else ()
        return {_outside(piece.box, self.region): tensors[piece.buffer] for piece in pieces}


def _outside(box: Box, region: Box) -> Box:
    lo, hi = (tuple(map(sum, zip(corner, region.lo, strict=True))) for corner in (box.lo, box.hi))
    return Box(lo, hi)


@lru_cache(maxsize=1024)
def _buffers(
    layout: Layout, source: Subtensor, target: Subtensor, format: Format, values: Shape, scales: Shape
) -> tuple[RegionBuffers, RegionBuffers]:
    """Of codes and of scales, for the owners of a target. Cached: a model has many tensors that move alike."""
    needed = {owner: _needed(layout, owner, source, target) for owner in layout.owners()}
    codes = {owner: [format.codes_box(box) for box in boxes] for owner, boxes in needed.items()}
    grids = {owner: [format.scales_box(box, values, scales) for box in boxes] for owner, boxes in needed.items()}
    whole = format.codes_box(source.region), format.scales_box(source.region, values, scales)
    return RegionBuffers.of(whole[0], codes), RegionBuffers.of(whole[1], grids)


def _needed(layout: Layout, owner: int, source: Subtensor, target: Subtensor) -> list[Box]:
    """The boxes around cells of the source that an owner of the target needs."""
    pieces = Boxes.of([piece.box for piece in layout.pieces(owner)], layout.ndim)
    return _boxes(source.back(target.seen(pieces)[1]))


def _boxes(boxes: Boxes) -> list[Box]:
    return [boxes.box(row) for row in range(boxes.count)]


@dataclass(frozen=True)
class Dequantizing:
    """A link from a quantized tensor to values: the buffers of codes and scales it needs, and what becomes of them."""

    quantized: QuantizedTensor
    link: Link
    target: TensorInfo

    @staticmethod
    def of(quantized: QuantizedTensor, link: Link, target: TensorInfo) -> Dequantizing:
        """Refused where the target cannot have the values."""
        what = f"{quantized.value!r} is quantized ({quantized.format.name}), but {link.target!r}"
        if target.dtype not in VALUES:
            raise RefusedValueError(
                f"{what} is to be {target.dtype}: values are float32, bfloat16 or float16; codes go to a target that "
                f"has codes and scales of the same format"
            )
        if target.layout.op is not None:
            raise RefusedValueError(f"{what} is partial: values can be written only to what holds values")
        if target.delivered:
            raise RefusedValueError(
                f"{what} is handed to the engine's loader whole: convert the checkpoint first, with remap=[Quantized()]"
            )
        return Dequantizing(quantized, link, target)

    @property
    def names(self) -> tuple[str, str]:
        """Of the buffers of codes and of scales, with the part of the target they are for: there may be several."""
        part = "" if self.link.target_view.is_whole(self.target.shape) else str(self.link.target_view)
        target = self.link.target + part
        return f"{self.quantized.codes} for {target}", f"{self.quantized.scales} for {target}"

    def buffers(self) -> tuple[RegionBuffers, RegionBuffers]:
        """Of codes and of scales."""
        one, views = self.quantized, (self.link.source_view, self.link.target_view)
        return _buffers(self.target.layout, *views, one.format, one.shape, one.scales_shape)

    @property
    def _dtypes(self) -> tuple[torch.dtype, torch.dtype]:
        return self.quantized.format.codes, self.quantized.scales_dtype

    def infos(self) -> dict[str, TensorInfo]:
        """What all ranks know of the buffers."""
        return {
            name: TensorInfo(one.layout.shape, dtype, one.layout, self.target.device, delivered=True)
            for name, one, dtype in zip(self.names, self.buffers(), self._dtypes, strict=True)
        }

    def targets(
        self, value: object, owner: int, group: dist.ProcessGroup | None, losses: Losses | None
    ) -> dict[str, DeliveredTensor]:
        """The buffers as targets. Once they are filled, they write this owner's part of the tensor `value`."""
        memory = partial(memory_of, value)

        def take(filled: Mapping[str, Sequence[torch.Tensor]]) -> None:
            self.write(memory(), owner, [filled[name] for name in self.names], losses)

        delivery, device = Delivery(self.names, take), next((tensor.device for tensor in memory()), None)
        return {
            name: DeliveredTensor(delivery, one.layout, dtype, device=device, group=group, owner=owner)
            for name, one, dtype in zip(self.names, self.buffers(), self._dtypes, strict=True)
        }

    def links(self) -> tuple[Link, Link]:
        """To the buffers."""
        one, (codes, scales) = self.quantized, self.buffers()
        wholes = [Subtensor.whole(buffers.layout.shape) for buffers in (codes, scales)]
        return (
            Link(one.codes, self.names[0], codes.view, wholes[0]),
            Link(one.scales, self.names[1], scales.view, wholes[1]),
        )

    def write(
        self,
        memory: Sequence[torch.Tensor],
        owner: int,
        filled: Sequence[Sequence[torch.Tensor]],
        losses: Losses | None = None,
    ) -> None:
        """Write the values of an owner's cells to its memory, from its buffers of codes and scales."""
        one, source, target = self.quantized, self.link.source_view, self.link.target_view
        codes, scales = (b.by_box(owner, tensors) for b, tensors in zip(self.buffers(), filled, strict=True))
        places = target.of_places(places_of(self.target.layout, owner, [tensor.stride() for tensor in memory]))
        for window, box in zip(places.windows(), _boxes(source.back(places.boxes)), strict=True):
            grid = scales[one.format.scales_box(box, one.shape, one.scales_shape)]
            self._write_box(view_of(window, memory), codes[one.format.codes_box(box)], grid, box, losses)

    def _write_box(
        self, out: torch.Tensor, codes: torch.Tensor, scales: torch.Tensor, box: Box, losses: Losses | None
    ) -> None:
        format, shape, view = self.quantized.format, self.quantized.shape, self.link.source_view
        counted = losses is not None and may_overflow(torch.float32, self.target.dtype)
        if view.is_box and not counted:
            dequantize_box(_in_source_dims(out, view), codes, scales, format, box, shape)
            return
        values = torch.empty(box.shape, dtype=torch.float32, device=out.device)
        dequantize_box(values, codes, scales, format, box, shape)
        seen = values.as_strided(out.shape, [values.stride(dim.of) * dim.step for dim in view.dims])
        if losses is not None and counted:
            losses.look(repr(self.link.target), [seen], self.target.dtype)
        out.copy_(seen)


@dataclass
class ComputedTargets:
    """The targets of a job whose values are computed once their codes and scales have arrived."""

    moves: list[Dequantizing] = field(default_factory=list)

    @property
    def names(self) -> list[str]:
        """Each once: several moves may write parts of one target."""
        return list(dict.fromkeys(move.link.target for move in self.moves))

    def infos(self) -> dict[str, TensorInfo]:
        """What all ranks know of the buffers of codes and scales."""
        return {name: info for move in self.moves for name, info in move.infos().items()}

    def buffers(
        self, values: Mapping[str, object], owner: int, group: dist.ProcessGroup | None, losses: Losses | None
    ) -> dict[str, DeliveredTensor]:
        """The buffers as targets, which write values to other targets once they are filled."""
        made = [move.targets(values.get(move.link.target), owner, group, losses) for move in self.moves]
        return {name: target for several in made for name, target in several.items()}

    @property
    def may_lose(self) -> bool:
        """True where values may be out of range for their targets."""
        return any(may_overflow(torch.float32, move.target.dtype) for move in self.moves)


def _in_source_dims(part: torch.Tensor, view: Subtensor) -> torch.Tensor:
    """A part with the dims of the whole, in their order: those that were left out have one cell."""
    order = sorted(range(len(view.order)), key=view.order.__getitem__)
    whole = part.permute(order)
    for dim in range(len(view.region.lo)):
        if dim not in view.order:
            whole = whole.unsqueeze(dim)
    return whole
