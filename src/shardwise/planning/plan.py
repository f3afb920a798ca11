"""Plan: the copies that turn one layout into another, and what they cost."""

from __future__ import annotations

from collections.abc import Hashable, Mapping
from dataclasses import dataclass, field
from functools import cached_property, lru_cache
from math import prod
from operator import index
from os import PathLike
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from shardwise.errors import PlanError
from shardwise.geometry import Boxes, Ints, exact_sum, ints, spread, totals
from shardwise.layout import Grid, Holders, Layout, Mesh, parse
from shardwise.planning.choose import Among, Need, deliver, reduce
from shardwise.planning.copies import Copies
from shardwise.planning.explain import explain
from shardwise.planning.file import from_json, to_json
from shardwise.planning.hosts import Hosts
from shardwise.planning.regions import Regions, all_regions, count_regions, owner_regions
from shardwise.planning.relabel import fewest_bytes
from shardwise.planning.rounds import in_rounds, loads, rounds_of_steps
from shardwise.planning.traffic import Traffic
from shardwise.planning.verify import verify

if TYPE_CHECKING:
    from matplotlib.figure import Figure

NEUTRAL = {"sum": 0, "product": 1, "bxor": 0}  # of these a full value becomes one term and neutral ones; else all terms


@dataclass(frozen=True)
class Part:
    """What one owner does: its copies, sends and receives among them.

    `fill` is the value that its target buffer starts with where no copy brings one (a term of a partial target).
    """

    owner: int
    copies: Copies
    fill: int | None = None

    @property
    def sends(self) -> Copies:
        """To others."""
        return self.copies.take((self.copies.source == self.owner) & self.copies.remote)

    @property
    def receives(self) -> Copies:
        """From others."""
        return self.copies.take((self.copies.target == self.owner) & self.copies.remote)

    @property
    def local(self) -> Copies:
        """What it already holds."""
        return self.copies.take(~self.copies.remote)


