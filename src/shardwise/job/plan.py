"""The plan of a whole model: one plan per link, in buckets. It can be explained, saved, and checked against a file."""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from hashlib import blake2b
from math import prod
from os import PathLike
from pathlib import Path
from typing import Literal

import numpy as np
import torch

from shardwise import report
from shardwise.errors import PlanError
from shardwise.exchange.overflow import may_overflow
from shardwise.geometry import different, either
from shardwise.job.agree import first_difference
from shardwise.job.casts import travels_as
from shardwise.job.names import missing
from shardwise.job.remap import Link
from shardwise.job.subtensor import Subtensor, subtensor_layout
from shardwise.layout import Layout, Mesh
from shardwise.planning import Hosts, Network, Plan, plan, size
from shardwise.report import draw, matrix

GivenHosts = int | Mapping[int, Hashable] | Mesh | None  # owners per host, owner -> host, or a mesh that knows
HostsOption = GivenHosts | Network | Literal["auto"]  # of calls with a group, which knows its hosts
HostsKey = int | tuple[tuple[int, Hashable], ...] | Mesh | Hosts | None  # the same, hashable
SINGLE = "the tensor"  # the name of a tensor that has no other
BUCKET = 2**28  # bytes that a rank stages at a time, by default


@dataclass(frozen=True)
class TensorInfo:
    """What a plan has to know of a tensor."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    layout: Layout
    device: str
    delivered: bool = False  # as a target: its memory is handed over once it is filled


@dataclass(frozen=True)
class PlannedLink:
    """One link, and the plan that carries it out; `dtype` is that of its messages."""

    link: Link
    plan: Plan
    dtype: torch.dtype
    device: str

    @staticmethod
    def of(
        link: Link, source: TensorInfo, target: TensorInfo, max_bytes: int | None, hosts: GivenHosts | Hosts
    ) -> PlannedLink:
        """In rounds only if one round would stage too much."""
        ours, theirs = (
            subtensor_layout(source.layout, link.source_view),
            subtensor_layout(target.layout, link.target_view),
        )
        travels = travels_as(ours, theirs, source.dtype, target.dtype)
        route = _plan(ours, theirs, travels.itemsize, None, hosts)
        limit: object = max_bytes
        if limit is not None and not (isinstance(limit, int) and route.most_bytes <= limit):  # `plan` refuses others
            route = _plan(ours, theirs, travels.itemsize, max_bytes, hosts)
        return PlannedLink(link, route, travels, source.device)

    @cached_property
    def bytes(self) -> int:
        """Of all cells that it moves."""
        return prod(self.plan.target.shape) * self.dtype.itemsize

    def peers(self, owner: int) -> tuple[list[int], list[int]]:
        """Whom an owner sends to and receives from in the first step, in which nothing is relayed."""
        if owner not in self.plan.source and owner not in self.plan.target:
            return [], []
        copies = self.plan.for_owner(owner).copies
        remote = (copies.step == 0) & (copies.source != copies.target)
        sent, received = remote & (copies.source == owner), remote & (copies.target == owner)
        return different(copies.target[sent]).tolist(), different(copies.source[received]).tolist()

    @property
    def in_rounds(self) -> bool:
        """True where it takes several exchanges of messages."""
        return self.plan.max_bytes is not None

    def goes_with(self, other: PlannedLink) -> bool:
        """True if one exchange can take both: on one kind of device, each in one round."""
        return self.device == other.device and not (self.in_rounds or other.in_rounds)


def _plan(source: Layout, target: Layout, itemsize: int, limit: int | None, hosts: GivenHosts | Hosts) -> Plan:
    """One plan object for all tensors that move alike: its properties are computed once."""
    if isinstance(hosts, Hosts):
        hosts = _heeded(source.form.owners.tobytes(), target.form.owners.tobytes(), hosts)
    return _cached_plan(source, target, itemsize, limit, _hosts_key(hosts))


@lru_cache(maxsize=32)
def _heeded(source: bytes, target: bytes, hosts: Hosts) -> Hosts | None:
    """The hosts of these owners, if they matter: a model has thousands of tensors, and few sets of owners."""
    owners = either(np.frombuffer(source, np.int64), np.frombuffer(target, np.int64))
    return Hosts.of(hosts, owners) if hosts.matter(owners) else None


@lru_cache(maxsize=4096)
def _cached_plan(source: Layout, target: Layout, itemsize: int, limit: int | None, hosts: HostsKey) -> Plan:
    named = dict(hosts) if isinstance(hosts, tuple) else hosts
    return plan(source, target, itemsize=itemsize, max_bytes=limit, hosts=named)


@dataclass(frozen=True)
class HostsOfGroup:
    """The hosts of a group, and how many bytes have to move for them to be worth a step."""

    hosts: Hosts
    least: int

    @staticmethod
    def of(option: HostsOption, hosts: Hosts | None) -> GivenHosts | HostsOfGroup:
        """What an option means in a group with these hosts; None where it has one, or one rank on each."""
        option = Network() if isinstance(option, str) and option == "auto" else option
        if isinstance(option, str):
            raise PlanError(
                f'hosts= must be "auto", Network, owners per host, owner -> host, a mesh or None, not {option!r}'
            )
        if not isinstance(option, Network):
            return option
        return None if hosts is None else HostsOfGroup(hosts, option.bytes_of_a_step)

    def for_bytes(self, size: int) -> Hosts | None:
        """None where so many bytes are not worth a step."""
        return self.hosts if size >= self.least else None


def worthy_hosts(hosts: Hosts | None, size: int) -> Hosts | None:
    """The hosts of a group that a plan for so many bytes heeds by default."""
    heeded = HostsOfGroup.of("auto", hosts)
    return heeded.for_bytes(size) if isinstance(heeded, HostsOfGroup) else None


def _hosts_key(hosts: GivenHosts | Hosts) -> HostsKey:
    """The option as a key of the caches."""
    if isinstance(hosts, Mapping):
        return tuple(hosts.items())
    option: object = hosts
    if isinstance(option, list | set):
        raise PlanError(f"hosts must be a number of owners per host, or owner -> host, or a mesh, not {hosts!r}")
    return hosts


def single(
    source: TensorInfo, target: TensorInfo, max_bytes: int | None, hosts: GivenHosts | HostsOfGroup
) -> ModelPlan:
    """The plan of one tensor."""
    if source.shape != target.shape:
        plan(source.layout, target.layout)  # which refuses it, in words
    link = Link(SINGLE, SINGLE, Subtensor.whole(source.shape), Subtensor.whole(target.shape))
    planned = PlannedLink.of(link, source, target, max_bytes, _worth(hosts, [target]))
    return ModelPlan((planned,), {SINGLE: source}, {SINGLE: target}, max_bytes)


def _worth(hosts: GivenHosts | Hosts | HostsOfGroup, targets: Iterable[TensorInfo]) -> GivenHosts | Hosts:
    """The hosts that plans to these targets heed: of all of them or of none, since they travel together."""
    if not isinstance(hosts, HostsOfGroup):
        return hosts
    return hosts.for_bytes(sum(prod(one.shape) * one.dtype.itemsize for one in targets))


@dataclass(frozen=True)
class ModelPlan:
    """How every tensor of a source becomes one of a target."""

    links: tuple[PlannedLink, ...]
    sources: Mapping[str, TensorInfo]
    targets: Mapping[str, TensorInfo]
    max_bytes: int | None = None

    @staticmethod
    def of(
        links: Sequence[Link],
        sources: Mapping[str, TensorInfo],
        targets: Mapping[str, TensorInfo],
        *,
        max_bytes: int | None = None,
        hosts: GivenHosts | Hosts | HostsOfGroup = None,
    ) -> ModelPlan:
        """The same on every rank, from the same values."""
        limit: object = max_bytes
        if limit is not None and not (isinstance(limit, int) and limit > 0):
            raise ValueError(f"max_bytes= must be a whole number of bytes, or None, not {limit!r}")
        planned, heeded = list[PlannedLink](), _worth(hosts, targets.values())
        for link in links:
            try:
                planned.append(PlannedLink.of(link, sources[link.source], targets[link.target], max_bytes, heeded))
            except Exception as error:
                error.add_note(f"while planning {link.source!r} -> {link.target!r}")
                raise
        used = {link.source for link in links}
        return ModelPlan(tuple(planned), {name: t for name, t in sources.items() if name in used}, targets, max_bytes)

    @cached_property
    def overflowing(self) -> tuple[int, ...]:
        """Numbers of the links whose cast may lose a value."""
        dtypes = [(self.sources[e.link.source].dtype, self.targets[e.link.target].dtype) for e in self.links]
        return tuple(at for at, both in enumerate(dtypes) if may_overflow(*both))

    def buckets(self) -> tuple[list[int], ...]:
        """Numbers of links that go in one exchange: as many as may be staged at a time, of one kind of device."""
        return self._buckets

    @cached_property
    def _buckets(self) -> tuple[list[int], ...]:
        limit, buckets, staged, before = self.max_bytes or BUCKET, list[list[int]](), 0, None
        for at, planned in enumerate(self.links):
            staged += before.plan.most_bytes if before else 0  # a plan computes it when asked: a single one is not
            if not before or not before.goes_with(planned) or staged + planned.plan.most_bytes > limit:
                buckets.append([])
                staged = 0
            buckets[-1].append(at)
            before = planned
        return tuple(buckets)

    @cached_property
    def kept(self) -> frozenset[tuple[str, str]]:
        """Pairs of source and target names whose tensor does not change."""
        whole = [planned.link for planned in self.links if planned.plan.source == planned.plan.target]
        return frozenset(
            (link.source, link.target)
            for link in whole
            if self.sources[link.source] == self.targets[link.target]
            and link.source_view == link.target_view == Subtensor.whole(self.targets[link.target].shape)
        )

    def described(self, name: str) -> str:
        """What moves to that target, for errors about a tensor without a name."""
        planned = next(planned for planned in self.links if planned.link.target == name)
        layouts = f"from {planned.plan.source!r} to {planned.plan.target!r}"
        return f"a tensor of shape {self.targets[name].shape} that went {layouts}"

    def __repr__(self) -> str:
        moved, exchanges = size(self.bytes_moved), len(self.buckets())
        return f"ModelPlan({len(self.targets)} tensors, {moved} between ranks, {exchanges} exchanges)"

    @property
    def entries(self) -> tuple[PlannedLink, ...]:
        """An earlier name of `links`."""
        return self.links

    @property
    def lower_bound(self) -> int:
        """No plan can move fewer bytes between ranks."""
        return sum(planned.plan.lower_bound for planned in self.links)

    @property
    def bytes_moved(self) -> int:
        """Between ranks."""
        return sum(planned.plan.bytes_moved for planned in self.links)

    @property
    def bytes_local(self) -> int:
        """Copied within a rank."""
        return sum(planned.plan.bytes_local for planned in self.links)

    @property
    def bytes_across(self) -> int:
        """Bytes moved from one host to another; zero if the plan uses no hosts."""
        return sum(planned.plan.bytes_across for planned in self.links if planned.plan.hosts is not None)

    @property
    def peak_bytes(self) -> int:
        """The most bytes that any rank stages at a time."""
        return max((sum(self.links[at].plan.most_bytes for at in bucket) for bucket in self.buckets()), default=0)

    @cached_property
    def fingerprint(self) -> str:
        """Different for plans that differ in a name, shape, dtype, layout or limit."""
        return blake2b(
            json.dumps(self._contents(lambda layout: layout.fingerprint)).encode(), digest_size=16
        ).hexdigest()

    def explain(self) -> str:
        """A summary in words, with a line for every kind of move."""
        rows = [f"{count:6d} x {words}: {moved} move, as {named}" for count, words, moved, named in self._kinds()]
        return "\n".join([*self._totals(), *rows])

    def _repr_html_(self) -> str:
        """The totals, and a row for every kind of move, in notebooks."""
        from shardwise import report

        rows = ((f"{count:,}", words, moved, named) for count, words, moved, named in self._kinds())
        return report.listed("; ".join(self._totals()), ["tensors", "move", "between ranks", "such as"], rows)

    def _totals(self) -> list[str]:
        buckets, peak = len(self.buckets()), size(self.peak_bytes)
        return [
            f"{len(self.sources)} tensors become {len(self.targets)}, in {buckets} exchange" + "s" * (buckets != 1),
            f"{size(self.bytes_moved)} between ranks, {size(self.bytes_local)} stay; no rank stages more than {peak}",
            *(f"{what} between {hosts}" for hosts, what in self._across().items()),
        ]

    def _kinds(self) -> Iterator[tuple[int, str, str, str]]:
        """How many links of each kind of move, the move, what it brings between ranks, and the name of the first."""
        kinds = dict[str, list[PlannedLink]]()
        for planned in self.links:
            kinds.setdefault(self._in_words(planned), []).append(planned)
        for words, several in kinds.items():
            moved, link = size(sum(planned.plan.bytes_moved for planned in several)), several[0].link
            named = link.source if link.source == link.target else f"{link.source} -> {link.target}"
            yield len(several), words, moved, named

    def _across(self) -> dict[str, str]:
        """What crosses between so many hosts, if the plan heeds any."""
        hosts = max((planned.plan.hosts.count for planned in self.links if planned.plan.hosts), default=0)
        return {f"{hosts} hosts": f"{size(self.bytes_across)} of them"} if hosts else {}

    def _in_words(self, planned: PlannedLink) -> str:
        words = list[str]()
        for name, view, tensors in (
            (planned.link.source, planned.link.source_view, self.sources),
            (planned.link.target, planned.link.target_view, self.targets),
        ):
            whole, tensor = "" if view.is_whole(tensors[name].shape) else "a part of ", tensors[name]
            words.append(f"{whole}{tensor.layout.brief()} {str(tensor.dtype).removeprefix('torch.')}")
        return " -> ".join(words)

    def draw(self, name: str | None = None) -> str:
        """Draw a target, its sources and the traffic between ranks; without a name, the traffic of all tensors."""
        if name is None:
            return matrix(*(planned.plan for planned in self.links))
        if name not in self.targets:
            raise PlanError(missing("the target has no", [name], self.targets))
        mine = [planned for planned in self.links if planned.link.target == name]
        pictures = [f"{link.source}\n{draw(self.sources[link.source].layout)}" for link in (e.link for e in mine)]
        whole = f"{name}\n{draw(self.targets[name].layout)}"
        return "\n\n".join([*pictures, f"-> {whole}", *([matrix(*(planned.plan for planned in mine))] if mine else [])])

    def html(self, path: str | PathLike[str], *, title: str | None = None) -> Path:
        """Write an HTML page: all tensors by size, what moves, and a picture of each. Returns its path."""
        buckets, peak = len(self.buckets()), size(self.peak_bytes)
        facts = {"exchanges": f"{buckets:,}", "a rank stages at most": peak}
        facts |= {f"between {hosts}": what for hosts, what in self._across().items()}
        return report.write(path, report.page(map(self._row, self.links), title=title, facts=facts))

    def _row(self, planned: PlannedLink) -> report.Row:
        link, target = planned.link, self.targets[planned.link.target]
        part = "" if link.target_view.is_whole(target.shape) else f" {link.target_view}"
        note = f"from {link.source}" if link.source != link.target else ""
        return report.Row(
            f"{link.target}{part}", planned.plan, dtype=str(target.dtype).removeprefix("torch."), note=note
        )

    def contents(self) -> dict[str, object]:
        """All that it depends on, by name."""
        return self._contents(str)

    def _contents(self, shown: Callable[[Layout], str]) -> dict[str, object]:
        def describe(tensors: Mapping[str, TensorInfo]) -> dict[str, object]:
            return {
                name: {"shape": list(t.shape), "dtype": str(t.dtype), "layout": shown(t.layout)}
                for name, t in tensors.items()
            }

        links = defaultdict[str, dict[str, object]](dict)
        for link in (planned.link for planned in self.links):
            links[link.target][link.source] = [_view(link.source_view), _view(link.target_view)]
        hosts = sorted(map(str, {planned.plan.hosts for planned in self.links}))
        parts = {"sources": describe(self.sources), "targets": describe(self.targets), "links": links}
        return {**parts, "max_bytes": self.max_bytes, "hosts": hosts}

    def to_json(self) -> str:
        """The text of a plan file."""
        figures = {"bytes_moved": self.bytes_moved, "peak_bytes": self.peak_bytes}
        return json.dumps({"shardwise_model_plan": 1, **self.contents(), **figures}, indent=1)

    def check(self, text: str) -> None:
        """Raise a PlanError with the first difference if `text` is not the file of this plan."""
        try:
            document = json.loads(text)
        except (TypeError, ValueError) as error:
            raise PlanError(f"this is not a plan file: {error}") from None
        if not isinstance(document, dict) or document.get("shardwise_model_plan") != 1:
            raise PlanError("this is not the plan file of a model")
        current = json.loads(self.to_json())
        difference = first_difference(document, current, "in the file", "here")
        if difference:
            raise PlanError(f"the plan file is of another model: {difference}")


def _view(view: Subtensor) -> list[list[int]]:
    """Its region and the dims of the whole; for one that is not a box also sizes and steps."""
    strides = [] if view.is_box else [[dim.size for dim in view.dims], [dim.step for dim in view.dims]]
    return [list(view.region.lo), list(view.region.hi), list(view.order), *strides]
