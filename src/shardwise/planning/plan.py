"""Plan: the copies that turn one layout into another, and what they cost."""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property, lru_cache
from math import prod
from operator import index
from os import PathLike
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from shardwise.errors import PlanError
from shardwise.geometry import Boxes, Ints, either, exact_sum, ints, spread, totals
from shardwise.layout import Grid, Holders, Layout, Mesh, parse
from shardwise.planning.choose import Among, Need, deliver
from shardwise.planning.copies import Copies
from shardwise.planning.counts import Counts, HostCounts
from shardwise.planning.explain import explain
from shardwise.planning.file import from_json, to_json
from shardwise.planning.host_sums import host_sums
from shardwise.planning.hosts import Hosts
from shardwise.planning.loads import loads
from shardwise.planning.parts import received, sent
from shardwise.planning.reduce import Span, add_up, reduce
from shardwise.planning.reduced_loads import sums_load
from shardwise.planning.reducers import complete
from shardwise.planning.regions import Regions, all_regions, count_regions, owner_regions
from shardwise.planning.relabel import fewest_bytes
from shardwise.planning.replicas import received_of_replicas, sent_by_replica
from shardwise.planning.rounds import grains_of_steps, in_rounds, rounds_of_steps
from shardwise.planning.together import Pair, copies_together
from shardwise.planning.traffic import Traffic
from shardwise.planning.verify import verify

if TYPE_CHECKING:
    from matplotlib.figure import Figure

SUM_BYTES = 4  # that a sum of some of the terms has at least: short floats are added up in float32, and rounded once
MOST_STEPS = 3  # of one leg
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
class Sums:
    """Terms that are sums of neighbouring terms of another layout: term n of those from edges[n] to edges[n + 1].

    They are the terms of a plan's target if they are `made` by it; otherwise of its source.
    """

    edges: tuple[int, ...]
    made: bool

    @property
    def sizes(self) -> tuple[int, ...]:
        """Of how many terms each is the sum."""
        return tuple(np.diff(self.edges).tolist())

    @property
    def several(self) -> bool:
        """True if there is more than one: then none of them is the value."""
        return len(self.edges) > 2