@dataclass(frozen=True)
class Plan:
    """The copies between two layouts, in steps and rounds; a value that is computed when it is looked at.

    >>> p = plan(Layout.chunk((8, 6), 0, owners=2), Layout.chunk((8, 6), 1, owners=2), itemsize=4)
    >>> p.bytes_moved, p.bytes_local, p.messages
    (96, 96, 2)
    >>> p.for_owner(0).sends[0]
    Copy(source=0, target=1, box=Box(lo=(0, 3), hi=(4, 6)), term=0, step=0, round=0)
    """

    source: Layout
    target: Layout
    itemsize: int = 4
    max_bytes: int | None = None
    hosts: Hosts | None = field(default=None, repr=False)

    def __post_init__(self) -> None:
        if self.source.shape != self.target.shape:
            here, there = self.source.shape, self.target.shape
            raise PlanError(f"a plan needs one shape, but the source has {here} and the target {there}")
        if self.max_bytes is not None and not self._rounds:  # made now, so that a limit that cannot be kept is refused
            raise PlanError("a plan takes at least one step")

    # --- copies ------------------------------------------------------------------------------------------------------

    def most_copies(self) -> int:
        """How many copies there can be at most, found without making them."""
        takers = self._takers.most * (self.source.terms if self.carrying or self.reducing else 1)
        return count_regions(self.source, self.target) * max(takers, 1)

    @cached_property
    def copies(self) -> Copies:
        """All copies of all owners, by step, round and place."""
        regions = all_regions(self.source, self.target)
        return self._chosen(*self._need(regions), Among(self.hosts))

    def for_owner(self, owner: int) -> Part:
        """The copies of one owner, at the cost of its own: the same as in `copies`, without looking at all of them."""
        try:
            number = index(owner)
        except TypeError:
            raise PlanError(f"owner {owner!r} has no part in a plan: owners are whole numbers") from None
        return _part(self.source, self.target, self.itemsize, self.max_bytes, self.hosts, number)

    def _copies_of(self, owner: int) -> Copies:
        """What `copies` has of one owner."""
        regions = owner_regions(self.source, self.target, owner)
        copies = self._chosen(*self._need(regions, owner), Among(self.hosts, owner))
        return copies.take((copies.source == owner) | (copies.target == owner))

    def _chosen(self, boxes: Boxes, row: Ints, need: Need, among: Among) -> Copies:
        holders = self.source.form.holders
        if self.reducing:
            turn = ints(np.searchsorted(self.target.form.owners, need.target))
            copies = Copies.concat(reduce(boxes, row, need, holders, among, turn))
        else:
            copies = Copies.concat(deliver(boxes, row, need, holders, among))
        grids = isinstance(self.source.form, Grid) and isinstance(self.target.form, Grid)
        if not grids or self.reducing or self.hosts is not None:
            copies = copies.merged()  # else grids cross in the largest boxes that there are
        copies = copies.in_order(self.source.shape)
        if self.max_bytes is None:
            return copies
        return in_rounds(copies, self._rounds, reducing=self.reducing).in_order(self.source.shape)

    def _need(self, regions: Regions, only: int | None = None) -> tuple[Boxes, Ints, Need]:
        """The boxes to deliver, for each its row of holders (of its first term), and who needs it."""
        terms, takers = self.source.terms, self._takers
        if prod(self.source.shape) * takers.most * terms * self.itemsize >= 2**62:
            raise PlanError(f"the plan from {self.source!r} to {self.target!r} moves 2**62 bytes or more: is it meant?")
        if self.carrying and terms > 1:  # every term is a region of its own
            region, term = np.divmod(np.arange(regions.boxes.count * terms), terms)
            regions = regions.take(region)
            row = regions.source * terms + term
            return regions.boxes, row, self._takers_of(regions.target * terms + term, row, takers, only)
        row = regions.source * terms
        return regions.boxes, row, self._takers_of(regions.target, row, takers, only)

    @cached_property
    def _takers(self) -> Holders:
        """Who is to get a value: a row for every row of the target's holders, or for every block where the value is
        whole (of a partial target then its first term, or all of them: see NEUTRAL)."""
        holders = self.target.form.holders
        if self.carrying or holders.terms == 1:
            return holders
        first, last = holders.edges[: -1 : holders.terms], holders.edges[holders.terms :: holders.terms]
        if self.target.op in NEUTRAL:
            last = holders.edges[1 :: holders.terms]
        row, nth = spread(last - first)
        owners = holders.owners[first[row] + nth]
        return Holders.of(last - first, owners[np.lexsort((owners, row))])

    def _takers_of(self, target: Ints, row: Ints, takers: Holders, only: int | None) -> Need:
        """Everybody who needs a region; for one owner only those who bear on what it sends or receives.

        These are all takers of what it holds, and of what has a choice of holders; of the rest only the owner itself
        and, with hosts, its neighbours.
        """
        holders = self.source.form.holders
        if only is None or self.reducing or takers.single:
            return Need(*takers.expand(target))
        all_of = (holders.counts[row] > 1) | np.isin(row, holders.rows_with(only))
        beside = takers.owners == only
        if self.hosts is not None:
            beside |= self.hosts.host(takers.owners) == self.hosts.host(ints([only]))
        entries = []
        for which, whom in (all_of, takers), (~all_of, takers.filtered(beside)):
            rows = np.flatnonzero(which)
            entry, owner = whom.expand(target[rows])
            entries.append((rows[entry], owner))
        region, owner = (np.concatenate(side) for side in zip(*entries, strict=True))
        order = np.lexsort((owner, region))
        return Need(region[order], owner[order])

    @cached_property
    def carrying(self) -> bool:
        """True where terms stay terms: neither side is partial, or both are in the same way."""
        return (self.source.op, self.source.terms) == (self.target.op, self.target.terms)

    @cached_property
    def reducing(self) -> bool:
        """True where copies of step 0 are terms that are reduced on arrival."""
        return reduces(self.source, self.target)

    def _fill(self, owner: int) -> int | None:
        """What a term of a partial target starts with when it gets no cells: the others hold the whole value."""
        value = NEUTRAL.get(self.target.op or "")
        if value is None or self.carrying or not len(self.target.form.blocks(owner)):
            return None
        return value if self.target.form.holders.term_of(ints([owner]))[0] else None

    @cached_property
    def _rounds(self) -> tuple[int, ...]:
        """The rounds that max_bytes makes of every step."""
        return rounds_of_steps(self.max_bytes or 0, self.itemsize, self._loads, len(self.owners))

    @cached_property
    def _loads(self) -> tuple[int, ...]:
        """The most cells that an owner stages in each step, were it one round."""
        most, hosts = self._takers.most, self.hosts is not None
        return loads(self.source, self.target, most, reducing=self.reducing, hosts=hosts)

    # --- what it costs -----------------------------------------------------------------------------------------------

    @cached_property
    def owners(self) -> tuple[int, ...]:
        """Everybody who takes part, rising."""
        return tuple(np.union1d(self.source.form.owners, self.target.form.owners).tolist())

    @property
    def bytes_moved(self) -> int:
        """Bytes sent between owners."""
        return exact_sum(self.copies.volumes[self.copies.remote]) * self.itemsize

    @property
    def bytes_local(self) -> int:
        """Bytes copied inside owners."""
        return exact_sum(self.copies.volumes[~self.copies.remote]) * self.itemsize

    @cached_property
    def lower_bound(self) -> int:
        """The fewest bytes that any plan could send: counted from the layouts, not from the copies.

        A taker that lacks a cell must receive it once. A cell that is reduced from t terms must bring all of them to
        one owner, and from there to all other takers. (From one partial layout to a different one the value is always
        reduced first; a plan that did not would do with less, in another order of terms.)
        """
        boxes, row, need = self._need(all_regions(self.source, self.target))
        holders, volume = self.source.form.holders, boxes.volumes()
        if not self.reducing:
            return exact_sum(volume[need.region[~holders.hold(row[need.region], need.target)]]) * self.itemsize
        has = holders.row_of(need.target) // holders.terms == row[need.region] // holders.terms
        takers = np.bincount(need.region, minlength=boxes.count)
        having = np.bincount(need.region[has], minlength=boxes.count) > 0
        return exact_sum(volume * (holders.terms - having + takers - 1)) * self.itemsize

    @cached_property
    def traffic(self) -> Traffic:
        """The messages, and what they add up to."""
        hosts = None if self.hosts is None else self.hosts.host(ints(self.owners))
        return Traffic.of(self.copies, self.owners, self.itemsize, hosts)

    @property
    def messages(self) -> int:
        """Packed messages: one per sender, receiver, step and round."""
        return len(self.traffic.size)

    @property
    def rounds(self) -> int:
        """How many times messages are exchanged: the rounds of all steps."""
        return self.traffic.stages

    @property
    def sent(self) -> dict[int, int]:
        """Bytes that each owner sends."""
        return self.traffic.total(self.traffic.source)

    @property
    def received(self) -> dict[int, int]:
        """Bytes that each owner receives."""
        return self.traffic.total(self.traffic.target)

    @property
    def kept(self) -> dict[int, int]:
        """Bytes that each owner copies inside itself."""
        local = self.copies.take(~self.copies.remote)
        place = ints(self.owners).searchsorted(local.target)
        total = totals(local.volumes * self.itemsize, place, len(self.owners))
        return dict(zip(self.owners, total.tolist(), strict=True))

    @property
    def balance(self) -> float:
        """How even the load is: the mean of bytes sent and received over the most of any owner. 1.0 is even."""
        return self.traffic.balance()

    @property
    def peak_bytes(self) -> int:
        """The most bytes that any owner stages at a time: all that it sends and receives in one round."""
        return self.traffic.peak()

    @property
    def most_bytes(self) -> int:
        """What `peak_bytes` cannot exceed, from the layouts alone: it costs nothing, however many owners there are."""
        steps = 3 if self.hosts is not None else 2 if self.reducing else 1
        return self.max_bytes or max(self._loads[:steps]) * self.itemsize

    def matrix(self) -> Ints:
        """Bytes from each owner (row) to each (column), in the order of `owners`."""
        return self.traffic.matrix()

    def estimate(self, **model: float) -> float:
        """Seconds, by a simple model: in every round the busiest owner pays for its messages and its bytes.

        `latency` (20e-6 s) and `bandwidth` (10e9 bytes/s each way) hold between hosts, `host_latency` (5e-6) and
        `host_bandwidth` (50e9) inside one; without `hosts=` every message counts as one between hosts.
        """
        return self.traffic.estimate(**model)

    # --- what it is good for -----------------------------------------------------------------------------------------

    def verify(self) -> Plan:
        """The plan itself, once it is proven against both layouts without running it; else a PlanError."""
        verify(self.source, self.target, self.copies, reducing=self.reducing)
        if self.max_bytes is not None and self.peak_bytes > self.max_bytes:
            raise PlanError(f"the plan stages {self.peak_bytes} bytes at a time, more than max_bytes={self.max_bytes}")
        return self

    def check(self, source: Layout, target: Layout) -> Plan:
        """The plan itself where it is for these layouts; else a PlanError that names the side that differs."""
        for side, made_for, layout in ("source", self.source, source), ("target", self.target, target):
            if made_for != layout:
                raise PlanError(f"this plan is for the {side} layout {made_for!r}, not for {layout!r}: plan again")
        return self

    def explain(self) -> str:
        """The plan in words and a small table."""
        return explain(self)

    def html(self, path: str | PathLike[str], *, title: str | None = None) -> Path:
        """Write the plan as a page to look at: one HTML file that needs nothing else. Returns its path."""
        from shardwise import report  # which looks at plans

        return report.write(path, report.page(self, title=title))

    def figure(self) -> Figure:
        """The plan as a matplotlib figure (the extra `plot`), for papers."""
        from shardwise import report

        return report.figure(self)

    def _repr_html_(self) -> str:
        """Both layouts and the totals, in notebooks."""
        from shardwise import report

        return report.glance(self)

    def to_json(self, *, copies: bool = False) -> str:
        """The plan as a file: layouts, options, fingerprints, totals; with `copies=True` every copy, for tools."""
        return to_json(self, copies=copies)

    @staticmethod
    def from_json(text: str, *, max_copies: int = 2**18) -> Plan:
        """The plan of a file; refused where it is damaged, or where another plan would be made of its layouts today.

        A short file can ask for a plan that fills the memory: `max_copies` is the limit. A copy takes about 300 bytes.
        """
        return from_json(text, plan, max_copies)


