"""One reshard on one rank: a job of one link, agreed on with the others. Autograd is not seen here.

A `Source` is what this rank brings, `Facts` are what all ranks must know of it. `Call.start` tells the others what this
rank knows, and with all facts `Plans` has the plan. `Call.run` then moves the data.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, NamedTuple

import torch

from shardwise.containers.container import Container, container_of, on_transport
from shardwise.containers.memory import check_memory
from shardwise.errors import ExchangeError
from shardwise.exchange import Exchange, Move, Proposal
from shardwise.exchange.messages import Tensors
from shardwise.exchange.overflow import Overflow, check_overflow
from shardwise.job.casts import check_dtype
from shardwise.job.job import Job
from shardwise.job.plan import HostsOfGroup, ModelPlan, TensorInfo, single
from shardwise.job.session import check_owners
from shardwise.job.verify import key_part
from shardwise.layout import Layout, local_shapes
from shardwise.planning import Plan
from shardwise.tensor.output import Shapes, memory_for
from shardwise.transports import GroupTransport, TransportChoice

TargetContainer = Callable[[tuple[int, ...]], Container]  # the target's container, for a tensor of that shape
MOST_PLANS = 4096  # that are kept for a transport


@dataclass(frozen=True)
class Options:
    """How to move."""

    dtype: torch.dtype | None = None
    max_bytes: int | None = None
    hosts: Any = "auto"
    verify: bool = False
    transport: TransportChoice = "auto"
    overflow: Overflow = "refuse"

    @cached_property
    def fields(self) -> dict[str, object]:
        """What all ranks must give alike, by the names of the keywords."""
        hosts = self.hosts
        named = sorted(map(str, hosts.items())) if isinstance(hosts, Mapping) else getattr(hosts, "hosts", hosts)
        return {f"{name}=": value for name, value in vars(self).items()} | {"hosts=": str(named)}


@dataclass(frozen=True)
class Facts:
    """What all ranks must know of the source. One that holds nothing of it does not know."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    source: Layout
    device: str  # the kind of device: messages travel there
    gradient: bool  # followed by autograd


FACTS = tuple(Facts.__dataclass_fields__)


class Call:
    """One call: `start` where it is made, `run` or `submit` to carry it out; then it has all of the result."""

    facts: Facts
    target: Container
    job: Job
    move: Move
    dtype: torch.dtype  # of the result
    followed: bool  # by autograd

    def __init__(
        self,
        transport: GroupTransport,
        source: Source,
        target: TargetContainer,
        options: Options,
        *,
        out: Any = None,
        operation: str = "reshard",
    ) -> None:
        self.transport, self.source, self.options, self.operation = transport, source, options, operation
        self._target, self._out = target, out
        self._exchange: Exchange | None = None

    @property
    def plan(self) -> Plan:
        """Between the two layouts."""
        return self.move.plan

    def start(self, *, alone: bool = True) -> Call:
        """Tell the others what this rank knows of the call. `alone`: nothing else is under way."""
        known = self.source.facts()
        self._exchange = self._make_exchange(known, frozenset(FACTS).difference(known))
        with self._noting():
            self._exchange.start(alone=alone and self.transport.queue.idle)
        return self

    def run(self) -> Call:
        """Carry it out and wait for it."""
        return self.transport.queue.run(self._finish)

    def submit(self) -> Future[Call]:
        """Carry it out beside the caller, after the calls that were submitted before."""
        return self.transport.queue.submit(self._finish)

    def _finish(self) -> Call:
        assert self._exchange is not None, "start first"
        with self._noting():
            self._carry_out(self._exchange)
        return self

    @contextmanager
    def _noting(self) -> Iterator[None]:
        """Errors, and interrupts, say which move it was."""
        try:
            yield
        except BaseException as error:
            error.add_note(self._where())
            raise

    def _carry_out(self, exchange: Exchange) -> None:
        answers = exchange.finish()
        if answers is not None:  # some ranks hold nothing of the source: now all know what it is
            facts = next(fields for fields in answers if fields is not None)
            self._exchange = self._make_exchange({name: facts[name] for name in FACTS}, frozenset(), part_of=exchange)
            if self._exchange.start().finish() is not None:
                raise ExchangeError("ranks that were told what the source is still do not know it")
        written = "Nothing was written" if self._out is None else "out= was written"
        self.job.conclude([self.move], written, exchange, verify=self.options.verify)

    def _where(self) -> str:
        planned = hasattr(self, "move")
        move = f"from {self.plan.source!r} to {self.plan.target!r}" if planned else "of which this rank knows no more"
        writing = self._out is not None and self._exchange is not None and self._exchange.writing
        return f"in a {self.operation} {move}" + "; what was given as out= may be partly written" * writing

    def _make_exchange(
        self, facts: Mapping[str, Any], unknown: frozenset[str], part_of: Exchange | None = None
    ) -> Exchange:
        """The exchange as this rank sees it. What goes wrong is told to all: every rank raises it, nobody waits."""
        try:
            if self.source.error is not None:
                raise self.source.error
            if unknown:
                lacking = {name: facts.get(name, "unknown") for name in FACTS}
                proposal = self._proposal(lacking, "unknown", unknown | {"target"})
                return Exchange(self.transport, proposal, note=key_part() if self.options.verify else ())
            self._prepare(Facts(**facts))
            proposal = self._proposal(facts, self.plan.target, unknown)
            fresh, verify = self._out is None, self.options.verify
            return self.job.exchange(0, [self.move], proposal, fresh=fresh, part_of=part_of, verify=verify)
        except Exception as error:
            return Exchange(self.transport, Proposal({"operation": self.operation}, error=error), part_of=part_of)

    def _prepare(self, facts: Facts) -> None:
        """Plan it, and check it as far as one rank can; there is memory for the result then."""
        options, transport, target = self.options, self.transport, self._target(facts.shape)
        layout, device, becomes = target.layout, target.device, options.dtype or facts.dtype
        planned = transport.resource(Plans, lambda: Plans(transport)).of(facts, layout, options)
        self.job = Job(transport, planned.plan, self.operation, options.transport, overflow=options.overflow, shown=str)
        source = self.source.local(facts, transport.me, planned.source)
        self.job.refuse_losses(lambda _: source)
        self.followed = facts.gradient and (becomes.is_floating_point or becomes.is_complex)
        device = device or (source[0].device if source else torch.device(facts.device))
        memory = memory_for(
            self._out, target, planned.target, transport, becomes, source=source, device=device, followed=self.followed
        )
        self.move = self.job.move(0, source, memory)
        self.facts, self.target, self.dtype = facts, target, becomes

    def _proposal(self, facts: Mapping[str, Any], target: object, unknown: frozenset[str]) -> Proposal:
        fields = {"operation": self.operation, **{name: facts[name] for name in FACTS}, "target": target}
        return Proposal(fields | self.options.fields, unknown)