@dataclass(frozen=True)
class Plan:
    """The copies between two layouts, in steps and rounds. They are computed when they are first used.

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
    sums: Sums | None = field(default=None, repr=False)  # of a leg: see `legs`
    _parts: dict[int, Part] = field(default_factory=dict, init=False, repr=False, compare=False)  # see `plan_parts`

    def __post_init__(self) -> None:
        if self.source.shape != self.target.shape:
            here, there = self.source.shape, self.target.shape
            raise PlanError(f"a plan needs one shape, but the source has {here} and the target {there}")
        if self.max_bytes is not None and not all(leg._rounds for leg in self.legs):  # so that a limit that cannot be
            raise PlanError("a plan takes at least one step")  # kept is refused now

    @cached_property
    def legs(self) -> tuple[Plan, ...]:
        """The plans that run one after the other: this one alone, or two if each host adds up its terms first.

        There are two if the sums have fewer bytes than the terms, and the two stage at most twice as much as a plan
        without hosts, in at most twice as many rounds (`_worth`). The memory between the two counts as staging.
        """
        between = host_sums(self.source, self.hosts) if self.hosts and self.reducing and not self.sums else None
        width = max(self.itemsize, SUM_BYTES)
        fewer = between is not None and between.count * width < self.source.terms * self.itemsize
        if between is None or not fewer or not self._crosses(self.hosts):
            return (self,)
        layout, limit, size = between.layout, self.max_bytes, between.layout.form.largest() * width
        limit = None if limit is None else limit - size
        try:
            make = replace(self, target=layout, max_bytes=limit, sums=Sums(between.edges, made=True))
            take = replace(self, source=layout, max_bytes=limit, sums=Sums(between.edges, made=False))
        except PlanError:  # the limit has no room for sums
            return (self,)
        return (make, take) if self._worth(make, take, size) else (self,)

    def _worth(self, make: Plan, take: Plan, between: int) -> bool:
        """True if two legs with so many bytes between them cost at most twice what a plan without hosts costs.

        Sums are wider than narrow terms: as many times more counts as equal.
        """
        flat, wider = replace(self, hosts=None), max(SUM_BYTES // self.itemsize, 1)
        if self.max_bytes is not None:
            return make.most_rounds + take.most_rounds <= 2 * wider * flat.most_rounds + 2  # one for each leg
        return max(make.most_bytes, take.most_bytes) + between <= 2 * wider * flat.most_bytes

    def _crosses(self, hosts: Hosts | None) -> bool:
        """True if something has to cross without sums: a value to takers on several hosts, or a term to a taker's host.

        In large plans this is taken for granted where terms are missing on some hosts only.
        """
        if hosts is None:
            return False
        takers = self._takers
        at, first = hosts.host(takers.owners), takers.edges[:-1]
        one = np.minimum.reduceat(at, first)
        if (one < np.maximum.reduceat(at, first)).any():
            return True
        holders = self.source.form.holders
        known = complete(holders, hosts)
        every = len(known) == len(holders.counts) // holders.terms * hosts.count
        if every or not len(known) or count_regions(self.source, self.target) > 16 * len(self.owners):
            return not every
        regions = all_regions(self.source, self.target)
        return not np.isin(regions.source * hosts.count + one[regions.target], known).all()

    @property
    def bytes_between(self) -> int:
        """Of the sums that one owner holds between two legs."""
        return sum(leg.target.form.largest() * max(self.itemsize, SUM_BYTES) for leg in self.legs[:-1])

    # --- copies ------------------------------------------------------------------------------------------------------

    def most_copies(self) -> int:
        """How many copies there can be at most, found without making them."""
        takers = self._takers.most * (self.source.terms if self.carrying or self.reducing else 1)
        return count_regions(self.source, self.target) * max(takers, 1)

    @cached_property
    def copies(self) -> Copies:
        """All copies of all owners, by step, round and place."""
        if len(self.legs) > 1:
            return _in_steps([leg.copies for leg in self.legs])
        return self._chosen(all_regions(self.source, self.target), Among(self.hosts))

    def for_owner(self, owner: int) -> Part:
        """The copies of one owner, as in `copies`, but computed without those of all other owners."""
        try:
            number = index(owner)
        except TypeError:
            raise PlanError(f"owner {owner!r} has no part in a plan: owners are whole numbers") from None
        part = self.part(number)
        if not len(part.copies) and number not in self.source and number not in self.target:
            raise PlanError(f"owner {number} has no part in the plan from {self.source!r} to {self.target!r}")
        return part

    def part(self, owner: int) -> Part:
        """The same, also for who has nothing to do."""
        return self._parts.get(owner) or _part(
            self.source, self.target, self.itemsize, self.max_bytes, self.hosts, self.sums, owner
        )

    def together(self) -> Pair | None:
        """Both grids, where nothing is to be chosen, reduced or cut: parts of many such plans are made in one go."""
        source, target = self.source.form, self.target.form
        if not isinstance(source, Grid) or not isinstance(target, Grid) or not self.carrying:
            return None
        simple = source.table.shape[-1] == 1 and self.hosts is None and self.max_bytes is None
        return (source, target) if simple else None

    def _copies_of(self, owner: int) -> Copies:
        """What `copies` has of one owner."""
        if self.hosts is not None and owner not in self.hosts:
            return Copies.none(self.source.ndim)
        if len(self.legs) > 1:
            return _in_steps([leg.part(owner).copies for leg in self.legs])
        source, target = self.source.form, self.target.form
        choice = source.holders.most > 1 or self.hosts is not None
        if isinstance(source, Grid) and isinstance(target, Grid) and choice and not self.reducing:
            self._refuse_too_much()
            parts = _counted(source, target, self._takers, self.hosts, owner)
            return self._finished(Copies.concat(parts)) if parts else Copies.none(self.source.ndim)
        copies = self._chosen(owner_regions(self.source, self.target, owner), Among(self.hosts, owner))
        return copies.take((copies.source == owner) | (copies.target == owner))

    def _chosen(self, regions: Regions, among: Among) -> Copies:
        """Of everybody, or of the only owner that is wanted and some others."""
        self._refuse_too_much()
        holders, owners = self.source.form.holders, self.target.form.owners
        if self.reducing and not (self.sums and self.sums.made):
            return self._finished(Copies.concat(reduce(regions, self._takers, holders, among, owners)))
        boxes, row, taken, need = self._need(regions, among.only)
        if self.reducing and self.sums:
            turn = ints(np.searchsorted(owners, need.target))
            return self._finished(add_up(boxes, row, need, holders, among, turn, self._spans(need.target, self.sums)))
        copies = deliver(boxes, row, need, holders, among, team=taken if self._grids else None)
        return self._finished(Copies.concat(copies))

    def _finished(self, copies: Copies) -> Copies:
        """Merged, in rounds, and in order."""
        if not self._grids or self.reducing or self.hosts is not None:
            copies = copies.merged()  # else grids cross in the largest boxes that there are
        copies = copies.in_order(self.source.shape)
        if self.max_bytes is None:
            return copies
        grains = grains_of_steps(self.max_bytes, self._widest, self._loads, self._rounds, len(self.owners))
        return in_rounds(copies, self._rounds, grains, reducing=self.reducing).in_order(self.source.shape)

    def _spans(self, takers: Ints, sums: Sums) -> Span:
        """The terms of the source that become each taker's term."""
        term, edges = self.target.form.holders.term_of(takers), ints(sums.edges)
        return Span(edges[term], edges[term + 1])

    def _need(self, regions: Regions, only: int | None = None) -> tuple[Boxes, Ints, Ints, Need]:
        """The boxes to deliver, for each its row of holders (of its first term) and of takers, and who needs it."""
        terms, takers = self.source.terms, self._takers
        if self.carrying and terms > 1:  # every term is a region of its own
            region, term = np.divmod(np.arange(regions.boxes.count * terms), terms)
            regions = regions.take(region)
            row, taken = regions.source * terms + term, regions.target * terms + term
            return regions.boxes, row, taken, self._takers_of(taken, row, takers, only)
        row = regions.source * terms
        return regions.boxes, row, regions.target, self._takers_of(regions.target, row, takers, only)

    def _refuse_too_much(self) -> None:
        """Counts of bytes must not overflow. Terms that are reduced for many takers are shared out, and then given."""
        target = self.target.form
        takers = target.table.shape[-1] if isinstance(target, Grid) and self.carrying else self._takers.most
        terms = self.source.terms
        moves = terms + takers if self.reducing else terms * takers
        if prod(self.source.shape) * moves * self.itemsize >= 2**62:
            raise PlanError(f"the plan from {self.source!r} to {self.target!r} moves 2**62 bytes or more: is it meant?")

    @cached_property
    def _takers(self) -> Holders:
        """Who is to get a value: a row for every row of the target's holders, or for every block where the value is
        whole (of a partial target then its first term, or all of them: see NEUTRAL)."""
        holders = self.target.form.holders
        if self.carrying or holders.terms == 1:
            return holders
        first, last = holders.edges[: -1 : holders.terms], holders.edges[holders.terms :: holders.terms]
        if self.target.op in NEUTRAL and not (self.sums and self.sums.made):
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

    @property
    def _grids(self) -> bool:
        """True where both layouts are products of axes."""
        return isinstance(self.source.form, Grid) and isinstance(self.target.form, Grid)

    @property
    def carrying(self) -> bool:
        """True where terms stay terms: neither side is partial, or both are in the same way."""
        return not self.sums and (self.source.op, self.source.terms) == (self.target.op, self.target.terms)

    @property
    def reducing(self) -> bool:
        """True where copies of step 0 are terms that are reduced on arrival."""
        return self.source.terms > 1 and not self.carrying

    def _fill(self, owner: int) -> int | None:
        """What a term of a partial target starts with when it gets no cells: the others hold the whole value."""
        value = NEUTRAL.get(self.target.op or "")
        if value is None or self.carrying or (self.sums and self.sums.made) or not len(self.target.form.blocks(owner)):
            return None
        return value if self.target.form.holders.term_of(ints([owner]))[0] else None

    @cached_property
    def _rounds(self) -> tuple[int, ...]:
        """The rounds that max_bytes makes of every step."""
        return rounds_of_steps(self.max_bytes or 0, self._widest, self._loads, len(self.owners))

    @property
    def most_rounds(self) -> int:
        """An upper bound of `rounds`, from the layouts alone."""
        if len(self.legs) > 1:
            return sum(leg.most_rounds for leg in self.legs)
        rounds = self._rounds if self.max_bytes is not None else (1,) * MOST_STEPS
        return sum(count for count, load in zip(rounds, self._loads, strict=True) if load)

    @cached_property
    def _loads(self) -> tuple[int, ...]:
        """The most cells that an owner stages in each step, were it one round."""
        self._refuse_too_much()
        if self.sums and self.sums.made:
            return sums_load(self.source, self.target, self.sums.edges)
        return loads(self.source, self.target, self._takers, self.hosts, reducing=self.reducing)

    # --- what it costs -----------------------------------------------------------------------------------------------

    @cached_property
    def owners(self) -> tuple[int, ...]:
        """All owners that take part, ascending."""
        return tuple(either(self.source.form.owners, self.target.form.owners).tolist())

    @property
    def bytes_moved(self) -> int:
        """Bytes sent between owners."""
        return exact_sum(self.copy_bytes[self.copies.remote])

    @property
    def bytes_local(self) -> int:
        """Bytes copied inside owners."""
        return exact_sum(self.copy_bytes[~self.copies.remote])

    @property
    def bytes_across(self) -> int:
        """Bytes sent between hosts. If hosts are not known, all bytes that move."""
        return exact_sum(self.traffic.size[~self.traffic.inside])

    @cached_property
    def copy_bytes(self) -> Ints:
        """Of every copy."""
        *before, last = self.legs
        widths = [leg.itemsize for leg in before] + [last._widest, *[self.itemsize] * MOST_STEPS]
        return self.copies.volumes * ints(widths)[self.copies.step]

    @property
    def takes_sums(self) -> bool:
        """True if what travels in the first step are sums of some of the terms: of SUM_BYTES each, or more."""
        return self.sums is not None and not self.sums.made and self.sums.several

    @property
    def makes_sums(self) -> bool:
        """True if what is reduced are sums of some of the terms, and not yet values."""
        return self.sums is not None and self.sums.made and self.sums.several

    @property
    def _widest(self) -> int:
        """Bytes of an element that travels in the first step; in later ones it has no more."""
        return max(self.itemsize, SUM_BYTES) if self.takes_sums else self.itemsize

    @cached_property
    def lower_bound(self) -> int:
        """The fewest bytes that any plan could send: counted from the layouts, not from the copies.

        A taker that lacks a cell must receive it once. A cell that is reduced from t terms must bring all of them to
        one owner, and from there to all other takers. (From one partial layout to a different one the value is always
        reduced first; a plan that did not would do with less, in another order of terms.)
        """
        self._refuse_too_much()
        boxes, row, _, need = self._need(all_regions(self.source, self.target))
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
        return Traffic.of(self.copies, self.owners, self.copy_bytes, hosts)

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
        local = ~self.copies.remote
        place = ints(self.owners).searchsorted(self.copies.target[local])
        total = totals(self.copy_bytes[local], place, len(self.owners))
        return dict(zip(self.owners, total.tolist(), strict=True))

    @property
    def balance(self) -> float:
        """How even the load is: the mean of bytes sent and received over the most of any owner. 1.0 is even."""
        return self.traffic.balance()

    @property
    def peak_bytes(self) -> int:
        """The most bytes that any owner stages at a time: all that it sends and receives in one round.

        If the plan has two legs, this includes what the owner holds between them.
        """
        return self.traffic.peak() + self.bytes_between

    @property
    def most_bytes(self) -> int:
        """An upper bound of `peak_bytes`, from the layouts alone. It costs nothing, for any number of owners."""
        if self.max_bytes or len(self.legs) > 1:
            return self.max_bytes or max(leg.most_bytes for leg in self.legs) + self.bytes_between
        return max(self._loads) * self._widest

    def matrix(self) -> Ints:
        """Bytes from each owner (row) to each (column), in the order of `owners`."""
        return self.traffic.matrix()

    def estimate(self, **model: float) -> float:
        """Seconds, by a simple model: the time of every round is that of the busiest owner's messages and bytes.

        `latency` (20e-6 s) and `bandwidth` (10e9 bytes/s each way) are those between hosts, `host_latency` (5e-6) and
        `host_bandwidth` (50e9) inside one; without `hosts=` every message counts as one between hosts.
        """
        return self.traffic.estimate(**model)

    # --- what it is good for -----------------------------------------------------------------------------------------

    def verify(self) -> Plan:
        """Prove the plan against both layouts, without running it. Returns the plan, or raises a PlanError."""
        for leg in self.legs:
            edges = leg.sums.edges if leg.sums and leg.sums.made else None
            verify(leg.source, leg.target, leg.copies, reducing=leg.reducing, edges=edges)
        if self.max_bytes is not None and self.peak_bytes > self.max_bytes:
            raise PlanError(f"the plan stages {self.peak_bytes} bytes at a time, more than max_bytes={self.max_bytes}")
        return self

    def check(self, source: Layout, target: Layout) -> Plan:
        """Return the plan if it is for these layouts; otherwise raise a PlanError that names the side that differs."""
        for side, made_for, layout in ("source", self.source, source), ("target", self.target, target):
            if made_for != layout:
                raise PlanError(f"this plan is for the {side} layout {made_for!r}, not for {layout!r}: plan again")
        return self

    def explain(self) -> str:
        """The plan in words and a small table."""
        return explain(self)

    def html(self, path: str | PathLike[str], *, title: str | None = None) -> Path:
        """Write the plan as one self-contained HTML file. Returns its path."""
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
        """Read a plan file. Refused if it is damaged, or if the planner would now make another plan of its layouts.

        A short file can ask for a plan that fills the memory: `max_copies` is the limit. A copy takes about 300 bytes.
        """
        return from_json(text, plan, max_copies)


