"""The plan for a whole model: one for every link, in buckets; it can be explained, saved and held against a file."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from hashlib import blake2b
from math import prod
from typing import Any

import torch

from shardwise.errors import PlanError
from shardwise.exchange.reduce import check as check_reduction
from shardwise.layout import Layout
from shardwise.planning import Plan, plan
from shardwise.state.links import Link
from shardwise.state.view import laid_out

BUCKET = 2**26  # bytes that a rank stages at a time, unless told


@dataclass(frozen=True)
class Tensor:
    """What a plan has to know of a tensor."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    layout: Layout
    device: str


@dataclass(frozen=True)
class Entry:
    """One link, and the plan that carries it out; `dtype` is that of its messages."""

    link: Link
    plan: Plan
    dtype: torch.dtype
    device: str

    @staticmethod
    def of(link: Link, source: Tensor, target: Tensor, max_bytes: int | None, hosts: Any) -> Entry:
        """Cast before it travels where that is shorter, unless terms are reduced."""
        ours, theirs = laid_out(source.layout, link.source_view), laid_out(target.layout, link.target_view)
        reducing = _planned(ours, theirs).reducing
        if reducing:
            check_reduction(source.layout.op or "", source.dtype)
        if source.dtype.is_complex and not target.dtype.is_complex:
            raise ValueError(f"{source.dtype} cannot be cast to {target.dtype}: the imaginary part would be lost")
        shorter = target.dtype.itemsize < source.dtype.itemsize and not reducing
        travels = target.dtype if shorter else source.dtype
        limit = max_bytes if max_bytes and _staged(ours, theirs, travels.itemsize) > max_bytes else None
        made = _planned(ours, theirs, travels.itemsize, limit, hosts)
        return Entry(link, made, travels, source.device)

    @property
    def bytes(self) -> int:
        """Of all cells that it moves."""
        return prod(self.plan.target.shape) * self.dtype.itemsize

    @property
    def staged(self) -> int:
        """No rank stages more bytes for it, whatever stays where it is."""
        return self.plan.max_bytes or _staged(self.plan.source, self.plan.target, self.dtype.itemsize)


def _planned(source: Layout, target: Layout, itemsize: int = 4, limit: int | None = None, hosts: Any = None) -> Plan:
    """One for all tensors that move alike: what is found out about it is found out once."""
    if isinstance(hosts, Mapping):
        hosts = tuple(hosts.items())
    return _kept(source, target, itemsize, limit, hosts)


@lru_cache(maxsize=4096)
def _kept(source: Layout, target: Layout, itemsize: int, limit: int | None, hosts: Any) -> Plan:
    named = dict(hosts) if isinstance(hosts, tuple) else hosts
    return plan(source, target, itemsize=itemsize, max_bytes=limit, hosts=named)


@lru_cache(maxsize=4096)
def _staged(source: Layout, target: Layout, itemsize: int) -> int:
    return (_most(source) + _most(target)) * itemsize


@lru_cache(maxsize=4096)
def _most(layout: Layout) -> int:
    """The most cells that an owner has."""
    return max(sum(map(prod, layout.local_shapes(owner))) for owner in layout.owners())


