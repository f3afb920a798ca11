"""Resharder: plan once, then move the current values of one model into another, step after step."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from itertools import chain
from typing import Literal, overload

import torch
import torch.distributed as dist
from torch.autograd.graph import increment_version

from shardwise.exchange.messages import Tensors
from shardwise.exchange.overflow import Losses, Overflow, check_overflow, refuse_loss
from shardwise.job.agree import agree_on, refusals, tell_all, total_of_all
from shardwise.job.background import BackgroundRun, OwnStream, OwnThread, RunHandle
from shardwise.job.casts import Cast, TargetCasts
from shardwise.job.deltas import DeltaOption, DeltaRuns, check_delta
from shardwise.job.job import Job, Tell
from shardwise.job.names import Rename
from shardwise.job.own_group import OwnGroup, own_group
from shardwise.job.plan import HostsOption, ModelPlan
from shardwise.job.progress import Progress, check_progress, reporter
from shardwise.job.remap import partly_filled
from shardwise.job.session import accepts_wire, group_transport
from shardwise.job.side import FailedSide, FreshSide, LiveSide, combine_descriptions, refuse_several_jobs
from shardwise.job.snapshot import Snapshot
from shardwise.job.zeros import zeros_memory
from shardwise.planning import size
from shardwise.quantized.moves import Rule, split_rules
from shardwise.quantized.sides import CodedLinks, QuantizingSide
from shardwise.state.memory_checks import check_apart, check_memory, check_unshared, checked_target
from shardwise.state.sync_plan import describe_sides, plan_sync
from shardwise.state.traverse import StateDict
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

    `run(async_op=True)` copies this rank's source and returns: the source may change while the copy is moved.

    `delta=True`: between hosts, send only the elements that changed since the last run, bit-for-bit. Each rank keeps a
    copy of what it sends there (`delta_bytes`). The first run sends everything. So does a run after one that failed, or
    after anybody else wrote to a target of any rank: a checksum of all targets tells. Targets that are handed over and
    partial tensors are always sent whole. "auto" stops for some runs where most elements change. "always" sends deltas
    between ranks of one host, too.
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
        hosts: HostsOption = "auto",
        verify: bool = False,
        plan: str | None = None,
        progress: Progress = None,
        transport: TransportChoice = "auto",
        delta: DeltaOption = False,
    ) -> None:
        self._verify, self._progress, self._transport = verify, progress, group_transport(group)
        values, by_rank = tell_all(
            self._transport, "Resharder", lambda: describe_sides(self._transport, source, target)
        )
        with refusals("Resharder"):
            sources, targets = ({rank: both[side] for rank, both in by_rank.items()} for side in (0, 1))
            refuse_several_jobs(sources, self._transport)
            infos = combine_descriptions(sources, "source"), combine_descriptions(targets, "target")

        self._infos, self._losses = infos, Losses()
        counted, rules = self._losses if overflow == "refuse" else None, split_rules(remap)

        def make() -> tuple[ModelPlan, tuple[CodedLinks, LiveSide, LiveSide]]:
            check_progress(progress)
            self._transport.check_choice(transport)
            check_overflow(overflow)
            check_delta(delta)
            made, coded = plan_sync(
                self._transport, infos, rename, rules, TargetCasts.of(cast), strict, max_bytes, hosts
            )
            if plan is not None:
                made.check(plan)
            zeros = zeros_memory({name: made.sources[name] for name in coded.zeros()}, self._transport.me)
            source = LiveSide({**values[0], **zeros}, coded.read(made.sources))
            buffers = coded.computed.buffers(values[1], self._transport.me, group, counted)
            target = LiveSide({**values[1], **buffers}, [*made.targets, *coded.computed.names])
            check_memory(made, source, target, infos, self._transport.me, apart=not verify)
            return made, (coded, source, target)

        same = {"verify": verify, "cast": str(cast), "overflow": overflow, "strict": strict, "max_bytes": max_bytes}
        same |= {"transport": transport, "quantized": str(rules[0]), "delta": delta}
        self.plan, (self._coded, self._live, self._target) = agree_on(self._transport, "Resharder", make, same)
        self._choice, self._overflow, self._zeros = transport, overflow, frozenset(self._coded.zeros())
        self._use(self._transport)
        self._own: OwnGroup | None = None  # of asynchronous runs
        self._thread, self._stream, self._copy, self._last = OwnThread(), OwnStream(), None, None
        linked = delta == "always" or transport == "group" or not self._transport.on_one_host
        total = lambda numbers: total_of_all(self._transport, "sync", numbers)  # noqa: E731  # which may become another
        self._deltas = DeltaRuns(delta if linked else False, total)

    @property
    def delta_bytes(self) -> int:
        """Bytes of memory in which this rank keeps what it sent last, to find out what changed.

        It is allocated in the first run, and given back while "auto" pauses. While a run compares, it takes one more
        byte for each element of the tensors of one exchange.
        """
        return self._job.delta_bytes(self._deltas.mode)

    def explain(self) -> str:
        """The plan in words, and the memory that this rank keeps between runs.

        >>> import shardwise as sw
        >>> from shardwise.testing import on_ranks
        >>> def work(rank):
        ...     source, target = sw.ShardedTensor(torch.ones(2, 2), "4x2/S0@2"), sw.empty("4x2/S1@2")
        ...     return sw.Resharder({"w": source}, {"w": target}, delta="always").explain()
        >>> print(on_ranks(2, work)[0])
        1 tensors become 1, in 1 exchange
        16 B between ranks, 16 B stay; no rank stages more than 36 B
             1 x 4x2/S0@2 float32 -> 4x2/S1@2 float32: 16 B move, as w
        this rank keeps 16 B for deltas
        run(async_op=True) takes 16 B on this rank, for a copy of its source
        """
        kept = [f"this rank keeps {size(self.delta_bytes)} for deltas"] if self._deltas.mode else []
        copied = f"run(async_op=True) takes {size(self.snapshot_bytes)} on this rank, for a copy of its source"
        return "\n".join([self.plan.explain(), *kept, copied])

    def __repr__(self) -> str:
        return f"Resharder({self.plan!r})"

    _copy: _Copy | None
    _last: BackgroundRun | None

    @overload
    def run(self, *, async_op: Literal[False] = False) -> None: ...
    @overload
    def run(self, *, async_op: Literal[True]) -> RunHandle: ...
    @overload
    def run(self, *, async_op: bool) -> RunHandle | None: ...

    def run(self, *, async_op: bool = False) -> RunHandle | None:
        """Move the current values. Every rank of the group calls. All waits share one timeout, that of the group.

        `async_op=True`: copy this rank's source (`snapshot_bytes`), and return a handle. The source may change from
        then on. A thread moves the copy; it also calls `progress` and loaders of engines. Read the target after
        `handle.wait()`. The next run waits for this one, and raises its error if no `wait` has. The first such run
        connects a process group of its own, so that it does not meet the collectives of the caller: all ranks give
        async_op=True there. Later, each rank may choose.

        With nccl the move has a stream and communicators of its own. Like all use of several communicators at a time,
        it may deadlock beside collectives of the caller, if kernels of one wait for those of the other.
        """
        self._raise_unseen()
        if async_op:
            self._last = self._prepare()
            self._last.start()
            return RunHandle(self._last)
        self._move(self._job, self._source, self._check)
        return None

    @property
    def snapshot_bytes(self) -> int:
        """The memory that asynchronous runs take on this rank, to copy its source: once, from the first run on."""
        return sum(tensor.nbytes for tensors in self._changing().values() for tensor in tensors)

    # --- asynchronous runs -------------------------------------------------------------------------------------------

    def _prepare(self) -> BackgroundRun:
        """The run, not started yet, with this rank's source copied."""
        if self._own is None:
            self._own = own_group(self._transport, "asynchronous sync", remedy="make a new Resharder")
            self._use(self._own.transport)
        with self._transport.guard("copying its source"):  # peers may still read from the copy of a run that broke
            pass
        work: Callable[[], None]
        try:
            copy = self._take()
            work = partial(self._move, copy.job, copy.source, self._check_target)
        except Exception as error:  # all ranks raise it when they wait
            work = partial(self._fail, error)
        # what autograd has saved of the target is no longer to be used, although it changes only later
        increment_version([*chain(*self._target.lasting().values())])
        return BackgroundRun(work, self._transport, self._thread, self._stream)

    def _take(self) -> _Copy:
        """Copy this rank's source, into the memory of the last run if it fits."""
        stamp, changing = self._live.stamp(), self._changing()
        if self._copy is None or stamp != self._copy.stamp:
            sources = self._live.checked("source", {**self._infos[0], **self.plan.sources}, self._transport.me)
            check_unshared(self._target.lasting(), sources)
            if self._copy is None or not self._copy.snapshot.fits(changing):
                self._copy = None  # released before the next is allocated
                self._copy = self._new_copy(changing)
            self._copy.stamp = stamp
        self._copy.snapshot.take(changing)
        return self._copy

    def _new_copy(self, changing: dict[str, Tensors]) -> _Copy:
        snapshot = Snapshot(changing, {name: self._live.memory(name) for name in self._zeros})
        return _Copy(snapshot, self._new_job(), QuantizingSide(snapshot, self._coded.quantized, self._transport))

    def _changing(self) -> dict[str, Tensors]:
        """The memory of the source that has to be copied: not the zeros of padding."""
        return {name: memory for name, memory in self._live.lasting().items() if name not in self._zeros}

    def _raise_unseen(self) -> None:
        """Wait for the last asynchronous run, and raise its error if no `wait` has, after the others know of it."""
        error = None if self._last is None else self._last.unseen_error()
        self._last = None
        if error is None:
            return
        if isinstance(error, Exception):
            with suppress(Exception):  # those that have seen it are in the next run already
                self._fail(error)
        error.add_note("in an asynchronous run before this one, for which nobody waited")
        raise error

    def _fail(self, error: Exception) -> None:
        """Take part in a run that this rank cannot make: it is refused on all ranks."""

        def check() -> None:
            raise error

        self._move(self._new_job(), QuantizingSide(FailedSide(error), self._coded.quantized, self._transport), check)

    # --- moves -------------------------------------------------------------------------------------------------------

    def _use(self, transport: GroupTransport) -> None:
        """Run over this transport from now on."""
        self._transport = transport
        self._job, self._source = self._new_job(), QuantizingSide(self._live, self._coded.quantized, transport)

    def _new_job(self) -> Job:
        return Job(self._transport, self.plan, "sync", self._choice, overflow=self._overflow)

    def _move(self, job: Job, source: QuantizingSide, check: Callable[[], None]) -> None:
        first = self._transport.me == self._transport.owners[0]
        bar = reporter(self._progress, job.total, "sync", here=first)
        with self._transport.budget(), torch.no_grad(), bar as progress:
            try:
                self._deltas.start(self._received(job))
                self._losses.clear()
                source.start()
                self._move_now(job, source, check, progress)
            except BaseException:
                self._deltas.failed()
                raise
            self._deltas.completed(self._received(job), job.traffic)

    def _move_now(self, job: Job, source: QuantizingSide, check: Callable[[], None], progress: Tell) -> None:
        if self._verify:
            self._move_verified(job, source, check, progress)
            return
        # kept moves would keep memory that is handed over, or codes of earlier values
        keep, mode = not (job.delivers or self._coded.quantized), self._deltas.mode
        changed = partial(self._changed, source)
        try:
            job.run(
                source, self._target, check=check, fresh=False, keep=keep, progress=progress, delta=mode,
                changed=changed,
            )  # fmt: skip
        finally:  # autograd does not see it
            increment_version(job.written if keep else [*chain(*self._target.lasting().values())])
        self._refuse_losses()

    def _changed(self, source: QuantizingSide, name: str, dtype: torch.dtype) -> Tensors | None:
        return self._deltas.changed(name, dtype, source.memory(name))

    def _received(self, job: Job) -> Tensors:
        """The memory that deltas are written to on this rank."""
        names = job.delta_ends(self._deltas.mode)[1]
        return [tensor for name in sorted(names) for tensor in self._target.memory(name)]

    def _refuse_losses(self) -> None:
        """Refuse values of any rank that were out of range for their targets once they were dequantized."""

        def say() -> tuple[None, None]:
            refuse_loss(self._losses.per_tensor(), "All tensors of the target were written")
            return None, None

        if self._coded.computed.may_lose:
            tell_all(self._transport, "sync", say)

    def _move_verified(self, job: Job, source: QuantizingSide, check: Callable[[], None], progress: Tell) -> None:
        """Into temporary memory first: the target is written once all ranks have verified the values."""
        aside = FreshSide(self.plan.targets, self._device_of, self._transport.me)
        shapes = {name: info.shape for name, info in self.plan.targets.items()}
        partly = partly_filled((planned.link for planned in self.plan.links), shapes)
        deltas = job.delta_ends(self._deltas.mode)[1] if self._deltas.compares else ()
        for name in dict.fromkeys([*partly, *sorted(deltas)]):
            for ours, theirs in zip(aside.memory(name), self._target.memory(name), strict=True):
                ours.copy_(theirs)
        mode, changed = self._deltas.mode, partial(self._changed, source)
        job.run(source, aside, check=check, verify=True, progress=progress, delta=mode, changed=changed)
        try:
            for name in self.plan.targets:
                for ours, theirs in zip(self._target.memory(name), aside.memory(name), strict=False):
                    ours.copy_(theirs)  # which autograd does see
            job.deliver(partial(self._target.filled, list(self.plan.targets)))
            self._refuse_losses()
        except BaseException as error:
            error.add_note("in a sync: its target may be partly written")
            raise

    def _device_of(self, name: str) -> torch.device:
        return self._target.device_of(name)

    def _check(self) -> None:
        check_memory(self.plan, self._live, self._target, self._infos, self._transport.me, apart=not self._verify)

    def _check_target(self) -> None:
        """The source was checked when it was copied."""
        targets = checked_target(self.plan, self._target, self._infos[1], self._transport.me)
        check_apart(targets, {})
        check_unshared(targets, self._live.lasting())


@dataclass
class _Copy:
    """What asynchronous runs send: the snapshot, and what is made for its memory. `stamp`: of the tensors it is of."""

    snapshot: Snapshot
    job: Job
    source: QuantizingSide
    stamp: object = None