def plan(
    source: Layout | str,
    target: Layout | str,
    *,
    itemsize: int = 4,
    max_bytes: int | None = None,
    hosts: int | Mapping[int, Hashable] | Mesh | Hosts | None = None,
    relabel: bool = False,
) -> Plan:
    """How to turn `source` into `target` (layouts, or their notation): each cell exactly once, with the fewest bytes.

    `max_bytes` limits what an owner stages at a time. `hosts` (owners per host, owner -> host, or a mesh with hosts)
    makes cells cross between hosts once, and be passed on inside a host. `relabel` permutes the target's owners
    so that the fewest bytes move; see `plan.target`.

    >>> plan("8x6/S0@4", "8x6/S1@3", itemsize=4).messages
    9
    """
    source, target = _layout(source, "source"), _layout(target, "target")
    if relabel:
        moved = target.relabel(fewest_bytes(source, target))
        target = min(target, moved, key=lambda layout: Plan(source, layout).lower_bound)
    limit = None if max_bytes is None else _positive(max_bytes, "max_bytes", 2**62)
    where = None if hosts is None else Hosts.of(hosts, either(source.form.owners, target.form.owners))
    return Plan(source, target, _positive(itemsize, "itemsize", 2**10), limit, where)


def plan_parts(plans: Iterable[Plan], owner: int) -> None:
    """Make one owner's part of many plans in one go, where that can be: then each plan has it.

    >>> plans = [plan(f"{n}x8/S0@4", f"{n}x8/S1@2") for n in (4, 6)]
    >>> plan_parts(plans, 1)
    >>> [len(p.for_owner(1).copies) for p in plans]
    [5, 4]
    """
    some = {id(one): one for one in plans if owner not in one._parts}  # tensors that move alike share a plan
    pairs = [(one, pair) for one in some.values() if (pair := one.together()) is not None]
    for one, _ in pairs:
        one._refuse_too_much()
    found = copies_together([pair for _, pair in pairs], owner)
    for (one, _), copies in zip(pairs, found, strict=True):
        one._parts[owner] = Part(owner, copies)


