"""A sync with quantized tensors on one side or both: what travels, and what is computed before and after it."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import torch

from shardwise.errors import RefusedValueError
from shardwise.exchange import view_of
from shardwise.exchange.messages import Tensors
from shardwise.geometry import Places
from shardwise.job.agree import tell_all
from shardwise.job.plan import TensorInfo
from shardwise.job.remap import Link
from shardwise.job.side import Side
from shardwise.layout import Layout, local_boxes, local_shapes, places_of
from shardwise.quantized.arithmetic import Scaling, check_finite, encode_box, largest_magnitudes
from shardwise.quantized.formats import VALUES
from shardwise.quantized.layouts import scales_layout
from shardwise.quantized.moves import ComputedTargets, Dequantizing, coded_links
from shardwise.quantized.recognition import QuantizedTensor
from shardwise.quantized.tensors import check_can_quantize
from shardwise.transports import GroupTransport

Infos = Mapping[str, TensorInfo]
Coded = Mapping[str, QuantizedTensor]


class Quantizing(NamedTuple):
    """Values of the source whose codes and scales travel: as if the source had these, in the same layout."""

    tensor: QuantizedTensor
    layout: Layout
    device: str

    @staticmethod
    def of(name: str, source: TensorInfo, target: QuantizedTensor) -> Quantizing:
        """In the format of the target."""
        check_can_quantize(target.format, target.scales_dtype)
        if source.dtype not in VALUES:
            raise RefusedValueError(f"{name!r} is {source.dtype}: only float32, bfloat16 and float16 are quantized")
        if source.layout.op is not None:
            raise RefusedValueError(f"{name!r} is partial ({source.layout!r}): reduce it before it is quantized")
        names = name, f"codes of {name}", f"scales of {name}"
        one = QuantizedTensor.new(names, target.format, source.shape, target.scales_dtype)
        return Quantizing(one, source.layout, source.device)

    @property
    def cut(self) -> bool:
        """True where owners have parts of blocks, of which the largest magnitude is known only together."""
        boxes = [box for owner in self.layout.owners() for box in local_boxes(self.layout, owner)]
        return self.tensor.format.cuts_blocks(boxes, self.tensor.shape)

    def infos(self) -> dict[str, TensorInfo]:
        """What all ranks know of the codes and the scales."""
        one = self.tensor
        grid = scales_layout(self.layout, one.format)
        return {
            one.codes: TensorInfo(one.codes_shape, one.format.codes, self.layout, self.device),
            one.scales: TensorInfo(one.scales_shape, one.scales_dtype, grid, self.device),
        }

    def _places(self, memory: Tensors, owner: int) -> Places:
        return places_of(self.layout, owner, [tensor.stride() for tensor in memory])

    def largest(self, memory: Tensors, owner: int) -> torch.Tensor:
        """The largest magnitudes of all blocks that an owner has: 0 where it has none, inf where one is not finite."""
        one, places = self.tensor, self._places(memory, owner)
        device = memory[0].device if memory else torch.device("cpu")
        largest = torch.zeros(one.scales_shape, dtype=torch.float32, device=device)
        for at, window in enumerate(places.windows()):
            box = places.boxes.box(at)
            here = largest[one.format.grid_box(box, one.shape).slices]
            found = largest_magnitudes(view_of(window, memory), one.format, box, one.shape)
            torch.maximum(here, found.nan_to_num(nan=torch.inf, posinf=torch.inf), out=here)
        return largest

    def codes(self, memory: Tensors, owner: int, forward: torch.Tensor) -> Tensors:
        """Of an owner's cells, in buffers like those of the values."""
        one, places = self.tensor, self._places(memory, owner)
        shapes = local_shapes(self.layout, owner)
        made = [torch.empty(shape, dtype=one.format.codes, device=forward.device) for shape in shapes]
        for (at, window), to in zip(enumerate(places.windows()), self._places(made, owner).windows(), strict=True):
            box = places.boxes.box(at)
            here = forward[one.format.grid_box(box, one.shape).slices]
            encode_box(view_of(to, made), view_of(window, memory), here, one.format, box, one.shape)
        return made

    def scales(self, owner: int, stored: torch.Tensor) -> Tensors:
        """The scales that an owner has."""
        layout = scales_layout(self.layout, self.tensor.format)
        pieces = sorted(layout.pieces(owner), key=lambda piece: piece.buffer) if owner in layout else []
        found = [stored[piece.box.slices].contiguous() for piece in pieces]
        return found or [stored.new_empty(shape) for shape in local_shapes(layout, owner)]


