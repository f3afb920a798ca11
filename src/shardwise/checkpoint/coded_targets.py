"""Loads with quantized tensors on one side or both: which streams fill codes and scales, and what becomes values."""

from __future__ import annotations

from collections.abc import Mapping
from functools import reduce
from math import prod
from typing import NamedTuple

import torch

from shardwise.checkpoint.entry import Entry
from shardwise.checkpoint.quantized import ValueEntry, coded_entries
from shardwise.checkpoint.streams import Sources, Stream, stream_of
from shardwise.errors import CheckpointError
from shardwise.job.casts import PLAIN
from shardwise.job.plan import TensorInfo
from shardwise.job.remap import Link
from shardwise.quantized.moves import ComputedTargets, Dequantizing, coded_links
from shardwise.quantized.recognition import QuantizedTensor

Infos = Mapping[str, TensorInfo]


class Loading(NamedTuple):
    """A load as streams of tensors that are moved as they are, and values that are computed from some of these."""

    streams: dict[str, Stream]
    computed: ComputedTargets

    def infos(self, targets: Infos) -> dict[str, TensorInfo]:
        """What all ranks know of the targets: also those of codes and scales that become values."""
        found = {name: targets[name] for name in (*self.streams, *self.computed.names) if name in targets}
        return {**found, **self.computed.infos()}


def loading(
    sources: Mapping[str, Sources], targets: Infos, coded: Mapping[str, QuantizedTensor], ties: Mapping[str, str]
) -> Loading:
    """From the entries of every target, where quantized tensors are values on both sides."""
    found, tied = Loading({}, ComputedTargets()), dict[str, Sources]()
    for name, several in sources.items():
        quantized = tuple(one for one in several if isinstance(one[1], ValueEntry))
        if name in coded:
            made = _coded(coded[name], several, quantized, targets)
            found.streams.update(made)
            continue
        info = targets[name]
        plain = tuple(one for one in several if one not in quantized)
        if plain or not quantized:
            found.streams[name] = Stream(name, info.shape, info.dtype, plain)
        if quantized and _is_first(name, quantized, ties, tied):
            for link, entry in quantized:
                _add_values(found, link, entry, info)
    return found


def _is_first(name: str, several: Sources, ties: Mapping[str, str], tied: dict[str, Sources]) -> bool:
    """False for a name that shares its memory with an earlier one; refused if that gets other values."""
    group = ties.get(name, name)
    first = tied.setdefault(group, several)
    if [(link[2:], id(entry)) for link, entry in first] != [(link[2:], id(entry)) for link, entry in several]:
        raise CheckpointError(
            f"{first[0][0].target!r} and {name!r} share their memory, but come from different quantized tensors: give "
            f"each its own memory, or leave one of them out"
        )
    return first is several


def _add_values(found: Loading, link: Link, entry: Entry, target: TensorInfo) -> None:
    """The streams of codes and scales that become values."""
    assert isinstance(entry, ValueEntry)
    move = Dequantizing.of(entry.quantized, link, target)
    for one, origin in zip(move.links(), entry.origins, strict=True):
        found.streams[one.target] = Stream(one.target, one.target_view.shape, origin.dtype, ((one, origin),))
    found.computed.moves.append(move)


def _coded(one: QuantizedTensor, several: Sources, quantized: Sources, targets: Infos) -> dict[str, Stream]:
    """The streams of the codes and the scales of a target."""
    if quantized and len(quantized) < len(several):
        raise CheckpointError(
            f"{one.value!r} is put together from quantized tensors and from values: load it as values"
        )
    infos = targets[one.codes], targets[one.scales]
    if not quantized:
        made = coded_entries(one, _values(one, several).read, [entry for _, entry in several])
        return {entry.name: stream_of(entry) for entry in made}
    both = list[tuple[tuple[Link, Entry], tuple[Link, Entry]]]()
    for link, entry in quantized:
        assert isinstance(entry, ValueEntry)
        codes, scales = coded_links(link, entry.quantized, one)
        both.append(((codes, entry.origins[0]), (scales, entry.origins[1])))
    return {
        name: Stream(name, info.shape, info.dtype, tuple(pair[at] for pair in both))
        for at, (name, info) in enumerate(zip((one.codes, one.scales), infos, strict=True))
    }


def _values(one: QuantizedTensor, several: Sources) -> Stream:
    """The values that are quantized, in a dtype that loses nothing of them."""
    for _, entry in several:
        if entry.dtype not in PLAIN:
            raise CheckpointError(f"{entry.name!r} is {entry.dtype}: only floating-point values can be quantized")
    cells = sum(prod(link.target_view.shape) for link, _ in several)
    if cells != prod(one.shape):
        raise CheckpointError(
            f"{one.value!r} is quantized, but only {cells} of its {prod(one.shape)} values are given: its padding "
            f'cannot keep what it has. Leave fill="keep" out, or load it as values'
        )
    dtype = reduce(torch.promote_types, (entry.dtype for _, entry in several))
    return Stream(one.value, one.shape, dtype, several)
