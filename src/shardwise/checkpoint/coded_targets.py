"""Loads with quantised tensors on one side or both: which streams fill codes and scales, and what becomes values."""

from __future__ import annotations

from collections.abc import Mapping
from functools import reduce
from math import prod
from typing import NamedTuple

import torch

from shardwise.checkpoint.entry import Entry
from shardwise.checkpoint.quantised import ValueEntry, coded_entries
from shardwise.checkpoint.streams import Sources, Stream, stream_of
from shardwise.errors import CheckpointError
from shardwise.job.casts import PLAIN
from shardwise.job.plan import TensorInfo
from shardwise.job.remap import Link
from shardwise.quantised.moves import ComputedTargets, Dequantising, coded_links
from shardwise.quantised.recognition import QuantisedTensor

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
    sources: Mapping[str, Sources], targets: Infos, coded: Mapping[str, QuantisedTensor], ties: Mapping[str, str]
) -> Loading:
    """From the entries of every target, where quantised tensors are values on both sides."""
    found, tied = Loading({}, ComputedTargets()), dict[str, Sources]()
    for name, several in sources.items():
        quantised = tuple(one for one in several if isinstance(one[1], ValueEntry))
        if name in coded:
            made = _coded(coded[name], several, quantised, targets)
            found.streams.update(made)
            continue
        info = targets[name]
        plain = tuple(one for one in several if one not in quantised)
        if plain or not quantised:
            found.streams[name] = Stream(name, info.shape, info.dtype, plain)
        if quantised and _is_first(name, quantised, ties, tied):
            for link, entry in quantised:
                _add_values(found, link, entry, info)
    return found


def _is_first(name: str, several: Sources, ties: Mapping[str, str], tied: dict[str, Sources]) -> bool:
    """False for a name that shares its memory with an earlier one; refused if that gets other values."""
    group = ties.get(name, name)
    first = tied.setdefault(group, several)
    if [(link[2:], id(entry)) for link, entry in first] != [(link[2:], id(entry)) for link, entry in several]:
        raise CheckpointError(
            f"{first[0][0].target!r} and {name!r} share their memory, but come from different quantised tensors: give "
            f"each its own memory, or leave one of them out"
        )
    return first is several


def _add_values(found: Loading, link: Link, entry: Entry, target: TensorInfo) -> None:
    """The streams of codes and scales that become values."""
    assert isinstance(entry, ValueEntry)
    move = Dequantising.of(entry.quantised, link, target)
    for one, origin in zip(move.links(), entry.origins, strict=True):
        found.streams[one.target] = Stream(one.target, one.target_view.shape, origin.dtype, ((one, origin),))
    found.computed.moves.append(move)


def _coded(one: QuantisedTensor, several: Sources, quantised: Sources, targets: Infos) -> dict[str, Stream]:
    """The streams of the codes and the scales of a target."""
    if quantised and len(quantised) < len(several):
        raise CheckpointError(
            f"{one.value!r} is put together from quantised tensors and from values: load it as values"
        )
    infos = targets[one.codes], targets[one.scales]
    if not quantised:
        made = coded_entries(one, _values(one, several).read, [entry for _, entry in several])
        return {entry.name: stream_of(entry) for entry in made}
    both = list[tuple[tuple[Link, Entry], tuple[Link, Entry]]]()
    for link, entry in quantised:
        assert isinstance(entry, ValueEntry)
        codes, scales = coded_links(link, entry.quantised, one)
        both.append(((codes, entry.origins[0]), (scales, entry.origins[1])))
    return {
        name: Stream(name, info.shape, info.dtype, tuple(pair[at] for pair in both))
        for at, (name, info) in enumerate(zip((one.codes, one.scales), infos, strict=True))
    }


def _values(one: QuantisedTensor, several: Sources) -> Stream:
    """The values that are quantised, in a dtype that loses nothing of them."""
    for _, entry in several:
        if entry.dtype not in PLAIN:
            raise CheckpointError(f"{entry.name!r} is {entry.dtype}: only floating-point values can be quantised")
    cells = sum(prod(link.target_view.shape) for link, _ in several)
    if cells != prod(one.shape):
        raise CheckpointError(
            f"{one.value!r} is quantised, but only {cells} of its {prod(one.shape)} values are given: its padding "
            f'cannot keep what it has. Leave fill="keep" out, or load it as values'
        )
    dtype = reduce(torch.promote_types, (entry.dtype for _, entry in several))
    return Stream(one.value, one.shape, dtype, several)
