"""Run: the checkpoints of one training, a folder for each step; saves, resumes, and removes old ones."""

from __future__ import annotations

import logging
import time
from collections import deque
from collections.abc import Iterable, Mapping
from itertools import takewhile
from operator import index as whole_number
from types import TracebackType
from typing import Any, NamedTuple, Self, cast
from weakref import finalize

import torch
import torch.distributed as dist

from shardwise.checkpoint.async_saves import SaveHandle, SaveReport
from shardwise.checkpoint.keeping import Keeping, KeepOptions, leave_kept_steps
from shardwise.checkpoint.kept_loading import Resumed
from shardwise.checkpoint.kept_saves import keep_state, save_kept
from shardwise.checkpoint.resuming import Resuming
from shardwise.checkpoint.retention import Retention
from shardwise.checkpoint.run_claim import RunClaim
from shardwise.checkpoint.saving import save
from shardwise.checkpoint.step_folders import StepFolders
from shardwise.checkpoint.stopping import StopSignals
from shardwise.errors import CheckpointError
from shardwise.job.agree import Callers, total_of_all
from shardwise.job.names import Rename
from shardwise.job.remap import Remap
from shardwise.quoting import brief
from shardwise.state.traverse import StateDict
from shardwise.storage.paths import PathLike

LEASE = 600.0  # seconds: time to restart a job in
STEPS = 10**18  # steps are less than that: more digits than names and files hold are no step
log = logging.getLogger("shardwise")


class _Pending(NamedTuple):
    """A save that runs, and the path of the step that it is compared with."""

    step: int
    handle: SaveHandle
    earlier: str | None


