"""Plan: the copies that turn one layout into another, and what they cost."""

from __future__ import annotations

from collections.abc import Hashable, Mapping
from dataclasses import dataclass, field
from functools import cached_property, lru_cache

import numpy as np

from shardwise.errors import PlanError
from shardwise.geometry import Boxes, Ints, ints
from shardwise.layout import Grid, Layout, Mesh, parse
from shardwise.plan.choose import Among, Hosts, Need, deliver, reduce
from shardwise.plan.copies import Copies
from shardwise.plan.explain import explain
from shardwise.plan.file import from_json, to_json
from shardwise.plan.regions import Regions, all_regions, owner_regions
from shardwise.plan.relabel import fewest_bytes
from shardwise.plan.rounds import Limit, in_rounds, loads
from shardwise.plan.traffic import Traffic
from shardwise.plan.verify import verify

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
    itemsize: int = 1
    max_bytes: int | None = None
    hosts: tuple[tuple[int, Hashable], ...] | None = field(default=None, repr=False)

    # --- copies ------------------------------------------------------------------------------------------------------

    @cached_property
    def copies(self) -> Copies:
        """All copies of all owners, by step, round and place."""
        return self._copies(all_regions(self.source, self.target))

    def for_owner(self, owner: int) -> Part:
        """The copies of one owner, at the cost of its own: the same as in `copies`, without looking at all of them."""
        if owner not in self._parts:
            self._parts[owner] = self._part(int(owner))
        return self._parts[owner]

    @cached_property
    def _parts(self) -> dict[int, Part]:
        return {}

    def _part(self, owner: int) -> Part:
        if owner not in self.source.form.owners and owner not in self.target.form.owners:
            raise PlanError(f"owner {owner} has no part in the plan from {self.source!r} to {self.target!r}")
        copies = self._copies(owner_regions(self.source, self.target, owner), owner)
        return Part(owner, copies.take((copies.source == owner) | (copies.target == owner)), self._fill(owner))

    def _copies(self, regions: Regions, only: int | None = None) -> Copies:
        boxes, row, need = self._need(regions)
        holders, among = self.source.form.holders, Among(self._hosts, only)
        if self.reducing:
            turn = ints(np.searchsorted(self.target.form.owners, need.target))
            copies = Copies.concat(reduce(boxes, row, need, holders, among, turn))
        else:
            copies = Copies.concat(deliver(boxes, row, need, holders, among))
            grids = isinstance(self.source.form, Grid) and isinstance(self.target.form, Grid)
            copies = copies if grids else copies.merged()
        copies = copies.in_order(self.source.shape)
        if self.max_bytes is None:
            return copies
        return in_rounds(copies, self.limit, reducing=self.reducing).in_order(self.source.shape)

    def _need(self, regions: Regions) -> tuple[Boxes, Ints, Need]:
        """The boxes to deliver, for each its row of holders (of its first term), and who needs it."""
        terms, holders = self.source.terms, self.target.form.holders
        if self.carrying and terms == 1:
            return regions.boxes, regions.source, Need(*holders.expand(regions.target))
        if self.carrying:
            region = np.repeat(np.arange(regions.boxes.count), terms)
            term = np.tile(np.arange(terms), regions.boxes.count)
            need = Need(*holders.expand(regions.target[region] * terms + term))
            return regions.boxes.take(region), regions.source[region] * terms + term, need
        wanted = np.arange(1 if self.target.op in NEUTRAL else holders.terms)
        entry, owner = holders.expand((regions.target[:, None] * holders.terms + wanted).reshape(-1))
        order = np.lexsort((owner, entry // len(wanted)))
        return regions.boxes, regions.source * terms, Need(entry[order] // len(wanted), owner[order])

    @property
    def carrying(self) -> bool:
        """True where terms stay terms: neither side is partial, or both are in the same way."""
        return (self.source.op, self.source.terms) == (self.target.op, self.target.terms)

    @property
    def reducing(self) -> bool:
        """True where copies of step 0 are terms that are reduced on arrival."""
        return self.source.terms > 1 and not self.carrying

    def _fill(self, owner: int) -> int | None:
        """What a term of a partial target starts with when it gets no cells: the others hold the whole value."""
        value = NEUTRAL.get(self.target.op or "")
        if value is None or self.carrying or not len(blocks := self.target.form.blocks(owner)):
            return None
        first = self.target.form.holders.hold(blocks * self.target.terms, ints([owner]))
        return None if first[0] else value

    @cached_property
    def _hosts(self) -> Hosts | None:
        if self.hosts is None:
            return None
        numbers = {host: n for n, host in enumerate(dict.fromkeys(host for _, host in self.hosts))}
        return Hosts(ints([o for o, _ in self.hosts]), ints([numbers[host] for _, host in self.hosts]))

    @cached_property
    def limit(self) -> Limit:
        """The rounds that max_bytes makes of every step."""
        holders = self.target.form.holders
        takers = holders.most * (1 if self.carrying or self.target.op in NEUTRAL else holders.terms)
        bounds = loads(self.source, self.target, takers, reducing=self.reducing, hosts=self.hosts is not None)
        return Limit.of(self.max_bytes or 0, self.itemsize, bounds, len(self.owners))

    # --- what it costs -----------------------------------------------------------------------------------------------

    @cached_property
    def owners(self) -> tuple[int, ...]:
        """Everybody who takes part, rising."""
        return tuple(np.union1d(self.source.form.owners, self.target.form.owners).tolist())

    @property
    def bytes_moved(self) -> int:
        """Bytes sent between owners."""
        return int(self.copies.volumes[self.copies.remote].sum()) * self.itemsize

    @property
    def bytes_local(self) -> int:
        """Bytes copied inside owners."""
        return int(self.copies.volumes[~self.copies.remote].sum()) * self.itemsize

    @cached_property
    def lower_bound(self) -> int:
        """The fewest bytes that any plan could send: counted from the layouts, not from the copies.

        A taker that lacks a cell must receive it once. A cell that is reduced from t terms must bring all of them to
        one owner, and from there to all other takers.
        """
        boxes, row, need = self._need(all_regions(self.source, self.target))
        holders, volume = self.source.form.holders, boxes.volumes()
        if not self.reducing:
            return int(volume[need.region[~holders.hold(row[need.region], need.target)]].sum()) * self.itemsize
        has = np.zeros(len(need.region), dtype=np.bool_)
        for term in range(holders.terms):
            has |= holders.hold(row[need.region] + term, need.target)
        takers = np.bincount(need.region, minlength=boxes.count)
        having = np.bincount(need.region[has], minlength=boxes.count) > 0
        return int((volume * (holders.terms - having + takers - 1)).sum()) * self.itemsize

    @cached_property
    def traffic(self) -> Traffic:
        """The messages, and what they add up to."""
        hosts = None if self._hosts is None else self._hosts.of(ints(self.owners))
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
    def balance(self) -> float:
        """How even the load is: the mean of bytes sent and received over the most of any owner. 1.0 is even."""
        return self.traffic.balance()

    @property
    def peak_bytes(self) -> int:
        """The most bytes that any owner stages at a time: all that it sends and receives in one round."""
        return self.traffic.peak()

    def matrix(self) -> Ints:
        """Bytes from each owner (row) to each (column), in the order of `owners`."""
        return self.traffic.matrix()

    def estimate(self, **model: float) -> float:
        """Seconds by a simple model of latencies and bandwidths: see `Traffic.estimate` for its parameters."""
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
        for side, made_for, found in ("source", self.source, source), ("target", self.target, target):
            if made_for != found:
                raise PlanError(f"this plan is for the {side} layout {made_for!r}, not for {found!r}: plan again")
        return self

    def explain(self) -> str:
        """The plan in words and a small table."""
        return explain(self)

    def to_json(self, *, copies: bool = False) -> str:
        """The plan as a file: layouts, options, fingerprints, totals; with `copies=True` every copy, for tools."""
        return to_json(self, copies=copies)

    @staticmethod
    def from_json(text: str) -> Plan:
        """The plan of a file; refused where it is damaged, or where another plan would be made of its layouts today."""
        return from_json(text, plan)


def plan(
    source: Layout | str,
    target: Layout | str,
    *,
    itemsize: int = 1,
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
    if source.shape != target.shape:
        raise PlanError(f"a plan needs one shape, but the source has {source.shape} and the target {target.shape}")
    if relabel:
        target = target.relabel(fewest_bytes(source, target))
    limit = None if max_bytes is None else _positive(max_bytes, "max_bytes")
    made = _plan(source, target, _positive(itemsize, "itemsize"), limit, _host_pairs(hosts, source, target))
    if made.max_bytes is not None:
        made.limit  # noqa: B018  a limit that cannot be held is refused now, not when copies are looked at
    return made


def _layout(asked: Layout | str, side: str) -> Layout:
    found = parse(asked) if isinstance(asked, str) else asked
    if not isinstance(found, Layout):
        raise PlanError(f"the {side} must be a Layout or its notation, not {asked!r}")
    return found.validate()


@lru_cache(maxsize=256)
def _plan(
    source: Layout, target: Layout, itemsize: int, max_bytes: int | None, hosts: tuple[tuple[int, Hashable], ...] | None
) -> Plan:
    return Plan(source, target, itemsize, max_bytes, hosts)


def _host_pairs(
    hosts: int | Mapping[int, Hashable] | Mesh | None, source: Layout, target: Layout
) -> tuple[tuple[int, Hashable], ...] | None:
    """Everybody's host, owners rising."""
    if hosts is None:
        return None
    owners = np.union1d(source.form.owners, target.form.owners).tolist()
    if isinstance(hosts, int):
        size = _positive(hosts, "hosts (owners per host)")
        return tuple((owner, owner // size) for owner in owners)
    known = hosts.hosts if isinstance(hosts, Mesh) else hosts
    if not isinstance(known, Mapping):
        raise PlanError(f"hosts must be a number of owners per host, or owner -> host, not {hosts!r}")
    missing = [owner for owner in owners if owner not in known]
    if missing:
        raise PlanError(f"hosts names no host for owner {missing[0]} ({len(missing)} of {len(owners)} are missing)")
    return tuple((owner, known[owner]) for owner in owners)


def _positive(value: object, what: str) -> int:
    if not isinstance(value, int | np.integer) or isinstance(value, bool) or not 0 < value < 2**62:
        raise PlanError(f"{what} must be a whole number of bytes above 0, not {value!r}")
    return int(value)
