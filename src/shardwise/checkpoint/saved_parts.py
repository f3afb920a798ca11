"""The parts of a state that this rank writes: views of its memory, or copies where that is on a device."""

from __future__ import annotations

from collections.abc import Mapping
from functools import lru_cache, partial

import torch

from shardwise.checkpoint.formats.writers import TensorPart
from shardwise.checkpoint.host_copies import HostCopies
from shardwise.checkpoint.known_states import Cuts, KnownState
from shardwise.checkpoint.segments import write_tensor
from shardwise.containers.description import memory_of
from shardwise.exchange import view_of
from shardwise.exchange.messages import Tensors
from shardwise.geometry import Box, Boxes, Strides, Window
from shardwise.job.side import check_side
from shardwise.layout import Layout, places_of
from shardwise.storage.appending import OutputFile


def parts_of(state: KnownState, flat: Mapping[str, object], me: int) -> list[TensorPart]:
    """The boxes that this rank writes, of all tensors: views of its memory, or copies where that is on a device."""
    boxes = [
        (name, tensor.dtype, box, view)
        for name, tensor in state.tensors.items()
        if name not in state.ties
        for box, view in _boxes(name, state, memory_of(flat.get(name), apart=False), me)
    ]
    copies = HostCopies([view for *_, view in boxes])
    return [
        TensorPart(name, box, dtype, partial(_write, copies, number))
        for number, (name, dtype, box, _) in enumerate(boxes)
    ]


def _write(copies: HostCopies, number: int, file: OutputFile) -> None:
    write_tensor(copies.take(number), file)


def _boxes(name: str, state: KnownState, memory: Tensors, me: int) -> list[tuple[Box, torch.Tensor]]:
    """The boxes of a tensor that this rank writes, and where they are in its memory."""

    def cuts() -> Cuts:
        tensor, (_, layout) = state.tensors[name], state.layouts[name]
        check_side("state dict", {name: memory}, {name: tensor}, me)
        if me not in layout or not memory:
            return []
        places = _places(tensor.layout, layout, me, tuple(t.stride() for t in memory))
        return [(box, None if _is_whole(cut, memory) else cut) for box, cut in places]

    found = state.cuts(name, memory, cuts)
    return [(box, memory[0] if cut is None else view_of(cut, memory)) for box, cut in found]


def _is_whole(cut: Window, memory: Tensors) -> bool:
    """True for all of the only tensor, as it lies there: no view has to be made."""
    return len(memory) == 1 and not cut.offset and (cut.shape, cut.strides) == (memory[0].shape, memory[0].stride())


@lru_cache(maxsize=4096)
def _places(source: Layout, target: Layout, me: int, strides: tuple[Strides, ...]) -> list[tuple[Box, Window]]:
    """The boxes to write, and where they are. Cached: many tensors share a layout."""
    boxes = Boxes.of([piece.box for piece in target.pieces(me)], target.ndim)
    _, places = places_of(source, me, strides).once(boxes)
    return [(places.boxes.box(at), cut) for at, cut in enumerate(places.windows())]
