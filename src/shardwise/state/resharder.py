"""Resharder: plan once, then move the current values of one model into another, step after step."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from functools import partial
from itertools import chain

import torch
import torch.distributed as dist
from torch.autograd.graph import increment_version

from shardwise.containers.description import Descriptions, describe_all, tensors_in
from shardwise.containers.memory import check_written, shared
from shardwise.exchange.messages import Tensors
from shardwise.exchange.overflow import Losses, Overflow, check_overflow, refuse_loss
from shardwise.job.agree import agree_on, refusals, tell_all
from shardwise.job.casts import Cast, Change, TargetCasts, check_changes
from shardwise.job.job import Job, Tell
from shardwise.job.names import Rename
from shardwise.job.plan import HostsOption, ModelPlan, TensorInfo
from shardwise.job.progress import Progress, check_progress, reporter
from shardwise.job.remap import Remap, check_kept, links, partly_filled
from shardwise.job.session import accepts_wire, check_owners, group_transport
from shardwise.job.side import FreshSide, LiveSide, combine_descriptions, refuse_several_jobs
from shardwise.job.zeros import zeros_infos, zeros_memory
from shardwise.quantized.moves import Rule, check_used, split_rules, value_shapes
from shardwise.quantized.recognition import Quantized, recognize
from shardwise.quantized.sides import CodedLinks, QuantizingSide
from shardwise.state.traverse import StateDict, dotted, flatten_state_dict
from shardwise.transports import GroupTransport, TransportChoice


class Resharder:
    """Moves the values of a source state dict into the tensors of a target state dict, in place.

    Every rank of the group creates one, and all ranks call `run` together. A rank that holds nothing of one side passes
    None for it; a tensor of which it holds nothing may be None, too. `rename`: the target names of source tensors, by a
    mapping or rules with stars, or by a function. `remap`: rules to join, split, transpose or pad tensors (Concat,
    Interleaved, Stack, Transposed, Rotary, Padded), and Quantized for tensors that are codes and scales on one side or
    both. `cast=True`: float64, float32, float16 and bfloat16 are cast to the target's dtype; other dtypes, such as
    those of quantized codes, only by rules [(name, dtype), ...] with the full name of the target. `overflow="refuse"`:
    write nothing if a value is out of range for its target; "allow" casts it. `strict=False`: leave out sources without
    a target. `max_bytes`: stage at most this much at a time. `verify`: compare, and write only if all values are right.
    `plan`: the text of a plan file, which must be of this plan. `transport`: as in `reshard`.
    """

    @accepts_wire
    def __init__(
        self,
        source: StateDict | None,
        target: StateDict | None,
        *,
        group: dist.ProcessGroup | None = None,
        rename: Rename = None,
        remap: Iterable[Rule] = (),
        cast: bool | Cast = False,
        overflow: Overflow = "refuse",
        strict: bool = True,
        max_bytes: int | None = None,
        hosts: HostsOption = None,
        verify: bool = False,
        plan: str | None = None,
        progress: Progress = None,
        transport: TransportChoice = "auto",
    ) -> None:
        self._verify, self._progress, self._transport = verify, progress, group_transport(group)
        values, by_rank = tell_all(self._transport, "Resharder", lambda: _describe(self._transport, source, target))
        with refusals("Resharder"):
            sources, targets = ({rank: both[side] for rank, both in by_rank.items()} for side in (0, 1))
            refuse_several_jobs(sources, self._transport)
            infos = combine_descriptions(sources, "source"), combine_descriptions(targets, "target")

        self._infos, self._losses = infos, Losses()
        counted, rules = self._losses if overflow == "refuse" else None, split_rules(remap)

        def make() -> tuple[ModelPlan, tuple[CodedLinks, QuantizingSide, LiveSide]]:
            check_progress(progress)
            self._transport.check_choice(transport)
            check_overflow(overflow)
            made, coded = _plan(self._transport, infos, rename, rules, TargetCasts.of(cast), strict, max_bytes, hosts)
            if plan is not None:
                made.check(plan)
            zeros = zeros_memory({name: made.sources[name] for name in coded.zeros()}, self._transport.me)
            source = QuantizingSide({**values[0], **zeros}, list(made.sources), coded.quantized, self._transport)
            buffers = coded.computed.buffers(values[1], self._transport.me, group, counted)
            target = LiveSide({**values[1], **buffers}, [*made.targets, *coded.computed.names])
            _check(made, source, target, infos, self._transport.me, apart=not verify)
            return made, (coded, source, target)

        same = {"verify": verify, "cast": str(cast), "overflow": overflow, "strict": strict, "max_bytes": max_bytes}
        same |= {"transport": transport, "quantized": str(rules[0])}
        self.plan, (self._coded, self._source, self._target) = agree_on(self._transport, "Resharder", make, same)
        self._job = Job(self._transport, self.plan, "sync", transport, overflow=overflow)

    def __repr__(self) -> str:
        return f"Resharder({self.plan!r})"

    def run(self) -> None:
        """Move the current values. Every rank of the group calls. All waits share one timeout, that of the group."""
        first = self._transport.me == self._transport.owners[0]
        bar = reporter(self._progress, self._job.total, "sync", here=first)
        with self._transport.budget(), torch.no_grad(), bar as progress:
            self._losses.clear()
            self._source.start()
            if self._verify:
                self._run_verified(progress)
                return
            # kept moves would keep memory that is handed over, or codes of earlier values
            keep = not (self._job.delivers or self._coded.quantized)
            try:
                self._job.run(self._source, self._target, check=self._check, fresh=False, keep=keep, progress=progress)
            finally:  # autograd does not see it
                increment_version(self._job.written if keep else [*chain(*self._target.lasting().values())])
            self._refuse_losses()

    def _refuse_losses(self) -> None:
        """Refuse values of any rank that were out of range for their targets once they were dequantized."""

        def say() -> tuple[None, None]:
            refuse_loss(self._losses.per_tensor(), "All tensors of the target were written")
            return None, None

        if self._coded.computed.may_lose:
            tell_all(self._transport, "sync", say)

    def _run_verified(self, progress: Tell) -> None:
        """Into temporary memory first: the target is written once all ranks have verified the values."""
        aside = FreshSide(self.plan.targets, self._device_of, self._transport.me)
        shapes = {name: info.shape for name, info in self.plan.targets.items()}
        for name in partly_filled((planned.link for planned in self.plan.links), shapes):
            for ours, theirs in zip(aside.memory(name), self._target.memory(name), strict=True):
                ours.copy_(theirs)
        self._job.run(self._source, aside, check=self._check, verify=True, progress=progress)
        try:
            for name in self.plan.targets:
                for ours, theirs in zip(self._target.memory(name), aside.memory(name), strict=False):
                    ours.copy_(theirs)  # which autograd does see
            self._job.deliver(partial(self._target.filled, list(self.plan.targets)))
            self._refuse_losses()
        except BaseException as error:
            error.add_note("in a sync: its target may be partly written")
            raise

    def _device_of(self, name: str) -> torch.device:
        return self._target.device_of(name)

    def _check(self) -> None:
        _check(self.plan, self._source, self._target, self._infos, self._transport.me, apart=not self._verify)


def _check(
    plan: ModelPlan, source: LiveSide, target: LiveSide, infos: tuple[Infos, Infos], me: int, *, apart: bool
) -> None:
    """Refuse memory that does not match the layouts, cannot be written, or (with `apart`) is on both sides."""
    targets = target.checked("target", {**infos[1], **plan.targets}, me)
    sources = source.checked("source", {**infos[0], **plan.sources}, me)
    for name, memory in targets.items():
        for tensor in memory:
            check_written(tensor, f"{name!r} of the target")
    _check_apart(plan, targets, sources if apart else {})  # verified values are written once all are read


def _check_apart(plan: ModelPlan, targets: Mapping[str, Tensors], sources: Mapping[str, Tensors]) -> None:
    """Refuse memory that would be written twice, or read after it was written.

    Tied targets may share all of their memory, and a tensor that does not change may be both source and target.
    """
    written = [("target", name, tensor) for name, memory in targets.items() for tensor in memory]
    read = [("source", name, tensor) for name, memory in sources.items() for tensor in memory]
    both = [*written, *read]
    for a, b in shared([tensor for *_, tensor in written], [tensor for *_, tensor in read]):
        (_, name, ours), (side, other, theirs) = both[a], both[b]
        same = ours.data_ptr() == theirs.data_ptr() and ours.shape == theirs.shape
        if not same or (side == "source" and (other, name) not in plan.kept):
            raise ValueError(f"{name!r} of the target shares memory with {other!r} of the {side}: give it its own")


def _tensors(state_dict: StateDict) -> dict[str, torch.Tensor | None]:
    """The tensors of a state dict by name; None for a tensor of which this rank holds nothing."""
    flat, paths = flatten_state_dict(state_dict)
    tensors = tensors_in(flat)
    several = next((dotted(paths[name]) for name in tensors if dotted(paths[name]) != name), None)
    if several is not None:  # the order of the dicts would decide which of them has the name
        raise ValueError(f"two leaves of a state dict are both called {several!r}: give one of them another key")
    return tensors


Infos = dict[str, TensorInfo]
Values = tuple[Mapping[str, object], Mapping[str, object]]


def _describe(
    transport: GroupTransport, source: StateDict | None, target: StateDict | None
) -> tuple[Values, tuple[Descriptions | None, Descriptions | None]]:
    """This rank's tensors of both sides, and their descriptions."""
    sides = [None if given is None else _tensors(given) for given in (source, target)]
    known = [None if side is None else describe_all(side, transport) for side in sides]
    return (sides[0] or {}, sides[1] or {}), (known[0], known[1])