def plan(
    source: Layout | str,
    target: Layout | str,
    *,
    itemsize: int = 4,
    max_bytes: int | None = None,
    hosts: int | Mapping[int, Hashable] | Mesh | None = None,
    relabel: bool = False,
) -> Plan:
    """How to turn `source` into `target` (layouts, or their notation): each cell exactly once, with the fewest bytes.

    `max_bytes` bounds what an owner stages at a time, by rounds. `hosts` (owners per host, owner -> host, or a mesh
    that knows) makes cells cross between hosts once and travel on inside. `relabel` lets the target owners be permuted
    so that the most cells stay where they are; see `plan.target`.

    >>> plan("8x6/S0@4", "8x6/S1@3", itemsize=4).messages
    9
    """
    source, target = _layout(source, "source"), _layout(target, "target")
    if relabel:
        moved = target.relabel(fewest_bytes(source, target))
        target = min(target, moved, key=lambda layout: Plan(source, layout).lower_bound)
    limit = None if max_bytes is None else _positive(max_bytes, "max_bytes", 2**62)
    where = None if hosts is None else Hosts.of(hosts, np.union1d(source.form.owners, target.form.owners))
    return Plan(source, target, _positive(itemsize, "itemsize", 2**10), limit, where)


def reduces(source: Layout, target: Layout) -> bool:
    """True where a move reduces the terms of a partial source: the target is not partial in the same way."""
    return source.terms > 1 and (source.op, source.terms) != (target.op, target.terms)


def _layout(given: Layout | str, side: str) -> Layout:
    layout = parse(given) if isinstance(given, str) else given
    if not isinstance(layout, Layout):
        raise PlanError(f"the {side} must be a Layout or its notation, not {given!r}")
    return layout.validate()


@lru_cache(maxsize=1024)
def _part(
    source: Layout, target: Layout, itemsize: int, max_bytes: int | None, hosts: Hosts | None, owner: int
) -> Part:
    """Kept by value: a model has thousands of tensors, but few different pairs of layouts."""
    made = Plan(source, target, itemsize, max_bytes, hosts)
    copies = made._copies_of(owner)
    if not len(copies) and owner not in source and owner not in target:
        raise PlanError(f"owner {owner} has no part in the plan from {source!r} to {target!r}")
    return Part(owner, copies, made._fill(owner))


def _positive(value: object, what: str, most: int) -> int:
    if not isinstance(value, int | np.integer) or isinstance(value, bool) or not 0 < value <= most:
        raise PlanError(f"{what} must be a whole number of bytes from 1 to {most}, not {value!r}")
    return int(value)
