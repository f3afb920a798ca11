"""What jobs tell each other of their tensors, as JSON: names, shapes, dtypes, layouts, and which becomes which."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from hashlib import blake2b
from typing import Any

import torch

from shardwise.errors import ExchangeError, RefusedValueError
from shardwise.job.plan import ModelPlan, TensorInfo
from shardwise.job.remap import Link
from shardwise.job.subtensor import Subtensor, ViewDim
from shardwise.job.zeros import zeros_infos
from shardwise.layout import Layout, parse
from shardwise.planning import Hosts

Infos = Mapping[str, TensorInfo]
Kind = tuple[tuple[int, ...], torch.dtype]  # the shape and dtype of a tensor
DTYPES = {str(one).removeprefix("torch."): one for one in vars(torch).values() if isinstance(one, torch.dtype)}


def info_to_json(info: TensorInfo) -> list[object]:
    """A tensor, for a JSON file."""
    return [list(info.shape), str(info.dtype).removeprefix("torch."), str(info.layout), info.device]


def infos_to_json(infos: Infos) -> dict[str, object]:
    """All tensors of a side."""
    return {name: info_to_json(info) for name, info in infos.items()}


def infos_from_json(entry: Any) -> dict[str, TensorInfo]:
    """The inverse of `infos_to_json`."""
    layouts = {text: parse(text) for text in {one[2] for one in entry.values()}}  # few, however many tensors
    return {
        name: TensorInfo(tuple(shape), DTYPES[dtype], layouts[layout], device)
        for name, (shape, dtype, layout, device) in entry.items()
    }


def relabelled(infos: Infos, owners: Sequence[int], first: int = 0) -> dict[str, TensorInfo]:
    """The same tensors, with the owners numbered from `first` on."""
    numbers = {owner: first + row for row, owner in enumerate(owners)}
    layouts = dict[int, Layout]()
    for info in infos.values():
        if id(info.layout) not in layouts:
            layouts[id(info.layout)] = info.layout.relabel({owner: numbers[owner] for owner in info.layout.owners()})
    return {
        name: TensorInfo(info.shape, info.dtype, layouts[id(info.layout)], info.device) for name, info in infos.items()
    }


@dataclass(frozen=True, eq=False)
class Subscription:
    """What a subscriber wants: its tensors, and the cells of the source that become theirs.

    Owners are the rows of the subscriber's ranks. `overflow` and `max_bytes` are those of the job. `sources`: the
    shape and dtype of every source that the links were made for.
    """

    targets: Infos
    links: tuple[Link, ...]
    overflow: str = "refuse"
    max_bytes: int | None = None
    verify: bool = False
    sources: Mapping[str, Kind] = field(default_factory=dict)

    @staticmethod
    def kinds(links: Iterable[Link], infos: Infos) -> dict[str, Kind]:
        """Of the sources of links."""
        names = dict.fromkeys(link.source for link in links if not link.zeros)
        return {name: (infos[name].shape, infos[name].dtype) for name in names}

    def check(self, published: Infos) -> None:
        """Refuse tensors that the links were not made for: wrong cells would be cut out of them, or cast."""
        for name, (shape, dtype) in self.sources.items():
            now = published.get(name)
            if now is None or (now.shape, now.dtype) != (shape, dtype):
                found = "is not published" if now is None else f"has shape {now.shape} and {now.dtype} now"
                raise RefusedValueError(
                    f"{name!r} {found}, but had shape {shape} and {dtype} when this job subscribed: publish the same "
                    f"tensors, or subscribe again"
                )

    def to_json(self) -> dict[str, object]:
        """As it is sent."""
        kinds = {
            name: [list(shape), str(dtype).removeprefix("torch.")] for name, (shape, dtype) in self.sources.items()
        }
        links = [
            [one.source, one.target, _view(one.source_view), _view(one.target_view), one.zeros] for one in self.links
        ]
        options = {"overflow": self.overflow, "max_bytes": self.max_bytes, "verify": self.verify, "sources": kinds}
        return {"targets": infos_to_json(self.targets), "links": links, **options}

    @staticmethod
    def from_json(entry: Any) -> Subscription:
        """The inverse of `to_json`."""
        links = tuple(
            Link(source, target, _subtensor(ours), _subtensor(theirs), bool(zeros))
            for source, target, ours, theirs, zeros in entry["links"]
        )
        options = entry["overflow"], entry["max_bytes"], bool(entry["verify"])
        kinds = {name: (tuple(shape), DTYPES[dtype]) for name, (shape, dtype) in entry["sources"].items()}
        return Subscription(infos_from_json(entry["targets"]), links, *options, kinds)

    @cached_property
    def digest(self) -> str:
        """Equal for subscribers that want the same, under the same layouts."""
        return _digest(self.to_json())

    @cached_property
    def values(self) -> str:
        """Equal for subscribers that want the same values, whatever their layouts."""
        told = self.to_json()
        kinds = {name: one[:2] for name, one in told["targets"].items()}  # type: ignore[attr-defined]
        return _digest({**told, "targets": kinds})

    def passed_on(self) -> Subscription:
        """The same cells of the same tensors, out of those of a subscriber that has the same values."""
        links = [
            one if one.zeros else Link(one.target, one.target, one.target_view, one.target_view) for one in self.links
        ]
        return Subscription(self.targets, tuple(links), self.overflow, self.max_bytes, self.verify)

    def plan(self, sources: Infos, rows: int, hosts: Hosts | None) -> ModelPlan:
        """From sources whose owners are the first `rows`: the owners of the targets follow them."""
        targets = relabelled(self.targets, _owners(self.targets), rows)
        zeros = zeros_infos(self.links, targets)
        return ModelPlan.of(list(self.links), {**sources, **zeros}, targets, max_bytes=self.max_bytes, hosts=hosts)


def _owners(infos: Infos) -> range:
    """Rows count from 0: relabelling by a range keeps each row's number."""
    return range(1 + max((owner for info in infos.values() for owner in info.layout.owners()), default=-1))


def _view(view: Subtensor) -> list[object]:
    return [list(view.start), [list(dim) for dim in view.dims]]


def _subtensor(entry: Any) -> Subtensor:
    start, dims = entry
    return Subtensor(tuple(map(int, start)), tuple(ViewDim(*map(int, dim)) for dim in dims))


def _digest(value: object) -> str:
    return blake2b(json.dumps(value, sort_keys=True).encode(), digest_size=16).hexdigest()


def checked(entry: object, what: str) -> Any:
    """The entry. Raises if there is none."""
    if entry is None:
        raise ExchangeError(f"{what} is missing at the meeting point, or was signed with another key=")
    return entry