def _plan(
    transport: GroupTransport,
    known: tuple[Infos, Infos],
    rename: Rename,
    rules: tuple[Sequence[Quantized], Sequence[Remap]],
    cast: TargetCasts,
    strict: bool,
    max_bytes: int | None,
    hosts: HostsOption,
) -> tuple[ModelPlan, CodedLinks]:
    for side, tensors in zip(("source", "target"), known, strict=True):
        check_owners(transport.owners, {f"{name!r} of the {side},": tensor.layout for name, tensor in tensors.items()})
    quantized, regrouped = rules
    by_side = recognize(known[0], quantized), recognize(known[1], quantized)
    for rule in quantized:
        check_used([rule], *(recognize(side, [rule]) for side in known))
    given, wanted = (value_shapes(side, tensors) for side, tensors in zip(known, by_side, strict=True))
    planned = links(given, wanted, rename=rename, remap=regrouped, strict=strict)
    check_kept(planned, wanted, {name for name, one in known[1].items() if one.delivered})
    cast.check_used(known[1])
    coded = CodedLinks.of(planned, known, by_side)
    targets = coded.targets(known[1])
    sources = coded.sources(known[0]) | zeros_infos(coded.links, targets)
    pairs = ((link.source, link.target) for link in coded.links)
    changes = [Change(one, other, sources[one].dtype, targets[other].dtype) for one, other in pairs]
    check_changes(changes, partial(cast.check, sources=sources, targets=targets))
    return ModelPlan.of(coded.links, sources, targets, max_bytes=max_bytes, hosts=hosts), coded