@dataclass(frozen=True)
class Source:
    """What a rank brings to a call: its container and tensors of the source. None is what it does not know."""

    container: Container | None = None
    tensors: tuple[torch.Tensor, ...] = ()
    dtype: torch.dtype | None = None
    gradient: bool | None = None
    error: Exception | None = None
    stand_in: torch.Tensor | None = None  # for backward through an earlier reshard, of which this rank got nothing

    @staticmethod
    def of(make: Callable[[], Any]) -> Source:
        """From the sharded tensor, or None, that is made here. What goes wrong is raised on all ranks, later."""
        try:
            x = make()
            if x is None:
                return Source.by(None, (), None)
            container = container_of(x)
            _ = container.layout  # here, where what it refuses is kept for all
            source = Source.by(container, tuple(container.disassemble(x)), getattr(x, "dtype", None))
            return replace(source, stand_in=getattr(x, "_stand_in", None))
        except Exception as error:  # the others have to hear of it first
            return Source(error=error)

    @staticmethod
    def by(container: Container | None, tensors: tuple[torch.Tensor, ...], dtype: torch.dtype | None) -> Source:
        """From the tensors of a container."""
        gradient = any(t.requires_grad for t in tensors) if tensors else None
        followed = gradient if torch.is_grad_enabled() else False
        return Source(container, tensors, tensors[0].dtype if tensors else dtype, followed)

    def on(self, transport: GroupTransport) -> Source:
        """With the owners of a transport."""
        try:
            container = self.container and on_transport(self.container, transport)
            return self if container is self.container else replace(self, container=container)
        except Exception as error:
            return Source(error=error)

    def facts(self) -> dict[str, Any]:
        """The facts that this rank knows, by name."""
        layout = self.container and self.container.layout
        device = self.tensors[0].device.type if self.tensors else None
        facts = (layout and layout.shape, self.dtype, layout, device, self.gradient)
        return {name: fact for name, fact in zip(FACTS, facts, strict=True) if fact is not None}

    def local(self, facts: Facts, me: int, expected: Shapes) -> Tensors:
        """This rank's local tensors, which must be those of the layout."""
        tensors = [] if self.container is None else self.container.local(list(self.tensors))
        shapes = tuple(tuple(t.shape) for t in tensors)
        if not tensors and all(0 in shape for shape in expected):
            return [torch.empty(shape, dtype=facts.dtype, device=facts.device) for shape in expected]
        if shapes != expected:
            brought = f"tensors of shapes {list(shapes)}" if tensors else "None"
            raise ExchangeError(
                f"the source {facts.source!r} gives rank {me} tensors of shapes {list(expected)}, not {brought}"
                + ("" if tensors else ": pass None only on ranks that it does not name")
            )
        for tensor in tensors:
            check_memory(tensor, "the source")
        return [t.resolve_conj().resolve_neg() for t in tensors]


class PlannedCall(NamedTuple):
    """The plan of a call, and the shapes of this rank's local tensors on both sides."""

    plan: ModelPlan
    source: Shapes
    target: Shapes


class Plans:
    """The plans of calls on a transport, kept by what they are of: the same moves come back step after step."""

    def __init__(self, transport: GroupTransport) -> None:
        self._transport, self._plans = transport, dict[object, PlannedCall]()

    def of(self, facts: Facts, target: Layout, options: Options) -> PlannedCall:
        """Checked and planned when it comes for the first time."""
        key = facts, target, tuple((type(value), str(value)) for value in options.fields.values())
        plan = self._plans.get(key)
        if plan is None:
            if len(self._plans) >= MOST_PLANS:
                self._plans.clear()
            plan = self._plans[key] = self._plan(facts, target, options)
        return plan

    def _plan(self, facts: Facts, target: Layout, options: Options) -> PlannedCall:
        self._transport.check_choice(options.transport)
        check_overflow(options.overflow)
        check_dtype(options.dtype)
        check_owners(self._transport.owners, {"the source": facts.source, "the target": target})
        ours = TensorInfo(facts.shape, facts.dtype, facts.source, facts.device)
        theirs = TensorInfo(target.shape, options.dtype or facts.dtype, target, facts.device)
        hosts, me = HostsOfGroup.of(options.hosts, self._transport.hosts), self._transport.me
        plan = single(ours, theirs, options.max_bytes, hosts)
        return PlannedCall(plan, local_shapes(facts.source, me), local_shapes(target, me))
