"""One reshard of one rank: from what it brings and asks for to tensors that are filled. Autograd is not seen here."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from concurrent.futures import Future
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import torch

from shardwise.errors import ExchangeError
from shardwise.exchange import Exchange, Move, Terms
from shardwise.exchange.agreement import ranks
from shardwise.exchange.reduce import check as check_reduction
from shardwise.layout import Layout
from shardwise.planning import Plan, plan
from shardwise.tensor.kinds import Kind, kind_of, outside
from shardwise.tensor.lane import lane_of
from shardwise.tensor.output import local_shapes, room
from shardwise.wires import GroupWire

Shape = tuple[int, ...]
FACTS = ("shape", "dtype", "source", "gradient")  # what a rank that holds nothing of the source cannot know


@dataclass(frozen=True)
class Options:
    """How to move."""

    dtype: torch.dtype | None = None
    max_bytes: int | None = None
    hosts: Any = None
    verify: bool = False


@dataclass(frozen=True)
class Held:
    """What this rank brings: how the source lies, and its tensors of it. None is what it does not know."""

    kind: Kind | None = None
    tensors: tuple[torch.Tensor, ...] = ()
    dtype: torch.dtype | None = None
    gradient: bool | None = None
    error: Exception | None = None

    @staticmethod
    def of(x: Any) -> Held:
        """From a sharded tensor, or from None."""
        if x is None:
            return Held.by(None, (), None)
        try:
            kind = kind_of(x)
            return Held.by(kind, tuple(kind.taken(x)), getattr(x, "dtype", None))
        except Exception as error:  # the others have to hear of it first
            return Held(error=error)

    @staticmethod
    def by(kind: Kind | None, tensors: tuple[torch.Tensor, ...], dtype: torch.dtype | None) -> Held:
        """From tensors of a kind."""
        gradient = any(t.requires_grad for t in tensors) if tensors else None
        return Held(
            kind, tensors, tensors[0].dtype if tensors else dtype, gradient if torch.is_grad_enabled() else False
        )

    def facts(self) -> dict[str, Any]:
        """What it knows."""
        layout = self.kind and self.kind.layout
        known = (layout and layout.shape, self.dtype, layout, self.gradient)
        return {name: fact for name, fact in zip(FACTS, known, strict=True) if fact is not None}


class Call:
    """One call. `start` where it is made, `finish` in its turn; then `target`, `tensors` and `plan` are there."""

    plan: Plan
    target: Kind
    facts: Mapping[str, Any]  # of the source, as all ranks agree
    source: list[torch.Tensor]  # this rank's local tensors of the source
    tensors: list[torch.Tensor]  # and of the target
    followed: bool  # by autograd

    def __init__(
        self,
        wire: GroupWire,
        held: Held,
        target: Callable[[Shape], Kind],
        options: Options,
        *,
        out: Any = None,
        key: Any = None,
    ) -> None:
        self.wire, self.held, self.options = wire, held, options
        self.key, self._target, self._out = key, target, out
        self._exchange: Exchange | None = None

    def start(self, *, alone: bool = True) -> Call:
        """Tell the others what this rank takes the call to be: where it does not know, what it was the last time."""
        self._exchange = self._prepared(self.wire.memory.get(("source", self.key), {}))
        self._exchange.start(alone=alone and lane_of(self.wire).idle)
        return self

    def run(self) -> Call:
        """Carry it out and wait for it."""
        return lane_of(self.wire).run(self.finish)

    def submit(self) -> Future[Call]:
        """Carry it out beside the caller, after those that were submitted before."""
        return lane_of(self.wire).submit(self.finish)

    def finish(self) -> Call:
        """Carry it out, here and now."""
        assert self._exchange is not None, "start first"
        try:
            return self._finish(self._exchange)
        except ExchangeError as error:
            error.add_note(self._where())
            raise

    def _finish(self, exchange: Exchange) -> Call:
        told = exchange.finish()
        if told is not None:
            facts = next(fields for fields in told if fields is not None)
            learned = {name: facts[name] for name in FACTS}
            self.wire.memory["source", self.key] = learned
            self._exchange = self._prepared(learned, again=exchange).start()
            if self._exchange.finish() is not None:
                raise ExchangeError("the ranks that were told what the source is still take it to be something else")
        return self

    def _where(self) -> str:
        made = getattr(self, "plan", None)
        move = f"from {made.source!r} to {made.target!r}" if made else "of which this rank does not know the layouts"
        writing = self._out is not None and self._exchange is not None and self._exchange.writing
        touched = "; what was given as out= may be partly written" if writing else ""
        return f"in a reshard {move}{touched}"

    # --- what it takes -----------------------------------------------------------------------------------------------

    def _prepared(self, known: Mapping[str, Any], again: Exchange | None = None) -> Exchange:
        """The exchange as this rank sees it. What goes wrong is told to all: every rank raises it, nobody waits."""
        try:
            if self.held.error is not None:
                raise self.held.error
            sure = self.held.facts()
            facts = {**known, **sure}
            if again or len(sure) == len(FACTS):
                return self._sure(facts, again=again)
            return self._guess(facts, frozenset(FACTS).difference(sure) | {"target"})
        except Exception as error:
            return Exchange(self.wire, Terms({"operation": "reshard"}, error=error), again=again)

    def _sure(
        self, facts: Mapping[str, Any], guessed: frozenset[str] = frozenset(), again: Exchange | None = None
    ) -> Exchange:
        move = self._move(facts)
        terms = self._terms(facts, self.plan.target, guessed)
        return Exchange(self.wire, terms, [move], fresh=self._out is None, again=again)

    def _guess(self, facts: Mapping[str, Any], guessed: frozenset[str]) -> Exchange:
        """What it was the last time; where that cannot be, or there was none, those who know will tell."""
        try:
            return self._sure(facts, guessed)
        except Exception:  # of a guess: it says nothing about the call
            unknown = dict.fromkeys(FACTS, "unknown") | self.held.facts()
            return Exchange(self.wire, self._terms(unknown, "unknown", guessed))

    def _terms(self, facts: Mapping[str, Any], target: Layout | str, guessed: frozenset[str]) -> Terms:
        options = self.options
        hosts = options.hosts
        named = sorted(map(str, hosts.items())) if isinstance(hosts, Mapping) else getattr(hosts, "hosts", hosts)
        how = {"cast": options.dtype, "max_bytes": options.max_bytes, "hosts": str(named), "verify": options.verify}
        return Terms({"operation": "reshard", **{f: facts[f] for f in FACTS}, "target": target, **how}, guessed)

    def _move(self, facts: Mapping[str, Any]) -> Move:
        """The work of this rank, and room for its result."""
        me, source, dtype = self.wire.me, facts["source"], facts["dtype"]
        self.facts, self.target = facts, self._target(facts["shape"])
        target, becomes = self.target.layout, self.options.dtype or dtype
        for side, layout in ("source", source), ("target", target):
            self._check_owners(side, layout)
        _check_cast(dtype, becomes)
        made = self.plan = self._plan(source, target, dtype, becomes)
        self.source = self._local(source, me)
        self.followed = facts["gradient"] and (becomes.is_floating_point or becomes.is_complex)
        self.tensors = room(
            self._out, self.target, me, becomes, source=self.source, device=self._device(), followed=self.followed
        )
        travels = becomes if becomes.itemsize == made.itemsize and not made.reducing else dtype
        return Move.of(made, me, self.source, self.tensors, travels)

    def _plan(self, source: Layout, target: Layout, dtype: torch.dtype, becomes: torch.dtype) -> Plan:
        options = self.options
        made = plan(source, target, itemsize=dtype.itemsize, max_bytes=options.max_bytes, hosts=options.hosts)
        if made.reducing:
            check_reduction(source.op or "", dtype)
        elif becomes.itemsize < dtype.itemsize:  # cast before it travels
            made = plan(source, target, itemsize=becomes.itemsize, max_bytes=options.max_bytes, hosts=options.hosts)
        return made

    def _local(self, layout: Layout, me: int) -> list[torch.Tensor]:
        """This rank's local tensors of the source, which must be those of the layout."""
        held = [] if self.held.kind is None else self.held.kind.local(self.held.tensors)
        expected = local_shapes(layout, me)
        if not held and not any(_cells(shape) for shape in expected):
            return [torch.empty(shape, dtype=self.facts["dtype"]) for shape in expected]
        found = tuple(tuple(t.shape) for t in held)
        if found != expected:
            brought = f"tensors of shapes {list(found)}" if held else "None"
            raise ExchangeError(
                f"the source {layout!r} gives rank {me} tensors of shapes {list(expected)}, not {brought}"
            )
        return [t.resolve_conj().resolve_neg() for t in held]

    def _device(self) -> torch.device:
        if self.target.device is not None:
            return self.target.device
        return self.source[0].device if self.source else self.wire.serves(torch.device("cpu"))

    def _check_owners(self, side: str, layout: Layout) -> None:
        missing = outside(layout, self.wire.owners)
        if missing:
            raise ExchangeError(
                f"the {side} {layout!r} names {ranks(missing)}, which the group does not have "
                f"(it has {ranks(self.wire.owners)}): give the group= that has all of them"
            )


@lru_cache(maxsize=1024)
def _check_cast(dtype: torch.dtype, becomes: torch.dtype) -> None:
    if not isinstance(becomes, torch.dtype):
        raise ExchangeError(f"dtype= must be a torch.dtype, not {becomes!r}")
    if dtype.is_complex and not becomes.is_complex:
        raise ExchangeError(f"{dtype} cannot be cast to {becomes}: the imaginary part would be lost")
    try:
        torch.zeros(1, dtype=becomes).copy_(torch.zeros(1, dtype=dtype))
    except RuntimeError as error:
        raise ExchangeError(f"{dtype} cannot be cast to {becomes}: {error}") from None


def _cells(shape: Shape) -> int:
    return int(torch.Size(shape).numel())
