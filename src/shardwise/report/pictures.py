"""What a page has to know of a layout, of a plan, and of all plans together: plain numbers and strings."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import Any, NamedTuple, TypedDict

import numpy as np

from shardwise.geometry import Ints, different, ints, totals
from shardwise.layout import Layout
from shardwise.planning import Plan, redistributed
from shardwise.report.groups import Groups
from shardwise.report.tiles import tiles

MOST_STAGES = 64


class Limits(NamedTuple):
    """How much of a picture a page holds: shared by all of its pictures, so that it stays small."""

    groups: int = 64
    tiles: int = 1024
    copies: int = 8192

    @staticmethod
    def of(pictures: int) -> Limits:
        """The limits of each of so many pictures."""
        share = max(1, pictures // 4)
        return Limits(64 if pictures <= 40 else 8, max(16, 1024 // share), 8192 // share)


Picture = dict[str, Any]  # JSON for the scripts of a page


class Figures(TypedDict):
    """The totals of a plan."""

    moved: int
    local: int
    bound: int | None
    messages: int
    rounds: int
    peak: int
    limit: int | None
    balance: float
    seconds: float
    hosts: int | None
    across: int
    redistribute: list[int | None]
    steps: list[list[str]]
    why_not: str | None
    reduces: str


def picture(shown: Layout | Plan, limits: Limits) -> Picture:
    """The picture of a layout or of a plan."""
    if isinstance(shown, Plan):
        return _of_plan(shown, limits)
    groups = Groups.of(shown.form.owners, limits.groups)
    return {"groups": _named(groups), "source": tiles(shown, groups, limits.tiles)}


def _of_plan(plan: Plan, limits: Limits) -> Picture:
    groups = Groups.of(plan.owners, limits.groups)
    source, target, size = plan.traffic.flows()
    sent, received, kept = by_owner(plan)
    return {
        "groups": _named(groups),
        "source": tiles(plan.source, groups, limits.tiles),
        "target": tiles(plan.target, groups, limits.tiles),
        "itemsize": plan.itemsize,
        "copies": _copies(plan, groups, limits.copies),
        "flows": _flows(groups, source, target, size),
        "bars": {
            "sent": groups.add(sent),
            "received": groups.add(received),
            "kept": groups.add(kept),
            "peak": groups.most(plan.traffic.peaks()),
        },
        "stages": _stages(plan),
        "totals": figures(plan),
    }


def by_owner(plan: Plan) -> tuple[Ints, Ints, Ints]:
    """Bytes that each owner sends, receives and keeps, in the order of `plan.owners`."""
    traffic = plan.traffic
    count = len(traffic.owners)
    sent, received = (totals(traffic.size, side, count) for side in (traffic.source, traffic.target))
    return sent, received, ints(list(plan.kept.values()))


def figures(plan: Plan) -> Figures:
    """The totals of a plan, against the least that any could move and against redistribute's."""
    known = plan.carrying or plan.target.terms == 1  # else a plan that reduces in another order could do with less
    transports = [redistributed(plan.source, plan.target, plan.itemsize, all_to_all=gpu) for gpu in (True, False)]
    return {
        "moved": plan.bytes_moved,
        "local": plan.bytes_local,
        "bound": plan.lower_bound if known else None,
        "messages": plan.messages,
        "rounds": plan.rounds,
        "peak": plan.peak_bytes,
        "limit": plan.max_bytes,
        "balance": plan.balance,
        "seconds": plan.estimate(),
        "hosts": None if plan.hosts is None else plan.hosts.count,
        "across": plan.bytes_across,
        "redistribute": [transport.bytes for transport in transports],
        "steps": [list(transport.steps) for transport in transports],
        "why_not": transports[0].why_not,
        "reduces": f"{plan.source.op} of {plan.source.terms} terms" if plan.reducing else "",
    }


def _named(groups: Groups) -> Picture:
    return {"labels": groups.labels(), "sizes": groups.sizes(), "owners": len(groups.owners)}


def _copies(plan: Plan, groups: Groups, most: int) -> Picture:
    """Rows lo..., hi..., source, target, step: whole messages, not cut into rounds. None where they are too many."""
    if not groups.single:
        return {"total": len(plan.copies), "rows": None}
    whole = replace(plan, max_bytes=None).copies if plan.max_bytes else plan.copies
    if len(whole) > most:
        return {"total": len(whole), "rows": None}
    sides = [groups.of_owners(whole.source), groups.of_owners(whole.target), whole.step]
    return {"total": len(whole), "rows": np.concatenate([*whole.boxes, np.stack(sides, axis=1)], axis=1).tolist()}


def _flows(groups: Groups, source: Ints, target: Ints, size: Ints) -> list[list[int]]:
    """[group that sends, group that receives, bytes] where that is something; the sides are places of owners."""
    count = groups.count
    sums = totals(size, source // groups.length * count + target // groups.length, count * count)
    at = np.flatnonzero(sums)
    return np.stack([at // max(count, 1), at % max(count, 1), sums[at]], axis=1).tolist()


def _stages(plan: Plan) -> list[list[float]]:
    """[first round, last round, bytes, messages, seconds] in their order; neighbours together where they are many."""
    traffic = plan.traffic
    count = traffic.stages
    size = totals(traffic.size, traffic.stage, count)
    messages = np.bincount(traffic.stage, minlength=count)
    if not count:
        return []
    width = -(-count // MOST_STAGES)
    first = np.arange(0, count, width)
    sums = [np.add.reduceat(column, first).tolist() for column in (size, messages, traffic.seconds())]
    ends = (first + 1).tolist(), np.minimum(first + width, count).tolist()
    return [list(row) for row in zip(*ends, *sums, strict=True)]


def together(known: Sequence[tuple[Plan, int, Picture]], limits: Limits) -> Picture:
    """Plans as one picture: who sends how much to whom, each plan (with its own picture) as often as it occurs."""
    owners = different(np.concatenate([ints(plan.owners) for plan, _, _ in known]))
    groups = Groups.of(owners, limits.groups)
    sums = np.zeros((3, len(owners)), dtype=np.int64)
    flows = list[tuple[Ints, Ints, Ints]]()
    for plan, times, _ in known:
        place = owners.searchsorted(ints(plan.owners))
        sums[:, place] += times * np.stack(by_owner(plan))
        source, target, size = plan.traffic.flows()
        flows.append((place[source], place[target], size * times))
    sides = [np.concatenate(side) for side in zip(*flows, strict=True)]
    bars = {name: groups.add(row) for name, row in zip(("sent", "received", "kept"), sums, strict=True)}
    return {
        "groups": _named(groups),
        "flows": _flows(groups, *(ints(side) for side in sides)),
        "bars": bars,
        "totals": _added([(shown["totals"], times) for _, times, shown in known]),
    }


def _added(figures: Sequence[tuple[Figures, int]]) -> Picture:
    """Totals of several plans; where one does not know a figure, the sum is not known either."""

    def total(values: Iterable[tuple[int | None, int]]) -> int | None:
        known = [(value, times) for value, times in values]
        return None if any(v is None for v, _ in known) else sum(v * times for v, times in known if v is not None)

    sums = {
        name: total((one[name], times) for one, times in figures) for name in ("moved", "local", "bound", "messages")
    }
    transports = [total((one["redistribute"][way], times) for one, times in figures) for way in (0, 1)]
    refused = [(one["why_not"], times) for one, times in figures if one["why_not"]]
    why_not = {"why_not": refused[0][0], "refused": sum(times for _, times in refused)} if refused else {}
    return {**sums, "redistribute": transports, **why_not}
