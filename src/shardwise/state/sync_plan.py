"""What the ranks of a sync find out before it runs: the tensors of both sides, and the plan from one to the other."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial

import torch

from shardwise.containers.description import Descriptions, describe_all, tensors_in
from shardwise.job.casts import Change, TargetCasts, check_changes
from shardwise.job.names import Rename
from shardwise.job.plan import HostsOfGroup, HostsOption, ModelPlan
from shardwise.job.remap import Remap, check_kept, links
from shardwise.job.session import check_owners
from shardwise.job.zeros import zeros_infos
from shardwise.quantized.moves import check_used, value_shapes
from shardwise.quantized.recognition import Quantized, recognize
from shardwise.quantized.sides import CodedLinks
from shardwise.state.memory_checks import Infos
from shardwise.state.traverse import StateDict, dotted, flatten_state_dict
from shardwise.transports import GroupTransport


def tensors_by_name(state_dict: StateDict) -> dict[str, torch.Tensor | None]:
    """The tensors of a state dict by name; None for a tensor of which this rank holds nothing."""
    flat, paths = flatten_state_dict(state_dict)
    tensors = tensors_in(flat)
    several = next((dotted(paths[name]) for name in tensors if dotted(paths[name]) != name), None)
    if several is not None:  # the order of the dicts would decide which of them has the name
        raise ValueError(f"two leaves of a state dict are both called {several!r}: give one of them another key")
    return tensors


Values = tuple[Mapping[str, object], Mapping[str, object]]


def describe_sides(
    transport: GroupTransport, source: StateDict | None, target: StateDict | None
) -> tuple[Values, tuple[Descriptions | None, Descriptions | None]]:
    """This rank's tensors of both sides, and their descriptions."""
    sides = [None if given is None else tensors_by_name(given) for given in (source, target)]
    known = [None if side is None else describe_all(side, transport) for side in sides]
    return (sides[0] or {}, sides[1] or {}), (known[0], known[1])


def plan_sync(
    transport: GroupTransport,
    known: tuple[Infos, Infos],
    rename: Rename,
    rules: tuple[Sequence[Quantized], Sequence[Remap]],
    cast: TargetCasts,
    strict: bool,
    max_bytes: int | None,
    hosts: HostsOption,
) -> tuple[ModelPlan, CodedLinks]:
    """The plan of a sync between ranks of one transport."""
    for side, tensors in zip(("source", "target"), known, strict=True):
        check_owners(transport.owners, {f"{name!r} of the {side},": tensor.layout for name, tensor in tensors.items()})
    coded, sources, targets = coded_links_between(known, rename, rules, cast, strict=strict)
    heeded = HostsOfGroup.of(hosts, transport.hosts)
    return ModelPlan.of(coded.links, sources, targets, max_bytes=max_bytes, hosts=heeded), coded


def coded_links_between(
    known: tuple[Infos, Infos],
    rename: Rename,
    rules: tuple[Sequence[Quantized], Sequence[Remap]],
    cast: TargetCasts,
    *,
    strict: bool,
) -> tuple[CodedLinks, Infos, Infos]:
    """Which source becomes which target, and the tensors of both sides that are moved. Refuses what does not fit."""
    quantized, regrouped = rules
    by_side = recognize(known[0], quantized), recognize(known[1], quantized)
    for rule in quantized:
        check_used([rule], *(recognize(side, [rule]) for side in known))
    given, wanted = (value_shapes(side, tensors) for side, tensors in zip(known, by_side, strict=True))
    planned = links(given, wanted, rename=rename, remap=regrouped, strict=strict)
    check_kept(planned, wanted, {name for name, one in known[1].items() if one.delivered})
    cast.check_used(known[1])
    coded = CodedLinks.of(planned, known, by_side)
    targets = coded.targets(known[1])
    sources = coded.sources(known[0]) | zeros_infos(coded.links, targets)
    pairs = ((link.source, link.target) for link in coded.links)
    changes = [Change(one, other, sources[one].dtype, targets[other].dtype) for one, other in pairs]
    check_changes(changes, partial(cast.check, sources=sources, targets=targets))
    return coded, sources, targets
