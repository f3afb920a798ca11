"""One reshard of one rank: agreed with the others, carried out in its turn. Autograd is not seen here."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from concurrent.futures import Future
from dataclasses import replace
from typing import Any

import torch

from shardwise.containers.container import Kind
from shardwise.containers.sharded import Own
from shardwise.errors import ExchangeError
from shardwise.exchange import Exchange, Terms
from shardwise.exchange.overflow import Losses, Lost, refuse_loss
from shardwise.job.serial_queue import SerialQueue
from shardwise.job.source import FACTS, Held, SourceFacts
from shardwise.job.verify import verify, worst_of_all
from shardwise.job.work import NAME, Options, Work
from shardwise.layout import Layout
from shardwise.transports import GroupTransport

Target = Callable[[tuple[int, ...]], Kind]  # what is asked for, for a tensor of that shape
MOST_REMEMBERED = 4096


class Call:
    """One call: `start` where it is made, `run` or `submit` to carry it out; then `work` has all of it."""

    work: Work

    def __init__(
        self,
        transport: GroupTransport,
        held: Held,
        target: Target,
        options: Options,
        *,
        out: Any = None,
        key: Any = None,
        operation: str = "reshard",
    ) -> None:
        self.transport, self.held, self.options, self.key, self.operation = transport, held, options, key, operation
        self._target, self._out = target, out
        self._exchange: Exchange | None = None

    def start(self, *, alone: bool = True) -> Call:
        """Tell the others what this rank takes the call to be: where it does not know, what it was the last time.

        `alone`: nothing else is under way.
        """
        self._guesses: dict[Any, Mapping[str, Any]] = self.transport.memory.setdefault("guesses", {})
        self._guess_by = self.key, self.transport.memory.get("last")  # calls come in the same order, step after step
        self._exchange = self._prepared(self._guesses.get(self._guess_by, {}))
        self._exchange.start(alone=alone and SerialQueue.of(self.transport).idle)
        return self

    def inside(self, exchange: Exchange, facts: SourceFacts) -> Call:
        """Start and finish as a part of that exchange, in its turn. All ranks know what the source is."""
        self._exchange = self._prepared(vars(facts), again=exchange).start()
        return self.finish()

    def run(self) -> Call:
        """Carry it out and wait for it."""
        return SerialQueue.of(self.transport).run(self.finish)

    def submit(self) -> Future[Call]:
        """Carry it out beside the caller, after those that were submitted before."""
        return SerialQueue.of(self.transport).submit(self.finish)

    def finish(self) -> Call:
        """Carry it out, here and now."""
        assert self._exchange is not None, "start first"
        try:
            self._finish(self._exchange)
        except BaseException as error:  # also an interrupt
            error.add_note(self._where())
            raise
        return self

    def _finish(self, exchange: Exchange) -> None:
        told = exchange.finish()
        if told is not None:
            facts = next(fields for fields in told if fields is not None)
            learned = {name: facts[name] for name in FACTS}
            self._remember(learned)
            self._exchange = self._prepared(learned, again=exchange).start()
            if self._exchange.finish() is not None:
                raise ExchangeError("the ranks that were told what the source is still take it to be something else")
        if not exchange.again:
            self.transport.memory["last"] = self.work.facts
        if self.work.losses is not None:
            self._refuse_losses(self.work.losses, exchange)
        if self.options.verify:
            verify(self, exchange)

    def _refuse_losses(self, losses: Losses, exchange: Exchange) -> None:
        """Of values that are known only now, on the ranks that reduced them."""
        lost = Lost(NAME, self.work.facts.dtype, self.work.dtype, losses[NAME])
        written = "Nothing was written" if self._out is None else "out= was written"
        refuse_loss(worst_of_all(self.transport, [lost], apart=exchange.number), written)

    def _remember(self, facts: Mapping[str, Any]) -> None:
        if len(self._guesses) > MOST_REMEMBERED:
            self._guesses.clear()
        self._guesses[self._guess_by] = facts
        self._guesses.setdefault((self.key, SourceFacts(**facts)), facts)  # it may come again at once

    def _where(self) -> str:
        work = getattr(self, "work", None)
        move = f"from {work.plan.source!r} to {work.plan.target!r}" if work else "of which this rank knows no more"
        writing = self._out is not None and self._exchange is not None and self._exchange.writing
        return f"in a {self.operation} {move}" + "; what was given as out= may be partly written" * writing

    @staticmethod
    def value(
        transport: GroupTransport, held: Held, facts: SourceFacts, layout: Layout, within: Exchange
    ) -> list[torch.Tensor]:
        """This rank's local tensors of the value of a partial source in another layout: a call inside of another."""
        apart, known = replace(held, gradient=False), replace(facts, gradient=False)
        call = Call(transport, apart, lambda _: Own(layout), Options()).inside(within, known)
        return list(call.work.move.target)

    # --- what this rank takes it to be -------------------------------------------------------------------------------

    def _prepared(self, known: Mapping[str, Any], again: Exchange | None = None) -> Exchange:
        """The exchange as this rank sees it. What goes wrong is told to all: every rank raises it, nobody waits."""
        try:
            if self.held.error is not None:
                raise self.held.error
            sure = self.held.known()
            if len(sure) == len(FACTS) or again is not None:
                return self._sure({**known, **sure}, frozenset(), again)
            return self._guess({**known, **sure}, frozenset(FACTS).difference(sure) | {"target"})
        except Exception as error:
            return Exchange(self.transport, Terms({"operation": self.operation}, error=error), again=again)

    def _sure(self, facts: Mapping[str, Any], guessed: frozenset[str], again: Exchange | None) -> Exchange:
        found = SourceFacts(**facts)
        self.work = Work.of(self.transport, self.held, found, self._target(found.shape), self.options, self._out)
        terms = self._terms(facts, self.work.plan.target, guessed)
        device = self.work.move.source[0].device if self.work.move.source else torch.device(found.device)
        direct, fresh = self.options.transport != "group", self._out is None
        return Exchange(self.transport, terms, [self.work.move], device=device, fresh=fresh, again=again, direct=direct)

    def _guess(self, facts: Mapping[str, Any], guessed: frozenset[str]) -> Exchange:
        """What it was the last time; where that cannot be, or there was none, those who know will tell."""
        try:
            return self._sure(facts, guessed, None)
        except Exception:  # of a guess: it says nothing about the call
            unknown = dict.fromkeys(FACTS, "unknown") | self.held.known()
            return Exchange(self.transport, self._terms(unknown, "unknown", guessed))

    def _terms(self, facts: Mapping[str, Any], target: object, guessed: frozenset[str]) -> Terms:
        options, hosts = self.options, self.options.hosts
        named = sorted(map(str, hosts.items())) if isinstance(hosts, Mapping) else getattr(hosts, "hosts", hosts)
        asked = {
            "dtype=": options.dtype,
            "max_bytes=": options.max_bytes,
            "hosts=": str(named),
            "verify=": options.verify,
            "transport=": options.transport,
            "overflow=": options.overflow,
        }
        return Terms({"operation": self.operation, **{f: facts[f] for f in FACTS}, "target": target, **asked}, guessed)