@dataclass(frozen=True)
class ModelPlan:
    """How every tensor of a source becomes one of a target."""

    entries: tuple[Entry, ...]
    sources: Mapping[str, Tensor]
    targets: Mapping[str, Tensor]
    max_bytes: int | None = None

    @staticmethod
    def of(
        found: Sequence[Link],
        sources: Mapping[str, Tensor],
        targets: Mapping[str, Tensor],
        *,
        max_bytes: int | None = None,
        hosts: Any = None,
    ) -> ModelPlan:
        """The same on every rank, from the same values."""
        entries = list[Entry]()
        for link in found:
            try:
                entries.append(Entry.of(link, sources[link.source], targets[link.target], max_bytes, hosts))
            except Exception as error:
                error.add_note(f"while planning {link.source!r} -> {link.target!r}")
                raise
        return ModelPlan(tuple(entries), sources, targets, max_bytes)

    def buckets(self) -> Iterator[list[int]]:
        """Numbers of entries that go in one exchange: as many as may be staged at a time, of one kind of device."""
        limit, room, bucket = self.max_bytes or BUCKET, 0, list[int]()
        for at, entry in enumerate(self.entries):
            full = room + entry.staged > limit or entry.plan.max_bytes is not None
            if bucket and (full or self.entries[bucket[0]].device != entry.device or self._rounds(bucket[-1])):
                yield bucket
                room, bucket = 0, []
            bucket.append(at)
            room += entry.staged
        if bucket:
            yield bucket

    def _rounds(self, at: int) -> bool:
        return self.entries[at].plan.max_bytes is not None

    @property
    def bytes_moved(self) -> int:
        """Between ranks."""
        return sum(entry.plan.bytes_moved for entry in self.entries)

    @property
    def bytes_local(self) -> int:
        """Copied where they are."""
        return sum(entry.plan.bytes_local for entry in self.entries)

    @property
    def peak_bytes(self) -> int:
        """No rank stages more than this at a time."""
        return max((sum(self.entries[at].staged for at in bucket) for bucket in self.buckets()), default=0)

    @cached_property
    def fingerprint(self) -> str:
        """Tells apart what differs in any name, shape, dtype, layout or limit."""
        return blake2b(json.dumps(self._listed()).encode(), digest_size=16).hexdigest()

    def explain(self) -> str:
        """In words, and a line for every kind of move."""
        kinds = dict[tuple[str, str, str], list[Entry]]()
        for entry in self.entries:
            key = entry.plan.source.brief(), entry.plan.target.brief(), str(entry.dtype).removeprefix("torch.")
            kinds.setdefault(key, []).append(entry)
        buckets = list(self.buckets())
        lines = [
            f"{len(self.sources)} tensors become {len(self.targets)}, in {len(buckets)} exchange"
            + "s" * (len(buckets) != 1),
            f"{_size(self.bytes_moved)} between ranks, {_size(self.bytes_local)} stay; "
            f"no rank stages more than {_size(self.peak_bytes)}",
        ]
        for (source, target, dtype), entries in kinds.items():
            moved = sum(entry.plan.bytes_moved for entry in entries)
            lines.append(
                f"{len(entries):6d} x {source} -> {target}, {dtype}: {_size(moved)}, as {entries[0].link.target}"
            )
        return "\n".join(lines)

    def _listed(self) -> dict[str, Any]:
        def told(tensors: Mapping[str, Tensor]) -> dict[str, Any]:
            return {
                name: {"shape": list(t.shape), "dtype": str(t.dtype), "layout": str(t.layout)}
                for name, t in tensors.items()
            }

        links = [
            [link.source, link.target, *(_view(view) for view in (link.source_view, link.target_view))]
            for link in (entry.link for entry in self.entries)
        ]
        hosts = sorted({str(entry.plan.hosts) for entry in self.entries})
        parts = {"sources": told(self.sources), "targets": told(self.targets), "links": links}
        return {**parts, "max_bytes": self.max_bytes, "hosts": hosts}

    def to_json(self) -> str:
        """As a file."""
        figures = {"bytes_moved": self.bytes_moved, "peak_bytes": self.peak_bytes}
        return json.dumps({"shardwise_model_plan": 1, **self._listed(), **figures}, indent=1)

    def check(self, text: str) -> None:
        """Raise a PlanError that says the first difference, unless the file is of this plan."""
        try:
            said = json.loads(text)
        except (TypeError, ValueError) as error:
            raise PlanError(f"this is not a plan file: {error}") from None
        if not isinstance(said, dict) or said.get("shardwise_model_plan") != 1:
            raise PlanError("this is not the plan file of a model")
        found = json.loads(self.to_json())
        for part in found:
            difference = _difference(part, said.get(part), found[part])
            if difference:
                raise PlanError(f"the plan file is of another model: {difference}")


def _difference(where: str, said: Any, found: Any) -> str | None:
    if isinstance(said, dict) and isinstance(found, dict):
        for name in [*found, *(name for name in said if name not in found)]:
            if name not in said or name not in found:
                return f"{where} {name!r} is only in the {'model' if name in found else 'file'}"
            difference = _difference(f"{where} {name!r}", said[name], found[name])
            if difference:
                return difference
        return None
    return None if said == found else f"{where} is {said} in the file, but {found} here"


def _view(view: Any) -> list[list[int]]:
    return [list(view.region.lo), list(view.region.hi), list(view.order)]


def _size(count: int) -> str:
    """
    >>> _size(3 * 2**20), _size(10)
    ('3.0 MiB', '10 B')
    """
    for scale, unit in ((2**30, "GiB"), (2**20, "MiB"), (2**10, "KiB")):
        if count >= scale:
            return f"{count / scale:.1f} {unit}"
    return f"{count} B"