def _counted(source: Grid, target: Grid, takers: Holders, hosts: Hosts | None, owner: int) -> list[Copies]:
    """The copies of one owner between grids, where replicas or hosts give a choice."""
    if hosts is None:
        alone = Counts(source, target, takers, owner)
        return [*received_of_replicas(alone), *sent_by_replica(alone)]
    counts = HostCounts(source, target, takers, hosts, owner)
    return [*received(counts), *sent(counts)]


def _in_steps(legs: list[Copies]) -> Copies:
    """The copies of the second leg come after the one step of the first."""
    first, second = legs
    return Copies.concat([first, replace(second, step=second.step + 1)])


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
    source: Layout,
    target: Layout,
    itemsize: int,
    max_bytes: int | None,
    hosts: Hosts | None,
    sums: Sums | None,
    owner: int,
) -> Part:
    """Kept by value: a model has thousands of tensors, but few different pairs of layouts."""
    made = Plan(source, target, itemsize, max_bytes, hosts, sums)
    return Part(owner, made._copies_of(owner), made._fill(owner))


def _positive(value: object, what: str, most: int) -> int:
    if not isinstance(value, int | np.integer) or isinstance(value, bool) or not 0 < value <= most:
        raise PlanError(f"{what} must be a whole number of bytes from 1 to {most}, not {value!r}")
    return int(value)