@dataclass
class CodedLinks:
    """The links of a sync, with those of codes and scales; what is quantized before it, and computed after it."""

    links: list[Link] = field(default_factory=list)
    quantized: dict[str, Quantizing] = field(default_factory=dict)
    computed: ComputedTargets = field(default_factory=ComputedTargets)

    @staticmethod
    def of(planned: Sequence[Link], infos: tuple[Infos, Infos], coded: tuple[Coded, Coded]) -> CodedLinks:
        """From links between values."""
        found = CodedLinks()
        for link in planned:
            found._add(link, infos, (coded[0].get(link.source), coded[1].get(link.target)))
        return found

    def _add(
        self, link: Link, infos: tuple[Infos, Infos], ends: tuple[QuantizedTensor | None, QuantizedTensor | None]
    ) -> None:
        source, target = ends
        if link.zeros and target is not None:
            raise RefusedValueError(
                f"{link.target!r} is quantized: it cannot be padded on the way. Pad its values first"
            )
        if source is None and target is not None:
            self._quantize(link, infos[0][link.source], target)
        elif source is not None and target is not None:
            self.links += coded_links(link, source, target)
        elif source is not None:
            self._dequantize(link, infos[1][link.target], source)
        else:
            self.links.append(link)

    def _quantize(self, link: Link, source: TensorInfo, target: QuantizedTensor) -> None:
        made = Quantizing.of(link.source, source, target)
        if self.quantized.setdefault(link.source, made) != made:
            raise RefusedValueError(f"{link.source!r} would be quantized in two ways: give its targets one format")
        self.links += coded_links(link, made.tensor, target)

    def _dequantize(self, link: Link, target: TensorInfo, source: QuantizedTensor) -> None:
        move = Dequantizing.of(source, link, target)
        self.computed.moves.append(move)
        self.links += move.links()

    def sources(self, infos: Infos) -> dict[str, TensorInfo]:
        """Those of the source, and the codes and scales of values."""
        return {**infos, **{name: info for one in self.quantized.values() for name, info in one.infos().items()}}

    def targets(self, infos: Infos) -> dict[str, TensorInfo]:
        """The targets that are moved to: also buffers of codes and scales that become values."""
        computed, moved = set(self.computed.names), {link.target for link in self.links}
        found = {name: info for name, info in infos.items() if name not in computed or name in moved}
        return {**found, **self.computed.infos()}

    def read(self, sources: Iterable[str]) -> list[str]:
        """The tensors of the source that these are made of: values instead of their codes and scales."""
        made = {name for one in self.quantized.values() for name in (one.tensor.codes, one.tensor.scales)}
        return [*(name for name in sources if name not in made), *self.quantized]

    def zeros(self) -> list[str]:
        """The sources that are padding."""
        return [link.source for link in self.links if link.zeros]


class QuantizingSide:
    """The tensors of another side, and the codes and scales of some of them, which are computed when they are sent."""

    def __init__(self, values: Side, quantized: Mapping[str, Quantizing], transport: GroupTransport) -> None:
        made = {name: one for one in quantized.values() for name in (one.tensor.codes, one.tensor.scales)}
        self._values, self._quantized, self._transport = values, quantized, transport
        self._cut = [name for name, one in quantized.items() if one.cut]
        self._by_name = made
        self._reduced, self._scalings = dict[str, torch.Tensor](), dict[str, Scaling]()
        self._made = dict[str, Tensors]()

    def start(self) -> None:
        """Find the largest magnitudes of blocks of which several ranks have a part. All ranks call."""
        self._scalings.clear()
        self._made.clear()
        if not self._cut:
            return

        def say() -> tuple[list[torch.Tensor], None]:
            return [self._largest(name).cpu().view(-1) for name in self._cut], None

        own, _ = tell_all(self._transport, "sync", say)
        number = next(self._transport.numbers)
        reduce = self._transport.all_reduce(torch.cat(own), "max", number, in_order=False)
        parts = torch.split(self._transport.queue.run(reduce), [len(part) for part in own])
        self._reduced = dict(zip(self._cut, parts, strict=True))

    def _largest(self, name: str) -> torch.Tensor:
        return self._quantized[name].largest(self._values.memory(name), self._transport.me)

    def memory(self, name: str) -> Tensors:
        """Of the other side, or computed."""
        if name not in self._by_name:
            return self._values.memory(name)
        if name not in self._made:
            one = self._by_name[name]
            values, scaling = self._values.memory(one.tensor.value), self._scaling(one)
            coded = name == one.tensor.codes
            me = self._transport.me
            self._made[name] = one.codes(values, me, scaling.forward) if coded else one.scales(me, scaling.stored)
        return self._made[name]

    def _scaling(self, one: Quantizing) -> Scaling:
        name = one.tensor.value
        if name not in self._scalings:
            memory = self._values.memory(name)
            device = memory[0].device if memory else torch.device("cpu")
            known = self._reduced[name].view(one.tensor.scales_shape) if name in self._reduced else self._largest(name)
            check_finite(known, repr(name))
            self._scalings[name] = Scaling.of(known.to(device), one.tensor.format, one.tensor.scales_dtype)
        return self._scalings[name]

    def stamp(self) -> object:
        """Never equal to an earlier stamp: codes are computed anew."""
        return object() if self._quantized else self._values.stamp()

    def sent(self, links: Sequence[int]) -> None:
        """Codes and scales are not needed any more."""
        self._made.clear()

    def filled(self, names: Sequence[str]) -> None:
        """Nothing is written here."""
