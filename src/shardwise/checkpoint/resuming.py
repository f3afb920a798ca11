"""Load the newest step of a run that is whole on all ranks."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property, partial
from hashlib import blake2b
from typing import Any

import torch
import torch.distributed as dist

from shardwise.checkpoint.damage import DamagedBlocksError
from shardwise.checkpoint.keeping import FoundStep, Keeping
from shardwise.checkpoint.kept_loading import KeptLoad, Resumed
from shardwise.checkpoint.loading import load
from shardwise.checkpoint.step_folders import StepFolders
from shardwise.checkpoint.structure import structural_damage
from shardwise.errors import CheckpointError
from shardwise.job.agree import Callers
from shardwise.quoting import brief

log = logging.getLogger("shardwise")


@dataclass
class Resuming:
    """What all ranks load into, and from which run; `options` are those of `load`. `resumed` says what was loaded.

    `keeping`: steps may be in memory, too.
    """

    callers: Callers
    folders: StepFolders
    into: dict[Any, Any] | torch.nn.Module
    options: Mapping[str, Any]
    keeping: Keeping | None = None
    resumed: Resumed | None = None

    @cached_property
    def kept(self) -> dict[int, list[FoundStep]]:
        """Steps in memory."""
        return {} if self.keeping is None else self.keeping.find(self.callers)

    def newest(self) -> int | None:
        """Load the newest step that is whole; None if there is none. All damaged is an error."""
        problems, below = list[str](), None
        while (found := self._candidate(below)) is not None:
            step, saved = found
            problem = self.problem(step, saved=saved)
            if problem is None:
                return step
            if saved:  # a step in memory may never have been whole
                problems.append(f"step {step} is not whole: {problem}")
            if self.callers.first:
                log.warning("%s: step %s is not whole: %s", self.folders.run.path, step, problem)
            below = step
        if problems:
            raise CheckpointError(
                f"{self.folders.run.path} has no step that is whole. {'; '.join(problems)}. To start anew, give "
                f"another folder, or remove these steps and the file latest"
            )
        return None

    def one(self, step: int) -> int:
        """Load this step, or raise; returns its number."""
        kept = step in self.kept
        saved = self.callers.by_first(lambda: self._is_saved(step, kept=kept))
        problem = self.problem(step, saved=saved)
        if problem is not None:
            raise CheckpointError(f"{self.folders.run.path}: step {step} is not whole: {problem}")
        return step

    def _is_saved(self, step: int, *, kept: bool) -> bool:
        if self.folders.is_saved(step):
            return True
        if not kept:
            saved = [other for other in self.folders.all() if self.folders.is_saved(other)]
            raise CheckpointError(f"{self.folders.run.path} has no step {step}: it has {brief(saved)}")
        return False

    def _candidate(self, below: int | None) -> tuple[int, bool] | None:
        """The next step to load, and whether it is one on the disk."""
        kept = [step for step in self.kept if below is None or step < below]
        saved = self.callers.by_first(partial(self._saved_candidate, below))
        found = max([*kept, *([] if saved is None else [saved])], default=None)
        return None if found is None else (found, found == saved)

    def _saved_candidate(self, below: int | None) -> int | None:
        """The newest that was saved, or that `latest` names though it was lost."""
        latest, there = self.folders.latest(), self.folders.all()
        steps = sorted({*there, *([] if latest is None else [latest])}, reverse=True)
        older = (step for step in steps if below is None or step < below)
        return next((step for step in older if step == latest or self.folders.is_saved(step)), None)

    def problem(self, step: int, *, saved: bool) -> str | None:
        """Load it. Returns why it is not whole on all ranks, if that is why it cannot be loaded."""
        why = "it is neither in memory nor on the disk"
        for found in self.kept.get(step, []):
            problem = self._from_memory(found)
            if problem is None:
                return None
            why = f"in memory, {problem}"
        return (self._difference(step) or self._load(step)) if saved else why

    def _from_memory(self, step: FoundStep) -> str | None:
        assert self.keeping is not None, "it has found the step"
        path, group = self.folders.path_of(step.number), _given(self.callers.group)
        kept = KeptLoad(self.callers, self.keeping, step, path, self.into, group)

        def attempt() -> tuple[Exception | None, str | None]:
            try:
                result = kept.run(self.options)
            except DamagedBlocksError as error:
                return None, str(error)
            except Exception as error:  # raised on all ranks
                return error, None
            self.resumed = result if isinstance(result, Resumed) else None
            return None, result if isinstance(result, str) else None

        error, problems = self.callers.tell(attempt)
        _, failed = self.callers.tell(lambda: (None, error and f"{type(error).__name__}: {error}"))
        if any(failed.values()):
            rank = next(rank for rank, text in failed.items() if text)
            raise error or CheckpointError(f"rank {rank}: {failed[rank]}")
        return next((problem for problem in problems.values() if problem), None)

    def _difference(self, step: int) -> str | None:
        """Why ranks cannot load a step together: not all of them see the same index, or the first one lacks files."""

        def look() -> tuple[None, tuple[str | None, str | None]]:
            damage = self.folders.damage(step) if self.callers.first else None
            return None, (damage, _digest(self.folders.index_bytes(step)))

        _, seen = self.callers.tell(look)
        (first, (damage, digest)), *others = seen.items()
        if damage is not None:
            return damage
        for rank, (_, other) in others:
            if other != digest:
                return f"rank {rank} does not see it" if other is None else f"ranks {first} and {rank} see others"
        return None

    def _load(self, step: int) -> str | None:
        path = self.folders.path_of(step)

        def attempt() -> tuple[Exception | None, str | None]:
            try:
                report = load(path, self.into, group=_given(self.callers.group), **self.options)
            except Exception as error:  # raised on all ranks, unless the step is damaged
                return error, f"{type(error).__name__}: {error}"
            self.resumed = Resumed(step, memory=0, other_hosts=0, disk=report.read)  # on this rank, until all are done
            return None, None

        error, by_rank = self.callers.tell(attempt)
        failed = {rank: text for rank, text in by_rank.items() if text is not None}
        if not failed:
            self.resumed = self._on_all_ranks()
            return None
        damage = str(error) if isinstance(error, DamagedBlocksError) else structural_damage(path, self.callers)
        if damage is None or self.options.get("strict") is False:  # an earlier step may lack what was filled already
            raise error or CheckpointError(f"rank {min(failed)}: {failed[min(failed)]}")
        return damage

    def _on_all_ranks(self) -> Resumed | None:
        _, read = self.callers.tell(lambda: (None, self.resumed and self.resumed.disk))
        return self.resumed and self.resumed._replace(disk=sum(one or 0 for one in read.values()))


def _digest(data: bytes | None) -> str | None:
    return None if data is None else blake2b(data, digest_size=16).hexdigest()


def _given(group: dist.ProcessGroup | None) -> dist.ProcessGroup | None:
    """The group to load with: the default one if there is one."""
    return group if group is not None or not dist.is_initialized() else dist.group.WORLD