class Run:
    """The checkpoints of one training in one folder. All ranks of the group make it, and call its methods together.

    >>> from shardwise import checkpoint
    >>> state = {"w": torch.zeros(2), "step": 0}
    >>> with checkpoint.Run("memory://trained", keep=2) as run:
    ...     start = run.resume(into=state) or 0
    ...     for step in range(start + 1, 5):
    ...         state["w"] += 1
    ...         run.save(step, {**state, "step": step})
    ...     start, run.steps(), run.latest()
    (0, [3, 4], 4)
    >>> with checkpoint.Run("memory://trained") as run:
    ...     run.resume(into=state), state["w"]
    (4, tensor([4., 4.]))

    `keep`: how many of the newest steps are kept, None for all; `keep_every=1000` also keeps every 1000th. Others are
    removed after a newer one is whole. `folder` is a path or URL that all ranks share. While a Run is open, another
    one on the same folder is refused.

    `memory=2`: the newest step is also kept in memory, in two copies on different hosts (on one host, beside different
    ranks), by processes that survive this one. `resume` of the next job takes it from there. They end with `close`, or
    `lease` seconds after the last process of the run has ended.
    """

    def __init__(
        self,
        folder: PathLike,
        *,
        keep: int | None = 3,
        keep_every: int | None = None,
        memory: int | None = None,
        lease: float = LEASE,
        group: dist.ProcessGroup | None = None,
    ) -> None:
        self._group, self._kept = group, f"keep={keep}, keep_every={keep_every}"
        self._keeping: Keeping | None = None
        self._left = False  # True once steps that jobs before have kept in memory do not count any more
        self._resumed: Resumed | None = None
        self._claim: RunClaim | None = None
        self._at: int | None = None  # the step that this training goes on from
        self._pending = deque[_Pending]()
        self._signals, self._stopping, self._closed = StopSignals(), False, False
        finalize(self, self._signals.restore)
        if memory is not None:
            self._kept += f", memory={memory}"
        same = {"folder": str(folder), "keep": keep, "keep_every": keep_every, "memory": memory, "lease": lease}
        try:
            self._open(folder, keep, keep_every, memory, lease, same)
        except BaseException:
            self._leave()
            raise

    def _open(
        self,
        folder: PathLike,
        keep: int | None,
        keep_every: int | None,
        memory: int | None,
        lease: float,
        same: Mapping[str, object],
    ) -> None:
        """All ranks together: refuse what is invalid or in use, and start keepers."""
        callers, options = Callers("Run", self._group), KeepOptions(1 if memory is None else memory, lease)

        def start() -> tuple[StepFolders, None]:
            self._retention = Retention(keep, keep_every)
            options.check()
            folders = StepFolders(folder)
            folders.check()
            self._claim = RunClaim(folders.run) if callers.first else None
            return folders, None

        self._folders, _ = callers.tell(start, same)
        if memory is not None:
            self._keeping = Keeping(callers, self._folders.run, options)

    def __repr__(self) -> str:
        return f"Run({self._folders.run.path!r}, {self._kept}{', closed' * self._closed})"

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: TracebackType | BaseException | None) -> None:
        """Close it. After an error of this rank, others may be elsewhere: then it does not wait for them."""
        if kind is None:
            self.close()
        else:
            self._leave()

    def close(self) -> None:
        """Wait for the save that is running, let other jobs write to the folder, and free what is kept in memory.

        With `memory=` all ranks call it: what is kept stays for its lease if one of them does not.
        """
        if not self._closed:
            try:
                self._collect_all()
                if self._keeping is not None:
                    self._callers("Run.close").all_do(lambda: None)
                    self._keeping.end()
            finally:
                self._leave()

    def _leave(self) -> None:
        self._closed = True
        self._signals.restore()
        if self._keeping is not None:
            self._keeping.leave()
        if self._claim is not None:
            self._claim.release()

    def _callers(self, operation: str) -> Callers:
        if self._closed:
            raise CheckpointError(f"{operation}: the run {self._folders.run.path} is closed: make a new Run")
        return Callers(operation, self._group)

    def _callers_in_place(self, operation: str) -> Callers:
        """They look at the files."""
        callers = self._callers(operation)
        if self._folders.relative:
            callers.all_do(self._folders.check_directory)
        return callers

    # --- save ---------------------------------------------------------------------------------------------------------

    def save(
        self,
        step: int,
        state: StateDict,
        *,
        async_op: bool = False,
        in_flight: int = 1,
        incremental: bool = False,
        **options: Any,
    ) -> SaveHandle | SaveReport | None:
        """Save the state of a step; then remove old steps. `options` are those of `checkpoint.save`.

        Steps rise. Saving the same step again replaces it. After `resume(step=...)` from an earlier step, the first
        save drops the later ones. With `async_op=True` it returns the handle of `checkpoint.save`: the step is whole
        after its `wait()`, or after the next call of this run that says so. At most `in_flight` saves run at a time:
        the next one waits for the oldest. They become whole in the order of their steps.

        `incremental=True`: tensors that did not change on a rank since the newest step that is whole are not written
        again. What newer steps need of a removed one stays in its folder. Returns a `SaveReport`.

        With `memory=` the step is kept in memory first, and written from there: one save runs at a time.
        """
        callers, begun = self._callers_in_place("Run.save"), time.monotonic()
        several = async_op and type(in_flight) is int and self._keeping is None
        self._collect(max(in_flight - 1, 0) if several else 0)
        waited = time.monotonic() - begun
        same = {"async_op": async_op, "in_flight": brief(in_flight), "incremental": brief(incremental)}
        number, before = self._begun(callers, step, same, incremental=incremental)
        options |= {"incremental": before or incremental, "async_op": async_op, "in_flight": in_flight}
        done = self._saved(state, self.path(number), options)
        self._at = number
        if not async_op:
            self._conclude(callers, number)
            return done
        handle = cast("SaveHandle", done)
        handle.stalled(handle.stall + waited, handle.waited + waited)
        self._pending.append(_Pending(number, handle, before))
        return handle

    def _saved(self, state: StateDict, path: str, options: Mapping[str, Any]) -> SaveHandle | SaveReport | None:
        if self._keeping is not None:
            return save_kept(state, path, self._keeping, group=self._group, **options)
        return cast("SaveHandle | SaveReport | None", save(state, path, group=self._group, **options))

    def keep(self, step: int, state: StateDict, *, rename: Rename = None, remap: Iterable[Remap] = ()) -> None:
        """Keep the state of a step in memory only: more often than `save`, which keeps it there, too.

        It needs `memory=`. Training waits for a copy of this rank's tensors and of those that it holds for others.
        """
        callers = self._callers_in_place("Run.keep")
        if self._keeping is None:
            raise CheckpointError("Run.keep needs memory=: Run(folder, memory=2) keeps each step in two places")
        if self._pending and self._pending[0].step != self._keeping.newest:
            self._collect()  # its memory is needed
        number, _ = self._begun(callers, step, {}, incremental=False)
        keep_state(callers, state, self._keeping, rename, remap)
        self._at = number

    def _begun(
        self, callers: Callers, step: int, same: Mapping[str, object], *, incremental: bool
    ) -> tuple[int, str | None]:
        """The step's number, once it is known that it comes last; and the path of the step to compare it with."""
        kept = self._keeping.find(callers) if self._keeping is not None and self._at is None else {}

        def begin() -> tuple[int, str | None]:
            number = _checked_step(step)
            if not isinstance(incremental, bool):
                raise TypeError(f"incremental={brief(incremental)}: give True or False, a run knows the step before")
            if callers.first:
                self._begin(number, max(kept, default=None))
            return number, self._folders.before(number) if callers.first and incremental else None

        number, earlier = callers.tell(begin, {"step": brief(step), **same})
        if self._keeping is not None:
            self._keeping.begin(callers, number, self._at)
        return number, next(iter(earlier.values()))

    def _begin(self, step: int, kept: int | None) -> None:
        """Refuse a step that would not come last. Later ones that this training did not resume from go first."""
        assert self._claim is not None
        self._claim.check()
        if self._at is None:
            there = [one for one in (next(iter(self._folders.saved()), None), kept) if one is not None]
            newest = max(there, default=None)
            if newest is not None and newest >= step:
                raise CheckpointError(
                    f"{self._folders.run.path} has step {newest}, so step {step} would not be the newest: resume() "
                    f"first, resume(step=...) to go on from an earlier one, or give another folder"
                )
        elif step < self._at:
            raise CheckpointError(
                f"step {step} comes before step {self._at} of this run: steps must rise. "
                f"resume(step=...) continues from an earlier one"
            )
        else:
            self._drop([later for later in self._folders.all() if later > self._at and self._folders.is_saved(later)])
        if self._keeping is None and not self._left:
            leave_kept_steps(self._folders.run)
            self._left = True

    def _drop(self, later: list[int]) -> None:
        """They must be gone before the next save is whole: a crash in between must not bring them back."""
        if later:
            assert self._at is not None
            log.warning("%s: dropping %s: the training went on from %s", self._folders.run.path, later, self._at)
            self._folders.set_latest(self._at)
        for step in reversed(later):
            self._folders.set_aside(step)

    def _collect(self, most: int = 0) -> None:
        """Wait until at most so many saves are running. An error of one is raised on all ranks."""
        while len(self._pending) > most:
            step, handle, _ = self._pending.popleft()
            if handle.error is None:  # otherwise it was raised by a wait() of the caller
                handle.wait()
                self._conclude(Callers("Run", self._group), step)

    def _collect_all(self) -> None:
        """Wait for all saves, also after an error of one: nobody else may write meanwhile."""
        errors = list[CheckpointError]()
        while self._pending:
            try:
                self._collect(len(self._pending) - 1)
            except CheckpointError as error:
                errors.append(error)
        for other in errors[1:]:
            errors[0].add_note(f"and {other}")
        if errors:
            raise errors[0]

    def _done(self) -> int:
        """How many saves have ended, the oldest first."""
        return len(list(takewhile(lambda one: one.handle.done(), self._pending)))

    def _collect_if_done(self, callers: Callers) -> None:
        if self._pending:
            _, done = callers.tell(lambda: (None, self._done()))
            self._collect(len(self._pending) - min(done.values()))

    def _conclude(self, callers: Callers, step: int) -> None:
        """The step is whole on all ranks: say so, and remove old ones. What fails here is tried again at the next."""
        if callers.first:
            try:
                self._folders.check_directory()
                self._folders.set_latest(step)
                in_use = {one.earlier for one in self._pending if one.earlier is not None}
                self._retention.remove_old(self._folders, step, in_use)
            except CheckpointError as error:
                log.warning("step %s is saved, but old steps could not be removed: %s", step, error)

    # --- what is there ------------------------------------------------------------------------------------------------

    def steps(self) -> list[int]:
        """The steps that are whole, ascending."""
        callers = self._callers_in_place("Run.steps")
        self._collect_if_done(callers)
        return callers.by_first(lambda: list(self._folders.whole())[::-1])

    def latest(self) -> int | None:
        """The newest step that is whole; None if there is none."""
        callers = self._callers_in_place("Run.latest")
        self._collect_if_done(callers)
        return callers.by_first(lambda: next(self._folders.whole(), None))

    def path(self, step: int) -> str:
        """The path or URL of a step, for `checkpoint.open` and `load`. Each rank may call it alone."""
        return self._folders.path_of(_checked_step(step))

    # --- resume -------------------------------------------------------------------------------------------------------

    def resume(self, into: dict[Any, Any] | torch.nn.Module, *, step: int | None = None, **options: Any) -> int | None:
        """Load the newest step that is whole on all ranks; returns its number, or None if there is none.

        A damaged step is named in a warning of the logger "shardwise", and the one before it is loaded. If all are
        damaged, that is an error: training must not start anew unnoticed. So are values that do not fit `into`.
        With `memory=` steps in memory count, too: what is there of a step is taken from there, the rest from the disk.
        `step`: load this one, and no other. `options` are those of `checkpoint.load`.
        """
        resuming = Resuming(self._callers_in_place("Run.resume"), self._folders, into, options, self._keeping)
        self._collect()
        if step is None:
            found = resuming.newest()
        else:
            number, _ = resuming.callers.tell(lambda: (_checked_step(step), None), {"step": brief(step)})
            found = resuming.one(number)
        if found is not None:
            self._at, self._resumed = found, resuming.resumed
        return found

    @property
    def resumed(self) -> Resumed | None:
        """From where the last `resume` has loaded its step: memory or disk. None if nothing was loaded."""
        return self._resumed

    # --- stop ---------------------------------------------------------------------------------------------------------

    def save_on(self, *signals: int) -> None:
        """After any rank has received such a signal, `should_stop` is true on all ranks. `close` ends this.

        Each rank calls it, in its main thread. The handler only records the signal, however often it comes.
        """
        self._callers("Run.save_on")
        self._signals.watch(*signals)

    def should_stop(self) -> bool:
        """True on all ranks, in the same step, after one of them received a signal of `save_on`: then save, and end.

        All ranks call it in every step, or in every tenth. It takes one message between all ranks.
        """
        callers = self._callers("Run.should_stop")
        mine, done = self._signals.received is not None, self._done() > 0
        if callers.transport is None:
            stop = mine
        else:
            stopping, finished = total_of_all(callers.transport, "Run.should_stop", [mine, done])
            stop, done = stopping > 0, finished == len(callers.owners)
        if done:
            self._collect(len(self._pending) - 1)
        if stop and not self._stopping and callers.first:
            log.warning("%s: a rank has received a signal: stopping", self._folders.run.path)
        self._stopping = self._stopping or stop
        return self._stopping


def _checked_step(step: object) -> int:
    """Whole numbers of any type, such as numpy's."""
    try:
        number = None if isinstance(step, bool) else whole_number(step)  # type: ignore[arg-type]
    except TypeError:
        number = None
    if number is None:
        raise TypeError(f"a step is a whole number, not {brief(step)}")
    if number < 0:
        raise ValueError(f"a step is not negative, but {brief(number)} is given")
    if number >= STEPS:
        raise ValueError(f"a step is less than {STEPS}, but {brief(number)} is given")
    return number
